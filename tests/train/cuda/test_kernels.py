"""Our Triton kernels, run by Triton's interpreter on the CPU, against PyTorch's own operations in float32.

The interpreter must be chosen before triton is imported: TRITON_INTERPRET=1 in the environment (make test-zoo).
"""

from __future__ import annotations

import copy
import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs Triton's interpreter: make test-zoo", allow_module_level=True)

from paam.errors import RecipeError
from paam.graph.modes import evaluating
from paam.graph.rewired import as_graph_model
from paam.graph.trace import trace
from paam.models import resnet20
from paam.pruning.pruner import Pruner
from paam.train.cuda.fused import ConvNorm, FusedNorm, fused
from paam.train.cuda.kernels import conv, fast_conv, norm
from paam.train.cuda.kernels import weight_gradient as weights
from paam.train.networks import Networks
from paam.train.phase import Phase

pytestmark = pytest.mark.zoo


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape).contiguous(memory_format=torch.channels_last)


@pytest.fixture(autouse=True)
def seeded(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(norm, "BLOCK", 256)  # so that a small layer has several programs, and each several blocks
    monkeypatch.setattr(norm, "PROGRAMS", 3)


def assert_alike(found: list[Tensor], wanted: list[Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert float((one - other).detach().norm()) <= 2e-6 * float(other.detach().norm()) + 1e-7


@pytest.mark.parametrize(("group", "downs", "rows"), [(1, 1, 2), (1, 3, 3), (2, 1, 4), (2, 3, 1), (2, 3, 8)])
@pytest.mark.parametrize(
    ("channels", "filters", "height", "width", "number"),
    [(16, 16, 6, 6, 2), (3, 16, 5, 7, 3), (11, 23, 4, 4, 5), (32, 64, 4, 5, 3), (1, 1, 3, 3, 2), (8, 24, 1, 1, 2)],
)
def test_convolution_and_its_gradients(monkeypatch, group, downs, rows, channels, filters, height, width, number):
    monkeypatch.setattr(conv, "FORWARD", dict.fromkeys(conv.FORWARD, (group, 16, 4, rows, 3)))
    monkeypatch.setattr(weights, "WEIGHT", dict.fromkeys(weights.WEIGHT, (group, 16, 4, downs, rows, 3)))
    x = drawn(number, channels, height, width).requires_grad_()
    weight = drawn(filters, channels, 3, 3).requires_grad_()
    y, other = fast_conv.Convolution.apply(x, weight, False), F.conv2d(x, weight, padding=1)
    sent = drawn(*y.shape)
    assert_alike(
        [y, *torch.autograd.grad((y * sent).sum(), [x, weight])],
        [other, *torch.autograd.grad((other * sent).sum(), [x, weight])],
    )


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("filters", [5, 32])
@pytest.mark.parametrize("with_other", [False, True])
@pytest.mark.parametrize("with_gate", [False, True])
def test_convolution_norm_sum_relu_and_gate_at_once(monkeypatch, rows, filters, with_other, with_gate):
    monkeypatch.setattr(conv, "FORWARD", dict.fromkeys(conv.FORWARD, (2, 16, 4, rows, 3)))
    monkeypatch.setattr(FusedNorm, "forward", None)  # whatever would call it fails
    first, norm = nn.Conv2d(6, filters, 3, padding=1, bias=False), nn.BatchNorm2d(filters).eval()
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    nn.init.normal_(norm.bias)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    x, other, gate = drawn(3, 6, 5, 7), drawn(3, filters, 5, 7), torch.rand(filters)
    with torch.no_grad():
        y = norm(first(x))
        y = F.relu(y + other if with_other else y) * (gate.view(1, -1, 1, 1) if with_gate else 1)
        at_once = ConvNorm(fast_conv.FastConv(first, alone=True), FusedNorm(norm))
        found = at_once(x, other if with_other else None, gate if with_gate else None)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert_alike([found], [y])


@pytest.mark.parametrize("channels", [5, 16, 130])
@pytest.mark.parametrize("with_other", [False, True])
@pytest.mark.parametrize("with_gate", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_norm_sum_relu_and_gate(channels, with_other, with_gate, training):
    theirs = nn.BatchNorm2d(channels).train(training)
    nn.init.uniform_(theirs.weight, 0.5, 1.5)
    nn.init.normal_(theirs.bias)
    theirs.running_mean.normal_()
    theirs.running_var.uniform_(0.5, 2)
    ours = copy.deepcopy(theirs)
    x = (drawn(3, channels, 5, 6) * 2 + 100).requires_grad_()  # a mean that would swallow a naive variance
    other = drawn(*x.shape).requires_grad_() if with_other else None
    gate = (torch.rand(channels) > 0.4).float() if training else torch.rand(channels).requires_grad_()
    leaves = [t for t in (x, other, gate if with_gate and not training else None) if t is not None]

    y = theirs(x)
    y = F.relu(y if other is None else y + other)
    y = y * gate.view(1, -1, 1, 1) if with_gate else y
    found = FusedNorm(ours)(x, other, gate if with_gate else None)
    sent = drawn(*y.shape)
    of_theirs = torch.autograd.grad((y * sent).sum(), [*leaves, *(theirs.parameters() if training else [])])
    of_ours = torch.autograd.grad((found * sent).sum(), [*leaves, *(ours.parameters() if training else [])])
    for one, wanted in zip([found, *of_ours], [y, *of_theirs], strict=True):
        # The mean of 100 costs two digits of float32, on both sides.
        torch.testing.assert_close(one, wanted, rtol=2e-3, atol=2e-4 * float(wanted.detach().abs().max()))
    for one, wanted in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-4, atol=1e-5)


def test_a_whole_network_in_every_phase():
    x = drawn(3, 3, 8, 8)
    labels = torch.tensor([1, 2, 3])
    pruner = Pruner(resnet20(), x, scorer="kq")
    model = pruner.model.to(memory_format=torch.channels_last)
    for parameter in pruner.scorer_parameters():
        nn.init.normal_(parameter)
    quick = fused(model)
    assert sum(isinstance(layer, FusedNorm) for layer in quick.modules()) == 19
    assert sum(isinstance(layer, fast_conv.FastConv) for layer in quick.modules()) == 17  # all but the two of stride 2

    def compare(leaves: list[nn.Parameter]) -> None:
        model.train()
        before = copy.deepcopy(model.state_dict())
        results = []
        for network in (model, quick):
            model.load_state_dict(before)
            loss = F.cross_entropy(network(x), labels)
            grads = torch.autograd.grad(loss, leaves, allow_unused=True)
            results.append([loss.detach(), *(g for g in grads if g is not None), *(b.clone() for b in model.buffers())])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()) + 1e-7)

    with pruner.weighting(keep_macs=0.5), torch.no_grad():
        model.eval()
        torch.testing.assert_close(quick(x), model(x), rtol=1e-3, atol=1e-4)
    with pruner.dense():
        compare(pruner.network_parameters())
    with pruner.weighting(keep_macs=0.5):
        compare(pruner.network_parameters())
    with pruner.scoring():
        compare(pruner.scorer_parameters())


@pytest.mark.parametrize("case", ["analog gate with batch statistics", "frozen statistics, trained scale", "broadcast"])
def test_what_the_kernels_have_no_gradient_for_is_computed_plainly(case):
    theirs = nn.BatchNorm2d(5).train(case != "frozen statistics, trained scale")
    ours = copy.deepcopy(theirs)
    x, gate = drawn(2, 5, 3, 3).requires_grad_(), torch.rand(5).requires_grad_()
    other = drawn(2, 5, 1, 1).requires_grad_() if case == "broadcast" else drawn(2, 5, 3, 3).requires_grad_()
    leaves = [x, other, gate]
    y = F.relu(theirs(x) + other) * gate.view(1, -1, 1, 1)
    found = FusedNorm(ours)(x, other, gate)
    for one, wanted in zip(
        torch.autograd.grad(found.square().sum(), [*leaves, *ours.parameters()]),
        torch.autograd.grad(y.square().sum(), [*leaves, *theirs.parameters()]),
        strict=True,
    ):
        torch.testing.assert_close(one, wanted)


class Awkward(nn.Module):
    """A constant, a broadcast sum and dropout around chains of norm and ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm_one, self.norm_two = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm_one(self.one(x * torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1, 1))))
        x = F.relu(self.norm_two(self.two(x)) + x.mean((2, 3), keepdim=True))
        return self.fc(F.dropout(x.mean((2, 3)), 0.5, self.training))


class Scaled(Awkward):
    """A parameter that forward() reads itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(1, 3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


def networks(model: nn.Module) -> Networks:
    made = Networks(Pruner(model, drawn(2, 3, 6, 6)), fused=True)
    made.remember_dense()
    return made


def phase(network: str, gates: str = "open") -> Phase:
    return Phase("any", 1, "warmup", network=network, gates=gates)


def is_fused(model: nn.Module) -> bool:
    return any(isinstance(layer, FusedNorm) for layer in model.modules())


def test_teacher_and_control_answer_as_the_dense_network_does():
    made, x = networks(Awkward()), drawn(2, 3, 6, 6)
    plain, teacher = made.teacher(fused=False), made.teacher(fused=True)
    assert is_fused(teacher)
    assert not is_fused(plain)
    torch.testing.assert_close(teacher(x), plain(x))
    torch.testing.assert_close(teacher(x), teacher(x))  # no dropout
    made.control = made.dense().train()
    quick = made.fast(phase("control"))
    assert is_fused(quick)
    found = []
    for network in (quick, made.control):
        torch.manual_seed(1)  # of its dropout
        found.append(network(x))
    torch.testing.assert_close(*found)


def test_one_fused_network_serves_all_phases_and_follows_the_gates():
    made, x = networks(resnet20()), drawn(2, 3, 6, 6)
    quick, model = made.fast(phase("gated")), made.pruner.model
    assert made.fast(phase("gated", "binary")) is made.fast(phase("gated", "analog")) is quick
    found = []
    with evaluating(quick), torch.inference_mode():
        for mode in (made.pruner.dense(), made.pruner.scoring(), made.pruner.weighting(keep_macs=0.3)):
            with mode:
                quick.eval()
                found.append(quick(x))
                torch.testing.assert_close(found[-1], model(x), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found[0], found[2])


def test_a_compacted_network_is_fused_too():
    made, x = networks(Awkward()), drawn(2, 3, 6, 6)
    made.pruner.select(keep_filters=0.6)
    made.small = made.pruner.compact().eval().requires_grad_(False)
    quick = made.fast(phase("small"))
    assert is_fused(quick)
    torch.testing.assert_close(quick(x), made.small(x))


def test_a_network_that_reads_a_parameter_itself_is_left_as_it_is():
    """A parameter read by forward() is exchanged for its rounded twin in the network itself."""
    assert not is_fused(networks(Scaled()).fast(phase("gated")))


def test_hooked_layers_are_left_as_they_are():
    model, heard = Awkward(), []
    network = torch.fx.symbolic_trace(model)
    model.two.register_forward_hook(lambda *_: heard.append("two"))
    model.norm_two.register_forward_hook(lambda *_: heard.append("norm"))
    quick = fused(network)
    assert is_fused(quick)
    quick(drawn(2, 3, 6, 6))
    assert heard == ["two", "norm"]


class Changing(nn.Module):
    """ReLUs that change what is read before them, and would be read behind them if a chain became one; odd calls."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three, self.four = (
            nn.Conv2d(channels, 8, 3, padding=1, bias=False) for channels in (3, 3, 8, 8)
        )
        self.norm_two, self.norm_three, self.norm_four = (nn.BatchNorm2d(8) for _ in range(3))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        one = self.one(x)
        y = self.norm_two(self.two(x)) + one
        one = self.relu(one)  # the output of a convolution, which the sum above has read
        y = F.relu(y) + one
        y = self.norm_three(input=self.three(input=y))
        return self.relu(F.relu(self.norm_four(self.four(y))) - 1)


def test_layers_that_work_in_place_or_are_called_by_keyword():
    model, x = Changing(), drawn(2, 3, 6, 6).requires_grad_()
    network = as_graph_model(trace(model, x.detach()))
    quick = fused(network)
    assert sum(isinstance(layer, FusedNorm) for layer in quick.modules()) == 2
    leaves = [x, *model.parameters()]
    found = [(y := made(x), *torch.autograd.grad(y.square().sum(), leaves)) for made in (quick, network)]
    assert_alike(*map(list, found))
    assert model.relu.inplace


def test_images_without_a_batch_are_left_to_the_library():
    layer = nn.Conv2d(3, 8, 3, padding=1, bias=False)
    image = torch.randn(3, 6, 6)
    torch.testing.assert_close(fast_conv.FastConv(layer, alone=True)(image), layer(image))


def test_what_is_no_number_is_seen_behind_a_relu():
    x = drawn(2, 5, 3, 3)
    x[0, 2, 1, 1] = float("nan")
    for training in (True, False):
        assert FusedNorm(nn.BatchNorm2d(5).train(training))(x)[0, 2, 1, 1].isnan()


def test_one_value_per_channel_is_refused_as_torch_does():
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        FusedNorm(nn.BatchNorm2d(5))(drawn(1, 5, 1, 1))


def test_a_network_without_such_chains_is_left_as_it_is():
    network = torch.fx.symbolic_trace(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()))
    assert fused(network) is network


def test_a_weight_that_is_read_twice_has_no_late_gradient():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 3, padding=1, bias=False)
            self.other = nn.Conv2d(8, 8, 3, padding=1, bias=False)
            self.norm = nn.BatchNorm2d(8)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.norm(self.other(self.conv(self.conv(x)))))

    model = Twice()
    quick = fused(torch.fx.symbolic_trace(model))
    alone = {
        layer.conv is model.conv: layer.alone for layer in quick.modules() if isinstance(layer, fast_conv.FastConv)
    }
    assert alone == {True: False, False: True}


@pytest.mark.parametrize(("filters", "height", "width"), [(8, 33, 32), (64, 9, 8)])
def test_large_images_are_left_to_the_library(monkeypatch, filters, height, width):
    monkeypatch.setattr(fast_conv, "convolve", None)  # whatever would call it fails
    layer = nn.Conv2d(3, filters, 3, padding=1, bias=False)
    images = drawn(1, 3, height, width)
    torch.testing.assert_close(fast_conv.FastConv(layer, alone=True)(images), layer(images))


@pytest.mark.parametrize(("widths", "known"), [((3, 16), True), ((11, 5), True), ((16, 23), False), ((24, 8), True)])
def test_wide_layers_of_odd_widths_are_left_to_the_library(widths, known):
    assert fast_conv.is_fast(nn.Conv2d(*widths, 3, padding=1, bias=False)) is known


def test_a_layer_too_large_to_count_is_refused():
    layer = fast_conv.FastConv(nn.Conv2d(3, 32, 3, padding=1, bias=False), alone=True)
    images = torch.empty(1, device="meta").expand(2**17, 3, 2**5, 2**5)  # countable, unlike what comes out of it
    with pytest.raises(RecipeError, match=r"train\.fused=false"):
        layer(images)
