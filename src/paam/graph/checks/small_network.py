"""Compare a small network with the gated one before returning it, on other weights and another batch size.

The weights are random, so that no zero gain or fresh batch norm hides a difference. The images are as small as the
network accepts, in double precision. A network that keeps its class and differs is rebuilt as a graph; if that differs
too, it is refused.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from paam.errors import ConstantMapError, GraphError, one_line
from paam.graph.channel_map import NoChannels
from paam.graph.checks.differences import (
    COARSE_TOLERANCE,
    TOLERANCE,
    apart,
    difference,
    has_numbers,
    in_mode_of,
    tells_apart,
)
from paam.graph.checks.inputs import Inputs, device_of, random_inputs, tame_inputs
from paam.graph.checks.perturb import Noise, perturb
from paam.graph.constants import Shapes, observe
from paam.graph.copies import light_copy
from paam.graph.gating import apply_gate
from paam.graph.modes import evaluating
from paam.graph.own_code import run_gated
from paam.graph.record.own_lines import leave_alone
from paam.graph.record.recording import WITHIN
from paam.graph.runner import GraphRunner
from paam.graph.solve import Masks, Solution
from paam.graph.trace import MAP, Traced, is_fact

LARGER = 2 / 3
"""Images are enlarged by dividing by this: most networks that halve their maps accept that too."""
SMALL_SIDE = 64
"""Larger images are tried only if the example's are at most this size: others would take too long."""


GIVEN_SIZES = frozenset(
    (
        *("view", "reshape", "expand", "repeat", "unflatten", "tile", "broadcast_to", torch.reshape, torch.tile),
        *(torch.unflatten, torch.broadcast_to),
    )
)
"""Operations that take sizes as arguments."""


class Built(Protocol):
    """The parts of a small network; see compact.py."""

    root: nn.Module
    nodes: dict[fx.Node, fx.Node]

    def finish(self, rewired: bool) -> nn.Module: ...


Build = Callable[[Traced, Solution, Masks, Shapes | None], Built]
"""Builds the final small network, constants included; see compact.py."""


def checked(traced: Traced, solution: Solution, masks: Masks, build: Build, keep_class: bool) -> bool:
    """Whether the network must be a rewritten graph."""
    for gentle, seed in ((False, 0), (False, 1), (True, 0)):
        model = perturb(light_copy(traced.model), Noise(device_of(traced), seed), gentle=gentle).eval()
        other = dataclasses.replace(traced, model=model)
        try:
            trial = _Trial(other, solution, masks, build)
        except GraphError:
            if gentle:
                raise
            continue
        if trial.says_something:
            break
    rewired = solution.needs_graph(traced, keep_class)
    problem = trial.problem(rewired)
    if problem and not (rewired or keep_class):
        rewired = True
        problem = trial.problem(rewired)
    if problem:
        where, within = _first_difference(other, solution, masks, build, trial.inputs)
        raise GraphError(
            f"The small network would compute something else than the gated one ({problem}; {where}), so that it is"
            " refused: this network does something that paam's channel rules do not see. Please report the network."
            f"{leave_alone(within)}"
        )
    return rewired


class _Trial:
    """The gated network and the small one, on other weights and the smallest inputs that both accept."""

    def __init__(self, other: Traced, solution: Solution, masks: Masks, build: Build) -> None:
        self.other, self.solution, self.masks, self.build = other, solution, masks, build
        self.candidates = itertools.chain(random_inputs(other), tame_inputs(other))
        if (error := self._next()) is not None:
            if isinstance(error, GraphError):
                raise error
            raise GraphError(
                f"{type(other.model).__name__} answers neither random inputs nor the example, {other.batch} samples in"
                f" double precision and with other weights ({one_line(error)}), so that the small network cannot be"
                " compared with it; check=False leaves that out."
            ) from error

    def _next(self) -> Exception | None:
        """Run the gated network on the next larger inputs that it accepts; returns an error if there are none."""
        found: Exception = LookupError("there are no larger inputs")
        for inputs in self.candidates:
            self.inputs = inputs
            try:
                self.gated = observe(self.other, self.solution, self.masks, self.inputs)
            except Exception as error:  # the images are too small for it
                found = error
            else:
                return None
        return found

    @property
    def says_something(self) -> bool:
        """Whether outputs are finite and depend on the images: random weights may cut off everything before them."""
        answers = in_mode_of(self.gated.result, False)
        return has_numbers(answers) and tells_apart(answers)

    def problem(self, rewired: bool) -> str:
        """How the small network's outputs differ from the gated one's; empty if they do not."""
        while True:
            small = self.build(self.other, self.solution, self.masks, self.gated.shapes).finish(rewired)
            try:
                with evaluating(small), torch.no_grad():
                    found = self._answer(small)
            except ConstantMapError as error:  # it accepts images of the example's size only
                if self._next() is not None:
                    return f"it does not run: {one_line(error)}"
                continue
            except Exception as error:
                return f"it does not run: {one_line(error)}"
            problem = difference(found, self.gated.result, self.gated.coarse)
            return problem or self._own_codes(small) or self._other_sizes(small)

    def _other_sizes(self, small: nn.Module) -> str:
        """How outputs differ for larger images and for a single sample, where the network accepts these.

        Sizes may be hidden in numbers, and where a map was flattened.
        """
        traced = self.other
        if traced.own_code:
            return ""
        nodes = [node for node in traced.graph.nodes if node.op == "placeholder"]
        alone = [0 if traced.one_batch_size else traced.growth(node)[0] for node in nodes]
        sides = (size for node in nodes for size in traced.shapes[node.name][MAP:])
        candidates: list[Inputs] = []
        if max(sides, default=0) <= SMALL_SIDE:
            candidates = [*random_inputs(traced, (LARGER,), also_examples=False), self.inputs]
        elif self._may_hold_sizes(small):
            candidates = [self.inputs]
        for inputs in candidates:
            fewer = [x[:1] if one else x for x, one in zip(inputs, alone, strict=True)]
            if (problem := self._apart(small, fewer)) is not None:
                return problem
        return ""

    def _may_hold_sizes(self, small: nn.Module) -> bool:
        """Whether anything is computed from a size, or created for one."""
        nodes = self.other.graph.nodes
        made = any(node.op == "get_attr" and node.target in self.other.constants for node in nodes)
        given = any(isinstance(module, NoChannels) for module in small.modules())
        return made or given or any(is_fact(node) or node.target in GIVEN_SIZES for node in nodes)

    def _apart(self, small: nn.Module, inputs: Sequence[Tensor]) -> str | None:
        """How the outputs differ; None if one of the networks does not accept such inputs."""
        try:
            gated = observe(self.other, self.solution, self.masks, inputs)
        except Exception:  # e.g. it branches on sizes
            return None
        try:
            with evaluating(small), torch.no_grad():
                found = small(*(x.clone() for x in inputs))
        except ConstantMapError:
            return None
        except Exception as error:
            shapes = ", ".join(str(list(x.shape)) for x in inputs)
            return f"it does not run on inputs of shape {shapes}: {one_line(error)}"
        return difference(found, gated.result, gated.coarse)

    def _answer(self, small: nn.Module) -> Any:
        inputs = [x.clone() for x in self.inputs]
        return GraphRunner(self.other, small).run(*inputs) if self.other.own_code else small(*inputs)

    def _own_codes(self, small: nn.Module) -> str:
        """How outputs differ when the model's own code runs and the graph covers only a part of it."""
        if not self.other.own_code:
            return ""
        axes = {step.op.name: step.op.axis for step in self.solution.settled}
        gates = {site: (torch.from_numpy(mask), axes[site]) for site, mask in self.masks.items()}
        doubled = tree_map(lambda x: x.double() if x.is_floating_point() else x, self.other.examples)
        generator = torch.Generator().manual_seed(0)
        others = tree_map(lambda x: _noise(x, generator) if x.is_floating_point() else x, doubled)
        for inputs in (doubled, others):
            try:
                with evaluating(self.other.model), torch.no_grad():
                    truth = run_gated(self.other, self.other.model, gates, inputs)
            except Exception:
                if inputs is doubled:
                    raise
                continue  # it does not accept arbitrary images
            try:
                with evaluating(small), torch.no_grad():
                    found = small(*inputs)
            except Exception as error:
                return f"it does not run: {one_line(error)}"
            if problem := difference(found, truth, self.gated.coarse):
                return problem
        return ""


def _noise(like: Tensor, generator: torch.Generator) -> Tensor:
    """Values between 0 and 1, like those of images."""
    return torch.rand(like.shape, generator=generator, dtype=like.dtype).to(like.device)


class _Values(GraphRunner):
    """Runs a graph and keeps the value of every node."""

    def __init__(self, traced: Traced, model: nn.Module, graph: fx.Graph) -> None:
        super().__init__(traced, model)
        self.graph = graph
        self.found: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.found[n] = value = super().run_node(n)
        return value


def _first_difference(
    traced: Traced, solution: Solution, masks: Masks, build: Build, inputs: Inputs
) -> tuple[str, str]:
    """The first operation whose result differs, and the module whose forward() calls it."""
    gated = observe(traced, solution, masks, inputs, keep=True)
    builder = build(traced, solution, masks, gated.shapes)
    small = builder.finish(True)
    assert isinstance(small, fx.GraphModule)
    nodes = {node.name: node for node in small.graph.nodes}
    runner = _Values(traced, small, small.graph)
    where = "it cannot be told where"
    try:
        with evaluating(small), torch.no_grad():
            runner.run(*inputs)
    except Exception as error:
        where = f"it stops: {one_line(error)}"
    for step in solution.settled:
        twin = builder.nodes.get(step.op.node)
        node = nodes.get(twin.name) if twin is not None else None
        truth = gated.kept.get(step.op.name)
        if node is None or not isinstance(runner.found.get(node), Tensor) or truth is None or not len(step.out):
            continue
        if truth.dim() and truth.shape[step.op.axis] != step.width:
            continue  # a flattened map has a different size
        kept = truth.index_select(step.op.axis, torch.from_numpy(step.out).to(truth.device)) if truth.dim() else truth
        value = runner.found[node]
        if (gate := masks.get(step.op.name)) is not None and value.shape == kept.shape:
            value = apply_gate(value, torch.from_numpy(gate[step.out]).to(value.device), step.op.axis)
        if apart(value, kept) > (COARSE_TOLERANCE if gated.coarse else TOLERANCE):
            what = step.op.node.target if step.op.node.op == "call_module" else step.op.name
            return f"the two part at '{what}'", step.op.node.meta.get(WITHIN, "")
    return where, ""
