"""Flows of operations that join several values, or rearrange channels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paam.graph.flows import CONST, LIVE, ZERO, Layout, Layouts, Needs, States, Strengths


class _Together:
    """Values of equal width that are read together: each holds the wanted channels."""

    def backward(self, need: Needs, inputs: list[States]) -> list[Needs]:
        return [need] * len(inputs)

    def layout(self, inputs: list[Layout], states: list[States], wanted: Needs, opened: Needs) -> Layouts:
        present = np.flatnonzero(wanted)
        return [present] * len(inputs), present

    def strength(self, inputs: list[Strengths]) -> Strengths:
        best: Strengths = np.maximum.reduce(inputs)
        return best

    def origin(self, channel: int, inputs: list[Strengths]) -> tuple[int, int]:
        return int(np.argmax([strength[channel] for strength in inputs])), channel


@dataclass(frozen=True)
class Add(_Together):
    """Sum of values of equal width. Each may hold different channels: this is where independent streams meet."""

    def forward(self, inputs: list[States]) -> States:
        stacked = np.stack(inputs)
        out = np.where((stacked == ZERO).all(0), ZERO, CONST)
        out[(stacked == LIVE).any(0)] = LIVE
        return out


@dataclass(frozen=True)
class Stack(_Together):
    """Values of equal width, stacked on another axis, with constants filled in."""

    def forward(self, inputs: list[States]) -> States:
        # Constants of one channel differ between the values, so the stacked result is not constant.
        return np.where((np.stack(inputs) == ZERO).all(0), ZERO, LIVE).astype(np.int8)


@dataclass(frozen=True)
class Zip:
    """Any function of corresponding channels: products, differences, sums that broadcast over the map.

    Each input holds the wanted channels, constants filled in. ``zero_wins``: a zero in any of them makes the result
    zero. ``zero``: the result's state if all of them are zero. An input of width 1 is broadcast to all channels.
    """

    widths: tuple[int, ...]
    zero_wins: bool
    zero: np.int8 = ZERO
    const: np.int8 = CONST

    @property
    def width(self) -> int:
        return max(self.widths)

    def forward(self, inputs: list[States]) -> States:
        stacked = np.stack([np.broadcast_to(state, self.width) for state in inputs])
        zero = (stacked == ZERO).any(0) if self.zero_wins else (stacked == ZERO).all(0)
        constant = (stacked != LIVE).all(0)
        if self.zero_wins:
            return np.where(zero, ZERO, np.where(constant, self.const, LIVE)).astype(np.int8)
        return np.where(zero, self.zero, np.where(constant, self.const, LIVE)).astype(np.int8)

    def backward(self, need: Needs, inputs: list[States]) -> list[Needs]:
        return [need if width == self.width else np.full(width, need.any()) for width in self.widths]

    def layout(self, inputs: list[Layout], states: list[States], wanted: Needs, opened: Needs) -> Layouts:
        present = np.flatnonzero(wanted)
        one = np.arange(1 if len(present) else 0)
        return [present if width == self.width else one for width in self.widths], present

    def strength(self, inputs: list[Strengths]) -> Strengths:
        # If one factor has become constant, the others still pass.
        best: Strengths = np.maximum.reduce([np.broadcast_to(strength, self.width) for strength in inputs])
        return inputs[0] + np.zeros(self.width) if self.zero_wins else best

    def origin(self, channel: int, inputs: list[Strengths]) -> tuple[int, int]:
        values = [strength[channel if len(strength) > 1 else 0] for strength in inputs]
        which = 0 if self.zero_wins else int(np.argmax(values))
        return which, channel if self.widths[which] > 1 else 0


@dataclass(frozen=True)
class Concat:
    """Concatenation along the channel axis, in the order of the inputs."""

    widths: tuple[int, ...]

    def forward(self, inputs: list[States]) -> States:
        return np.concatenate(inputs)

    def backward(self, need: Needs, inputs: list[States]) -> list[Needs]:
        return np.split(need, np.cumsum(self.widths)[:-1])

    def layout(self, inputs: list[Layout], states: list[States], wanted: Needs, opened: Needs) -> Layouts:
        starts = np.cumsum((0, *self.widths[:-1]))
        parts = np.split(wanted, np.cumsum(self.widths)[:-1])
        present = [np.flatnonzero(part) for part in parts]
        return present, np.concatenate([p + start for p, start in zip(present, starts, strict=True)])

    def strength(self, inputs: list[Strengths]) -> Strengths:
        return np.concatenate(inputs)

    def origin(self, channel: int, inputs: list[Strengths]) -> tuple[int, int]:
        ends = np.cumsum(self.widths)
        which = int(np.searchsorted(ends, channel, side="right"))
        return which, channel - int(ends[which] - self.widths[which])


@dataclass(frozen=True, eq=False)
class Route:
    """Output channel j is input channel ``source[j]``, or 0 where that is -1: channel padding and slicing."""

    width: int
    source: Layout

    def forward(self, inputs: list[States]) -> States:
        return np.append(inputs[0], ZERO)[self.source]

    def backward(self, need: Needs, inputs: list[States]) -> list[Needs]:
        needed = np.zeros(self.width, dtype=bool)
        needed[self.source[need & (self.source >= 0)]] = True
        return [needed]

    def layout(self, inputs: list[Layout], states: list[States], wanted: Needs, opened: Needs) -> Layouts:
        if len(inputs[0]) == self.width:  # nothing was removed: the operation is unchanged
            return [inputs[0]], np.arange(len(self.source))
        present = np.flatnonzero(wanted)
        return [self.source[present]], present

    def strength(self, inputs: list[Strengths]) -> Strengths:
        return np.append(inputs[0], -np.inf)[self.source]

    def origin(self, channel: int, inputs: list[Strengths]) -> tuple[int, int]:
        return 0, int(self.source[channel])


@dataclass(frozen=True, eq=False)
class Part(Route):
    """One of the equal parts of x.chunk(parts, 1). It stays a chunk if all parts keep equally many channels."""

    parts: int

    def layout(self, inputs: list[Layout], states: list[States], wanted: Needs, opened: Needs) -> Layouts:
        size = self.width // self.parts
        counts = np.bincount(inputs[0] // size, minlength=self.parts)
        if not wanted.any() or (counts != counts[0]).any():
            return super().layout(inputs, states, wanted, opened)
        held = inputs[0] - self.source[0]
        return [inputs[0]], held[(held >= 0) & (held < size)]


@dataclass(frozen=True)
class Ones:
    """All channels plus one that is 1 everywhere: added by an earlier pruning for a padded convolution."""

    def forward(self, inputs: list[States]) -> States:
        return np.append(inputs[0], CONST)

    def backward(self, need: Needs, inputs: list[States]) -> list[Needs]:
        return [need[:-1]]

    def layout(self, inputs: list[Layout], states: list[States], wanted: Needs, opened: Needs) -> Layouts:
        if not wanted.any():
            return inputs, inputs[0][:0]
        return inputs, np.append(inputs[0], len(wanted) - 1)

    def strength(self, inputs: list[Strengths]) -> Strengths:
        return np.append(inputs[0], -np.inf)

    def origin(self, channel: int, inputs: list[Strengths]) -> tuple[int, int]:
        return 0, channel


@dataclass(frozen=True)
class Empty:
    """A value without channels, from an earlier pruning."""

    def forward(self, inputs: list[States]) -> States:
        return np.zeros(0, dtype=np.int8)

    def backward(self, need: Needs, inputs: list[States]) -> list[Needs]:
        return [np.zeros(len(states), dtype=bool) for states in inputs]

    def layout(self, inputs: list[Layout], states: list[States], wanted: Needs, opened: Needs) -> Layouts:
        return inputs, np.zeros(0, dtype=np.int64)

    def strength(self, inputs: list[Strengths]) -> Strengths:
        return np.zeros(0, dtype=np.complex128)

    def origin(self, channel: int, inputs: list[Strengths]) -> tuple[int, int]:
        raise AssertionError("a path does not go through nothing")


@dataclass(frozen=True)
class Flatten:
    """Each channel becomes ``block`` adjacent features."""

    block: int

    def forward(self, inputs: list[States]) -> States:
        return inputs[0].repeat(self.block)

    def backward(self, need: Needs, inputs: list[States]) -> list[Needs]:
        return [np.any(need.reshape(-1, self.block), axis=1)]

    def layout(self, inputs: list[Layout], states: list[States], wanted: Needs, opened: Needs) -> Layouts:
        channels = np.flatnonzero(wanted) // self.block
        present = np.union1d(channels, inputs[0]) if len(channels) else channels
        return [present], (present[:, None] * self.block + np.arange(self.block)).ravel()

    def strength(self, inputs: list[Strengths]) -> Strengths:
        return inputs[0].repeat(self.block)

    def origin(self, channel: int, inputs: list[Strengths]) -> tuple[int, int]:
        return 0, channel // self.block


@dataclass(frozen=True)
class Gather:
    """``block`` adjacent channels become one, spread over a larger map: pixel shuffle."""

    block: int

    def forward(self, inputs: list[States]) -> States:
        blocks = inputs[0].reshape(-1, self.block)
        # Constants of one block differ, so the combined channel is not constant.
        return np.where((blocks == ZERO).all(1), ZERO, LIVE).astype(np.int8)

    def backward(self, need: Needs, inputs: list[States]) -> list[Needs]:
        return [need.repeat(self.block)]

    def layout(self, inputs: list[Layout], states: list[States], wanted: Needs, opened: Needs) -> Layouts:
        present = np.flatnonzero(wanted)
        return [(present[:, None] * self.block + np.arange(self.block)).ravel()], present

    def strength(self, inputs: list[Strengths]) -> Strengths:
        best: Strengths = inputs[0].reshape(-1, self.block).max(1)
        return best

    def origin(self, channel: int, inputs: list[Strengths]) -> tuple[int, int]:
        block = inputs[0][channel * self.block : (channel + 1) * self.block]
        return 0, channel * self.block + int(block.argmax())


@dataclass(frozen=True)
class Given:
    """A tensor that follows from sizes alone, or is shared by several layers: kept completely or not at all."""

    width: int

    def forward(self, inputs: list[States]) -> States:
        return np.full(self.width, LIVE)

    def backward(self, need: Needs, inputs: list[States]) -> list[Needs]:
        return []

    def layout(self, inputs: list[Layout], states: list[States], wanted: Needs, opened: Needs) -> Layouts:
        return [], np.arange(self.width if wanted.any() else 0)

    def strength(self, inputs: list[Strengths]) -> Strengths:
        return np.full(self.width, -np.inf, dtype=np.complex128)  # no path starts here

    def origin(self, channel: int, inputs: list[Strengths]) -> tuple[int, int]:
        raise AssertionError("a path does not start at what is given")


@dataclass(frozen=True)
class Stored:
    """A parameter or buffer of the model with a channel axis: it is cut to the wanted channels."""

    width: int

    def forward(self, inputs: list[States]) -> States:
        return np.full(self.width, LIVE)

    def backward(self, need: Needs, inputs: list[States]) -> list[Needs]:
        return []

    def layout(self, inputs: list[Layout], states: list[States], wanted: Needs, opened: Needs) -> Layouts:
        return [], np.flatnonzero(wanted)

    def strength(self, inputs: list[Strengths]) -> Strengths:
        return np.full(self.width, -np.inf, dtype=np.complex128)  # no path starts here

    def origin(self, channel: int, inputs: list[Strengths]) -> tuple[int, int]:
        raise AssertionError("a path does not start at a parameter")
