"""Constant contributions of closed channels, measured on the gated network itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from paam.errors import GraphError
from paam.graph.checks.differences import COARSE
from paam.graph.checks.inputs import device_of
from paam.graph.flows import CONST, LIVE
from paam.graph.gating import apply_gate
from paam.graph.modes import copying, evaluating
from paam.graph.record.as_found import AsFound
from paam.graph.record.recording import DTYPE, Shape
from paam.graph.runner import GraphRunner
from paam.graph.solve import Masks, Solution
from paam.graph.trace import Traced

Values = dict[str, Tensor]
"""Node name -> the value of each constant channel, shape [width]; other entries are meaningless."""

Shapes = Mapping[str, Shape]
"""Node name -> the shape of its value."""

SEEN = 256
"""Approximate number of positions and samples at which constants are compared."""


class Observer(GraphRunner):
    """Runs the network with its gates closed, and collects the constants that the small network needs."""

    def __init__(self, traced: Traced, solution: Solution, masks: Masks, keep: bool) -> None:
        super().__init__(traced, traced.model)
        self.axes = {step.op.name: step.op.axis for step in solution.settled}
        self.states = solution.states
        self.wanted = wanted(solution)
        self.masks = masks
        self.values: Values = {}
        self.result: Any = None
        self.keep = keep
        self.kept: dict[str, Tensor] = {}
        self.shapes: dict[str, Shape] = {}
        self.coarse = False
        """Whether something is computed in less than double precision."""

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.name in self.masks:
            gate = torch.from_numpy(self.masks[n.name]).to(value.device)
            value = apply_gate(value, gate, self.axes[n.name])
        if isinstance(value, Tensor):
            self.shapes[n.name] = tuple(value.shape)
            self.coarse |= value.dtype in COARSE
            if self.keep:
                self.kept[n.name] = value
        if n in self.wanted:
            self.values[n.name] = self._constants(n, value)
        return value

    def _constants(self, n: fx.Node, value: Tensor) -> Tensor:
        axis = self.axes[n.name]
        places = torch.from_numpy(np.flatnonzero(self.states[n.name] == CONST)).to(value.device)
        seen = value.index_select(axis, places).movedim(axis, -1)[None].flatten(0, -2)
        seen = seen[:: max(len(seen) // SEEN, 1)].double()
        varies = not torch.allclose(seen, seen[:1].expand_as(seen), rtol=1e-5, atol=1e-6)
        if varies and bool(seen.isfinite().all()):  # NaN and infinity come from earlier operations
            raise GraphError(f"The channel rule of '{n.name}' is wrong: a channel it calls constant varies.")
        while value.dim() > 1:  # one sample, at one position
            value, axis = (value[0], axis - 1) if axis else (value.select(-1, 0), 0)
        return value.clone()


def wanted(solution: Solution) -> set[fx.Node]:
    """The values whose constants the small network needs."""
    return {
        node
        for step in solution.settled
        for node, constants in zip(step.op.inputs, step.constants, strict=True)
        if len(constants) or step.folded
    }


def find_constants(traced: Traced, solution: Solution, masks: Masks, shapes: Shapes | None = None) -> Values:
    """The constants that the small network needs, and no others.

    They depend only on other constants and the model's tensors, so only the operations that lead to them are run, on
    maps of the example's size or of other ``shapes``. Values that vary with the inputs are replaced by random numbers.
    """
    observer = Observer(traced, solution, masks, keep=False)
    if not observer.wanted:
        return {}
    shapes = shapes or traced.shapes
    computed, given = _needed(traced, observer)
    with _evaluation(traced), copying(traced.model):
        for node in traced.graph.nodes:
            if node in given:
                observer.env[node] = _stand_in(traced, solution, node, observer.axes[node.name], shapes)
            elif node in computed:
                observer.env[node] = observer.run_node(node)
            for unread in observer.user_to_last_uses.get(node, ()):
                observer.env.pop(unread, None)
    return observer.values


def _needed(traced: Traced, observer: Observer) -> tuple[set[fx.Node], set[fx.Node]]:
    """The operations that must be run for the constants, and their non-constant inputs."""
    computed: set[fx.Node] = set()
    given: set[fx.Node] = set()
    waiting = [*observer.wanted]
    while waiting:
        node = waiting.pop()
        if node in computed or node in given:
            continue
        states = observer.states.get(node.name)
        if node.op == "placeholder" or (
            states is not None and traced.is_of_samples(node) and not (states == CONST).any()
        ):
            given.add(node)
        else:
            computed.add(node)
            waiting += node.all_input_nodes
    return computed, given


def _stand_in(traced: Traced, solution: Solution, node: fx.Node, axis: int, shapes: Shapes) -> Tensor:
    """A random value that varies by sample and channel, and is zero where it must be."""
    shape, held = shapes[node.name], node.meta[DTYPE]
    inputs = next(other for other in traced.graph.nodes if other.op == "placeholder")
    dtype = _dtype_of(traced) if held == inputs.meta[DTYPE] else held
    values = torch.zeros(1, dtype=dtype).expand(shape)
    if dtype.is_floating_point:
        grows = [place for place, more in enumerate(traced.growth(node)) if more]
        varied = [size if place in (*grows, axis) else 1 for place, size in enumerate(shape)]
        live = torch.from_numpy(solution.states[node.name] == LIVE)
        along = [-1 if place == axis else 1 for place in range(len(shape))]
        values = (torch.randn(varied, generator=torch.Generator().manual_seed(0)) * live.view(along)).expand(shape)
    return values.to(device_of(traced), dtype)


def _dtype_of(traced: Traced) -> torch.dtype:
    """The model's current precision."""
    floats = (p.dtype for p in traced.model.parameters() if p.is_floating_point())
    return next(floats, torch.get_default_dtype())


def observe(
    traced: Traced, solution: Solution, masks: Masks, inputs: Sequence[Tensor], *, keep: bool = False
) -> Observer:
    """Run the network with closed gates: the observer has its constants, result, and with ``keep`` all values."""
    observer = Observer(traced, solution, masks, keep)
    with _evaluation(traced):
        observer.result = observer.run(*(x.clone() for x in inputs))
    return observer


@contextmanager
def _evaluation(traced: Traced) -> Iterator[None]:
    """Evaluation mode, without gradients. Training-only nodes run too, without side effects."""
    with evaluating(traced.model), torch.no_grad(), ExitStack() as stack:
        if traced.training_only:  # may update statistics, draw random numbers, and change what evaluation returns
            device = device_of(traced)
            stack.enter_context(copying(traced.model))
            stack.enter_context(AsFound(traced.model, traced.ignore))
            stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        yield
