"""Public checkpoints on the real test set: data reading, normalisation, model and evaluation, end to end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paam.artifacts.weights import load_weights
from paam.data import load_data
from paam.data.batches import EvaluationBatches, Normalization
from paam.models import MODELS
from paam.train.evaluation import accuracy


@pytest.fixture(scope="module")
def cifar10(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = Path(__file__).parents[3] / "shared" / "data" / "cifar10" / "unpack.py"
    if not source.is_file():
        pytest.skip("CIFAR-10 is not beside this repository")
    target = tmp_path_factory.mktemp("cifar10")
    subprocess.run([sys.executable, str(source), str(target)], check=True, capture_output=True)
    return target


@pytest.mark.slow
@pytest.mark.parametrize(("name", "published"), [("resnet20", 91.73), ("resnet56", 93.39)])
def test_public_checkpoints_score_what_was_published(name: str, published: float, cifar10: Path, shared: Path) -> None:
    data = load_data("cifar10", directory=str(cifar10), image_size=None, holdout=0.0, seed=0)
    model = MODELS[name]()
    load_weights(model, shared / "weights" / f"cifar10-{name}.safetensors", "model.weights")
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    found = accuracy(model, EvaluationBatches(data.test, Normalization(data.mean, data.std), device="cpu"))
    torch.set_num_threads(threads)
    assert found == pytest.approx(published, abs=0.005)
