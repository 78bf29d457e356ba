"""Calls that nobody would list: other ways at other sizes, lists and dictionaries, answers of other types and ranks."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import paam
from networks import compacted, lively, random_choice, relative_error
from paam import Pruner
from paam.errors import GraphError, RecipeError
from paam.graph.checks.differences import difference
from paam.graph.network import prepare

X = torch.rand(2, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.head = nn.Linear(6, 3)
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)

    def whole(self, x: Tensor) -> Tensor:
        return self.end(self.b(self.a(x).relu()))

    def end(self, y: Tensor) -> Tensor:
        return self.head(y.mean((2, 3)))


def small_of(function: Callable[..., Any], example: Any = X, seed: int = 0, **options: Any) -> tuple[Pruner, nn.Module]:
    pruner = Pruner(lively(Net(function)), example, scorer="free", **options)
    return pruner, compacted(pruner, random_choice(pruner.network, seed, empty=0))


# Other ways at other sizes: the class's own code would go on where nobody has compared


def as_often_as_large(m: Net, x: Tensor) -> Tensor:
    y = m.a(x)
    for _ in range(y.shape[2] // 8):
        y = m.b(y)
    return m.end(y)


def halved_until_small(m: Net, x: Tensor) -> Tensor:
    y = m.b(m.a(x))
    while y.shape[-1] > 8:
        y = m.b(nn.functional.max_pool2d(y, 2))
    return m.end(y)


WAYS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "as often as large": (as_often_as_large, (2, 3, 16, 16)),
    "halved until small": (halved_until_small, (2, 3, 32, 32)),
    "wide images": (lambda m, x: m.end(m.b(m.b(m.a(x)))) if x.shape[3] > x.shape[2] else m.whole(x), (2, 3, 8, 12)),
    "large batches": (lambda m, x: m.end(m.b(m.b(m.a(x)))) if x.shape[0] > 9 else m.whole(x), (10, 3, 8, 8)),
}


@pytest.mark.parametrize("streams", ["independent", "tied"])
@pytest.mark.parametrize("name", WAYS)
def test_another_way_at_another_size_is_refused_by_small_networks_too(name: str, streams: str) -> None:
    function, shape = WAYS[name]
    pruner, small = small_of(function, streams=streams)
    with torch.no_grad():
        assert relative_error(small(X), pruner.model.eval()(X)) < 1e-9
    for network in (pruner.model, small):
        with pytest.raises(GraphError, match="another way for an input of this size"):
            network(torch.rand(shape, dtype=torch.float64))


def test_the_class_is_kept_where_it_is_asked_for_or_nothing_is_decided() -> None:
    choice = np.arange(6) % 2 == 0
    for function, options, kept in (
        (Net.whole, {}, True),
        (as_often_as_large, {"keep_class": True}, True),
        (as_often_as_large, {}, False),
    ):
        pruner = Pruner(lively(Net(function)), X, scorer="free", streams="tied", **options)
        small = compacted(pruner, {group.name: choice for group in pruner.network.groups})
        assert (type(small) is Net) == kept
        cost = pruner.network.cost({group.name: choice for group in pruner.network.groups})
        assert sum(p.numel() for p in small.parameters()) == cost.params


# Inputs and answers


def test_a_list_of_images_may_be_gone_through_one_by_one() -> None:
    pruner, small = small_of(lambda m, xs: [m.whole(x[None]) for x in xs], ([X[0], X[1]],))
    with torch.no_grad():
        for value, truth in zip(small([X[1], X[0]]), pruner.model.eval()([X[1], X[0]]), strict=True):
            assert relative_error(value, truth) < 1e-9


@pytest.mark.parametrize("squeeze", [lambda y: y.squeeze(), lambda y: y.squeeze(0)])
def test_an_answer_may_have_fewer_axes_for_one_sample(squeeze: Callable[[Tensor], Tensor]) -> None:
    pruner, small = small_of(lambda m, x: squeeze(m.whole(x)), X[:1])
    with torch.no_grad():
        assert relative_error(small(X[:1]), pruner.model.eval()(X[:1])) < 1e-9


def test_dictionaries_of_images_are_saved_and_loaded(tmp_path: Path) -> None:
    _, small = small_of(lambda m, images: m.whole(images["left"] + images["more"][0]), ({"left": X, "more": [X]},))
    paam.save(small, tmp_path)
    loaded = paam.load(tmp_path, Net(lambda m, images: m.whole(images["left"] + images["more"][0])).double())
    assert torch.equal(loaded({"left": X, "more": [X]}), small({"left": X, "more": [X]}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_answer_that_became_constant_keeps_its_type(dtype: torch.dtype) -> None:
    pruner = Pruner(lively(Net(lambda m, x: m.b(m.a(x).relu()).to(dtype).mean((2, 3)))), X, scorer="free")
    choice = {group.name: np.full(group.width, group.name != "a") for group in pruner.network.groups}
    small = compacted(pruner, choice)
    with torch.no_grad():
        truth = pruner.model.eval()(X)
        assert truth.dtype == small(X).dtype == dtype
        assert torch.allclose(small(X).double(), truth.double(), rtol=1e-3)


def test_a_parameter_may_be_unpacked() -> None:
    model = Net(lambda m, x: m.end(m.b(m.pair.unbind()[1] * next(iter(m.pair)) * m.a(x) + m.pair[1])))
    model.pair = nn.Parameter(torch.rand(2))
    pruner = Pruner(lively(model), X, scorer="free")
    small = compacted(pruner, random_choice(pruner.network, 1, empty=0))
    with torch.no_grad():
        assert relative_error(small(X), pruner.model.eval()(X)) < 1e-9


def test_layers_may_be_given_their_input_by_name() -> None:
    pruner, small = small_of(lambda m, x: m.head(input=m.b(input=m.a(x).relu()).mean((2, 3))))
    assert {"a", "b"} <= {group.name for group in pruner.network.groups}
    with torch.no_grad():
        assert relative_error(small(X), pruner.model.eval()(X)) < 1e-9


Pair = namedtuple("Pair", "first second")


@pytest.mark.parametrize(
    ("function", "example", "told"),
    [
        (lambda m, x: {"a": Pair(m.whole(x), None)}, X, "returns a Pair inside of a dictionary"),
        (lambda m, x: Pair(Pair(m.whole(x), None), None), X, "returns a Pair inside of"),
        (lambda m, x, more: m.whole(x), (X, []), "example input is empty"),
        (Net.whole, X[:0], "example input is empty"),
        (Net.whole, X.to("meta"), "device 'meta'"),
        (lambda m, x: torch.vmap(lambda one: m.whole(one[None])[0])(x), X, "cannot be recorded"),
    ],
)
def test_what_cannot_be_is_refused(function: Callable[..., Any], example: Any, told: str) -> None:
    with pytest.raises(GraphError, match=told):
        prepare(Net(function).double(), example)


# What forward() remembers, and asks


def annealed(m: Net, x: Tensor) -> Tensor:
    if m.training:
        m.steps = getattr(m, "steps", 0) + 1
        x = x * max(0.1, 1 - 0.1 * m.steps)
    return m.whole(x)


def warmed_up(m: Net, x: Tensor) -> Tensor:
    y = m.whole(x) * (2 if getattr(m, "warm", False) else 1)
    m.warm = True
    return y


def noted_down(m: Net, x: Tensor) -> Tensor:
    m.notes["calls"] = m.notes.get("calls", 0) + 1
    return m.whole(x) / m.notes["calls"]


def counted(m: Net, x: Tensor) -> Tensor:
    m.calls = getattr(m, "calls", 0) + 1
    return m.whole(x) * m.calls


@pytest.mark.parametrize(
    ("function", "name"), [(annealed, "steps"), (counted, "calls"), (warmed_up, "warm"), (noted_down, "notes")]
)
def test_what_is_remembered_is_refused(function: Callable[..., Any], name: str) -> None:
    model = Net(function).double()
    model.notes = {}
    with pytest.raises(GraphError, match=rf"keeps '{name}' from one call to the next"):
        prepare(model, X)


def test_a_number_that_changes_no_answer_may_be_remembered() -> None:
    def noted(m: Net, x: Tensor) -> Tensor:
        m.calls = getattr(m, "calls", 0) + 1
        return m.whole(x)

    model = Net(noted).double()
    assert prepare(model, X).groups
    assert not hasattr(model, "calls")


@pytest.mark.parametrize(
    ("function", "asked"),
    [
        (lambda m, x: m.whole(x) * (1 if x.is_contiguous() else 2), "how a tensor lies in memory"),
        (lambda m, x: m.whole(x) * x.stride()[-1], "how a tensor lies in memory"),
        (lambda m, x: m.whole(x) * (2 if x.requires_grad else 1), "whether gradients are on"),
    ],
)
def test_decisions_by_how_an_input_is_are_refused(function: Callable[..., Any], asked: str) -> None:
    with pytest.raises(GraphError, match=f"or decides by {asked}"):
        prepare(Net(function).double(), X)


@pytest.mark.parametrize("scale", [lambda w: w.nbytes, lambda w: w.stride()[0], lambda w: w.untyped_storage().nbytes()])
def test_sizes_of_weights_are_noticed_whatever_tells_them(scale: Callable[[Tensor], int]) -> None:
    function = lambda m, x: m.whole(x) * scale(m.b.weight) ** -0.5  # noqa: E731
    pruner = Pruner(lively(Net(function)), X, scorer="free", streams="tied")
    small = compacted(pruner, {group.name: np.arange(group.width) % 2 == 0 for group in pruner.network.groups})
    with torch.no_grad():
        assert relative_error(small(X), pruner.model.eval()(X)) < 1e-9


# Networks that take few inputs, and what is compared of them


class Between(nn.Module):
    """Insists on images, and remembers the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if not bool(((x >= 0) & (x <= 1)).all()):
            raise ValueError("images lie between 0 and 1")
        self.last = x.mean().detach()
        return x


def with_images(function: Callable[..., Any]) -> Net:
    model = Net(lambda m, x: function(m, m.images(x)))
    model.images = Between()
    return model


def test_a_network_that_takes_images_alone_is_compared_on_images() -> None:
    pruner = Pruner(lively(with_images(Net.whole)), X, scorer="free", ignore=["images"])
    small = compacted(pruner, random_choice(pruner.network, 0, empty=0))
    with torch.no_grad():
        assert relative_error(small(X), pruner.model.eval()(X)) < 1e-9

    def doubled(m: Net, x: Tensor) -> Tensor:
        held = m.a._parameters["weight"]
        m.a._parameters["weight"] = nn.Parameter(held * 2)
        try:
            return m.whole(x)
        finally:
            m.a._parameters["weight"] = held

    with pytest.raises(GraphError, match="does not compute what the model itself does"):
        prepare(with_images(doubled).double(), X, ignore=["images"])


def test_a_network_that_answers_nothing_is_not_taken_for_compared() -> None:
    class Picky(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if float(x.sum()) != float(X.sum()):
                raise ValueError("another image")
            return x

    model = Net(lambda m, x: m.whole(m.images(x)))
    model.images = Picky()
    with pytest.raises(GraphError, match=r"answers neither random inputs nor the example .*check=False"):
        prepare(model.double(), X, ignore=["images"])
    assert prepare(model, X, ignore=["images"], check=False).groups


def test_what_is_fixed_leaves_parameters_trainable() -> None:
    model = Net(lambda m, x: m.whole(x) * (2 if x.sum() > -1e9 else 1)).double()
    model.b.requires_grad_(False)
    before = [p.requires_grad for p in model.parameters()]
    pruner = Pruner(model, X, scorer="free", on_decision="fix", inplace=True)
    assert [p.requires_grad for p in model.parameters()] == before
    with pruner.weighting(keep_filters=0.5):
        pruner.model(X).sum().backward()
    assert model.a.weight.grad is not None


def test_ignored_parts_may_change_their_buffers_beside_a_head_for_training() -> None:
    def with_head(m: Net, x: Tensor) -> Any:
        y = m.a(x).relu()
        return (m.end(m.b(y)), m.head(y.mean((2, 3)))) if m.training else m.end(m.b(y))

    pruner = Pruner(lively(with_images(with_head)), X, scorer="free", ignore=["images"])
    small = compacted(pruner, random_choice(pruner.network, 0, empty=0))
    with torch.no_grad():
        assert relative_error(small(X), pruner.model.eval()(X)) < 1e-9


def test_training_at_one_batch_size_alone_is_known() -> None:
    pruner = Pruner(lively(Net(lambda m, x: m.end(m.b(m.a(x).view(2, 6, 8, 8))))), X, scorer="free")
    answers = pruner.model.train()(X)
    assert torch.allclose(answers, pruner.model.eval()(X), rtol=1e-9)


def test_answers_that_are_no_tensors_are_compared_as_such() -> None:
    assert difference(float("nan"), float("nan"), False) == ""
    assert difference(torch.ones(2), 1.0, False) != ""
    assert difference(torch.ones(2), torch.ones(2, dtype=torch.int64), False) != ""


@pytest.mark.parametrize("layer", [nn.Conv2d(3, 4, 3), nn.ReLU()])
def test_a_model_that_is_one_layer_has_nothing_to_prune(layer: nn.Module) -> None:
    with pytest.raises(RecipeError, match="has no layer that can be pruned"):
        Pruner(layer.double(), X)
