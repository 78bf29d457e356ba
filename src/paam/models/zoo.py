"""torchvision and timm models by name, such as "torchvision:resnet50" or "timm:efficientnet_b0", without weights."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from paam.errors import RecipeError, nearest, one_line


def from_torchvision(name: str, num_classes: int, in_channels: int) -> nn.Module:
    models = _import("torchvision")
    _check_name("torchvision", name, models.list_models())
    if in_channels != 3:
        raise RecipeError(f"'torchvision:{name}' takes images of 3 channels, not {in_channels}.")
    builder = models.get_model_builder(name)
    # Segmentation and detection models would download a pretrained backbone.
    backbone = {"weights_backbone": None} if "weights_backbone" in inspect.signature(builder).parameters else {}
    model: nn.Module = builder(weights=None, num_classes=num_classes, **backbone)
    return model


def from_timm(name: str, num_classes: int, in_channels: int) -> nn.Module:
    timm = _import("timm")
    _check_name("timm", name, timm.list_models())
    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=num_classes, in_chans=in_channels)
    return model


ZOOS: dict[str, Callable[[str, int, int], nn.Module]] = {"torchvision": from_torchvision, "timm": from_timm}


def import_torchvision() -> Any:
    """Import torchvision, even if its compiled operators do not match torch, such as a CPU-only one.

    The import then fails because of two operators that no network here uses. Both are only declared.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
    _DECLARED.append(library)
    return importlib.import_module("torchvision")


_DECLARED: list[torch.library.Library] = []
"""Keeps the library objects, and so their declarations, alive."""


def _import(package: str) -> Any:
    try:
        torchvision = import_torchvision()
        return torchvision.models if package == "torchvision" else importlib.import_module(package)
    except Exception as error:  # a package that does not match the installed torch can raise anything
        release = torch.__version__.partition("+")[0]
        raise RecipeError(
            f"{package} models need the package {package}, which cannot be imported ({one_line(error)});"
            f" install one that matches your torch: pip install {package} torch=={release}."
        ) from error


def _check_name(zoo: str, name: str, known: list[str]) -> None:
    if name not in known:
        hint = nearest(name, known)
        raise RecipeError(f"{zoo} has no model '{name}'.{hint if 'mean' in hint else ''}")
