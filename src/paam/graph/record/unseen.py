"""What a model does besides calls into torch: it switches gradients or autocast on and off, queries these modes, and
draws random numbers from other generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from paam.errors import GraphError
from paam.graph.record.own_lines import at, leave_alone
from paam.graph.record.recording import LINE

REGIONS: tuple[Any, ...] = (torch.no_grad, torch.enable_grad, torch.set_grad_enabled, torch.inference_mode)


class Book(Protocol):
    without_gradient: list[bool]
    """For each enclosing grad-mode region, innermost last: whether gradients are off."""
    active: bool
    inside_layer: bool

    def here(self) -> str: ...

    def or_alone(self) -> str: ...


@contextmanager
def gradients_noticed(book: Book) -> Iterator[None]:
    """Track the regions of forward() without gradients: what is computed there has none in the graph either."""

    def entering(original: Any) -> Any:
        def enter(region: Any) -> Any:
            book.without_gradient.append(_turns_off(region, any(book.without_gradient[-1:])))
            return original(region)

        return enter

    def leaving(original: Any) -> Any:
        def leave(region: Any, *error: Any) -> Any:
            book.without_gradient.pop()
            return original(region, *error)

        return leave

    ways = [(kind, kind.__enter__, kind.__exit__) for kind in REGIONS]
    for kind, enter, leave in ways:
        kind.__enter__, kind.__exit__ = entering(enter), leaving(leave)
    try:
        yield
    finally:
        for kind, enter, leave in ways:
            kind.__enter__, kind.__exit__ = enter, leave


@contextmanager
def questions_noticed(ask: Callable[[], None]) -> Iterator[None]:
    """Call ``ask`` whenever code outside of torch queries whether gradients are on."""
    names = ("is_grad_enabled", "is_inference_mode_enabled")
    originals = {name: getattr(torch, name) for name in names}

    def noticing(original: Callable[[], bool]) -> Callable[[], bool]:
        def answer() -> bool:
            if not str(sys._getframe(1).f_globals.get("__name__", "")).startswith("torch."):
                ask()
            return original()

        return answer

    for name, original in originals.items():
        setattr(torch, name, noticing(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)


@contextmanager
def autocast_refused(model: nn.Module, book: Book) -> Iterator[None]:
    """Refuse regions of forward() that switch autocast: they cannot be inferred from the recorded calls."""
    original: Any = torch.autocast.__enter__

    def enter(region: Any) -> Any:
        if book.active and not book.inside_layer:
            raise GraphError(
                f"{type(model).__name__} turns autocast on or off in forward(){book.here()}, which the gated network"
                f" would lose. Turn it on around the call of the whole model instead.{book.or_alone()}"
            )
        return original(region)

    torch.autocast.__enter__ = enter  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__enter__ = original  # type: ignore[method-assign]


def _turns_off(region: Any, outside: bool) -> bool:
    if isinstance(region, torch.no_grad | torch.enable_grad):
        return isinstance(region, torch.no_grad)
    if isinstance(region, torch.inference_mode):
        return bool(region.mode) or outside
    return not region.mode


def refuse_backward_hooks(model: nn.Module, ignored: Sequence[str]) -> None:
    for name, module in model.named_modules():
        if (module._backward_hooks or module._backward_pre_hooks) and name not in ignored:
            raise GraphError(
                f"'{name or type(model).__name__}' has a backward hook, which the gated network would lose. Remove it"
                f" (the handle that registered it has remove()).{leave_alone(name)}"
            )


def refuse_reading_computed_weights(model: nn.Module, graph: fx.Graph) -> None:
    """Refuse reading the original tensors of a parametrization: pruning replaces them by the computed weights."""
    for node in graph.nodes:
        owner, inside, _ = str(node.target).partition(".parametrizations.")
        if inside and node.op in ("get_attr", "call_module"):
            raise GraphError(
                f"{type(model).__name__} reads the weight of '{owner}', which a parametrization computes"
                f"{at(node.meta.get(LINE))}. Call the layer instead, or remove the parametrization first, by"
                " torch.nn.utils.parametrize.remove_parametrizations()."
            )


@contextmanager
def other_random_numbers_refused(model: nn.Module) -> Iterator[None]:
    """Refuse random numbers from Python or numpy: as plain numbers they would be recorded as constants."""
    with _drawn() as names:
        yield
    if names:
        raise GraphError(
            f"{type(model).__name__} draws random numbers by {names[0]}, which cannot be recorded. Draw them by torch,"
            " and multiply by them instead of deciding by them, as a stochastic depth does; or leave the submodule that"
            " draws them alone with ignore=[...]."
        )


@contextmanager
def other_random_numbers_kept() -> Iterator[None]:
    """For ignored modules, which may use any generator."""
    with _drawn():
        yield


@contextmanager
def _drawn() -> Iterator[list[str]]:
    """Restore the states of generators outside of torch. Yields a list, filled on exit with those that were used."""
    python, others, facts = random.getstate(), np.random.get_state(legacy=False), _numpy_facts()
    used: list[str] = []
    try:
        yield used
    finally:
        if random.getstate() != python:
            used.append("Python's random")
            random.setstate(python)
        if _numpy_facts() != facts:
            used.append("numpy")
            np.random.set_state(others)


def _numpy_facts() -> list[Any]:
    """The state of numpy's generator as comparable values."""
    state = np.random.get_state(legacy=False)
    return [x.tobytes() if isinstance(x, np.ndarray) else x for x in tree_leaves(state)]
