"""Parts of the recording, each by itself: lines, arguments, what is alike, what is put back, what is noticed."""

from __future__ import annotations

import inspect
import math
import operator
import random
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import paam
from paam.errors import GraphError
from paam.graph.network import prepare
from paam.graph.record.arguments import leaves_of, without_numbers
from paam.graph.record.as_found import AsFound, Names
from paam.graph.record.call import record
from paam.graph.record.known import Known, version
from paam.graph.record.layer_shapes import returned, uncomputed
from paam.graph.record.numbers import expect, itself, number
from paam.graph.record.own_lines import NOT_THE_MODELS, at, leave_alone, line_of, quoted, running_line
from paam.graph.record.recording import Recording, same_call, same_tensor, same_way
from paam.graph.record.unseen import (
    _turns_off,
    gradients_noticed,
    other_random_numbers_kept,
    other_random_numbers_refused,
    questions_noticed,
    refuse_backward_hooks,
    refuse_reading_computed_weights,
)
from paam.graph.record.ways import _key, _statistics_of, _training_flag, evaluated_only, leading_to
from paam.graph.rewired import as_graph_model

HERE = __file__


def line() -> int:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


# Lines


class Running(nn.Module):
    forward = staticmethod(running_line)


def test_the_running_line_is_the_callers_and_not_torchs() -> None:
    assert [*NOT_THE_MODELS] == [f"{Path(torch.__file__).parent}/", f"{Path(paam.__file__).parent}/"]
    assert running_line() == (HERE, line())
    assert Running()() == (HERE, line())


def fails() -> None:
    F.interpolate(torch.zeros(1, 1, 2), size=3, scale_factor=2)  # raised in torch's code


def test_lines_in_messages() -> None:
    number = fails.__code__.co_firstlineno + 1
    text = "F.interpolate(torch.zeros(1, 1, 2), size=3, scale_factor=2)  # raised in torch's code"
    assert quoted((HERE, number)) == f"test_record_parts.py:{number} (`{text}`)"
    assert at((HERE, number)) == f" at test_record_parts.py:{number} (`{text}`)"
    assert (quoted(None), at(None)) == ("", "")
    with pytest.raises(ValueError, match="size") as raised:
        fails()
    assert line_of(raised.value) == at((HERE, number))
    assert line_of(ValueError()) == ""
    code: dict[str, Any] = {}
    exec(compile("def fail():\n    raise ValueError", "/elsewhere/net.py", "exec"), code)
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        code["fail"]()
    assert line_of(raised.value) == " at net.py:2 (``)"
    assert leave_alone("") == ""
    assert leave_alone("head") == " Or leave 'head' alone with ignore=['head']: it then runs as it is."


# Arguments


class Pair(NamedTuple):
    left: Any
    right: Any


def test_what_arguments_hold() -> None:
    x = torch.zeros(1)
    assert leaves_of(({"a": [1, (x, 2)]}, slice(3, x, 4), "xy", None)) == [1, x, 2, 3, x, 4, "xy", None]


def test_arguments_without_recorded_numbers() -> None:
    x = torch.zeros(1)
    book: Any = SimpleNamespace(active=True)
    three: Any = number(book, 3, itself, ())
    given = (three, [three, x], {"a": three}, slice(three, None, three), Pair(three, "x"), (three,), "y", None)
    found = without_numbers(given)
    assert found == (3, [3, x], {"a": 3}, slice(3, None, 3), Pair(3, "x"), (3,), "y", None)
    assert [type(part) for part in found] == [int, list, dict, slice, Pair, tuple, str, type(None)]
    assert {type(leaf) for leaf in leaves_of(found)} == {int, Tensor, type(None), str}
    assert without_numbers(x) is x


# What is alike


def test_tensors_are_the_same_by_content_and_type() -> None:
    x = torch.tensor([1.0, 2.0])
    for other, same in (
        *((x, True), (x.clone(), True), (x + 1, False), (x.double(), False), (x[None], False)),
        (torch.empty(2, device="meta"), False),
    ):
        assert same_tensor(x, other) is same
    meta = torch.empty(2, device="meta")
    assert same_tensor(meta, meta)
    assert not same_tensor(meta, torch.empty(2, device="meta"))  # nobody can tell


def graph(*calls: tuple[Any, ...], inputs: int = 1) -> fx.Graph:
    """A graph of calls (target, args, kwargs); "%0" stands for its first node."""
    made = fx.Graph()
    nodes = [made.placeholder(f"x{place}") for place in range(inputs)]

    def known(value: Any) -> Any:
        if isinstance(value, str) and value.startswith("%"):
            return nodes[int(value[1:])]
        if isinstance(value, tuple | list):
            return type(value)(map(known, value))
        if isinstance(value, dict):
            return {key: known(part) for key, part in value.items()}
        if isinstance(value, slice):
            return slice(known(value.start), known(value.stop), known(value.step))
        return value

    for target, args, kwargs in calls:
        kind = "call_method" if isinstance(target, str) else "call_function"
        nodes.append(made.create_node(kind, target, known(args), known(kwargs)))
    return made


NODE = (torch.flatten, ("%0", 1, [2, ("a",)], slice(0, "%0", None)), {"flag": True, "of": {"x": "%0"}})
ALIKE: list[tuple[Any, bool]] = [
    (NODE, True),
    ((torch.flatten, ("%0", 1, [2, ("a",)], slice(0, "%0", None)), {"flag": False, "of": {"x": "%0"}}), True),
    ((torch.reshape, *NODE[1:]), False),
    (("flatten", *NODE[1:]), False),
    ((torch.flatten, NODE[1], {"flag": True}), False),
    ((torch.flatten, NODE[1], {"flag": True, "of": {"y": "%0"}}), False),
    ((torch.flatten, NODE[1], {"flag": True, "of": {"x": "%1"}}), False),
    ((torch.flatten, NODE[1], {"flag": True, "of": ["x"]}), False),
    ((torch.flatten, NODE[1], {"flag": 1, "of": {"x": "%0"}}), False),
    ((torch.flatten, ("%1", *NODE[1][1:]), NODE[2]), False),
    ((torch.flatten, (0, *NODE[1][1:]), NODE[2]), False),
    ((torch.flatten, ("%0", 2, *NODE[1][2:]), NODE[2]), False),
    ((torch.flatten, ("%0", 1.0, *NODE[1][2:]), NODE[2]), False),
    ((torch.flatten, ("%0", 1, [2], NODE[1][3]), NODE[2]), False),
    ((torch.flatten, ("%0", 1, [2, ("b",)], NODE[1][3]), NODE[2]), False),
    ((torch.flatten, ("%0", 1, 2, NODE[1][3]), NODE[2]), False),
    ((torch.flatten, (*NODE[1][:3], slice(0, "%1", None)), NODE[2]), False),
    ((torch.flatten, (*NODE[1][:3], slice(1, "%0", None)), NODE[2]), False),
    ((torch.flatten, (*NODE[1][:3], slice(0, "%0", 2)), NODE[2]), False),
    ((torch.flatten, (*NODE[1][:3], 3), NODE[2]), False),
    ((torch.flatten, NODE[1][:3], NODE[2]), False),
]


@pytest.mark.parametrize("place", range(len(ALIKE)))
def test_calls_are_alike(place: int) -> None:
    other, alike = ALIKE[place]
    one, twin = ([*graph(call, inputs=2).nodes][-1] for call in (NODE, other))
    assert same_call(one, twin) is alike
    assert same_call(twin, one) is alike


class NeverEqual:
    """Equal to nothing, not even in its words."""

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = object.__hash__


class InWords(NeverEqual):
    def __repr__(self) -> str:
        return "in words"


def test_values_are_alike_by_identity_equality_or_words() -> None:
    alone, other, array = NeverEqual(), NeverEqual(), np.zeros(2)
    for here, there, alike in (
        *((alone, alone, True), (alone, other, False), (InWords(), InWords(), True), (array, array, True)),
        *((0.0, -0.0, True), (torch.float32, torch.float32, True), (torch.float32, torch.float64, False)),
    ):
        one, twin = fx.Graph().placeholder("x"), fx.Graph().placeholder("x")
        one.args, twin.args = (here,), (there,)
        assert same_call(one, twin) is alike
    one.args, twin.args = (float("nan"),), (float("nan"),)
    assert same_call(one, twin)


def test_decisions_are_alike_if_they_came_out_alike() -> None:
    nodes = [[*graph((expect, ("%0", outcome), {})).nodes][-1] for outcome in (True, True, False)]
    assert same_call(nodes[0], nodes[1])
    assert not same_call(nodes[0], nodes[2])  # though it is a flag


def test_recordings_go_the_same_way() -> None:
    call, other = ("relu", ("%0",), {}), ("tanh", ("%0",), {})

    def recording(shapes: dict[str, tuple[int, ...]], *calls: Any) -> Recording:
        return Recording(graph(*calls), shapes)

    first = recording({"x0": (2, 3), "relu": (2, 3)}, call)
    assert same_way(first, recording({"x0": (3, 3), "relu": (3, 3)}, call))
    assert not same_way(first, recording({"x0": (3, 3), "relu": (3, 3, 1)}, call))
    assert not same_way(first, recording({"x0": (3,), "relu": (3, 3)}, call))
    assert not same_way(first, recording({"x0": (2, 3), "tanh": (2, 3)}, other))
    assert not same_way(first, recording({"x0": (2, 3), "relu": (2, 3)}, call, other))
    assert same_way(recording({}, call), recording({}, call))


def test_all_that_leads_to_a_result() -> None:
    nodes = [*graph(("relu", ("%0",), {}), ("tanh", ("%1",), {}), (operator.add, ("%3", "%3"), {}), inputs=2).nodes]
    assert leading_to({"a": [nodes[4]]}) == {nodes[1], nodes[3], nodes[4]}
    assert leading_to(None) == set()


# Evaluation and training


def test_operations_that_keep_statistics() -> None:
    model = nn.Sequential(nn.BatchNorm2d(2), nn.ReLU())
    made = fx.Graph()
    x, mean, var = made.placeholder("x"), made.get_attr("mean"), made.get_attr("var")
    norm = made.call_function(F.batch_norm, (x, mean, var))
    without = made.call_function(F.batch_norm, (x,), {"running_mean": None, "running_var": None})
    other = made.call_function(F.layer_norm, (x, mean, var))
    layers = [made.call_module("0", (x,)), made.call_module("1", (x,))]
    names = [_statistics_of(model, node) for node in (norm, without, other, *layers, x)]
    assert names == ["mean", None, None, "0", None, None]


def test_what_nodes_compute_can_be_looked_up() -> None:
    call = (torch.add, ("%0", slice("%0", "%1"), ["%1"]), {"a": {"b": "%1"}, "flag": True})
    other = (torch.add, ("%0", slice("%0", "%1"), ["%1"]), {"flag": False, "a": {"b": "%1"}})
    one, two = graph(call, inputs=2), graph(other, inputs=2)
    twins = dict(zip(two.nodes, one.nodes, strict=True))
    for place, node in enumerate(two.nodes):  # the other graph's nodes have other names
        node.name = f"other_{place}"
    first, second = [*one.nodes][-1], [*two.nodes][-1]
    assert _key(first, lambda node: node) == _key(second, twins.__getitem__)
    assert hash(_key(first, lambda node: node)) == hash(_key(second, twins.__getitem__))
    for changed in (
        (torch.sub, *call[1:]),
        (torch.add, ("%0", slice("%0", "%0"), ["%1"]), call[2]),
        (torch.add, ("%0", slice("%1", "%1"), ["%1"]), call[2]),
        (torch.add, ("%0", slice("%0", "%1", 2), ["%1"]), call[2]),
        (torch.add, ("%0", slice("%0", "%1"), ["%0"]), call[2]),
        (torch.add, call[1], {"a": {"b": "%0"}, "flag": True}),
        (torch.add, call[1], {"a": {"b": "%1"}, "flag": 1}),
    ):
        assert _key([*graph(changed, inputs=2).nodes][-1], lambda node: node) != _key(first, lambda node: node)


def test_the_mode_is_read_once() -> None:
    made = graph(("relu", ("%0",), {}))
    flag = _training_flag(made)
    assert (flag.op, flag.target) == ("get_attr", "training")
    assert [node.op for node in made.nodes] == ["placeholder", "get_attr", "call_method"]
    assert _training_flag(made) is flag
    assert len(made.nodes) == 3
    evaluated_only(False, "It does not run")
    with pytest.raises(GraphError, match="^It does not run, so that .* call eval"):
        evaluated_only(True, "It does not run")


class OtherTensors(nn.Module):
    """Training reads a parameter and tensors that evaluation does not."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)
        self.scale = nn.Parameter(torch.full((4, 1, 1), 3.0))
        self.first, self.second, self.third = (torch.full((4, 1, 1), x) for x in (2.0, 5.0, 7.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x) * self.first
        if self.training:
            x = x * self.scale + self.second - x * self.third
        return self.head(x[:, : x.shape[1]])


def test_training_may_read_other_tensors() -> None:
    model, x = OtherTensors(), torch.randn(2, 3, 4, 4)
    network = as_graph_model(prepare(model, x).traced)
    with torch.no_grad():
        for mode in (True, False):
            for batch in (2, 1):
                assert torch.equal(network.train(mode)(x[:batch]), model.train(mode)(x[:batch]))


# What is put back


class Overlapping(nn.Module):
    """Its buffers share their memory, or have none."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.register_buffer("whole", torch.zeros(8))
        self.register_buffer("part", self.whole[:4])
        self.register_buffer("empty", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer(self.name).add_(1)
        return x * self.whole


@pytest.mark.parametrize("name", ["whole", "part", "empty"])
def test_what_is_changed_in_place_is_named(name: str) -> None:
    model = Overlapping(name)
    with pytest.raises(GraphError, match=f"changes the buffer '{name}' in place"):
        record(model, AsFound(model), (torch.zeros(2, 8),))


class Changing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(2)
        self.weight = nn.Parameter(torch.zeros(2))
        self.kept, self.named, self.seen, self.count = [1], {"a": 1}, {1}, 0
        self.register_buffer("none", None)


def test_names_of_what_a_model_holds() -> None:
    model = Changing()
    model.again = model.weight
    names = Names(model)
    assert [name for name, _ in names.every] == ["", "inner"]
    assert names.modules == {id(model): "", id(model.inner): "inner"}
    assert names.tensors[id(model.weight)] == "weight"
    assert names.tensors[id(model.inner.running_mean)] == "inner.running_mean"
    assert len(names.tensors) == 6


def test_a_model_is_left_as_it_was_found() -> None:
    model = Changing()
    kept = model.kept
    with AsFound(model):
        model.eval()
        model.inner.running_mean.add_(1)
        model.kept.append(2)
        model.named["b"] = 2
        model.seen.clear()
        model.count, model.more = 1, 2
    assert model.training
    assert model.inner.training
    assert model.inner.running_mean.tolist() == [0, 0]
    assert (model.kept, model.named, model.seen, model.count) == ([1], {"a": 1}, {1}, 0)
    assert model.kept is kept
    assert not hasattr(model, "more")


@pytest.mark.parametrize("name", ["weight", "inner.weight", "inner.running_mean"])
def test_what_is_replaced_is_named_unless_it_is_left_alone(name: str) -> None:
    model = Changing()
    owner, _, last = name.rpartition(".")
    module, was = model.get_submodule(owner), model.get_submodule(owner)._get_name()
    before = getattr(module, last)

    def replace() -> None:
        held = module._parameters if last in module._parameters else module._buffers
        held[last] = None
        held["another"] = nn.Parameter(torch.zeros(1))

    said = f"in the place of '{name}'.*" + ("ignore=..inner.." if owner else "use it.$")
    with pytest.raises(GraphError, match=said), AsFound(model):
        replace()
    assert getattr(module, last) is before
    assert not hasattr(module, "another")
    with suppress(KeyError), AsFound(model):  # another error goes before
        replace()
        raise KeyError
    assert getattr(module, last) is before
    if owner:
        with AsFound(model, ["inner"]):
            replace()
        assert getattr(module, last) is before
    assert was == module._get_name()


# What is noticed


def test_regions_without_gradients() -> None:
    for region, outside, off in (
        *((torch.no_grad(), False, True), (torch.no_grad(), True, True)),
        *((torch.enable_grad(), False, False), (torch.enable_grad(), True, False)),
        *((torch.inference_mode(), False, True), (torch.inference_mode(True), True, True)),
        *((torch.inference_mode(False), False, False), (torch.inference_mode(False), True, True)),
    ):
        assert _turns_off(region, outside) is off
    with torch.enable_grad():
        for mode in (True, False):
            for outside in (True, False):
                region = torch.set_grad_enabled(mode)
                assert _turns_off(region, outside) is not mode
                torch.set_grad_enabled(True)


def test_regions_are_noted_from_outside_inwards() -> None:
    book: Any = SimpleNamespace(without_gradient=[])
    noted = []
    with gradients_noticed(book):
        for regions in (
            *((torch.inference_mode(False),), (torch.no_grad(), torch.enable_grad(), torch.inference_mode(False))),
            *((torch.no_grad(), torch.inference_mode(False)), (torch.enable_grad(), torch.inference_mode())),
        ):
            with ExitStack() as stack:
                for region in regions:
                    stack.enter_context(region)
                noted.append([*book.without_gradient])
            assert not book.without_gradient
    assert noted == [[False], [True, False, False], [True, True], [False, True]]
    with torch.no_grad():
        assert not book.without_gradient


def test_questions_about_gradients() -> None:
    asked = []
    originals = torch.is_grad_enabled, torch.is_inference_mode_enabled
    with questions_noticed(lambda: asked.append(1)):
        assert torch.is_grad_enabled()
        assert len(asked) == 1
        assert not torch.is_inference_mode_enabled()
        assert len(asked) == 2
        with torch.no_grad():  # torch itself asks
            assert not torch.is_grad_enabled()
        assert len(asked) == 3
    assert (torch.is_grad_enabled, torch.is_inference_mode_enabled) == originals


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_other_generators_are_put_back(draw: Any) -> None:
    random.seed(1)
    np.random.seed(1)
    first = draw()
    random.seed(1)
    np.random.seed(1)
    with other_random_numbers_kept():
        assert draw() == first
    by = "Python" if draw is random.random else "numpy"
    with pytest.raises(GraphError, match=f"^ReLU draws.*by {by}"), other_random_numbers_refused(nn.ReLU()):
        draw()
    assert draw() == first
    with other_random_numbers_refused(nn.ReLU()):
        torch.rand(1)


def test_other_kinds_of_generators_are_put_back() -> None:
    original = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        first = np.random.PCG64(1).random_raw()
        with other_random_numbers_kept():
            assert np.random.get_bit_generator().random_raw() == first
        assert np.random.get_bit_generator().random_raw() == first
    finally:
        np.random.set_bit_generator(original)


@pytest.mark.parametrize("op", ["get_attr", "call_module"])
def test_reading_what_weights_are_computed_of_is_refused(op: str) -> None:
    made = fx.Graph()
    made.create_node("get_attr", "conv.weight")
    refuse_reading_computed_weights(nn.ReLU(), made)
    made.create_node(op, "conv.parametrizations.weight")
    with pytest.raises(GraphError, match="^ReLU reads the weight of 'conv', which a parametrization computes"):
        refuse_reading_computed_weights(nn.ReLU(), made)


def test_hooks_on_gradients_are_refused_where_nobody_looks_away() -> None:
    model = nn.Sequential(nn.ReLU(), nn.ReLU())
    refuse_backward_hooks(model, ())
    model[1].register_full_backward_hook(lambda *_: None)
    with pytest.raises(GraphError, match="^'1' has a backward hook.*ignore"):
        refuse_backward_hooks(model, ["0"])
    refuse_backward_hooks(model, ["1"])
    model[0].register_full_backward_pre_hook(lambda *_: None)
    with pytest.raises(GraphError, match="^'0' has a backward hook"):
        refuse_backward_hooks(model, ["1"])
    whole = nn.ReLU()
    whole.register_full_backward_hook(lambda *_: None)
    with pytest.raises(GraphError, match="^'ReLU' has a backward hook"):
        refuse_backward_hooks(whole, ["1"])


def test_what_is_known_of_a_tensor_at_first() -> None:
    known = Known(None, None, 3)
    assert (known.part, known.born, known.changes, known.without_gradient, known.detached) == (None, -1, 0, False, None)
    x = torch.zeros(2)
    x.add_(1)
    assert version(x) == 1
    with torch.inference_mode():
        assert version(torch.zeros(2).add_(1)) == 0


def test_uncomputed_tensors_lie_as_their_input_does() -> None:
    x = torch.zeros(2, 3, 4, 5)
    last = x.contiguous(memory_format=torch.channels_last)
    found = uncomputed(last, (2, 6, 2, 2))
    assert found is not None
    assert found.shape == (2, 6, 2, 2)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert not found.is_contiguous()
    plain = uncomputed(x.double(), (2, 6))
    assert plain is not None
    assert (plain.shape, plain.dtype) == ((2, 6), torch.float64)
    assert uncomputed(last, (2, 6, 4)) is None
    assert uncomputed(x.mT, (2, 6, 4, 4)) is None
    assert uncomputed(x.flatten(1).mT, (2, 6)) is None


RETURNED: list[tuple[nn.Module, tuple[int, ...]]] = [
    *((nn.BatchNorm1d(3), (2, 3)), (nn.BatchNorm1d(3), (2, 3, 4)), (nn.BatchNorm2d(3), (2, 3, 4, 5))),
    *((nn.BatchNorm3d(3), (2, 3, 4, 5, 6)), (nn.Tanh(), (2, 3)), (nn.Linear(3, 5), (3,)), (nn.Linear(3, 5), (2, 4, 3))),
    *((nn.Conv1d(4, 6, 3, 2, 1, 2, 2), (2, 4, 9)), (nn.Conv2d(3, 5, (2, 3), (1, 2), (0, 2)), (2, 3, 5, 6))),
    *((nn.Conv3d(3, 5, 2), (1, 3, 2, 3, 4)), (nn.Conv2d(3, 5, 3, padding="same", dilation=2), (1, 3, 4, 4))),
    *((nn.Conv2d(3, 5, 3, padding="valid"), (1, 3, 4, 4)), (nn.Conv2d(3, 5, 3, padding=1, dilation=3), (1, 3, 5, 6))),
]
COMPUTED: list[tuple[nn.Module, tuple[int, ...]]] = [
    *((nn.BatchNorm1d(3), (2, 3, 4, 5)), (nn.BatchNorm2d(3), (2, 3, 4)), (nn.BatchNorm2d(3), (2, 4, 4, 5))),
    *((nn.BatchNorm3d(3), (2, 3, 4, 5)), (nn.Linear(3, 5), (3, 4)), (nn.Conv2d(3, 5, 3), (3, 4, 4))),
    *((nn.Conv2d(3, 5, 3), (2, 4, 4, 4)), (nn.Conv2d(3, 5, 3), (2, 3, 2, 4)), (nn.MaxPool2d(2), (2, 3, 4, 4))),
    *((nn.Linear(3, 5).double(), (2, 3)), (nn.ConvTranspose2d(3, 5, 2), (2, 3, 4, 4)), (nn.LayerNorm(3), (2, 3))),
]


@pytest.mark.parametrize("place", range(len(RETURNED)))
def test_shapes_that_layers_return(place: int) -> None:
    layer, shape = RETURNED[place]
    truth = layer.eval()(torch.zeros(shape))
    weight = getattr(layer, "weight", torch.zeros(0))
    macs = truth.numel() * math.prod(weight.shape[1:]) if weight.dim() > 1 else 0
    assert returned(layer, torch.zeros(shape)) == (truth.shape, macs)


@pytest.mark.parametrize("place", range(len(COMPUTED)))
def test_what_other_layers_return_is_computed(place: int) -> None:
    layer, shape = COMPUTED[place]
    assert returned(layer, torch.zeros(shape)) is None


class InPlace(nn.Module):
    """Changes a value in place by a tensor that is nobody's buffer, and such a tensor by others."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.conv, self.function, self.grid = nn.Conv2d(3, 8, 1), function, torch.full((8, 1, 1), 2.0)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.function(self.conv(x).clone(), self.grid)
        return y


def changed_later(y: Tensor, grid: Tensor) -> Tensor:
    """Reads ones, which then become something else."""
    ones = torch.ones(8, 1, 1)
    read = y * ones
    ones.mul_(y.mean())
    return read + ones


def copied_later(y: Tensor, grid: Tensor) -> Tensor:
    ones = torch.ones(8, 1, 1)
    read = y * ones
    ones.copy_(y.mean())
    return read + ones


@pytest.mark.parametrize(
    "function", [lambda y, grid: y.add_(grid), lambda y, grid: y.copy_(grid), changed_later, copied_later]
)
def test_constants_are_as_they_were_when_they_were_read(function: Any) -> None:
    model, x = InPlace(function).eval(), torch.randn(2, 3, 4, 4)
    graph = as_graph_model(prepare(model, x).traced)
    with torch.no_grad():
        assert torch.equal(graph(x[:1]), model(x[:1]))


# A whole recording, by hand


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.register_buffer("mean", torch.zeros(4, 1, 1))

    def forward(self, x: Tensor, y: Tensor | None = None, *, z: Any = None) -> Tensor:
        x = self.norm(self.conv(x)) - self.mean
        return x.view(x.shape[0], -1) * torch.ones(())


def recorded(model: nn.Module, *inputs: Any, **options: Any) -> Recording:
    return record(model, AsFound(model), inputs, **options)


@pytest.mark.parametrize("shapes_only", [False, True])
def test_a_recording_by_hand(shapes_only: bool) -> None:
    found = recorded(Small(), torch.zeros(2, 3, 6, 6), shapes_only=shapes_only)
    assert [(node.op, node.name) for node in found.graph.nodes] == [
        ("placeholder", "x"),
        ("call_module", "conv"),
        ("call_module", "norm"),
        ("get_attr", "mean"),
        ("call_function", "sub"),
        ("call_function", "getattr_1"),
        ("call_function", "getitem"),
        ("call_method", "view"),
        ("get_attr", "_tensor_constant0"),
        ("call_function", "mul"),
        ("output", "output"),
    ]
    shape = (2, 4, 4, 4)
    assert found.shapes == {
        **{"x": (2, 3, 6, 6), "conv": shape, "norm": shape, "mean": (4, 1, 1), "sub": shape},
        **{"view": (2, 64), "_tensor_constant0": (), "mul": (2, 64)},
    }
    assert found.numbers == {"getattr_1": shape, "getitem": 2}
    assert found.macs == {"conv": 2 * 4 * 16 * 27}
    assert found.made == {"_tensor_constant0"}
    assert (found.transparent, found.read_numbers, found.asks, found.decision) == (set(), set(), set(), "")
    lines = [node.meta["line"][1] for node in found.graph.nodes if node.op.startswith("call")]
    first = Small.forward.__code__.co_firstlineno + 1
    assert lines == [first] * 3 + [first + 1] * 4
    assert {node.meta["within"] for node in found.graph.nodes if node.op == "call_function"} == {""}


def test_layers_are_computed_unless_shapes_do() -> None:
    model, x, calls = Small(), torch.randn(2, 3, 6, 6), []
    model.conv.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        truth = model.eval()(x)
    model.train()
    calls.clear()
    assert torch.equal(recorded(model, x).result, truth)
    assert model.training
    assert len(calls) == 1
    assert recorded(model, x, shapes_only=True).result.shape == truth.shape
    assert len(calls) == 1
    assert torch.equal(recorded(model, x, shapes_only=True, computed=True).result, truth)
    assert len(calls) == 2
    trained = recorded(model, x, training=True)
    assert not torch.equal(trained.result, truth)
    assert trained.result.requires_grad
    assert model.norm.running_mean.tolist() == [0] * 4
    like = recorded(model, x)
    assert len(calls) == 4
    again = recorded(model, torch.cat([x, x]), like=like)  # of the same shapes, but for the batch
    assert len(calls) == 4
    assert again.shapes["mul"] == (4, 64)


def test_sizes_that_are_held() -> None:
    x = torch.zeros(2, 3, 6, 7)
    for held, sizes in (((), []), ((0,), [(0, 2)]), ((2,), [(2, 6), (3, 7)]), ((0, 2), [(0, 2), (2, 6), (3, 7)])):
        nodes = [node for node in recorded(Small(), x, held=held).graph.nodes if node.target is expect]
        assert [(node.args[0].args[1], node.args[1]) for node in nodes] == sizes
        assert all(node.args[2] == "" for node in nodes)


class Stores(nn.Module):
    """Keeps in evaluation what it computes of its weight, and drops it when training begins."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.stored: Tensor | None = None

    def train(self, mode: bool = True) -> nn.Module:
        self.stored = None if mode else self.stored
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        if self.stored is None:
            self.stored = self.weight * 2
        return x * self.stored


def test_what_evaluation_has_stored_is_computed_anew() -> None:
    model = Stores().eval()
    model(torch.zeros(1, 3))
    stored = model.stored
    found = recorded(model, torch.zeros(1, 3))
    assert [node.name for node in found.graph.nodes] == ["x", "weight", "mul", "mul_1", "output"]
    assert model.stored is stored
    assert not found.constants


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        return self.conv(x) / self.conv.out_channels


def test_who_reads_a_layers_own_numbers() -> None:
    model = Reads()
    found = recorded(model, torch.zeros(1, 3, 4, 4), {"a": [torch.zeros(1)]}, (torch.zeros(1), 3))
    assert found.read_numbers == {"conv.out_channels", "conv"}
    assert type(model.conv.out_channels) is int
    assert [node.name for node in found.graph.nodes if node.op == "placeholder"] == [
        *("x", "input_1_a_0", "input_2_0"),
    ]
