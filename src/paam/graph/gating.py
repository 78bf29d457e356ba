"""Gates from the graph's point of view: where they are stored in a network, and how one multiplies a feature map."""

from __future__ import annotations

from torch import Tensor

GATES = "paam_gates"
"""Submodule with the gates of a gated network."""


def apply_gate(x: Tensor, gate: Tensor | None, axis: int) -> Tensor:
    """x times the gate along the channel axis; None is an open gate."""
    if gate is None:
        return x
    shape = [1] * x.dim()
    shape[axis] = -1
    if len(gate) != x.shape[axis]:
        gate = gate.repeat(x.shape[axis] // len(gate))  # x is read in equal parts that share a gate
    return x * gate.to(x.dtype).view(shape)
