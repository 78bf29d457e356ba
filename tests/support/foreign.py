"""Code of somebody else's, which leaves a trace where it is run."""

from __future__ import annotations

NET = """
import pathlib

pathlib.Path("ran").touch()

from torch import nn


def make(num_classes, in_channels):
    return nn.Sequential(
        nn.Conv2d(in_channels, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, num_classes),
    )
"""
