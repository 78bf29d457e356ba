"""Whose code runs: a recipe can name anybody's as module:function, and it runs only where the user says so.

That is said by naming the model on the command line, or by a flag. Models of paam, torchvision and timm are not meant.
"""

from __future__ import annotations

from collections.abc import Iterable

from paam.errors import TrustError

ZOOS = ("torchvision", "timm")
"""Packages whose models are called by name, as "timm:efficientnet_b0"; nothing else of them can be called."""
FLAG = "--trust-code"
NAMING = ("model.name", "model")
"""Keys of a recipe that name the model; given on the command line they say that it is to run."""


def is_code(model: str) -> bool:
    """Whether a model's name stands for a function that somebody wrote, which is imported and called."""
    package, colon, _ = model.partition(":")
    return bool(colon) and package not in ZOOS


def is_named(settings: Iterable[str]) -> bool:
    """Whether one of some settings, such as "model.name=mine:make", names the model."""
    return any(setting.partition("=")[0].strip() in NAMING for setting in settings)


def check_trusted(model: str, source: str, *, trusted: bool, or_named: bool = False) -> None:
    """Refuse code that a ``source`` names and nobody has said to run; ``or_named``: naming the model would say it."""
    if trusted or not is_code(model):
        return
    other = f", or name it yourself with --set model.name={model}" if or_named else ""
    raise TrustError(f"{source} names code to run, '{model}'. If you trust it, give {FLAG}{other}.")
