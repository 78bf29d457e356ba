"""A network prepared for pruning: its graph, its groups of filters, and the cost of any choice among them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from paam.config.settings import PruneSettings, check_setting
from paam.errors import ArtifactError, RecipeError, nearest
from paam.graph.checks.recording import sizes_to_hold
from paam.graph.compact import compact
from paam.graph.cost import batch_of
from paam.graph.groups import Group, Placement, Streams, find_groups
from paam.graph.path import strongest_path
from paam.graph.plan import Kept, Plan, recall_plan, remember_plan
from paam.graph.rules.layers import CONVOLUTIONS
from paam.graph.rules.site import Op
from paam.graph.rules.table import bind
from paam.graph.solve import Cost, predicted_cost, solve
from paam.graph.trace import Traced, trace

Choice = Mapping[str, NDArray[np.bool_]]
"""Group name -> True for each filter that is kept."""

ON_DECISION = ("refuse", "fix", "stop")


@dataclass(frozen=True, eq=False)
class Network:
    """A traced model with its groups of prunable filters."""

    traced: Traced
    ops: tuple[Op, ...]
    groups: tuple[Group, ...]
    placement: Placement
    streams: Streams
    keep_class: bool = False
    """Every plan keeps the model's class, and at least one filter in each group."""

    def without_rewiring(self) -> Network:
        """The network with only those groups that can be cut without rewiring."""

        def keeps(group: Group) -> bool:
            places = np.arange(group.width)
            # The first mask cuts the parts of a group evenly; the others reveal groups whose parts must stay equal.
            masks = (places % 2 == 0, places > 0, places < group.width // 2)
            return group.width > 1 and not any(solve(self.ops, self._masks({group.name: m})).rewired for m in masks)

        return dataclasses.replace(self, groups=tuple(filter(keeps, self.groups)))

    def cost(self, choice: Choice) -> Cost:
        """Parameters and MACs of the compacted network, exactly, without building it."""
        return predicted_cost(self.traced, solve(self.ops, self._masks(choice)), self.keep_class)

    @cached_property
    def dense(self) -> Cost:
        """Cost of the model itself, counted during tracing."""
        macs = sum(self.traced.macs.values()) // batch_of(self.traced.examples)
        return Cost(sum(p.numel() for p in self.traced.model.parameters()), macs)

    def strongest_path(self, scores: Mapping[str, NDArray[np.float64]]) -> dict[str, set[int]]:
        """Filters, by group, of the input-output path whose weakest member has the highest score."""
        group_of = {site: group for group in self.groups for site in group.sites}
        path = strongest_path(self.ops, self._at_sites(scores))
        filters: dict[str, set[int]] = {group.name: set() for group in self.groups}
        for site, channel in path:
            filters[group_of[site].name].add(channel % group_of[site].width)
        return filters

    def plan(self, choice: Choice) -> Plan:
        groups = {}
        for group in self.groups:
            mask = choice[group.name]
            groups[group.name] = Kept(group.width, tuple(int(i) for i in np.flatnonzero(mask)))
        traced = self.traced
        return Plan(
            traced.fingerprint,
            tree_map(_described, traced.examples),
            self.placement,
            self.streams,
            groups,
            traced.ignore,
            recall_plan(traced.model),
            self.keep_class,
            traced.on_decision,
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

    def compact(self, plan: Plan, *, check: bool = True) -> nn.Module:
        """The smaller network, with the current weights. Its plan is attached to it, for paam.save.

        ``check``: compare it with the gated network first, on other weights and another batch size, and raise an error
        if they differ.
        """
        small = compact(self.traced, self.ops, self._masks(self.choice(plan)), check=check, keep_class=self.keep_class)
        remember_plan(small, plan)
        return small

    def balance(self, kind: str) -> dict[str, float]:
        """Penalty weight of each group's filters, relative to the last convolution's.

        By the area of the feature maps, by their side, or by what removing a filter saves: MACs or parameters.
        """
        check_setting(PruneSettings, "balance", kind)
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
        """Average with every second filter removed: a single filter of a grouped convolution saves hardly anything."""
        choice = {one.name: np.ones(one.width, dtype=np.bool_) for one in self.groups}
        choice[group.name][1::2] = False
        saved: int = getattr(self.dense, kind) - getattr(self.cost(choice), kind)
        return saved / max(group.width // 2, 1)

    def _masks(self, choice: Choice) -> Choice:
        return self._at_sites(choice)

    def _at_sites(self, by_group: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Values per filter -> values per channel at each gate of the group."""
        found = {}
        for group in self.groups:
            if group.name in by_group:
                for site in group.sites:
                    channels = self.traced.shapes[site][self._axes[site]]
                    found[site] = np.tile(by_group[group.name], channels // group.width)
        return found

    @cached_property
    def _axes(self) -> dict[str, int]:
        return {op.name: op.axis for op in self.ops}


def _described(example: Tensor) -> Any:
    """An input as stored in a plan: its shape, and its dtype unless that is floating point."""
    shape = tuple(example.shape)
    return shape if example.is_floating_point() else {"shape": shape, "dtype": str(example.dtype).rpartition(".")[2]}


def prepare(
    model: nn.Module,
    example_inputs: Tensor | tuple[Tensor, ...],
    *,
    placement: str = "sum",
    streams: str = "independent",
    ignore: Sequence[str] = (),
    keep_class: bool = False,
    on_decision: str = "refuse",
    check: bool = True,
) -> Network:
    """Record a model and find its groups. The model is not changed, and the weights are shared.

    ``ignore``: names of modules, or of graph nodes, that are not pruned: they read complete values, and nothing in
    them is removed. ``keep_class``: skip every group that would prevent the small network from running the code of the
    model's class. ``on_decision``: a decision on tensor values is refused ("refuse"), or everything after the first
    one stays the model's own code ("stop"), or it is fixed to its outcome for the example ("fix"). ``check``: compare
    the recording with the model itself, on other weights and sizes, and raise an error if they differ.
    """
    if not isinstance(model, nn.Module):
        raise RecipeError(f"The model must be a torch.nn.Module, not {type(model).__name__}.")
    check_setting(PruneSettings, "placement", placement)
    check_setting(PruneSettings, "streams", streams)
    if isinstance(ignore, str):
        raise RecipeError(f"ignore takes a list of names, such as ['{ignore}'].")
    if on_decision not in ON_DECISION:
        raise RecipeError(f"There is no on_decision '{on_decision}'.{nearest(on_decision, ON_DECISION)}")
    traced = trace(model, example_inputs, ignore, on_decision)  # type: ignore[arg-type]
    ops = bind(traced)
    if check and (held := sizes_to_hold(traced, ops)):
        traced = trace(model, example_inputs, ignore, on_decision, held)  # type: ignore[arg-type]
        ops = bind(traced)
    groups = find_groups(traced, ops, placement=placement, streams=streams)  # type: ignore[arg-type]
    keep_class = keep_class or traced.own_code
    network = Network(traced, ops, groups, placement, streams, keep_class)  # type: ignore[arg-type]
    return network.without_rewiring() if keep_class else network
