"""A network prepared for pruning: its graph, its groups of filters, and what any choice among them costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from paam.errors import ArtifactError, RecipeError, nearest
from paam.graph.attach import Group, Placement, Streams, find_groups
from paam.graph.compact import compact
from paam.graph.layers import CONVOLUTIONS
from paam.graph.path import strongest_path
from paam.graph.rules import bind
from paam.graph.site import Op
from paam.graph.solve import Cost, predicted_cost, solve
from paam.graph.trace import Traced, trace
from paam.plan import Kept, Plan, recall_plan, remember_plan

Choice = Mapping[str, NDArray[np.bool_]]
"""Group name -> True for each filter that stays."""

PLACEMENTS = ("sum", "branch")
STREAMS = ("independent", "tied")
BALANCES = ("area", "side", "none", "macs", "params")


@dataclass(frozen=True, eq=False)
class Network:
    """A traced model with its groups of prunable filters."""

    traced: Traced
    ops: tuple[Op, ...]
    groups: tuple[Group, ...]
    placement: Placement
    streams: Streams

    def cost(self, choice: Choice) -> Cost:
        """Parameters and MACs of the compacted network, exactly, without building it."""
        return predicted_cost(self.traced, solve(self.ops, self._masks(choice)))

    @cached_property
    def dense(self) -> Cost:
        """What the model itself costs, by the counter, which went along when it was traced."""
        return Cost(sum(p.numel() for p in self.traced.model.parameters()), sum(self.traced.macs.values()))

    def strongest_path(self, scores: Mapping[str, NDArray[np.float64]]) -> dict[str, set[int]]:
        """Filters, by group, whose weakest member scores highest among all paths from input to output."""
        group_of = {site: group.name for group in self.groups for site in group.sites}
        path = strongest_path(self.ops, {site: scores[name] for site, name in group_of.items()})
        filters: dict[str, set[int]] = {group.name: set() for group in self.groups}
        for site, channel in path:
            filters[group_of[site]].add(channel)
        return filters

    def plan(self, choice: Choice) -> Plan:
        groups = {}
        for group in self.groups:
            mask = choice[group.name]
            groups[group.name] = Kept(group.width, tuple(int(i) for i in np.flatnonzero(mask)))
        inputs = tuple(tuple(x.shape) for x in self.traced.examples)
        traced = self.traced
        return Plan(
            traced.fingerprint, inputs, self.placement, self.streams, groups, traced.ignore, recall_plan(traced.model)
        )

    def choice(self, plan: Plan) -> Choice:
        """The plan's masks, after checking that the plan was made for this architecture."""
        if plan.fingerprint != self.traced.fingerprint:
            raise ArtifactError(
                f"The plan was made for another architecture (fingerprint {plan.fingerprint}, this model has"
                f" {self.traced.fingerprint}); build the model that it was made for, with as many classes."
            )
        if (plan.placement, plan.streams) != (self.placement, self.streams):
            raise ArtifactError(
                f"The plan was made with placement '{plan.placement}' and streams '{plan.streams}', here they are"
                f" '{self.placement}' and '{self.streams}'; set prune.placement and prune.streams to the plan's."
            )
        widths = {group.name: group.width for group in self.groups}
        if {name: kept.width for name, kept in plan.groups.items()} != widths:
            raise ArtifactError("The plan's groups are not those of this model; it was edited or is damaged.")
        return {name: kept.mask for name, kept in plan.groups.items()}

    def compact(self, plan: Plan) -> nn.Module:
        """The smaller network, with the current weights. It carries its plan along, for paam.save."""
        small = compact(self.traced, self.ops, self._masks(self.choice(plan)))
        remember_plan(small, plan)
        return small

    def balance(self, kind: str) -> dict[str, float]:
        """Weight of each group's filters in the penalty, over the last convolution's.

        By the area of the feature maps, by their side, or by what falls when a filter does: MACs or parameters.
        """
        if kind not in BALANCES:
            raise RecipeError(f"There is no balance '{kind}'.{nearest(kind, BALANCES)}")
        model = self.traced.model
        mapped = [g for g in self.groups if isinstance(model.get_submodule(g.layers[0]), CONVOLUTIONS)]
        last = (mapped or self.groups)[-1]
        if kind in ("macs", "params"):
            saved = {group.name: self._saved_by_a_filter(group, kind) for group in self.groups}
            unit = saved[last.name] or max(saved.values()) or 1.0
            return {name: value / unit for name, value in saved.items()}
        power = {"area": 1.0, "side": 0.5, "none": 0.0}[kind]
        return {group.name: math.pow(group.area / last.area, power) for group in self.groups}

    def _saved_by_a_filter(self, group: Group, kind: str) -> float:
        """On average, with every second one removed: of a grouped convolution one alone would save hardly anything."""
        choice = {one.name: np.ones(one.width, dtype=np.bool_) for one in self.groups}
        choice[group.name][1::2] = False
        saved: int = getattr(self.dense, kind) - getattr(self.cost(choice), kind)
        return saved / max(group.width // 2, 1)

    def _masks(self, choice: Choice) -> Choice:
        return {site: choice[group.name] for group in self.groups if group.name in choice for site in group.sites}


def prepare(
    model: nn.Module,
    example_inputs: Tensor | tuple[Tensor, ...],
    *,
    placement: str = "sum",
    streams: str = "independent",
    ignore: Sequence[str] = (),
) -> Network:
    """Trace a model and find its groups. The model is not changed, and its weights stay shared.

    ``ignore``: names of modules, or of nodes of the graph, that are left alone: they read whole values, and nothing
    in them is removed.
    """
    if not isinstance(model, nn.Module):
        raise RecipeError(f"The model must be a torch.nn.Module, not {type(model).__name__}.")
    if placement not in PLACEMENTS:
        raise RecipeError(f"There is no gate placement '{placement}'.{nearest(placement, PLACEMENTS)}")
    if streams not in STREAMS:
        raise RecipeError(f"There is no stream mode '{streams}'.{nearest(streams, STREAMS)}")
    if isinstance(ignore, str):
        raise RecipeError(f"ignore takes a list of names, such as ['{ignore}'].")
    traced = trace(model, example_inputs, ignore)
    ops = bind(traced)
    groups = find_groups(traced, ops, placement=placement, streams=streams)  # type: ignore[arg-type]
    return Network(traced, ops, groups, placement, streams)  # type: ignore[arg-type]
