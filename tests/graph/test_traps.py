"""Networks that would be pruned to something else by a careless reader of graphs. Each is exact, or refused.

The truth here is the model itself: with all gates open the gated network computes what it computes, and the compacted
network what the gated one computes, on fresh inputs, for other batch sizes than the example's.
"""

from __future__ import annotations

import types
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paam
from doubtful import Net, check, conv, images
from networks import compacted, lively, random_choice, relative_error
from paam import Pruner
from paam.errors import GraphError
from paam.graph.network import prepare
from paam.pruning.select import Selection


def twice_if_wide(m: Net, y: Tensor) -> Tensor:
    return y * 2 if y.shape[1] > 5 else y


def scaled_by_width(m: Net, y: Tensor) -> Tensor:
    return y * (1.0 / float(y.shape[1]))


def scaled_by_number(m: Net, y: Tensor) -> Tensor:
    return y.flatten(1).view(-1, 8, y[0].numel() // 8).unsqueeze(3)


def pooled_to_width(m: Net, y: Tensor) -> Tensor:
    return F.adaptive_avg_pool2d(y, y.shape[1])


def cut_to_width(m: Net, y: Tensor) -> Tensor:
    return y[:, :, : y.shape[1] - 1]


def width_of_another(m: Net, y: Tensor) -> Tensor:
    n, c, h, w = y.shape
    return F.relu(m.line(y.flatten(2).permute(2, 0, 1))).permute(1, 2, 0).reshape(n, c, h, w)


def changed_alias(m: Net, y: Tensor) -> Tensor:
    kept = y
    y += 1.0
    return y + kept


def changed_through_alias(m: Net, y: Tensor) -> Tensor:
    other = y
    other *= 2
    return F.relu(y)


def changed_by_a_function(m: Net, y: Tensor) -> Tensor:
    def bump(t: Tensor) -> None:
        t += 1

    bump(y)
    return y


def in_place_function(m: Net, y: Tensor) -> Tensor:
    torch.relu_(y)
    return y


def in_place_by_keyword(m: Net, y: Tensor) -> Tensor:
    return m.relu(input=y)


def pooled_along_channels(m: Net, y: Tensor) -> Tensor:
    z = F.max_pool2d(torch.tanh(y).permute(0, 2, 3, 1), 3, 1, 1).permute(0, 3, 1, 2)
    return z + F.avg_pool2d(torch.tanh(y).permute(0, 2, 3, 1), 3, 1, 1).permute(0, 3, 1, 2)


def pooled_over_channels(m: Net, y: Tensor) -> Tensor:
    tokens = y.flatten(2).transpose(1, 2)
    return (tokens + F.adaptive_avg_pool1d(tokens, 1).expand(-1, -1, 8)).transpose(1, 2).reshape(y.shape)


def stretched_along_channels(m: Net, y: Tensor) -> Tensor:
    return F.interpolate(y.flatten(2).transpose(1, 2), scale_factor=2)[:, :, ::2].transpose(1, 2).unflatten(2, (8, 8))


def position(m: Net, y: Tensor) -> Tensor:
    return y * m.place + m.place


def maximum_on_another_axis(m: Net, y: Tensor) -> Tensor:
    return torch.maximum(y, m.along)[:, :1].expand(-1, 8, -1, -1)


def constants(m: Net, y: Tensor) -> Tensor:
    return y * torch.arange(8.0).double().view(8, 1, 1) - m.shift[None, :, None, None] * m.one


def plain_attribute(m: Net, y: Tensor) -> Tensor:
    return y * m.plain


def unused_indices(m: Net, y: Tensor) -> Tensor:
    values, _ = y.max(1, keepdim=True)
    return y * values


def axis_by_another_name(m: Net, y: Tensor) -> Tensor:
    return y - y.mean(axis=(2, 3), keepdim=True)


def unflattened(m: Net, y: Tensor) -> Tensor:
    return y.unflatten(1, (8, 1)).squeeze(2)


def squeezed(m: Net, y: Tensor) -> Tensor:
    return (y * F.adaptive_avg_pool2d(y, 1).squeeze()[:, :, None, None]) if y.shape[0] > 1 else y


def both_ways(m: Net, y: Tensor) -> Tensor:
    halves = y.view(-1, 2, 4, 8, 8)
    return halves.transpose(1, 2).reshape(-1, 8, 8, 8) * halves.softmax(1).flatten(1, 2)


def chunks_joined_again(m: Net, y: Tensor) -> Tensor:
    return torch.cat(y.chunk(2, 1), 1)


def batch_softmax(m: Net, y: Tensor) -> Tensor:
    return F.softmax(y, 0)


def batch_normalize(m: Net, y: Tensor) -> Tensor:
    return F.normalize(y, dim=0)


def weight_read_again(m: Net, y: Tensor) -> Tensor:
    return y + F.conv2d(y, m.mid.weight, padding=1)


def offset_read_again(m: Net, y: Tensor) -> Tensor:
    return y * m.norm.weight.view(1, -1, 1, 1)


def parameters(m: Net) -> None:
    m.place = nn.Parameter(torch.randn(1, 8, 8, 8))
    m.along = nn.Parameter(torch.randn(8))
    m.register_buffer("shift", torch.randn(8))
    m.register_buffer("one", torch.tensor(0.7))
    m.plain = torch.rand(8, 1, 1, dtype=torch.float64)


EXACT = [
    *(twice_if_wide, scaled_by_width, scaled_by_number, pooled_to_width, cut_to_width, width_of_another),
    *(changed_alias, changed_through_alias, changed_by_a_function, in_place_function, in_place_by_keyword),
    *(pooled_along_channels, pooled_over_channels, stretched_along_channels, position),
    *(maximum_on_another_axis, constants, plain_attribute, weight_read_again, offset_read_again),
    *(batch_softmax, batch_normalize, unused_indices, axis_by_another_name, unflattened, both_ways),
    *(chunks_joined_again,),
]


@pytest.mark.parametrize("streams", ["independent", "tied"])
@pytest.mark.parametrize("function", EXACT, ids=lambda f: f.__name__)
def test_exact(function, streams: str) -> None:
    check(Net(function, parameters), streams=streams)


def test_other_image_sizes() -> None:
    """What becomes of a constant in a sum, a norm or a softmax over the map depends on the map's size."""

    def over_the_map(m: Net, y: Tensor) -> Tensor:
        y = torch.sigmoid(y)
        z = y.sum((2, 3), keepdim=True) + torch.norm(y, dim=(2, 3), keepdim=True) + F.normalize(y, dim=2)
        return z + F.softmax(y, 2) + F.log_softmax(y, 3)

    check(Net(over_the_map), size=12, empty=0)


def test_models_in_training_mode() -> None:
    """Constants are read in evaluation mode, whatever mode the model came in; it stays in that mode."""

    def dropped(m: Net, y: Tensor) -> Tensor:
        return F.dropout(torch.dropout(torch.sigmoid(y), 0.3, m.training), 0.5, m.training)

    model = lively(Net(dropped)).train()
    x = images(2)
    network = prepare(model, x)
    for seed in range(6):
        choice = random_choice(network, seed, empty=0.4)
        small = network.compact(network.plan(choice))
        assert small.training
        assert model.training
        masked = prepare(model.eval(), x).compact(network.plan(choice)).eval()
        with torch.no_grad():
            assert relative_error(small.eval()(x), masked(x)) < 1e-12
        model.train()


def written_out(m: Net, y: Tensor) -> Tensor:
    torch.add(y, 1, out=y)
    return y


REFUSED = {
    written_out: "writes into out=",
}


@pytest.mark.parametrize("function", REFUSED, ids=lambda f: f.__name__)
def test_refused(function) -> None:
    with pytest.raises(GraphError, match=REFUSED[function]):
        prepare(Net(function).double(), images(2))


def test_hooks_are_refused() -> None:
    def identity(m: Net, y: Tensor) -> Tensor:
        return m.pool(y)

    model = Net(identity).double()
    handle = model.pool.register_forward_hook(lambda module, inputs, output: output + 1)
    with pytest.raises(GraphError, match="'pool'.*hooks"):
        prepare(model, images(2))
    handle.remove()
    model.mid.forward = types.MethodType(lambda self, x: nn.Conv2d.forward(self, x).flip(1), model.mid)
    with pytest.raises(GraphError, match="'mid'.*forward"):
        prepare(model, images(2))


def test_a_model_that_counts_is_refused_and_left_alone() -> None:
    def counting(m: Net, y: Tensor) -> Tensor:
        m.count += 1
        return y * m.count

    model = Net(counting, lambda m: m.register_buffer("count", torch.zeros(()))).double()
    with pytest.raises(GraphError):
        prepare(model, images(2))
    assert model.count == 0


def test_constants_do_not_stay_behind() -> None:
    model = Net(constants, parameters).double()
    before = set(vars(model))
    prepare(model, images(2))
    assert set(vars(model)) == before


def test_integer_images() -> None:
    class Bytes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm, self.b, self.head = conv(3, 8), nn.GroupNorm(2, 8), conv(8, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(F.relu(self.b(self.norm(F.relu(self.a(x.double() / 255))))).mean((2, 3)))

    x = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    network = prepare(lively(Bytes()), x)
    choice = {group.name: torch.full((group.width,), group.name != "a").numpy() for group in network.groups}
    small = network.compact(network.plan(choice)).eval()
    assert small(x).shape == (2, 3)


def test_tokens_of_one_channel_are_pruned_again() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm = conv(3, 8), nn.LayerNorm(8)
            self.up, self.down, self.head = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            t = F.relu(self.a(x)).flatten(2).transpose(1, 2)
            t = t + self.down(F.gelu(self.up(self.norm(t))))
            return self.head(t.transpose(1, 2).mean(2))

    x = images(2)
    for seed in range(6):
        small = lively(Tokens(), seed)
        for _ in range(3):
            pruner = Pruner(small, x, scorer="free")
            choice = {group.name: torch.zeros(group.width, dtype=torch.bool).numpy() for group in pruner.network.groups}
            for mask in choice.values():
                mask[seed % len(mask)] = True
            small = compacted(pruner, choice)
            with torch.no_grad():
                assert relative_error(small(x), pruner.model.eval()(x)) < 1e-9


class Attends(nn.Module):
    """torch's own attention, which returns its weights as well."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.attend = conv(3, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.last, self.head = nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = F.relu(self.stem(x)).flatten(2).transpose(1, 2)
        tokens = tokens + self.attend(tokens, tokens, tokens, need_weights=False)[0]
        return self.head(F.relu(self.last(tokens)).mean(1))


def test_modules_that_return_several_values() -> None:
    check(Attends())
    model = Attends()
    # 64 tokens of width 8: four projections, and two products of 64 x 64 tokens.
    assert (
        paam.count(model, torch.zeros(1, 3, 8, 8)).macs
        - paam.count(nn.Sequential(model.stem), torch.zeros(1, 3, 8, 8)).macs
        == 4 * 64 * 8 * 8 + 2 * 64 * 64 * 8 + 64 * 8 * 6 + 6 * 3
    )

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = conv(8, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = torch.cumsum(self.conv(x), 1)
            return y, -y

    def several(m: Net, y: Tensor) -> Tensor:
        first, second = m.two(y)
        return first * 2 + second

    net = Net(several, lambda m: m.add_module("two", Two()))
    pruner = Pruner(lively(net), images(2), scorer="free", ignore=["two"])
    for seed in range(4):
        choice = random_choice(pruner.network, seed)
        small = pruner.compact(pruner.network.plan(choice)).eval()
        pruner.use(Selection(pruner.network.plan(choice), 0.5, 1.0, 1.0))
        with pruner.weighting():
            pass
        x = images(3)
        with torch.no_grad():
            assert relative_error(small(x), pruner.model.eval()(x)) < 1e-9
        assert paam.count(small, images(2)).params == pruner.network.cost(choice).params


def test_a_list_of_names_is_not_a_name() -> None:
    with pytest.raises(paam.PaamError, match=r"a list of names, such as \['mid'\]"):
        prepare(Net(twice_if_wide).double(), images(2), ignore="mid")


def test_exported_weights_load_whatever_the_names(tmp_path) -> None:
    def build() -> nn.Module:
        layers = [nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 4, 3)]
        return nn.Sequential(OrderedDict(zip("baz", layers, strict=True)))

    pruner = Pruner(build(), torch.zeros(1, 3, 8, 8))
    pruner.select(keep_macs=0.5)
    small = pruner.compact().eval()
    paam.export(small, torch.zeros(1, 3, 8, 8), tmp_path / "small.safetensors", "safetensors")
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(paam.load(tmp_path / "small.safetensors", build())(x), small(x))
