"""Temporarily change modes and flags of a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import nn


def evaluating(model: nn.Module) -> AbstractContextManager[None]:
    """Evaluation mode inside the block; every module's own mode is restored afterwards."""
    return in_mode(model, False)


def switch(model: nn.Module, training: bool) -> nn.Module:
    """model.train(training), with a fast path if no module overrides it."""
    modules = list(model.modules())
    if not all(has_plain_modes(type(module)) for module in modules):
        return model.train(training)
    for module in modules:
        vars(module)["training"] = training
    return model


def has_plain_modes(kind: type) -> bool:
    """Whether train() only sets the ``training`` flag for modules of a class."""
    own = [name for name in ("train", "__setattr__") if getattr(kind, name) is not getattr(nn.Module, name)]
    return not own and not hasattr(kind, "training")


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    if any(mode != training for _, mode in modes):
        switch(model, training)
    try:
        yield
    finally:
        for module, mode in modes:
            if module.training != mode:
                module.training = mode


@contextmanager
def copying(model: nn.Module) -> Iterator[None]:
    """No module works in place inside the block; the flags are restored afterwards."""
    flagged = [module for module in model.modules() if getattr(module, "inplace", False)]
    for module in flagged:
        module.inplace = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in flagged:
            module.inplace = True  # type: ignore[assignment]
