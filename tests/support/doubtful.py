"""A small network around a questionable operation: it must be exact under random choices of its filters, or refused."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paam
from networks import compacted, lively, random_choice, relative_error
from paam import Pruner

GENERATOR = torch.Generator().manual_seed(0)


def conv(inputs: int, outputs: int, **options) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1, **options)


def images(batch: int, size: int = 8) -> Tensor:
    return torch.randn(batch, 3, size, size, dtype=torch.float64, generator=GENERATOR)


class Net(nn.Module):
    """stem and mid, both gated; the operation in question; last and head."""

    def __init__(self, function, prepare_=lambda model: None) -> None:
        super().__init__()
        self.stem, self.mid, self.norm, self.last = conv(3, 8), conv(8, 8), nn.BatchNorm2d(8), conv(8, 6)
        self.head, self.line, self.relu = nn.Linear(6, 3), nn.Linear(8, 8), nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(2)
        self.function = function
        prepare_(self)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.mid(F.relu(self.stem(x))))
        return self.head(F.relu(self.last(self.function(self, y))).mean((2, 3)))


def check(model: nn.Module, *, size: int = 8, empty: float = 0.2, streams: str = "independent") -> None:
    model = lively(model)
    pruner = Pruner(model, images(2), scorer="free", streams=streams)
    with torch.no_grad():
        for batch in (1, 3):
            x = images(batch)
            pruner._all_gates.mode = "open"
            assert relative_error(pruner.model.eval()(x.clone()), model(x.clone())) < 1e-9
    for seed in range(8):
        choice = random_choice(pruner.network, seed, empty=empty)
        for mask in choice.values():
            mask[0] |= not empty
        small = compacted(pruner, choice)
        for batch in (1, 2, 3):
            x = images(batch, size)
            with torch.no_grad():
                assert relative_error(small(x), pruner.model.eval()(x)) < 1e-9
        counted, cost = paam.count(small, images(2)), pruner.network.cost(choice)
        assert (counted.params, counted.macs) == (cost.params, cost.macs)
