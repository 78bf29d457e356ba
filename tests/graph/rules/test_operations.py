"""Operations that once went wrong, or nearly: shuffles of fewer channels, views that hold numbers, parts, masks, ways.

Each stands behind a gated convolution and a norm, so that channels come and go in front of it; see test_traps.py.
"""

from __future__ import annotations

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


def shuffled_by_all(m: Net, y: Tensor) -> Tensor:
    return torch.channel_shuffle(y, 8)


def shuffled(m: Net, y: Tensor) -> Tensor:
    return torch.channel_shuffle(y, 4).maximum(y)


def narrowed_to_all(m: Net, y: Tensor) -> Tensor:
    return y.narrow(1, 0, 8)


def rolled(m: Net, y: Tensor) -> Tensor:
    return y.roll(3, 1) + y.roll(1, 2) + torch.roll(y, 8, 1)


def flipped(m: Net, y: Tensor) -> Tensor:
    return torch.flip(y, (1,)) * y.flip((1, 3))


def repeated(m: Net, y: Tensor) -> Tensor:
    return y.repeat_interleave(2, dim=1)[:, ::2] + y.repeat(1, 2, 1, 1)[:, 4:12] + y.tile(2)[..., :8]


def picked_by_index(m: Net, y: Tensor) -> Tensor:
    order = torch.tensor([7, 6, 5, 4, 3, 2, 1, 0])
    return y.index_select(1, order) + y[:, order] + y[:, [1, 0, 3, 2, 5, 4, 7, 6]]


def unfolded(m: Net, y: Tensor) -> Tensor:
    return y.unfold(1, 2, 2).flatten(1, 2).movedim(1, -1).permute(0, 3, 1, 2)[:, :4].repeat(1, 2, 1, 2)


def diagonals(m: Net, y: Tensor) -> Tensor:
    return y.diagonal(0, 2, 3).unsqueeze(-1) + torch.rot90(y, 1, (2, 3))


def unflattened_to_one(m: Net, y: Tensor) -> Tensor:
    return y.unflatten(1, (8, 1)).squeeze(2)


def viewed_across(m: Net, y: Tensor) -> Tensor:
    z = y.permute(0, 2, 3, 1)
    return (z + 1).permute(0, 3, 1, 2).contiguous().view(y.shape[0], -1).view(y.size(0), 8, 8, 8)


def parts_of_the_batch(m: Net, y: Tensor) -> Tensor:
    return y.reshape(1, -1, 8, 8).view(y.shape) + y.view(-1, 8, 8).view(y.shape)


def a_single_channel(m: Net, y: Tensor) -> Tensor:
    mean = y.mean(1, keepdim=True)
    moved = mean.reshape(1, -1, 8, 8).view(y.shape[0], 1, 8, 8) - mean.squeeze(1).unsqueeze(1)
    return y * moved + mean.expand(y.shape) + mean.squeeze(1)[:, None]


def two_from_one(m: Net, y: Tensor) -> Tensor:
    return y * y.mean(1, True).expand(-1, 2, -1, -1).repeat(1, 4, 1, 1)


def samples_as_groups(m: Net, y: Tensor) -> Tensor:
    n, c, h, w = y.shape
    weight = torch.sigmoid(y.mean((2, 3))).view(n * c, 1, 1, 1)
    return F.conv2d(y.reshape(1, n * c, h, w), weight, groups=n * c).view(n, c, h, w)


def values_and_places(m: Net, y: Tensor) -> Tensor:
    most, places = y.flatten(2).max(2)
    return y * most[:, :, None, None] + places[:, :, None, None] * 0.1


def only_places(m: Net, y: Tensor) -> Tensor:
    return y * y.flatten(2).topk(2, dim=2)[1].sum(2)[:, :, None, None] + y.max(1, True)[1]


def parts_by_sizes(m: Net, y: Tensor) -> Tensor:
    a, b, c = torch.tensor_split(y, 3, dim=1)
    return torch.cat([torch.sigmoid(b), c, F.relu(a)], 1)


def parts_that_need_different_channels(m: Net, y: Tensor) -> Tensor:
    var, mean = torch.var_mean(torch.sigmoid(y), (2, 3), keepdim=True)
    return (y[:, :4] * mean[:, :4]).repeat(1, 2, 1, 1) + y * var


def masked(m: Net, y: Tensor) -> Tensor:
    mask = (y > 0.1) & (y < 2) | ~(y > 0)
    return torch.where(mask, y, y * 0) + y.masked_fill(y < 0, 0.3) + mask.float() + (y > 0).to(y.dtype)


def where_all_is_closed(m: Net, y: Tensor) -> Tensor:
    return torch.where(y[:, :1] > 0, torch.ones_like(y), torch.zeros_like(y)) + (y > 1).int().to(y.dtype)


def whole_numbers(m: Net, y: Tensor) -> Tensor:
    return y * (torch.round(torch.cos(y) * 3).long() % 2 + 1)


def power_of_two(m: Net, y: Tensor) -> Tensor:
    return 2**y + torch.pow(2.0, y) + torch.rsub(y, 1)


def arguments_by_name(m: Net, y: Tensor) -> Tensor:
    z = torch.mul(input=y, other=torch.add(input=y, other=1.0)) - torch.sub(y, other=0.5, alpha=2)
    parts = torch.cat(tensors=[y, z], dim=1).chunk(chunks=2, dim=1)
    return parts[0] + torch.cat([parts[1][:, :, :4], z[:, :, 4:]], axis=2) + torch.sum(y, axis=(2, 3), keepdims=True)


def corrected_by_position(m: Net, y: Tensor) -> Tensor:
    return y / (torch.std(y, False) + 1) + torch.var(y, (2, 3), True, True)


def pooled_as_one_map(m: Net, y: Tensor) -> Tensor:
    flat = F.adaptive_avg_pool1d(y.mean((2, 3)), 1).view(y.shape[0], 1, 1, 1)
    return y * flat + F.avg_pool1d(y.mean((2, 3)), 3, 1, 1)[:, :, None, None]


def read_twice_with_constants(m: Net, y: Tensor) -> Tensor:
    z = torch.sigmoid(y)
    return torch.cat([z, z], 3) * torch.cat([z, z], 3)


def over_the_batch(m: Net, y: Tensor) -> Tensor:
    return y - y.mean(0, keepdim=True) + torch.cumsum(y, 0)[:1]


def running_sums(m: Net, y: Tensor) -> Tensor:
    return torch.cumsum(y, 1) + y.cumsum(2)


def weight_read_again(m: Net, y: Tensor) -> Tensor:
    return y + F.conv2d(y, m.mid.weight, padding=1)


def offset_read_again(m: Net, y: Tensor) -> Tensor:
    return y * m.norm.weight.view(1, -1, 1, 1)


def called_along_another_axis(m: Net, y: Tensor) -> Tensor:
    return y + m.mid(y.transpose(1, 2)).transpose(1, 2) + m.mid(y)


def copied(m: Net, y: Tensor) -> Tensor:
    y.copy_(y.tanh())
    return y


def assigned(m: Net, y: Tensor) -> Tensor:
    y = F.relu(y)
    y[:, 0] += 1
    y[:, 1:3] = 0.5
    y[:, :, 2:4] = 0
    y[..., 1] = 0.25
    y[:, 3:5] = y[:, 5:7].clone() * 2
    return y


def assigned_to_what_was_made(m: Net, y: Tensor) -> Tensor:
    mask = y.new_zeros((y.shape[2], y.shape[3]))
    for place, rows in enumerate((slice(0, 3), slice(3, None))):
        mask[rows, 1:] = place
    total = torch.zeros(1, 8, 1, 1, dtype=y.dtype)
    total[:, 2] = 3.0
    total += m.norm.bias.view(1, -1, 1, 1)
    return y * mask + total


EXACT = [
    *(shuffled_by_all, shuffled, narrowed_to_all, rolled, flipped, repeated, picked_by_index, unfolded, diagonals),
    *(unflattened_to_one, viewed_across, parts_of_the_batch, a_single_channel, two_from_one, samples_as_groups),
    *(values_and_places, only_places, parts_by_sizes, parts_that_need_different_channels, masked),
    *(where_all_is_closed, whole_numbers, power_of_two, arguments_by_name, corrected_by_position, pooled_as_one_map),
    *(read_twice_with_constants, over_the_batch, running_sums, weight_read_again, offset_read_again),
    *(called_along_another_axis, copied, assigned, assigned_to_what_was_made),
]


@pytest.mark.parametrize("function", EXACT, ids=lambda f: f.__name__)
def test_exact(function) -> None:
    check(Net(function), empty=0.4)


class Shortcut(nn.Conv2d):
    """Adds its input where that has as many channels as its output: cut alike it still does, cut otherwise not."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + x if self.in_channels == self.out_channels else y


class ByWidth(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.out_channels**-0.5


class Mixing(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).softmax(1)


class WithSlopes(nn.BatchNorm2d):
    """Holds numbers for each channel that do not lie as a batch norm's do."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.slopes = nn.Parameter(torch.rand(1, width, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.slopes


@pytest.mark.parametrize(
    "layer",
    [
        Shortcut(8, 8, 3, padding=1),
        Shortcut(8, 5, 1),
        Shortcut(8, 12, 1),
        Shortcut(8, 8, 3, padding=2, dilation=2),
        ByWidth(8, 8, 1, groups=4),
        Mixing(8),
        WithSlopes(8),
    ],
    ids=lambda layer: f"{type(layer).__name__} {getattr(layer, 'out_channels', 8)}",
)
def test_own_layers(layer: nn.Module) -> None:
    def own(m: Net, y: Tensor) -> Tensor:
        z = m.own(y)
        return z[:, :8] if z.shape[1] >= 8 else torch.cat([z, y], 1)[:, :8]

    check(Net(own, lambda m: m.add_module("own", layer)), empty=0)
    check(Net(own, lambda m: m.add_module("own", layer)), empty=0.4)


class Trained(nn.Module):
    """Takes another way in training, in which it draws numbers, cuts by sizes, and updates statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mid, self.norm, self.head = conv(3, 8), conv(8, 8), nn.BatchNorm2d(8), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.stem(x))
        if self.training:
            y = y + 0.1 * torch.randn_like(y)
            y = F.dropout(torch.sigmoid(y), 0.5)
        y = y + 0.5
        norm = self.norm
        y = self.mid(y * (1 / float(y.shape[1])))
        y = F.batch_norm(y, norm.running_mean, norm.running_var, norm.weight, norm.bias, self.training)
        return self.head(F.relu(y[:, y.shape[1] // 2 :]).mean((2, 3)))


def test_what_only_training_computes() -> None:
    model = lively(Trained())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    pruner = Pruner(model, images(2), scorer="free", inplace=True)
    for seed in range(6):
        choice = random_choice(pruner.network, seed, empty=0.3)
        state = torch.get_rng_state()
        small = compacted(pruner, choice)
        assert torch.equal(torch.get_rng_state(), state)
        with torch.no_grad():
            for batch in (1, 3):
                x = images(batch)
                assert relative_error(small(x), pruner.model.eval()(x)) < 1e-9
        counted, cost = paam.count(small, images(2)), pruner.network.cost(choice)
        assert (counted.params, counted.macs) == (cost.params, cost.macs)
        small.train()(images(3)).sum().backward()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_part_that_others_have_changed_is_refused() -> None:
    def twice(m: Net, y: Tensor) -> Tensor:
        y = F.relu(y)
        first, other = y[:, 0], y[:, 1]
        other += 1
        first += 1
        y[:, 0] = first
        return y

    def read_again(m: Net, y: Tensor) -> Tensor:
        y = F.relu(y)
        other = y[:, 1:]
        y[:, 0] += 1
        return y * other.mean(1, keepdim=True)

    for function in (twice, read_again):
        with pytest.raises(GraphError, match="in place while a view or an alias"):
            prepare(Net(function).double(), images(2))


def test_random_numbers_in_evaluation_are_refused() -> None:
    def drops(m: Net, y: Tensor) -> Tensor:
        return F.dropout(y)

    with pytest.raises(GraphError, match=r"dropout at node 'dropout' .*random numbers in evaluation"):
        prepare(Net(drops).double(), images(2))


def test_what_is_computed_unseen_is_refused() -> None:
    def unseen(m: Net, y: Tensor) -> Tensor:
        return torch.func.vmap(lambda x: x.flip(0))(y)

    with pytest.raises(GraphError, match="in a way that cannot be recorded"):
        prepare(Net(unseen).double(), images(2))


class Blank(nn.Module):
    """Values that can vanish: of whole numbers, of a first axis that is not the batch's, of several axes that grow."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mid, self.last, self.head = conv(3, 8), conv(8, 4), conv(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        y = F.relu(self.stem(x))
        windows = y.view(n, 8, 2, 4, 2, 4).permute(0, 2, 4, 1, 3, 5).reshape(n * 4, 8, 4, 4)
        z = self.mid(windows)
        z = torch.where(z > 0, z + 0.25, z - 0.25).permute(1, 0, 2, 3) * 2
        return self.head(self.last(z.permute(1, 0, 2, 3)).view(n, 4, 4, 16).mean((1, 3)))


def test_values_that_vanish_have_the_size_of_their_batch() -> None:
    model = lively(Blank())
    pruner = Pruner(model, images(2), scorer="free")
    for seed in range(12):
        small = compacted(pruner, random_choice(pruner.network, seed, empty=0.6))
        with torch.no_grad():
            for batch in (1, 2, 5):
                x = images(batch)
                assert relative_error(small(x), pruner.model.eval()(x)) < 1e-9


def test_a_number_that_is_added_stands_behind_the_gate() -> None:
    def divided(m: Net, y: Tensor) -> Tensor:
        return torch.sigmoid(y) / (1 + m.extra(y).abs())

    check(Net(divided, lambda m: m.add_module("extra", conv(8, 8))), empty=0.4)


def test_what_vanishes_leaves_its_type() -> None:
    """Sums and concatenations of values of two types are of the wider one, whatever is left of each."""

    def mixed(m: Net, y: Tensor) -> Tensor:
        coarse = torch.sigmoid(m.extra(y)).float()
        z = torch.cat([m.more(y), coarse[:, :4]], 1)
        return z + coarse

    def prepare_(m: Net) -> None:
        m.extra, m.more = conv(8, 8), conv(8, 4)

    check(Net(mixed, prepare_), empty=0.6)


class DecidesBySize(nn.Module):
    """Decides by one size of an image in both modes, and by another one in each."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mid, self.head = conv(3, 8), conv(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mid(F.relu(self.stem(x)))
        if y[0].numel() > 2000:  # above 15 x 15: in both modes
            y = y * 2
        border, sign = (11, 1) if self.training else (13, -1)
        y = y + sign * (0.5 if x.shape[2] > border else 0.25)
        return self.head(y.mean((2, 3)))


def test_decisions_are_checked_in_the_mode_that_makes_them() -> None:
    """The example is of 8 x 8. Of 10 nothing is another; of 12 training is, of 14 evaluation too, of 16 both are."""
    model = lively(DecidesBySize())
    pruner = Pruner(model, images(2))
    small = compacted(pruner, random_choice(pruner.network, 1, empty=0))
    for size, refused in ((10, ()), (12, ("train",)), (14, ("eval", "train")), (16, ("eval", "train"))):
        x = torch.randn(2, 3, size, size, dtype=torch.float64)
        for mode in ("eval", "train"):
            for network in (pruner.model, small):
                getattr(network, mode)()
                if mode in refused:
                    with pytest.raises(GraphError, match="takes another way for an input of this size"):
                        network(x)
                else:
                    network(x)
        if not refused:
            with torch.no_grad():
                assert relative_error(small.eval()(x), pruner.model.eval()(x)) < 1e-9


class DecidesByAnUnreadSize(DecidesBySize):
    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.stem(x))
        y = y * 2 if self.mid(y)[0].numel() > 2000 else y
        return self.head((y + 0.5 if self.training else y - 0.5).mean((2, 3)))


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_a_decision_by_the_size_of_what_nobody_reads_is_checked_in_both_modes(mode: str) -> None:
    pruner = Pruner(lively(DecidesByAnUnreadSize()), images(2))
    network = getattr(pruner.model, mode)()
    network(images(2))
    with pytest.raises(GraphError, match="takes another way"):
        network(torch.randn(2, 3, 16, 16, dtype=torch.float64))
