"""The contract: the compacted network computes what the gated one computes with binary gates, to 1e-9 in float64.

The truth is the network as PAAM.md writes it, with masks multiplied in by hand (``masked_resnet``), and the gated
model.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from networks import lively, random_choice, relative_error
from paam import Pruner, count
from paam.graph.network import Choice, prepare
from paam.models import CifarResNet, resnet20, resnet56, resnet110, vgg16_bn
from paam.pruning.select import Selection

TOLERANCE = 1e-9
MODES = [(p, s) for p in ("sum", "branch") for s in ("independent", "tied")]


def masked_resnet(model: CifarResNet, x: Tensor, choice: Choice, placement: str) -> Tensor:
    """The gated ResNet spelled out: S relu(x + f(x)), or relu(x + S f(x)) on the branch."""

    def gate(value: Tensor, name: str) -> Tensor:
        return value * torch.from_numpy(choice[name]).to(value)[:, None, None]

    x = gate(F.relu(model.bn1(model.conv1(x))), "conv1")
    for stage in ("layer1", "layer2", "layer3"):
        for number, block in enumerate(getattr(model, stage)):
            name = f"{stage}.{number}"
            inner = gate(F.relu(block.bn1(block.conv1(x))), f"{name}.conv1")
            branch = block.bn2(block.conv2(inner))
            if placement == "branch":
                x = F.relu(block.shortcut(x) + gate(branch, f"{name}.conv2"))
            else:
                x = gate(F.relu(block.shortcut(x) + branch), f"{name}.conv2")
    return model.linear(x.mean((2, 3)))


def resnet_macs(model: CifarResNet, choice: Choice, size: int) -> int:
    """PAAM.md, section 4: a block costs 9 H W (|M before| m + m |M after|); stem and classifier by their own widths."""
    kept = {name: int(mask.sum()) for name, mask in choice.items()}
    area = size * size
    total = 9 * area * 3 * kept["conv1"]
    before = kept["conv1"]
    for stage in ("layer1", "layer2", "layer3"):
        for number in range(len(getattr(model, stage))):
            if stage != "layer1" and number == 0:
                area //= 4
            inner, after = kept[f"{stage}.{number}.conv1"], kept[f"{stage}.{number}.conv2"]
            total += 9 * area * (before * inner + inner * after)
            before = after
    return total + before * model.linear.out_features


def check_compaction(model: nn.Module, size: int, choice_seed: int, placement: str, streams: str) -> nn.Module:
    x = torch.randn(2, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(choice_seed))
    pruner = Pruner(model, x, scorer="free", placement=placement, streams=streams)
    network = pruner.network
    choice = random_choice(network, choice_seed)
    plan = network.plan(choice)
    pruner.use(Selection(plan, 0.5, 1.0, 1.0))
    with pruner.weighting():
        pass
    small = pruner.compact().eval()
    with torch.no_grad():
        truth = pruner.model.eval()(x)
        assert relative_error(small(x), truth) < TOLERANCE
        if isinstance(model, CifarResNet) and streams == "independent":
            assert relative_error(truth, masked_resnet(model, x, choice, placement)) < TOLERANCE
    predicted, counted = network.cost(choice), count(small, x)
    assert (counted.params, counted.macs) == (predicted.params, predicted.macs)
    with FlopCounterMode(display=False) as flops, torch.no_grad():
        small(x[:1])
    assert flops.get_total_flops() == 2 * counted.macs
    return small


@pytest.mark.parametrize(("placement", "streams"), MODES)
@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10_000))
def test_resnet20_any_plan(placement: str, streams: str, seed: int) -> None:
    check_compaction(lively(resnet20(), seed), 16, seed, placement, streams)


@pytest.mark.parametrize(("placement", "streams"), MODES)
@pytest.mark.parametrize("make", [resnet56, resnet110, vgg16_bn], ids=lambda f: f.__name__)
def test_deeper_networks(make: type, placement: str, streams: str) -> None:
    for seed in range(3 if make is not vgg16_bn else 2):
        check_compaction(lively(make(), seed), 16, seed, placement, streams)


def test_block_macs_follow_the_formula() -> None:
    """No layer is emptied here, so every kept channel is computed and the printed formula must hold exactly."""
    model = resnet56()
    network = prepare(model, torch.zeros(1, 3, 32, 32))
    for seed in range(5):
        choice = random_choice(network, seed, empty=0)
        for group in network.groups:
            choice[group.name][seed % group.width] = True
        # A stream channel that only passes by, never written, exists on both sides of the formula.
        assert network.cost(choice).macs == resnet_macs(model, choice, 32)


def test_whole_blocks_removed_leave_their_offset() -> None:
    """Emptying every inner layer drops 18 of 19 convolutions; what is left is the stem plus constants, exactly."""
    model = lively(resnet20())
    x = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    network = prepare(model, x)
    choice = {g.name: np.full(g.width, g.stream is not None) for g in network.groups}
    small = network.compact(network.plan(choice)).eval()
    convolutions = [m for m in small.modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) == 1
    with torch.no_grad():
        assert relative_error(small(x), masked_resnet(model, x, choice, "sum")) < TOLERANCE


def test_offsets_matter() -> None:
    """The check above can fail: without the offsets that compaction carries, the output is another one."""
    model = lively(resnet20())
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    network = prepare(model, x)
    choice = {g.name: np.full(g.width, g.stream is not None) for g in network.groups}
    small = network.compact(network.plan(choice)).eval()
    with torch.no_grad():
        for name, parameter in small.named_parameters():
            if name.endswith("offset"):
                parameter.zero_()
        assert relative_error(small(x), masked_resnet(model, x, choice, "sum")) > 1e-3


def test_keeping_everything_returns_the_same_class_and_weights() -> None:
    model = lively(resnet20())
    x = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    network = prepare(model, x)
    small = network.compact(network.plan({g.name: np.ones(g.width, dtype=bool) for g in network.groups}))
    assert type(small) is CifarResNet
    assert small is not model
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), small.state_dict().values(), strict=True))


@pytest.mark.parametrize("streams", ["independent", "tied"])
@pytest.mark.parametrize(
    ("convolution", "size", "layout"),
    [(nn.Conv2d, (8, 8), torch.channels_last), (nn.Conv3d, (4, 8, 8), torch.channels_last_3d)],
)
def test_weights_keep_their_order_in_memory(convolution, size, layout, streams: str) -> None:
    """A GPU's convolutions are fastest with channels last; a cut that undoes that slows the small network down."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.inner, self.outer = (convolution(c, 8, 3, padding=1) for c in (3, 8, 8))
            self.head = nn.Linear(8, 10)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x).relu()
            x = (x + self.outer(self.inner(x).relu())).relu()
            return self.head(x.flatten(2).mean(2))

    for before, expected in ((layout, layout), (torch.contiguous_format, torch.contiguous_format)):
        network = prepare(Block().to(memory_format=before), torch.zeros(1, 3, *size), streams=streams)
        small = network.compact(network.plan(random_choice(network, seed=1, empty=0.0)))
        layers = [module for module in small.modules() if isinstance(module, convolution)]
        assert any(layer.weight.shape[0] < 8 for layer in layers)
        assert all(layer.weight.is_contiguous(memory_format=expected) for layer in layers)


def test_plain_networks_keep_their_class_when_pruned() -> None:
    model = lively(vgg16_bn())
    x = torch.randn(1, 3, 16, 16, dtype=torch.float64)
    network = prepare(model, x)
    small = network.compact(network.plan(random_choice(network, 3, empty=0)))
    assert type(small) is type(model)
    assert [n for n, _ in small.named_parameters()] == [n for n, _ in model.named_parameters()]


def test_the_small_network_trains_and_its_modules_keep_their_names() -> None:
    model = resnet20()
    x = torch.randn(8, 3, 32, 32)
    pruner = Pruner(model, x)
    pruner.select(keep_filters=0.5)
    small = pruner.compact().train()
    names = {n for n, m in small.named_modules() if isinstance(m, nn.Conv2d)}
    assert names
    assert names <= {n for n, m in model.named_modules() if isinstance(m, nn.Conv2d)}
    labels = torch.arange(8) % 10
    optimizer = torch.optim.SGD(small.parameters(), 0.05)
    first = last = 0.0
    for step in range(8):
        optimizer.zero_grad()
        loss = F.cross_entropy(small(x), labels)
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in small.parameters())
        optimizer.step()
        first, last = (loss.item(), 0.0) if step == 0 else (first, loss.item())
    assert last < first
