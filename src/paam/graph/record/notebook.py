"""The graph of a recording during recording, and what is known about the tensors seen so far."""

from __future__ import annotations

import inspect
import operator
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from paam.errors import GraphError
from paam.graph.record.as_found import Names
from paam.graph.record.known import Known, version
from paam.graph.record.numbers import LayerNumber, Number, expect, itself, number
from paam.graph.record.own_lines import at, leave_alone, quoted, running_line
from paam.graph.record.recording import CONSTANT, DTYPE, FACT, LINE, WITHIN, Recording, same_call, same_tensor


class Notebook:
    """Records one call of a model. Tensors carry their known state as an attribute during recording.

    ``like``: an earlier recording, followed in parallel while the call takes the same path. ``own_code``: the model's
    own code will also run the small network, so that only outputs of weighted layers are recorded; everything else is
    an input of the graph.
    """

    def __init__(self, model: nn.Module, names: Names, like: Recording | None, own_code: bool) -> None:
        self.model = model
        self.own_code = own_code
        self.found = Recording()
        self.graph = self.found.graph
        self.active = False
        self.inside_layer = False
        self.within: list[str] = []
        """Names of the modules whose forward() is running, innermost last."""
        self.without_gradient: list[bool] = []
        """For each enclosing grad-mode region, innermost last: whether gradients are off."""
        self.twin: fx.Node | None = None
        """The node of the earlier recording that matches the last one."""
        self._like = iter([node for node in like.graph.nodes if node.op != "placeholder"]) if like else None
        self._held = names.tensors
        self._read: dict[str, fx.Node] = {}
        self._computed: dict[Any, fx.Node] = {}
        self._dtypes: dict[torch.dtype, fx.Node] = {}
        self._first: Tensor | None = None
        self._marked: list[weakref.ref[Tensor]] = []
        self._alive: list[weakref.ref[Tensor]] = []  # values of the graph that are still referenced
        self._escaped: list[fx.Node] = []
        self._kept: list[Number] = []  # keeps numbers alive: they are distinguished by id()

    # Begin and end

    def take_inputs(self, inputs: Sequence[Any]) -> list[Any]:
        """Copies of the inputs, registered in the graph under the names of forward()'s arguments."""
        parameters = [*inspect.signature(self.model.forward).parameters.values()]
        named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        names = named[: len(inputs)] + [f"input_{place}" for place in range(len(named), len(inputs))]

        def take(name: str, value: Any) -> Any:
            if isinstance(value, Tensor):
                copied = value.clone()
                self._first = copied if self._first is None else self._first
                if not self.own_code:
                    self.remember(copied, self.graph.placeholder(name))
                return copied
            if isinstance(value, tuple | list):
                return type(value)(take(f"{name}_{place}", part) for place, part in enumerate(value))
            if isinstance(value, dict):
                return {key: take(f"{name}_{key}", part) for key, part in value.items()}
            return value

        return [take(name, value) for name, value in zip(names, inputs, strict=True)]

    def hold(self, inputs: Sequence[Any], axes: Sequence[int]) -> None:
        """Make the graph refuse inputs whose sizes along ``axes`` differ from the recorded ones; 2: all from axis 2."""
        with torch._C.DisableTorchFunction():
            for x in inputs:
                for place, size in enumerate(x.shape):
                    if min(place, 2) in axes:
                        self.decide(itself, (number(self, size, size_of, (self.node(x), place)),), size, line="")

    def finish(self) -> None:
        if self.own_code:
            if not self.found.decision:
                self._escaped += self._still_held()
            # Unread values are also computed, by code that the small network runs too.
            shapes = self.found.shapes
            unread = [n for n in self.graph.nodes if n.name in shapes and not any(map(self._makes_tensors, n.users))]
            self.graph.output(tuple(dict.fromkeys([*self._escaped, *unread])))
        else:
            self.graph.output(self._outputs(self.found.result))

    def _makes_tensors(self, node: fx.Node) -> bool:
        """Whether a reader is more than a size: a tensor, or something with a tensor among its parts."""
        return node.name in self.found.shapes or any(user.name in self.found.shapes for user in node.users)

    def _outputs(self, result: Any) -> Any:
        if not isinstance(result, Tensor | tuple | list | dict):
            raise GraphError(
                f"{type(self.model).__name__} returns {type(result).__name__}; return tensors, or tuples, lists and"
                " dictionaries of them."
            )
        if isinstance(result, dict):
            return {key: self._output(_unnamed(part)) for key, part in result.items()}
        if isinstance(result, tuple | list):
            named = hasattr(result, "_fields")
            parts = [self._output(_unnamed(part) if named else part) for part in result]
            return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
        return self.argument(result)

    def _output(self, part: Any) -> Any:
        """A part of forward()'s result: sizes are recomputed, other numbers are constants."""
        return self.argument(part) if isinstance(part, Number) or _is_plain(part) else self._outputs(part)

    def stop(self, decision: str) -> None:
        """From here on the model's own code runs unrecorded: it may read any value of the graph still referenced."""
        self.found.decision = decision
        self._escaped += self._still_held()
        self.active = False

    def forget(self) -> None:
        """Remove the marks from tensors that outlive the recording."""
        self.active = False
        for ref in self._marked:
            if (tensor := ref()) is not None:
                vars(tensor).pop("_paam_known", None)
        self._marked.clear()

    def here(self) -> str:
        return at(running_line())

    def or_alone(self) -> str:
        """Advice for an error: ignore the module that is running."""
        return leave_alone(self.within[-1] if self.within else "")

    # Tensors

    def known(self, tensor: Tensor) -> Known | None:
        """What is known about a tensor, if it was seen."""
        known: Known | None = getattr(tensor, "_paam_known", None)
        return known if known is not None and known.book is self else None

    def value(self, tensor: Tensor) -> Known | None:
        """What is known about a tensor that the graph computes."""
        known = self.known(tensor)
        return None if known is None or (known.node is None and known.part is None) else known

    def depends(self, x: Any) -> bool:
        """Whether a tensor was computed from the inputs, their sizes, or the model's parameters and buffers."""
        return isinstance(x, Tensor) and self.value(x) is not None

    def held(self, tensor: Any) -> str | None:
        """The name of a parameter or buffer."""
        return self._held.get(id(tensor))

    def held_in(self, tensor: Tensor) -> str | None:
        """The name of the parameter or buffer whose memory a tensor shares: itself, a view, or its x.data."""
        if (name := self.held(tensor)) is not None or not self._memory:
            return name
        return self._memory.get(tensor.untyped_storage().data_ptr())

    @cached_property
    def _memory(self) -> dict[int, str]:
        tensors = (*self.model.named_parameters(), *self.model.named_buffers())
        return {x.untyped_storage().data_ptr(): name for name, x in tensors if x.numel()}

    def is_parameter(self, name: str) -> bool:
        owner, _, last = name.rpartition(".")
        return last in self.model.get_submodule(owner)._parameters

    def remember(self, tensor: Tensor, node: fx.Node) -> None:
        """Register a tensor as the output of a node."""
        seen = version(tensor)
        self._mark(tensor, Known(self, node, seen, born=seen))
        self.describe(node, tensor)
        if self.own_code:
            self._alive.append(weakref.ref(tensor))

    def remember_part(self, tensor: Tensor, node: fx.Node, key: Any) -> None:
        self._mark(tensor, Known(self, None, version(tensor), (node, key)))
        if self.own_code:
            self._alive.append(weakref.ref(tensor))

    def remember_constant(self, tensor: Tensor) -> None:
        self._mark(tensor, Known(self, None, version(tensor)))

    def _mark(self, tensor: Tensor, known: Known) -> None:
        known.without_gradient = any(self.without_gradient[-1:])
        tensor._paam_known = known  # type: ignore[attr-defined]
        self._marked.append(weakref.ref(tensor))

    def describe(self, node: fx.Node, tensor: Tensor) -> None:
        self.found.shapes[node.name] = tuple(tensor.shape)
        node.meta[DTYPE] = tensor.dtype

    def node(self, tensor: Tensor) -> fx.Node:
        known = self.value(tensor)
        if known is None:
            return self._stored(tensor)
        if known.version != version(tensor) and self.own_code:
            self.let_go([tensor])
            return self.node(tensor)
        if known.version != version(tensor):
            raise GraphError(
                f"{type(self.model).__name__} changes a value in place while a view or an alias of it is still"
                f" read{self.here()}; use the copying form of that operation."
            )
        if known.node is None:
            assert known.part is not None
            known.node = self.create("call_function", operator.getitem, known.part, {})
            self.describe(known.node, tensor)
        if not known.without_gradient or any(self.without_gradient[-1:]):
            return known.node
        if known.detached is None:
            known.detached = self.create("call_method", "detach", (known.node,), {})
            self.describe(known.detached, tensor)
        return known.detached

    def _stored(self, tensor: Tensor) -> fx.Node:
        """The node that reads a parameter, a buffer, or a tensor from outside the model."""
        name = self.held(tensor)
        if name is None and self.own_code:
            sources = sum(node.op == "placeholder" for node in self.graph.nodes)
            self.remember(tensor, self.graph.placeholder(f"source_{sources}" if sources else "source"))
            return self.node(tensor)
        if name is None:
            name = next((known for known, other in self.found.constants.items() if same_tensor(other, tensor)), None)
            if name is None:
                name = f"{CONSTANT}{len(self.found.constants)}"
                self.found.constants[name] = tensor
                if self.known(tensor) is not None:
                    self.found.made.add(name)
        if name not in self._read:
            self._read[name] = node = self.create("get_attr", name, (), {})
            self.describe(node, tensor)
        return self._read[name]

    def keep_constant(self, changed: Any) -> None:
        """Copy a tensor that the graph reads as a constant before it is changed in place."""
        for name, constant in self.found.constants.items():
            if constant is changed:
                self.found.constants[name] = constant.clone()

    def let_go(self, tensors: Sequence[Tensor]) -> None:
        """The model's own code does something unsupported with these tensors: their values are read completely."""
        for tensor in tensors:
            if (known := self.value(tensor)) is not None:
                known.version = version(tensor)
                self._escaped.append(self.node(tensor))
                vars(tensor).pop("_paam_known")

    def _still_held(self) -> list[fx.Node]:
        """The values that may still be read."""
        return [self.node(tensor) for tensor in [ref() for ref in self._alive] if tensor is not None]

    # Nodes

    def create(
        self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, fact: bool = False
    ) -> fx.Node:
        node = self.graph.create_node(op, target)
        node.args, node.kwargs = args, kwargs  # create_node() would traverse them, which is slower than all the rest
        node.meta[LINE] = running_line()
        node.meta[WITHIN] = self.within[-1] if self.within else ""
        if fact:
            node.meta[FACT] = True
        if self._like is not None:
            self.twin = next(self._like, None)
            if self.twin is None or not same_call(node, self.twin):
                self._like = self.twin = None
        return node

    def argument(self, value: Any) -> Any:
        """An argument in graph form: nodes instead of tensors and numbers."""
        if isinstance(value, Tensor):
            return self.node(value)
        if value is None or type(value) in (int, bool, float, str):
            return value
        if isinstance(value, Number):
            return value.node()
        if isinstance(value, LayerNumber):
            return value.settle()
        if isinstance(value, np.generic):
            return value.item()  # fx code generation supports plain Python numbers only
        if isinstance(value, tuple):
            parts = [self.argument(part) for part in value]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        if isinstance(value, list):
            return [self.argument(part) for part in value]
        if isinstance(value, dict):
            return {key: self.argument(part) for key, part in value.items()}
        if isinstance(value, slice):
            return slice(*(self.argument(bound) for bound in (value.start, value.stop, value.step)))
        if isinstance(value, torch.dtype) and value in self._dtypes:
            return self._fact(self._dtypes[value], "dtype", value)
        if isinstance(value, torch.device) and self._first is not None and value == self._first.device:
            return self._fact(self.node(self._first), "device", value)
        return value

    # Numbers

    def compute(self, function: Callable[..., Any], args: tuple[Any, ...], value: Any) -> fx.Node:
        """The node of a number: part of a shape, or computed from other numbers."""
        key = (function, tuple(id(arg) if isinstance(arg, Number) else arg for arg in args))
        if key not in self._computed:
            self._kept += [arg for arg in args if isinstance(arg, Number)]
            if function is size_of:
                tensor, place = args
                function, mapped = operator.getitem, (self._fact(tensor, "shape"), place)
            else:
                mapped = self.argument(args)
            if function is numel_of:
                node = self.create("call_method", "numel", mapped, {}, fact=True)
            else:
                node = self.create("call_function", function, mapped, {}, fact=True)
            self._computed[key] = node
            self.found.numbers[node.name] = value
        return self._computed[key]

    def _fact(self, tensor: fx.Node, name: str, value: Any = None) -> fx.Node:
        """The node of x.shape, x.dtype or x.device."""
        if (name, tensor) not in self._computed:
            node = self.create("call_function", getattr, (tensor, name), {}, fact=True)
            self._computed[name, tensor] = node
            self.found.numbers[node.name] = self.found.shapes[tensor.name] if value is None else value
        return self._computed[name, tensor]

    def read_dtype(self, x: Tensor) -> None:
        """The dtype of a tensor is read, perhaps to convert another tensor: the graph then reads it from this one."""
        self._dtypes[x.dtype] = self.node(x)

    def decide(
        self, function: Callable[..., Any], args: tuple[Any, ...], outcome: Any, line: str | None = None
    ) -> None:
        """Require a result computed from numbers to be as recorded. ``line``: of the model, if not the running one."""
        key = ("decided", function, tuple(id(arg) if isinstance(arg, Number) else arg for arg in args))
        if key not in self._computed:
            self._kept += [arg for arg in args if isinstance(arg, Number)]
            mapped = self.argument(args)
            asked = mapped[0]
            if function is not itself:
                asked = self.create("call_function", function, mapped, {}, fact=True)
            told = (asked, outcome, quoted(running_line()) if line is None else line)
            self._computed[key] = self.create("call_function", expect, told, {}, fact=True)

    def ask(self, what: str = "gradients") -> None:
        if self.active and not self.inside_layer:
            self.found.asks.add(what)

    def read_layer(self, name: str) -> None:
        if not self.inside_layer:
            self.found.read_numbers.update((name, name.rpartition(".")[0]))


def size_of(node: fx.Node, place: int) -> None:
    """Marker: one size of a tensor."""


def numel_of(node: fx.Node) -> None:
    """Marker: the number of a tensor's values."""


def _unnamed(part: Any) -> Any:
    """Refuse a named tuple where torch.fx cannot generate code for it."""
    if hasattr(part, "_fields"):
        raise GraphError(
            f"forward() returns a {type(part).__name__} inside of a dictionary or of another named tuple, which a graph"
            " cannot do; return a plain tuple there."
        )
    return part


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | bool | int | float)
