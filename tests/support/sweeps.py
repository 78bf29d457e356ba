"""Sweeps over a minimal recipe, whose runs can be paused."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

import paam.cli

# A training step waits while a file `hold` exists in the working directory.
NET = """
import pathlib
import time

from torch import nn


class Held(nn.Linear):
    def forward(self, x):
        while x.requires_grad and pathlib.Path("hold").exists():
            pathlib.Path("reached").touch()
            time.sleep(0.01)
        return super().forward(x)


def make(num_classes, in_channels):
    return nn.Sequential(
        nn.Conv2d(in_channels, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), Held(6, num_classes),
    )
"""
RECIPE = """
description = "as small as can be"
[model]
name = "held_net:make"
[data]
name = "digits"
batch_size = 512
crop = 1
flip = false
[target]
keep_macs = 0.7
[schedule]
warmup = 1
cycles = 1
score = 1
weight = 1
finetune = 1
[train]
threads = 1
"""


def sweep(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    """The command in this process; its runs are separate processes."""
    monkeypatch.setattr(sys, "argv", ["paam", "sweep", *arguments, "--device=cpu", "--trust-code"])
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_:
        paam.cli.main()
    captured = capsys.readouterr()
    return exit_.value.code or 0, captured.out, captured.err


def wait_for(condition, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, "the sweep has ended"
        assert time.monotonic() < deadline, "nothing happens"
        time.sleep(0.01)


SWEEP = [sys.executable, "-m", "paam", "sweep", "tiny.toml", "--out=out", "--device=cpu", "--trust-code"]
