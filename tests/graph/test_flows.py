"""How channels travel through an operation, against the operation itself: run on numbers, disturbed channel by channel.

The truth about states is what becomes of channels that vary, are zero, or are one number; the truth about needs and
paths is which outputs change when one input channel does. Layouts are worked by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paam.graph.flows import CONST, LIVE, ZERO, Flow, Mix, Pass, Sink, Source, Whole
from paam.graph.joins import Add, Concat, Empty, Flatten, Gather, Given, Ones, Part, Route, Stack, Stored, Zip

RNG = np.random.default_rng(0)
SAMPLES, SIZE = 3, 4  # of images, and of their sides


def noise(*shape: int) -> Tensor:
    return torch.from_numpy(RNG.uniform(0.5, 1.5, shape))


def own_layer(flow: Mix) -> Callable[..., Tensor]:
    """Nothing is known of it but what becomes of zeros: whatever else comes in is spread unevenly over the map."""
    weight = noise(flow.outputs, flow.inputs // flow.groups, 1, 1)
    added = {int(ZERO): 0.0, int(CONST): 1 + noise(flow.outputs, 1, 1), int(LIVE): BORDER}[int(flow.dead)]
    return lambda x: F.conv2d(x * BORDER, weight, groups=flow.groups) + added


def convolution(flow: Mix) -> Callable[..., Tensor]:
    side = 3 if flow.padded else 1
    shape = (flow.inputs, flow.outputs) if flow.transposed else (flow.outputs, flow.inputs)
    weight = noise(shape[0], shape[1] // flow.groups, side, side)
    bias = noise(flow.outputs) if flow.biased else None
    function = F.conv_transpose2d if flow.transposed else F.conv2d
    return lambda x: function(x, weight, bias, padding=side // 2, groups=flow.groups)


OFFSET, BORDER = noise(5, 1, 1), noise(SIZE, SIZE)
MIXES = [
    Mix(6, 4, groups, biased, padded, transposed)
    for groups in (1, 2)
    for biased in (False, True)
    for padded, transposed in ((False, False), (True, False), (True, True))
]
MIXES += [Mix(5, 5, 5, biased, padded) for biased in (False, True) for padded in (False, True)]
MIXES += [Mix(4, 8, 4, False, False), Mix(8, 4, 4, True, False)]
OWN = {
    zero: [
        Mix(6, 4, 1, False, False, own=True, dead=zero),
        Mix(6, 6, 3, False, False, own=True, dead=zero),
        Mix(5, 5, 5, False, False, own=True, dead=zero),
    ]
    for zero in (ZERO, CONST, LIVE)
}
"""Layers of somebody's own kind, by what they make of nothing: zeros, a number for each channel, an uneven map."""
PADDED, CUT = Route(5, np.array([-1, 0, 1, 2, 3, 4, -1, -1])), Route(5, np.array([3, 1]))

OPERATIONS: dict[str, tuple[Flow, Callable[..., Tensor], tuple[int, ...]]] = {
    **{str(flow): (flow, convolution(flow), (flow.inputs,)) for flow in MIXES},
    **{str(flow): (flow, own_layer(flow), (flow.inputs,)) for flows in OWN.values() for flow in flows},
    "square": (Pass(), lambda x: x * x, (5,)),
    "norm": (Pass(zero=CONST), lambda x: 2 * x + OFFSET, (5,)),
    "averages over a border": (Pass(const=LIVE), lambda x: x * BORDER, (5,)),
    "constant border": (Pass(zero=LIVE, const=LIVE), lambda x: x * BORDER + BORDER**2, (5,)),
    "sum of two": (Add(), lambda x, y: x + y, (5, 5)),
    "sum of three": (Add(), lambda x, y, z: x + y + z, (5, 5, 5)),
    "side by side along the map": (Stack(), lambda x, y: torch.cat([x, y], 2), (5, 5)),
    "product": (Zip((5, 5), True), lambda x, y: x * y, (5, 5)),
    "product with one channel": (Zip((5, 1), True), lambda x, y: x * y, (5, 1)),
    "difference of two channels": (Zip((2, 2), False), lambda x, y: x - y, (2, 2)),
    "difference": (Zip((5, 5), False), lambda x, y: x - y, (5, 5)),
    "difference from one channel": (Zip((1, 5, 5), False), lambda x, y, z: x - y - z, (1, 5, 5)),
    "cosines of sums": (Zip((5, 5), False, zero=CONST), lambda x, y: (x + y).cos(), (5, 5)),
    "masked": (Zip((5, 5), False, const=LIVE), lambda x, y: (x + y) * BORDER, (5, 5)),
    "masked cosines": (Zip((5, 5), False, LIVE, LIVE), lambda x, y: (x + y).cos() * BORDER, (5, 5)),
    "masked product": (Zip((5, 5), True, const=LIVE), lambda x, y: x * y * BORDER, (5, 5)),
    "one of three chunks": (Part(6, np.array([2, 3]), 3), lambda x: x.chunk(3, 1)[1], (6,)),
    "concatenation": (Concat((2, 5, 3)), lambda *parts: torch.cat(parts, 1), (2, 5, 3)),
    "channels padded": (PADDED, lambda x: F.pad(x, (0, 0, 0, 0, 1, 2)), (5,)),
    "channels picked": (CUT, lambda x: x[:, [3, 1]], (5,)),
    "a channel of ones": (Ones(), lambda x: F.pad(x, (0, 0, 0, 0, 0, 1), value=1.0), (5,)),
    "flattened": (Flatten(SIZE * SIZE), lambda x: x.flatten(1)[:, :, None, None], (3,)),
    "pixel shuffle": (Gather(4), lambda x: F.pixel_shuffle(x, 2), (12,)),
}


def values(states: np.ndarray) -> Tensor:
    """Images whose channels have these states."""
    x = noise(SAMPLES, len(states), SIZE, SIZE)
    x[:, states == CONST] = x[:1, states == CONST, :1, :1]
    x[:, states == ZERO] = 0
    return x


def states_of(x: Tensor) -> list[int]:
    """What every channel is over all images and places."""
    channels = x.transpose(0, 1).flatten(1)
    constant = (channels - channels[:, :1]).abs().amax(1) < 1e-12
    zero = channels.abs().amax(1) < 1e-12
    return [int(ZERO if z else CONST if c else LIVE) for z, c in zip(zero, constant, strict=True)]


@pytest.mark.parametrize("name", OPERATIONS)
def test_states_are_those_of_the_values(name: str) -> None:
    flow, operation, widths = OPERATIONS[name]
    uniform = [tuple(np.full(width, state) for width in widths) for state in (LIVE, ZERO, CONST)]
    mixed = [tuple(RNG.choice([LIVE, ZERO, CONST], width) for width in widths) for _ in range(40)]
    # Few that vary, as in a network that is nearly empty.
    dead = [tuple(RNG.choice([LIVE, ZERO, CONST], width, p=[0.1, 0.6, 0.3]) for width in widths) for _ in range(40)]
    for states in (*uniform, *mixed, *dead):
        found = flow.forward(list(states))
        assert found.tolist() == states_of(operation(*map(values, states)))
        assert found.dtype == np.int8


def influence(operation: Callable[..., Tensor], widths: Sequence[int]) -> list[np.ndarray]:
    """For each input: which output channels [outputs, inputs] change when one of its channels does."""
    xs = [noise(SAMPLES, width, SIZE, SIZE) for width in widths]
    before = operation(*xs)
    found = []
    for place, width in enumerate(widths):
        changes = []
        for channel in range(width):
            disturbed = xs[place].clone()
            disturbed[:, channel] += noise(SAMPLES, SIZE, SIZE)
            after = operation(*xs[:place], disturbed, *xs[place + 1 :])
            changes.append(((after - before).abs() > 1e-9).transpose(0, 1).flatten(1).any(1).numpy())
        found.append(np.stack(changes, 1))
    return found


@pytest.mark.parametrize("name", OPERATIONS)
def test_needed_is_what_changes_the_needed(name: str) -> None:
    flow, operation, widths = OPERATIONS[name]
    reads = influence(operation, widths)
    outputs = len(reads[0])
    inputs = [np.full(width, LIVE) for width in widths]
    for need in (*np.eye(outputs, dtype=bool), np.zeros(outputs, dtype=bool), RNG.random(outputs) < 0.5):
        found = flow.backward(need, inputs)
        assert [f.tolist() for f in found] == [read[need].any(0).tolist() for read in reads]


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_channel_is_connected_as_well_as_the_best_that_it_reads(name: str) -> None:
    flow, operation, widths = OPERATIONS[name]
    reads = influence(operation, widths)
    if isinstance(flow, Zip) and flow.zero_wins:  # the other factors are gates, not ways
        reads = [reads[0], *(np.zeros_like(read) for read in reads[1:])]
    for _ in range(10):
        inputs = [RNG.random(width) for width in widths]
        strength = flow.strength(inputs)
        pairs = list(zip(inputs, reads, strict=True))
        best = [max(x[read[j]].max(initial=-np.inf) for x, read in pairs) for j in range(len(reads[0]))]
        assert np.real(strength).tolist() == best
        for channel in np.flatnonzero(np.isfinite(best)):
            which, place = flow.origin(int(channel), inputs)
            assert reads[which][channel, place]
            assert inputs[which][place] == best[channel]


def test_ends_of_the_graph() -> None:
    """Whole, whatever is needed: what comes in, what goes out, and what stands in the model as a number."""
    states, some, nothing = np.array([LIVE, ZERO, CONST]), np.array([False, True, True]), np.zeros(3, dtype=bool)
    assert Source(3).forward([]).tolist() == [LIVE] * 3
    assert Source(3).backward(some, []) == []
    assert Source(3).strength([]).real.tolist() == [np.inf] * 3
    assert layout(Source(3), [], [], wanted=nothing) == ([], [0, 1, 2])
    assert Sink(3).forward([states]).tolist() == states.tolist()
    assert [need.tolist() for need in Sink(3).backward(nothing, [states])] == [[True] * 3]
    assert Sink(3).strength([np.arange(3.0)]).tolist() == [0, 1, 2]
    assert Sink(3).origin(2, [np.arange(3.0)]) == (0, 2)
    assert layout(Sink(3), [[1]], [states], wanted=nothing) == ([[0, 1, 2]], [0, 1, 2])
    assert Stored(3).forward([]).tolist() == [LIVE] * 3
    assert Stored(3).backward(some, []) == []
    assert Stored(3).strength([]).real.tolist() == [-np.inf] * 3  # no path starts at a parameter
    assert layout(Stored(3), [], [], wanted=some) == ([], [1, 2])
    assert Given(3).forward([]).tolist() == [LIVE] * 3
    assert Given(3).backward(some, []) == []
    assert Given(3).strength([]).real.tolist() == [-np.inf] * 3
    assert layout(Given(3), [], [], wanted=some) == ([], [0, 1, 2])
    assert layout(Given(3), [], [], wanted=nothing) == ([], [])


def test_what_reads_all() -> None:
    """A norm over channels, with its own weight and offset: any output needs all of every input."""
    flow, inputs = Whole(2), [np.array([0.3, 0.1]), np.array([0.2, 0.6, 0.5])]
    states = [np.array([ZERO, CONST]), np.array([ZERO] * 3)]
    assert flow.forward(states).tolist() == [LIVE, LIVE]
    for need in ([True, False], [False, True], [True, True], [False, False]):
        assert [n.tolist() for n in flow.backward(np.array(need), states)] == [[any(need)] * 2, [any(need)] * 3]
    assert flow.strength(inputs).tolist() == [0.6, 0.6]
    assert flow.origin(0, inputs) == (1, 1)
    assert flow.origin(1, [inputs[1], inputs[0]]) == (0, 1)
    # The best of one may exceed all of another although its worst is below: the best counts.
    assert flow.origin(0, [np.array([0.4, 0.3]), np.array([0.9, 0.1])]) == (1, 0)
    assert layout(flow, [[1], [0, 2]], states, wanted=[False, True]) == ([[0, 1], [0, 1, 2]], [0, 1])
    assert layout(flow, [[1], [0, 2]], states, wanted=[False, False]) == ([[1], [0, 2]], [])


def test_nothing_is_left_of_what_had_no_channels() -> None:
    flow, states = Empty(), [np.array([LIVE, CONST])]
    assert flow.forward(states).tolist() == []
    assert [need.tolist() for need in flow.backward(np.zeros(0, dtype=bool), states)] == [[False, False]]
    assert flow.strength([np.arange(2.0)]).tolist() == []
    assert layout(flow, [[0, 1]], states, wanted=[]) == ([[0, 1]], [])


def layout(flow: Flow, held: list, states: list, *, wanted, opened=None) -> tuple[list[list[int]], list[int]]:
    """``held``: channels that each input has now. As plain lists."""
    wanted = np.array(wanted, dtype=bool)
    opened = np.ones(len(wanted), dtype=bool) if opened is None else np.array(opened, dtype=bool)
    held = [np.array(channels, dtype=np.int64) for channels in held]
    inputs, out = flow.layout(held, [np.asarray(state) for state in states], wanted, opened)
    assert all(channels.dtype == np.int64 for channels in (*inputs, out))
    return [channels.tolist() for channels in inputs], out.tolist()


def mask(width: int, *channels: int) -> list[bool]:
    return [channel in channels for channel in range(width)]


ALIVE = [LIVE] * 6


def test_layouts_of_plain_convolutions() -> None:
    """A convolution takes what is there, and makes what is wanted; a depthwise one takes what is wanted."""
    assert layout(Mix(6, 4, 1, True, True), [[0, 2, 5]], [ALIVE], wanted=mask(4, 1, 3)) == ([[0, 2, 5]], [1, 3])
    assert layout(Mix(6, 4, 1, True, True), [[0, 2]], [ALIVE], wanted=mask(4)) == ([[0, 2]], [])
    assert layout(Mix(6, 6, 6, True, True), [[0, 2, 5]], [ALIVE], wanted=mask(6, 1, 2)) == ([[1, 2]], [1, 2])


def test_layouts_of_grouped_convolutions() -> None:
    """Groups hold as many inputs each: what is there, constants too, filled up with zeros (-1)."""
    flow = Mix(6, 4, 2, True, True)
    assert layout(flow, [[0, 1, 4, 5]], [ALIVE], wanted=mask(4, 1, 2, 3)) == ([[0, 1, 4, 5]], [1, 2, 3])
    assert layout(flow, [[1, 4, 5]], [ALIVE], wanted=mask(4, 1, 2)) == ([[1, -1, 4, 5]], [1, 2])
    assert layout(flow, [[0, 1, 2, 3]], [ALIVE], wanted=mask(4, 0, 3)) == ([[0, 1, 2, 3, -1, -1]], [0, 3])
    assert layout(flow, [[1, 4, 5]], [ALIVE], wanted=mask(4, 2)) == ([[4, 5]], [2])
    assert layout(flow, [[1, 4, 5]], [ALIVE], wanted=mask(4, 0)) == ([[1]], [0])
    assert layout(flow, [[1, 4, 5]], [ALIVE], wanted=mask(4)) == ([[]], [])
    states = [LIVE, LIVE, CONST, LIVE, CONST, ZERO]
    assert layout(flow, [[1, 3]], [states], wanted=mask(4, 0, 3)) == ([[1, 2, 3, 4]], [0, 3])
    assert layout(flow, [[]], [[ZERO] * 6], wanted=mask(4, 0, 3)) == ([[]], [0, 3])
    whole = Mix(6, 4, 2, True, True, whole=True)
    assert layout(whole, [[1]], [ALIVE], wanted=mask(4, 2)) == ([[3, 4, 5]], [2])
    three = Mix(6, 9, 3, True, True)
    assert layout(three, [[0, 1, 2, 5]], [ALIVE], wanted=mask(9, 0, 5, 8)) == ([[0, 1, 2, -1, 5, -1]], [0, 5, 8])


def test_layouts_of_layers_of_an_own_kind() -> None:
    """They get what is not zero, constants filled in, and are not asked what they do without any input."""
    flow, states = Mix(6, 4, 1, True, False, own=True), [LIVE, LIVE, CONST, ZERO, LIVE, CONST]
    assert layout(flow, [[0, 4]], [states], wanted=mask(4, 1, 3)) == ([[0, 2, 4, 5]], [1, 3])
    assert layout(flow, [[]], [[ZERO] * 6], wanted=mask(4, 1)) == ([[0, 1, 2, 3, 4, 5]], [1])
    assert layout(flow, [[0, 4]], [states], wanted=mask(4)) == ([[]], [])
    whole = Mix(6, 4, 1, True, False, own=True, whole=True)
    assert layout(whole, [[0, 4]], [states], wanted=mask(4, 1)) == ([[0, 1, 2, 3, 4, 5]], [1])
    assert layout(whole, [[0, 4]], [states], wanted=mask(4)) == ([[]], [])
    two = Mix(6, 4, 2, True, False, own=True)
    assert layout(two, [[0, 4]], [states], wanted=mask(4, 1, 3)) == ([[0, 2, 4, 5]], [1, 3])
    assert layout(two, [[0]], [[LIVE, ZERO, ZERO, *[ZERO] * 3]], wanted=mask(4, 1, 3)) == (
        [[0, -1, -1, 3, 4, 5]],
        [1, 3],
    )
    assert layout(Mix(6, 4, 2, True, True), [[0]], [[LIVE] + [ZERO] * 5], wanted=mask(4, 1, 3)) == ([[0, -1]], [1, 3])


def test_rows_of_grouped_convolutions() -> None:
    flow = Mix(6, 12, 3, True, True)
    assert flow.active(np.array([0, 3, 8])) == [0, 2]
    assert flow.active(np.array([4, 5, 7])) == [1]
    assert flow.active(np.array([], dtype=np.int64)) == []
    assert [flow.rows_per_group(np.array(rows, dtype=np.int64)) for rows in ([0, 3, 8], [4, 8, 9, 10], [])] == [2, 3, 0]


def test_depthwise_is_one_input_and_one_output_per_group() -> None:
    widths = ((2, 2, 2), (3, 3, 3), (1, 1, 1), (4, 4, 2), (4, 8, 4), (8, 4, 4), (4, 4, 1))
    assert [Mix(*width, True, True).depthwise for width in widths] == [True, True, *[False] * 5]


def test_layouts_of_what_goes_channel_by_channel() -> None:
    """What is there passes, though nobody needs it, but not through a closed gate; nothing for nobody."""
    opened = [True, True, True, False, True]
    assert layout(Pass(), [[0, 1, 3]], [ALIVE[:5]], wanted=mask(5, 1), opened=opened) == ([[0, 1]], [0, 1])
    assert layout(Pass(), [[0, 3]], [ALIVE[:5]], wanted=mask(5, 1, 2), opened=opened) == ([[0, 1, 2]], [0, 1, 2])
    assert layout(Pass(), [[0, 1, 3]], [ALIVE[:5]], wanted=mask(5), opened=opened) == ([[]], [])


def test_layouts_of_what_is_read_together() -> None:
    for flow in (Add(), Stack(), Zip((5, 5, 5), True)):
        assert layout(flow, [[0], [1, 2], []], [ALIVE[:5]] * 3, wanted=mask(5, 1, 4)) == ([[1, 4]] * 3, [1, 4])
    states = [ALIVE[:5], ALIVE[:1]]
    for widths in ((5, 1), (1, 5)):
        wanted, one = ([1, 4], [0]) if widths[0] == 5 else ([0], [1, 4])
        assert layout(Zip(widths, True), [[0], [0]], states, wanted=mask(5, 1, 4)) == ([wanted, one], [1, 4])
    assert layout(Zip((5, 1), True), [[0], [0]], states, wanted=mask(5)) == ([[], []], [])
    assert Zip((1, 3), False).width == 3


def test_layouts_of_concatenations() -> None:
    held, states = [[0, 1], [4], []], [ALIVE[:2], ALIVE[:5], ALIVE[:3]]
    found = layout(Concat((2, 5, 3)), held, states, wanted=mask(10, 1, 2, 6, 7, 9))
    assert found == ([[1], [0, 4], [0, 2]], [1, 2, 6, 7, 9])
    assert layout(Concat((2, 5, 3)), held, states, wanted=mask(10)) == ([[], [], []], [])


def test_layouts_of_moved_channels() -> None:
    """Untouched where nothing was removed; otherwise each wanted channel asks for the one that it comes from."""
    everything = [0, 1, 2, 3, 4]
    assert layout(PADDED, [everything], [ALIVE[:5]], wanted=mask(8, 1, 7)) == ([everything], list(range(8)))
    assert layout(PADDED, [[1, 2, 3]], [ALIVE[:5]], wanted=mask(8, 2, 4, 7)) == ([[1, 3, -1]], [2, 4, 7])
    assert layout(CUT, [[1, 2]], [ALIVE[:5]], wanted=mask(2, 1)) == ([[1]], [1])
    assert layout(CUT, [everything], [ALIVE[:5]], wanted=mask(2, 1)) == ([everything], [0, 1])


def test_layouts_of_chunks() -> None:
    """A chunk stays one where all chunks keep as many channels; elsewhere its channels are picked by number."""
    first, second, last = (Part(6, np.array([2 * n, 2 * n + 1]), 3) for n in range(3))
    held = [1, 2, 5]
    assert layout(first, [held], [ALIVE], wanted=mask(2, 1)) == ([held], [1])
    assert layout(second, [held], [ALIVE], wanted=mask(2, 0)) == ([held], [0])
    assert layout(last, [held], [ALIVE], wanted=mask(2, 1)) == ([held], [1])
    assert layout(last, [list(range(6))], [ALIVE], wanted=mask(2, 1)) == ([list(range(6))], [0, 1])
    assert layout(second, [held], [ALIVE], wanted=mask(2)) == ([[]], [])
    assert layout(second, [[1, 2, 3]], [ALIVE], wanted=mask(2, 1)) == ([[3]], [1])
    assert layout(first, [[0, 2]], [ALIVE], wanted=mask(2, 0)) == ([[0]], [0])
    assert layout(last, [[]], [ALIVE], wanted=mask(2)) == ([[]], [])


def test_layouts_of_the_channel_of_ones() -> None:
    assert layout(Ones(), [[0, 3]], [ALIVE[:5]], wanted=mask(6, 3)) == ([[0, 3]], [0, 3, 5])
    assert layout(Ones(), [[0, 3]], [ALIVE[:5]], wanted=mask(6)) == ([[0, 3]], [])
    assert Ones().origin(2, [np.arange(5.0)]) == (0, 2)


def test_layouts_of_blocks() -> None:
    """A flattened channel is there with all its places, or not at all; so is a channel that a shuffle spreads."""
    assert layout(Flatten(2), [[0]], [ALIVE[:4]], wanted=mask(8, 5, 6)) == ([[0, 2, 3]], [0, 1, 4, 5, 6, 7])
    assert layout(Flatten(2), [[0]], [ALIVE[:4]], wanted=mask(8)) == ([[]], [])
    assert layout(Gather(2), [[0]], [ALIVE], wanted=mask(3, 0, 2)) == ([[0, 1, 4, 5]], [0, 2])
    assert layout(Gather(2), [[0]], [ALIVE], wanted=mask(3)) == ([[]], [])
