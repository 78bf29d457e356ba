"""The gated network: one gate per group of filters, with the model's own layers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from torch import fx, nn
from torch.nn.utils.parametrize import ParametrizationList

from paam.graph.gating import GATES, apply_gate
from paam.graph.groups import Group
from paam.graph.own_code import run_gated
from paam.graph.rewired import NEVER_TRAINED, GraphModel
from paam.graph.rules.site import Op
from paam.graph.runner import lend_constants
from paam.graph.trace import Traced
from paam.pruning.gates import Gate, Gates


class FrozenNorms(nn.Module):
    """While ``norms_frozen``, train() leaves batch norms and spectral norms in evaluation mode."""

    norms_frozen = False

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if self.norms_frozen:
            for module in self.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm | ParametrizationList):
                    module.eval()
        return self


class GatedModel(FrozenNorms, GraphModel):
    """The traced graph with gates."""


class GatedOwnCode(FrozenNorms):
    """A model with gates that runs its own forward()."""

    def __init__(self, traced: Traced, gates: Gates, sites: Mapping[str, tuple[int, int]]) -> None:
        """``sites``: node name -> index of its gate, its channel axis."""
        super().__init__()
        self.own = traced.model
        self.add_module(GATES, gates)
        self._traced = [traced]  # in a list, so that it is not registered as a submodule
        self._sites = dict(sites)
        self.train(traced.model.training)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        multipliers = self.get_submodule(GATES)()
        gates = {site: (multipliers[number], axis) for site, (number, axis) in self._sites.items()}
        return run_gated(self._traced[0], self.own, gates, inputs, keywords)


def attach(
    traced: Traced, ops: Sequence[Op], groups: Sequence[Group], make_gate: Callable[[list[nn.Module], int], Gate]
) -> tuple[GatedModel | GatedOwnCode, dict[str, Gate]]:
    """The network with one gate per group. It shares its layers with the traced model. Gates by group name."""
    gates = {group.name: make_gate([traced.modules[layer] for layer in group.layers], group.width) for group in groups}
    axes = {op.name: op.axis for op in ops}
    if traced.own_code:
        sites = {site: (number, axes[site]) for number, group in enumerate(groups) for site in group.sites}
        return GatedOwnCode(traced, Gates(list(gates.values())), sites), gates
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(traced.graph, copied))
    nodes = {original.name: node for original, node in copied.items()}
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        multipliers = graph.call_module(GATES)
    for number, group in enumerate(groups):
        with graph.inserting_before(first):
            gate = graph.call_function(operator.getitem, (multipliers, number))
        for site in group.sites:
            value = nodes[site]
            with graph.inserting_after(value):
                gated = graph.call_function(apply_gate, (value, gate, axes[site]))
            for user in list(value.users):
                if user is not gated:
                    user.replace_input_with(value, gated)
    root = nn.Module()
    for name, child in traced.model.named_children():
        root.add_module(name, child)
    for name, parameter in traced.model.named_parameters(recurse=False):
        root.register_parameter(name, parameter)
    for name, buffer in traced.model.named_buffers(recurse=False):
        root.register_buffer(name, buffer)
    root.add_module(GATES, Gates(list(gates.values())))
    lend_constants(traced, root)
    gated_model = GatedModel(root, graph, f"Gated{type(traced.model).__name__}")
    gated_model.meta[NEVER_TRAINED] = traced.never_trained
    gated_model.train(traced.model.training)
    return gated_model, gates
