"""Networks by name: the bundled CIFAR ones, zoo models, or user code as ``module:function``."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path

from torch import nn

from paam.errors import RecipeError, nearest, one_line
from paam.models.resnet_cifar import CifarResNet, resnet20, resnet32, resnet44, resnet56, resnet110
from paam.models.vgg_cifar import VGG, vgg16_bn
from paam.models.zoo import ZOOS

MODELS = {
    "resnet20": resnet20,
    "resnet32": resnet32,
    "resnet44": resnet44,
    "resnet56": resnet56,
    "resnet110": resnet110,
    "vgg16_bn": vgg16_bn,
}


def build_model(name: str, *, num_classes: int, in_channels: int) -> nn.Module:
    """Build a bundled network, a torchvision or timm model, or call ``module:function``.

    The function is called with those of the two arguments that it accepts.
    """
    if name in MODELS:
        return MODELS[name](num_classes=num_classes, in_channels=in_channels)
    zoo, colon, member = name.partition(":")
    if colon and zoo in ZOOS:
        try:
            return ZOOS[zoo](member, num_classes, in_channels)
        except RecipeError:
            raise
        except Exception as error:  # any error of the zoo: not all of its models accept these arguments
            raise RecipeError(
                f"The model '{name}' could not be built for {num_classes} classes and {in_channels} input channels,"
                f" {type(error).__name__}: {one_line(error)}."
            ) from error
    if ":" not in name:
        hint = nearest(name, MODELS)
        raise RecipeError(
            f"There is no model '{name}'.{hint} Other forms: 'torchvision:resnet50', 'timm:efficientnet_b0',"
            " or 'module:function' for your own."
        )
    factory = _import_factory(name)
    try:
        accepted = dict(inspect.signature(factory).parameters)
    except ValueError:
        accepted = {}
    offered = {"num_classes": num_classes, "in_channels": in_channels}
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    arguments = {key: value for key, value in offered.items() if takes_all or key in accepted}
    try:
        model = factory(**arguments)
    except (Exception, SystemExit) as error:  # user code can raise anything; report it in one line
        given = ", ".join(f"{key}={value}" for key, value in arguments.items())
        raise RecipeError(
            f"The model '{name}' could not be built, {type(error).__name__}: {one_line(error)};"
            f" fix the function, which was called with ({given})."
        ) from error
    if not isinstance(model, nn.Module):
        raise RecipeError(f"'{name}' returned a {type(model).__name__}; it must return a torch.nn.Module.")
    return model


def _import_factory(name: str):  # type: ignore[no-untyped-def]  # any user-defined callable
    module_name, _, attribute = name.partition(":")
    # The current folder is importable, for a user's model.py. Installed packages take precedence afterwards.
    sys.path.insert(0, here := str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise RecipeError(
            f"The model '{name}' needs the module '{module_name}', which cannot be imported"
            f" ({type(error).__name__}: {one_line(error)}); run where it is importable, or set PYTHONPATH."
        ) from error
    finally:
        sys.path.remove(here)
        if here not in sys.path:
            sys.path.append(here)
    if not callable(factory := getattr(module, attribute, None)):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise RecipeError(f"The module '{module_name}' has no function '{attribute}'.{nearest(attribute, known)}")
    return factory


__all__ = [
    "MODELS",
    "VGG",
    "CifarResNet",
    "build_model",
    "resnet20",
    "resnet32",
    "resnet44",
    "resnet56",
    "resnet110",
    "vgg16_bn",
]
