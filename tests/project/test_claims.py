"""What docs/guide/networks.md says is understood is drawn by the generator of networks: it is tried all the time."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from generator.generating import generate

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "networks.md"
ENOUGH = 2000
"""Networks among which there must be one with each of what is claimed."""

DRAWN = {
    "layers": {
        "convolutions of 1 to 3 dimensions": [r"nn\.Conv1d", r"nn\.Conv2d", r"nn\.Conv3d"],
        "grouped": [r"Conv2d\((\d*[02468]), \d+.*groups=2\b"],
        "depthwise": [r"Conv2d\((\d+), \1,.*groups=\1\b"],
        "transposed": [r"nn\.ConvTranspose[123]d"],
        "linear layers": [r"nn\.Linear"],
        "own classes built upon them": [r"own\.\w+1d\(", r"own\.\w+2d\(", r"linears\.\w+"],
    },
    "norms": {
        "batch norm": [r"nn\.BatchNorm2d"],
        "also synchronised": [r"nn\.SyncBatchNorm"],
        "as a function": [r"F\.batch_norm"],
        "with an activation in it": [r"own\.Activated[12]d"],
        "instance norm": [r"nn\.InstanceNorm"],
        "layer": [r"nn\.LayerNorm", r"F\.layer_norm"],
        "root-mean-square": [r"nn\.RMSNorm"],
        "group": [r"nn\.GroupNorm", r"F\.group_norm"],
        "local response norms": [r"nn\.LocalResponseNorm"],
        "`F.normalize`": [r"F\.normalize"],
        "weight norm": [r"parametrizations\.weight_norm"],
        "spectral norm as parametrizations": [r"parametrizations\.spectral_norm"],
    },
    "one channel in, one out": {
        "every pointwise activation": [r"relu", r"nn\.SiLU", r"gelu|GELU", r"sigmoid", r"tanh"],
        "pooling": [r"max_pool|MaxPool", r"avg_pool|AvgPool"],
        "padding": [r"F\.pad"],
        "up-sampling": [r"F\.interpolate", r"nn\.Upsample"],
        "dropout": [r"nn\.Dropout\(", r"F\.dropout\("],
        "reductions over the map": [r"\.mean\(\(2, 3\)", r"\.amax\(\(2, 3\)"],
    },
    "several values": {
        "sums": [r"v\d+ \+ v\d+"],
        "differences": [r"v\d+ - v\d+"],
        "products": [r"v\d+ \* v\d+", r"attention\.\w+\("],
        "quotients": [r"v\d+ / \(1 \+ v\d+"],
        "maxima": [r"torch\.maximum\(v\d+, v\d+\)"],
        "stacks": [r"torch\.stack\("],
        "concatenations": [r"torch\.cat\("],
    },
    "channels moved": {
        "chunk": [r"\.chunk\(2, "],
        "split": [r"\.split\("],
        "slices": [r"v\d+\[:, "],
        "shuffles": [r"channel_shuffle"],
        "pixel shuffles": [r"pixel_shuffle|PixelShuffle"],
        "flatten": [r"\.flatten\("],
        "view": [r"\.(view|reshape)\("],
        "permute": [r"\.permute\("],
        "expand": [r"\.expand"],
    },
    "attention": {
        "softmax": [r"softmax\("],
        "matrix products": [r" @ "],
        "`einsum`": [r"torch\.einsum"],
        "`scaled_dot_product_attention`": [r"scaled_dot_product_attention"],
        "`nn.MultiheadAttention`": [r"attention\.Torchs"],
    },
    "structure": {
        "layers called twice share one group": [r"def forward[\s\S]*(self\.layer\d+\()[\s\S]*\1"],
        "several inputs": [r"forward\(self, x, y1"],
        "outputs": [r"return v\w+, |return out\w+, "],
        "dictionaries": [r'return \{"'],
        "namedtuples": [r"return answers\.Named"],
        "on *shapes*": [r"if .*\.shape\["],
    },
}
"""Phrases of the table, row by row, and what must stand in the source of some network."""
UNTOUCHED = ("are cut once", "optional arguments keep their defaults", "conditions", "loops", "numbers of channels")
"""Of what follows from the call itself, or is said of the above."""


def pieces(row: str) -> list[str]:
    """What a row of the table names, one by one."""
    cell = re.search(rf"^\| {re.escape(row)} \| (.*) \|$", PAGE.read_text(), re.M)
    assert cell is not None, row
    plain = re.sub(r" \([^)]*\)|, which read whole values|: they read whole values", "", cell[1])
    return [piece for piece in re.split(r"[,;] | and | or ", plain) if piece]


@pytest.mark.parametrize("row", DRAWN)
def test_every_claim_has_an_entry(row: str) -> None:
    named = [*DRAWN[row], *UNTOUCHED]
    assert [piece for piece in pieces(row) if not any(name in piece for name in named)] == []
    assert [name for name in DRAWN[row] if not any(name in piece for piece in pieces(row))] == []


@pytest.mark.generated
def test_every_claim_is_drawn() -> None:
    missing = {pattern for row in DRAWN.values() for patterns in row.values() for pattern in patterns}
    for seed in range(ENOUGH):
        source = generate(seed)[0].source()
        missing = {pattern for pattern in missing if not re.search(pattern, source)}
        if not missing:
            break
    assert not missing
