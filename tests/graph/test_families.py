"""Families of networks that once came out wrong in silence: each is exact now, at other batch sizes too.

Every parameter and buffer is away from special values, but for those whose special value is the point.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import paam
from networks import compacted, lively, random_choice, relative_error
from paam.errors import GraphError
from paam.graph.network import Network, prepare
from paam.graph.path import strongest_path
from paam.pruning.inspection import inspect

GENERATOR = torch.Generator().manual_seed(0)


def conv(inputs: int, outputs: int, **options) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1, **options)


def images(batch: int, size: int = 8) -> Tensor:
    return torch.randn(batch, 3, size, size, dtype=torch.float64, generator=GENERATOR)


class Standardised(nn.Conv2d):
    """Weights standardised over their inputs, with a gain, as in NFNets."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.zeros(self.out_channels, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        weight = self.gain * weight / (weight.std((1, 2, 3), keepdim=True) + 1e-5)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * 0.25, self.bias)


class Ignoring(nn.Linear):
    """It does not use its bias."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Squashed(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(super().forward(x))


class Net(nn.Module):
    """stem and mid, gated each; what is in question; last and head."""

    def __init__(self, function: Callable[[Net, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.stem, self.mid, self.norm, self.last = conv(3, 8), conv(8, 8), nn.BatchNorm2d(8), conv(8, 6)
        self.head, self.function = nn.Linear(6, 3), function
        self.g = nn.Parameter(torch.randn(8))
        self.w = nn.Parameter(torch.rand(3))
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.mid(F.relu(self.stem(x))))
        return self.head(F.relu(self.last(self.function(self, y))).mean((2, 3)))


def check(model: nn.Module, batch: int = 1, size: int = 8, **options: str) -> None:
    """Small equals gated for random plans, and again on other weights; the gated one is read off the model itself."""
    network = prepare(model, images(batch, size), **options)
    for seed in range(8):
        choice = random_choice(network, seed, empty=0.25)
        plan = network.plan(choice)
        pairs = [(network, network.compact(plan))]
        moved = lively(copy.deepcopy(model), seed=seed + 1)
        again = prepare(moved, images(batch, size), **options)
        pairs.append((again, again.compact(plan)))
        for gated, small in pairs:
            pruner = paam.Pruner(gated.traced.model, images(batch, size), scorer="free", inplace=True, **options)
            pruner.use(paam.Selection(plan, 0.5, 1.0, 1.0))
            with pruner.weighting():
                pass
            pruner._all_gates.mode = "binary"
            for other in (1, 2, 3):
                x = images(other, size)
                with torch.no_grad():
                    assert relative_error(small.eval()(x), pruner.model.eval()(x)) < 1e-9


def own_number_of_a_layer(m: Net, y: Tensor) -> Tensor:
    return y * m.mid.out_channels**-0.5


def layers_compared(m: Net, y: Tensor) -> Tensor:
    z = m.last.in_channels == m.mid.out_channels
    return y + F.relu(y) if z and m.stem.out_channels == m.mid.in_channels else y


def shape_of_a_weight(m: Net, y: Tensor) -> Tensor:
    return y / m.mid.weight.shape[0]


def counted_in_a_loop(m: Net, y: Tensor) -> Tensor:
    for _ in range(m.mid.out_channels // 4):
        y = y + 1
    return y


EXACT: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "a parameter with axes put in": lambda m, y: m.g[:, None, None] * y,
    "a parameter viewed": lambda m, y: y * m.g.view(8, 1, 1),
    "a parameter unsqueezed": lambda m, y: y + m.g.unsqueeze(-1).unsqueeze(-1),
    "a mean over channels, transposed": lambda m, y: y * y.mean(1, True).transpose(1, 2),
    "tokens times one of them": lambda m, y: _tokens(y),
    "a parameter summed": lambda m, y: y * m.g.sum(0) * m.w.softmax(0)[1],
    "fast fusion": lambda m, y: (m.w.relu()[0] * y + m.w.relu()[1] * F.relu(y)) / (m.w.relu().sum() + 1e-4),
    "the batch mixed in": lambda m, y: y * y.reshape(1, -1, *y.shape[2:]).amax(1),
    "the number of channels of a layer": own_number_of_a_layer,
    "layers compared by their numbers": layers_compared,
    "the shape of a weight": shape_of_a_weight,
    "a loop over a layer's number": counted_in_a_loop,
    "chunks as a list": lambda m, y: torch.cat([*reversed(list(y.chunk(2, 1)))], 1),
    "uneven parts": lambda m, y: torch.cat([y.split([3, 5], 1)[1].sigmoid(), *y.split([3, 5], 1)[:1]], 1),
    "every channel by itself": lambda m, y: torch.stack([*y.unbind(1)][::-1], 1),
    "gated linear unit": lambda m, y: F.glu(torch.cat([y, y.sin()], 1), 1),
    "where": lambda m, y: torch.where(y > 0.1, y, y * m.g.view(-1, 1, 1)),
    "narrowed, flipped, rolled": lambda m, y: torch.cat([y.narrow(1, 2, 6).flip(1), y[:, :2]], 1).roll(1, 1),
    "the values of a maximum": lambda m, y: y - y.max(1, keepdim=True).values,
    "a slope for each channel": lambda m, y: F.prelu(y, m.g),
    "linear as a function": lambda m, y: F.linear(y.permute(0, 2, 3, 1), torch.outer(m.g, m.g)).permute(0, 3, 1, 2),
    "detached": lambda m, y: y.clone() * y.detach().sigmoid(),
}


def _tokens(y: Tensor) -> Tensor:
    tokens = y.flatten(2).transpose(1, 2)
    return (tokens * tokens.mean(1, keepdim=True)).transpose(1, 2).reshape(y.shape)


@pytest.mark.parametrize("streams", ["independent", "tied"])
@pytest.mark.parametrize("name", EXACT)
def test_exact(name: str, streams: str) -> None:
    for batch in (1, 2):
        check(lively(Net(EXACT[name])), batch, streams=streams)


OWN: dict[str, Callable[[], tuple[Callable[[Net, Tensor], Tensor], dict[str, nn.Module]]]] = {
    "standardised, its gain at zero": lambda: (lambda m, y: m.own(y), {"own": Standardised(8, 8, 3, padding=1)}),
    "a linear layer that scales": lambda: (_through_own_linear, {"own": Scaled(8, 8), "flat": nn.BatchNorm1d(8)}),
    "a linear layer, no bias": lambda: (_through_own_linear, {"own": Ignoring(8, 8), "flat": nn.BatchNorm1d(8)}),
    "zero mapped to something else": lambda: (
        lambda m, y: y + m.own(F.relu(m.inner(y))),
        {"inner": conv(8, 8, bias=False), "own": Squashed(8, 8, 3, padding=1, bias=False)},
    ),
    "weight norm": lambda: (lambda m, y: m.own(y), {"own": weight_norm(conv(8, 8))}),
    "spectral norm": lambda: (lambda m, y: m.own(y), {"own": spectral_norm(conv(8, 8)).eval()}),
    "root mean square norm": lambda: (
        lambda m, y: m.own(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
        {"own": nn.RMSNorm(8)},
    ),
    "synchronised batch norm": lambda: (lambda m, y: m.own(y), {"own": nn.SyncBatchNorm(8)}),
}


def _through_own_linear(m: Net, y: Tensor) -> Tensor:
    return y * m.own(m.flat(y.mean((2, 3))))[:, :, None, None]


@pytest.mark.parametrize("name", OWN)
def test_own_layers(name: str) -> None:
    function, layers = OWN[name]()
    model = lively(Net(function, **layers))
    if isinstance(model.own, Standardised):
        nn.init.zeros_(model.own.gain)
    check(model)


def test_an_own_layer_of_which_all_inputs_are_gone_leaves_what_it_makes_of_zero() -> None:
    function, layers = OWN["zero mapped to something else"]()
    exact_without(Net(function, **layers), "inner")


def test_a_plan_made_at_a_special_point_holds_when_weights_move() -> None:
    """The gain of an NFNet is zero when it is built, and moves in training: the plan must be the same."""
    model = lively(Net(lambda m, y: y + m.own(y), own=Standardised(8, 8, 3, padding=1)))
    nn.init.zeros_(model.own.gain)
    before = prepare(model, images(1))
    nn.init.normal_(model.own.gain, generator=GENERATOR)
    after = prepare(model, images(1))
    assert before.traced.fingerprint == after.traced.fingerprint
    choice = random_choice(before, 3, empty=0)
    shapes = [{k: v.shape for k, v in n.compact(n.plan(choice)).state_dict().items()} for n in (before, after)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("way", ["split", "unbind"])
def test_sizes_of_parts_that_nobody_else_reads(way: str) -> None:
    """The group that is emptied makes the parts; another one, that stays, is multiplied by what their shapes say."""

    class Sized(Net):
        def forward(self, x: Tensor) -> Tensor:
            before = F.relu(self.stem(x))
            y = self.norm(self.mid(before))
            parts = y.split(4, 1) if way == "split" else y.unbind(1)
            z = before * (parts[0].shape[-1] / len(parts))
            return self.head(F.relu(self.last(z + y)).mean((2, 3)))

    exact_without(Sized(lambda m, y: y), "mid")


def exact_without(model: nn.Module, emptied: str) -> None:
    """One group alone is emptied: the small network's answers are the gated one's, and differ from image to image."""
    pruner = paam.Pruner(lively(model), images(2), scorer="free")
    assert emptied in {group.name for group in pruner.network.groups}
    small = compacted(pruner, {g.name: np.full(g.width, g.name != emptied) for g in pruner.network.groups})
    assert not hasattr(small, emptied)
    with torch.no_grad():
        for batch in (1, 2, 3):
            x = images(batch)
            assert relative_error(small(x), pruner.model.eval()(x)) < 1e-9
        assert relative_error(*small(images(2)).split(1)) > 1e-3


@pytest.mark.parametrize("keep_class", [False, True])
def test_parts_of_channels_leave_the_class(keep_class: bool) -> None:
    """With tied streams the parts keep as many channels, and x.chunk(2, 1) of fewer channels has two parts, too."""
    model = lively(Net(lambda m, y: torch.cat([*reversed(list(y.chunk(2, 1)))], 1)))
    pruner = paam.Pruner(model, images(2), scorer="free", streams="tied", keep_class=keep_class)
    widths = {group.name: group.width for group in pruner.network.groups}
    assert widths == {"stem": 8, "mid": 4, "last": 6}
    small, x = compacted(pruner, {name: np.arange(width) % 2 == 0 for name, width in widths.items()}), images(3)
    assert type(small) is Net
    with torch.no_grad():
        assert relative_error(small(x), pruner.model.eval()(x)) < 1e-9


def test_of_equally_weak_paths_the_strongest_is_kept() -> None:
    """The first layer's best score is the weakest of every path; the others still keep their best."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.head = conv(3, 5), conv(5, 6), conv(6, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.c(self.b(self.a(x))).mean((2, 3)))

    network: Network = prepare(Chain(), torch.zeros(1, 3, 8, 8))
    scores = {
        "a": [0.3, 0.2, 0.1, 0.1, 0.1],
        "b": [0.31, 0.95, 0.9, 0.85, 0.8, 0.1],
        "c": [0.4, 0.99, 0.2, 0.1],
    }
    kept = network.strongest_path({name: np.array(values) for name, values in scores.items()})
    assert kept == {"a": {0}, "b": {1}, "c": {1}}
    assert strongest_path(network.ops, network._at_sites({n: np.array(v) for n, v in scores.items()}))


def test_a_difference_is_refused_and_the_layer_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that is wrong, here one that takes sigmoid for a function that keeps zero, is found out by the check."""
    from paam.graph.rules import elementwise

    right = elementwise._of_zeros
    monkeypatch.setattr(elementwise, "_of_zeros", lambda site, inputs: (np.int8(1), right(site, inputs)[1]))
    network = prepare(lively(Net(lambda m, y: torch.sigmoid(y) + y)), images(1))  # two readers: the gate stands before
    choice = {g.name: np.arange(g.width) % 2 == 0 for g in network.groups}
    plan = network.plan(choice)
    with pytest.raises(GraphError, match=r"would compute something else .* the two part at '"):
        network.compact(plan)
    network.compact(plan, check=False)


def test_a_decision_by_values_is_named_refused_or_fixed() -> None:
    def decided(m: Net, y: Tensor) -> Tensor:
        return y * 2 if y.sum() > 1e9 else y

    model = lively(Net(decided))
    with pytest.raises(GraphError, match=r"decides by the values of tensors: __bool__\(\) at test_families.py:\d+"):
        prepare(model, images(1))
    network = prepare(model, images(1), on_decision="fix")
    assert len(network.traced.fixed) == 1
    assert "= False" in network.traced.fixed[0]
    plan = network.plan(random_choice(network, 0, empty=0))
    assert network.compact(plan).eval()(images(2)).shape == (2, 3)


def test_a_graph_says_when_an_input_takes_another_way() -> None:
    def by_size(m: Net, y: Tensor) -> Tensor:
        return F.max_pool2d(y, 2) if y.shape[-1] > 10 else y

    model = lively(Net(by_size))
    network = prepare(model, images(1, 8), streams="independent")
    choice = random_choice(network, 1, empty=0)
    pruner = paam.Pruner(model, images(1, 8), scorer="free")
    with pytest.raises(GraphError, match="takes another way for an input of this size"):
        pruner.model.eval()(images(1, 16))
    assert network.compact(network.plan(choice)).eval()(images(4)).shape == (4, 3)


def test_one_batch_size_is_found_out() -> None:
    def of_two(m: Net, y: Tensor) -> Tensor:
        return y.view(2, 8, 8, 8)

    network = prepare(lively(Net(of_two)), images(2))
    assert network.traced.one_batch_size
    assert inspect(network).limits == ("valid at the example's batch size only (2): it takes another way at others",)
    assert not prepare(lively(Net(lambda m, y: y)), images(2)).traced.one_batch_size
