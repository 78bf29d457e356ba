"""What things cost, by formulas worked by hand: the counter's operations, layers that are cut, balances of groups."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paam import count
from paam.errors import ArtifactError, RecipeError
from paam.graph.cost import MacCounter
from paam.graph.flows import CONST, LIVE, ZERO
from paam.graph.network import Network, prepare
from paam.graph.solve import Cost, _align, layer_costs, solve

# ---------------------------------------------------------------- the counter

N, L, S, E = 2, 5, 7, 6  # samples, queries, keys, width
LAYERS = {
    "linear": (lambda x: F.linear(x, torch.ones(4, E)), (N, L, E), N * L * 4 * E),
    "matmul": (lambda x: torch.matmul(x, torch.ones(E, 4)), (N, L, E), N * L * 4 * E),
    "method matmul": (lambda x: x.matmul(torch.ones(E, 4)), (N, L, E), N * L * 4 * E),
    "operator": (lambda x: x @ torch.ones(E, 4), (N, L, E), N * L * 4 * E),
    "bmm": (lambda x: torch.bmm(x, torch.ones(N, E, 4)), (N, L, E), N * L * 4 * E),
    "mm": (lambda x: torch.mm(x, torch.ones(E, 4)), (N, E), N * 4 * E),
    "conv1d": (lambda x: F.conv1d(x, torch.ones(4, 3, 5), stride=2), (N, 3, 9), N * 4 * 3 * (3 * 5)),
    "conv2d": (lambda x: F.conv2d(x, torch.ones(4, 1, 3, 2), groups=2), (N, 2, 5, 5), N * 4 * 3 * 4 * (1 * 3 * 2)),
    "conv3d": (lambda x: F.conv3d(x, torch.ones(4, 3, 2, 2, 2)), (N, 3, 3, 3, 3), N * 4 * 8 * (3 * 8)),
    "transposed, 1-d": (lambda x: F.conv_transpose1d(x, torch.ones(3, 4, 5)), (N, 3, 9), N * 3 * 9 * (4 * 5)),
    "transposed": (lambda x: F.conv_transpose2d(x, torch.ones(3, 4, 2, 5)), (N, 3, 4, 4), N * 3 * 16 * (4 * 10)),
    "transposed, 3-d": (lambda x: F.conv_transpose3d(x, torch.ones(3, 4, 2, 2, 2)), (N, 3, 2, 2, 2), N * 24 * (4 * 8)),
    # Each query meets S keys of E numbers, and then as many values.
    "attention": (
        lambda x: F.scaled_dot_product_attention(x, torch.ones(N, 3, S, E), torch.ones(N, 3, S, E)),
        (N, 3, L, E),
        N * 3 * L * S * E * 2,
    ),
    "nothing": (lambda x: torch.relu(x) + 1, (N, 3), 0),
}


@pytest.mark.parametrize("name", LAYERS)
def test_operations_by_hand(name: str) -> None:
    function, shape, macs = LAYERS[name]
    with MacCounter() as counter:
        function(torch.ones(shape))
    assert counter.macs == macs


class Attends(nn.Module):
    def __init__(self, batch_first: bool, itself: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(E, 2, batch_first=batch_first)
        self.itself = itself

    def forward(self, x: Tensor, keys: Tensor) -> Tensor:
        return self.attention(x, x, x)[0] if self.itself else self.attention(x, keys, keys)[0]


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("itself", [False, True])
def test_attention_with_its_projections(batch_first: bool, itself: bool) -> None:
    """Queries, keys, values and answers are projected, E x E each."""
    x, keys = torch.ones(N, L, E), torch.ones(N, S, E)
    if not batch_first:
        x, keys = x.transpose(0, 1), keys.transpose(0, 1)
    others = L if itself else S
    with MacCounter() as counter, torch.no_grad():
        Attends(batch_first, itself).eval()(x, keys)
    assert counter.macs == N * ((2 * L + 2 * others) * E * E + 2 * L * others * E)


def test_attention_in_one_call() -> None:
    """What torch makes of the layer where nothing looks on: everything in one function of its own."""
    x, weights, biases = (
        torch.ones(N, L, E),
        (torch.ones(3 * E, E), torch.ones(E, E)),
        (torch.ones(3 * E), torch.ones(E)),
    )
    with MacCounter() as counter, torch.no_grad():
        torch._native_multi_head_attention(x, x, x, E, 2, weights[0], biases[0], weights[1], biases[1])
    assert counter.macs == N * (4 * L * E * E + 2 * L * L * E)


def test_a_count_is_for_one_sample_and_names_what_it_left_out() -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(E, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            first, _ = self.line(x).max(1, keepdim=True)
            return torch.relu(first).expand(x.shape[0], 4) + F.relu(y) + y.T.T.relu()

    counted = count(Several().train(), (torch.ones(3, E), torch.ones(3, 4)))
    assert (counted.params, counted.macs) == (4 * E + 4, 4 * E)
    # What reads an attribute (x.shape, y.T) is no operation of its own.
    assert counted.uncounted == {"max": 1, "relu": 3, "expand": 1, "add": 2}


# ---------------------------------------------------------------- layers that are cut


def network_of(*layers: nn.Module, size: int = 8) -> Network:
    return prepare(nn.Sequential(*layers).double(), torch.zeros(1, 3, size, size, dtype=torch.float64))


def costs(network: Network, **kept: list[int]) -> dict[str, tuple[int, int]]:
    """Parameters and MACs of each layer when of some groups, "g0" for the group "0", only these filters stay."""
    choice = {group.name: np.ones(group.width, dtype=bool) for group in network.groups}
    for name, filters in kept.items():
        choice[name[1:]] = np.isin(np.arange(len(choice[name[1:]])), filters)
    found = layer_costs(network.traced, solve(network.ops, network._masks(choice)))
    total, small = network.cost(choice), network.compact(network.plan(choice))
    counted = count(small, network.traced.examples)
    assert (total.params, total.macs) == (counted.params, counted.macs)
    assert total.macs == sum(cost.macs for cost in found.values())
    return {name: (cost.params, cost.macs) for name, cost in found.items() if cost != Cost(0, 0)}


def test_layers_cut_by_hand() -> None:
    """3 x 3 over 8 x 8, 2 x 2 at stride 2, and so on: weights of kept filters over kept inputs, at every place."""
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.PReLU(8), nn.Conv2d(8, 6, 2, stride=2, bias=False)]
    network = network_of(*layers, nn.PReLU(), nn.Flatten(), nn.Linear(96, 5), nn.ReLU(), nn.Linear(5, 2, bias=False))
    norm = {"1": (16, 0), "2": (8, 0), "4": (1, 0)}
    assert costs(network) == {
        **norm,
        "0": (8 * 27 + 8, 8 * 27 * 64),
        "3": (6 * 8 * 4, 6 * 8 * 4 * 16),
        "6": (5 * 96 + 5, 5 * 96),
        "8": (10, 10),
    }
    assert costs(network, g0=[1, 2, 6], g3=[0, 5], g6=[4]) == {
        "0": (3 * 27 + 3, 3 * 27 * 64),
        "1": (6, 0),
        "2": (3, 0),
        "3": (2 * 3 * 4, 2 * 3 * 4 * 16),
        "4": (1, 0),
        "6": (1 * 2 * 16 + 1, 2 * 16),
        "8": (2, 2),
    }


def test_grouped_layers_cut_by_hand() -> None:
    """Groups have as many inputs and outputs each as the largest that is left; those without an output go."""
    layers = [nn.Conv2d(3, 6, 1), nn.ReLU(), nn.Conv2d(6, 12, 3, padding=1, groups=3), nn.ReLU(), nn.Conv2d(12, 2, 1)]
    network = network_of(*layers)
    assert costs(network)["2"] == (12 * 2 * 9 + 12, 12 * 2 * 9 * 64)
    # Two of the first group's outputs, one of the third's; both inputs of the first, one of the third.
    assert costs(network, g0=[0, 1, 2, 5], g2=[1, 2, 8])["2"] == (4 * 2 * 9 + 4, 4 * 2 * 9 * 64)
    assert costs(network, g0=[0, 2, 5], g2=[1, 2, 8])["2"] == (4 * 1 * 9 + 4, 4 * 1 * 9 * 64)
    assert costs(network, g0=[0, 2, 5], g2=[4])["2"] == (1 * 1 * 9 + 1, 1 * 1 * 9 * 64)


def test_depthwise_and_transposed_layers_cut_by_hand() -> None:
    """A depthwise filter reads its own channel; every input of a transposed convolution is spread over the outputs."""
    layers = [nn.Conv2d(3, 6, 1), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1, groups=6, bias=False), nn.ReLU()]
    network = network_of(*layers, nn.ConvTranspose2d(6, 4, 2, stride=2), nn.ReLU(), nn.Conv2d(4, 2, 1))
    # Its filters live and die with those of the layer in front of it.
    found = costs(network, g0=[1, 4, 5], g4=[3])
    assert found["2"] == (3 * 9, 3 * 9 * 64)
    assert found["4"] == (3 * 1 * 4 + 1, 3 * 1 * 4 * 64)
    assert found["6"] == (2 + 2, 2 * 256)


class PreActivation(nn.Module):
    """A norm behind the stem's gate: closed channels reach the convolution as constants."""

    def __init__(self, padding: int, bias: bool) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
        self.conv, self.side = nn.Conv2d(4, 5, 3, padding=padding, bias=bias), nn.Conv2d(4, 2, 1)
        self.head = nn.Conv2d(5, 2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x)
        return self.head(self.conv(self.norm(x).sigmoid()).relu()), self.side(x)


@pytest.mark.parametrize("bias", [False, True])
def test_constants_cost_a_bias_or_a_column(bias: bool) -> None:
    image = torch.zeros(1, 3, 8, 8, dtype=torch.float64)
    for padding, columns, biased, places in ((0, 2, True, 36), (1, 3, bias, 64)):
        network = prepare(PreActivation(padding, bias).double(), image)
        weights = 5 * columns * 9
        assert costs(network, gstem=[0, 3])["conv"] == (weights + 5 * biased, weights * places)
        assert costs(network)["conv"] == (5 * 4 * 9 + 5 * bias, 5 * 4 * 9 * places)


class Offsets(nn.Module):
    """A branch that is dead but for its norm's offset, which the sum must carry; a product, which takes one each."""

    def __init__(self, product: bool) -> None:
        super().__init__()
        self.stem, self.inner, self.outer = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 3, 1), nn.Conv2d(3, 4, 1)
        self.scale, self.last = nn.Parameter(torch.rand(4, 1, 1)), nn.Conv2d(4, 2, 1)
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        y = self.outer(self.inner(x).relu())
        return self.last((x * y.sigmoid() if self.product else x + y).relu() * self.scale)


@pytest.mark.parametrize("product", [False, True])
def test_offsets_are_counted_one_number_for_each_channel(product: bool) -> None:
    """No inner filter stays: what the branch still gives is one number for each channel that is left."""
    network = prepare(Offsets(product).double(), torch.zeros(1, 3, 4, 4, dtype=torch.float64))
    choice = {group.name: np.ones(group.width, dtype=bool) for group in network.groups}
    choice["inner"][:] = False
    # Layers of 3 -> 4 and 4 -> 2 filters, the scale, and the offset; "outer" has no input left, and goes.
    assert network.cost(choice).params == (12 + 4) + (8 + 2) + 4 + 4
    for name in ("stem", "outer"):
        half = {**choice, name: np.array([False, False, True, True])}
        expected = (6 + 2) + (4 + 2) + 2 + 2
        if name == "stem" and not product:
            # The sum gives two channels that vary, with their offset, and the constants of two more: the scale, which
            # is no constant, takes four with an offset each.
            expected = (6 + 2) + (8 + 2) + 4 + 2 + 4
        assert network.cost(half).params == expected
        assert count(network.compact(network.plan(half)), network.traced.examples).params == expected


class Twice(nn.Module):
    """One convolution on two scales, and a layer that forward() never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.tower, self.unused = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 6, 3, padding=1), nn.Linear(7, 9)
        self.head = nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x).relu()
        return self.head(self.tower(x).relu()), self.head(self.tower(F.max_pool2d(x, 2)).relu())


def test_a_layer_called_twice_is_there_once_and_works_twice() -> None:
    network = prepare(Twice().double(), torch.zeros(1, 3, 8, 8, dtype=torch.float64))
    assert network.dense.params == 16 + (6 * 4 * 9 + 6) + 14 + 72
    found = costs(network, gtower=[0, 3, 4])
    assert found["tower"] == (3 * 4 * 9 + 3, 3 * 4 * 9 * (64 + 16))
    assert found["head"] == (3 * 2 + 2, 3 * 2 * (64 + 16))
    choice = {"stem": np.ones(4, dtype=bool), "tower": np.isin(np.arange(6), [0, 3, 4])}
    assert network.cost(choice).params == 16 + (3 * 4 * 9 + 3) + 8 + 72


# ---------------------------------------------------------------- balances


def test_balances_by_hand() -> None:
    """Maps of 8 x 8, 4 x 4 and 1; of 5 filters every second one is 2."""
    layers = [nn.Conv2d(3, 5, 3, padding=1), nn.ReLU(), nn.Conv2d(5, 4, 2, stride=2), nn.ReLU(), nn.Flatten()]
    network = network_of(*layers, nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 2))
    assert network.balance("area") == {"0": 4.0, "2": 1.0, "5": 1 / 16}
    assert network.balance("side") == {"0": 2.0, "2": 1.0, "5": 1 / 4}
    assert network.balance("none") == {"0": 1.0, "2": 1.0, "5": 1.0}
    # Its own weights at its places, and those that read it at theirs.
    macs = {"0": 27 * 64 + 4 * 4 * 16, "2": 5 * 4 * 16 + 16 * 6, "5": 64 + 2}
    params = {"0": 27 + 1 + 4 * 4, "2": 5 * 4 + 1 + 16 * 6, "5": 64 + 1 + 2}
    assert network.balance("macs") == {name: value / macs["2"] for name, value in macs.items()}
    assert network.balance("params") == {name: value / params["2"] for name, value in params.items()}


def test_every_second_filter_is_taken_from_the_second_on() -> None:
    """Groups of 2 and 3 inputs differ when the wrong half goes: filters 1 and 3 of 5 feed the first and the third."""
    network = network_of(nn.Conv2d(3, 3, 1, bias=False), nn.Conv2d(3, 2, 1, bias=False), size=1)
    # With one of three filters fall its 3 weights and the 2 that read it.
    assert network.balance("macs") == {"0": 1.0}
    assert network._saved_by_a_filter(network.groups[0], "macs") == 5
    assert network._saved_by_a_filter(network.groups[0], "params") == 5


def test_the_unit_of_a_balance_is_the_largest_where_the_last_layer_saves_nothing() -> None:
    one = network_of(
        nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1), nn.ReLU(), nn.Conv2d(2, 1, 1), nn.Conv2d(1, 2, 1)
    )
    macs = {"0": (3 + 2) * 64, "2": (4 + 1) * 64, "4": 0}  # a layer of one filter: none of it is a second one
    assert one.balance("macs") == {name: value / (5 * 64) for name, value in macs.items()}
    params = {"0": 3 + 1 + 2, "2": 4 + 1 + 1, "4": 0}
    assert one.balance("params") == {name: value / 6 for name, value in params.items()}
    unequal = network_of(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 1, 1), nn.Conv2d(1, 2, 1), size=1)
    assert unequal.balance("macs") == {"0": 1.0, "1": 5 / 7, "2": 0.0}
    alone = network_of(nn.Conv2d(3, 1, 1), nn.Conv2d(1, 2, 1))
    assert alone.balance("macs") == {"0": 0.0}


def test_without_convolutions_the_last_layer_is_the_unit() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    network = prepare(model, torch.zeros(1, 3))
    assert network.balance("macs") == {"0": (3 + 6) / (4 + 2), "2": 1.0}
    assert network.balance("area") == {"0": 1.0, "2": 1.0}


# ---------------------------------------------------------------- plans and choices


def test_what_is_prepared_must_be_a_network_and_its_options_known() -> None:
    model, image = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)), torch.zeros(1, 3, 4, 4)
    for arguments, options, message in (
        ((lambda x: x, image), {}, "must be a torch.nn.Module, not function"),
        ((model, image), {"placement": "summ"}, "placement cannot be 'summ'. Did you mean 'sum'"),
        ((model, image), {"streams": "tide"}, "streams cannot be 'tide'. Did you mean 'tied'"),
        ((model, image), {"ignore": "0"}, r"a list of names, such as \['0'\]"),
    ):
        with pytest.raises(RecipeError, match=message):
            prepare(*arguments, **options)
    network = prepare(model, image)
    assert (network.placement, network.streams) == ("sum", "independent")
    with pytest.raises(RecipeError, match="balance cannot be 'areas'. Did you mean 'area'"):
        network.balance("areas")


def test_choices_survive_as_plans_of_the_same_network_only() -> None:
    network = network_of(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 6, 1), nn.Conv2d(6, 2, 1))
    choice = {"0": np.array([True, False, False, True]), "1": np.array([False] * 5 + [True])}
    plan = network.plan(choice)
    assert {name: kept.filters for name, kept in plan.groups.items()} == {"0": (0, 3), "1": (5,)}
    assert plan.inputs == ((1, 3, 8, 8),)
    assert {name: mask.tolist() for name, mask in network.choice(plan).items()} == {
        name: mask.tolist() for name, mask in choice.items()
    }
    for other, message in (
        (network_of(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 5, 1), nn.Conv2d(5, 2, 1)), "another architecture"),
        (prepare(network.traced.model, network.traced.examples, streams="tied"), "streams 'independent', here"),
        (prepare(network.traced.model, network.traced.examples, placement="branch"), "placement 'sum' .* here"),
    ):
        with pytest.raises(ArtifactError, match=message):
            other.choice(plan)


def test_a_cost_is_that_of_all_filters_where_a_group_is_not_named() -> None:
    network = network_of(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 6, 1), nn.Conv2d(6, 2, 1), size=1)
    assert network.cost({}).macs == network.dense.macs == 12 + 24 + 12
    assert network.cost({"1": np.arange(6) < 2}).macs == 12 + 8 + 4
    assert math.isclose(network.cost({"0": np.arange(4) < 1}).macs, 3 + 6 + 12)


# ---------------------------------------------------------------- what is mapped, filled in, and left as it is


def kept(network: Network, **filters: list[int]) -> dict[str, np.ndarray]:
    """Of the groups named these filters, of the others all."""
    whole = {group.name: np.ones(group.width, dtype=bool) for group in network.groups}
    return whole | {name: np.isin(np.arange(len(whole[name])), numbers) for name, numbers in filters.items()}


def test_channels_are_looked_up_where_they_stand_and_constants_filled_in_where_none_stands() -> None:
    """A tensor that holds the channels 1, 3 and 4 of seven, for one that wants others; -1 asks for zeros."""
    states = np.array([ZERO, LIVE, CONST, CONST, LIVE, CONST, LIVE])

    def aligned(wanted: list[int]) -> tuple[list[int] | None, list[int]]:
        index, constants = _align(np.array([1, 3, 4]), states, np.array(wanted, dtype=np.int64))
        return None if index is None else index.tolist(), constants.tolist()

    assert aligned([1, 3, 4]) == (None, [])
    assert aligned([1, 4]) == ([0, 2], [])
    assert aligned([0, 1, 2, 4]) == ([-1, 0, -1, 2], [2])
    assert aligned([1, 3, 5]) == ([0, 1, -1], [5])  # a constant that stands there needs no filling in
    assert aligned([-1, 4, -1, 2, 5]) == ([-1, 2, -1, -1, -1], [2, 5])
    assert aligned([]) == ([], [])
    first = _align(np.array([2, 4]), states, np.array([2]))
    assert (first[0].tolist(), first[1].tolist()) == ([0], [])


class Views(nn.Module):
    """A width that is written out, one that is read off another value, and one that a scale follows from."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 4, 1), nn.Conv2d(4, 2, 1)
        self.which = which

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).relu()
        if self.which == "written out":
            x = x.view(-1, 6, 16).sin().view(-1, 6, 4, 4)
        elif self.which == "counted":
            x = x / x.shape[1]
        return self.c(self.b(x).relu())


@pytest.mark.parametrize("which", ["written out", "counted"])
def test_a_network_of_which_nothing_falls_is_not_connected_anew(which: str) -> None:
    """Nor is one in which a layer falls whose width nobody reads; but a view that is written out holds the size."""
    network = prepare(Views(which).double(), torch.zeros(1, 3, 4, 4, dtype=torch.float64))
    for filters, same in (({}, True), ({"b": [1]}, which == "counted"), ({"a": [0, 3]}, False)):
        assert (type(network.compact(network.plan(kept(network, **filters)))) is Views) == same


def test_a_grouped_layer_cut_evenly_is_followed_by_no_map() -> None:
    layers = [nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 8, 3, padding=1, groups=2), nn.ReLU(), nn.Conv2d(8, 2, 1)]
    network = network_of(*layers)
    for outputs, same in (([1, 2, 4, 7], True), ([0, 5], True), ([1, 2, 4], False), ([4, 7], True)):
        choice = kept(network, **{"0": [1, 2] if min(outputs) < 4 else [2, 3], "2": outputs})
        solution = solve(network.ops, network._masks(choice))
        grouped = next(step for step in solution.settled if step.op.node.target == "2")
        assert (grouped.picks is None) == same
    choice = kept(network, **{"0": [1, 2], "2": [1, 2, 4]})
    solution = solve(network.ops, network._masks(choice))
    picks = next(step for step in solution.settled if step.op.node.target == "2").picks
    assert picks is not None
    assert picks.tolist() == [0, 1, 2]  # of two in the first group, and one with a filler in the second


class Scales(nn.Module):
    """One convolution reads two layers; what it makes of the second goes through a layer that may be emptied."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.tower = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1), nn.Conv2d(4, 5, 3, padding=1)
        self.near, self.far = nn.Conv2d(5, 2, 1), nn.Conv2d(5, 3, 1, bias=False)
        self.last = nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        left, right = self.left(x).relu(), self.right(x).relu()
        return self.near(self.tower(left).relu()), self.last(self.far(self.tower(right).relu()).relu())


def test_a_shared_layer_reads_what_any_call_reads_whose_result_is_wanted() -> None:
    network = prepare(Scales().double(), torch.zeros(1, 3, 4, 4, dtype=torch.float64))
    both = {"left": [0, 1], "right": [1, 3], "tower": [0, 2]}

    def tower(**filters: list[int]) -> tuple[int, int]:
        choice = kept(network, **both, **filters)
        found = layer_costs(network.traced, solve(network.ops, network._masks(choice)))["tower"]
        small = network.compact(network.plan(choice))
        assert count(small, network.traced.examples).params == network.cost(choice).params
        return found.params, found.macs

    # Channels 0, 1 and 3 for either call; only 0 and 1 where the second call is for nothing.
    assert tower() == (2 * 3 * 9 + 2, 2 * (2 * 3 * 9) * 16)
    assert tower(far=[]) == (2 * 2 * 9 + 2, 2 * 2 * 9 * 16)
