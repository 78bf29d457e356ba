"""The few ways in which channels travel through an operation.

Every value in the graph has a channel axis, and every channel on it a state:

  LIVE   it depends on the input
  ZERO   it is 0 for every input, everywhere: a closed gate and what follows from it
  CONST  it is one number for every input, everywhere: a batch norm's offset of a closed channel, say

A flow answers these questions about one operation. ``forward``: the states of its output, given those of its
inputs. ``backward``: which channels of each input it needs, given which of its output are needed. ``layout``: which
channels each input must physically hold, and which the output then holds. States and needs follow from the graph
and the plan alone, never from weights, so a plan gives the same small network on any copy of the model.

``strength`` and ``origin`` serve the search for the strongest path (path.py): how well each output channel is
connected to the input, given how well each input channel is; and through which input, and which of its channels,
that connection goes.

States are int8 arrays, needs are bool arrays, layouts are int64 arrays of original channel numbers in ascending order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

States = NDArray[np.int8]
Needs = NDArray[np.bool_]
Layout = NDArray[np.int64]
Strengths = NDArray[np.float64]

LIVE, ZERO, CONST = np.int8(0), np.int8(1), np.int8(2)


class Flow(Protocol):
    """What a channel rule says about one operation."""

    def forward(self, inputs: list[States]) -> States: ...

    def backward(self, need: Needs, inputs: list[States]) -> list[Needs]: ...

    def layout(self, inputs: list[Layout], wanted: Needs, opened: Needs) -> tuple[list[Layout], Layout]:
        """What each input must hold, and what the output then holds.

        ``inputs``: what they hold now. ``wanted``: output channels that are needed and LIVE. ``opened``: output
        channels that no gate behind this operation closes.
        """
        ...

    def strength(self, inputs: list[Strengths]) -> Strengths: ...

    def origin(self, channel: int, inputs: list[Strengths]) -> tuple[int, int]: ...


@dataclass(frozen=True)
class Source:
    """A graph input: whole, whatever is needed of it."""

    width: int

    def forward(self, inputs: list[States]) -> States:
        return np.full(self.width, LIVE)

    def backward(self, need: Needs, inputs: list[States]) -> list[Needs]:
        return []

    def layout(self, inputs: list[Layout], wanted: Needs, opened: Needs) -> tuple[list[Layout], Layout]:
        return [], np.arange(self.width)

    def strength(self, inputs: list[Strengths]) -> Strengths:
        return np.full(self.width, np.inf)

    def origin(self, channel: int, inputs: list[Strengths]) -> tuple[int, int]:
        raise AssertionError("a path ends at a source")


@dataclass(frozen=True)
class Sink:
    """A graph output: whole, with its constants filled in."""

    width: int

    def forward(self, inputs: list[States]) -> States:
        return inputs[0]

    def backward(self, need: Needs, inputs: list[States]) -> list[Needs]:
        return [np.ones(self.width, dtype=bool)]

    def layout(self, inputs: list[Layout], wanted: Needs, opened: Needs) -> tuple[list[Layout], Layout]:
        whole = np.arange(self.width)
        return [whole], whole

    def strength(self, inputs: list[Strengths]) -> Strengths:
        return inputs[0]

    def origin(self, channel: int, inputs: list[Strengths]) -> tuple[int, int]:
        return 0, channel


@dataclass(frozen=True)
class Mix:
    """Convolution or linear layer: in each group, every output reads every input.

    ``padded``: zero padding makes a constant input spatially uneven, so that constants cannot be folded into a bias.
    They are then read from one extra input channel of ones; see compact.py.
    """

    inputs: int
    outputs: int
    groups: int
    biased: bool
    padded: bool

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and self.groups == self.inputs == self.outputs

    def forward(self, inputs: list[States]) -> States:
        grouped = inputs[0].reshape(self.groups, -1)
        live = (grouped == LIVE).any(1)
        constant = (grouped == CONST).any(1)
        if self.padded:
            live |= constant
        dead = CONST if self.biased else np.where(constant, CONST, ZERO)
        return np.where(live, LIVE, dead).astype(np.int8).repeat(self.outputs // self.groups)

    def backward(self, need: Needs, inputs: list[States]) -> list[Needs]:
        groups = need.reshape(self.groups, -1).any(1)
        return [groups.repeat(self.inputs // self.groups)]

    def layout(self, inputs: list[Layout], wanted: Needs, opened: Needs) -> tuple[list[Layout], Layout]:
        rows = np.flatnonzero(wanted)
        return ([rows] if self.depthwise else [inputs[0]]), rows

    def strength(self, inputs: list[Strengths]) -> Strengths:
        best: Strengths = inputs[0].reshape(self.groups, -1).max(1)
        return best.repeat(self.outputs // self.groups)

    def origin(self, channel: int, inputs: list[Strengths]) -> tuple[int, int]:
        group = channel // (self.outputs // self.groups)
        size = self.inputs // self.groups
        return 0, group * size + int(inputs[0][group * size : (group + 1) * size].argmax())


@dataclass(frozen=True)
class Pass:
    """Each output channel reads its own input channel: activations, batch norm, pooling.

    ``zero`` and ``const``: the state that a ZERO and a CONST channel take. A batch norm turns zero into a constant; an
    average over zero padding turns a constant into something that varies over the map, which counts as LIVE.
    """

    zero: np.int8 = ZERO
    const: np.int8 = CONST

    def forward(self, inputs: list[States]) -> States:
        return np.array([LIVE, self.zero, self.const])[inputs[0]]

    def backward(self, need: Needs, inputs: list[States]) -> list[Needs]:
        return [need]

    def layout(self, inputs: list[Layout], wanted: Needs, opened: Needs) -> tuple[list[Layout], Layout]:
        # What is present passes even where nobody needs it: cheaper than a map. Only what a gate closes here must go.
        passing = wanted.copy()
        if wanted.any():
            passing[inputs[0]] |= opened[inputs[0]]
        present = np.flatnonzero(passing)
        return [present], present

    def strength(self, inputs: list[Strengths]) -> Strengths:
        return inputs[0]

    def origin(self, channel: int, inputs: list[Strengths]) -> tuple[int, int]:
        return 0, channel


@dataclass(frozen=True)
class Add:
    """Sum of equally wide values. Each may hold other channels: this is where independent streams meet."""

    def forward(self, inputs: list[States]) -> States:
        stacked = np.stack(inputs)
        out = np.where((stacked == ZERO).all(0), ZERO, CONST)
        out[(stacked == LIVE).any(0)] = LIVE
        return out

    def backward(self, need: Needs, inputs: list[States]) -> list[Needs]:
        return [need] * len(inputs)

    def layout(self, inputs: list[Layout], wanted: Needs, opened: Needs) -> tuple[list[Layout], Layout]:
        present = np.flatnonzero(wanted)
        return [present] * len(inputs), present

    def strength(self, inputs: list[Strengths]) -> Strengths:
        best: Strengths = np.maximum.reduce(inputs)
        return best

    def origin(self, channel: int, inputs: list[Strengths]) -> tuple[int, int]:
        return int(np.argmax([strength[channel] for strength in inputs])), channel


@dataclass(frozen=True)
class Concat:
    """Channels side by side, in the order of the inputs."""

    widths: tuple[int, ...]

    def forward(self, inputs: list[States]) -> States:
        return np.concatenate(inputs)

    def backward(self, need: Needs, inputs: list[States]) -> list[Needs]:
        return np.split(need, np.cumsum(self.widths)[:-1])

    def layout(self, inputs: list[Layout], wanted: Needs, opened: Needs) -> tuple[list[Layout], Layout]:
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
        return np.where(self.source >= 0, inputs[0][self.source], ZERO)

    def backward(self, need: Needs, inputs: list[States]) -> list[Needs]:
        needed = np.zeros(self.width, dtype=bool)
        needed[self.source[need & (self.source >= 0)]] = True
        return [needed]

    def layout(self, inputs: list[Layout], wanted: Needs, opened: Needs) -> tuple[list[Layout], Layout]:
        if len(inputs[0]) == self.width:  # nothing was removed: the operation stays as it is
            return [inputs[0]], np.arange(len(self.source))
        present = np.flatnonzero(wanted)
        return [self.source[present]], present

    def strength(self, inputs: list[Strengths]) -> Strengths:
        return np.where(self.source >= 0, inputs[0][self.source], -np.inf)

    def origin(self, channel: int, inputs: list[Strengths]) -> tuple[int, int]:
        return 0, int(self.source[channel])


@dataclass(frozen=True)
class Flatten:
    """Each channel becomes ``block`` neighbouring features."""

    block: int

    def forward(self, inputs: list[States]) -> States:
        return inputs[0].repeat(self.block)

    def backward(self, need: Needs, inputs: list[States]) -> list[Needs]:
        return [np.any(need.reshape(-1, self.block), axis=1)]

    def layout(self, inputs: list[Layout], wanted: Needs, opened: Needs) -> tuple[list[Layout], Layout]:
        channels = np.flatnonzero(wanted) // self.block
        present = np.union1d(channels, inputs[0]) if len(channels) else channels
        return [present], (present[:, None] * self.block + np.arange(self.block)).ravel()

    def strength(self, inputs: list[Strengths]) -> Strengths:
        return inputs[0].repeat(self.block)

    def origin(self, channel: int, inputs: list[Strengths]) -> tuple[int, int]:
        return 0, channel // self.block
