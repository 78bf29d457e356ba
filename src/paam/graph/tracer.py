"""torch.fx's tracer, taught whose layers to leave whole, to settle shapes, and that some arguments are optional."""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn

from paam.graph.channel_map import ADDED_LAYERS, whole_shape
from paam.graph.modes import evaluating

LAYERS = (nn.modules.conv._ConvNd, nn.Linear, nn.modules.batchnorm._BatchNorm)

NOT_THE_MODELS = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}")
"""Where code lies that is not the model's own."""

CONSTANT = "_tensor_constant"
"""How torch.fx names the tensors that a forward() makes of nothing."""

IN_PLACE = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}

SIZES = ("size", "dim", "ndimension", "numel", "is_floating_point", "get_device")
FACTS = ("shape", "ndim", "dtype", "device", "is_cuda", "requires_grad")
"""Methods and attributes of a tensor that do not depend on its values."""


class Tracer(fx.Tracer):
    """Looks into modules as far as torch's own, and not into anybody's layers built upon a convolution or a batch norm.

    Whether such a layer still behaves like the one it is built upon is tried out in layers.py. ``ignored`` modules are
    not looked into either. A forward() may branch and loop on shapes: they are settled for the shapes of ``examples``.
    Optional arguments for which there is no example keep their defaults.
    """

    proxy_buffer_attributes = True  # a buffer that forward() reads is a value of the graph

    def __init__(self, examples: Sequence[Tensor], ignored: Sequence[str]) -> None:
        super().__init__()
        self.examples = examples
        self.ignored = ignored
        self.values: dict[fx.Node, Any] = {}
        self.settling = False
        self.settled: set[fx.Node] = set()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        known = isinstance(m, (*LAYERS, *ADDED_LAYERS)) or super().is_leaf_module(m, module_qualified_name)
        return known or module_qualified_name in self.ignored

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        function, args = super().create_args_for_root(root_fn, is_module, concrete_args)
        for place, arg in enumerate(args):
            optional = isinstance(arg, fx.Proxy) and arg.node.args and not str(arg.node.target).startswith("*")
            if optional and place > len(self.examples):  # the first argument is the model itself
                args[place] = arg.node.args[0]
                self.graph.erase_node(arg.node)
        return function, args

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Remember the line of the model's code that made a node, for refusals to quote."""
        node = super().create_node(*args, **kwargs)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(NOT_THE_MODELS):
            frame = frame.f_back
        if frame is not None:
            node.meta["line"] = (frame.f_code.co_filename, frame.f_lineno)
        return node

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def to_bool(self, obj: fx.Proxy) -> bool:
        return bool(self.settle(obj.node)) if is_fact(obj.node) else super().to_bool(obj)

    def iter(self, obj: fx.Proxy) -> Any:
        if not is_fact(obj.node):
            return super().iter(obj)
        length = len(self.settle(obj.node))
        return iter([self.create_proxy("call_function", operator.getitem, (obj, place), {}) for place in range(length)])

    def settle(self, wanted: fx.Node) -> Any:
        """What a node computes for the examples. Every node of the graph so far is computed once."""
        runner = fx.Interpreter(self.root, graph=self.graph)
        runner.extra_traceback = False
        runner.env = self.values
        runner.args_iter = iter(self.examples)
        self.settling = True
        try:
            with evaluating(self.root), torch.no_grad():
                for node in self.graph.nodes:
                    if node not in self.values:
                        self.values[node] = runner.run_node(node)
        finally:
            self.settling = False
        self.settled.add(wanted)
        return self.values[wanted]

    def create_arg(self, a: Any) -> Any:
        """A tensor that forward() makes of nothing is a constant; the same one again is the same constant."""
        if isinstance(a, Tensor) and not isinstance(a, nn.Parameter):
            for name, known in vars(self.root).items():
                if name.startswith(CONSTANT) and _same(a, known):
                    return self.create_node("get_attr", name, (), {})
        return super().create_arg(a)

    # While something is settled, modules are really called, and not recorded.

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        return forward(*args, **kwargs) if self.settling else super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        return attr_val if self.settling else super().getattr(attr, attr_val, parameter_proxy_cache)


class _Number:
    """A value under tracing that can be used as a number where it is a size."""

    tracer: fx.proxy.TracerBase
    node: fx.Node

    def _settled(self, what: str) -> Any:
        assert isinstance(self.tracer, Tracer)
        if not is_fact(self.node):
            raise TypeError(f"{what} of a value that is known only when the network runs")
        return self.tracer.settle(self.node)

    def __int__(self) -> int:
        return int(self._settled("int()"))

    def __index__(self) -> int:
        return int(self._settled("an index made"))

    def __float__(self) -> float:
        return float(self._settled("float()"))

    def __len__(self) -> int:
        return len(self._settled("len()"))


class _Attribute(_Number, fx.proxy.Attribute):
    """x.shape, say."""


class _Proxy(_Number, fx.Proxy):
    """Records x += y as what it is: torch.fx would take it for x = x + y, and lose what happens to aliases of x."""

    def _in_place(self, operation: Any, other: Any) -> fx.Proxy:
        if is_fact(self.node):  # numbers cannot be changed
            operation = IN_PLACE[operation]
        return self.tracer.create_proxy("call_function", operation, (self, other), {})

    def __iadd__(self, other: Any) -> fx.Proxy:
        return self._in_place(operator.iadd, other)

    def __isub__(self, other: Any) -> fx.Proxy:
        return self._in_place(operator.isub, other)

    def __imul__(self, other: Any) -> fx.Proxy:
        return self._in_place(operator.imul, other)

    def __itruediv__(self, other: Any) -> fx.Proxy:
        return self._in_place(operator.itruediv, other)

    def __getattr__(self, k: str) -> fx.proxy.Attribute:
        return _Attribute(self, k)


def is_fact(node: fx.Node) -> bool:
    """Whether a value follows from the shapes and types of tensors alone, not from what they hold."""
    if (node.op == "call_method" and node.target in SIZES) or node.target is whole_shape:
        return True
    if node.op == "call_function" and node.target is getattr:
        return node.args[1] in FACTS
    called = node.op in ("call_function", "call_method") and len(node.all_input_nodes) > 0
    return called and all(map(is_fact, node.all_input_nodes))


def _same(a: Tensor, b: object) -> bool:
    return isinstance(b, Tensor) and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
