"""Networks of other shapes: shared layers, parts left alone, several inputs, 1-d, 3-d, U-Nets, pruned again.

Each is checked as everywhere: the compacted network computes what the gated one computes, to 1e-9 in float64.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import paam
from networks import compacted, lively, random_choice, relative_error
from paam import Pruner
from paam.errors import ArtifactError, GraphError
from paam.graph.network import prepare
from paam.models import resnet20

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=GENERATOR)


def conv(inputs: int, outputs: int, **options) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1, **options)


def check(
    model: nn.Module, *examples: Tensor, seeds: range = range(8), empty: float = 0.25, **options
) -> list[nn.Module]:
    """Compacted = gated for random plans, and costs are as predicted. Returns the compacted networks."""
    pruner = Pruner(lively(model), examples, scorer="free", **options)
    built = []
    for seed in seeds:
        choice = random_choice(pruner.network, seed, empty=empty)
        small = compacted(pruner, choice)
        with torch.no_grad():
            pairs = zip(tree_leaves(small(*examples)), tree_leaves(pruner.model.eval()(*examples)), strict=True)
            assert all(relative_error(value, truth) < 1e-9 for value, truth in pairs)
        cost, counted = pruner.network.cost(choice), paam.count(small, examples)
        assert (cost.params, cost.macs) == (counted.params, counted.macs)
        built.append(small)
    return built


class SharedLayers(nn.Module):
    """A head on two scales, as detectors have: one convolution, one norm, one scale for both."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = conv(3, 6), conv(6, 6, stride=2)
        self.tower, self.norm, self.answer = conv(6, 7), nn.BatchNorm2d(7), conv(7, 2)
        self.scale = nn.Parameter(torch.rand(7, 1, 1))

    def head(self, x: Tensor) -> Tensor:
        return self.answer(F.relu(self.norm(self.tower(x)) * self.scale))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        large = F.relu(self.stem(x))
        return self.head(large), self.head(F.relu(self.down(large)))


class SharedNorm(nn.Module):
    """Two convolutions, gated each on its own, behind which stands one and the same norm."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.norm, self.slopes = conv(3, 8), conv(3, 8), nn.BatchNorm2d(8), nn.PReLU(8)
        self.last, self.head = conv(16, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.left(x), self.right(x)
        both = [self.slopes(self.norm(left)), left, self.slopes(self.norm(right))]
        return self.head(self.last(torch.cat([both[0] + both[1], both[2]], 1)).mean((2, 3)))


class Recurrent(nn.Module):
    """One convolution that reads what it wrote; a grouped and a depthwise one called twice as well."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.again = conv(3, 8), conv(8, 8)
        self.grouped, self.depthwise = conv(8, 8, groups=2), conv(8, 8, groups=8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sigmoid(self.stem(x))
        for _ in range(3):
            x = F.relu(self.again(x))
        x = F.relu(self.grouped(x)) + x
        x = F.relu(self.depthwise(F.relu(self.grouped(x))))
        return self.head(F.relu(self.depthwise(x)).mean((2, 3)))


@pytest.mark.parametrize("streams", ["independent", "tied"])
@pytest.mark.parametrize("model", [SharedLayers, SharedNorm, Recurrent])
def test_layers_called_twice(model: type[nn.Module], streams: str) -> None:
    check(model(), X, seeds=range(20), streams=streams)


def test_filters_of_a_shared_layer_are_one_group() -> None:
    groups = {group.name: group for group in prepare(SharedLayers().double(), X).groups}
    assert set(groups) == {"stem", "down", "tower"}
    assert len(groups["tower"].sites) == 2
    assert len(prepare(SharedNorm().double(), X).groups) == 3


def test_layers_that_share_a_weight_are_left_alone() -> None:
    model = nn.Sequential(conv(3, 4), conv(4, 4), conv(4, 4), conv(4, 5), conv(5, 2))
    model[2].weight = model[1].weight
    assert [group.name for group in prepare(model.double(), X).groups] == ["0", "3"]
    check(model, X)


class Attention(nn.Module):
    """Self-attention over the map, with a step that reads all channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.cumsum(x, 1).flatten(2).transpose(1, 2)
        q, k, v = self.project(tokens).chunk(3, dim=-1)
        return (torch.einsum("nic,njc->nij", q, k).softmax(-1) @ v).transpose(1, 2).reshape(x.shape)


class Hybrid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.attention = conv(3, 8), nn.BatchNorm2d(8), Attention(8)
        self.mix, self.head = conv(8, 6), nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        return self.head(F.relu(self.mix(x + self.attention(x))).mean((2, 3)))


def test_a_part_is_left_alone() -> None:
    model = Hybrid()
    for names in (["attention"], ["attention", "head", "mix"]):
        compared = 0
        for small in check(model, X, empty=0, ignore=names):
            left = dict(small.named_modules())
            for name, layer in model.named_modules():
                if name.split(".")[0] in names and isinstance(layer, nn.Linear | nn.Conv2d) and name in left:
                    assert torch.equal(left[name].weight, layer.weight)
                    compared += 1
        assert compared >= 4 * len(names)
    assert [g.name for g in prepare(model, X, ignore=["attention", "head"]).groups] == ["stem", "mix"]


class MultiHead(nn.Module):
    """Self-attention with several heads, all of it understood: what mixes channels reads whole values."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.qkv, self.project, self.head = conv(3, 8), nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x)).flatten(2).transpose(1, 2)
        n, tokens, width = x.shape
        q, k, v = self.qkv(x).reshape(n, tokens, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, tokens, width)
        return self.head(F.relu(self.project(attended) + x).mean(1))


class SplitAttention(nn.Module):
    """Channels lie across two axes and are summed over one of them: radix attention, and context by a product."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.wide, self.select = conv(3, 6), conv(6, 12, groups=2), nn.Conv2d(6, 12, 1)
        self.one, self.last, self.head = nn.Conv2d(6, 1, 1), conv(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.wide(F.relu(self.stem(x))))
        n, channels, height, width = x.shape
        x = x.reshape(n, 2, channels // 2, height, width)
        squeezed = self.select(x.sum(1).mean((2, 3), keepdim=True))
        x = (x * squeezed.view(n, 2, channels // 2, 1, 1).softmax(1)).sum(1)
        where = self.one(x).reshape(n, 1, height * width).softmax(-1).unsqueeze(3)
        context = x.reshape(n, channels // 2, height * width).unsqueeze(1) @ where
        return self.head(F.relu(self.last(x + context.view(n, channels // 2, 1, 1))).mean((2, 3)))


class AlongChannels(nn.Module):
    """A 1-d convolution over neighbouring channels, filters of its own that blur, a whole convolution by function."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.neighbours = conv(3, 8), nn.Conv1d(1, 1, 3, padding=1, bias=False)
        self.register_buffer("blur", torch.rand(8, 1, 2, 2))
        self.weight, self.position = nn.Parameter(torch.randn(6, 8, 1, 1)), nn.Parameter(torch.randn(1, 8, 4, 4))
        self.last, self.head = conv(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        factor = self.neighbours(x.mean((2, 3)).view(x.shape[0], 1, -1)).view(x.shape[0], -1, 1, 1)
        x = F.conv2d(F.pad(x * torch.sigmoid(factor), (0, 1, 0, 1)), self.blur, stride=2, groups=8) + self.position
        return self.head(F.relu(self.last(F.conv2d(x, self.weight))).mean((2, 3)))


class Patches(nn.Module):
    """Channels folded into the batch and back, with the map cut into patches of, by chance, as many values as rows."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.token, self.last, self.head = conv(3, 8), nn.Linear(8, 8), conv(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(F.max_pool2d(x, 2)))
        n, c = x.shape[:2]
        x = x.reshape(n * c * 2, 2, 2, 2).transpose(1, 2).reshape(n, c, 4, 4)
        x = F.relu(self.token(x.transpose(1, 3).reshape(n * 4, 4, c)))
        return self.head(F.relu(self.last(x.view(n, 4, 4, c).permute(0, 3, 1, 2))).mean((2, 3)))


@pytest.mark.parametrize("model", [MultiHead, SplitAttention, AlongChannels, Patches])
def test_attention_reads_whole_values(model: type[nn.Module]) -> None:
    check(model(), X)


def test_a_node_is_left_alone() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.head = conv(3, 8), conv(8, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.b(torch.cumsum(F.relu(self.a(x)), 1)))
            return self.head(x.mean((2, 3)))

    check(Odd(), X, ignore=["cumsum"])


def test_what_is_ignored_must_exist(tmp_path) -> None:
    with pytest.raises(GraphError, match=r"'atention' is no part of the model. Did you mean 'attention'"):
        prepare(Hybrid().double(), X, ignore=["atention"])
    model = Hybrid()
    model.unused = nn.ReLU()
    with pytest.raises(GraphError, match="'unused' is never called on its own"):
        prepare(model.double(), X, ignore=["attention", "unused"])
    inner = [group.name for group in prepare(model, X, ignore=["attention", "head", "head.0"]).groups]
    assert inner == [group.name for group in prepare(model, X, ignore=["attention", "head"]).groups]


def test_ignored_parts_are_remembered_on_disk(tmp_path) -> None:
    model = Hybrid().double().eval()
    pruner = Pruner(model, X, scorer="free", ignore=["attention"])
    pruner.select(keep_filters=0.5)
    small = pruner.compact().eval()
    paam.save(small, tmp_path)
    assert torch.equal(paam.load(tmp_path, Hybrid().double())(X), small(X))


class UNet(nn.Module):
    """Down and up again, with concatenated skips: one level by interpolation, one by a transposed convolution."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.down1, self.down2 = self.block(3, width), self.block(width, 2 * width)
        self.bottom = self.block(2 * width, 4 * width)
        self.raise2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.up2, self.up1 = self.block(4 * width, 2 * width), self.block(3 * width, width)
        self.answer = nn.Conv2d(width, 2, 1)

    @staticmethod
    def block(inputs: int, outputs: int) -> nn.Sequential:
        norms = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        layers = conv(inputs, outputs, bias=False), norms[0], nn.ReLU(inplace=True), conv(outputs, outputs), norms[1]
        return nn.Sequential(*layers, nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        low = self.bottom(F.max_pool2d(two, 2))
        mid = self.up2(torch.cat([self.raise2(low), two], 1))
        high = F.interpolate(mid, size=one.shape[-2:], mode="bilinear", align_corners=False)
        return self.answer(self.up1(torch.cat([high, one], 1)))


def test_unet() -> None:
    small = check(UNet(), X, seeds=range(12))[0]
    bigger = torch.randn(1, 3, 16, 16, dtype=torch.float64)
    assert small(bigger).shape == (1, 2, 16, 16)


def volume(dims: int) -> nn.Module:
    conv_, norm = (nn.Conv1d, nn.BatchNorm1d) if dims == 1 else (nn.Conv3d, nn.BatchNorm3d)
    pool, out = (nn.MaxPool1d, nn.AdaptiveAvgPool1d) if dims == 1 else (nn.MaxPool3d, nn.AdaptiveAvgPool3d)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            first, second = conv_(8, 8, 3, padding=1), conv_(8, 8, 3, padding=1)
            self.inner = nn.Sequential(first, norm(8), nn.GELU(), second, norm(8))

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(x + self.inner(x))

    layers = [conv_(2, 8, 5, padding=2), norm(8), nn.ELU(), pool(2), Block(), Block(), conv_(8, 6, 3, groups=2)]
    head = [out(2), nn.Flatten(), nn.Linear(6 * 2**dims, 5), nn.Tanh(), nn.Linear(5, 3)]
    return nn.Sequential(*layers, nn.Mish(), *head)


@pytest.mark.parametrize("dims", [1, 3])
@pytest.mark.parametrize("streams", ["independent", "tied"])
def test_sequences_and_volumes(dims: int, streams: str) -> None:
    x = torch.randn(2, 2, *[16 if dims == 1 else 8] * dims, dtype=torch.float64, generator=GENERATOR)
    check(volume(dims), x, streams=streams)


class TwoInputs(nn.Module):
    """Image and vector in, a dictionary out, with an argument that may be left away."""

    def __init__(self) -> None:
        super().__init__()
        self.see, self.read, self.deep = conv(3, 8), nn.Linear(5, 8), conv(8, 8)
        self.kind, self.place = nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, image: Tensor, words: Tensor, extra: Tensor | None = None, twice: bool = False):
        x = F.relu(self.see(image)) + F.relu(self.read(words))[:, :, None, None]
        if extra is not None:
            x = x + extra
        for _ in range(2 if twice else 1):
            x = F.relu(self.deep(x))
        x = x.mean((2, 3))
        return {"kind": self.kind(x), "place": [self.place(x)]}


def test_several_inputs_and_outputs() -> None:
    words = torch.randn(2, 5, dtype=torch.float64, generator=GENERATOR)
    check(TwoInputs(), X, words)
    check(TwoInputs(), X, words, torch.randn(2, 8, 8, 8, dtype=torch.float64, generator=GENERATOR))


@settings(max_examples=15)
@given(seed=st.integers(0, 1000), block=st.integers(0, 8))
def test_blocks_of_an_independent_stream_do_not_meddle(seed: int, block: int) -> None:
    """More removed from one block: every other block's layers have the filters they had."""
    model = lively(resnet20())
    network = prepare(model, torch.zeros(1, 3, 16, 16, dtype=torch.float64))
    choice = random_choice(network, seed, empty=0)
    for mask in choice.values():
        mask[seed % len(mask)] = True
    name = f"layer{block // 3 + 1}.{block % 3}.conv2"
    fewer = {**choice, name: choice[name] & (np.arange(len(choice[name])) % 2 == seed % 2)}
    before, after = (network.compact(network.plan(c)) for c in (choice, fewer))
    kept = {n: m.out_channels for n, m in before.named_modules() if isinstance(m, nn.Conv2d)}
    left = {n: m.out_channels for n, m in after.named_modules() if isinstance(m, nn.Conv2d)}
    assert kept == {n: int(choice[n].sum()) for n in kept}
    assert left[name] == fewer[name].sum() if name in left else not fewer[name].any()
    assert {n: kept[n] for n in left if n != name} == {n: left[n] for n in left if n != name}


def prune_again(small: nn.Module, x: Tensor, seed: int, streams: str) -> nn.Module:
    pruner = Pruner(small, x, scorer="free", streams=streams)
    choice = random_choice(pruner.network, seed, empty=0.2)
    for name, filters in pruner.network.strongest_path({n: m.astype(float) for n, m in choice.items()}).items():
        choice[name][list(filters)] = True  # something must be left for the next time
    smaller = compacted(pruner, choice)
    with torch.no_grad():
        assert relative_error(smaller(x), pruner.model.eval()(x)) < 1e-9
    assert paam.count(smaller, x).params == pruner.network.cost(choice).params
    return smaller


@pytest.mark.parametrize("streams", ["independent", "tied"])
@pytest.mark.parametrize("make", [resnet20, UNet, Recurrent, SharedNorm], ids=lambda f: f.__name__)
def test_pruned_again_and_again(make, streams: str, tmp_path) -> None:
    for seed in range(6):
        small = lively(make(), seed)
        for times in range(3):
            small = prune_again(small, X, 10 * seed + times, streams)
    paam.save(small, tmp_path)
    assert torch.equal(paam.load(tmp_path, make().double())(X), small(X))


def test_a_plan_of_a_pruned_network_fits_no_other(tmp_path) -> None:
    first, second = (prune_again(lively(resnet20()), X, seed, "independent") for seed in (1, 2))
    plan = Pruner(first, X).network
    with pytest.raises(ArtifactError, match="another architecture"):
        Pruner(second, X).network.choice(plan.plan(random_choice(plan, 0)))


class HalfPassesOn(nn.Module):
    """As YOLOv8's C2f: half of the channels go through a block, and all parts are joined."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = conv(3, 8), conv(4, 4), conv(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        parts = list(F.silu(self.first(x)).chunk(2, 1))
        parts.append(F.silu(self.inner(parts[-1])))
        return self.last(torch.cat(parts, 1))


def test_equal_halves_keep_the_class() -> None:
    network = prepare(lively(HalfPassesOn()), X, streams="tied")
    widths = {group.name: group.width for group in network.groups}
    choice = {name: np.arange(width) % 2 == 0 for name, width in widths.items()}
    small = network.compact(network.plan(choice))
    assert type(small) is HalfPassesOn
    (built,) = check(HalfPassesOn(), X, seeds=range(1), streams="tied", empty=0)
    assert built.first.weight.shape[0] < 8
