"""Layers that users derive from torch's own: what they do at some weights only, in training only, or by a function.

Each is cut exactly whatever its weights are, or kept whole.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paam
from networks import lively, random_choice, relative_error
from paam.errors import GraphError
from paam.graph.flows import LIVE, Flow, Mix, Pass, Whole
from paam.graph.network import prepare

GENERATOR = torch.Generator().manual_seed(0)
MAGNITUDES = (1.0, 30.0, 0.03)


def images(batch: int, size: int = 6) -> Tensor:
    return torch.randn(batch, 3, size, size, dtype=torch.float64, generator=GENERATOR)


def own(change: Callable[[Any, Tensor], Tensor]) -> type[nn.Conv2d]:
    """A convolution whose weight is another one: change(layer, weight)."""

    class Own(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return F.conv2d(x, change(self, self.weight), self.bias, self.stride, self.padding, groups=self.groups)

    return Own


class Net(nn.Module):
    """Two layers of one kind between others."""

    def __init__(self, kind: Callable[..., nn.Module], **options: Any) -> None:
        super().__init__()
        self.stem, self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), kind(**options), kind(**options)
        self.last, self.head = nn.Conv2d(8, 6, 3, padding=1), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(F.relu(self.stem(x))))
        return self.head(F.relu(self.last(F.relu(self.second(x)))).mean((2, 3)))


def flows(model: nn.Module) -> list[Flow]:
    """How channels flow through its layers of somebody's own."""
    return [op.flow for op in prepare(model.double(), images(2)).ops if op.node.target in ("first", "second")]


def check_at_all_magnitudes(model: nn.Module, plans: int = 2) -> None:
    """Small equals gated, also once the weights are larger and smaller, and the plans stay what they are."""
    model = lively(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for seed, magnitude in enumerate(MAGNITUDES * plans):
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(before[name] * (magnitude if name.startswith(("first", "second")) else 1))
        pruner = paam.Pruner(model, images(2), scorer="free", inplace=True)
        choice = random_choice(pruner.network, seed, empty=0.1)
        pruner.use(paam.Selection(pruner.network.plan(choice), 0.5, 1.0, 1.0))
        with pruner.weighting():
            pass
        small = pruner.compact().eval()
        x = images(3)
        with torch.no_grad():
            assert relative_error(small(x), pruner.model.eval()(x)) < 1e-9


def _clipped(layer: Any, w: Tensor) -> Tensor:
    """At three standard deviations, as before a quantisation."""
    return torch.max(torch.min(w, 3 * w.std()), -3 * w.std())


def _ternary(layer: Any, w: Tensor) -> Tensor:
    return torch.where(w.abs() > 0.7 * w.abs().mean(), w.sign(), torch.zeros_like(w))


def _ternary_filters(layer: Any, w: Tensor) -> Tensor:
    return torch.where(w.abs() > 0.7 * w.abs().mean((1, 2, 3), keepdim=True), w.sign(), torch.zeros_like(w))


def _causal(layer: Any, w: Tensor) -> Tensor:
    """Outputs read only inputs that stand before them."""
    return w * torch.ones(layer.out_channels, layer.in_channels, dtype=w.dtype).tril()[:, :, None, None]


def _orthogonal(layer: Any, w: Tensor) -> Tensor:
    return torch.linalg.qr(w.flatten(1).t())[0].t().view_as(w)


ROWS, WHOLE = "rows", "whole"
VALUES: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "a limit of each filter's norm": (lambda _, w: torch.renorm(w, 2, 0, 2.0), ROWS),
    "a limit of the whole norm": (lambda _, w: w / torch.clamp(w.norm() / 5, min=1), WHOLE),
    "clipped": (_clipped, WHOLE),
    "ternary": (_ternary, WHOLE),
    "ternary by filter": (_ternary_filters, ROWS),
    "causal": (_causal, WHOLE),
    "orthogonal": (_orthogonal, WHOLE),
    "the larger half": (lambda _, w: w * (w.abs() >= w.abs().median()), WHOLE),
    "a step of its largest": (lambda _, w: (w / w.abs().max() * 7).round() / 7 * w.abs().max(), WHOLE),
    "fixed steps": (lambda _, w: (w / 0.05).round().clamp(-8, 7) * 0.05, "cut"),
}
"""What is made of a weight; and what may be cut: outputs and inputs, outputs alone, nothing."""


@pytest.mark.parametrize("name", VALUES)
def test_what_some_weights_do_decides_for_all(name: str) -> None:
    change, cut = VALUES[name]
    kind = partial(own(change), 8, 8, 3, padding=1)
    expected = {
        "cut": Mix(8, 8, 1, True, False, own=True, dead=LIVE),
        ROWS: Mix(8, 8, 1, True, False, own=True, whole=True, dead=LIVE),
        WHOLE: Whole(8, True),
    }
    model = Net(kind)
    assert flows(model) == [expected[cut]] * 2
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(100)
    assert flows(model) == [expected[cut]] * 2
    check_at_all_magnitudes(model)


class MaxNorm(nn.Conv2d):
    """EEGNet's: the weight itself is changed by every call."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 1.0)
        return super().forward(x)


def test_a_layer_that_limits_its_own_weights() -> None:
    """It is cut as one whose filters depend on all of their inputs, or is refused in words."""
    try:
        check_at_all_magnitudes(Net(partial(MaxNorm, 8, 8, 3, padding=1)))
    except GraphError as refusal:
        assert "weight" in str(refusal)  # noqa: PT017


class Acting(nn.Conv2d):
    def __init__(self, *args: Any, act: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        act = self.act["act"] if isinstance(self.act, dict) else self.act
        return act(super().forward(x)) if act is not None else super().forward(x)


@pytest.mark.parametrize("wrap", [lambda act: act, lambda act: {"act": act}, partial])
@pytest.mark.parametrize("turned", [False, True])
def test_layers_that_differ_in_a_function_are_tried_one_by_one(wrap: Any, turned: bool) -> None:
    acts = [wrap(F.relu), wrap(lambda t: t.softmax(1))]
    model = Net(partial(Acting, 8, 8, 3, padding=1, bias=False, act=None))
    model.first.act, model.second.act = acts[::-1] if turned else acts
    found = flows(model)
    assert [type(flow) for flow in found] == ([Whole, Mix] if turned else [Mix, Whole])
    check_at_all_magnitudes(model)


def test_layers_alike_are_tried_once() -> None:
    tried = prepare(Net(partial(Acting, 8, 8, 3, padding=1, act=F.relu)).double(), images(2)).traced.tried
    assert len([key for key in tried if key[0] == "cut"]) == 1


class MixesInTraining(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y - y.mean(1, keepdim=True) if self.training else y


class DropsAndMixes(MixesInTraining):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5, self.training)


class LimitsItsGains(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        gains = self.weight / torch.clamp(self.weight.norm() / 10, min=1)
        return F.batch_norm(x, self.running_mean, self.running_var, gains, self.bias, self.training)


class MixesItsStatistics(nn.BatchNorm2d):
    """What it stores of a batch is of all channels; what it makes of it is not."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.training:
            self.running_var.fill_(float(self.running_var.mean()))
        return y


class Drops(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(F.relu(super().forward(x)), 0.5, self.training)


@pytest.mark.parametrize(
    ("kind", "flow"),
    [
        (MixesInTraining, Whole),
        (DropsAndMixes, Whole),
        (LimitsItsGains, Whole),
        (MixesItsStatistics, Whole),
        (Drops, Pass),
    ],
)
def test_norms_are_tried_in_training_too(kind: type[nn.BatchNorm2d], flow: type[Flow]) -> None:
    model = Net(partial(kind, 8))
    assert [type(found) for found in flows(model)] == [flow] * 2
    check_at_all_magnitudes(model)


class MixesFiltersInTraining(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y - y.mean(1, keepdim=True) if self.training else y


class DropsWeights(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, F.dropout(self.weight, 0.5, self.training), self.bias, 1, 1)


def test_convolutions_are_tried_in_training_too() -> None:
    found = [flows(Net(partial(kind, 8, 8, 3, padding=1)))[0] for kind in (MixesFiltersInTraining, DropsWeights)]
    assert [type(flow) for flow in found] == [Whole, Mix]


def test_trials_leave_the_model_and_the_random_numbers_as_they_are() -> None:
    model = lively(Net(partial(MaxNorm, 8, 8, 3, padding=1)))
    state = torch.random.get_rng_state()
    kept = copy.deepcopy(model.state_dict())
    from paam.graph.checks.trials import flow_by_trying

    assert flow_by_trying(model.first, Mix(8, 8, 1, True, False, own=True), (2, 8, 3, 3), {}) is not None
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
