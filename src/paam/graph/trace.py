"""Model and example inputs -> an fx graph with the shape of every value."""

from __future__ import annotations

import hashlib
import math
import operator
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from paam.errors import GraphError, one_line

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Traced:
    """A model as a graph. ``module`` shares the model's parameters; ``shapes`` holds tensor values by node name."""

    model: nn.Module
    module: fx.GraphModule
    shapes: dict[str, Shape]
    examples: tuple[Tensor, ...]

    @property
    def fingerprint(self) -> str:
        """Identifies architecture, not weights: the graph, and the name and shape of every parameter and buffer."""
        lines = []
        for node in self.module.graph.nodes:
            # A module's repr tells what its tensors do not: strides, padding, kind of activation.
            what = self.module.get_submodule(node.target) if node.op == "call_module" else function_name(node.target)
            lines.append(
                f"{node.op} {node.target if node.op == 'call_module' else ''} {what} {node.args} {node.kwargs}"
            )
        lines += [f"{name} {tuple(value.shape)}" for name, value in self.model.state_dict().items()]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def trace(model: nn.Module, example_inputs: Tensor | tuple[Tensor, ...]) -> Traced:
    """Trace in evaluation mode and record shapes. The model is left as it was found."""
    examples = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    with evaluating(model), torch.no_grad():
        try:
            module = fx.GraphModule(model, fx.Tracer().trace(model), type(model).__name__)
            _make_functional(module)
        except Exception as error:  # tracing runs the user's forward(): anything can come out of it
            raise GraphError(_blame(model, error)) from error
        shapes = _record_shapes(module, examples)
    return Traced(model, module, shapes, examples)


IN_PLACE = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}


def _make_functional(module: fx.GraphModule) -> None:
    """Make every value what its node computes: later readers of a value changed in place read the changed one.

    Functions and methods become their copying forms. Modules keep their flag, which is the model's own; compact.py
    clears it in its copy, where two nodes may come to share one tensor.
    """
    order = {node: place for place, node in enumerate(module.graph.nodes)}
    for node in module.graph.nodes:
        method = node.op == "call_method" and node.target.endswith("_") and not node.target.endswith("__")
        function = node.op == "call_function" and (node.target in IN_PLACE or node.kwargs.get("inplace", False))
        layer = node.op == "call_module" and getattr(module.get_submodule(node.target), "inplace", False)
        if not (method or function or layer):
            continue
        for reader in list(node.args[0].users):
            if order[reader] > order[node]:
                reader.replace_input_with(node.args[0], node)
        if method:
            node.target = node.target.removesuffix("_")
        elif node.target in IN_PLACE:
            node.target = IN_PLACE[node.target]
        elif function:
            node.kwargs = {**node.kwargs, "inplace": False}
    module.recompile()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, every module's own mode restored outside."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def positions(shape: Shape, axis: int) -> int:
    """How many values each channel has in one sample: H * W for a feature map [N, C, H, W]."""
    return math.prod(shape[1:]) // shape[axis]


class _ShapeRecorder(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False
        self.shapes: dict[str, Shape] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor):
            self.shapes[n.name] = tuple(value.shape)
        return value


def _record_shapes(module: fx.GraphModule, examples: tuple[Tensor, ...]) -> dict[str, Shape]:
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    if len(examples) > len(inputs):
        raise GraphError(f"The model takes {len(inputs)} inputs; {len(examples)} examples were given.")
    recorder = _ShapeRecorder(module)
    try:
        recorder.run(*examples)
    except Exception as error:  # the user's operations on the user's input
        shapes = ", ".join(str(list(x.shape)) for x in examples)
        raise GraphError(
            f"The model does not run on the example input of shape {shapes}: {one_line(error)}."
            " Give an example of the shape that the model is used with."
        ) from error
    return recorder.shapes


def _blame(model: nn.Module, error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    torch_home = str(Path(torch.__file__).parent)
    own = [f for f in frames if not f.filename.startswith(torch_home) and f.filename != __file__]
    place = f" at {Path(own[-1].filename).name}:{own[-1].lineno} (`{own[-1].line}`)" if own else ""
    return (
        f"{type(model).__name__} cannot be traced{place}: {one_line(error)}."
        " Its forward() must not branch or loop on the values of tensors; move such code outside of the model,"
        " or mark the function that holds it with torch.fx.wrap."
    )


def function_name(target: Any) -> str:
    """A function, or the name of a tensor method, as users write it."""
    if isinstance(target, str):
        return f"Tensor.{target}"
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}".lstrip(".")
