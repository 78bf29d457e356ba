"""Criteria: the importance of each filter, from weights, from feature maps, or at random."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, fx

from paam.errors import DataError, GraphError, RecipeError, nearest
from paam.graph.gating import apply_gate
from paam.graph.groups import Group
from paam.graph.modes import evaluating
from paam.graph.network import Network
from paam.graph.record.call import run_seen
from paam.pruning.gates import rows_of

Reads = Literal["weights", "maps", "noise"]


@dataclass(frozen=True)
class Criterion:
    """Scores the filters of a group, [F]; those with the smallest scores are removed first.

    ``score`` is called with what the criterion ``reads``:
        weights  the filters, one per row: [F, N]
        maps     their feature maps for some images, after batch norm and activation, at the gate's position:
                 [images, F, height, width], or [images, F] after global pooling; scores are averaged over images
        noise    random numbers between 0 and 1 that depend on the seed and the group's name only: [F]

    ``relative``: divide scores by the largest of their group, to make groups comparable.
    """

    name: str
    score: Callable[[Tensor], Tensor]
    reads: Reads = "weights"
    relative: bool = True

    def __post_init__(self) -> None:
        if self.reads not in get_args(Reads):
            raise RecipeError(f"A criterion reads {', '.join(get_args(Reads))}, not '{self.reads}'.")


_KNOWN: dict[str, Criterion] = {}


def register_criterion(criterion: Criterion) -> Criterion:
    """Register a criterion under its name. Names are unique."""
    if _KNOWN.setdefault(criterion.name, criterion) is not criterion:
        raise RecipeError(f"The criterion '{criterion.name}' is already registered; choose another name.")
    return criterion


Chosen = str | Criterion | Callable[[Tensor], Tensor]
"""A criterion's name, a criterion, or a function of filter rows [F, N] -> [F]."""


def find_criterion(criterion: Chosen) -> Criterion:
    """A criterion by its name; a Criterion is returned unchanged, and a function of filter rows [F, N] is wrapped."""
    import paam.pruning.criteria  # noqa: F401 - registers the built-in ones

    if isinstance(criterion, Criterion):
        return criterion
    if callable(criterion):
        return Criterion(getattr(criterion, "__name__", "own"), criterion)
    if criterion not in _KNOWN:
        raise RecipeError(f"There is no criterion '{criterion}'.{nearest(criterion, _KNOWN)}")
    return _KNOWN[criterion]


def score_groups(
    network: Network,
    criterion: Criterion,
    batches: Iterable[Any] | None = None,
    seed: int = 0,
    masks: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Scores of every group, by its name: [width], in float32 at least.

    ``batches``: inputs of the model, for criteria that read maps, possibly with labels and so on.
    ``masks``: gate masks by group, applied while maps are computed.
    """
    with torch.no_grad():
        if criterion.reads == "maps":
            found = _by_maps(network, criterion, batches, masks or {})
        elif criterion.reads == "weights":
            found = {group.name: criterion.score(_rows(network, group)) for group in network.groups}
        else:
            found = {group.name: criterion.score(_noise(group, seed)) for group in network.groups}
        for group in network.groups:
            scores = found[group.name]
            if not isinstance(scores, Tensor):
                raise RecipeError(
                    f"The criterion '{criterion.name}' must return a tensor, not {type(scores).__name__}."
                )
            scores = found[group.name] = scores.to(torch.promote_types(scores.dtype, torch.float32))
            if scores.shape != (group.width,) or not scores.isfinite().all():
                raise RecipeError(
                    f"The criterion '{criterion.name}' must return {group.width} finite numbers for '{group.name}';"
                    f" it returned {list(scores.shape)}{'' if scores.isfinite().all() else ', not all of them finite'}."
                )
            if criterion.relative:
                found[group.name] = scores / scores.abs().amax().clamp(min=torch.finfo(scores.dtype).tiny)
    return found


def _rows(network: Network, group: Group) -> Tensor:
    rows = rows_of([network.traced.model.get_submodule(layer) for layer in group.layers], group.width)
    return rows.to(torch.promote_types(rows.dtype, torch.float32))


def _noise(group: Group, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(group.name.encode()))
    return torch.rand(group.width, generator=generator)


def _by_maps(
    network: Network, criterion: Criterion, batches: Iterable[Any] | None, masks: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """One forward pass per batch; a group's scores are the mean over images and over its sites."""
    sums: dict[str, Tensor] = {}
    images = 0
    for batch in batches or ():
        inputs = tuple(batch)[: len(network.traced.examples)] if isinstance(batch, tuple | list) else (batch,)
        for name, scores in _scores_at_sites(network, criterion, inputs, masks).items():
            sums[name] = sums.get(name, 0) + scores * len(inputs[0])
        images += len(inputs[0])
    if not images:
        raise DataError(
            f"The criterion '{criterion.name}' reads feature maps: pass batches of inputs, such as"
            f" select(..., criterion='{criterion.name}', batches=[images])."
        )
    return {group.name: torch.stack([sums[site] for site in group.sites]).mean(0) / images for group in network.groups}


def _scores_at_sites(
    network: Network, criterion: Criterion, inputs: Iterable[Any], masks: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """Mean scores over the images of one batch, by the node after which the gate would be."""
    width = {site: group.width for group in network.groups for site in group.sites}
    gate = {site: masks.get(group.name) for group in network.groups for site in group.sites}
    axes = {op.name: op.axis for op in network.ops}
    found: dict[str, Tensor] = {}

    def read(node: fx.Node, value: Tensor) -> Tensor:
        maps = value.movedim(axes[node.name], 1)
        parts = torch.split(
            maps, width[node.name], 1
        )  # a layer whose output is read in equal parts has several maps per filter
        found[node.name] = torch.stack([criterion.score(part) for part in parts]).mean(0)
        return apply_gate(value, gate[node.name], axes[node.name])

    model, traced = network.traced.model, network.traced
    with evaluating(model):
        _, missing = run_seen(model, tuple(inputs), {}, traced.leaves, dict.fromkeys(width, read))
    if missing:
        raise GraphError(f"The model did not run '{min(missing)}' for a batch, but did for the example.")
    return found
