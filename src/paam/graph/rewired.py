"""Networks that run a graph: one with gates, or one whose layers are connected differently from the model's class."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Self

from torch import fx, nn

from paam.graph.record.numbers import expect
from paam.graph.record.ways import WAYS, Ways, evaluated_only
from paam.graph.runner import lend_constants
from paam.graph.trace import Traced

CHECKS = (expect, evaluated_only)
"""Functions that a graph runs although their result is not read."""


NEVER_TRAINED = "never_trained"


class _Unwritten:
    """Placeholder for forward() on the class of a graph model; generates the code on first access."""

    def __get__(self, model: GraphModel | None, kind: type) -> Any:
        if model is None:
            return self
        try:
            model.recompile()
        except AttributeError as error:  # nn.Module would report it as a missing forward()
            raise RuntimeError(f"the graph cannot be written as code: {error}") from error
        return model.forward


class GraphModel(fx.GraphModule):
    """Runs a graph. A graph that returns :class:`Ways` runs the branch of the current mode, and only what it needs.

    Its code is generated on demand, because not all graphs are run. ``meta[NEVER_TRAINED]``: names of modules that
    train() leaves in evaluation mode, as the model's own train() does.
    """

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if never := self.meta.get(NEVER_TRAINED, ()):
            for name, module in self.named_modules():
                if name in never:
                    module.training = False
        return self

    @property
    def graph(self) -> fx.Graph:
        return self._graph

    @graph.setter
    def graph(self, graph: fx.Graph) -> None:
        self._graph = graph
        graph.owning_module = self
        type(self).forward = _Unwritten()  # type: ignore[assignment]

    @property
    def code(self) -> str:
        if "_code" not in vars(self):
            self.recompile()
        return str(self._code)

    def __str__(self) -> str:
        assert self.code
        return super().__str__()

    def recompile(self) -> Any:
        compiled = super().recompile()
        result = self.graph.output_node().args[0]
        if isinstance(result, Ways):
            evaluate, train = (_one_way(self, way) for way in range(2))

            def forward(self: GraphModel, *args: Any, **kwargs: Any) -> Any:
                return (train if self.training else evaluate)(self, *args, **kwargs)

            type(self).forward = forward
        return compiled


def as_graph_model(traced: Traced) -> GraphModel:
    """The traced model as a module that runs its graph, with the model's own layers."""
    root = nn.Module()
    for name, child in traced.model.named_children():
        root.add_module(name, child)
    root._parameters.update(traced.model._parameters)
    root._buffers.update(traced.model._buffers)
    lend_constants(traced, root)
    model = GraphModel(root, traced.graph, type(traced.model).__name__)
    model.meta[NEVER_TRAINED] = traced.never_trained
    model.training = traced.model.training
    return model


def _one_way(model: fx.GraphModule, way: int) -> Callable[..., Any]:
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    result: Any = graph.graph_copy(model.graph, copied)
    graph.output(result[way])
    for node in [node for node in graph.nodes if node.target is expect and node.args[3:] == (WAYS[1 - way],)]:
        graph.erase_node(node)
    drop_unused(graph, result.also if way else ())
    return type(fx.GraphModule(model, graph)).forward


def drop_unused(graph: fx.Graph, also: Collection[str] = ()) -> None:
    """Remove nodes that are not read, except size checks. ``also``: nodes to keep."""
    graph.eliminate_dead_code(
        lambda node: node.op in ("placeholder", "output") or node.target in CHECKS or node.name in also
    )


class RewiredModel(GraphModel):
    """Keeps its class name when copied, and its plan when pickled; torch.fx drops both."""

    def __deepcopy__(self, memo: dict[int, Any]) -> RewiredModel:
        plain = super().__deepcopy__(memo)
        memo[id(self)] = twin = _restored(plain, type(self).__name__, plain.meta)
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        parts = {name: self.__dict__[name] for name in ("_parameters", "_buffers", "_modules", "training")}
        persistent = self._non_persistent_buffers_set
        return _unpickled, (parts, set(persistent), _described(self.graph), type(self).__name__, self.meta)


def connected(root: nn.Module, graph: fx.Graph, name: str) -> RewiredModel:
    """The layers of ``root`` connected by a graph; ``name``: name of its class."""
    model = RewiredModel(root, graph, name)
    model.recompile()  # user tools may look for forward() on the class
    return model


@dataclass(frozen=True)
class _Reference:
    """Reference to an earlier node of a described graph, by index."""

    place: int


Described = list[tuple[str, str, Any, Any, Any]]


def _described(graph: fx.Graph) -> Described:
    """A graph as plain data: torch.fx would generate code and trace it again, which fails for some graphs."""
    places: dict[fx.Node, Any] = {node: _Reference(place) for place, node in enumerate(graph.nodes)}
    return [
        (node.name, node.op, _named(node.target), *fx.map_arg((node.args, node.kwargs), places.__getitem__))
        for node in graph.nodes
    ]


@dataclass(frozen=True)
class _Named:
    """A function by the module and name where it can be imported: some functions do not have these attributes right."""

    module: str
    name: str


def _named(target: Any) -> Any:
    module, name = getattr(target, "__module__", None), getattr(target, "__name__", "")
    found = getattr(sys.modules.get(module or ""), name, None)
    return _Named(module, name) if module and found is target else target


def _unpickled(
    parts: dict[str, Any], not_saved: set[str], described: Described, name: str, meta: dict[str, Any]
) -> RewiredModel:
    root = nn.Module()
    root.__dict__.update(parts)
    root._non_persistent_buffers_set = not_saved
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    for called, op, target, args, kwargs in described:
        args, kwargs = _with_nodes((args, kwargs), nodes)
        if isinstance(target, _Named):
            target = getattr(importlib.import_module(target.module), target.name)
        nodes.append(graph.create_node(op, target, args, kwargs, called))
    model = connected(root, graph, name)
    model.meta = meta
    return model


def _with_nodes(value: Any, nodes: list[fx.Node]) -> Any:
    if isinstance(value, _Reference):
        return nodes[value.place]
    if isinstance(value, tuple):
        parts = [_with_nodes(part, nodes) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        return [_with_nodes(part, nodes) for part in value]
    if isinstance(value, dict):
        return {key: _with_nodes(part, nodes) for key, part in value.items()}
    if isinstance(value, slice):
        return slice(*(_with_nodes(bound, nodes) for bound in (value.start, value.stop, value.step)))
    return value


def _restored(plain: fx.GraphModule, name: str, meta: dict[str, Any]) -> RewiredModel:
    model = connected(plain, plain.graph, name)
    model.meta = meta
    return model
