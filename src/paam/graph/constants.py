"""What closed channels still contribute as constants, read off the gated network itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from paam.errors import GraphError
from paam.gates import apply_gate
from paam.graph.flows import CONST
from paam.graph.modes import evaluating
from paam.graph.solve import Masks, Solution
from paam.graph.trace import Traced

Values = dict[str, Tensor]
"""Node name -> the value of each channel that is constant, shape [width]; other entries mean nothing."""


class _Observer(fx.Interpreter):
    """Runs the network with its gates closed and reads the constant channels off every value that has some."""

    def __init__(self, traced: Traced, solution: Solution, masks: Masks) -> None:
        super().__init__(traced.module)
        self.extra_traceback = False
        self.axes = {step.op.name: step.op.axis for step in solution.settled}
        self.states = solution.states
        self.masks = masks
        self.values: Values = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.name in self.masks:
            gate = torch.from_numpy(self.masks[n.name]).to(value.device)
            value = apply_gate(value, gate, self.axes[n.name])
        constant = self.states.get(n.name, np.zeros(0)) == CONST
        if constant.any():
            rows = value.detach().movedim(self.axes[n.name], -1).flatten(0, -2)
            self.values[n.name] = rows[0].clone()
            seen = rows[:, torch.from_numpy(constant)].double()
            if not torch.allclose(seen, seen[:1].expand_as(seen), rtol=1e-5, atol=1e-6):
                raise GraphError(f"The channel rule of '{n.name}' is wrong: a channel it calls constant varies.")
        return value


def observe_constants(traced: Traced, solution: Solution, masks: Masks) -> Values:
    """The constants that the small network must carry; empty when it needs none."""
    if not any(step.folded or any(map(len, step.constants)) for step in solution.settled):
        return {}
    observer = _Observer(traced, solution, masks)
    with evaluating(traced.model), evaluating(traced.module), torch.no_grad():
        observer.run(*traced.examples)
    return observer.values
