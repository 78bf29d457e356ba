"""Is something equal, and what counts as equal: results of layers, answers of networks, what layers hold."""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paam.graph.checks.comparing import agree, among, close, own_copy, result_of
from paam.graph.checks.differences import apart, difference, has_numbers, in_mode_of, tells_apart
from paam.graph.checks.layer_state import comparable, state_of
from paam.graph.record.ways import Ways

INF, NOT = float("inf"), float("nan")


def t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# Results of layers


@pytest.mark.parametrize(
    ("found", "truth", "expected"),
    [
        (t(1, 2), t(1, 2), True),
        (t(1, 2), t(1, 2)[None], False),
        (t(1, 2), t(1, 2).float(), False),
        (torch.tensor([1, 2]), torch.tensor([1, 2]), True),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), False),
        (torch.tensor([True]), torch.tensor([False]), False),
        (t(1 + 1e-10), t(1), True),
        (t(1 + 1e-8), t(1), False),
        (t(1e6, 3e-7), t(1e6, 0), True),  # below 1e-12 of the largest value
        (t(1e6, 3e-6), t(1e6, 0), False),
        (t(INF, 1e6, 3e-7), t(INF, 1e6, 0), True),
        (t(INF, 1e6, 3e-6), t(INF, 1e6, 0), False),
        (t(INF), t(-INF), False),
        (t(NOT, 1), t(NOT, 1), True),
        (t(NOT, NOT), t(NOT, NOT), True),
        (t(NOT, 1), t(1, NOT), False),
        (t(), t(), True),
    ],
)
def test_results_are_equal_up_to_rounding(found: Tensor, truth: Tensor, expected: bool) -> None:
    assert close(found, truth) == expected


def test_channels_among_others() -> None:
    assert among(4, np.array([0, -1, 2])).tolist() == [True, False, True, False]
    assert among(2, np.array([-1])).tolist() == [False, False]


class Draws(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(torch.rand(3))


def test_results_are_drawn_anew_and_leave_all_as_it_was() -> None:
    x = torch.zeros(3)
    for seed in (0, 1, 0):
        torch.manual_seed(seed)
        drawn = torch.rand(3)
        torch.rand(5)
        assert torch.equal(result_of(Draws(), x, seed=seed), drawn)
    assert torch.equal(result_of(Draws(), x), drawn)  # of seed 0
    assert not x.any()
    assert result_of(nn.Linear(2, 2), x) is None


def test_results_are_those_of_a_mode() -> None:
    norm = nn.BatchNorm1d(2, affine=False).double()
    x = t(1, 3, 5, 7).view(2, 2)
    assert result_of(norm, x).tolist() == (x / (1 + 1e-5) ** 0.5).tolist()
    assert result_of(norm, x, training=True).mean(0).abs().max() < 1e-6
    assert norm.running_mean.tolist() == [0, 0]
    assert not result_of(norm, x).requires_grad
    assert not result_of(nn.Linear(2, 2).double(), x).requires_grad


def test_own_copies_hold_their_own_tensors() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2, affine=False))
    model[0].weight.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    twin = own_copy(model)
    assert [*twin.state_dict()] == [*before]
    assert not twin[0].weight.requires_grad
    assert own_copy(nn.Linear(2, 2)).weight.requires_grad
    with torch.no_grad():
        for tensor in twin.state_dict().values():
            tensor.add_(1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(value, before[name] + 1) for name, value in twin.state_dict().items())


class Shifted(nn.Module):
    """A number for each channel; ``what`` else it does to tell the cut layer from the whole one."""

    def __init__(self, what: str = "") -> None:
        super().__init__()
        self.what = what
        self.shift = nn.Parameter(t(1, 2, 3, 4))
        self.register_buffer("seen", t(0, 0, 0, 0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += len(self.shift) if self.what == "stores" else 1
        elif self.what == "counts":  # what evaluation stores is put back in any case
            self.seen += len(self.shift)
        if self.what == "makes" or (self.what == "trains" and self.training):
            x = x * len(self.shift)
        return x + self.shift


KEPT = [0, 2]


def cut(layer: Any) -> None:
    layer.shift = nn.Parameter(layer.shift.detach()[KEPT])
    layer.seen = layer.seen[KEPT]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("what", ["", "makes", "trains", "stores", "counts"])
def test_a_cut_layer_agrees_if_it_makes_and_stores_the_same(what: str, training: bool) -> None:
    x = t(1, 5, 7, 9)[None]
    wrong = what == "makes" or (training and what in ("trains", "stores"))
    whole = Shifted(what).train(not training)
    found = agree(whole, lambda one: one(x)[:, KEPT], lambda one: one(x[:, KEPT]), cut, training)
    assert found is not wrong


# Answers of networks


@pytest.mark.parametrize(
    ("found", "truth", "same"),
    [
        ([t(1), t(2)], [t(1)], False),
        ([t(1e-3, 1)], [t(0, 1)], True),
        ([t(1.1e-3, 1)], [t(0, 1)], False),
        ([1.0], [t(1)], False),
        ([t(1)], [1.0], False),
        ([t(1)], [t(1)], True),
        (["x"], [1.0], False),
        ([1.0], ["x"], False),
        (["x"], ["xy"], False),
        (["xy"], ["".join("xy")], True),
        ([None], [None], True),
        ([1], [None], False),
        ([2.001], [2.0], True),
        ([2.003], [2.0], False),
        ([-2.003], [-2.0], False),
        ([0.0], [0.0], True),
        ([1e-9], [0.0], False),
        ([NOT], [float("nan")], True),
        ([NOT], [1.0], False),
        ([1.0], [NOT], False),
        ([10**6], [int("1000000")], True),
        ([10**6], [10**6 + 1], False),
    ],
)
def test_answers_in_single_precision_differ_or_not(found: Any, truth: Any, same: bool) -> None:
    assert (difference(found, truth, True) == "") is same


def test_answers_in_double_precision_are_nearer() -> None:
    assert difference([t(1e-7, 1)], [t(0, 1)], False) == ""
    assert difference([t(3), t(2e-7, 1)], [t(3), t(0, 1)], False) == "by 2.0e-07 of its largest value"
    assert difference([t(4), t(0, 1)], [t(3), t(0, 1)], False) == "by 3.3e-01 of its largest value"
    assert difference([], [t(1)], False) == "it returns 0 values instead of 1"
    assert difference(["a"], ["b"], False) == "it returns 'a' instead of 'b'"


def test_answers_of_a_mode() -> None:
    ways = Ways(t(1), t(2))
    assert (in_mode_of(ways, False), in_mode_of(ways, True), in_mode_of("x", True)) == (t(1), t(2), "x")
    assert difference(ways, t(1), False) == ""
    assert difference(ways, t(1), False, training=True) == "by 1.0e+00 of its largest value"
    assert difference(t(2), ways, False, training=True) == ""


@pytest.mark.parametrize(
    ("value", "truth", "expected"),
    [
        (1.0, t(1), INF),
        (t(1, 2), t(1), INF),
        (torch.tensor([1]), t(1), INF),
        (torch.tensor([3]), torch.tensor([2]), 0.5),
        (t(NOT), t(1), INF),
        (t(2, 3), t(0, 0), 3e30),
        (t(1e8, 1.5), t(1e8, 1), 0.5e-8),  # not yet taken for infinity
        (t(2e8, 1.5), t(2e8, 1), 0.5),
        (t(3e8, 1), t(2e8, 1), 0.5),
        (t(3e8, 2e8), t(2e8, 2e8), 0.5),
        (t(2e8, 3e9), t(2e8, 2e9), 0.5),
        (t(3e8, 2e9, 1), t(2e8, 2e9, 1), 0.5),
        (t(), t(), 0.0),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 1j]), 0.5**0.5),
        (t(1, INF), t(1, -INF), INF),
        (t(NOT, 0), t(0, NOT), INF),
        (t(0, 1), t(NOT, 1), INF),
        (t(INF, 1), t(INF, 2), 0.5),
    ],
)
def test_how_far_numbers_lie_apart(value: Any, truth: Tensor, expected: float) -> None:
    assert apart(value, truth) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([], True),
        (["x", torch.tensor([1])], True),
        ([t()], True),
        ([t(1, NOT)], False),
        ([t(INF, 1)], True),
        ([t(INF, INF)], False),
        ([t(INF), t(1)], True),
        ([t(NOT), t(1)], False),
    ],
)
def test_answers_that_are_numbers(answers: list[Any], expected: bool) -> None:
    assert has_numbers(answers) is expected


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([], True),
        ([t(1, 1)], False),
        ([t(1, 2)], True),
        ([t(1)], True),
        ([t(1)[0]], True),
        ([torch.zeros(2, 0)], True),
        ([torch.tensor([1, 1])], True),
        ([t(1, 1), t(1, 2)], True),
        ([t(1, 1, 2)], False),
        ([t(1, 1, 1, 2).view(2, 2)], True),
    ],
)
def test_answers_that_depend_on_the_sample(answers: list[Any], expected: bool) -> None:
    assert tells_apart(answers) is expected


# What layers hold


class Holds(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(t(1, 2)), nn.Parameter(t(3))
        self.register_buffer("mean", t(4))
        self.register_buffer("index", torch.tensor([1, 2]))
        self.register_parameter("none", None)
        for name, value in attributes.items():
            setattr(self, name, value)


def test_layers_are_alike_whatever_their_weights_are() -> None:
    layer, other = Holds(size=3, names=["a"]), Holds(size=3, names=["a"])
    with torch.no_grad():
        other.first.add_(1)
        other.mean.add_(1)
    assert state_of(layer) == state_of(other)
    assert hash(state_of(layer)) == hash(state_of(other))


class HoldsToo(Holds):
    pass


DIFFERENT: dict[str, Any] = {
    "class": lambda: HoldsToo(),
    "number": lambda: Holds(size=3),
    "shape": lambda: Holds(first=nn.Parameter(t(1, 2, 3))),
    "type": lambda: Holds(second=nn.Parameter(torch.tensor([3.0]))),
    "a parameter more": lambda: Holds(none=nn.Parameter(t(1))),
    "a buffer less": lambda: Holds(mean=None),
    "another index": lambda: Holds(index=torch.tensor([1, 3])),
    "a dictionary": lambda: Holds(held={"a": 1}),
    "another dictionary": lambda: Holds(held={"a": 2}),
    "an empty dictionary": lambda: Holds(held={}),
    "an empty tuple": lambda: Holds(held=()),
    "an empty list": lambda: Holds(held=[]),
    "a true size": lambda: Holds(size=True),
    "a size of one": lambda: Holds(size=1),
    "a zero": lambda: Holds(size=0.0),
    "a negative zero": lambda: Holds(size=-0.0),
    "a layer": lambda: Holds(inner=nn.ReLU()),
    "a layer with a setting": lambda: Holds(inner=nn.ReLU(inplace=True)),
    "training": lambda: Holds().eval(),
}


def test_layers_differ_in_what_they_hold() -> None:
    states = [state_of(Holds()), *(state_of(make()) for make in DIFFERENT.values())]
    assert len(set(states)) == len(states)
    assert all(state_of(make()) == state_of(make()) for make in DIFFERENT.values())


def function(a: int, b: int = 0) -> None:
    pass


class Other:
    """Nobody knows when two of these are equal."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = object.__hash__


class Own(Tensor):
    pass


EQUAL: list[Any] = [
    *(lambda: 1, lambda: 1.0, lambda: True, lambda: None, lambda: "x", lambda: b"x", lambda: 1j, lambda: float("nan")),
    *(lambda: 0.0, lambda: -0.0, lambda: t(1, 2), lambda: t(1, 3), lambda: t(1, 2).float(), lambda: t(1, 2)[None]),
    *(lambda: torch.tensor(3), lambda: t(1, 2, 3, 4).view(2, 2).mT, lambda: t(1, 3, 2, 4).view(2, 2, 1)),
    *(lambda: [1, 2], lambda: (1, 2), lambda: [2, 1], lambda: {1, 2}, lambda: frozenset((1, 2)), lambda: [[1], [1]]),
    *(lambda: {1: 2}, lambda: {2: 1}, lambda: OrderedDict({1: 2}), lambda: {}, lambda: {"a": [1]}, lambda: function),
    *(lambda: functools.partial(function, 1), lambda: functools.partial(function, 2)),
    *(lambda: functools.partial(function, 1, b=1), lambda: functools.partial(len, 1), lambda: Tensor),
]


def test_values_are_equal_by_what_they_hold() -> None:
    found = [comparable(make()) for make in EQUAL]
    assert len(set(found)) == len(found)
    assert [comparable(make()) for make in EQUAL] == found


@pytest.mark.parametrize("make", [Other, lambda: lambda: 0, lambda: t(0, 1).to_sparse(), lambda: t(1).as_subclass(Own)])
def test_what_cannot_be_compared_is_equal_to_itself_alone(make: Any) -> None:
    one, other = make(), make()
    assert comparable(one) == comparable(one)
    assert hash(comparable([one])) == hash(comparable([one]))
    assert comparable(one) != comparable(other)
    assert comparable(one) != one


def test_what_holds_itself_can_be_compared() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    assert comparable(loop) == comparable(loop)
    part = [1]
    assert comparable([part, part]) == comparable([[1], [1]])
