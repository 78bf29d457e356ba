"""What is traced, and what is carried over into a small network, part by part."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from networks import compacted, lively, relative_error
from paam import Pruner
from paam.errors import GraphError
from paam.graph.checks.recorded_trial import Trial, _SameRandomNumbers
from paam.graph.checks.recording import _infers_channels, _infers_samples, _is_small, _sizes_of_view
from paam.graph.checks.small_network import _first_difference
from paam.graph.compact import _has_other_types, _spread, build
from paam.graph.constants import Observer
from paam.graph.copies import deep_copy
from paam.graph.flows import CONST, LIVE, ZERO, Mix
from paam.graph.network import prepare
from paam.graph.record.as_found import AsFound
from paam.graph.record.call import record
from paam.graph.record.recording import DTYPE, Recording
from paam.graph.rewired import _Named, _named, as_graph_model
from paam.graph.solve import solve
from paam.graph.trace import Traced, _examples, _one_more

X = torch.zeros(2, 3, 8, 8)


class Behind(nn.Module):
    """A function of the model and of what its convolution makes."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.conv, self.other, self.function = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), function
        self.image = torch.ones(1, 8, 8, 8)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, self.conv(x))


def recorded(function: Any, **options: Any) -> Recording:
    model = Behind(function)
    return record(model, AsFound(model), (X,), **options)


def calls(found: Recording) -> list[str]:
    return [node.name for node in found.graph.nodes if node.op.startswith("call") and node.name != "conv"]


# Examples


def test_examples_are_tensors_of_a_batch() -> None:
    x, y = torch.zeros(2, 3), torch.zeros(2)
    assert _examples(x) == (x,)
    for given in ((x, y), [x, y]):
        assert all(one is other for one, other in zip(_examples(given), (x, y), strict=True))
    for given, said in (
        *((None, "is the tensor"), ((), "is the tensor"), ((x, 3), "is the tensor"), ("x", "is the tensor")),
        *((torch.tensor(1.0), "single number"), ((x, torch.tensor(1.0)), "single number")),
        *((torch.zeros(0, 3), "is empty"), ((x, torch.zeros(2, 0)), "is empty"), ((x, []), "is empty")),
        *((torch.zeros(2, device="meta"), "'meta'"), ((x, torch.zeros(2, device="meta")), "'meta'")),
    ):
        with pytest.raises(GraphError, match=said):
            _examples(given)


def test_one_more_sample() -> None:
    x, y = torch.tensor([[1], [2]]), torch.tensor([[3], [4], [5]])
    wider = _one_more((x, y, [x, y], (x,)))
    assert wider[0].tolist() == [[1], [2], [1]]
    assert wider[1] is y
    assert [one is other for one, other in zip(wider[2], (x, y, x), strict=True)] == [True] * 3
    assert wider[3] == (x,)


# Growth


def test_what_grows_with_the_batch() -> None:
    network = prepare(Behind(lambda m, x: x.flatten(0, 1).relu() * torch.arange(x.shape[2])), X, check=False)
    grows = {
        node.name: network.traced.growth(node)
        for node in network.traced.graph.nodes
        if node.name in network.traced.shapes
    }
    assert grows["x"] == grows["conv"] == (1, 0, 0, 0)
    assert grows["flatten"] == grows["relu"] == grows["mul"] == (8, 0, 0)
    assert grows["arange"] == (0,)
    node = next(node for node in network.traced.graph.nodes if node.name == "relu")
    assert network.traced.positions(node, 2) == 2 * 8 * 8  # of the example, not of one sample more
    assert network.traced.is_of_samples(node)


@pytest.mark.parametrize(
    ("op", "shape", "growth"),
    [
        *(("placeholder", (3, 2), (1, 0)), ("call_module", (3, 3), (1, 0)), ("call_module", (4, 3), (0, 0))),
        *(("get_attr", (3, 2), (0, 0)), ("call_module", (), ())),
    ],
)
def test_what_is_recorded_once_is_taken_to_grow_along_the_batch(op: str, shape: Any, growth: Any) -> None:
    node: Any = SimpleNamespace(op=op, name="x", meta={})
    traced: Any = SimpleNamespace(shapes={"x": shape}, batch=3)
    assert Traced.growth(traced, node) == growth


# Recording


class Pair(NamedTuple):
    left: Any
    right: Any


def test_what_a_model_may_return() -> None:
    found = recorded(lambda m, x: ([Pair(x, None)], {"a": (x.relu(), "x", 3)}, x.shape[1]))
    returned = found.graph.output_node().args[0]
    assert type(returned[0][0]) is Pair
    assert returned[0][0].right is None
    assert returned[1]["a"][1:] == ("x", 3)
    assert isinstance(returned[2], fx.Node)
    for function in (lambda m, x: Pair(Pair(x, x), x), lambda m, x: {"a": Pair(x, x)}):
        with pytest.raises(GraphError, match="returns a Pair inside of a dictionary or of another named tuple"):
            recorded(function)
    for function, said in ((lambda m, x: 3, "returns int"), (lambda m, x: None, "returns NoneType")):
        with pytest.raises(GraphError, match=said):
            recorded(function)


@pytest.mark.parametrize(
    ("function", "asks"),
    [
        (lambda m, x: x if x.is_contiguous() else -x, {"layout"}),
        (lambda m, x: x if x.stride(0) > 1 else -x, {"layout"}),
        (lambda m, x: x if x.dim() == 4 else -x, set()),
        (lambda m, x: x if m.image.is_contiguous() else -x, set()),
        (lambda m, x: x if torch.is_grad_enabled() else -x, {"gradients"}),
        (lambda m, x: x if x.requires_grad else -x, {"gradients"}),
        (lambda m, x: x if m.image.requires_grad else -x, set()),
    ],
)
def test_what_a_model_asks(function: Any, asks: set[str]) -> None:
    assert recorded(function).asks == asks


@pytest.mark.parametrize(
    ("function", "read"),
    [
        (lambda m, x: x / m.other.weight.shape[0], True),
        (lambda m, x: x / m.other.weight.size(0), True),
        (lambda m, x: x / m.other.weight.numel(), True),
        (lambda m, x: x / m.other.weight.stride(0), True),
        (lambda m, x: x / m.image.shape[1], False),
        (lambda m, x: x / m.image.size(1), False),
        (lambda m, x: x / x.shape[1], False),
    ],
)
def test_whose_sizes_are_read(function: Any, read: bool) -> None:
    found = recorded(function)
    assert found.read_numbers == ({"other.weight", "other"} if read else set())
    divisor = found.graph.output_node().args[0].args[1]
    assert divisor == 8 or isinstance(divisor, fx.Node) or divisor == 64


def test_an_operation_that_returns_its_input_is_another_value() -> None:
    found = recorded(lambda m, x: x + x.contiguous())
    assert calls(found) == ["contiguous", "add"]
    assert [str(arg) for arg in found.graph.output_node().args[0].args] == ["conv", "contiguous"]


def test_layers_may_be_called_by_name_and_on_constants() -> None:
    by_name = prepare(Behind(lambda m, x: m.other(input=x)), X, check=False)
    assert [op.flow for op in by_name.ops if op.name == "other"] == [Mix(8, 8, 1, True, False)]
    model = Behind(lambda m, x: x + m.other(m.image))
    graph = as_graph_model(prepare(model, X).traced)
    x = torch.randn(3, 3, 8, 8)
    with torch.no_grad():
        assert torch.equal(graph(x), model(x))
    assert [*graph.state_dict()] == ["_tensor_constant0", *model.state_dict()]


class Passing(nn.Module):
    """Passes its input on, and perhaps something else."""

    def __init__(self, changes: str = "") -> None:
        super().__init__()
        self.changes = changes
        if changes == "holds":
            self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, *others: Any, **named: Any) -> Tensor:
        return x + 0 if self.changes == "adds" else x


@pytest.mark.parametrize(
    ("changes", "call", "transparent"),
    [
        *(("", lambda p, x: p(x), True), ("adds", lambda p, x: p(x), False), ("holds", lambda p, x: p(x), False)),
        *(("", lambda p, x: p(x, x), False), ("", lambda p, x: p(x, a=x), False)),
    ],
)
def test_modules_that_pass_on_their_input_are_noted(changes: str, call: Any, transparent: bool) -> None:
    model = nn.Module()
    model.conv, model.passing = nn.Conv2d(3, 8, 1), Passing(changes)
    model.forward = lambda x: call(model.passing, model.conv(x)).relu()
    found = record(model, AsFound(model), (X,))
    assert found.transparent == ({"passing"} if transparent else set())
    assert any(node.target == "passing" for node in found.graph.nodes) is transparent
    assert not record(model, AsFound(model), (X,), training=True).transparent


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * random.random()


def test_what_is_left_alone_may_draw_by_any_generator() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), Noise())
    random.seed(0)
    state = random.getstate()
    found = record(model, AsFound(model), (X,), leaves=["1"])
    assert random.getstate() == state
    assert [node.target for node in found.graph.nodes if node.op == "call_module"] == ["0", "1"]
    with pytest.raises(GraphError, match="draws random numbers by Python's random"):
        record(model, AsFound(model), (X,))
    assert random.getstate() == state


class Unseen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        with torch._C.DisableTorchFunction():
            mean = x.detach().mean((1, 2, 3), keepdim=True) + torch.rand(1)
        return x * mean


def test_what_is_computed_unseen_is_named_by_its_line() -> None:
    with pytest.raises(GraphError, match=r"cannot be recorded .* at test_trace_parts.py:\d+ \(`return x \* mean`\);"):
        prepare(Unseen(), torch.randn(2, 3, 4, 4))


class Fixed(nn.Module):
    """Decides by the values that its layer computes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1)
        nn.init.constant_(self.conv.bias, 5.0)
        nn.init.zeros_(self.conv.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return self.head(x) if float(x.mean()) > 4 else -self.head(x)


def test_decisions_are_fixed_by_what_is_computed() -> None:
    network = prepare(Fixed(), X, on_decision="fix")
    (fixed,) = network.traced.fixed  # training computes the same
    assert fixed.endswith(" = 5.0")
    assert [op.name for op in network.ops] == ["x", "conv", "mean", "head", "output"]


class Unwatched(nn.Module):
    """Trains unless it is recorded, on ``batch`` samples alone or on several."""

    def __init__(self, batch: int = -1) -> None:
        super().__init__()
        self.conv, self.norm, self.batch = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), batch

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x)).view(self.batch, 8)
        if self.training and torch._C._len_torch_function_stack():
            raise RuntimeError("I am watched")
        return x


@pytest.mark.parametrize(("model", "batch"), [(Unwatched(2), 2), (Unwatched(), 1)])
def test_a_model_that_trains_must_be_recorded_in_training(model: nn.Module, batch: int) -> None:
    """The first does not run on one sample more than the example has, the second trains on no single value."""
    with pytest.raises(GraphError, match="^Unwatched cannot be recorded in training mode.*I am watched"):
        prepare(model, torch.zeros(batch, 3, 1, 1), check=False)


# Constants


class OneNumberEach(nn.Module):
    """Scales channels by one number each, of which some are constant once filters are removed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.other, self.head = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 1), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        scale = (1 + self.conv(x)).amax((0, 2, 3))
        return self.head(self.other(x).mean((2, 3)) * scale)


def test_constants_may_be_one_number_for_each_channel() -> None:
    model, x = lively(OneNumberEach()), torch.randn(2, 3, 4, 4, dtype=torch.float64)
    pruner = Pruner(model, x, scorer="free")
    kept = np.array([True, False] * 4)
    small = compacted(pruner, {"conv": kept, "other": ~np.zeros(8, dtype=bool)})
    with torch.no_grad():
        scale = (1 + model.conv(x) * torch.from_numpy(kept)[:, None, None]).amax((0, 2, 3))
        truth = model.head(model.other(x).mean((2, 3)) * scale)
        assert relative_error(small(x), truth) < 1e-12
    assert small.conv.weight.shape[0] == 4


def observed(values: Tensor, states: list[Any], axis: int = 1) -> Tensor:
    node: Any = SimpleNamespace(name="x")
    self: Any = SimpleNamespace(axes={"x": axis}, states={"x": np.array(states)})
    return Observer._constants(self, node, values)


def test_constants_are_read_off_one_place() -> None:
    values = torch.randn(2, 3, 4, 4)
    values[:, 1] = 7.0
    assert observed(values, [LIVE, CONST, ZERO])[1] == 7
    assert observed(values, [LIVE, CONST, ZERO]).shape == (3,)
    assert observed(values.movedim(1, 3), [LIVE, CONST, ZERO], 3)[1] == 7
    assert observed(values.movedim(1, 0), [LIVE, CONST, ZERO], 0)[1] == 7
    assert observed(values[0, :, 0, 0], [LIVE, CONST, ZERO], 0)[1] == 7
    values[1, 1, 3, 3] = 7.5
    with pytest.raises(GraphError, match="^The channel rule of 'x' is wrong: a channel it calls constant varies"):
        observed(values, [LIVE, CONST, ZERO])
    values[1, 1, 3, 3] = float("inf")
    observed(values, [LIVE, CONST, ZERO])  # made so before
    values[1, 1, 3, 3] = float("nan")
    observed(values, [LIVE, CONST, ZERO])


def test_constants_are_spread_over_a_layout() -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert _spread(values, np.array([1, 3]), np.array([3, 0, 1])).tolist() == [4, 0, 2]
    whole = _spread(values.long(), np.array([0]), np.array([0, 2]))
    assert (whole.dtype, whole.tolist()) == (torch.float32, [1, 0])
    assert _spread(values.double(), np.array([0]), np.array([0, 2])).dtype == torch.float64


def test_operations_that_read_other_types() -> None:
    def op(made: torch.dtype, *read: torch.dtype) -> Any:
        inputs = [SimpleNamespace(meta={DTYPE: dtype}) for dtype in read]
        return SimpleNamespace(node=SimpleNamespace(meta={DTYPE: made}), inputs=inputs)

    single, double = torch.float32, torch.float64
    for found, other in (
        *((op(single, single, single), False), (op(double, single, double), True), (op(double, single), True)),
        (op(double), False),
    ):
        assert _has_other_types(found) is other


def test_the_first_operation_that_differs_is_told_by_more_than_rounding() -> None:
    """Of three convolutions the first makes 1e-5 too much in the small network, and the last one twice as much."""
    for dtype, named in ((torch.float64, "0"), (torch.float32, "2")):
        model = nn.Sequential(*(nn.Conv2d(3, 3, 1) for _ in range(3))).to(dtype)
        x = torch.randn(2, 3, 4, 4, dtype=dtype, generator=torch.Generator().manual_seed(0))
        network = prepare(model, x, check=False)

        def wrong(*given: Any) -> Any:
            builder = build(*given)
            for name, factor in (("0", 1 + 1e-5), ("2", 2.0)):
                layer = builder.root.get_submodule(name)
                layer.weight, layer.bias = (nn.Parameter(w * factor) for w in (layer.weight, layer.bias))
            return builder

        found = _first_difference(network.traced, solve(network.ops, {}), {}, wrong, (x,))
        assert found[0] == f"the two part at '{named}'"


# Pickling


def test_functions_by_name() -> None:
    assert _named(F.relu) == _Named("torch.nn.functional", "relu")
    assert _named("relu") == "relu"
    nameless = lambda x: x  # noqa: E731
    assert _named(nameless) is nameless
    assert _named(len) == _Named("builtins", "len")


# Trials


@pytest.mark.parametrize("of_training", [True, False])
def test_numbers_are_those_of_evaluation(of_training: bool) -> None:
    model = Behind(lambda m, x: x if m.training is of_training else x * float("nan"))
    traced = prepare(model, X, check=False).traced
    trial = Trial(traced, deep_copy(model))
    assert trial.makes_numbers(iter([(torch.zeros(2, 4, 1, 1),), (torch.randn(2, 3, 4, 4),)])) is not of_training
    assert trial.makes_numbers([(torch.zeros(2, 4, 1, 1),)])  # nobody can tell


class Lies(nn.Module):
    """Asks how its input lies in memory, where gradients are off."""

    def forward(self, x: Tensor) -> Tensor:
        return x if torch.is_grad_enabled() or x.is_contiguous() else -x


def test_inputs_that_lie_otherwise_are_tried_without_gradients() -> None:
    model = Lies()
    traced = prepare(model, X, check=False).traced
    assert traced.asks == {"gradients", "layout"}
    found = Trial(traced, deep_copy(model)).problem((torch.rand(2, 3, 4, 4),))
    assert found == "for inputs that lie otherwise in memory by 2.0e+00 of its largest value"  # x and -x


def test_random_numbers_depend_on_nothing_drawn_before() -> None:
    first = torch.rand(3, generator=torch.Generator().manual_seed(0))
    with torch.random.fork_rng([]), _SameRandomNumbers():
        assert torch.equal(torch.rand(3), first)
        assert torch.equal(torch.rand(3), first)
        state = torch.manual_seed(1).get_state()
        torch.zeros(3).add_(1)  # which draws nothing
        assert torch.equal(torch.get_rng_state(), state)


class WritesInto(nn.Module):
    """Writes into what its first layer makes, where no graph follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.middle, self.head = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        x[:, 0] = x[:, 1]
        x = self.head(self.middle(x).relu())
        return x if x.sum() > 1e9 else -x


def test_what_is_written_into_is_left_whole() -> None:
    model, x = lively(WritesInto()), torch.randn(2, 3, 4, 4, dtype=torch.float64)
    pruner = Pruner(model, x, scorer="free", on_decision="stop")
    assert [group.name for group in pruner.network.groups] == ["middle"]
    kept = np.array([True, False] * 4)
    small = compacted(pruner, {"middle": kept})
    with torch.no_grad():
        written = model.conv(x)
        written[:, 0] = written[:, 1]
        truth = -model.head(model.middle(written).relu() * torch.from_numpy(kept)[:, None, None])
        assert relative_error(small(x), truth) < 1e-12
        assert relative_error(pruner.model.eval()(x), truth) < 1e-12


# Sizes that a view infers


def view(*args: Any, target: Any = "view", op: str = "call_method") -> tuple[fx.Node, fx.Node]:
    graph = fx.Graph()
    x = graph.placeholder("x")
    return x, graph.create_node(op, target, tuple(x if arg == "x" else arg for arg in args), name="y")


def test_sizes_that_a_view_is_given() -> None:
    for args, options, sizes in (
        *((("x", 2, -1), {}, (2, -1)), (("x", (2, -1)), {}, (2, -1)), (("x", [2]), {"target": "reshape"}, (2,))),
        *((("x",), {}, ()), (("x", 2), {"target": "expand"}, ())),
        (("x", (2, 3)), {"target": torch.reshape, "op": "call_function"}, ()),
    ):
        assert _sizes_of_view(view(*args, **options)[1]) == sizes


@pytest.mark.parametrize(
    ("args", "before", "grows", "expected"),
    [
        *((("x", -1, 512), (2, 8, 8, 8), 1, True), (("x", -1, 512), (2, 8, 8, 8), 0, False)),
        *(
            (("x", -1, 8), (2, 8, 1, 1), 1, False),
            (("x", -1, 8), (2, 8), 1, False),
            (("x", -1, 16), (2, 8, 2, 1), 1, True),
        ),
        *((("x", 2, -1), (2, 8, 8, 8), 1, False), (("x", -1, "x"), (2, 8, 8, 8), 1, False), (("x",), (2, 8), 1, False)),
    ],
)
def test_views_that_infer_how_many_samples_there_are(args: Any, before: Any, grows: int, expected: bool) -> None:
    _, node = view(*args)
    traced: Any = SimpleNamespace(shapes={"x": before}, growth=lambda source: (grows, *[0] * (len(before) - 1)))
    assert _infers_samples(node, traced) is expected


@pytest.mark.parametrize(
    ("args", "before", "after", "axis", "expected"),
    [
        *(
            (("x", 2, -1, 7, 7), (2, 8, 7, 7), (2, 8, 7, 7), 1, True),
            (("x", 2, 8, -1, 7), (2, 8, 7, 7), (2, 8, 7, 7), 1, False),
        ),
        *((("x", "x", -1), (2, 8, 7, 7), (2, 392), 1, False), (("x", 2, -1), (2, 8, 7, 7), (2, 392), 1, False)),
        *(
            (("x", "x", -1, 7), (2, 8, 7, 7), (2, 56, 7), 1, True),
            (("x", 2, -1, 7), (2, 8, 7, 7), (2, 56, 7), 1, True),
        ),
        *((("x", 2, -1, 1), (2, 8), (2, 8, 1), 1, False), (("x", 2, -1, 1), (2, 8, 1, 1), (2, 8, 1), 1, False)),
        *((("x",), (2, 8), (2, 8), 1, False), (("x", (2, -1, 7)), (2, 8, 7), (2, 8, 7), 1, True)),
    ],
)
def test_views_that_infer_how_many_channels_there_are(
    args: Any, before: Any, after: Any, axis: int, expected: bool
) -> None:
    x, node = view(*args)
    op: Any = SimpleNamespace(node=node, name="y", axis=axis, inputs=(x,))
    assert _infers_channels(op, {"x": before, "y": after}) is expected
    assert not _infers_channels(SimpleNamespace(node=node, name="y", axis=axis, inputs=()), {"y": after})  # type: ignore[arg-type]


def test_images_that_are_small() -> None:
    for shapes, small in (
        *((((2, 3, 32, 32),), True), (((2, 3, 32, 33),), False), (((2, 3, 8, 8), (2, 3, 33, 32)), False)),
        *((((2, 3, 1024),), True), (((2, 3, 1025),), False), (((9, 9999),), True)),
    ):
        graph = fx.Graph()
        for _ in shapes:
            graph.placeholder("x")
        names = [node.name for node in graph.nodes]
        traced: Any = SimpleNamespace(graph=graph, shapes=dict(zip(names, shapes, strict=True)))
        assert _is_small(traced) is small
