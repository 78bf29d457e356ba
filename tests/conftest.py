"""What several tests share: networks with telling statistics, random choices of filters, the shared data if present."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import settings
from torch import nn

import paam.cli
from paam import Pruner
from paam.network import Choice, Network
from paam.select import Selection

torch.set_num_threads(1)  # layers here are small: a second thread costs more than it brings
settings.register_profile("paam", deadline=None)  # a busy machine is not a failure
settings.load_profile("paam")

SHARED = Path(__file__).parents[2] / "shared"


@pytest.fixture
def shared() -> Path:
    """Public checkpoints and CIFAR-10, where they lie beside the repository."""
    if not (SHARED / "weights").is_dir():
        pytest.skip("the public checkpoints and CIFAR-10 are not beside this repository")
    return SHARED


@pytest.fixture
def cli(monkeypatch, capsys):
    """Run the program in this process: exit code, standard output and standard error."""

    def call(*arguments: str) -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["paam", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            paam.cli.main()
        captured = capsys.readouterr()
        return SimpleNamespace(code=exit_.value.code or 0, out=captured.out, err=captured.err)

    return call


def lively(model: nn.Module, seed: int = 0) -> nn.Module:
    """float64, with every batch norm's statistics and affine parameters away from their defaults.

    A fresh batch norm maps zero to zero and would hide an offset that compaction drops.
    """
    generator = torch.Generator().manual_seed(seed)
    model = model.double().eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                for tensor, low, high in (
                    (module.running_mean, -0.5, 0.5),
                    (module.running_var, 0.5, 2.0),
                    (module.weight, 0.5, 1.5),
                    (module.bias, -0.5, 0.5),
                ):
                    if tensor is not None:
                        tensor.uniform_(low, high, generator=generator)
    return model


def random_choice(network: Network, seed: int, *, whole: float = 0.1, empty: float = 0.15) -> Choice:
    """Random kept filters: some groups whole, some emptied, the others at any share."""
    rng = np.random.default_rng(seed)
    choice = {}
    for group in network.groups:
        draw = rng.random()
        share = 1.0 if draw < whole else 0.0 if draw < whole + empty else rng.uniform(0.1, 0.9)
        mask = rng.random(group.width) < share
        choice[group.name] = mask
    return choice


def compacted(pruner: Pruner, choice: Choice) -> nn.Module:
    """The small network of a choice, in evaluation mode; the gated one is left with its binary gates closed."""
    pruner.use(Selection(pruner.network.plan(choice), 0.5, 1.0, 1.0))
    with pruner.weighting():
        pass
    return pruner.compact().eval()


def relative_error(value: torch.Tensor, truth: torch.Tensor) -> float:
    return float((value - truth).abs().max() / truth.abs().max().clamp(min=1e-12))
