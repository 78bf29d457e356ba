"""Channel rules: every operation in small networks around it, exact under random plans; the unknown is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from networks import compacted, lively, random_choice, relative_error
from paam import Pruner
from paam.errors import GraphError
from paam.graph.flows import CONST, LIVE, ZERO, Mix, Pass
from paam.graph.joins import Add, Concat, Flatten, Route
from paam.graph.network import prepare


class Sandwich(nn.Module):
    """conv - bn - [middle] - conv - linear: whatever stands in the middle sees channels that come and go."""

    def __init__(self, middle: nn.Module, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.middle = middle
        self.second = nn.Conv2d(width, 6, 3, padding=1)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.norm(self.first(x)))
        return self.head(F.relu(self.second(x)).mean((2, 3)))


class Function(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class PreActivation(nn.Module):
    """Residual blocks with norm and activation in front: closed channels reach padded convolutions as constants."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(4))
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, bias=i % 2 == 0) for i in range(4))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i in (0, 2):
            inner = self.convs[i](F.elu(self.norms[i](x)))
            x = x + self.convs[i + 1](torch.sigmoid(self.norms[i + 1](inner)))
        return self.head(x.mean((2, 3)))


class Dense(nn.Module):
    """Concatenation, as in a DenseNet; 1 x 1 convolutions fold constants into their bias."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.squeeze = nn.Conv2d(6, 4, 1, bias=False)
        self.grow = nn.Conv2d(4, 5, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(11)
        self.mix = nn.Conv2d(11, 7, 1, bias=False)
        self.head = nn.Linear(7 * 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        new = self.grow(F.relu(self.squeeze(F.relu(self.norm(x)))))
        x = self.mix(torch.sigmoid(self.norm2(torch.cat([x, new], 1))))
        return self.head(F.adaptive_avg_pool2d(F.relu(x), 4).flatten(1))


class InPlace(nn.Module):
    """Values changed in place while others still read them, by a module, a function, an operator and a method."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3 if i == 0 else 6, 6, 3, padding=1) for i in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(6) for _ in range(4))
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms[0](self.convs[0](x))
        y = self.norms[1](self.convs[1](self.relu(x)))
        y += x  # x was rectified above
        z = self.norms[2](self.convs[2](F.elu(y, inplace=True)))
        z += y
        w = self.norms[3](self.convs[3](z.relu_()))
        shortcut = F.pad(z[:, 1:5], (0, 0, 0, 0, 1, 1))
        shortcut += w
        return self.head((shortcut + z).mean((2, 3)))


class Separable(nn.Module):
    """Depthwise convolutions between pointwise ones, with and without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Conv2d(3, 8, 1)
        self.norm = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.norm2 = nn.BatchNorm2d(8)
        self.project = nn.Conv2d(8, 6, 1, bias=False)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self.norm2(self.depthwise(F.relu6(self.norm(self.expand(x))))))
        return self.head(F.relu(self.project(x)).mean((2, 3)))


def check(model: nn.Module, x: Tensor, seeds: range = range(6)) -> None:
    """Compacted equals gated, and both predicted costs are those of the network that was built."""
    model = lively(model)
    pruner = Pruner(model, x, scorer="free")
    with torch.no_grad():
        assert torch.equal(pruner.model.eval()(x), model(x.clone()))
    shrunk = 0
    for seed in seeds:
        choice = random_choice(pruner.network, seed)
        small = compacted(pruner, choice)
        with torch.no_grad():
            assert relative_error(small(x), pruner.model.eval()(x)) < 1e-9
        params = sum(p.numel() for p in small.parameters())
        assert params == pruner.network.cost(choice).params
        shrunk += params < sum(p.numel() for p in model.parameters())
    assert shrunk


MIDDLES = {
    "relu": nn.ReLU(),
    "sigmoid": nn.Sigmoid(),
    "softplus": nn.Softplus(),
    "gelu function": Function(F.gelu),
    "hardtanh above zero": nn.Hardtanh(0.2, 0.9),
    "identity": nn.Identity(),
    "dropout": nn.Dropout(0.5),
    "max pool": nn.MaxPool2d(3, 2, 1),
    "average pool": nn.AvgPool2d(2),
    "average pool with counted padding": nn.Sequential(nn.Sigmoid(), nn.AvgPool2d(3, 1, 1)),
    "average pool function": Function(lambda x: F.avg_pool2d(torch.sigmoid(x), 3, 1, 1)),
    "negation": Function(lambda x: -x),
    "method relu": Function(lambda x: x.relu()),
    "two norms": nn.Sequential(nn.ReLU(), nn.BatchNorm2d(8), nn.Tanh()),
    "strided slice": Function(lambda x: F.relu(x)[:, :, ::2, ::2]),
    "spatial padding": Function(lambda x: F.pad(torch.sigmoid(x), (1, 1, 1, 1))),
    "constant padding": Function(lambda x: F.pad(F.relu(x), (1, 1, 1, 1), value=0.5)),
    "residual": Function(lambda x: F.relu(x) + torch.sigmoid(x)),
    "circular convolution": nn.Sequential(nn.Sigmoid(), nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular")),
    "depthwise": nn.Sequential(nn.Sigmoid(), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.ReLU()),
}


@pytest.mark.parametrize("name", MIDDLES)
def test_operation_is_exact(name: str) -> None:
    check(Sandwich(MIDDLES[name]), torch.randn(2, 3, 8, 8, dtype=torch.float64))


def test_channel_padding_and_slicing_are_exact() -> None:
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    check(Sandwich(Function(lambda x: F.pad(F.relu(x), (0, 0, 0, 0, 2, 3))), width=13), x)
    check(Sandwich(Function(lambda x: F.relu(x)[:, 2:7]), width=5), x)
    check(Sandwich(Function(lambda x: torch.cat([F.relu(x), -x], 1)), width=16), x)


@pytest.mark.parametrize("model", [PreActivation, Dense, InPlace, Separable])
def test_structure_is_exact(model: type[nn.Module]) -> None:
    check(model(), torch.randn(2, 3, 8, 8, dtype=torch.float64), range(15))


def test_sequential_cnns_in_one_and_three_dimensions() -> None:
    one = nn.Sequential(nn.Conv1d(2, 6, 3), nn.BatchNorm1d(6), nn.ELU(), nn.Conv1d(6, 5, 3), nn.ReLU(), nn.Flatten())
    check(
        nn.Sequential(*one, nn.Linear(5 * 8, 7), nn.Tanh(), nn.Linear(7, 2)), torch.randn(2, 2, 12, dtype=torch.float64)
    )
    three = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU(), nn.MaxPool3d(2), nn.Flatten())
    check(nn.Sequential(*three, nn.Linear(4 * 8, 3)), torch.randn(2, 1, 4, 4, 4, dtype=torch.float64))


def test_flows_by_hand() -> None:
    states = np.array([LIVE, ZERO, CONST, ZERO])
    assert Pass().forward([states]).tolist() == [LIVE, ZERO, CONST, ZERO]
    assert Pass(zero=CONST).forward([states]).tolist() == [LIVE, CONST, CONST, CONST]
    assert Pass(const=LIVE).forward([states]).tolist() == [LIVE, ZERO, LIVE, ZERO]
    other = np.array([CONST, ZERO, ZERO, LIVE])
    assert Add().forward([states, other]).tolist() == [LIVE, ZERO, CONST, LIVE]
    assert Concat((4, 4)).forward([states, other]).tolist() == [*states, *other]
    assert Route(4, np.array([-1, 2, 0])).forward([states]).tolist() == [ZERO, CONST, LIVE]
    assert Flatten(2).forward([other]).tolist() == [CONST, CONST, ZERO, ZERO, ZERO, ZERO, LIVE, LIVE]
    dead = np.array([ZERO, ZERO, CONST, CONST])
    assert Mix(4, 2, 1, False, False).forward([dead]).tolist() == [CONST, CONST]
    assert Mix(4, 2, 1, False, True).forward([dead]).tolist() == [LIVE, LIVE]
    assert Mix(4, 4, 4, False, True).forward([dead]).tolist() == [ZERO, ZERO, LIVE, LIVE]
    assert Mix(4, 2, 1, False, True).forward([np.full(4, ZERO)]).tolist() == [ZERO, ZERO]
    assert Mix(4, 2, 1, True, True).forward([np.full(4, ZERO)]).tolist() == [CONST, CONST]


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return x if x.sum() > 0 else -x


@torch.library.custom_op("paam_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x * x


REFUSED = {
    "an operation that is not torch's": (doubled, r"doubled.* at node '.*' \(`return .*`\): it has no channel rule"),
    "a function of one's own": (lambda x: Squared.apply(x), "calls Squared, a custom autograd function"),
    "numpy": (lambda x: torch.from_numpy(x.detach().numpy() + 1), r"decides by the values of tensors: numpy\(\)"),
    "noise": (lambda x: x + torch.randn_like(x), "it draws random numbers in evaluation mode"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_refused_by_name_and_place(name: str) -> None:
    function, message = REFUSED[name]
    with pytest.raises(GraphError, match=message):
        prepare(Sandwich(Function(function)), torch.zeros(1, 3, 8, 8))


@pytest.mark.parametrize("function", [lambda x: torch.cumsum(x, 1), lambda x: x - x.mean(0, keepdim=True)])
def test_what_mixes_channels_or_samples_reads_whole_values(function) -> None:
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    pruner = Pruner(lively(Sandwich(Function(function))), x, scorer="free")
    small = compacted(pruner, {g.name: np.arange(g.width) % 2 == 0 for g in pruner.network.groups})
    with torch.no_grad():
        assert relative_error(small(x), pruner.model.eval()(x)) < 1e-9
    assert small.first.out_channels == 4


def test_models_that_decide_by_values_name_the_line() -> None:
    decision = r"Branching decides by the values of tensors: .* at test_rules.py:\d+ \(`return x if x.sum\(\) > 0"
    with pytest.raises(GraphError, match=decision):
        prepare(Branching(), torch.zeros(1, 3, 8, 8))


def test_wrong_example_shape_is_explained() -> None:
    with pytest.raises(GraphError, match=r"does not run on an input of shape \[1, 5, 8, 8\]"):
        prepare(Sandwich(nn.ReLU()), torch.zeros(1, 5, 8, 8))
