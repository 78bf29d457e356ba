"""A plan: which filters stay, per group. Plain data, versioned JSON, valid on any copy of the same architecture."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import fx, nn

from paam.errors import ArtifactError
from paam.files import parse_json, read_text

FORMAT = "paam-plan"
VERSION = 1
LARGEST_INPUT = 1 << 28
"""Values in an example input: a plan that names more is damaged."""


@dataclass(frozen=True)
class Kept:
    """The filters of one group that stay, ascending, out of ``width``."""

    width: int
    filters: tuple[int, ...]

    @property
    def mask(self) -> NDArray[np.bool_]:
        mask = np.zeros(self.width, dtype=bool)
        mask[list(self.filters)] = True
        return mask


@dataclass(frozen=True)
class Plan:
    """What stays of a network.

    ``fingerprint`` names the architecture, ``inputs`` the shapes it was traced with; placement and streams say
    where gates stand, ``ignore`` what was left alone. ``base``: the plan that had pruned the network before, if any.
    """

    fingerprint: str
    inputs: tuple[tuple[int, ...], ...]
    placement: str
    streams: str
    groups: Mapping[str, Kept]
    ignore: tuple[str, ...] = ()
    base: Plan | None = None

    @property
    def counts(self) -> dict[str, list[int]]:
        """Group -> [filters that stay, width], as records have it."""
        return {name: [len(kept.filters), kept.width] for name, kept in self.groups.items()}

    @property
    def kept_filters(self) -> int:
        return sum(len(kept.filters) for kept in self.groups.values())

    @property
    def all_filters(self) -> int:
        return sum(kept.width for kept in self.groups.values())

    @property
    def digest(self) -> str:
        """Names this very plan: weights belong to one."""
        return hashlib.sha256(json.dumps(self._tree(), sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        return json.dumps(self._tree())

    def _tree(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "fingerprint": self.fingerprint,
            "inputs": self.inputs,
            "placement": self.placement,
            "streams": self.streams,
            "ignore": self.ignore,
            "groups": {name: {"width": k.width, "keep": list(k.filters)} for name, k in self.groups.items()},
            "base": None if self.base is None else self.base._tree(),
        }

    @staticmethod
    def from_json(text: str, source: str = "the plan") -> Plan:
        """Read a plan back; anything that is not one is refused with the reason. ``source`` names it in messages."""
        try:
            data = parse_json(text)
        except ValueError as error:
            raise ArtifactError(f"{source} is not JSON ({error}); it may have been cut short.") from error
        return _plan(data, source)

    @staticmethod
    def read(path: Path) -> Plan:
        return Plan.from_json(read_text(path, "The plan"), f"The plan {path}")


def remember_plan(small: nn.Module, plan: Plan) -> None:
    """Let a pruned network carry its plan along, for paam.save; copies of the network carry it too."""
    if isinstance(small, fx.GraphModule):
        small.meta["paam_plan"] = plan  # of other attributes, a copy of a GraphModule knows nothing
    else:
        small.paam_plan = plan  # type: ignore[assignment]


def recall_plan(small: nn.Module) -> Plan | None:
    plan = small.meta.get("paam_plan") if isinstance(small, fx.GraphModule) else getattr(small, "paam_plan", None)
    return plan if isinstance(plan, Plan) else None


def _plan(data: object, source: str) -> Plan:
    chain = []
    while data is not None:  # a loop, not a recursion: a hostile file may nest deeply
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ArtifactError(f"{source} is not a paam plan.")
        if data.get("version") != VERSION:
            raise ArtifactError(f"{source} has plan version {data.get('version')}; this paam reads version {VERSION}.")
        strings = [data.get(key) for key in ("fingerprint", "placement", "streams")]
        groups, ignore = data.get("groups"), data.get("ignore", [])
        if not all(isinstance(s, str) for s in strings) or not isinstance(groups, dict):
            raise ArtifactError(f"{source} lacks its fingerprint, placement, streams or groups.")
        if not isinstance(ignore, list) or not all(isinstance(name, str) for name in ignore):
            raise ArtifactError(f"{source} names what it ignores in another way than as a list of text.")
        inputs = _shapes(data.get("inputs"), source)
        kept = {name: _kept(name, entry, source) for name, entry in groups.items()}
        chain.append(Plan(data["fingerprint"], inputs, data["placement"], data["streams"], kept, tuple(ignore)))
        data = data.get("base")
    if not chain:
        raise ArtifactError(f"{source} is not a paam plan.")
    return functools.reduce(lambda base, plan: dataclasses.replace(plan, base=base), reversed(chain))


def _shapes(value: object, source: str) -> tuple[tuple[int, ...], ...]:
    shapes = value if isinstance(value, list) else []
    if not shapes or not all(_is_shape(shape) for shape in shapes):
        raise ArtifactError(f"{source} lacks the shapes of the network's inputs, or names impossible ones.")
    return tuple(tuple(shape) for shape in shapes)


def _is_shape(value: object) -> bool:
    sizes = value if isinstance(value, list) else []
    return bool(sizes) and all(type(n) is int and n > 0 for n in sizes) and math.prod(sizes) <= LARGEST_INPUT


def _kept(name: str, entry: object, source: str) -> Kept:
    width, keep = (entry.get("width"), entry.get("keep")) if isinstance(entry, dict) else (None, None)
    if (
        type(width) is int
        and width > 0
        and isinstance(keep, list)
        and all(type(i) is int and 0 <= i < width for i in keep)
    ):
        if all(a < b for a, b in itertools.pairwise(keep)):
            return Kept(width, tuple(keep))
    raise ArtifactError(f"{source}: group '{name}' needs a width and ascending filter numbers below it.")
