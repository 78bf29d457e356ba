"""Runs of a small network on the bundled digits, a few seconds each; their results, and ways to kill them."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from paam.config.recipe import Recipe, load_recipe

DIGITS = "digits-resnet20-kq"


class Small(nn.Module):
    """A residual block and a dropout: a stream, an inner layer, and a use of random numbers."""

    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 8, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 10, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(10)
        self.conv3 = nn.Conv2d(10, 8, 3, 1, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.1)
        self.linear = nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(x)))
        x = F.relu(x + self.bn3(self.conv3(y)))
        return self.linear(self.drop(F.adaptive_avg_pool2d(x, 1).flatten(1)))


def small(num_classes: int = 10, in_channels: int = 1) -> Small:
    return Small(num_classes, in_channels)


SCHEDULE = {"warmup": 2, "cycles": 2, "score": 2, "weight": 2, "finetune": 2, "control": True}
EPOCHS = 2 + 2 * (2 * (2 + 2) + 2)
# Phase of each epoch, written out.
FIRST_FINETUNE = 10
PHASES = ["warmup"] * 2 + (["score"] * 2 + ["weight"] * 2) * 2 + ["finetune"] * 2 + ["control"] * 10


def short(**changes) -> Recipe:
    overrides = {f"schedule.{key}": value for key, value in SCHEDULE.items()}
    overrides |= {"model.name": f"{__name__}:small", "data.batch_size": 256, "score.lr": 0.1}
    return load_recipe(DIGITS, overrides | {key.replace("__", "."): value for key, value in changes.items()})


def story(events: list[dict]) -> list[dict]:
    """The events without durations."""
    timed = ("seconds", "latency_ms")
    return [
        {
            key: {k: v for k, v in value.items() if k not in timed} if isinstance(value, dict) else value
            for key, value in event.items()
            if key not in timed
        }
        for event in events
        if event["event"] != "start"
    ]


def assert_same_weights(one: Path, other: Path) -> None:
    left, right = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name
    assert (one / "plan.json").read_bytes() == (other / "plan.json").read_bytes()


class Killed(BaseException):
    """As abrupt as a signal: nothing in paam catches it."""


def killer(kind: str, epoch: int | None = None):
    def watch(event: dict) -> None:
        if event["event"] == kind and epoch in (None, event.get("epoch")):
            raise Killed

    return watch


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


OWN = """
from torch import nn


def make(num_classes):
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(12, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, num_classes),
    )
"""
"""Source file of a user's network for colour images."""
