"""Recipes: one experiment as TOML, read strictly: unknown keys, wrong types and invalid values raise an error."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from paam.config.schedule import Schedule
from paam.config.schema import InvalidError, check, check_plain, fields_of, read
from paam.config.settings import (
    DataSettings,
    DistillSettings,
    ModelSettings,
    OptimizerSettings,
    PruneSettings,
    TrainSettings,
)
from paam.config.target import MODIFIERS, Target
from paam.errors import RecipeError, nearest, reason
from paam.files.reading import read_bytes

_SGD = OptimizerSettings("sgd", 0.1, 0.9, False, 5e-4)


@dataclass(frozen=True)
class Recipe:
    """Everything that determines a run, except seed, device and the location of the data."""

    description: str = ""
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    prune: PruneSettings = field(default_factory=PruneSettings)
    target: Target = field(default_factory=lambda: Target(threshold=0.5))
    schedule: Schedule = field(default_factory=Schedule)
    warmup: OptimizerSettings = _SGD
    score: OptimizerSettings = field(default_factory=lambda: OptimizerSettings("adam", None))
    weight: OptimizerSettings = field(default_factory=lambda: OptimizerSettings("adam", 1e-3))
    finetune: OptimizerSettings = field(default_factory=lambda: dataclasses.replace(_SGD, decay="cosine"))
    distill: DistillSettings = field(default_factory=DistillSettings)
    train: TrainSettings = field(default_factory=TrainSettings)


LARGEST_FILE, MOST_DOTS = 256 << 10, 500
"""Maximum bytes of a recipe, and dots in its keys and numbers together."""


def shipped_recipes() -> dict[str, str]:
    """Name and one-line description of every recipe in the package, variants included."""
    listed: dict[str, str] = {}
    for file in sorted(resources.files("paam.config.recipes").iterdir(), key=lambda f: f.name):
        if file.name.endswith(".toml"):
            tree = tomllib.loads(file.read_text(encoding="utf-8"))
            name = file.name.removesuffix(".toml")
            listed[name] = str(tree["description"])
            for variant, changes in tree.get("variants", {}).items():
                listed[f"{name}-{variant}"] = f"the same with {', '.join(_flat(changes))}"
    return listed


def load_recipe(name: str, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """A shipped recipe by name or a file by path, with dotted ``overrides`` such as {"finetune.lr": 0.05}."""
    if name.endswith(".toml"):
        try:
            tree = _parse(name, read_bytes(Path(name), LARGEST_FILE).decode("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"The recipe file {name} cannot be read: {reason(error)}.") from error
    else:
        tree = _shipped(name)
    tree.pop("variants", None)
    overrides = overrides or {}
    shapes = [f"target.{key}" for key in MODIFIERS]
    if any(key.startswith("target.") and key not in shapes for key in overrides):
        # A new target replaces the recipe's; floor, uniform and round_to do not apply to widths.
        kept = () if "target.widths" in overrides else MODIFIERS
        tree["target"] = {key: value for key, value in tree.get("target", {}).items() if key in kept}
    for key, value in overrides.items():
        _override(tree, key, value)
    return recipe_from_tree(tree)


def _shipped(name: str) -> dict[str, Any]:
    """The tree of a shipped recipe; "base-variant" is the base with that variant's changes."""
    if name not in (known := shipped_recipes()):
        hint = nearest(name, known)
        raise RecipeError(f"There is no recipe '{name}'.{hint} For a recipe file give a path that ends in .toml.")
    folder = resources.files("paam.config.recipes")
    base, variant = name, ""
    if not (folder / f"{base}.toml").is_file():
        base, _, variant = name.rpartition("-")
    tree = _parse(name, (folder / f"{base}.toml").read_text(encoding="utf-8"))
    for section, changes in tree["variants"][variant].items() if variant else ():
        tree[section] |= changes
    return tree


_TEXTS = re.compile(  # closed or not: an unclosed string would otherwise be tried again from each of its quotes
    r'"""(?s:\\.|[^\\])*?(?:"{3,5}|\Z)'
    r"|'''(?s:.)*?(?:'{3,5}|\Z)"
    r'|"(?:[^"\\\n]|\\.)*"?'
    r"|'[^'\n]*'?"
    r"|#[^\n]*"
)
"""Strings and comments of TOML, whose dots are not part of a key."""


def _parse(name: str, text: str) -> dict[str, Any]:
    # TOML keys can have any number of parts, and parsing one takes quadratic time.
    if (dots := _TEXTS.sub("", text.replace("\r\n", "\n")).count(".")) > MOST_DOTS:
        raise RecipeError(f"The recipe {name} has {dots:,} dots outside of strings; its keys may have two parts.")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"The recipe {name} is not valid TOML: {error}.") from error


def _flat(tree: Mapping[str, Any]) -> list[str]:
    return [f"{section}.{key} = {value}" for section, values in tree.items() for key, value in values.items()]


def parse_override(text: str) -> tuple[str, Any]:
    """ "finetune.lr=0.05" -> ("finetune.lr", 0.05). Values are TOML; a bare word is a string."""
    key, equals, raw = text.partition("=")
    if not equals or not key.strip():
        raise RecipeError(f"--set takes key=value, for example --set finetune.lr=0.05 (got '{text}').")
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"The value of --set {key.strip()} is not valid TOML: {error}.") from error
    return key.strip(), value


def recipe_from_tree(tree: Mapping[str, Any]) -> Recipe:
    """Check a parsed TOML tree and build the recipe; options of scorers are checked where scorers are known."""
    try:
        recipe = _read(tree)
    except InvalidError as error:
        raise RecipeError(f"Invalid recipe: {error}") from error
    check_values(recipe)
    return recipe


def check_values(recipe: Recipe) -> None:
    """Refuse values out of range and contradictions, also in a recipe that was not read from TOML."""
    try:
        for name, section in fields_of(Recipe).items():
            if section.kind is not None:
                check(getattr(recipe, name), name)
    except InvalidError as error:
        raise RecipeError(f"Invalid recipe: {error}") from error
    for phase in ("warmup", "score", "weight", "finetune"):
        settings: OptimizerSettings = getattr(recipe, phase)
        if settings.nesterov and not settings.momentum:
            raise RecipeError(f"{phase}.nesterov needs a {phase}.momentum above 0.")
        if settings.average and phase in ("score", "weight"):
            raise RecipeError(
                f"{phase}.average must be 0: alternating phases continue from the trained weights, not from their EMA."
            )
    if recipe.distill.teacher is not None and not recipe.distill.weight:
        raise RecipeError("distill.teacher has no effect while distill.weight is 0; set it to 0.7, for example.")


def recipe_to_tree(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain data, section by section, with the keys that it is read from."""
    tree = dataclasses.asdict(recipe)
    tree["prune"] |= tree["prune"].pop("options")
    return tree


def recipe_to_toml(recipe: Recipe) -> str:
    """The recipe with every default written out, as TOML that reads back to the same recipe."""
    tree = recipe_to_tree(recipe)
    lines = [f"description = {_toml(tree.pop('description'))}"]
    for section, values in tree.items():
        lines += ["", f"[{section}]"]
        lines += [f"{key} = {_toml(value)}" for key, value in values.items() if value is not None]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # TOML's basic strings escape as JSON does, except for DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return repr(value)


def _override(tree: dict[str, Any], key: str, value: Any) -> None:
    section, dot, name = key.partition(".")
    if not dot:
        tree[section] = value
        return
    inner = tree.setdefault(section, {})
    if not isinstance(inner, dict):
        raise RecipeError(f"'{section}' is not a section of the recipe.")
    inner[name] = value


def _read(tree: Mapping[str, Any]) -> Recipe:
    """The parsed recipe; optimiser sections override single keys of that phase's defaults."""
    sections = {}
    for name, section in tree.items():
        field = fields_of(Recipe).get(name)
        if field is None or field.kind is None:
            sections[name] = section
            continue
        if field.kind is OptimizerSettings and isinstance(section, Mapping):
            section = {**dataclasses.asdict(getattr(Recipe(), name)), **section}
        if field.kind is PruneSettings and isinstance(section, Mapping):
            own = fields_of(PruneSettings).keys() - {"options"}
            options = {key: _option(f"{name}.{key}", value, own) for key, value in section.items() if key not in own}
            section = {key: value for key, value in section.items() if key in own} | {"options": options}
        sections[name] = read(field.kind, section, name)
    return read(Recipe, sections)


def _option(key: str, value: Any, own: Collection[str]) -> Any:
    """The value of a key that may be an option of a scorer, or a misspelt one of the section's own."""
    try:
        return check_plain(value, key)
    except InvalidError as error:
        section, _, name = key.partition(".")
        if hint := difflib.get_close_matches(name, own, n=1):
            raise InvalidError(f"unknown key '{key}'. Did you mean '{section}.{hint[0]}'?") from error
        raise
