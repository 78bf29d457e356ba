"""Record one real call of a model as a graph: torch's own layers, and the functions between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from paam.graph.modes import switch
from paam.graph.record.as_found import AsFound, Names
from paam.graph.record.numbers import builtins_noticed, layer_number
from paam.graph.record.recorder import Recorder
from paam.graph.record.recording import LAYERS, Recording
from paam.graph.record.unseen import (
    autocast_refused,
    gradients_noticed,
    other_random_numbers_refused,
    questions_noticed,
)

COUNTS = ("in_channels", "out_channels", "in_features", "out_features", "num_features", "num_channels", "groups")
"""Attributes of a layer that change when it is cut."""


def record(
    model: nn.Module,
    found: AsFound,
    inputs: Sequence[Any],
    *,
    training: bool = False,
    leaves: Sequence[str] = (),
    like: Recording | None = None,
    on_decision: str = "refuse",
    own_code: bool = False,
    shapes_only: bool = False,
    computed: bool = False,
    held: Sequence[int] = (),
) -> Recording:
    """Record one call of the model in a given mode. The model and the states of all generators are restored.

    ``held``: axes of the inputs for which the graph only accepts the recorded sizes.
    """
    recorder = Recorder(
        model,
        found.names,
        leaves,
        like=like,
        on_decision=on_decision,
        own_code=own_code,
        shapes_only=shapes_only,
        computed=computed,
    )
    book = recorder.book
    devices = [x.device for x in tree_leaves(inputs) if isinstance(x, Tensor) and x.is_cuda]
    with ExitStack() as stack:
        stack.enter_context(found)
        switch(model, True)  # makes models drop caches that evaluation mode derived from their weights
        switch(model, training)
        stack.enter_context(torch.random.fork_rng(devices))
        _notice_counts(recorder, found.names)
        stack.enter_context(_calls_noticed(recorder))
        stack.enter_context(builtins_noticed())
        stack.enter_context(torch.set_grad_enabled(training))
        stack.enter_context(gradients_noticed(book))
        stack.enter_context(questions_noticed(book.ask))
        if not own_code:
            stack.enter_context(autocast_refused(model, book))
        stack.enter_context(other_random_numbers_refused(model))
        arguments = book.take_inputs(inputs)
        stack.callback(book.forget)
        with recorder:
            book.active = True
            if held:
                book.hold([x for x in tree_leaves(arguments) if isinstance(x, Tensor)], held)
            book.found.result = model(*arguments)
        book.finish()
    return book.found


def run_seen(
    model: nn.Module,
    inputs: Sequence[Any],
    keywords: Mapping[str, Any],
    leaves: Sequence[str],
    replace: Mapping[str, Callable[[fx.Node, Tensor], Tensor]],
) -> tuple[Any, set[str]]:
    """Call a model unchanged, but replace the outputs of some nodes of its recording, by node name.

    Returns the result, and the names that were not reached. After the last one, interception stops.
    """
    waiting = set(replace)

    def on_value(node: fx.Node, value: Tensor) -> Tensor:
        if node.name not in waiting:
            return value
        waiting.discard(node.name)
        recorder.book.active = bool(waiting)
        return replace[node.name](node, value)

    recorder = Recorder(model, Names(model), leaves, on_value=on_value, on_decision="pass", own_code=True)
    with _calls_noticed(recorder), recorder:
        recorder.book.active = True
        try:
            return model(*inputs, **keywords), waiting
        finally:
            recorder.book.forget()


@contextmanager
def _calls_noticed(recorder: Recorder) -> Iterator[None]:
    """Route every call of a module and of a custom autograd function to the recorder."""
    original = nn.Module.__call__
    inner: Any = torch.autograd.Function.__mro__[1]  # its apply() is called even through saved references to Function's

    def patched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return recorder.call_module(original, module, args, kwargs)

    def applied(kind: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.apply_function(kind)
        return super(inner, kind).apply(*args, **kwargs)

    nn.Module.__call__ = patched  # type: ignore[method-assign]
    inner.apply = classmethod(applied)
    try:
        yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]
        del inner.apply


def _notice_counts(recorder: Recorder, names: Names) -> None:
    """Detect reads of a layer's channel counts by anything but the layer itself, until the model is restored."""
    for name, module in names.every:
        if isinstance(module, LAYERS):
            own = vars(module)
            for count in COUNTS:
                if type(value := own.get(count)) is int:
                    own[count] = layer_number(recorder.book, value, f"{name}.{count}")
