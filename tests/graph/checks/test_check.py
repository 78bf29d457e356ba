"""What the check of every small network needs to find a difference, and what it does about one.

Faults are planted in rules and layers of paam itself. Each is one that a check with a part left out would not find.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from networks import compacted, lively, relative_error
from paam import Pruner
from paam.errors import GraphError
from paam.graph import compact as compacting
from paam.graph.channel_map import ChannelMap
from paam.graph.network import Choice, Network, prepare
from paam.graph.rules import elementwise
from paam.graph.rules.site import Site

GENERATOR = torch.Generator().manual_seed(0)


def images(batch: int) -> Tensor:
    return torch.randn(batch, 3, 8, 8, dtype=torch.float64, generator=GENERATOR)


def conv(inputs: int, outputs: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1)


def every_second(network: Network) -> Choice:
    return {group.name: np.arange(group.width) % 2 == 0 for group in network.groups}


class Chain(nn.Module):
    """Five convolutions; the ``function`` stands behind each but the last."""

    def __init__(self, function: Callable[[Chain, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d, self.e = conv(3, 8), conv(8, 8), conv(8, 8), conv(8, 8), conv(8, 4)
        self.gain, self.function = nn.Parameter(torch.ones(8)), function

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.a, self.b, self.c, self.d):
            x = self.function(self, layer(x))
        return self.e(x)


def unseen_number(model: Chain, y: Tensor) -> Tensor:
    """What recording does not see: how many weights a filter of c has, which falls with the filters of b."""
    with torch._C.DisableTorchFunction():
        filters = model.c.weight.shape[1]
    return F.relu(y) * filters**-0.5


def test_a_class_that_computes_something_else_is_given_a_graph() -> None:
    model = lively(Chain(unseen_number))
    pruner = Pruner(model, images(1), scorer="free")
    choice, x = every_second(pruner.network), images(3)
    small = compacted(pruner, choice)
    unchecked = pruner.network.compact(pruner.network.plan(choice), check=False).eval()
    with torch.no_grad():
        truth = pruner.model.eval()(x)
        assert isinstance(unchecked, Chain)
        assert relative_error(unchecked(x), truth) > 1e-3
        assert not isinstance(small, Chain)
        assert relative_error(small(x), truth) < 1e-9


def test_a_class_that_must_be_kept_is_refused_instead() -> None:
    network = prepare(lively(Chain(unseen_number)), images(1), keep_class=True)
    plan = network.plan(every_second(network))
    with pytest.raises(GraphError, match=r"would compute something else .*by .* of its largest value"):
        network.compact(plan)
    assert isinstance(network.compact(plan, check=False), Chain)


def sigmoids(model: Chain, y: Tensor) -> Tensor:
    """The gate stands before: two operations read y."""
    return y + model.gain[:, None, None] * torch.sigmoid(y)


def plant_at(monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Site], bool]) -> None:
    """Make the rule wrong that says what a function makes of zero: it shall keep it."""
    right = elementwise._of_zeros

    def planted(site: Site, inputs) -> tuple[np.int8, np.int8]:
        zero, const = right(site, inputs)
        return (elementwise.ZERO if wrong(site) else zero), const

    monkeypatch.setattr(elementwise, "_of_zeros", planted)


def test_gains_of_zero_hide_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the weights that the model has, the wrong network computes what it should: others show the difference."""
    plant_at(monkeypatch, lambda site: site.node.target is torch.sigmoid)
    model = lively(Chain(sigmoids))
    nn.init.zeros_(model.gain)
    pruner = Pruner(model, images(1), scorer="free")
    choice, x = every_second(pruner.network), images(3)
    plan = pruner.network.plan(choice)
    with pytest.raises(GraphError, match="would compute something else"):
        compacted(pruner, choice)
    unchecked = pruner.network.compact(plan, check=False).eval()
    with torch.no_grad():
        assert relative_error(unchecked(x), pruner.model.eval()(x)) < 1e-9


@pytest.mark.parametrize("batch", [1, 2])
def test_the_batch_size_of_the_example_hides_no_difference(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here index maps lose all samples beyond as many as the example has."""
    right = ChannelMap.forward

    def planted(self: ChannelMap, x: Tensor) -> Tensor:
        taken = right(self, x)
        return torch.cat([taken[:batch], 0 * taken[batch:]])

    monkeypatch.setattr(ChannelMap, "forward", planted)

    def mapped(model: Chain, y: Tensor) -> Tensor:
        return y + torch.tanh(y.roll(1, 1))  # the terms keep other channels

    pruner = Pruner(lively(Chain(mapped)), images(batch), scorer="free")
    choice, x = every_second(pruner.network), images(batch)
    with pytest.raises(GraphError, match="would compute something else"):
        compacted(pruner, choice)
    unchecked = pruner.network.compact(pruner.network.plan(choice), check=False).eval()
    with torch.no_grad():
        assert relative_error(unchecked(x), pruner.model.eval()(x)) < 1e-9


def refusal(network: Network) -> str:
    with pytest.raises(GraphError, match="would compute something else") as error:
        network.compact(network.plan(every_second(network)))
    return str(error.value)


@pytest.mark.parametrize(("number", "reader"), [("", "b"), ("_1", "c"), ("_2", "d"), ("_3", "e")])
def test_the_layer_behind_a_wrong_rule_is_named(number: str, reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A constant that is lost shows first in what reads it: a convolution, here with a gate behind."""
    plant_at(monkeypatch, lambda site: site.node.name == f"sigmoid{number}")
    assert f"the two part at '{reader}'" in refusal(prepare(lively(Chain(sigmoids)), images(1)))


@pytest.mark.parametrize("name", "abcde")
def test_the_layer_that_is_cut_in_a_wrong_way_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = lively(Chain(lambda m, y: F.relu(y)))
    right, victim = compacting.shrink_mix, model.get_submodule(name)
    victim.register_buffer("mark", torch.zeros(()))

    def planted(layer: nn.Module, *arguments, **keywords) -> None:
        right(layer, *arguments, **keywords)
        if hasattr(layer, "mark"):
            layer.weight = nn.Parameter(layer.weight * 1.01, False)

    monkeypatch.setattr(compacting, "shrink_mix", planted)
    assert f"the two part at '{name}'" in refusal(prepare(model, images(1)))


@pytest.mark.parametrize("name", ["first", "second"])
def test_a_gated_norm_that_is_cut_in_a_wrong_way_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own value has a gate behind it."""

    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = conv(3, 8), conv(8, 8), conv(8, 4)
            self.first, self.second = nn.BatchNorm2d(8), nn.BatchNorm2d(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.second(self.b(self.first(self.a(x)))))

    model = lively(Norms())
    right = compacting.shrink_per_channel
    model.get_submodule(name).register_buffer("mark", torch.zeros(()))

    def planted(layer: nn.Module, *arguments) -> None:
        right(layer, *arguments)
        if hasattr(layer, "mark"):
            layer.running_mean = layer.running_mean + 1

    monkeypatch.setattr(compacting, "shrink_per_channel", planted)
    assert f"the two part at '{name}'" in refusal(prepare(model, images(1)))
