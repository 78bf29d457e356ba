"""Compare a copy of a model with its recording: are their outputs equal? See verify.py."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from paam.errors import GraphError, one_line
from paam.graph.checks.differences import apart, difference, has_numbers
from paam.graph.checks.inputs import Inputs, device_of
from paam.graph.checks.layer_state import comparable
from paam.graph.modes import in_mode
from paam.graph.record.as_found import OF_MODULES, AsFound
from paam.graph.record.own_lines import leave_alone, quoted
from paam.graph.record.recording import LAYERS, LINE, WITHIN
from paam.graph.record.unseen import other_random_numbers_kept
from paam.graph.record.ways import WAYS, leading_to
from paam.graph.rewired import GraphModel, as_graph_model
from paam.graph.trace import Traced

REMEMBERED = (int, float, bool, str, type(None), dict, list, set, tuple)
"""Types of attributes in which a forward() may keep state between calls; tensors are buffers, or constants."""


def is_double(traced: Traced) -> bool:
    return any(p.dtype == torch.float64 for p in traced.model.parameters())


class StateError(GraphError):
    """The model keeps state between calls."""


def _remembered(model: nn.Module) -> dict[tuple[str, str], Hashable]:
    """Plain attributes of modules, by module and name, in comparable form."""
    return {
        (owner, name): comparable(value)
        for owner, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in OF_MODULES and type(value) in REMEMBERED
    }


def _answers(network: nn.Module, inputs: Sequence[Tensor]) -> Any:
    random.seed(0)  # ignored modules may use any generator
    np.random.seed(0)
    return tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, network(*inputs))


class Trial:
    """A copy of the model, and its graph with the layers of that copy."""

    def __init__(self, traced: Traced, model: nn.Module) -> None:
        self.traced = traced
        self.double = is_double(traced)
        self.dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        self.model = model.requires_grad_("gradients" in traced.asks)
        self.graph: GraphModel = as_graph_model(dataclasses.replace(traced, model=self.model))
        self.buffers = _compared_buffers(traced, self.model)
        self.trained = False
        """Whether any outputs were compared in training mode."""
        self.said = ""
        """The model's error for inputs that it does not accept."""

    def makes_numbers(self, candidates: Iterable[Inputs]) -> bool:
        """Whether the model's output with these weights is finite, on the first of these inputs that it accepts."""
        for inputs in candidates:
            with suppress(Exception):  # the images are too small for it
                return has_numbers(self._run(self.model, inputs, False, False)[0])
        return True

    def problem(self, inputs: Inputs) -> str | None:
        """How the graph's outputs differ from the model's; None if one of them does not accept such inputs."""
        evaluation = self.problem_in(inputs, training=False, gradients=False)
        if evaluation is None or evaluation:
            return evaluation
        training = self.problem_in(inputs, training=True, gradients=True)
        self.trained |= training is not None
        if training:
            return f"in training {training}"
        for mode in (False, True) if "gradients" in self.traced.asks else ():
            if problem := self.problem_in(inputs, training=mode, gradients=not mode):
                return f"in {WAYS[mode]} with gradients {'off' if mode else 'on'} {problem}"
        if "layout" in self.traced.asks:
            lying = tuple(x.transpose(0, -1).contiguous().transpose(0, -1) for x in inputs)
            if problem := self.problem_in(lying, training=False, gradients=False):
                return f"for inputs that lie otherwise in memory {problem}"
        return ""

    def problem_in(self, inputs: Inputs, *, training: bool, gradients: bool) -> str | None:
        try:
            truth, left = self._run(self.model, inputs, training, gradients)
        except StateError:
            raise
        except Exception as error:  # a model may raise anything for inputs of another size
            self.said = one_line(error)
            return None
        try:
            found, also_left = self._run(self.graph, inputs, training, gradients)
        except GraphError:  # the graph reports that its path would differ for these sizes
            return None
        except Exception as error:
            return f"it does not run: {one_line(error)}"
        changed = next((name for name in self.buffers if apart(also_left[name], left[name]) > 1e-6), "")
        return f"buffer '{changed}' ends up different" if changed else difference(found, truth, not self.double)

    def _run(
        self, network: nn.Module, inputs: Inputs, training: bool, gradients: bool
    ) -> tuple[Any, dict[str, Tensor]]:
        """The outputs, and the model's buffers afterwards, which are then restored."""
        device = device_of(self.traced)

        def given() -> list[Tensor]:
            floats = [x.is_floating_point() for x in inputs]
            copies = [x.to(self.dtype, copy=True) if one else x.clone() for x, one in zip(inputs, floats, strict=True)]
            wanted = gradients and "gradients" in self.traced.asks
            return [x.requires_grad_(wanted and one) for x, one in zip(copies, floats, strict=True)]

        with ExitStack() as stack:
            found = stack.enter_context(AsFound(self.model, self.traced.ignore))
            stack.enter_context(in_mode(self.model, training))
            stack.enter_context(in_mode(network, training))
            stack.enter_context(torch.set_grad_enabled(gradients))
            stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
            stack.enter_context(other_random_numbers_kept())
            stack.enter_context(_SameRandomNumbers())  # type: ignore[no-untyped-call]
            before = _remembered(self.model) if network is self.model else {}
            answers = _answers(network, given())
            left = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
            now = _remembered(self.model) if network is self.model else {}
            if changed := [place for place, value in now.items() if place not in before or before[place] != value]:
                found.put_back_buffers()
                self._refuse_memory(changed[0], _answers(network, given()), answers)
            return answers, left

    def _refuse_memory(self, changed: tuple[str, str], again: Any, answers: Any) -> None:
        """Refuse state that forward() keeps between calls, such as a step counter: in a graph it would never change."""
        if difference(again, answers, not self.double):
            owner, name = changed
            raise StateError(
                f"{type(self.traced.model).__name__} keeps '{f'{owner}.{name}'.lstrip('.')}' from one call to the next,"
                " and its answers change by that; the gated network would not follow. Change it outside of forward(),"
                f" or keep it in a buffer.{leave_alone(owner)}"
            )

    def first_difference(self, inputs: Inputs) -> tuple[str, str]:
        """The first layer whose output differs in the graph, and the module whose forward() calls it."""
        calls: dict[str, list[Any]] = {}
        self._watched(self.model, inputs, lambda name, result: calls.setdefault(name, []).append(result))
        made: dict[str, list[Any]] = {}
        order: list[str] = []

        def note(name: str, result: Any) -> None:
            made.setdefault(name, []).append(result)
            order.append(name)

        self._watched(self.graph, inputs, note)
        callers = {str(node.target): node.meta for node in self.traced.graph.nodes if node.op == "call_module"}
        places: dict[str, Iterator[int]] = {}
        for name in order:
            place = next(places.setdefault(name, itertools.count()))
            known = calls.get(name, [])
            if place >= len(known) or difference(made[name][place], known[place], not self.double):
                return f", first at '{name}', {quoted(callers[name].get(LINE))}", callers[name].get(WITHIN, "")
        return "", ""

    def _watched(self, network: nn.Module, inputs: Inputs, tell: Callable[[str, Any], None]) -> None:
        """Run a network and pass what each layer returns to ``tell``."""
        layers = {str(node.target) for node in self.traced.graph.nodes if node.op == "call_module"}
        hooks = [
            module.register_forward_hook(lambda _module, _inputs, result, name=name: tell(name, result))
            for name, module in self.model.named_modules()
            if name in layers
        ]
        with suppress(Exception):  # if a layer raises, the difference is at the layer before
            self._run(network, inputs, False, False)
        for hook in hooks:
            hook.remove()


def _compared_buffers(traced: Traced, model: nn.Module) -> list[str]:
    """Names of all buffers, except those of torch's own layers whose output is not read."""
    live = leading_to(traced.graph.output_node().args)
    layers = {str(node.target) for node in traced.graph.nodes if node.op == "call_module" and node not in live}
    unread = tuple(f"{name}." for name in layers if isinstance(model.get_submodule(name), LAYERS))
    return [name for name, _ in model.named_buffers() if not name.startswith(unread)]


class _SameRandomNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes random numbers independent of earlier draws: in a graph, training-only nodes are at the end."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            torch.manual_seed(0)
        return func(*args, **(kwargs or {}))
