"""Third-party code that leaves a trace if it is executed."""

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
