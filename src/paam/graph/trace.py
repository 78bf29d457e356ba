"""Model and example inputs -> an fx graph with the shape of every value, checked to compute what the model computes."""

from __future__ import annotations

import hashlib
import math
import operator
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from paam.cost import MacCounter
from paam.errors import GraphError, nearest, one_line
from paam.graph.functional import make_functional
from paam.graph.modes import buffers_kept, copying, evaluating, in_mode
from paam.graph.tracer import CONSTANT, NOT_THE_MODELS, Tracer
from paam.plan import recall_plan

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Traced:
    """A model as a graph, by node name: ``shapes`` of its tensors, and ``numbers``, such as sizes, for the example.

    ``module`` shares the model's parameters.
    """

    model: nn.Module
    module: fx.GraphModule
    shapes: dict[str, Shape]
    numbers: dict[str, Any]
    examples: tuple[Tensor, ...]
    ignore: tuple[str, ...]
    """Modules and nodes that are left alone, as the user named them."""
    macs: dict[str, int]
    """What each operation costs, by node name: multiply-accumulates of one sample."""
    settled: set[str]
    """Sizes that forward() used as plain numbers, in a condition, say: they are those of the whole network."""

    def positions(self, name: str, axis: int) -> int:
        """How many values each channel of a node has in one sample: H * W for a feature map [N, C, H, W]."""
        shape = self.shapes[name]
        return math.prod(shape) // shape[axis] // self.examples[0].shape[0]

    @cached_property
    def fingerprint(self) -> str:
        """Identifies architecture, not weights: the graph, its layers, the name and shape of every tensor.

        Made to outlive versions of torch: none of the texts that torch may change is in it, such as a layer's repr.
        """
        number = {node: place for place, node in enumerate(self.module.graph.nodes)}
        lines = []
        for node, place in number.items():
            args, kwargs = fx.map_arg((node.args, _said(node.kwargs)), lambda other: f"%{number[other]}")
            layer = node.op == "call_module"
            what = settings_of(self.module.get_submodule(node.target)) if layer else function_name(node.target)
            lines.append(f"{place} {node.op} {node.target if layer else ''} {what} {args} {kwargs}")
        lines += [f"{name} {tuple(value.shape)}" for name, value in self.model.state_dict().items()]
        if (earlier := recall_plan(self.model)) is not None:  # which channels its index maps connect
            lines.append(earlier.digest)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


SETTINGS = (
    *("align_corners", "alpha", "approximate", "beta", "ceil_mode", "count_include_pad", "dilation", "dim"),
    *("divisor_override", "downscale_factor", "end_dim", "eps", "groups", "k", "kernel_size", "lambd", "max_val"),
    *("min_val", "mode", "negative_slope", "norm_type", "normalized_shape", "num_groups", "num_heads"),
    *("output_padding", "output_size", "p", "padding", "padding_mode", "scale_factor", "size", "start_dim", "stride"),
    *("threshold", "transposed", "unflattened_size", "upscale_factor", "value"),
)
"""Attributes of torch's layers that say what their tensors do not: strides, padding, the shape of an activation."""


def settings_of(layer: nn.Module) -> str:
    """What a layer does: the kind and the settings of it and of all layers in it."""
    parts = []
    for name, part in layer.named_modules():
        values = {key: getattr(part, key) for key in SETTINGS if hasattr(part, key)}
        plain = {key: value for key, value in values.items() if isinstance(value, str | int | float | tuple | list)}
        parts.append(f"{name} {type(part).__name__} {_said(plain)}")
    return "; ".join(parts)


def _said(values: Mapping[str, Any]) -> dict[str, Any]:
    """In order, without None and False: what one version of torch says so, another leaves out."""
    return {key: value for key, value in sorted(values.items()) if value is not None and value is not False}


def trace(model: nn.Module, example_inputs: Tensor | Sequence[Tensor], ignore: Sequence[str] = ()) -> Traced:
    """Trace the model and record shapes. The model is left as it was found. ``ignore``: modules not to look into."""
    examples = example_inputs if isinstance(example_inputs, tuple | list) else (example_inputs,)
    if not examples or not all(isinstance(example, Tensor) for example in examples):
        raise GraphError("example_inputs is the tensor that forward() takes, or a tuple of them: one small batch.")
    examples = tuple(examples)
    ignored = tuple(dict.fromkeys(ignore))
    try:
        tracer = Tracer(examples, ignored)
        with evaluating(model), buffers_kept(model):
            graph = tracer.trace(model)
        with in_mode(model, True), buffers_kept(model):
            training = Tracer(examples, ignored).trace(model)
    except Exception as error:  # tracing runs the user's forward(): anything can come out of it
        raise GraphError(_blame(model, error)) from error
    _follow_training_flag(model, graph, training)
    doubtful = make_functional(model, graph) or _has_hooks(model)
    module = fx.GraphModule(model, graph, type(model).__name__)
    for name in [name for name in vars(model) if name.startswith(CONSTANT)]:
        delattr(model, name)  # the graph has them now
    recorder = _record(model, module, examples, doubtful)
    _check_ignored(model, module.graph, ignored)
    _tidy(module, recorder.shapes)
    macs = {name: total // examples[0].shape[0] for name, total in recorder.macs.items()}
    settled = {node.name for node in tracer.settled}
    return Traced(model, module, recorder.shapes, recorder.numbers, examples, ignored, macs, settled)


SQUEEZE = ("squeeze", torch.squeeze)


def _tidy(module: fx.GraphModule, shapes: dict[str, Shape]) -> None:
    """Drop parts that nobody reads, such as a maximum's indices, and write out the axes that squeeze() takes away."""
    for node in reversed(module.graph.nodes):
        if not node.users and node.target is operator.getitem and node.name in shapes:
            module.graph.erase_node(node)
        elif node.op != "call_module" and node.target in SQUEEZE and len(node.args) == 1 and not node.kwargs:
            before = shapes[node.args[0].name]
            node.args = (node.args[0], tuple(axis for axis, size in enumerate(before) if size == 1))
            node.meta["settled"] = True
    module.recompile()


def _check_ignored(model: nn.Module, graph: fx.Graph, ignored: Sequence[str]) -> None:
    nodes = {node.name for node in graph.nodes} | {node.target for node in graph.nodes if node.op == "call_module"}
    for name in ignored:
        if name not in nodes:
            modules = [module for module, _ in model.named_modules() if module]
            why = "is never called on its own" if name in modules else "is no part of the model"
            raise GraphError(f"ignore: '{name}' {why}.{nearest(name, modules)} Name a module, or a node of a refusal.")


def _follow_training_flag(model: nn.Module, graph: fx.Graph, training: fx.Graph) -> None:
    """Let arguments that are False in evaluation and True in training, as of F.dropout, follow the network's mode.

    Whatever else differs between the two modes would be lost in one graph, and is refused.
    """
    differ = GraphError(
        f"{type(model).__name__}.forward() takes another way in training than in evaluation (auxiliary outputs, noise,"
        " stochastic depth?), which one graph cannot hold; build the model without that part."
    )
    if len(graph.nodes) != len(training.nodes):
        raise differ
    twins = dict(zip(graph.nodes, training.nodes, strict=True))

    def merge(node: fx.Node, here: Any, there: Any) -> Any:
        if here is False and there is True:
            with graph.inserting_before(node):
                return graph.get_attr("training")
        if isinstance(here, tuple | list) and type(here) is type(there) and len(here) == len(there):
            return type(here)(merge(node, a, b) for a, b in zip(here, there, strict=True))
        same = twins.get(here) is there if isinstance(here, fx.Node) else repr(here) == repr(there)
        if not same:
            raise differ
        return here

    for node, twin in twins.items():
        if (node.op, node.target, node.kwargs.keys()) != (twin.op, twin.target, twin.kwargs.keys()):
            raise differ
        node.args = merge(node, node.args, twin.args)
        node.kwargs = {key: merge(node, value, twin.kwargs[key]) for key, value in node.kwargs.items()}


class _Recorder(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False
        self.macs: dict[str, int] = {}
        self.shapes: dict[str, Shape] = {}
        self.numbers: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        with MacCounter() as counter:
            value = super().run_node(n)
        self.macs[n.name] = counter.macs
        if isinstance(value, Tensor):
            self.shapes[n.name] = tuple(value.shape)
        elif isinstance(value, int | torch.Size | torch.dtype | torch.device):
            self.numbers[n.name] = value
        return value


def _has_hooks(model: nn.Module) -> bool:
    """Hooks may change what a module returns, and the graph knows nothing of those on modules it looks into."""
    return any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def _record(model: nn.Module, module: fx.GraphModule, examples: tuple[Tensor, ...], doubtful: bool) -> _Recorder:
    """Run the graph on random inputs of the examples' shapes; if ``doubtful``, the model too: they must agree."""
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    if len(examples) > len(inputs):
        raise GraphError(f"The model takes {len(inputs)} inputs; {len(examples)} examples were given.")
    generator = torch.Generator().manual_seed(0)  # the caller's random state is not ours to advance
    randoms = tuple(
        torch.randn(x.shape, generator=generator).to(x) if x.is_floating_point() else x.clone() for x in examples
    )
    recorder = _Recorder(module)
    try:
        with evaluating(model), evaluating(module), torch.inference_mode():
            truth = model(*(x.clone() for x in randoms)) if doubtful else None
            with copying(model):
                found = recorder.run(*randoms)
    except Exception as error:  # the user's operations on the user's input
        shapes = ", ".join(str(list(x.shape)) for x in examples)
        raise GraphError(
            f"The model does not run on an input of shape {shapes}: {one_line(error)}. It wants an input of the shape"
            " that it is used with, or is not the model that was meant."
        ) from error
    pairs = zip(tree_leaves(truth if doubtful else found), tree_leaves(found), strict=True)
    tensors = [(a.double(), b.double()) for a, b in pairs if isinstance(a, Tensor)]
    if not all(torch.allclose(a, b, rtol=1e-3, atol=1e-4, equal_nan=True) for a, b in tensors):
        raise GraphError(
            f"{type(model).__name__} computes something else than its traced graph: it changes a value in place while a"
            " view or an alias of it is still read (use the copying form of that operation), or hooks change what its"
            " modules return (remove them)."
        )
    return recorder


def _blame(model: nn.Module, error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith(NOT_THE_MODELS)]
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


def lend_constants(traced: Traced, root: nn.Module) -> None:
    """Give a module that runs the graph the tensors that forward() makes of nothing, or holds as plain attributes."""
    for node in traced.module.graph.nodes:
        if node.op == "get_attr" and "." not in node.target and not hasattr(root, node.target):
            root.register_buffer(node.target, getattr(traced.module, node.target), persistent=False)


def attribute(model: nn.Module, target: str) -> Any:
    """What a get_attr node reads: "layer.scale" of the model."""
    owner, _, name = target.rpartition(".")
    return getattr(model.get_submodule(owner), name)
