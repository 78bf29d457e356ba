"""The strongest path from the input to each output: the one whose weakest gate scores highest.

A path is never removed (select.py says which), so that every selection leaves a network whose output depends on its
input: a residual stream keeps a channel, a plain layer keeps a filter, while the inner layers of a block may vanish.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from paam.graph.flows import Strengths
from paam.graph.site import Op


def strongest_path(ops: Sequence[Op], scores: Mapping[str, Strengths]) -> list[tuple[str, int]]:
    """Gates on the paths, as (node, channel). ``scores``: node name -> score of each channel gated behind it."""
    strength: dict[str, Strengths] = {}
    for op in ops:
        value = op.flow.strength([strength[node.name] for node in op.inputs])
        if op.name in scores:
            value = np.minimum(value, scores[op.name])
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
