"""Small parts of the graph, each by itself: modes, gates, added layers, sizes, copies, fingerprints, plans."""

from __future__ import annotations

import copy
import json
from collections import OrderedDict
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.nn.utils.parametrize import register_parametrization

from networks import compacted, lively, random_choice, relative_error
from paam import Pruner
from paam.errors import ArtifactError, ConstantMapError, GraphError
from paam.graph.channel_map import ChannelMap, ChannelOffset, NoChannels, OnesChannel, whole_shape
from paam.graph.copies import computed_weights, deep_copy, light_copy, tensors_of, write_out_weights
from paam.graph.cost import batch_of, count
from paam.graph.fingerprint import function_name, settings_of
from paam.graph.gating import apply_gate
from paam.graph.modes import copying, evaluating, has_plain_modes, in_mode, switch
from paam.graph.network import prepare
from paam.graph.plan import Kept, Plan, recall_plan, remember_plan
from paam.graph.resize import rewrite_size
from paam.graph.rewired import as_graph_model
from paam.graph.runner import GraphRunner, lend_constants

DOUBLE = torch.float64


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


# Modes


class OwnTrain(nn.Module):
    """Notes the modes that it is put into, and passes them on to nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ReLU()
        self.told: list[bool] = []

    def train(self, mode: bool = True) -> nn.Module:
        self.told.append(mode)
        self.training = mode
        return self


class OwnSetting(nn.Module):
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)


class Fixed(nn.Module):
    training = True


def test_kinds_whose_modes_are_flags() -> None:
    kinds = (nn.Module, nn.BatchNorm2d, OwnTrain, OwnSetting, Fixed)
    assert [has_plain_modes(kind) for kind in kinds] == [True, True, False, False, False]


def test_modes_are_switched_as_train_does() -> None:
    plain = nn.Sequential(nn.ReLU(), nn.Sequential(nn.ReLU()))
    assert switch(plain, False) is plain
    assert [module.training for module in plain.modules()] == [False] * 4
    switch(plain, True)
    assert [module.training for module in plain.modules()] == [True] * 4
    model = nn.Sequential(OwnTrain(), nn.ReLU())
    assert switch(model, False) is model
    assert model[0].told == [False]
    assert (model[0].training, model[0].inner.training, model[1].training) == (False, True, False)


def test_modes_are_put_back_one_by_one() -> None:
    model = nn.Sequential(nn.ReLU(), OwnTrain(), nn.ReLU()).train()
    model[0].eval()
    model[1].told.clear()
    with evaluating(model):
        assert [module.training for module in model.modules()] == [False, False, False, True, False]
    assert [module.training for module in model.modules()] == [True, False, True, True, True]
    assert model[1].told == [False]
    with in_mode(model, True):
        assert [module.training for module in model.modules()] == [True] * 5
    assert not model[0].training
    model.eval()
    model[1].inner.eval()
    model[1].told.clear()
    with evaluating(model):  # nobody is told what it is already
        assert not model[1].told


def test_nothing_works_in_place_inside() -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), nn.ReLU(), nn.Flatten())
    with suppress(KeyError), copying(model):
        assert [getattr(layer, "inplace", None) for layer in model] == [False, False, None]
        raise KeyError
    assert [getattr(layer, "inplace", None) for layer in model] == [True, False, None]


# Gates and added layers


def test_gates_multiply_channels() -> None:
    x = numbers(2, 4, 3)
    assert apply_gate(x, None, 1) is x
    gate = torch.tensor([1.0, 0.0, 2.0, 0.5])
    assert torch.equal(apply_gate(x, gate, 1), x * gate[:, None])
    assert torch.equal(apply_gate(x, gate[:2], 1), x * torch.tensor([1.0, 0.0, 1.0, 0.0])[:, None])
    assert torch.equal(apply_gate(x.mT, gate, 2), x.mT * gate)
    assert apply_gate(x.float(), gate.double(), 1).dtype == torch.float32


@pytest.mark.parametrize("index", [[2, 0], [2, -1, 0, -1], [-1, 0, 1, 2], [1, 2, 0], [-1]])
@pytest.mark.parametrize("axis", [1, 2, 3, -4])
def test_index_maps_and_their_gradients_are_those_of_indexing(index: list[int], axis: int) -> None:
    axis %= 5
    layer = ChannelMap(index, 3, axis)
    x = numbers(2, 3, 3, 3, *[3] * (axis == 4)).requires_grad_()
    padded = torch.cat([x, torch.zeros_like(x.narrow(axis, 0, 1))], axis)
    truth = padded.index_select(axis, torch.tensor([3 if place < 0 else place for place in index]))
    weights = numbers(*truth.shape, seed=1)
    for given in (x, x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x):
        found = layer(given)
        assert torch.equal(found, truth)
        pairs = [torch.autograd.grad((y * weights).sum(), x, create_graph=True)[0] for y in (found, truth)]
        assert torch.equal(*pairs)
        with torch.no_grad():
            assert torch.equal(layer(given), truth)
    assert torch.equal(layer(x.detach()), truth)
    assert not layer(x.detach()).requires_grad
    assert not layer.state_dict()
    assert layer.extra_repr() == f"3 -> {len(index)}, axis={axis}"


@pytest.mark.filterwarnings("ignore")
def test_index_maps_keep_the_order_in_memory() -> None:
    x = numbers(2, 3, 4, 5)
    layer = ChannelMap([1, -1], 3, 1)
    assert layer(x).is_contiguous()
    last = layer(x.contiguous(memory_format=torch.channels_last))
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert not last.is_contiguous()
    assert layer(x.float()).dtype == torch.float32
    assert layer(x[:, :0]).tolist() == torch.zeros(2, 2, 4, 5).tolist()
    assert layer.index_mask is not None
    assert layer.back_mask is not None
    assert layer.back.tolist() == [0, 0, 0]
    assert layer.back_mask.tolist() == [0, 1, 0]
    layer.forget_gradients()
    assert [*dict(layer.named_buffers())] == ["index", "index_mask"]
    for given in (x, x.requires_grad_()):
        with torch.no_grad():
            assert layer(given).shape == (2, 2, 4, 5)  # nothing that only a backward pass reads
    assert layer(x.detach()).shape == (2, 2, 4, 5)
    assert "_Take" not in str(torch.jit.trace(layer, x).graph)
    assert ChannelMap([1, 0], 2, 1).index_mask is None
    assert ChannelMap([1, 0], 2, 1).back_mask is None


@pytest.mark.parametrize("layer", [ChannelMap([1, 0], 3, 1), ChannelOffset(torch.ones(3), 1)])
def test_added_layers_read_as_many_channels_as_they_were_made_for(layer: nn.Module) -> None:
    layer(torch.zeros(2, 3))
    layer(torch.zeros(2, 0) if isinstance(layer, ChannelMap) else torch.zeros(2, 3))
    for channels in (2, 4):
        with pytest.raises(GraphError, match=f"reads 3 values in a row where this input gives it {channels}:"):
            layer(torch.zeros(2, channels))


def test_offsets_are_added_along_their_axis() -> None:
    offset = torch.tensor([0.25, 1.0, 2.0])
    x = numbers(2, 3, 4)
    assert torch.equal(ChannelOffset(offset, 1)(x), x + offset[:, None])
    assert torch.equal(ChannelOffset(offset, 2)(x.mT), x.mT + offset)
    whole = ChannelOffset(offset, 1)(torch.ones(2, 3, dtype=torch.int64))
    assert (whole.dtype, whole.tolist()) == (torch.int64, [[1, 2, 3]] * 2)
    assert ChannelOffset(offset, 1).extra_repr() == "3, axis=1"


@pytest.mark.parametrize("axis", [1, 2])
def test_one_more_channel_of_ones(axis: int) -> None:
    x = numbers(2, 3, 4)
    found = OnesChannel(axis)(x)
    assert torch.equal(found, torch.cat([x, torch.ones_like(x.narrow(axis, 0, 1))], axis))


def test_values_without_channels_grow_with_the_batch() -> None:
    layer = NoChannels((6, 8, 5), 1, (3, 2, 4, 4), torch.float64, (2, 0, 1))
    for batch in (3, 5, 1):
        made = layer(torch.zeros(batch, 2, 4, 4))
        assert made.shape == (2 * batch, 0, 2 + batch)
        assert made.dtype == torch.float64
    assert not layer.state_dict()
    assert not layer.like.numel()
    for shape in ((3, 2, 4, 5), (3, 1, 4, 4), (3, 2, 4)):
        with pytest.raises(ConstantMapError, match="prune with an example of the size"):
            layer(torch.zeros(shape))


def test_the_shape_of_the_whole() -> None:
    assert whole_shape(torch.zeros(2, 3, 4), 1, 7) == (2, 7, 4)
    assert whole_shape(torch.zeros(2, 3, 4), 2, 7) == (2, 3, 7)


# Running a graph


def fails(x: Tensor) -> Tensor:
    raise ValueError("as it was said")


class WithConstant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.grid = torch.full((4, 4), 2.0)  # no buffer

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) * self.grid


def test_graphs_run_with_tensors_that_are_no_buffers() -> None:
    model = WithConstant()
    traced = prepare(model, torch.zeros(2, 3, 4, 4)).traced
    ((name, grid),) = traced.constants.items()
    assert grid is model.grid
    graph = as_graph_model(traced)
    x = torch.randn(1, 3, 4, 4)
    with torch.no_grad():
        assert torch.equal(graph(x), model(x))
        assert torch.equal(GraphRunner(traced, model).run(x), model(x))
    root: Any = nn.Module()
    lend_constants(traced, root)
    assert getattr(root, name) is grid
    other: Any = SimpleNamespace(constants={name: grid + 1})
    lend_constants(other, root)
    assert getattr(root, name) is grid  # what is there stays


def test_errors_of_a_graph_are_told_as_they_are() -> None:
    graph = fx.Graph()
    graph.output(graph.call_function(fails, (graph.placeholder("x"),)))
    traced: Any = SimpleNamespace(graph=graph, constants={})
    with pytest.raises(ValueError, match="^as it was said$"):
        GraphRunner(traced, nn.Module()).run(torch.zeros(1))


class Same(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient


class OwnCode(nn.Module):
    """Does what a graph cannot have, and decides by values."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.conv, self.head = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = Same.apply(self.relu(x))
        x[:, 0] = torch.add(x[:, 1], 1, out=torch.empty_like(x[:, 1]))
        y = self.head(self.relu(self.conv(x)))
        return y if y.sum() > 1e9 else -y


def test_gates_stand_in_code_that_no_graph_has() -> None:
    model, x = lively(OwnCode()), numbers(2, 3, 4, 4)
    pruner = Pruner(model, x, scorer="free", on_decision="stop")
    gate = torch.tensor([True, False, True, False])
    small = compacted(pruner, {group.name: gate.numpy() for group in pruner.network.groups})
    with torch.no_grad():
        changed = x.relu()
        changed[:, 0] = changed[:, 1] + 1
        truth = -model.head(model.conv(changed).relu() * gate[:, None, None])
        assert relative_error(pruner.model.eval()(x), truth) < 1e-12
        assert relative_error(small(x), truth) < 1e-12


# Sizes that are given


def view(*args: Any, method: bool = True) -> fx.Node:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    given = tuple(y if arg == "y" else arg for arg in args)
    if method:
        return graph.call_method("view", (x, *given))
    return graph.call_function(torch.reshape, (x, *given))


def test_sizes_of_views_are_rewritten() -> None:
    node = view(-1, 512)
    rewrite_size(node, 1, 300)
    assert node.args[1:] == (-1, 300)
    node = view((-1, 512, 7))
    rewrite_size(node, 1, 300)
    assert node.args[1:] == (-1, 300, 7)
    node = view([-1, 512], method=False)
    rewrite_size(node, 1, 300)
    assert node.args[1:] == ((-1, 300),)
    node = view(512)
    rewrite_size(node, 0, 300)
    assert node.args[1:] == (300,)


def test_sizes_read_off_another_tensor_are_rewritten() -> None:
    node = view("y")
    node.meta["shape"] = (2, 512, 7)
    rewrite_size(node, 1, 300)
    first, number, last = node.args[1:]
    assert number == 300
    y = [*node.graph.nodes][1]
    assert (first.args, last.args) == ((y, 0), (y, 2))
    assert len(node.graph.nodes) == 6  # those of all sizes are made


@pytest.mark.parametrize("named", [False, True])
def test_the_number_of_groups_is_rewritten(named: bool) -> None:
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    given = (x, weight, None, 1, 1, 1)
    node = graph.call_function(F.conv2d, given, {"groups": 8}) if named else graph.call_function(F.conv2d, (*given, 8))
    rewrite_size(node, 1, 5)
    assert (node.args, node.kwargs) == (given, {"groups": 5})


class Blurred(nn.Module):
    """A filter that blurs channel by channel, with their number as a plain argument."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)
        self.register_buffer("kernel", torch.rand(8, 1, 3, 3, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.conv2d(self.first(x).relu(), self.kernel, None, 1, 1, 1, 8))


def test_a_blur_by_a_function_is_cut() -> None:
    model, x = lively(Blurred()), numbers(2, 3, 6, 6)
    pruner = Pruner(model, x, scorer="free")
    small = compacted(pruner, random_choice(pruner.network, 0, whole=0, empty=0))
    kept = small.first.weight.shape[0]
    assert 0 < kept < 8
    assert small.kernel.shape == (kept, 1, 3, 3)
    with torch.no_grad():
        assert relative_error(small(x), pruner.model.eval()(x)) < 1e-12


READS: dict[str, Any] = {
    "all numbers": lambda x: x / x.numel(),
    "channels": lambda x: x / x.shape[1],
    "channels by method": lambda x: x * x.size(1),
    "channels and a view": lambda x: x.view(x.shape[0], x.shape[1], -1)[..., None] / x.shape[1],
    "another's shape": lambda x: x.relu().reshape(x.shape) / x.shape[-3],
    "rows": lambda x: x / x.shape[2],
    "all sizes": lambda x: x / sum(x.shape),
}


class Reading(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.first, self.second, self.function = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1), function

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function(self.first(x)))


@pytest.mark.parametrize("name", READS)
def test_who_reads_sizes_reads_those_of_the_whole(name: str) -> None:
    model, x = lively(Reading(READS[name])), numbers(2, 3, 4, 4)
    pruner = Pruner(model, x, scorer="free")
    kept = [True, False, True, True, False, False, True, False]
    small = compacted(pruner, {"first": torch.tensor(kept).numpy()})
    assert small.first.weight.shape[0] == 4
    with torch.no_grad():
        for batch in (2, 1):
            assert relative_error(small(x[:batch]), pruner.model.eval()(x[:batch])) < 1e-12


# Copies


class Table:
    """Something that knows how it is copied."""

    def __init__(self) -> None:
        self.numbers = [1]


class Holding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.names, self.pairs, self.kind, self.table = ["a"], (1, "x"), nn.ReLU, Table()
        self.nested, self.empty, self.ordered, self.tuple = {"a": [1]}, [], OrderedDict(), ([1], 2)
        self.also = self.inner
        self.members = [self.inner]


def test_light_copies_hold_copies_of_all_but_tensors() -> None:
    model = Holding()
    twin: Any = light_copy(model)
    assert twin.inner is not model.inner
    assert twin.also is twin.inner
    assert twin.members[0] is twin.inner
    assert twin.inner.weight is model.inner.weight
    assert twin.inner._parameters is not model.inner._parameters
    assert (twin.names, twin.pairs, twin.kind, twin.nested) == (["a"], (1, "x"), nn.ReLU, {"a": [1]})
    assert twin.pairs is model.pairs
    for name in ("names", "nested", "empty", "ordered", "table", "tuple"):
        assert getattr(twin, name) is not getattr(model, name)
        assert type(getattr(twin, name)) is type(getattr(model, name))
    assert twin.nested["a"] is not model.nested["a"]
    assert twin.table.numbers is not model.table.numbers
    assert twin.tuple[0] is not model.tuple[0]
    twin.inner.register_buffer("new", torch.zeros(1))
    assert not hasattr(model.inner, "new")


def test_tensors_of_modules() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2, affine=False))
    model[1].running_var = None
    found = [*tensors_of(model.modules())]
    assert len(found) == 3
    truth = (model[0].weight, model[1].running_mean, model[1].num_batches_tracked)
    assert all(one is other for one, other in zip(found, truth, strict=True))


def test_deep_copies_share_nothing() -> None:
    model = nn.Linear(2, 2)
    twin = deep_copy(model)
    assert twin.weight is not model.weight
    model.held = (part for part in ())
    with pytest.raises(GraphError, match="^Linear cannot be copied"):
        deep_copy(model)


class Stores(nn.Module):
    """Keeps in evaluation what it computes of its weights, and drops it when training begins."""

    def __init__(self) -> None:
        super().__init__()
        self.stored: Tensor | None = None

    def train(self, mode: bool = True) -> nn.Module:
        if mode:
            self.stored = None
        return super().train(mode)


def test_what_evaluation_has_stored_is_dropped() -> None:
    model = nn.Sequential(Stores(), nn.ReLU()).eval()
    model[0].stored = torch.ones(1)
    twin: Any = light_copy(model)
    assert twin[0].stored is None
    assert not twin[0].training
    assert model[0].stored is not None


class Half(nn.Module):
    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(0.5), requires_grad=trained)

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.factor


@pytest.mark.parametrize(("first", "second"), [(True, True), (True, False), (False, True), (False, False)])
def test_computed_weights_are_written_out_and_trained_as_before(first: bool, second: bool) -> None:
    layer = nn.Linear(2, 3)
    layer.weight.requires_grad_(first)
    before = layer.weight.detach().clone()
    register_parametrization(layer, "weight", Half(second))
    model = nn.Sequential(layer, nn.ReLU())
    assert torch.equal(computed_weights(layer)["weight"], before * 0.5)
    write_out_weights(model)
    assert type(model[0]) is nn.Linear
    assert [*dict(model.named_parameters())] == ["0.bias", "0.weight"]
    assert torch.equal(model[0].weight, before * 0.5)
    assert model[0].weight.requires_grad is (first or second)


def test_computing_weights_moves_nothing() -> None:
    layer: Any = spectral_norm(nn.Linear(3, 4)).train()
    before = [buffer.clone() for buffer in layer.buffers()]
    weight = computed_weights(layer)["weight"]
    assert not weight.requires_grad
    assert all(map(torch.equal, before, layer.buffers()))
    assert layer.parametrizations.training


@pytest.mark.parametrize("which", ["weight_norm", "spectral_norm"])
@pytest.mark.filterwarnings("ignore")
def test_old_norms_of_weights_are_refused(which: str) -> None:
    layer = getattr(torch.nn.utils, which)(nn.Linear(2, 2))
    for copied in (light_copy, deep_copy):
        with pytest.raises(GraphError, match=f"^'1' has torch.nn.utils.{which},"):
            copied(nn.Sequential(nn.ReLU(), layer))
    light_copy(nn.Sequential(weight_norm(nn.Linear(2, 2))))


# Counting


def test_batches_and_counts() -> None:
    assert batch_of((torch.zeros(4, 2), torch.zeros(3))) == 4
    assert batch_of(([torch.zeros(2), torch.zeros(2)],)) == 2
    found = count(nn.Sequential(nn.Linear(3, 5), nn.ReLU()), torch.zeros(4, 3))
    assert (found.params, found.macs, found.uncounted) == (20, 15, {"relu": 1})


# Fingerprints


def test_settings_are_those_that_tensors_do_not_say() -> None:
    assert settings_of(nn.ReLU(inplace=True)) == " ReLU {}"
    assert settings_of(nn.LeakyReLU(0.5)) == " LeakyReLU {'negative_slope': 0.5}"
    assert settings_of(nn.Flatten(1)) == " Flatten {'end_dim': -1, 'start_dim': 1}"
    pooled = " AvgPool2d {'count_include_pad': True, 'kernel_size': 2, 'padding': 0, 'stride': 2}"
    assert settings_of(nn.AvgPool2d(2)) == pooled
    assert settings_of(nn.Sequential(nn.Flatten(0), nn.ReLU())) == (
        " Sequential {}; 0 Flatten {'end_dim': -1, 'start_dim': 0}; 1 ReLU {}"
    )

    class Own(nn.Module):
        threshold, value = 3, None

    assert settings_of(Own()) == " Own {'threshold': 3}"


def test_names_of_functions() -> None:
    assert function_name("relu") == "Tensor.relu"
    assert function_name(F.relu) == "torch.nn.functional.relu"
    assert function_name(len) == "builtins.len"
    assert function_name(torch.relu) == "torch.relu"
    assert function_name(Tensor.relu_) == "relu_"  # which does not say where it is from


def test_fingerprints_are_short() -> None:
    assert len(prepare(nn.Conv2d(3, 2, 1), torch.zeros(1, 3, 2, 2), check=False).traced.fingerprint) == 16


# Plans


def text(**changes: Any) -> str:
    plan = Plan("f" * 16, ((2, 3, 4, 4),), "sum", "independent", {"conv": Kept(3, (0, 2))})
    return json.dumps({**json.loads(plan.to_json()), **changes})


DTYPED = {"shape": [2, 3], "dtype": "int64"}


@pytest.mark.parametrize(
    ("inputs", "read"),
    [
        ([[2, 3]], ((2, 3),)),
        ([[2, 3], [1]], ((2, 3), (1,))),
        ([[[2, 3], [2, 4]]], ([(2, 3), (2, 4)],)),
        ([DTYPED], ({"shape": (2, 3), "dtype": "int64"},)),
        ([[DTYPED]], ([{"shape": (2, 3), "dtype": "int64"}],)),
        ([{"a": [1, 2], "b": [[3]]}], ({"a": (1, 2), "b": [(3,)]},)),
        ([{"shape": [1, 2]}], ({"shape": (1, 2)},)),
        ([{"shape": [1, 2], "dtype": [3]}], ({"shape": (1, 2), "dtype": (3,)},)),
        ([[[[[2]]]]], ([[[(2,)]]],)),
        ([{"a": {"a": {"a": [2]}}}], ({"a": {"a": {"a": (2,)}}},)),
        ([[1 << 28]], ((1 << 28,),)),
        ([[2, 1 << 27]], ((2, 1 << 27),)),
    ],
)
def test_shapes_of_inputs_are_read_from_a_plan(inputs: Any, read: Any) -> None:
    assert Plan.from_json(text(inputs=inputs)).inputs == read


@pytest.mark.parametrize(
    "inputs",
    [
        *(None, [], {}, "x", [[]], [[2, []]], [[0, 3]], [[-1]], [[2.0]], [[True]], [["2"]], [{}], [[{}]], [None], [3]),
        *([[[[[[2]]]]]], [{"a": {"a": {"a": {"a": [2]}}}}], [{"a": [[[[2]]]]}], [{"a": []}], [[[2], []]], [[[2], [0]]]),
        *([(1 << 28) + 1], [[2, (1 << 27) + 1]], [{"shape": [0], "dtype": "int64"}], [{"a": [1], "b": [0]}]),
        *([[[2], 3]], [{"shape": [2], "dtype": 3}], [[2], None]),
    ],
)
def test_what_are_no_shapes_is_refused(inputs: Any) -> None:
    with pytest.raises(ArtifactError, match="inputs must be"):
        Plan.from_json(text(inputs=inputs))


@pytest.mark.parametrize(
    ("group", "right"),
    [
        *(({"width": 1, "keep": []}, True), ({"width": 1, "keep": [0]}, True), ({"width": 3, "keep": [0, 2]}, True)),
        *(({"width": 0, "keep": []}, False), ({"width": 3, "keep": [3]}, False), ({"width": 3, "keep": [-1]}, False)),
        *(({"width": 3, "keep": [2, 0]}, False), ({"width": 3, "keep": [1, 1]}, False), ({"width": 3}, False)),
        *(({"width": True, "keep": []}, False), ({"width": 2.0, "keep": []}, False), ([3, []], False)),
        *(({"width": 3, "keep": [0.0]}, False), ({"width": 3, "keep": [False]}, False), ({"keep": []}, False)),
        ({"width": 3, "keep": "0"}, False),
    ],
)
def test_groups_of_a_plan(group: Any, right: bool) -> None:
    if right:
        assert Plan.from_json(text(groups={"conv": group})).groups["conv"].width == group["width"]
        return
    with pytest.raises(ArtifactError, match=r"^the plan is not valid: groups\.conv"):
        Plan.from_json(text(groups={"conv": group}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        *(
            ({"format": "x"}, "is not a paam plan"),
            ({"version": 2}, "has plan version 2"),
            ({"base": 3}, "is not a paam"),
        ),
        *(
            ({"placement": 3}, "placement must"),
            ({"fingerprint": None}, "fingerprint must"),
            ({"groups": []}, "groups must"),
        ),
        *(({"ignore": "x"}, "ignore must be a list"), ({"ignore": ["x", 3]}, "ignore must be text")),
        *(({"keep_class": 1}, "keep_class must be true"), ({"on_decision": 1}, "on_decision must be text")),
    ],
)
def test_other_plans_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ArtifactError, match=said):
        Plan.from_json(text(**changes))


def test_plans_are_read_with_what_came_before() -> None:
    found = Plan.from_json(text(ignore=["a", "b"], keep_class=True, on_decision="fix", base=json.loads(text())))
    assert (found.ignore, found.keep_class, found.on_decision) == (("a", "b"), True, "fix")
    assert found.base is not None
    assert (found.base.ignore, found.base.keep_class, found.base.on_decision) == ((), False, "refuse")
    assert found.base.base is None
    assert (found.counts, found.kept_filters, found.all_filters) == ({"conv": (2, 3)}, 2, 3)
    assert found.groups["conv"].mask.tolist() == [True, False, True]
    assert json.loads(found.to_json())["base"] == json.loads(text())
    assert Plan.from_json(found.to_json()) == found
    assert len(found.digest) == 16
    assert found.digest != found.base.digest
    groups = {"a": {"width": 1, "keep": []}, "b": {"width": 2, "keep": []}}
    turned = {name: groups[name] for name in ("b", "a")}
    assert Plan.from_json(text(groups=groups)).digest == Plan.from_json(text(groups=turned)).digest


def test_networks_carry_their_plans() -> None:
    plan = Plan.from_json(text())
    plain, graph = nn.ReLU(), fx.symbolic_trace(nn.ReLU())
    for model in (plain, graph):
        assert recall_plan(model) is None
        remember_plan(model, plan)
        assert recall_plan(model) is plan
        assert recall_plan(copy.deepcopy(model)) == plan
    graph.meta["paam_plan"] = "x"
    assert recall_plan(graph) is None
