"""Parameters as one block: optimisers do with it what torch's do with ordinary parameters, in any layout and dtype."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paam.config.recipe import OptimizerSettings
from paam.errors import ArtifactError
from paam.train.flat import FlatParameters, RoundedWeights
from paam.train.optimizers import build_optimizer, load_optimizer_state, optimizer_state, set_learning_rate
from paam.train.packing import Packed, as_tensors, from_tensors, unpack
from paam.train.steps import make_step

SETTINGS = {
    "sgd": OptimizerSettings("sgd", 0.05, 0.0),
    "momentum": OptimizerSettings("sgd", 0.05, 0.9, weight_decay=0.01),
    "nesterov": OptimizerSettings("sgd", 0.05, 0.8, True, 0.02),
    "adam": OptimizerSettings("adam", 0.01),
    "adam with decay": OptimizerSettings("adam", 0.01, weight_decay=0.03),
}


class Net(nn.Module):
    """A scalar before all others, weights of four, two and one axes, and a dtype of its own at the end."""

    def __init__(self, last: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 5, 3, padding=1)
        self.second = nn.Conv2d(5, 7, (3, 2), groups=1)
        self.norm = nn.BatchNorm2d(7)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.last = nn.Linear(7, 3).to(last)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.second(self.first(x).relu())).relu() * self.scale
        return self.last(x.mean((2, 3)).to(self.last.weight.dtype)).to(x.dtype)


def made(dtype: torch.dtype = torch.float64, last: torch.dtype | None = None, *, channels_last: bool = False) -> Net:
    torch.manual_seed(3)
    net = Net().to(dtype)
    net.last.to(last or dtype)
    return net.to(memory_format=torch.channels_last) if channels_last else net


def batch(number: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    images = torch.randn(6, 1, 5, 6, generator=generator, dtype=torch.float64).to(dtype)
    return images, torch.randint(0, 3, (6,), generator=generator)


def rate(number: int) -> float:
    return 0.05 / (number + 1)


def loss_of(net: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda images, labels: F.cross_entropy(net(images), labels)


def trained_by_torch(net: nn.Module, settings: OptimizerSettings, steps: int) -> list[Tensor]:
    """The ordinary loop, written with torch alone."""
    if settings.optimizer == "adam":
        optimizer: torch.optim.Optimizer = torch.optim.Adam(net.parameters(), weight_decay=settings.weight_decay)
    else:
        optimizer = torch.optim.SGD(
            net.parameters(),
            lr=1.0,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
            nesterov=settings.nesterov,
        )
    losses = []
    for number in range(steps):
        optimizer.param_groups[0]["lr"] = rate(number)
        optimizer.zero_grad()
        loss = loss_of(net)(*batch(number, next(net.parameters()).dtype))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


class Flat:
    """A network trained as the engine does it: one block, one step after the other."""

    def __init__(self, net: nn.Module, settings: OptimizerSettings) -> None:
        self.net, self.flat = net, FlatParameters(dict(net.named_parameters()))
        self.optimizer = build_optimizer(settings, 1.0, self.flat)
        self.step = make_step(loss_of(net), self.optimizer, self.flat, None, capture=False)

    def train(self, steps: range) -> list[Tensor]:
        losses = []
        for number in steps:
            set_learning_rate(self.optimizer, rate(number))
            losses.append(self.step(*batch(number, next(self.net.parameters()).dtype)))
        return losses


def assert_close(one: nn.Module, other: nn.Module, tolerance: float) -> None:
    left, right = one.state_dict(), other.state_dict()
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert value.dtype == right[name].dtype
        torch.testing.assert_close(
            value, right[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("last", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_block_is_trained_as_ordinary_parameters_are(name, last, channels_last):
    plain, flat = (made(last=last, channels_last=channels_last) for _ in range(2))
    truth = trained_by_torch(plain, SETTINGS[name], 6)
    engine = Flat(flat, SETTINGS[name])
    assert [block.dtype for block in engine.flat.blocks] == list(dict.fromkeys([torch.float64, last]))
    losses = engine.train(range(6))
    # A float32 layer rounds sums in another order; float64 alone leaves nothing to round differently but the last bits.
    tolerance = 1e-12 if last == torch.float64 else 1e-5
    torch.testing.assert_close(torch.stack(losses), torch.stack(truth), rtol=tolerance, atol=0)
    assert_close(flat, plain, tolerance)
    assert truth[-1] != truth[0]


def test_parameters_keep_values_shapes_layout_and_identity():
    net = made(channels_last=True)
    net.second.weight.data = torch.randn(7, 5, 6, 4, dtype=torch.float64)[:, :, ::2, ::2]  # with holes
    before = {name: (id(p), p.detach().clone(), p.stride()) for name, p in net.named_parameters()}
    flat = FlatParameters(dict(net.named_parameters()))
    ends = 0
    for name, parameter in net.named_parameters():
        identity, value, strides = before[name]
        assert id(parameter) == identity
        assert torch.equal(parameter, value)
        if name != "second.weight":
            assert parameter.stride() == strides
        else:
            assert parameter.is_contiguous()
        assert parameter.data_ptr() % 64 == flat.blocks[0].data_ptr() % 64
        start = (parameter.data_ptr() - flat.blocks[0].data_ptr()) // 8
        assert ends <= start < len(flat.blocks[0])  # inside the block, and behind the one before
        ends = start + parameter.numel()


@pytest.mark.parametrize("last", [torch.float64, torch.float32])
def test_the_layout_tells_parameters_apart_whatever_their_memory_layout(last):
    net = made(last=last, channels_last=True)
    net.first.weight.data = torch.randn(3, 5, 3, 1, dtype=torch.float64).permute(1, 3, 0, 2)
    net.last.weight.data = torch.randn(7, 3, dtype=last).t()
    values = {name: p.detach().clone() for name, p in net.named_parameters()}
    flat = FlatParameters(dict(net.named_parameters()))
    assert len(flat.blocks) == 1 + (last != torch.float64)
    found = unpack(Packed([block.detach().clone() for block in flat.blocks], json.loads(json.dumps(flat.layout))))
    assert found.keys() == values.keys()
    assert all(torch.equal(found[name], value) for name, value in values.items())


def test_a_parameter_that_the_loss_does_not_reach_has_gradient_zero():
    """It is as if zero_grad() had set zeros: momentum and weight decay go on, nothing else moves it."""
    for settings in (OptimizerSettings("sgd", 0.05, 0.9), SETTINGS["adam"]):
        net = made()
        net.unused = nn.Parameter(torch.ones(4, dtype=torch.float64))
        engine = Flat(net, settings)
        engine.train(range(3))
        assert torch.equal(net.unused, torch.ones(4, dtype=torch.float64))
    net = made()
    net.unused = nn.Parameter(torch.ones(4, dtype=torch.float64))
    flat = FlatParameters(dict(net.named_parameters()))
    optimizer = build_optimizer(OptimizerSettings("sgd", 0.5, 0.0, weight_decay=0.1), 0.5, flat)
    reached = [True]

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        return loss_of(net)(images, labels) + (net.unused.sum() if reached[0] else 0)

    step = make_step(loss, optimizer, flat, None, capture=False)
    step(*batch(0))
    assert net.unused.tolist() == pytest.approx([1 - 0.5 * (1 + 0.1)] * 4, rel=1e-12)
    reached[0] = False  # a gradient of the step before must not be taken again
    step(*batch(1))
    assert net.unused.tolist() == pytest.approx([0.45 * (1 - 0.5 * 0.1)] * 4, rel=1e-12)


# ---------------------------------------------------------------- state


def remembered(given: Flat) -> dict[str, dict[str, Tensor]]:
    """An optimiser's state as a checkpoint brings it back: copies of blocks, layouts through JSON."""
    blocks, layouts = as_tensors(optimizer_state(given.optimizer, given.flat))
    return from_tensors({name: block.clone() for name, block in blocks.items()}, json.loads(json.dumps(layouts)))


@pytest.mark.parametrize("last", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ["momentum", "nesterov", "adam with decay"])
def test_state_of_channels_last_parameters_goes_on_in_contiguous_ones(name, last):
    """As when a run begun on a GPU goes on on a CPU."""
    whole = Flat(made(last=last, channels_last=True), SETTINGS[name])
    whole.train(range(3))
    state = remembered(whole)
    weights = copy.deepcopy(whole.net.state_dict())
    whole.train(range(3, 7))

    other = made(last=last)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(9)
    other.load_state_dict(weights)
    resumed = Flat(other, SETTINGS[name])
    load_optimizer_state(resumed.optimizer, resumed.flat, state)
    resumed.train(range(3, 7))
    assert_close(resumed.net, whole.net, 1e-12 if last == torch.float64 else 1e-6)


@pytest.mark.parametrize("name", SETTINGS)
def test_state_in_the_same_layout_goes_on_to_the_same_bits(name):
    whole, begun = (Flat(made(channels_last=True), SETTINGS[name]) for _ in range(2))
    whole.train(range(6))
    begun.train(range(3))
    state = remembered(begun)
    assert bool(state) == (name != "sgd")
    net = made(channels_last=True)
    net.load_state_dict(begun.net.state_dict())
    resumed = Flat(net, SETTINGS[name])
    load_optimizer_state(resumed.optimizer, resumed.flat, state)
    resumed.train(range(3, 6))
    for key, value in whole.net.state_dict().items():
        assert torch.equal(value, resumed.net.state_dict()[key]), key


@pytest.mark.parametrize("channels_last", [False, True])
def test_state_is_named_by_parameter_as_torch_has_it(channels_last):
    plain, flat = made(), Flat(made(channels_last=channels_last), SETTINGS["adam"])
    optimizer = torch.optim.Adam(plain.parameters(), lr=rate(0))
    loss_of(plain)(*batch(0)).backward()
    optimizer.step()
    flat.train(range(1))
    state = remembered(flat)
    for statistic in ("exp_avg", "exp_avg_sq"):
        assert state[statistic].keys() == dict(plain.named_parameters()).keys()
        for name, parameter in plain.named_parameters():
            truth = optimizer.state[parameter][statistic]
            torch.testing.assert_close(state[statistic][name], truth, rtol=0, atol=1e-14)
    assert {name: float(value) for name, value in state["step"].items()} == {"scale": 1}


@pytest.mark.parametrize("width", [4, 1])
def test_state_of_another_network_is_refused_by_the_parameter_that_differs(width):
    """Also where torch would stretch one value over many."""
    begun, other = Flat(made(), SETTINGS["momentum"]), made()
    begun.train(range(1))
    other.last = nn.Linear(7, width).double()
    resumed = Flat(other, SETTINGS["momentum"])
    with pytest.raises(ArtifactError, match=rf"'last.weight' has shape \(3, 7\) there and \({width}, 7\)"):
        load_optimizer_state(resumed.optimizer, resumed.flat, remembered(begun))


# ---------------------------------------------------------------- rounded weights


def rounded_net() -> tuple[Net, FlatParameters, RoundedWeights]:
    net = made(torch.float32)
    flat = FlatParameters(dict(net.named_parameters()))
    return net, flat, RoundedWeights(flat, net)


def test_a_network_reads_rounded_weights_inside_and_its_own_outside():
    net, _, rounded = rounded_net()
    masters = dict(net.named_parameters())
    values = {name: p.detach().clone() for name, p in masters.items()}
    for trained in (True, False):
        with rounded.in_place(trained=trained):
            for name, parameter in net.named_parameters():
                wide = masters[name].dim() > 1
                assert parameter.dtype == (torch.bfloat16 if wide else torch.float32)
                assert torch.equal(parameter.float(), values[name].bfloat16().float() if wide else values[name])
                assert parameter.stride() == masters[name].stride()
                assert parameter.requires_grad == (trained or not wide)
        assert dict(net.named_parameters()) == masters
    with pytest.raises(ZeroDivisionError), rounded.in_place(trained=True):
        raise ZeroDivisionError
    assert dict(net.named_parameters()) == masters
    assert all(p.dtype == torch.float32 and torch.equal(p, values[name]) for name, p in net.named_parameters())


def test_masters_move_by_steps_too_small_for_bfloat16():
    """A master accumulates what its rounded twin cannot show: 1 + 2 ** -12 rounds to 1, sixteen such steps do not."""
    net = nn.Linear(1, 1, bias=False)
    nn.init.ones_(net.weight)
    flat = FlatParameters(dict(net.named_parameters()))
    rounded = RoundedWeights(flat, net)
    optimizer = build_optimizer(OptimizerSettings("sgd", 2**-12, 0.0), 2**-12, flat)
    seen = []

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        seen.append(float(net.weight.detach()))
        return -(net.weight * images).sum()  # gradient -1: the weight grows by the rate

    step = make_step(loss, optimizer, flat, rounded, capture=False)
    with rounded.in_place(trained=True):
        for _ in range(33):
            step(torch.ones(1, 1, dtype=torch.bfloat16), torch.zeros(1))
        assert net.weight.dtype == torch.bfloat16
    assert float(net.weight.detach()) == 1 + 33 * 2**-12
    # bfloat16 has steps of 2 ** -7 above 1: half of one is reached after 16 steps and rounds to even, down.
    assert seen == [1.0] * 17 + [1 + 2**-7] * 16


def test_a_step_in_rounded_weights_takes_the_gradients_there():
    net, flat, rounded = rounded_net()
    twin = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.dim() > 1:
                parameter.copy_(parameter.bfloat16())
    optimizer = build_optimizer(OptimizerSettings("sgd", 0.1, 0.0), 0.1, flat)

    def loss(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
        def of(images: Tensor, labels: Tensor) -> Tensor:
            # In float32 with weights as they are: autocast to bfloat16 exists for GPUs only here.
            named = {name: p.float() for name, p in model.named_parameters()}
            return F.cross_entropy(torch.func.functional_call(model, named, (images,)), labels)

        return of

    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    images, labels = batch(0, torch.float32)
    with rounded.in_place(trained=True):
        make_step(loss(net), optimizer, flat, rounded, capture=False)(images, labels)
    loss(twin)(images, labels).backward()
    for (name, parameter), other in zip(net.named_parameters(), twin.parameters(), strict=True):
        # The gradient arrives through a cast to bfloat16: 8 bits.
        grad = other.grad.bfloat16().float() if other.dim() > 1 else other.grad
        torch.testing.assert_close(parameter.detach(), before[name] - 0.1 * grad, rtol=1e-6, atol=1e-6)
