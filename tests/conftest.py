"""What several tests share: the program in this process, the shared data if present."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import settings

import paam.cli

torch.set_num_threads(1)  # layers here are small: a second thread costs more than it brings
settings.register_profile("paam", deadline=None)  # a busy machine is not a failure
settings.load_profile("paam")
pytest.register_assert_rewrite("doubtful", "short_runs", "sweeps")  # what they find is shown as tests show it

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
