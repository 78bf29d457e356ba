"""The strongest path from the input to each output: the one whose weakest gate has the highest score.

Ties are broken by the sum of the scores of a path's gates. Both numbers are stored as one complex number, the weakest
score as its real part and the sum as its imaginary part, because numpy orders complex numbers by the real part first.

A path is never removed (select.py says which), so that every selection leaves a network whose output depends on its
input: a residual stream keeps a channel, a plain layer keeps a filter, while the inner layers of a block may vanish.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from paam.graph.flows import Strengths
from paam.graph.rules.site import Op


def strongest_path(ops: Sequence[Op], scores: Mapping[str, NDArray[np.float64]]) -> list[tuple[str, int]]:
    """Gates on the paths, as (node, channel). ``scores``: node name -> score of each channel gated after it."""
    strength: dict[str, Strengths] = {}
    for op in ops:
        value = op.flow.strength([strength[node.name] for node in op.inputs])
        if op.name in scores:
            value = np.minimum(value.real, scores[op.name]) + 1j * (value.imag + scores[op.name])
        strength[op.name] = value
    by_name = {op.name: op for op in ops}
    path: dict[tuple[str, int], None] = {}
    for op in ops:
        if op.node.op != "output":
            continue
        channel = int(strength[op.inputs[0].name].argmax())
        while op.inputs:
            if op.name in scores:
                path[op.name, channel] = None
            which, channel = op.flow.origin(channel, [strength[node.name] for node in op.inputs])
            op = by_name[op.inputs[which].name]
    return list(path)
