"""Plan the runs of a sweep: every combination of recipes, settings and seeds, each in its own directory."""

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
"""Maximum bytes of a variant's name; a directory name may have 255, suffixes included."""


@dataclass(frozen=True)
class Common:
    """What all runs of a sweep share: settings such as "finetune.lr=0.1", and other options of `paam prune`."""

    settings: tuple[str, ...] = ()
    data: str | None = None
    device: str = "auto"
    trust_code: bool = False


@dataclass(frozen=True)
class Planned:
    """One run: its directory and its variant (without the seed). ``settings``: varied and shared ones."""

    out: Path
    variant: str
    seed: int
    recipe: str
    settings: tuple[str, ...]
    common: Common

    @property
    def overrides(self) -> dict[str, Any]:
        """The settings as recipe overrides."""
        data = {} if self.common.data is None else {"data.directory": self.common.data}
        return {**dict(map(parse_override, self.settings)), **data}

    @property
    def arguments(self) -> list[str]:
        """Arguments for `paam prune`."""
        options = [part for setting in self.settings for part in ("--set", setting)]
        options += ["--device", self.common.device]
        options += [] if self.common.data is None else ["--data", self.common.data]
        options += [FLAG] if self.common.trust_code else []
        return [self.recipe, "--seed", str(self.seed), "--out", str(self.out), *options]


def plan_sweep(
    recipes: Sequence[str], seeds: Sequence[int], vary: Sequence[str], common: Common, out: Path
) -> list[Planned]:
    """Every combination, seed by seed. ``vary``: strings such as "prune.balance=area,side"."""
    choices: dict[str, list[str]] = {}
    given = {_key_of(setting) for setting in common.settings} | (
        {"data.directory"} if common.data is not None else set()
    )
    for text in vary:
        key, equals, listed = text.partition("=")
        values = _split(listed)
        if not equals or not key.strip() or not all(values):
            raise RecipeError(
                f"--vary takes key=value,value, for example --vary prune.balance=area,side (got '{text}')."
            )
        key = key.strip()
        if key in choices or key in given:
            raise RecipeError(f"--vary {key} is given twice; put all its values into one --vary.")
        choices[key] = [f"{key}={value}" for value in values]
        meant = [parse_override(setting)[1] for setting in choices[key]]
        if any(one == other for one, other in itertools.combinations(meant, 2)):
            raise RecipeError(f"--vary {key} has a duplicate value: {listed}. Remove it.")
    planned = []
    for seed, recipe, varied in itertools.product(seeds, recipes, itertools.product(*choices.values())):
        settings = (*varied, *common.settings)
        variant = _variant(recipe, settings)
        planned.append(Planned(out / f"{variant}-seed{seed}", variant, seed, recipe, settings, common))
    if len({run.out for run in planned}) < len(planned):
        raise RecipeError("Two runs of the sweep would share one directory: give the recipes different names.")
    return planned


def _key_of(setting: str) -> str:
    return setting.partition("=")[0].strip()


def _variant(recipe: str, settings: Sequence[str]) -> str:
    """A unique name for a variant, also among sweeps with other shared settings."""
    name = "-".join([Path(recipe).stem, *(setting.replace("/", "_") for setting in settings)])
    encoded = name.encode("utf-8", "replace")
    if len(encoded) <= LONGEST:
        return name
    return f"{encoded[: LONGEST - 9].decode('utf-8', 'ignore')}-{hashlib.sha256(encoded).hexdigest()[:8]}"


def _split(listed: str) -> list[str]:
    """Split at commas outside of brackets and quotes: a value may be a list."""
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
