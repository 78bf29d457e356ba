"""Recipes: one experiment as TOML, read strictly: unknown names, wrong types and impossible values are refused."""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from paam.activations import ACTIVATIONS
from paam.data import DATASETS
from paam.errors import PaamError, RecipeError, nearest, reason
from paam.network import BALANCES, PLACEMENTS, STREAMS
from paam.schedule import DECAYS, LENGTHS, Schedule
from paam.scorers import FIXED, LEARNING_RATES, SCORERS
from paam.select import MODIFIERS, Target
from paam.settings import (
    DataSettings,
    DistillSettings,
    ModelSettings,
    OptimizerSettings,
    PruneSettings,
    TrainSettings,
)

_SGD = OptimizerSettings("sgd", 0.1, 0.9, False, 5e-4)


@dataclass(frozen=True)
class Recipe:
    """Everything that determines a run, but for seed, device and where the data lies."""

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

    @property
    def score_lr(self) -> float:
        return LEARNING_RATES[self.prune.scorer] if self.score.lr is None else self.score.lr


CHOICES: dict[str, Sequence[str]] = {
    "data.name": DATASETS,
    "prune.scorer": tuple(SCORERS),
    "prune.activation": tuple(ACTIVATIONS),
    "prune.balance": BALANCES,
    "prune.placement": PLACEMENTS,
    "prune.streams": STREAMS,
    "prune.score_norm": ("eval", "train"),
    **{f"{phase}.optimizer": ("sgd", "adam") for phase in ("warmup", "score", "weight", "finetune")},
    **{f"{phase}.decay": tuple(DECAYS) for phase in ("warmup", "score", "weight", "finetune")},
}

_INF = float("inf")
RANGES: dict[str, tuple[float, float]] = {
    "data.image_size": (1, 4096),
    "data.holdout": (0, 0.9),
    "data.batch_size": (1, 1 << 20),
    "data.crop": (0, 256),
    "data.cutout": (0, 4096),
    "data.mixup": (0, 100),
    "data.memory": (0, _INF),
    "data.workers": (0, 1024),
    "distill.weight": (0, 1),
    "distill.temperature": (1e-3, 1e3),
    "target.round_to": (1, 4096),
    "prune.penalty": (0, _INF),
    "prune.dim_ratio": (1e-6, 64),
    "prune.alpha": (1e-12, _INF),
    **{f"schedule.{key}": limits for key, limits in LENGTHS.items()},
    "train.checkpoint_every": (1, 1_000_000),
    "train.threads": (0, 1024),
    **{f"{phase}.lr": (0, 1e6) for phase in ("warmup", "score", "weight", "finetune")},
    **{f"{phase}.momentum": (0, 1) for phase in ("warmup", "score", "weight", "finetune")},
    **{f"{phase}.weight_decay": (0, 1e6) for phase in ("warmup", "score", "weight", "finetune")},
    **{f"{phase}.ramp": (0, 1_000_000) for phase in ("warmup", "score", "weight", "finetune")},
    **{f"{phase}.average": (0, 0.999999) for phase in ("warmup", "score", "weight", "finetune")},
}


def shipped_recipes() -> dict[str, str]:
    """Name and one-line description of every recipe in the package, variants included."""
    listed: dict[str, str] = {}
    for file in sorted(resources.files("paam.recipes").iterdir(), key=lambda f: f.name):
        if file.name.endswith(".toml"):
            tree = tomllib.loads(file.read_text(encoding="utf-8"))
            name = file.name.removesuffix(".toml")
            listed[name] = str(tree["description"])
            for variant, changes in tree.get("variants", {}).items():
                listed[f"{name}-{variant}"] = f"the same with {', '.join(_flat(changes))}"
    return listed


def load_recipe(name: str, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """A shipped recipe by name or one's own by path, with dotted ``overrides`` such as {"finetune.lr": 0.05}."""
    if name.endswith(".toml"):
        try:
            tree = _parse(name, Path(name).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"The recipe file {name} cannot be read: {reason(error)}.") from error
    else:
        tree = _shipped(name)
    tree.pop("variants", None)
    overrides = overrides or {}
    shapes = [f"target.{key}" for key in MODIFIERS]
    if any(key.startswith("target.") and key not in shapes for key in overrides):
        # A new target takes the place of the recipe's own; widths are nothing that could be shaped.
        kept = () if "target.widths" in overrides else MODIFIERS
        tree["target"] = {key: value for key, value in tree.get("target", {}).items() if key in kept}
    for key, value in overrides.items():
        _override(tree, key, value)
    return recipe_from_tree(tree)


def _shipped(name: str) -> dict[str, Any]:
    """The tree of a shipped recipe; "base-variant" is the base with that variant's changes."""
    if name not in (known := shipped_recipes()):
        hint = nearest(name, known)
        raise RecipeError(f"There is no recipe '{name}'.{hint} Your own recipe is given as a path ending in .toml.")
    folder = resources.files("paam.recipes")
    base, variant = name, ""
    if not (folder / f"{base}.toml").is_file():
        base, _, variant = name.rpartition("-")
    tree = _parse(name, (folder / f"{base}.toml").read_text(encoding="utf-8"))
    for section, changes in tree["variants"][variant].items() if variant else ():
        tree[section] |= changes
    return tree


def _parse(name: str, text: str) -> dict[str, Any]:
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
        raise RecipeError(f"--set takes key=value, for example --set finetune.lr=0.05; '{text}' was given.")
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"--set {key.strip()} has a value that cannot be read: {error}.") from error
    return key.strip(), value


def recipe_from_tree(tree: Mapping[str, Any]) -> Recipe:
    """Check a parsed TOML tree and build the recipe."""
    recipe: Recipe = _build(Recipe, tree, "")
    for phase in ("warmup", "score", "weight", "finetune"):
        settings: OptimizerSettings = getattr(recipe, phase)
        if settings.nesterov and not settings.momentum:
            raise RecipeError(f"{phase}.nesterov needs a {phase}.momentum above 0.")
        if settings.average and phase in ("score", "weight"):
            raise RecipeError(
                f"{phase}.average must be 0: phases that alternate go on from what they trained, not from its mean."
            )
    if recipe.distill.teacher is not None and not recipe.distill.weight:
        raise RecipeError("distill.teacher teaches nothing while distill.weight is 0; set it to 0.7, for example.")
    if recipe.prune.scorer in FIXED and recipe.schedule.score:
        raise RecipeError(f"The scorer '{recipe.prune.scorer}' learns nothing: set schedule.score to 0.")
    if recipe.prune.scorer not in FIXED and not recipe.schedule.score:
        raise RecipeError(
            f"The scorer '{recipe.prune.scorer}' learns in score phases: set schedule.score to 1 or more, or take"
            f" one that learns nothing: {', '.join(FIXED)}."
        )
    return recipe


def recipe_to_toml(recipe: Recipe) -> str:
    """The recipe with every default written out, as TOML that reads back to the same recipe."""
    tree = dataclasses.asdict(recipe)
    lines = [f"description = {_toml(tree.pop('description'))}"]
    for section, values in tree.items():
        lines += ["", f"[{section}]"]
        lines += [f"{key} = {_toml(value)}" for key, value in values.items() if value is not None]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # TOML's basic strings escape as JSON does, but for DEL.
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


def _build(kind: Any, tree: Any, prefix: str) -> Any:
    if not isinstance(tree, Mapping):
        raise RecipeError(f"'{prefix.rstrip('.')}' must be a section of the recipe, not a value.")
    hints = get_type_hints(kind)
    known = [f.name for f in dataclasses.fields(kind)]
    arguments: dict[str, Any] = {}
    if kind is OptimizerSettings and prefix:
        # Sections of a recipe override single keys of that phase's defaults.
        arguments = dataclasses.asdict(getattr(Recipe(), prefix.rstrip(".")))
    for key, value in tree.items():
        if key not in known:
            raise RecipeError(f"The recipe has no key '{prefix}{key}'.{_hint(prefix, key, known)}")
        if dataclasses.is_dataclass(hints[key]):
            arguments[key] = _build(hints[key], value, f"{prefix}{key}.")
        else:
            arguments[key] = _checked(f"{prefix}{key}", value, hints[key])
    try:
        return kind(**arguments)
    except PaamError as error:
        raise RecipeError(str(error)) from error


def _hint(prefix: str, key: str, known: Sequence[str]) -> str:
    hint = nearest(key, known)
    return hint.replace("mean '", f"mean '{prefix}") if "mean" in hint else hint


def _checked(name: str, value: Any, hint: Any) -> Any:
    if get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise RecipeError(f'{name} must be a list, such as ["layer1", "layer2"]; {value!r} was given.')
        return tuple(_checked(name, item, get_args(hint)[0]) for item in value)
    kinds = get_args(hint) or (hint,)
    if float in kinds and type(value) is int:
        try:
            value = float(value)
        except OverflowError as error:
            raise RecipeError(f"{name} must be a number that a float can hold.") from error
    if type(value) not in kinds:
        wanted = " or ".join(
            {float: "a number", int: "a whole number", str: "text", bool: "true or false"}[k]
            for k in kinds
            if k is not type(None)
        )
        raise RecipeError(f"{name} must be {wanted}; {value!r} was given.")
    if isinstance(value, float) and not math.isfinite(value):
        raise RecipeError(f"{name} must be a finite number; {value} was given.")
    if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise RecipeError(f"{name} must be text in UTF-8; {value!r} is not.")
    if name in CHOICES and value not in CHOICES[name]:
        raise RecipeError(f"{name} cannot be '{value}'.{nearest(value, CHOICES[name])}")
    if name in RANGES and value is not None:
        low, high = RANGES[name]
        if not low <= value <= high:
            limits = f"from {low:g} to {high:g}" if high < _INF else f"{low:g} or more"
            raise RecipeError(f"{name} must be {limits}; {value!r} was given.")
    return value
