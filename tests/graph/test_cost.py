"""The counter: exact published counts, agreement with torch's own flop counter, and the names of what it skipped."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from paam import count, measure_latency
from paam.artifacts.latency import compare, peak_memory
from paam.graph.network import prepare
from paam.models import MODELS, resnet56

PARAMETERS = {
    "resnet20": 269_722,
    "resnet32": 464_154,
    "resnet44": 658_586,
    "resnet56": 853_018,
    "resnet110": 1_727_962,
    "vgg16_bn": 14_724_042,  # 13 convolutions of 3 x 3 (14,710,464), their batch norms (8,448), 512 x 10 + 10
}
MACS = {"resnet56": 125_485_696, "resnet110": 252_887_680}


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_counts(name: str) -> None:
    model, image = MODELS[name](), torch.zeros(2, 3, 32, 32)
    counted = count(model, image)
    assert counted.params == PARAMETERS[name]
    assert counted.macs == MACS.get(name, counted.macs)
    with FlopCounterMode(display=False) as flops:
        model(image)
    assert flops.get_total_flops() == 2 * 2 * counted.macs  # two images, two operations per MAC
    dense = prepare(model, image).dense
    assert (dense.params, dense.macs) == (counted.params, counted.macs)


def test_hand_worked_layers() -> None:
    model = nn.Sequential(
        nn.Conv2d(4, 6, (3, 5), stride=2, groups=2),  # out 6 x 3 x 2, each from 2 * 15 weights
        nn.ReLU(),
        nn.ConvTranspose2d(6, 4, 2, stride=2),  # each of 6 * 3 * 2 inputs spreads over 4 * 4 weights
        nn.Flatten(),
        nn.Linear(4 * 6 * 4, 10),
    )
    counted = count(model, torch.zeros(3, 4, 8, 8))
    assert counted.macs == 6 * 3 * 2 * 30 + 6 * 3 * 2 * 16 + 96 * 10
    assert counted.params == (6 * 2 * 15 + 6) + (6 * 4 * 4 + 4) + (96 * 10 + 10)
    assert counted.uncounted == {"relu": 1, "flatten": 1}


def test_functional_products_are_counted_too() -> None:
    class Attention(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ x.transpose(1, 2)).softmax(-1).matmul(x)

    counted = count(Attention(), torch.zeros(2, 5, 3))
    assert counted.macs == 2 * (5 * 5 * 3)
    assert counted.uncounted == {"transpose": 1, "softmax": 1}


def test_what_was_not_counted_is_named() -> None:
    uncounted = count(resnet56(), torch.zeros(1, 3, 32, 32)).uncounted
    assert uncounted == {
        "batch_norm": 55,
        "relu": 55,
        "add": 27,
        "__getitem__": 2,
        "pad": 2,
        "adaptive_avg_pool2d": 1,
        "flatten": 1,
    }


def test_counting_leaves_the_model_alone() -> None:
    model = resnet56().train()
    model.bn1.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    count(model, torch.randn(2, 3, 32, 32))
    assert model.training
    assert not model.bn1.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_latency_has_a_spread_and_the_models_take_turns() -> None:
    order: list[str] = []

    class Named(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            order.append(self.name)
            return x

    models = {"a": Named("a"), "b": Named("b")}
    found = measure_latency(models, torch.zeros(1), repeats=5, warmup=1)
    assert order == ["a", "b"] + ["a", "b"] * 5
    assert all(0 < m.low <= m.median <= m.high for m in found.values())


def test_peak_memory_is_what_is_alive_at_once() -> None:
    """Linear 10 -> 100, in place, -> 1 for 4 samples of float32: 100 and 1 values each are alive together at most."""
    model = nn.Sequential(nn.Linear(10, 100), nn.ReLU(inplace=True), nn.Linear(100, 1))
    assert peak_memory(model, torch.zeros(4, 10)) == 4 * 4 * (100 + 1)

    class Skip(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = x + 1
            return first.view(-1) * 2  # the view keeps what it was made of

    assert peak_memory(Skip(), torch.zeros(1000)) == 2 * 4000


def test_compared_networks_come_in_the_order_given() -> None:
    models = {"dense": nn.Linear(8, 8), "pruned": nn.Linear(8, 2)}
    rows = compare(models, torch.zeros(4, 8), repeats=2)
    assert [(row.network, row.mode) for row in rows] == [("dense", "eager"), ("pruned", "eager")]
    assert [row.memory for row in rows] == [4 * 4 * 8, 4 * 4 * 2]
    assert all(row.throughput == 4000 / row.latency.median for row in rows)
