"""MACs layer by layer: counted by hand, recorded at the end of a run, and drawn next to the filters."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from paam.events import End, read_event
from paam.graph.cost import count, macs_by_layer
from paam.models import resnet20
from paam.report.budget import HEIGHT, macs
from paam.report.page import page
from records import events, facts_of

LAYERS = {
    "dense": {"stem": 200, "block.inner": 800, "block.outer": 1000},
    "pruned": {"stem": 100, "block.outer": 400},
}


class Odd(nn.Module):
    """A layer that runs twice, and a product that no module of its own computes."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU())
        self.again = nn.Conv2d(3, 3, 1)
        self.head = nn.Linear(3, 4)

    def forward(self, images: Tensor) -> Tensor:
        means = self.again(self.again(self.part(images))).mean((2, 3))
        return self.head(means) @ torch.ones(4, 5)


def test_macs_of_layers_by_hand():
    """Images of 4 x 5: 20 places by 3 filters of 2 x 9; twice 20 by 3 of 3; 4 sums of 3; and 5 sums of 4."""
    model = Odd()
    expected = {"part.0": 20 * 3 * 18, "again": 2 * 20 * 3 * 3, "head": 12, "": 20}
    assert macs_by_layer(model, torch.randn(7, 2, 4, 5)) == expected
    assert list(expected) == list(macs_by_layer(model, torch.randn(1, 2, 4, 5)))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_layers_of_a_network_add_up_to_its_macs():
    model, images = resnet20(), torch.randn(2, 3, 32, 32)
    found = macs_by_layer(model, images)
    assert sum(found.values()) == count(model, images).macs
    assert len(found) == 20


def recorded(**layers: dict[str, int]) -> list[dict]:
    record = events()
    for name, known in layers.items():
        record[-1][name]["layers"] = known
    return record


def test_every_layer_has_a_bar_of_its_macs():
    made = page([facts_of("run", recorded(**LAYERS))])
    figure = made.partition('<figure class="budget macs">')[2].partition("</figure>")[0]
    heights = {
        kind: [float(h) for h in re.findall(rf'class="{kind}".*?height="([\d.]+)"', figure)]
        for kind in ("full", "kept")
    }
    assert heights == {"full": [HEIGHT * n / 1000 for n in (200, 800, 1000)], "kept": [15, 0, 60]}
    assert re.findall(r'class="count".*?>(\d+)<', figure) == ["50", "0", "40"]
    assert re.findall(r"<title>(.*?)</title>", figure) == [
        "stem: 100 of 200 MACs left (50 %)",
        "block.inner: 0 of 800 MACs left (0 %)",
        "block.outer: 400 of 1,000 MACs left (40 %)",
    ]
    assert "500 of 2,000 multiply-accumulates are left." in made


@pytest.mark.parametrize(
    "layers",
    [
        {},
        {"dense": LAYERS["dense"]},
        {"pruned": LAYERS["pruned"]},
        {**LAYERS, "pruned": {"renamed": 100}},
        {**LAYERS, "pruned": {"stem": 201}},
    ],
    ids=["none", "of one", "of the other", "of other names", "more than there were"],
)
def test_what_is_not_recorded_alike_is_not_drawn(layers):
    facts = facts_of("run", recorded(**layers))
    assert macs(facts) is None
    assert "Where the MACs are" not in page([facts])


def test_an_end_without_layers_is_read():
    end = read_event(events()[-1])
    assert isinstance(end, End)
    assert end.dense.layers == {}
