"""The runs of a sweep, planned: every combination of recipes, settings and seeds, each with a directory of its own."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paam.config.recipe import parse_override
from paam.config.trust import FLAG
from paam.errors import RecipeError

LONGEST = 150
"""Bytes of a variant's name; a directory's may have 255 with what follows it."""


@dataclass(frozen=True)
class Common:
    """What all runs of a sweep have: settings such as "finetune.lr=0.1", and what else `paam prune` takes."""

    settings: tuple[str, ...] = ()
    data: str | None = None
    device: str = "auto"
    trust_code: bool = False


@dataclass(frozen=True)
class Planned:
    """One run: its directory, and the variant that it belongs to, seeds aside. ``settings``: varied and common ones."""

    out: Path
    variant: str
    seed: int
    recipe: str
    settings: tuple[str, ...]
    common: Common

    @property
    def overrides(self) -> dict[str, Any]:
        """What the settings change in the recipe."""
        data = {} if self.common.data is None else {"data.directory": self.common.data}
        return {**dict(map(parse_override, self.settings)), **data}

    @property
    def arguments(self) -> list[str]:
        """Of `paam prune`."""
        options = [part for setting in self.settings for part in ("--set", setting)]
        options += ["--device", self.common.device]
        options += [] if self.common.data is None else ["--data", self.common.data]
        options += [FLAG] if self.common.trust_code else []
        return [self.recipe, "--seed", str(self.seed), "--out", str(self.out), *options]


def plan_sweep(
    recipes: Sequence[str], seeds: Sequence[int], vary: Sequence[str], common: Common, out: Path
) -> list[Planned]:
    """Every combination, seed by seed. ``vary``: texts such as "prune.balance=area,side"."""
    choices: dict[str, list[str]] = {}
    given = {_key_of(setting) for setting in common.settings} | (
        {"data.directory"} if common.data is not None else set()
    )
    for text in vary:
        key, equals, listed = text.partition("=")
        values = _split(listed)
        if not equals or not key.strip() or not all(values):
            raise RecipeError(
                f"--vary takes key=value,value, for example --vary prune.balance=area,side; not '{text}'."
            )
        key = key.strip()
        if key in choices or key in given:
            raise RecipeError(f"{key} is given twice; all its values belong into one --vary.")
        choices[key] = [f"{key}={value}" for value in values]
        meant = [parse_override(setting)[1] for setting in choices[key]]
        if any(one == other for one, other in itertools.combinations(meant, 2)):
            raise RecipeError(f"--vary {key} has a value twice: {listed}.")
    planned = []
    for seed, recipe, varied in itertools.product(seeds, recipes, itertools.product(*choices.values())):
        settings = (*varied, *common.settings)
        variant = _variant(recipe, settings)
        planned.append(Planned(out / f"{variant}-seed{seed}", variant, seed, recipe, settings, common))
    if len({run.out for run in planned}) < len(planned):
        raise RecipeError("Two runs of the sweep would have one directory: give recipes of different names.")
    return planned


def _key_of(setting: str) -> str:
    return setting.partition("=")[0].strip()


def _variant(recipe: str, settings: Sequence[str]) -> str:
    """A name that tells a variant from others, also from those of a sweep with other common settings."""
    name = "-".join([Path(recipe).stem, *(setting.replace("/", "_") for setting in settings)])
    encoded = name.encode("utf-8", "replace")
    if len(encoded) <= LONGEST:
        return name
    return f"{encoded[: LONGEST - 9].decode('utf-8', 'ignore')}-{hashlib.sha256(encoded).hexdigest()[:8]}"


def _split(listed: str) -> list[str]:
    """At commas, but not inside of brackets and quotes: a value may be a list."""
    values, depth, quoted = [""], 0, False
    for letter in listed:
        if letter == '"':
            quoted = not quoted
        elif not quoted:
            depth += (letter == "[") - (letter == "]")
        if letter == "," and not depth and not quoted:
            values.append("")
        else:
            values[-1] += letter
    return values
