"""Trust: a recipe can name code as module:function, which runs only if the user allows it.

That is by naming the model on the command line, or by a flag. Models of paam, torchvision and timm are always allowed.
"""

from __future__ import annotations

from collections.abc import Iterable

from paam.errors import TrustError

ZOOS = ("torchvision", "timm")
"""Packages whose models are built by name, as "timm:efficientnet_b0"; nothing else in them can be called."""
FLAG = "--trust-code"
NAMING = ("model.name", "model")
"""Recipe keys that name the model; setting one on the command line allows its code."""


def is_code(model: str) -> bool:
    """Whether a model's name is user code, a function to import and call."""
    package, colon, _ = model.partition(":")
    return bool(colon) and package not in ZOOS


def is_named(settings: Iterable[str]) -> bool:
    """Whether one of the settings, such as "model.name=mine:make", names the model."""
    return any(setting.partition("=")[0].strip() in NAMING for setting in settings)


def check_trusted(model: str, source: str, *, trusted: bool, or_named: bool = False) -> None:
    """Refuse code that a ``source`` names without the user's permission; ``or_named``: naming the model gives it."""
    if trusted or not is_code(model):
        return
    other = f", or name it yourself with --set model.name={model}" if or_named else ""
    raise TrustError(f"{source} names code to run, '{model}'. If you trust it, give {FLAG}{other}.")
