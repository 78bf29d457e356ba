"""A plan: which filters to keep, per group. Plain data, versioned JSON, valid on any copy of the same architecture."""

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
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from torch import fx, nn

from paam.config.schema import InvalidError, OneOf, Range, read
from paam.errors import ArtifactError
from paam.files.reading import parse_json, read_text

FORMAT = "paam-plan"
VERSION = 1
LARGEST_INPUT = 1 << 28
"""Maximum values in an example input: a plan with more is corrupt."""
LARGEST_FILE = 16 << 20
"""Bytes: enough for about two million filter indices."""


@dataclass(frozen=True)
class Kept:
    """The filters of one group that are kept, ascending, out of ``width``."""

    width: int
    filters: tuple[int, ...]

    @property
    def mask(self) -> NDArray[np.bool_]:
        mask = np.zeros(self.width, dtype=bool)
        mask[list(self.filters)] = True
        return mask


@dataclass(frozen=True)
class Plan:
    """What is kept of a network.

    ``fingerprint`` identifies the architecture, ``inputs`` are the shapes it was traced with; placement and streams
    determine where gates are, ``ignore`` what was not pruned. ``base``: the plan of an earlier pruning, if any.
    """

    fingerprint: str
    inputs: tuple[Any, ...]
    placement: str
    streams: str
    groups: Mapping[str, Kept]
    ignore: tuple[str, ...] = ()
    base: Plan | None = None
    keep_class: bool = False
    on_decision: str = "refuse"

    @property
    def counts(self) -> dict[str, tuple[int, int]]:
        """Group -> kept filters, width."""
        return {name: (len(kept.filters), kept.width) for name, kept in self.groups.items()}

    @property
    def kept_filters(self) -> int:
        return sum(len(kept.filters) for kept in self.groups.values())

    @property
    def all_filters(self) -> int:
        return sum(kept.width for kept in self.groups.values())

    @property
    def digest(self) -> str:
        """Identifies this exact plan: weights belong to one plan."""
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
            **({"keep_class": True} if self.keep_class else {}),
            **({"on_decision": self.on_decision} if self.on_decision != "refuse" else {}),
            "groups": {name: {"width": k.width, "keep": list(k.filters)} for name, k in self.groups.items()},
            "base": None if self.base is None else self.base._tree(),
        }

    @staticmethod
    def from_json(text: str, source: str = "the plan") -> Plan:
        """Parse a plan; raises an error with the reason if it is invalid. ``source`` names it in messages."""
        try:
            data = parse_json(text)
        except ValueError as error:
            raise ArtifactError(f"{source} is not JSON ({error}); it may have been cut short.") from error
        return _plan(data, source)

    @staticmethod
    def read(path: Path) -> Plan:
        return Plan.from_json(read_text(path, "The plan", LARGEST_FILE), f"The plan {path}")


def remember_plan(small: nn.Module, plan: Plan) -> None:
    """Attach the plan to a pruned network, for paam.save; copies of the network keep it."""
    if isinstance(small, fx.GraphModule):
        small.meta["paam_plan"] = plan  # copying a GraphModule drops other attributes
    else:
        small.paam_plan = plan  # type: ignore[assignment]


def recall_plan(small: nn.Module) -> Plan | None:
    plan = small.meta.get("paam_plan") if isinstance(small, fx.GraphModule) else getattr(small, "paam_plan", None)
    return plan if isinstance(plan, Plan) else None


@dataclass(frozen=True)
class _Group:
    """A group in the file format."""

    width: Annotated[int, Range(1)]
    keep: list[int]

    def __post_init__(self) -> None:
        inside = not self.keep or (self.keep[0] >= 0 and self.keep[-1] < self.width)
        if not inside or any(a >= b for a, b in itertools.pairwise(self.keep)):
            raise ArtifactError("keep must be ascending filter numbers below the width.")


@dataclass(frozen=True)
class _File:
    """A plan in the file format."""

    format: Annotated[str, OneOf(FORMAT)]
    version: int
    fingerprint: str
    inputs: list[Any]
    placement: str
    streams: str
    groups: dict[str, _Group]
    ignore: tuple[str, ...] = ()
    keep_class: bool = False
    on_decision: str = "refuse"
    base: Any = None

    def __post_init__(self) -> None:
        if not self.inputs or not all(map(_is_input, self.inputs)):
            raise ArtifactError("inputs must be the shapes of the network's inputs.")


def _plan(data: object, source: str) -> Plan:
    chain = []
    while data is not None:  # a loop, not a recursion: a malicious file may be nested deeply
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ArtifactError(f"{source} is not a paam plan.")
        if data.get("version") != VERSION:
            raise ArtifactError(f"{source} has plan version {data.get('version')}; this paam reads version {VERSION}.")
        try:
            file = read(_File, data, extra=True)
        except InvalidError as error:
            raise ArtifactError(f"{source} is not valid: {error}") from error
        chain.append(
            Plan(
                file.fingerprint,
                tuple(map(_input, file.inputs)),
                file.placement,
                file.streams,
                {name: Kept(group.width, tuple(group.keep)) for name, group in file.groups.items()},
                file.ignore,
                None,
                file.keep_class,
                file.on_decision,
            )
        )
        data = file.base
    if not chain:
        raise ArtifactError(f"{source} is not a paam plan.")
    return functools.reduce(lambda base, plan: dataclasses.replace(plan, base=base), reversed(chain))


def is_typed(value: object) -> bool:
    """Whether an input is described by shape and dtype, as integer inputs are."""
    return isinstance(value, dict) and value.keys() == {"shape", "dtype"} and isinstance(value["dtype"], str)


def _is_input(value: object, depth: int = 0) -> bool:
    if isinstance(value, dict) and is_typed(value):
        return _is_shape(value["shape"])
    if isinstance(value, dict):
        return bool(value) and depth < 3 and all(_is_input(part, depth + 1) for part in value.values())
    nested = isinstance(value, list) and value and depth < 3 and all(_is_input(part, depth + 1) for part in value)
    return _is_shape(value) or bool(nested)


def _input(value: Any) -> Any:
    if is_typed(value):
        return {"shape": tuple(value["shape"]), "dtype": value["dtype"]}
    if isinstance(value, dict):
        return {name: _input(part) for name, part in value.items()}
    return tuple(value) if _is_shape(value) else [_input(part) for part in value]


def _is_shape(value: object) -> bool:
    sizes = value if isinstance(value, list) else []
    return bool(sizes) and all(type(n) is int and n > 0 for n in sizes) and math.prod(sizes) <= LARGEST_INPUT
