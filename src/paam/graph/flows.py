"""How channels propagate through an operation: the few basic cases.

Every value in the graph has a channel axis, and every channel a state:

  LIVE   it depends on the input
  ZERO   it is 0 for every input, everywhere: a closed gate and what follows from it
  CONST  it is one number for every input, everywhere: for example a batch norm's offset of a closed channel

A flow answers these questions about one operation. ``forward``: the states of its output, given those of its inputs.
``backward``: which channels of each input it needs, given which of its output are needed. ``layout``: which channels
each input must physically hold, and which the output then holds. States and needs follow from the graph and the plan
alone, never from weights, so a plan gives the same small network on any copy of the model.

``strength`` and ``origin`` are for the search for the strongest path (path.py): how well each output channel is
connected to the input, given the same for each input channel; and through which input, and which of its channels,
that connection goes.

States are int8 arrays, needs are bool arrays, layouts are int64 arrays of original channel indices in ascending order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

States = NDArray[np.int8]
Needs = NDArray[np.bool_]
Layout = NDArray[np.int64]
Strengths = NDArray[np.complex128]
Layouts = tuple[list[Layout], Layout]
"""What each input must hold, and what the output then holds."""

LIVE, ZERO, CONST = np.int8(0), np.int8(1), np.int8(2)


class Flow(Protocol):
    """The channel behaviour of one operation."""

    def forward(self, inputs: list[States]) -> States: ...

    def backward(self, need: Needs, inputs: list[States]) -> list[Needs]: ...

    def layout(self, inputs: list[Layout], states: list[States], wanted: Needs, opened: Needs) -> Layouts:
        """What each input must hold, and what the output then holds.

        ``inputs``: what they hold now; ``states``: of all their channels. ``wanted``: output channels that are needed
        and LIVE. ``opened``: output channels that no gate after this operation closes.
        """
        ...

    def strength(self, inputs: list[Strengths]) -> Strengths: ...

    def origin(self, channel: int, inputs: list[Strengths]) -> tuple[int, int]: ...


@dataclass(frozen=True)
class Source:
    """A graph input: all channels are kept, even if not all are needed."""

    width: int

    def forward(self, inputs: list[States]) -> States:
        return np.full(self.width, LIVE)

    def backward(self, need: Needs, inputs: list[States]) -> list[Needs]:
        return []

    def layout(self, inputs: list[Layout], states: list[States], wanted: Needs, opened: Needs) -> Layouts:
        return [], np.arange(self.width)

    def strength(self, inputs: list[Strengths]) -> Strengths:
        return np.full(self.width, np.inf, dtype=np.complex128)

    def origin(self, channel: int, inputs: list[Strengths]) -> tuple[int, int]:
        raise AssertionError("a path ends at a source")


@dataclass(frozen=True)
class Sink:
    """A graph output: all channels, with constants filled in."""

    width: int

    def forward(self, inputs: list[States]) -> States:
        return inputs[0]

    def backward(self, need: Needs, inputs: list[States]) -> list[Needs]:
        return [np.ones(self.width, dtype=bool)]

    def layout(self, inputs: list[Layout], states: list[States], wanted: Needs, opened: Needs) -> Layouts:
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

    ``own``: a custom layer, known only through trials (layers.py): zero inputs may be missing, unless all inputs are
    needed (``whole``); outputs without any non-zero input have the state ``dead``.
    """

    inputs: int
    outputs: int
    groups: int
    biased: bool
    padded: bool
    transposed: bool = False
    own: bool = False
    whole: bool = False
    dead: np.int8 = ZERO

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and self.groups == self.inputs == self.outputs

    def forward(self, inputs: list[States]) -> States:
        grouped = inputs[0].reshape(self.groups, -1)
        if self.own:
            used = (grouped != ZERO).any(1)
            return np.where(used, LIVE, self.dead).astype(np.int8).repeat(self.outputs // self.groups)
        live = (grouped == LIVE).any(1)
        constant = (grouped == CONST).any(1)
        if self.padded:
            live |= constant
        dead = CONST if self.biased else np.where(constant, CONST, ZERO)
        return np.where(live, LIVE, dead).astype(np.int8).repeat(self.outputs // self.groups)

    def backward(self, need: Needs, inputs: list[States]) -> list[Needs]:
        groups = need.reshape(self.groups, -1).any(1)
        return [groups.repeat(self.inputs // self.groups)]

    def layout(self, inputs: list[Layout], states: list[States], wanted: Needs, opened: Needs) -> Layouts:
        rows = np.flatnonzero(wanted)
        if self.depthwise:
            return [rows], rows
        if self.groups == 1 and not self.own:
            return [inputs[0]], rows
        # A grouped convolution needs equally many inputs per group: shorter groups are padded with zeros (-1).
        # Constants are filled in too, instead of being folded into the bias.
        held = (states[0] == CONST) | self.whole
        held[inputs[0]] = True
        size = self.inputs // self.groups
        if self.own:  # its behaviour without any input is unknown
            held |= ~held.reshape(self.groups, -1).any(1).repeat(size)
        groups = [np.flatnonzero(held[g * size : (g + 1) * size]) + g * size for g in self.active(rows)]
        longest = max(map(len, groups), default=0)
        return [np.concatenate([_filled(group, longest) for group in groups]) if groups else rows], rows

    def active(self, rows: Layout) -> list[int]:
        """Groups with at least one remaining output."""
        return sorted(set((rows // (self.outputs // self.groups)).tolist()))

    def rows_per_group(self, rows: Layout) -> int:
        """Outputs per remaining group: as many as the largest one has."""
        counts = np.bincount(rows // (self.outputs // self.groups)) if len(rows) else np.zeros(1, dtype=np.int64)
        return int(counts.max())

    def strength(self, inputs: list[Strengths]) -> Strengths:
        best: Strengths = inputs[0].reshape(self.groups, -1).max(1)
        return best.repeat(self.outputs // self.groups)

    def origin(self, channel: int, inputs: list[Strengths]) -> tuple[int, int]:
        group = channel // (self.outputs // self.groups)
        size = self.inputs // self.groups
        return 0, group * size + int(inputs[0][group * size : (group + 1) * size].argmax())


@dataclass(frozen=True)
class Pass:
    """Each output channel reads only its own input channel: activations, batch norm, pooling.

    ``zero`` and ``const``: the state that a ZERO and a CONST channel becomes. A batch norm turns zero into a constant;
    an average over zero padding turns a constant into something that varies over the map, which counts as LIVE.
    """

    zero: np.int8 = ZERO
    const: np.int8 = CONST

    def forward(self, inputs: list[States]) -> States:
        return np.array([LIVE, self.zero, self.const])[inputs[0]]

    def backward(self, need: Needs, inputs: list[States]) -> list[Needs]:
        return [need]

    def layout(self, inputs: list[Layout], states: list[States], wanted: Needs, opened: Needs) -> Layouts:
        # Present channels pass even if not needed: cheaper than an index map. Only those closed by a gate must go.
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
class Whole:
    """Every output reads every channel, as in a norm over channels: inputs are complete, with constants filled in.

    There may be several inputs, such as a norm's weight and offset. ``opaque``: a part that the user excluded.
    """

    width: int
    opaque: bool = False

    def forward(self, inputs: list[States]) -> States:
        return np.full(self.width, LIVE)

    def backward(self, need: Needs, inputs: list[States]) -> list[Needs]:
        return [np.full(len(states), need.any()) for states in inputs]

    def layout(self, inputs: list[Layout], states: list[States], wanted: Needs, opened: Needs) -> Layouts:
        # A gate directly after would close channels of a value that must stay complete: attach.py puts none here.
        if not wanted.any():
            return inputs, np.zeros(0, dtype=np.int64)
        return [np.arange(len(state)) for state in states], np.arange(self.width)

    def strength(self, inputs: list[Strengths]) -> Strengths:
        return np.full(self.width, max(strength.max() for strength in inputs))

    def origin(self, channel: int, inputs: list[Strengths]) -> tuple[int, int]:
        which = int(np.argmax([strength.max() for strength in inputs]))
        return which, int(inputs[which].argmax())


def _filled(layout: Layout, length: int) -> Layout:
    return np.concatenate([layout, np.full(length - len(layout), -1)])
