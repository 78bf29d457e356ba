"""Intercepts and records every call that a model makes into torch, and every layer that it calls.

Branches and loops of forward() are unrolled by the recorded call; sizes are recorded as numbers that the graph
recomputes (numbers.py). A decision on tensor values cannot be recorded and ends the recording.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from paam.errors import GraphError
from paam.graph.channel_map import ADDED_LAYERS
from paam.graph.cost import COUNTERS
from paam.graph.record.arguments import leaves_of, without_numbers
from paam.graph.record.as_found import Names
from paam.graph.record.known import version
from paam.graph.record.layer_shapes import returned, uncomputed
from paam.graph.record.notebook import Notebook, numel_of, size_of
from paam.graph.record.numbers import Number, Sizes, layer_number, number, parts_of, plain
from paam.graph.record.recording import LAYERS, Recording, Shape, ValueDecisionError
from paam.graph.record.unseen import other_random_numbers_kept
from paam.graph.rules.functions import (
    RANDOM,
    READS_VALUES,
    Called,
    assigned,
    called,
    copied_into,
    is_getter,
    is_setter,
    property_as_call,
    reads_mask,
    taken_apart,
)

FACTS = frozenset(
    (
        *("dim", "ndimension", "is_floating_point", "is_complex", "get_device", "is_contiguous", "stride"),
        *("element_size", "data_ptr", "storage_offset", "is_signed", "__len__", "__repr__", "__format__"),
        *("__hash__", "__dir__", "requires_grad_", "is_inference", "untyped_storage"),
        *("is_same_size", "promote_types", "result_type", "_assert", "can_cast", "is_pinned", "retain_grad"),
        *("__reduce_ex__", "__deepcopy__"),
    )
)
"""Functions that return properties of a tensor other than its values."""

TELLS_SIZES = frozenset(("stride", "untyped_storage"))
"""Those from which a model can infer how many channels a layer has."""

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class Recorder(TorchFunctionMode):
    """Records the calls inside a ``with`` block in a notebook.

    ``leaves``: names of modules not to trace into. ``like``: an earlier recording; while the call takes the same path,
    layers are not computed again, only their shapes. ``on_value``: hook for each recorded tensor. ``shapes_only``: of
    torch's own layers only the output shape is computed. ``computed``: always compute.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Names,
        leaves: Sequence[str] = (),
        *,
        like: Recording | None = None,
        on_value: Callable[[fx.Node, Tensor], Tensor] | None = None,
        on_decision: str = "refuse",
        own_code: bool = False,
        shapes_only: bool = False,
        computed: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.book = Notebook(model, names, like, own_code)
        self.leaves = set(leaves)
        self.on_value = on_value
        self.on_decision = on_decision
        self.own_code = own_code
        self.shapes_only = shapes_only
        self.computed = computed
        self._like_shapes = like.shapes if like else {}
        self._names = names.modules
        self._macs = 0

    # Functions

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.book.inside_layer or not self.book.active:
            result = func(*args, **kwargs)
            if func in COUNTERS:
                self._macs += COUNTERS[func](result, *args, **kwargs)
            return result
        if is_getter(func):
            return self._property(func, args[0])
        if is_setter(func):
            return self._set_property(func, *args)
        name = getattr(func, "__name__", "")
        if name in ("size", "numel", "nelement") and isinstance(args[0], Tensor):
            return self._size(name, *args, **kwargs)
        if name in FACTS or (name == "type" and len(args) + len(kwargs) == 1):
            if name in TELLS_SIZES and (held := self.book.held(args[0])) is not None:
                self.book.read_layer(held)
            if name in ("is_contiguous", "stride") and self.book.depends(args[0]):
                self.book.ask("layout")
            return func(*without_numbers(args), **without_numbers(kwargs))
        if name in READS_VALUES or (name == "where" and len(args) + len(kwargs) == 1):
            return self._read_values(func, args, kwargs)
        if name in ("__getitem__", "__setitem__") and reads_mask(args[1]):
            return self._read_values(func, args, kwargs)
        return self._call(func, args, kwargs)

    def _property(self, func: Any, x: Tensor) -> Any:
        name: str = func.__self__.__name__
        if name == "shape":
            return self._size("size", x)
        if name == "nbytes":
            return self._size("numel", x) * x.element_size()
        if name in ("requires_grad", "grad_fn", "is_leaf") and self.book.depends(x):
            self.book.ask()
        operation = property_as_call(name, x)
        if operation is None or not (self.book.depends(x) or self.book.held(x) is not None):
            if name == "dtype" and self.book.depends(x):
                self.book.read_dtype(x)
            return func(x)
        op, target, arguments = operation
        return self._record(Called(op, target, arguments, {}, False), lambda: func(x))

    def _set_property(self, func: Any, x: Tensor, value: Any) -> None:
        """x.data = y replaces a tensor's contents; x.requires_grad = True is not part of a graph."""
        seen = self.book.depends(x) or self.book.held(x) is not None
        if func.__self__.__name__ == "data" and seen:
            if not self.own_code:
                self._refuse_contents(x)
            self.book.let_go([x])
        func(x, value)

    def _size(self, name: str, x: Tensor, dim: Any = None) -> Any:
        book = self.book
        if not book.depends(x):
            held = book.held(x)
            shape: tuple[Any, ...] = tuple(x.shape)
            if held is not None:
                shape = tuple(layer_number(book, size, held) for size in shape)
            sizes = Sizes(shape)
            return sizes.numel() if name != "size" else sizes if dim is None else sizes[plain(dim)]
        node = book.node(x)
        if name != "size":
            return number(book, x.numel(), numel_of, (node,))
        sizes = Sizes(number(book, size, size_of, (node, place)) for place, size in enumerate(x.shape))
        return sizes if dim is None else sizes[plain(dim)]

    def _read_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = [x for x in leaves_of((args, kwargs)) if isinstance(x, Tensor)]
        computed = any(map(self.book.depends, tensors))
        held = any(self.book.held(x) and x.is_floating_point() for x in tensors)
        if not computed and not held:
            return func(*without_numbers(args), **without_numbers(kwargs))
        told = f"{getattr(func, '__name__', func)}(){self.book.here()}"
        if self.on_decision == "refuse":
            raise ValueDecisionError(told)
        if self.on_decision == "stop":
            self.book.stop(told)
        value = func(*without_numbers(args), **without_numbers(kwargs))
        if self.on_decision == "fix":
            self.book.found.fixed.append(f"{told} = {value}")
        return value

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        book = self.book
        leaves = leaves_of((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        by_numbers = not self.own_code and any(isinstance(x, Number) for x in leaves)
        made = getattr(func, "__name__", "") in RANDOM and not self.own_code
        if not (by_numbers or made or any(book.held(x) is not None or book.depends(x) for x in tensors)):
            result = func(*without_numbers(args), **without_numbers(kwargs))
            for part in leaves_of(result):
                if isinstance(part, Tensor):
                    book.remember_constant(part)
            return result
        call = called(func, args, kwargs)
        if call.target in (assigned, "set") and self.own_code:
            book.let_go(tensors)
            return func(*without_numbers(args), **without_numbers(kwargs))
        self._refuse_hidden_writes(call, args, kwargs)
        if (name := getattr(func, "__name__", "").removeprefix("unsafe_")) in ("chunk", "split", "unbind"):
            self._note_parts(name, *args, **kwargs)
        if call.target is assigned:
            self._follow_part(*args)

        def run() -> Any:
            before = self._macs
            plain_args, plain_kwargs = without_numbers(args), without_numbers(kwargs)
            result = func(*plain_args, **plain_kwargs)
            if func in COUNTERS:
                self._macs = before + COUNTERS[func](result, *plain_args, **plain_kwargs)
            return args[0] if call.target is assigned else result

        return self._record(call, run)

    def _refuse_hidden_writes(self, call: Called, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse mutations that the graph, whose operations make new tensors, would not show."""
        kind, here, or_alone = type(self.model).__name__, self.book.here, self.book.or_alone
        if call.target == "set":
            self._refuse_contents(args[0])
        if call.target == "register_hook":
            raise GraphError(
                f"{kind} registers a hook on a tensor{here()}, which may change gradients: the gated network would lose"
                f" it. Register it on what the model returns.{or_alone()}"
            )
        if kwargs.get("out") is not None:
            raise GraphError(
                f"{kind} writes into out={here()}, a tensor that others may read; use what the operation returns."
            )
        if call.in_place and args and isinstance(args[0], Tensor) and (held := self.book.held_in(args[0])):
            if self.book.is_parameter(held):
                raise GraphError(
                    f"{kind} changes the parameter '{held}' in place{here()}: it would be another one after every call."
                    " Do that after the optimizer's step instead, or compute the changed weight and use it."
                )
            raise GraphError(
                f"{kind} changes the buffer '{held}' in place in forward(){here()}, which the gated network would not"
                f" do. Compute the changed value and use it, or change the buffer outside of forward().{or_alone()}"
            )

    def _refuse_contents(self, x: Tensor) -> None:
        what = f"'{held}'" if (held := self.book.held(x)) is not None else "a tensor"
        raise GraphError(
            f"{type(self.model).__name__} gives {what} other contents{self.book.here()}; use these where they are"
            " needed, so that the graph can have them."
        )

    def _follow_part(self, x: Tensor, key: Any, values: Any) -> None:
        """x[0] += 1 changes a view of x and assigns it to its own place: x stays valid if nothing else changed it."""
        value, part = self.book.value(x), self.book.known(values) if isinstance(values, Tensor) else None
        if value is None or part is None or value.version == version(x):
            return
        place = x[without_numbers(key)]
        same = (place.data_ptr(), place.shape, place.stride()) == (values.data_ptr(), values.shape, values.stride())
        if same and part.born == value.version and part.born + part.changes == version(x) == part.version:
            value.version = part.version

    def _note_parts(self, name: str, *args: Any, **kwargs: Any) -> None:
        """The number of parts depends on a size: code that unpacks them assumes that number."""
        x, into, dim = taken_apart(name, *args, **kwargs)
        if isinstance(into, int) and self.book.depends(x) and x.numel():
            axis = plain(dim) % x.dim()
            size = number(self.book, int(x.shape[axis]), size_of, (self.book.node(x), axis))
            count = parts_of(plain(size), into, name == "chunk")
            Number.settle(number(self.book, count, parts_of, (size, into, name == "chunk")))

    def _record(self, call: Called, run: Callable[[], Any]) -> Any:
        node = self._written(call)
        before = self._macs
        result = run()
        if self._macs > before:
            self.book.found.macs[node.name] = self._macs - before
        return self._take(result, node, call.in_place and any(result is arg for arg in call.args))

    def _written(self, call: Called) -> fx.Node:
        args, kwargs = self.book.argument(call.args), self.book.argument(call.kwargs)
        if call.in_place:
            self.book.keep_constant(call.args[1 if call.target is copied_into else 0])
        return self.book.create(call.op, call.target, args, kwargs)

    def _take(self, result: Any, node: fx.Node, changed: bool = False) -> Any:
        """Register a call's result and return it to the model. ``changed``: it is an argument, changed in place."""
        if not isinstance(result, Tensor):
            self._take_parts(result, node)
            return result
        book = self.book
        before = book.known(result)
        if not changed and (book.depends(result) or book.held(result) is not None):
            result = result.view(result.shape)  # the same tensor, but a new value of the graph
        book.remember(result, node)
        if changed and before is not None and (now := book.known(result)) is not None:
            now.born, now.changes = before.born, before.changes + now.version - before.version
        if self.on_value is not None and (replaced := self.on_value(node, result)) is not result:
            result = replaced
            if book.active:
                book.remember(result, node)
        return result

    def _take_parts(self, result: Any, node: fx.Node) -> None:
        if isinstance(result, dict):
            parts = [*result.items()]
        else:
            parts = [*enumerate(result)] if isinstance(result, tuple | list) else []
        for key, part in parts:
            if isinstance(part, Tensor):
                self.book.remember_part(part, node, key)
            elif isinstance(part, tuple | list | dict):
                self._take_parts(part, self.book.create("call_function", operator.getitem, (node, key), {}))

    def apply_function(self, kind: type) -> None:
        if self.book.active and not self.book.inside_layer and not self.own_code:
            raise GraphError(
                f"{type(self.model).__name__} calls {kind.__name__}, a custom autograd function, whose own gradient the"
                f" graph would lose{self.book.here()}. Use torch's own functions.{self.book.or_alone()}"
            )

    # Layers

    def call_module(self, original: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        book = self.book
        name = self._names.get(id(module))
        if not book.active or book.inside_layer or name is None:
            return original(module, *args, **kwargs)
        if not self._is_layer(module, name):
            return self._look_into(original, module, name, args, kwargs)
        if isinstance(module, LAYERS) and not args and kwargs.keys() == {"input"}:
            args, kwargs = (kwargs["input"],), {}
        tensors = [x for x in leaves_of((args, kwargs)) if isinstance(x, Tensor)]
        unknown = self.own_code and not isinstance(module, LAYERS) and not any(map(book.depends, tensors))
        if not tensors or unknown:
            return original(module, *args, **kwargs)
        book.inside_layer = True
        try:
            return self._layer(original, module, Called("call_module", name, args, kwargs, False))
        finally:
            book.inside_layer = False

    def _layer(self, original: Any, module: nn.Module, call: Called) -> Any:
        args = call.args
        with torch._C.DisableTorchFunction():  # queries made here are not part of the model
            node = self._written(call)
            found = self._uncomputed(module, args[0]) if args and isinstance(args[0], Tensor) else None
        if found is None:
            before = self._macs
            with other_random_numbers_kept() if call.target in self.leaves else nullcontext():
                result = original(module, *without_numbers(args), **without_numbers(call.kwargs))
            found = result, self._macs - before
        result, macs = found
        if macs:
            self.book.found.macs[node.name] = macs
        with torch._C.DisableTorchFunction():
            return self._take(result, node, getattr(module, "inplace", False) and any(result is arg for arg in args))

    def _is_layer(self, module: nn.Module, name: str) -> bool:
        if not name:  # the model itself is always traced into
            return False
        if name in self.leaves or isinstance(module, (*LAYERS, *ADDED_LAYERS)):
            return True
        return type(module).__module__.startswith("torch.nn.modules.") and not isinstance(module, CONTAINERS)

    def _uncomputed(self, layer: nn.Module, x: Tensor) -> tuple[Tensor, int] | None:
        """A layer's output with only its shape, and its MACs, where both follow without computing."""
        shape, macs = self._like_earlier(x), 0
        if shape is None and self.shapes_only and (found := returned(layer, x)) is not None:
            shape, macs = found
        if shape is None or self.computed:
            return None
        if getattr(layer, "inplace", False):
            x.narrow(0, 0, 0).zero_()  # no-op that increments the version counter, as a change would
            return x, 0
        result = uncomputed(x, shape)
        return None if result is None else (result, macs)

    def _like_earlier(self, x: Tensor) -> Shape | None:
        """The shape that a layer returned in the earlier recording, for another batch size."""
        twin = self.book.twin
        source = twin.args[0] if twin is not None and twin.args else None
        if not isinstance(source, fx.Node) or twin is None or not x.is_floating_point():
            return None
        before, after = self._like_shapes.get(source.name), self._like_shapes.get(twin.name)
        if before is None or not after or before[1:] != tuple(x.shape[1:]) or before[:1] != after[:1]:
            return None
        return (x.shape[0], *after[1:])

    def _look_into(self, original: Any, module: nn.Module, name: str, args: Any, kwargs: Any) -> Any:
        before = len(self.book.graph.nodes)
        self.book.within.append(name)
        try:
            result = original(module, *args, **kwargs)
        finally:
            self.book.within.pop()
        if not self.book.active:
            return result
        alone = len(args) == 1 and not kwargs and isinstance(result, Tensor) and result is args[0]
        if alone and len(self.book.graph.nodes) == before and name and not module.training:
            if not any(True for _ in module.parameters()) and type(module).forward is not nn.Identity.forward:
                with torch._C.DisableTorchFunction():
                    if self.book.depends(result):
                        self.book.found.transparent.add(name)
                        node = self.book.create("call_module", name, (self.book.node(result),), {})
                        return self._take(result, node)
        return result
