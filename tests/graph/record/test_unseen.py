"""What a model does beside calling torch's functions on new tensors is kept by the gated network, or refused."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from networks import lively
from paam import Pruner
from paam.errors import GraphError
from paam.graph.network import prepare
from paam.pruning.inspection import inspect

GENERATOR = torch.Generator().manual_seed(0)


def images(batch: int, size: int = 16) -> Tensor:
    return torch.randn(batch, 3, size, size, dtype=torch.float64, generator=GENERATOR)


class Net(nn.Module):
    """Something between two convolutions, in which it may use what the model holds."""

    def __init__(self, function: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.inner = nn.Conv2d(8, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 6, 3, padding=1)
        self.head = nn.Linear(6, 4)
        self.register_buffer("seen", torch.zeros(8))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.first(x)))
        return self.head(F.relu(self.second(self.function(self, y))).mean((2, 3)))


def opened(model: nn.Module, **options) -> nn.Module:
    """The gated network with open gates, of the model's own weights."""
    pruner = Pruner(model, images(2), scorer="free", inplace=True, **options)
    with pruner.dense():
        pass
    return pruner.model


# Weights and statistics


def clamped(m: Net, y: Tensor) -> Tensor:
    with torch.no_grad():
        m.inner.weight.clamp_(-0.01, 0.01)
    return m.inner(y)


def clamped_data(m: Net, y: Tensor) -> Tensor:
    m.inner.weight.data.clamp_(-0.01, 0.01)
    return m.inner(y)


def clamped_view(m: Net, y: Tensor) -> Tensor:
    with torch.no_grad():
        m.inner.weight.view(-1)[:9].clamp_(-0.01, 0.01)
    return m.inner(y)


def given_other_contents(m: Net, y: Tensor) -> Tensor:
    m.inner.weight.data = torch.renorm(m.inner.weight.data, 2, 0, 0.1)
    return m.inner(y)


WRITES = {
    "a parameter": (clamped, "changes the parameter 'inner.weight' in place"),
    "its data": (clamped_data, "changes the parameter 'inner.weight' in place"),
    "a view of it": (clamped_view, "changes the parameter 'inner.weight' in place"),
    "its contents": (given_other_contents, "gives 'inner.weight' other contents"),
    "a buffer": (lambda m, y: (m.seen.add_(1), y)[1], "changes the buffer 'seen' in place"),
    "a part of a buffer": (lambda m, y: (m.seen[:2].add_(1), y)[1], "changes the buffer 'seen' in place"),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("when", ["always", "in training"])
def test_writes_into_what_a_model_holds_are_refused(name: str, when: str) -> None:
    function, message = WRITES[name]
    model = Net(lambda m, y: function(m, y) if m.training or when == "always" else y).double()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(GraphError, match=f"{message}.*test_unseen.py"):
        prepare(model, images(2))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


class OwnNorm(nn.Module):
    """Batch norm by hand, its statistics replaced or changed in place."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x - self.mean[:, None, None]
        mean = x.mean((0, 2, 3))
        if self.in_place:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(mean, alpha=0.1)
        else:
            self.mean = 0.9 * self.mean + 0.1 * mean.detach()
        return x - mean[:, None, None]


class WithOwnNorm(Net):
    def __init__(self, in_place: bool) -> None:
        super().__init__(lambda m, y: m.own(y))
        self.own = OwnNorm(in_place)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_norm_by_hand_is_refused_and_right_when_left_alone(in_place: bool) -> None:
    model = lively(WithOwnNorm(in_place))
    before = model.own.mean.clone()
    with pytest.raises(GraphError, match=r"own.mean'.*ignore"):
        prepare(model, images(2))
    pruner = Pruner(model, images(2), scorer="free", ignore=["own"], inplace=True)
    with pruner.dense():
        pass
    x = images(4)
    answers = pruner.model.train()(x)
    seen = model.own.mean.clone()
    model.own.mean.copy_(before)
    assert torch.allclose(answers, model.train()(x), rtol=1e-12)
    assert torch.allclose(seen, model.own.mean, rtol=1e-12)
    assert not torch.allclose(seen, before)


# Training that goes another way


def dropped(m: Net, y: Tensor) -> Tensor:
    return y if m.training and torch.rand([]) < 0.3 else m.inner(y)


@pytest.mark.parametrize("function", [dropped, lambda m, y: y * 2 if m.training and y.mean() > 0.9 else y])
def test_a_decision_by_values_in_training_is_refused(function) -> None:
    with pytest.raises(GraphError, match=r"decides by the values of tensors in training: .*test_unseen.py"):
        prepare(Net(function).double(), images(2))
    fixed = prepare(Net(function).double(), images(2), on_decision="fix")
    assert fixed.traced.fixed


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_random_numbers_of_others_are_refused(draw) -> None:
    model = Net(lambda m, y: y if m.training and draw() < 0.3 else m.inner(y)).double()
    states = random.getstate(), repr(np.random.get_state())
    with pytest.raises(GraphError, match=r"draws random numbers by (Python's random|numpy)"):
        prepare(model, images(2))
    assert (random.getstate(), repr(np.random.get_state())) == states


class Drawing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * random.random() if self.training else x


def test_random_numbers_of_what_is_left_alone_are_its_own() -> None:
    model = lively(Net(lambda m, y: m.own(y)))
    model.own = Drawing()
    network = opened(model, ignore=["own"]).train()
    x = images(4)
    random.seed(1)
    answers = network(x)
    random.seed(1)
    assert torch.allclose(answers, model.train()(x), rtol=1e-12)


class WithTargets(Net):
    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        if self.training:
            assert targets is not None, "targets are needed"
        return super().forward(x)


def test_a_model_that_does_not_train_on_the_example_has_evaluation_alone() -> None:
    model = lively(WithTargets(lambda m, y: y))
    (limit,) = inspect(prepare(model, images(2))).limits
    assert limit.startswith("for evaluation only: WithTargets does not run on the example in training mode (targets")
    network = opened(model)
    x = images(3)
    assert torch.allclose(network.eval()(x), model.eval()(x), rtol=1e-12)
    with pytest.raises(GraphError, match=r"targets are needed.*evaluation mode alone; call eval\(\) first"):
        network.train()(x)


class Frozen(Net):
    """Its batch norm stays in evaluation mode, as in much fine-tuning."""

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.norm.eval()
        return self


@pytest.mark.parametrize("what", ["gated", "small", "copied"])
def test_a_frozen_norm_stays_frozen(what: str) -> None:
    model = lively(Frozen(lambda m, y: m.inner(y) + y))
    before = model.norm.running_mean.clone()
    pruner = Pruner(model, images(2), scorer="free", inplace=True)
    with pruner.dense():
        pass
    pruner.select(keep_filters=1.0)
    network = pruner.model if what == "gated" else pruner.compact()
    if what == "copied":
        network = copy.deepcopy(network)
    x = images(4)
    assert torch.allclose(network.train()(x), model.train()(x), rtol=1e-12)
    assert torch.equal(network.norm.running_mean, before)
    assert not network.norm.training
    assert network.second.training


# Gradients


def gradients(network: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    names = ("first.weight", "inner.weight", "second.weight")
    for name in names:
        network.get_parameter(name).grad = None
    network.train()(x).square().sum().backward()
    return {name: network.get_parameter(name).grad for name in names}


def unlearned(m: Net, y: Tensor) -> Tensor:
    with torch.no_grad():
        z = torch.sigmoid(m.inner(y))
    return y * z


def unlearned_but_for_a_part(m: Net, y: Tensor) -> Tensor:
    with torch.no_grad():
        z = m.inner(y)
        with torch.enable_grad():
            w = m.inner(y) * 0.5
        u, v = z.chunk(2, 1)
    return torch.cat([u, v], 1) + w


@torch.no_grad()
def decorated(m: Net, y: Tensor) -> Tensor:
    return m.inner(y).abs() + 1


def switched(m: Net, y: Tensor) -> Tensor:
    with torch.set_grad_enabled(not m.training):
        z = m.inner(y)
    return y + z


REGIONS = [unlearned, unlearned_but_for_a_part, lambda m, y: y / decorated(m, y), switched]


@pytest.mark.parametrize("function", REGIONS)
def test_regions_without_gradients_stay_so(function) -> None:
    model = lively(Net(function))
    x = images(4)
    truth = gradients(model, x)
    found = gradients(opened(model), x)
    assert (truth["inner.weight"] is None) == (function is not unlearned_but_for_a_part)
    for name, gradient in truth.items():
        assert (gradient is None) == (found[name] is None), name
        assert gradient is None or torch.allclose(found[name], gradient, rtol=1e-9), name


def test_a_hook_on_a_tensor_is_refused() -> None:
    def reversed_gradient(m: Net, y: Tensor) -> Tensor:
        if m.training:
            y.register_hook(lambda gradient: -gradient)
        return y

    with pytest.raises(GraphError, match=r"registers a hook on a tensor.*test_unseen.py"):
        prepare(Net(reversed_gradient).double(), images(2))


def test_a_backward_hook_is_refused() -> None:
    model = Net(lambda m, y: y).double()
    model.block = nn.Sequential(model.inner)
    model.function = lambda m, y: m.block(y)
    model.block.register_full_backward_hook(lambda module, given, out: (given[0] * 0.1,))
    with pytest.raises(GraphError, match=r"block.*hook"):
        prepare(model, images(2))


# Numbers and parts


def padded(m: Net, y: Tensor) -> Tensor:
    q, r = divmod(y.shape[-1], 8)
    if r:
        y = F.pad(y, (0, 8 - r, 0, 8 - r))
    return y * q


def split(m: Net, y: Tensor) -> Tensor:
    return torch.cat(y.split(16, 2)[:1], 2)


def taken_apart(m: Net, y: Tensor) -> Tensor:
    return torch.stack([part * 2 for part in y])


NUMBERS: dict[str, tuple[Callable[[Net, Tensor], Tensor], list[tuple[int, int]], list[tuple[int, int]]]] = {
    "divmod": (padded, [(3, 16), (3, 24)], [(3, 20), (3, 13)]),
    "is_integer": (lambda m, y: y if (y.shape[-1] / 4).is_integer() else y * 2, [(3, 16), (3, 16)], [(3, 13)]),
    "gcd": (lambda m, y: F.avg_pool2d(y, math.gcd(y.shape[-1], 4)), [(3, 16)], [(3, 18), (3, 13)]),
    "log2": (lambda m, y: y * (1 + max(0, int(math.log2(y.shape[-1])) - 4)), [(3, 16)], [(3, 32), (3, 64)]),
    "bit_length": (lambda m, y: y * y.shape[-1].bit_length(), [(3, 16)], [(3, 31), (3, 32)]),
    "pow": (lambda m, y: y * pow(y.shape[-1], 2, 7) * pow(y.shape[0], 2), [(3, 16), (5, 16)], []),
    "chunk": (lambda m, y: y * len(y.chunk(6, 2)), [(3, 16), (3, 24)], [(3, 8)]),
    "split": (split, [(3, 16), (3, 8)], [(3, 32)]),
    "parts of the batch": (taken_apart, [(2, 16)], [(1, 16), (3, 16)]),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_sizes_are_right_or_refused(name: str) -> None:
    function, right, refused = NUMBERS[name]
    model = lively(Net(function))
    network = opened(model).eval()
    for batch, size in right:
        x = images(batch, size)
        assert torch.allclose(network(x), model(x), rtol=1e-12), (batch, size)
    for batch, size in refused:
        with pytest.raises(GraphError, match="another way for an input of this size"):
            network(images(batch, size))


@pytest.mark.parametrize("root", [np.sqrt(8), np.float32(2), np.int64(3)])
def test_numbers_of_numpy_are_numbers(root) -> None:
    model = lively(Net(lambda m, y: y / root + torch.full_like(y, root)))
    x = images(3)
    assert torch.allclose(opened(model).eval()(x), model(x), rtol=1e-12)


@pytest.mark.parametrize("turned", [lambda w: w.T, lambda w: w.mT, lambda w: w.data.t(), lambda w: w.T.contiguous()])
def test_a_weight_may_be_turned(turned) -> None:
    model = Net(lambda m, y: y + (y.mean((2, 3)) @ turned(m.mix.weight))[:, :, None, None])
    model.mix = nn.Linear(8, 8)
    model = lively(model)
    network, x = opened(model), images(3)
    with torch.no_grad():
        model.mix.weight += 1
    assert torch.allclose(network.eval()(x), model.eval()(x), rtol=1e-12)


# Autocast and gradients


class Within(nn.Module):
    """A block that runs in a region of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(8, 8, 1)

    def forward(self, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.mix(y).to(y.dtype)


def test_a_region_with_autocast_is_refused_or_left_alone() -> None:
    model = Net(lambda m, y: m.within(y))
    model.within = Within()
    x = images(2).float()
    with pytest.raises(GraphError, match=r"autocast on or off in forward\(\) at test_unseen.py:\d+.*ignore"):
        prepare(model, x)
    pruner = Pruner(model, x, scorer="free", ignore=["within"], inplace=True)
    with pruner.dense(), torch.no_grad():
        pass
    model.eval()
    with torch.no_grad():
        assert torch.equal(pruner.model.eval()(x), model(x))


def test_autocast_around_the_whole_model_is_kept() -> None:
    model = Net(lambda m, y: m.inner(y)).eval()
    network, x = opened_in_single(model), images(2).float()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(network(x), model(x))


def opened_in_single(model: nn.Module) -> nn.Module:
    pruner = Pruner(model, images(2).float(), scorer="free", inplace=True)
    with pruner.dense():
        pass
    return pruner.model.eval()


def again(m: Net, y: Tensor) -> Tensor:
    """Saves memory where there are gradients, and computes the same."""
    if y.requires_grad:
        return torch.utils.checkpoint.checkpoint(m.inner, y, use_reentrant=False)
    return m.inner(y)


ASKING = {
    "is_grad_enabled": lambda m, y: m.inner(y) * (2 if torch.is_grad_enabled() else 1),
    "requires_grad": lambda m, y: m.inner(y) if y.requires_grad else y,
    "inference mode": lambda m, y: y if torch.is_grad_enabled() and not torch.is_inference_mode_enabled() else y * 2,
    "grad_fn": lambda m, y: m.inner(y) if y.grad_fn is None else y,
}


@pytest.mark.parametrize("name", ASKING)
def test_a_decision_by_gradients_is_refused(name: str) -> None:
    with pytest.raises(GraphError, match="or decides by whether gradients are on"):
        prepare(Net(ASKING[name]).double(), images(2))


def test_a_decision_by_gradients_that_changes_nothing_is_kept() -> None:
    model = Net(again).double()
    network, x = opened(model), images(3)
    for training in (False, True):
        assert torch.allclose(network.train(training)(x), model.train(training)(x), rtol=1e-12)


def test_what_is_fixed_must_hold_for_the_example() -> None:
    def decided(m: Net, y: Tensor) -> Tensor:
        y = y * 2 if y.sum() > -1e9 else y
        y.data.mul_(0.5)
        return m.inner(y)

    with pytest.raises(GraphError, match="recording of Net does not compute what the model itself does"):
        prepare(Net(decided).double(), images(2), on_decision="fix")
