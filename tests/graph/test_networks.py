"""Networks that once went wrong: aliases, shared readers, several outputs, odd calls. Each is exact now, or refused."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paam
from networks import compacted, lively, random_choice, relative_error
from paam import Pruner, Target
from paam.errors import DataError, GraphError, RecipeError, TargetError
from paam.graph.network import prepare
from paam.models import resnet20
from paam.pruning.select import select
from paam.train.evaluation import accuracy

X = torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def conv(inputs: int, outputs: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1)


class Net(nn.Module):
    """A forward() over a handful of ready-made layers."""

    def __init__(self, forward, width: int = 8, outputs: int = 4) -> None:
        super().__init__()
        self.a, self.b, self.c = conv(3, 8), conv(8, 8), conv(width, 8)
        self.norm = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.identity = nn.Identity()
        self.fc = nn.Linear(8, outputs)
        self.fd = nn.Linear(8, outputs)
        self.fe, self.wide, self.one = nn.Linear(8, 8), nn.Linear(32, 8), nn.Conv2d(8, 1, 1)
        self.scale = nn.Parameter(torch.rand(8, 1, 1))
        self.over_channels = nn.LayerNorm(8)
        self.function = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def check(model: nn.Module, *, seeds: range = range(8), **options: str) -> None:
    model = lively(model)
    pruner = Pruner(model, X, scorer="free", **options)
    choices = [{g.name: torch.ones(g.width, dtype=torch.bool).numpy() for g in pruner.network.groups}]
    choices += [random_choice(pruner.network, seed, empty=0.3) for seed in seeds]
    for choice in choices:
        small = compacted(pruner, choice)
        with torch.no_grad():
            assert relative_error(small(X.clone()), pruner.model.eval()(X.clone())) < 1e-9
        assert paam.count(small, X).params == pruner.network.cost(choice).params
        assert paam.count(small, X).macs == pruner.network.cost(choice).macs


def reuse_after_inplace(m: Net, x: Tensor) -> Tensor:
    x = m.a(x)
    return m.fc((m.b(m.relu(x)) + x).mean((2, 3)))


def twice_in_concat(m: Net, x: Tensor) -> Tensor:
    h = F.relu(m.a(x))
    return m.fc(m.c(torch.cat([h, h], 1)[:, 4:12]).mean((2, 3)))


def keyword_calls(m: Net, x: Tensor) -> Tensor:
    h = F.relu(m.a(x))
    both = torch.cat(tensors=[F.relu(m.b(h)), h], dim=1)
    return m.fc(torch.add(m.c(both), other=h).mean((2, 3)))


def functional_dropout(m: Net, x: Tensor) -> Tensor:
    return m.fc(F.dropout(F.relu(m.b(F.relu(m.a(x)))), 0.5, m.training).mean((2, 3)))


def broadcast_sum(m: Net, x: Tensor) -> Tensor:
    h = F.relu(m.a(x))
    return m.fc(m.b(h + torch.sigmoid(h.mean((2, 3), keepdim=True))).mean((2, 3)))


def excitation(m: Net, x: Tensor) -> Tensor:
    h = F.relu(m.a(x))
    factor = torch.sigmoid(m.fd(F.relu(m.fe(h.mean((2, 3))))))
    return m.fc(m.b(h * factor[:, :, None, None]).mean((2, 3)))


def spatial_attention(m: Net, x: Tensor) -> Tensor:
    h = F.relu(m.a(x))
    return m.fc(m.b(h * torch.sigmoid(m.one(h))).mean((2, 3)))


def difference(m: Net, x: Tensor) -> Tensor:
    h = F.relu(m.a(x))
    return m.fc((F.relu(m.b(h)) - torch.sigmoid(m.c(h))).mean((2, 3)))


def numbers(m: Net, x: Tensor) -> Tensor:
    h = 2 * F.relu(m.a(x)) - 0.5
    return m.fc((1 - m.b(h / 3)).mean((2, 3)))


def shuffle(m: Net, x: Tensor) -> Tensor:
    h = F.relu(m.a(x))
    n, channels, height, width = h.size()
    h = h.view(n, 2, channels // 2, height, width)
    h = torch.transpose(h, 1, 2).contiguous().view(n, -1, height, width)
    return m.fc(F.relu(m.b(h)).mean((2, 3)))


def chunks(m: Net, x: Tensor) -> Tensor:
    left, right = F.relu(m.a(x)).chunk(2, dim=1)
    return m.fc(m.c(torch.cat((left, torch.sigmoid(right)), dim=1)).mean((2, 3)))


def splits(m: Net, x: Tensor) -> Tensor:
    left, middle, right = torch.split(F.relu(m.a(x)), [3, 4, 1], 1)
    return m.fc(m.c(torch.cat((right, middle, left), 1)).mean((2, 3)))


def literal_view(m: Net, x: Tensor) -> Tensor:
    h = F.adaptive_avg_pool2d(F.relu(m.a(x)), 2).view(-1, 32)
    return m.fc(F.relu(m.wide(h)).reshape(2, 8))


def layer_scale(m: Net, x: Tensor) -> Tensor:
    h = F.relu(m.a(x))
    return m.fc((h + m.scale * F.relu(m.b(h))).mean((2, 3)))


def permuted_norm(m: Net, x: Tensor) -> Tensor:
    h = m.over_channels(m.a(x).permute(0, 2, 3, 1))
    return m.fc(F.gelu(m.fe(h)).permute(0, 3, 1, 2).mean((2, 3)))


def functional_norm(m: Net, x: Tensor) -> Tensor:
    h = F.relu(m.a(x)).permute(0, 2, 3, 1)
    h = F.layer_norm(h, (8,), m.over_channels.weight, m.over_channels.bias, 1e-6)
    return m.fc(m.b(h.permute(0, 3, 1, 2)).mean((2, 3)))


def channel_softmax(m: Net, x: Tensor) -> Tensor:
    return m.fc(m.b(F.relu(m.a(x)).softmax(1)).mean((2, 3)))


def computed_slice(m: Net, x: Tensor) -> Tensor:
    h = F.relu(m.a(x))
    return m.fc(m.c(h[:, : h.shape[1] // 2]).mean((2, 3)))


def channel_and_spatial_attention(m: Net, x: Tensor) -> Tensor:
    h = F.relu(m.a(x))
    seen = h.mean(1, keepdim=True) + torch.max(h, dim=1, keepdim=True)[0]
    return m.fc(m.b(h * torch.sigmoid(seen).expand_as(h)).sum(dim=(2, 3)))


def stacked(m: Net, x: Tensor) -> Tensor:
    paths = torch.stack([F.relu(m.a(x)), torch.sigmoid(m.a(x))], dim=1)
    return m.fc(m.b(paths.sum(1)).amax((2, 3)))


def norm_with_its_own_tensors(m: Net, x: Tensor) -> Tensor:
    n = m.norm
    h = F.batch_norm(m.a(x), n.running_mean, n.running_var, n.weight, n.bias, False, 0.1, 1e-5)
    return m.fc(m.b(F.relu(h)).mean((2, 3)))


def branches_on_shapes(m: Net, x: Tensor) -> Tensor:
    h = F.relu(m.a(x))
    if x.shape[-1] > 4 and x.dim() == 4:
        h = F.max_pool2d(h, int(h.shape[2] // 4))
    for _ in range(len(x.shape) - 3):
        h = m.b(h)
    return m.fc(h.mean((2, 3)))


def divided(m: Net, x: Tensor) -> Tensor:
    h = F.relu(m.a(x))
    h = F.normalize(h, dim=1) + h / (1 + h.mean(1, keepdim=True))
    return F.log_softmax(m.fc(m.b(h).mean((2, 3))), dim=1)


def converted(m: Net, x: Tensor) -> Tensor:
    h = F.relu(m.a(x)).to(x.dtype).log1p()
    return m.fc(m.b(h[:, :, None].expand(-1, -1, 2, -1, -1).mean(2)).mean((2, 3)))


def two_axes_sliced(m: Net, x: Tensor) -> Tensor:
    return m.fc(m.c(F.relu(m.a(x))[:, 1:7, ::2, ::2]).mean((2, 3)))


def training_only(m: Net, x: Tensor) -> Tensor:
    h = F.relu(m.a(x))
    if m.training:
        h = h + torch.ones_like(h)
    return m.fc(h.mean((2, 3)))


def clamped_by_a_tensor(m: Net, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.fc(torch.clamp(h, min=h.mean((2, 3), keepdim=True)).mean((2, 3)))


EXACT = {
    "bounds that the model computes": (clamped_by_a_tensor, 8),
    "a slice of two axes": (two_axes_sliced, 6),
    "something done in training only": (training_only, 8),
    "a slice with bounds from a shape": (computed_slice, 4),
    "maximum and mean over channels": (channel_and_spatial_attention, 8),
    "a stack": (stacked, 8),
    "a batch norm called as a function": (norm_with_its_own_tensors, 8),
    "branches on shapes": (branches_on_shapes, 8),
    "normalised over channels, divided by a tensor": (divided, 8),
    "converted and expanded": (converted, 8),
    "a value read again after a module changed it": (reuse_after_inplace, 8),
    "one value twice in a concatenation": (twice_in_concat, 8),
    "arguments given by keyword": (keyword_calls, 16),
    "dropout that follows the mode": (functional_dropout, 8),
    "a sum that broadcasts": (broadcast_sum, 8),
    "squeeze and excitation": (excitation, 8),
    "spatial attention": (spatial_attention, 8),
    "a difference": (difference, 8),
    "numbers on either side": (numbers, 8),
    "channel shuffle": (shuffle, 8),
    "chunks": (chunks, 8),
    "splits of unequal size": (splits, 8),
    "a view with the width written out": (literal_view, 8),
    "a parameter with channels": (layer_scale, 8),
    "permuted for a norm over channels": (permuted_norm, 8),
    "softmax over channels": (channel_softmax, 8),
    "a norm called as a function": (functional_norm, 8),
}


@pytest.mark.parametrize("streams", ["independent", "tied"])
@pytest.mark.parametrize("name", EXACT)
def test_exact(name: str, streams: str) -> None:
    forward, width = EXACT[name]
    check(Net(forward, width, outputs=8 if name == "squeeze and excitation" else 4), streams=streams)


class ConstantsReach(nn.Module):
    """The first convolution has two readers, so its gate stands right behind it, and the norm makes constants of it.

    Without the norm, zeros reach the operation in the middle.
    """

    def __init__(self, middle: nn.Module, norm: bool = True) -> None:
        super().__init__()
        width = middle(torch.zeros(2, 8, 8, 8)).shape[1]
        self.first, self.middle, self.second = conv(3, 8), middle, conv(width, 6)
        self.norm = nn.BatchNorm2d(8) if norm else nn.Identity()
        self.head, self.side = nn.Linear(6, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.head(F.relu(self.second(self.middle(self.norm(h)))).mean((2, 3))) + self.side(h.mean((2, 3)))


class Apply(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def shifted(norm: nn.Module) -> nn.Module:
    """A norm whose offsets are away from zero."""
    nn.init.uniform_(norm.bias, 0.2, 0.8)
    return norm


MIDDLES = {
    "sum over the map": Apply(lambda x: x.sum((2, 3), keepdim=True)),
    "joined along the map": Apply(lambda x: torch.cat([x, torch.sigmoid(x)], 2)),
    "cut along the map": Apply(lambda x: torch.cat([x.chunk(2, dim=3)[0] * 2, x.split(4, 3)[1]], 3)),
    "unbound along the map": Apply(lambda x: x.unbind(3)[2].unsqueeze(2)),
    "expanded": Apply(lambda x: x.mean((2, 3), keepdim=True).expand(-1, 8, 4, 4)),
    "mean over channels, expanded": Apply(lambda x: x.mean(1, keepdim=True).expand(-1, 8, -1, -1)),
    "extremes over channels": Apply(lambda x: torch.cat([x.min(1, True)[0], x.max(dim=1, keepdim=True)[0], x], 1)),
    "normalised over channels": Apply(lambda x: F.normalize(x)),
    "stacked and summed": Apply(lambda x: torch.stack((x, torch.sigmoid(x)), 2).sum(2)),
    "log softmax over the map": Apply(lambda x: x.flatten(2).log_softmax(2).view(2, 8, 8, 8)),
    "sigmoid": nn.Sigmoid(),
    "average pool, padding counted": nn.AvgPool2d(3, 1, 1),
    "average pool, padding not counted": nn.AvgPool2d(3, 1, 1, count_include_pad=False),
    "average pool, fixed divisor, rounded up": nn.AvgPool2d(3, 2, ceil_mode=True, divisor_override=4),
    "average pool function": Apply(lambda x: F.avg_pool2d(x, 3, 1, 1)),
    "max pool": nn.MaxPool2d(3, 2, 1),
    "zero padding": Apply(lambda x: F.pad(x, (1, 2, 0, 1))),
    "constant padding": Apply(lambda x: F.pad(x, (1, 1, 1, 1), value=0.5)),
    "reflected padding": Apply(lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect")),
    "zero padding module": nn.ZeroPad2d((1, 0, 2, 1)),
    "constant padding module": nn.ConstantPad2d(1, 0.5),
    "circular padding module": nn.CircularPad2d(1),
    "circular convolution": nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular"),
    "unpadded convolution": nn.Conv2d(8, 8, 3),
    "same padding": nn.Conv2d(8, 8, 3, padding="same"),
    "depthwise": nn.Conv2d(8, 8, 3, padding=1, groups=8),
    "norm without affine": nn.BatchNorm2d(8, affine=False),
    "norm over groups": nn.GroupNorm(2, 8),
    "norm over channels and map": nn.LayerNorm([8, 8, 8]),
    "local response norm": nn.LocalResponseNorm(3),
    "instance norm": nn.InstanceNorm2d(8),
    "instance norm with offsets": shifted(nn.InstanceNorm2d(8, affine=True)),
    "prelu": nn.PReLU(8),
    "prelu with one slope": nn.PReLU(),
    "grouped": nn.Conv2d(8, 8, 3, padding=1, groups=2),
    "grouped, several outputs per input": nn.Conv2d(8, 16, 1, groups=8, bias=False),
    "transposed": nn.ConvTranspose2d(8, 8, 3, 2, 1),
    "transposed, grouped": nn.ConvTranspose2d(8, 4, 2, 2, groups=2),
    "up-sampling": nn.Upsample(scale_factor=2, mode="bilinear"),
    "pixel shuffle": nn.PixelShuffle(2),
    "pixel unshuffle": nn.PixelUnshuffle(2),
    "softmax over the map": Apply(lambda x: x.flatten(2).softmax(2).view(2, 8, 8, 8)),
    "residual": Apply(lambda x: x + torch.sigmoid(x)),
}


@pytest.mark.parametrize("norm", [True, False], ids=["constants", "zeros"])
@pytest.mark.parametrize("name", MIDDLES)
def test_constants_and_zeros_reach_the_operation(name: str, norm: bool) -> None:
    check(ConstantsReach(copy.deepcopy(MIDDLES[name]).float(), norm))


def alias_of_inplace(m: Net, x: Tensor) -> Tensor:
    h = m.a(x)
    kept = m.identity(h)
    return m.fc((m.b(F.relu(h, inplace=True)) + kept).mean((2, 3)))


def view_of_inplace(m: Net, x: Tensor) -> Tensor:
    h = m.a(x)
    F.relu(h[:, :4], inplace=True)
    return m.fc(m.b(h).mean((2, 3)))


def alias_of_inplace_module(m: Net, x: Tensor) -> Tensor:
    h = m.a(x)
    kept = m.identity(h)
    return m.fc((m.b(m.relu(h)) + kept).mean((2, 3)))


REFUSED = {
    "an alias of a value changed by a function": (alias_of_inplace, 8, "in place while a view or an alias"),
    "a view of a value changed by a function": (view_of_inplace, 8, "in place while a view or an alias"),
    "an alias of a value changed by a module": (alias_of_inplace_module, 8, "in place while a view or an alias"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    forward, width, message = REFUSED[name]
    with pytest.raises(GraphError, match=message):
        prepare(Net(forward, width).double(), X)


def test_dropout_still_drops_in_training() -> None:
    pruner = Pruner(Net(functional_dropout).double(), X, scorer="free")
    with pruner.dense():
        outputs = [pruner.model(X) for _ in range(2)]
    assert not torch.equal(*outputs)
    pruner.select(keep_filters=0.5)
    small = pruner.compact()
    assert not torch.equal(small.train()(X), small(X))
    assert torch.equal(small.eval()(X), small(X))


def test_answers_of_the_network_are_never_gated() -> None:
    convolutional = nn.Sequential(conv(3, 8), nn.ReLU(), conv(8, 5), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    assert [g.name for g in prepare(convolutional.double(), X).groups] == ["0"]

    def two_heads(m: Net, x: Tensor) -> Tensor:
        h = F.relu(m.a(x)).mean((2, 3))
        return torch.cat([m.fc(h), m.fd(h)], 1)

    def summed_heads(m: Net, x: Tensor) -> Tensor:
        h = F.relu(m.a(x)).mean((2, 3))
        return m.fc(h) + m.fd(h)

    for forward in (two_heads, summed_heads):
        assert [g.name for g in prepare(Net(forward).double(), X, placement="branch").groups] == ["a"]


def test_every_output_keeps_a_path() -> None:
    def outputs(m: Net, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.relu(m.a(x))
        return m.fc(F.relu(m.b(h)).mean((2, 3))), m.fd(F.relu(m.c(h)).mean((2, 3)))

    network = prepare(lively(Net(outputs)), X)
    scores = {"a": torch.linspace(0.1, 0.9, 8), "b": torch.full((8,), 0.9), "c": torch.full((8,), 0.1)}
    plan = select(network, scores, Target(threshold=0.5)).plan
    assert {name: len(kept.filters) for name, kept in plan.groups.items()} == {"a": 4, "b": 8, "c": 1}


def test_a_constant_map_serves_only_its_size() -> None:
    class Side(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.side, self.norm, self.out = conv(3, 4), conv(4, 4), nn.BatchNorm2d(4), conv(4, 4)
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = F.relu(self.stem(x))
            s = self.side(h)
            return self.head((h + self.out(torch.sigmoid(self.norm(s)) + torch.sigmoid(s))).mean((2, 3)))

    model = lively(Side())
    network = prepare(model, X)
    choice = {g.name: torch.full((g.width,), g.name != "side").numpy() for g in network.groups}
    small = network.compact(network.plan(choice)).eval()
    small(X)
    with pytest.raises(GraphError, match="constant map"):
        small(torch.zeros(1, 3, 16, 16, dtype=torch.float64))


def test_a_child_may_be_called_gates() -> None:
    class Named(Net):
        def __init__(self) -> None:
            super().__init__(lambda m, x: m.fc(m.channel_maps(m.gates(m.a(x))).mean((2, 3))))
            self.gates, self.channel_maps = nn.ReLU(), nn.Tanh()

    check(Named(), seeds=range(2))


def test_layers_that_forward_never_calls_are_counted() -> None:
    class Unused(Net):
        def __init__(self) -> None:
            super().__init__(lambda m, x: m.fc(F.relu(m.a(x)).mean((2, 3))))

    model = Unused().double()
    network = prepare(model, X)
    assert network.dense.params == sum(p.numel() for p in model.parameters())
    selection = select(network, {"a": torch.rand(8)}, Target(keep_params=0.95))
    assert paam.count(network.compact(selection.plan), X).params == selection.kept_params * network.dense.params


def test_balance_is_measured_against_the_last_convolution() -> None:
    layers = [conv(3, 4), nn.ReLU(), nn.MaxPool2d(2), conv(4, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 6), nn.ReLU()]
    network = prepare(nn.Sequential(*layers, nn.Linear(6, 2)).double(), X)
    assert network.balance("area") == {"0": 4.0, "3": 1.0, "6": 1 / 16}
    assert network.balance("side") == {"0": 2.0, "3": 1.0, "6": 1 / 4}
    # With a filter of "0" fall its own 27 weights at 64 places and 4 x 9 of the next layer at 16, and so on.
    macs = {"0": 27 * 64 + 36 * 16, "3": 36 * 16 + 16 * 6, "6": 64 + 2}
    assert network.balance("macs") == {name: value / macs["3"] for name, value in macs.items()}
    params = {"0": 27 + 1 + 36, "3": 36 + 1 + 16 * 6, "6": 64 + 1 + 2}  # with its bias
    assert network.balance("params") == {name: value / params["3"] for name, value in params.items()}


def test_a_balance_that_there_is_none_of_is_refused() -> None:
    network = prepare(nn.Sequential(conv(3, 4), nn.ReLU(), conv(4, 4)).double(), X)
    with pytest.raises(RecipeError, match="Did you mean 'macs'"):
        network.balance("mac")
    with pytest.raises(RecipeError, match="balance must be text"):
        network.balance(1)


def test_balance_by_cost_counts_all_that_a_stream_feeds_and_groups_as_a_whole() -> None:
    network = prepare(resnet20(), torch.zeros(1, 3, 32, 32), streams="tied")
    macs = network.balance("macs")
    # An inner filter: 9 weights for each of 64 channels read, and as many that read it, at 8 x 8 places.
    inner = 2 * 9 * 64 * 64
    assert macs["layer3.1.conv1"] == macs["layer3.2.conv1"] == 1
    # A channel of the first stream at 32 x 32: its own 27 weights, the second layers of 3 blocks write it, the first
    # layers of 3 read it; so does the next stage's first layer, at 16 x 16, and its shortcut costs nothing.
    assert macs["conv1"] == ((27 + 6 * 9 * 16) * 1024 + 9 * 32 * 256) / inner
    grouped = nn.Sequential(conv(3, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, groups=4), nn.ReLU(), conv(8, 2))
    # A filter of the second layer has 2 x 9 weights and a bias, and 2 x 9 more read it; one of the first has 27 and a
    # bias, and the two filters of its group read it.
    assert prepare(grouped.double(), X).balance("params") == {"0": (27 + 1 + 18) / (18 + 1 + 18), "2": 1}


def test_copies_of_a_pruned_network_can_be_saved(tmp_path) -> None:
    pruner = Pruner(paam.models.resnet20(), torch.zeros(1, 3, 32, 32))
    pruner.select(keep_macs=0.5)
    twin = copy.deepcopy(pruner.compact())
    assert type(twin).__name__ == "CifarResNet"
    paam.save(twin, tmp_path)
    assert torch.equal(paam.load(tmp_path, paam.models.resnet20()).conv1.weight, twin.conv1.weight)


def test_a_pruned_network_can_be_pickled_again_and_again_with_its_plan_and_modes(tmp_path) -> None:
    """With streams left free, so that index maps are in it; its forward() has annotations that are texts."""
    pruner = Pruner(paam.models.resnet20(), torch.zeros(1, 3, 32, 32))
    pruner.select(keep_macs=0.5)
    small = pruner.compact().train()
    small.layer2.eval()
    twin = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(small))))
    assert type(twin).__name__ == "CifarResNet"
    for name, layer in small.named_modules():
        if not list(layer.children()):
            assert twin.get_submodule(name).training == layer.training
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(twin.eval()(x), small.eval()(x))
    paam.save(copy.deepcopy(twin), tmp_path)
    assert torch.equal(paam.load(tmp_path, paam.models.resnet20()).eval()(x), small(x))
    again = Pruner(twin, x)
    again.select(keep_macs=0.5)
    smaller = again.compact().eval()
    assert torch.equal(pickle.loads(pickle.dumps(smaller))(x), smaller(x))


def test_odd_arguments_are_explained() -> None:
    model = Net(functional_dropout).double()
    assert len(Pruner(model, [X]).network.groups) == 2
    for nothing in (None, (), [3]):
        with pytest.raises(GraphError, match="example_inputs is the tensor"):
            Pruner(model, nothing)
    with pytest.raises(GraphError, match="does not run on .* takes 2 positional arguments but 3 were given"):
        prepare(model, (X, X))
    with pytest.raises(RecipeError, match="alpha must be > 0"):
        Pruner(model, X, alpha=0)
    with pytest.raises(GraphError, match="reparametrisation"), pytest.warns():
        prepare(
            nn.Sequential(nn.utils.weight_norm(conv(3, 4)), nn.ReLU(), conv(4, 2), nn.Flatten()),
            torch.zeros(1, 3, 4, 4),
        )
    schedule = paam.Schedule(warmup=0, cycles=1, score=1, weight=1, finetune=0)
    loader = [(X, torch.zeros(2, dtype=torch.int64))]
    with pytest.raises(DataError, match="validation batches are empty or exhausted"):
        paam.prune(model, loader, iter([]), keep_filters=0.5, schedule=schedule, device="cpu")
    with pytest.raises(DataError, match=r"is 7, but the network has \d+ outputs"):
        paam.prune(model, [(X, torch.tensor([0, 7]))], keep_filters=0.5, schedule=schedule, device="cpu")
    with pytest.raises(TargetError, match="cannot be reached"):
        paam.prune(model, loader, keep_macs=1e-6, schedule=schedule, device="cpu", on_event=pytest.fail)
    assert paam.count(nn.Sequential(), X).macs == 0


def test_accuracy_leaves_modes_alone() -> None:
    model = Net(functional_dropout).double().train()
    model.norm.eval()
    assert accuracy(model, [(X, torch.zeros(2, dtype=torch.int64))]) in (0.0, 50.0, 100.0)
    assert model.training
    assert not model.norm.training


class NormAct(nn.BatchNorm2d):
    """A batch norm with an activation in it, which counts its batches by itself, as some model zoos have it."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_batches_tracked.add_(1)
        return F.silu(F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training))


class SquashingNorm(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).softmax(1)


class SamePadded(nn.Conv2d):
    """Pads by what the input's size asks for: nothing that could be traced, but a convolution all the same."""

    def forward(self, x: Tensor) -> Tensor:
        missing = max((math.ceil(x.shape[-1] / 2) - 1) * 2 + 3 - x.shape[-1], 0)
        return F.conv2d(F.pad(x, (0, missing, 0, missing)), self.weight, self.bias, 2)


class Standardized(nn.Conv2d):
    """Its weights are normalised over inputs: with fewer of them every weight is another one, so it keeps them all."""

    def __init__(self, inputs: int, outputs: int, size: int, **options) -> None:
        super().__init__(inputs, outputs, size, **options)
        self.gain = nn.Parameter(torch.rand(outputs, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.reshape(self.out_channels, -1)
        weight = (weight - weight.mean(1, keepdim=True)) / (weight.var(1, keepdim=True) + 1e-4).sqrt()
        return F.conv2d(x, weight.view_as(self.weight) * self.gain, self.bias, 1, 1, 1, self.groups)


class Entangled(nn.Conv2d):
    """Its weights are normalised over outputs as well: it cannot be cut at all."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight / self.weight.norm(), self.bias, 1, 1)


def test_layers_built_upon_known_ones_are_tried_out() -> None:
    check(ConstantsReach(nn.Sequential(NormAct(8), SamePadded(8, 8, 3, 2))))
    for groups in (1, 2, 8):
        check(ConstantsReach(nn.Sequential(NormAct(8), Standardized(8, 8, 3, groups=groups))))
    model = ConstantsReach(NormAct(8)).double().train()
    before = model.middle.num_batches_tracked.clone()
    prepare(model, X)
    assert model.middle.num_batches_tracked == before
    for middle in (SquashingNorm(8), Entangled(8, 8, 3)):  # they mix channels, and are left whole
        check(ConstantsReach(middle))
