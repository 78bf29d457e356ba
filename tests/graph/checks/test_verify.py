"""What a recording does not see is noticed before a network is gated: refused, or held to the recorded sizes."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paam
from networks import compacted, lively
from paam import Pruner
from paam.errors import ArtifactError, GraphError
from paam.graph.checks.differences import apart
from paam.graph.network import prepare
from paam.graph.trace import BATCH, MAP
from paam.pruning.inspection import inspect

GENERATOR = torch.Generator().manual_seed(0)


def images(batch: int, size: int) -> Tensor:
    return torch.randn(batch, 3, size, size, dtype=torch.float64, generator=GENERATOR)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 6, 3, padding=1)
        self.head = nn.Linear(6, 4)

    def begin(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.first(x)))

    def end(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.second(x)).mean((2, 3)))


# What is refused, and the layer at which it is noticed


class OtherStride(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.second.stride = (2, 2)
        result = self.end(self.begin(x))
        self.second.stride = (1, 1)
        return result


class OtherWeight(Base):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.second.weight
        self.second.weight = nn.Parameter(weight * 2)
        result = self.end(self.begin(x))
        self.second.weight = weight
        return result


class CalledWith(Base):
    def forward(self, x: Tensor) -> Tensor:
        held = {"weight": self.second.weight * 0.5, "bias": self.second.bias}
        y = torch.func.functional_call(self.second, held, (self.begin(x),))
        return self.head(F.relu(y).mean((2, 3)))


class BehindItsBack(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x))
        y.data.mul_(0.5)
        return self.end(F.relu(y))


class ByItself(Base):
    """Copies of it use the weights of the one that they are copies of."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8, 1, 1))
        self.function = lambda x: x * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.function(self.begin(x)))


BESIDE = [(OtherStride, "second"), (OtherWeight, "second"), (CalledWith, "second"), (BehindItsBack, "norm")]
BESIDE += [(ByItself, "second")]


@pytest.mark.parametrize(("kind", "where"), BESIDE)
def test_what_happens_beside_the_calls_is_refused(kind: type[Base], where: str) -> None:
    told = rf"recording of {kind.__name__} does not compute.*first at '{where}'.*test_verify"
    with pytest.raises(GraphError, match=told):
        prepare(kind(), images(1, 16).float())


class Dimmed(Base):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.norm.eps = 0.5
        result = self.end(self.begin(x))
        self.norm.eps = 1e-5
        return result + F.dropout(result, 0.0, self.training) * (1.0 if self.training else 0.0)


class OwnStatistic(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(y.mean((0, 2, 3)), alpha=0.1)
        return self.end(F.relu(y - self.mean[:, None, None]))


@pytest.mark.parametrize(("kind", "what"), [(Dimmed, "in training"), (OwnStatistic, "buffer 'mean'")])
def test_what_happens_in_training_alone_is_refused(kind: type[Base], what: str) -> None:
    with pytest.raises(GraphError, match=f"{kind.__name__} (does not compute|changes).*{what}"):
        prepare(kind(), images(1, 16).float())


class Statistic(nn.Module):
    """Centres by a statistic of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean((0, 2, 3)), alpha=0.1)
        return x - self.mean[:, None, None]


class Centred(Base):
    def __init__(self) -> None:
        super().__init__()
        self.centre = Statistic()

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.centre(self.begin(x)))


def test_such_a_part_can_be_left_alone() -> None:
    model = lively(Centred())
    before = model.centre.mean.clone()
    pruner = Pruner(model, images(2, 16), scorer="free", ignore=["centre"], inplace=True)
    x = images(4, 16)
    pruner.model.train()(x)
    first = F.relu(F.batch_norm(model.first(x), None, None, model.norm.weight, model.norm.bias, True))
    assert torch.allclose(model.centre.mean, 0.9 * before + 0.1 * first.mean((0, 2, 3)), atol=1e-12)


# What holds for some sizes only


class ByBatch(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.begin(x) * float("1.%d" % x.shape[0]))  # noqa: UP031


class ByTable(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.begin(x)
        return self.end(y * {"8": 3.0, "16": 2.0, "32": 0.5}["%d" % y.shape[-1]])  # noqa: UP031


class ByList(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.begin(x)
        return self.end(y * [1.0, 3.0, 2.0, 5.0, 0.5][y.shape[-1] // 8])


def by_root(x: Tensor) -> Tensor:
    return x / math.sqrt(x.shape[-1])


def by_text(x: Tensor) -> Tensor:
    return x * float(f"1.{x.shape[-1]}") / int(str(x.shape[-2]))


def by_exponential(x: Tensor) -> Tensor:
    return x * math.exp(x.shape[-1] / 100)


def by_length(x: Tensor) -> Tensor:
    return x * len(x)


class By(Base):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.function(self.begin(x)))


SIZED = [
    (ByBatch, (BATCH,), [(2, 16), (2, 8)], [(3, 16)]),
    (ByTable, (MAP,), [(2, 16), (3, 16)], [(2, 8), (2, 32)]),
    (ByList, (MAP,), [(2, 16), (3, 16)], [(2, 8), (2, 32)]),
    (lambda: By(by_root), (), [(2, 16), (3, 16)], [(2, 8), (2, 32)]),
    (lambda: By(by_text), (), [(2, 16), (3, 16)], [(2, 8), (2, 32)]),
    (lambda: By(by_exponential), (), [(2, 16), (3, 16)], [(2, 8), (2, 32)]),
    (lambda: By(by_length), (), [(2, 16), (3, 16), (2, 8), (1, 32)], []),
]


@pytest.mark.parametrize(("build", "held", "right", "refused"), SIZED)
def test_numbers_of_sizes_are_right_or_refused(build, held, right, refused) -> None:
    model = lively(build())
    pruner = Pruner(model, images(2, 16), scorer="free")
    assert pruner.network.traced.held == held
    with pruner.dense():
        pass
    for batch, size in right:
        x = images(batch, size)
        assert torch.allclose(pruner.model.eval()(x), model(x), rtol=1e-12)
    for batch, size in refused:
        with pytest.raises(
            GraphError, match=r"another way for an input of this size.*Use inputs of the example's size"
        ):
            pruner.model.eval()(images(batch, size))


def test_inspect_says_for_which_sizes_a_network_holds() -> None:
    for kind, held in ((ByTable, "image size only"), (ByBatch, "batch size only (2)")):
        (limit,) = inspect(prepare(kind(), images(2, 16).float())).limits
        assert limit.startswith(f"valid at the example's {held}")


def test_the_check_can_be_left_out() -> None:
    assert prepare(OtherStride(), images(1, 16).float(), check=False).groups
    assert Pruner(OtherStride(), images(1, 16).float(), scorer="free", check=False).gates


@pytest.mark.parametrize("kind", [OtherStride, ByTable])
def test_what_was_pruned_without_a_check_is_loaded_without_one(kind: type[Base], tmp_path: Path) -> None:
    x = images(2, 16)
    pruner = Pruner(lively(kind()), x, scorer="free", check=False)
    pruner.select(keep_filters=0.5)
    small = pruner.compact(check=False).eval()
    paam.save(small, tmp_path)
    if kind is OtherStride:
        with pytest.raises(ArtifactError, match="does not compute what the model itself does"):
            paam.load(tmp_path, kind().double())
    loaded = paam.load(tmp_path, kind().double(), check=False)
    assert torch.equal(loaded(x), small(x))


# What is no difference


class Noisy(Base):
    """In training there is noise on one way, and dropout on another, drawn in this order."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.begin(x)
        z = y + torch.randn_like(y) if self.training else y
        return self.end(z) + self.head(F.dropout(F.relu(self.second(y)), 0.5, self.training).mean((2, 3)))


class Twice(Base):
    """Its norm sees other values in training than in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.training:
            y = y * (torch.rand(y.shape[0], 1, 1, 1, dtype=y.dtype) > 0.2)
        return self.end(F.relu(self.norm(y)))


@pytest.mark.parametrize("kind", [Noisy, Twice])
def test_noise_in_training_is_no_difference(kind: type[Base]) -> None:
    model = lively(kind())
    before = model.norm.running_mean.clone()
    assert prepare(model, images(1, 16)).traced.training_only
    assert torch.equal(model.norm.running_mean, before)  # the model's own statistics are left alone


class Early(Base):
    """It returns less in training, where its norm keeps statistics all the same."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z = self.end(F.relu(self.norm(y)))
        return self.end(y) if self.training else z


@pytest.mark.parametrize("small", [False, True])
def test_statistics_are_kept_of_what_training_does_not_return(small: bool) -> None:
    model = lively(Early())
    before = model.norm.running_mean.clone()
    pruner = Pruner(model, images(2, 16), scorer="free", inplace=True)
    with pruner.dense():
        pass
    pruner.select(keep_filters=1.0)
    network = pruner.compact() if small else pruner.model
    x = images(4, 16)
    after = 0.9 * before + 0.1 * model.first(x).mean((0, 2, 3))
    network.train()(x)
    assert torch.allclose(network.norm.running_mean, after, atol=1e-12)
    network.eval()(x)
    assert torch.allclose(network.norm.running_mean, after, atol=1e-12)


class Stored(Base):
    """In evaluation it stores what it makes of a weight, until training begins, as attention biases are stored."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.stored: dict[str, Tensor] = {}

    def train(self, mode: bool = True) -> Stored:
        if mode:
            self.stored = {}
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            scale = self.scale.exp()
        else:
            if "scale" not in self.stored:
                self.stored["scale"] = self.scale.exp()
            scale = self.stored["scale"]
        return self.end(self.begin(x) * scale[:, None, None])


def test_what_evaluation_stores_of_weights_follows_them() -> None:
    """The model comes with a stored value, and its weights move; the small network must not use the whole one's."""
    model = lively(Stored())
    with torch.no_grad():
        model(images(1, 16))
    stored = model.stored["scale"]
    pruner = Pruner(model, images(1, 16), scorer="free", streams="tied", inplace=True)
    assert list(model.stored) == ["scale"]
    assert model.stored["scale"] is stored
    with torch.no_grad():
        model.scale += torch.arange(8.0)
    choice = {group.name: torch.arange(group.width).numpy() < 1 for group in pruner.network.groups}
    small = compacted(pruner, choice)
    x = images(3, 16)
    model.train().eval()
    kept = F.relu(model.norm(model.first(x)))[:, :1] * model.scale[0].exp()
    kept = F.relu(F.conv2d(kept, model.second.weight[:1, :1], model.second.bias[:1], padding=1)).mean((2, 3))
    truth = kept @ model.head.weight[:, :1].t() + model.head.bias
    assert torch.allclose(pruner.model.eval()(x), truth, rtol=1e-9)
    assert torch.allclose(small(x), truth, rtol=1e-9)


class Keeping(Base):
    """It keeps what it computed, gradient and all, as some visualisations want it."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.begin(x)
        return self.end(self.kept)


@pytest.mark.parametrize("inplace", [True, False])
def test_what_cannot_be_copied_is_named(inplace: bool) -> None:
    model = Keeping()
    model(images(1, 16).float())
    with pytest.raises(GraphError, match=r"Keeping cannot be copied.*x\.detach\(\)"):
        Pruner(model, images(1, 16).float(), scorer="free", inplace=inplace)


class Masked(Base):
    """Answers of minus infinity, or of a number that stands for it, where something else is wrong, too."""

    def __init__(self, stands_for_infinity: float) -> None:
        super().__init__()
        self.lowest = stands_for_infinity

    def forward(self, x: Tensor) -> Tensor:
        self.second.stride = (2, 2)
        y = self.end(self.begin(x))
        self.second.stride = (1, 1)
        return y.masked_fill(torch.tensor([False, True, False, True]), self.lowest)


@pytest.mark.parametrize("lowest", [float("-inf"), float("nan"), -1e9, -1e30])
def test_masks_hide_no_difference(lowest: float) -> None:
    with pytest.raises(GraphError, match="Masked does not compute.*first at 'second'"):
        prepare(Masked(lowest), images(1, 16).float())


INFINITE, NOT = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("value", "truth", "expected"),
    [
        ([5.0, -7.0, -INFINITE], [1.0, 2.0, -INFINITE], 9 / 2),
        ([1.0, 2.0, INFINITE], [1.0, 2.0, -INFINITE], INFINITE),
        ([1.0, 2.0, INFINITE], [1.0, 2.0, 3.0], INFINITE),
        ([1.0, 2.0, 3.0], [1.0, 2.0, INFINITE], INFINITE),
        ([1.0, NOT, 0.0], [1.0, 0.0, NOT], INFINITE),
        ([1.0, NOT, 5.0], [1.0, NOT, 4.0], 1 / 4),
        ([1.0, 3.0, -1e9], [1.0, 2.0, -1e9], 1 / 2),
        ([1.0, 2.0, -2e9], [1.0, 2.0, -1e9], 1.0),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([], [], 0.0),
    ],
)
def test_how_far_answers_lie_apart(value: list[float], truth: list[float], expected: float) -> None:
    assert apart(torch.tensor(value), torch.tensor(truth)) == pytest.approx(expected)


def test_imaginary_parts_are_compared() -> None:
    assert apart(torch.tensor([1 + 2j]), torch.tensor([1 + 1j])) == pytest.approx(1 / abs(1 + 1j))


# Advice that can be followed


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient * 3


class Counting(nn.BatchNorm2d):
    """Called by its forward(), past whatever stands before and behind a module's call."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        return super().forward(x)


class Block(nn.Module):
    def __init__(self, function: Callable[[Block, Tensor], Tensor]) -> None:
        super().__init__()
        self.c = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = Counting(8)
        self.norm.register_buffer("seen", torch.zeros(()))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def other_weight(m: Block, x: Tensor) -> Tensor:
    weight = m.c.weight
    m.c.weight = nn.Parameter(weight * 2)
    result = m.c(x)
    m.c.weight = weight
    return result


def weight_for_good(m: Block, x: Tensor) -> Tensor:
    m.c.weight = nn.Parameter(m.c.weight * 0.5)
    return m.c(x)


def other_stride(m: Block, x: Tensor) -> Tensor:
    m.c.stride = (2, 2)
    result = m.c(x)
    m.c.stride = (1, 1)
    return result


PARTS: dict[str, Callable[[Block, Tensor], Tensor]] = {
    "another weight": other_weight,
    "another weight for good": weight_for_good,
    "another stride": other_stride,
    "its own gradient": lambda m, x: Doubled.apply(m.c(x)),
    "a layer's forward()": lambda m, x: m.norm.forward(m.c(x)),
    "autocast": lambda m, x: torch.autocast("cpu", torch.bfloat16)(m.c)(x).float(),
    "a hook": lambda m, x: [y := m.c(x), y.register_hook(lambda g: g * 2) if y.requires_grad else None][0],
    "numbers drawn in evaluation": lambda m, x: m.c(x) + torch.rand_like(x),
}


class Outer(Base):
    """Holds a block two modules down; or does itself what the block does."""

    def __init__(self, function: Callable[[Block, Tensor], Tensor], itself: bool) -> None:
        super().__init__()
        self.stage = nn.ModuleDict({"blk": Block(function)})
        self.itself = itself

    def forward(self, x: Tensor) -> Tensor:
        block = self.stage["blk"]
        return self.end(block.function(block, self.begin(x)) if self.itself else block(self.begin(x)))


def refused(model: nn.Module, ignore: Sequence[str]) -> str:
    """Why a model is refused; nothing if it is not, and has groups."""
    try:
        network = prepare(model, images(2, 16).float(), ignore=ignore)
    except GraphError as refusal:
        return str(refusal)
    return "" if {"first", "second"} & {group.name for group in network.groups} else "there is nothing to prune"


@pytest.mark.parametrize("name", PARTS)
def test_following_the_advice_ends_the_refusal(name: str) -> None:
    followed: list[str] = []
    while refusal := refused(Outer(PARTS[name], itself=False), followed):
        advice = re.findall(r"ignore=\['(.*?)'\]", refusal)
        assert advice, refusal
        assert advice[0] not in followed, refusal
        followed.append(advice[0])
    assert followed


@pytest.mark.parametrize("name", sorted(set(PARTS) - {"another weight for good", "numbers drawn in evaluation"}))
def test_nobody_is_told_to_leave_the_model_itself_alone(name: str) -> None:
    with pytest.raises(GraphError) as refusal:
        prepare(Outer(PARTS[name], itself=True), images(2, 16).float())
    assert "ignore=" not in str(refusal.value)


@pytest.mark.parametrize("which", ["weight_norm", "spectral_norm"])
def test_weights_that_hooks_compute_are_named(which: str) -> None:
    model = Outer(lambda m, x: m.c(x), itself=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        getattr(nn.utils, which)(model.stage["blk"].c)
    with pytest.raises(GraphError, match=rf"'stage.blk.c' has torch.nn.utils.{which}.*parametrizations.{which}"):
        Pruner(model, images(2, 16).float(), scorer="free")
    getattr(nn.utils, f"remove_{which}")(model.stage["blk"].c)
    assert Pruner(model, images(2, 16).float(), scorer="free").gates
