"""Copies of a model's structure that share its tensors."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from paam.errors import GraphError, one_line
from paam.graph.modes import has_plain_modes, in_mode

OWN_WAYS = ("__deepcopy__", "__copy__", "__reduce__", "__reduce_ex__", "__getstate__")
PLAIN = frozenset((str, int, float, bool, type(None), torch.dtype, torch.device, FunctionType, BuiltinFunctionType))
"""Immutable types, which copies may share."""
CONTAINERS = frozenset((dict, OrderedDict, list, set))


def deep_copy(model: nn.Module) -> nn.Module:
    """A copy that shares nothing with the model."""
    _refuse_old_norms(model)
    with _copying(model):
        return copy.deepcopy(model)


def _refuse_old_norms(model: nn.Module) -> None:
    """Refuse torch's old weight_norm and spectral_norm: they store a computed weight in place of a parameter."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm | SpectralNorm):
                which = "weight_norm" if isinstance(hook, WeightNorm) else "spectral_norm"
                name = next(name for name, other in model.named_modules() if other is module)
                raise GraphError(
                    f"'{name}' has torch.nn.utils.{which}, whose computed weight can neither be copied nor cut. Use"
                    f" torch.nn.utils.parametrizations.{which} in its place, or torch.nn.utils.remove_{which}(layer)"
                    " once it is trained."
                )


@contextmanager
def _copying(model: nn.Module) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # custom modules may hold anything
        raise GraphError(
            f"{type(model).__name__} cannot be copied ({one_line(error)}), which pruning does. What it holds beside"
            " parameters, buffers and modules must be something that copy.deepcopy takes: a tensor that forward()"
            " stores needs x.detach(), an open file or a lock no place in it."
        ) from error


def light_copy(model: nn.Module) -> nn.Module:
    """A copy with new modules that share the model's parameters and buffers.

    Written by hand, module by module: copy.deepcopy would be ten times slower. Caches that evaluation mode derived
    from the weights, such as a table of biases, are dropped, as models do when training begins: the copy will have
    other weights.
    """
    _refuse_old_norms(model)
    modules = list(model.modules())
    memo: dict[int, Any] = {id(tensor): tensor for tensor in tensors_of(modules)}
    ours = [module for module in modules if _is_ordinary(type(module))]
    for module in ours:
        memo[id(module)] = twin = object.__new__(type(module))
        twin.__dict__ = dict(module.__dict__)
    for module in ours:
        held = memo[id(module)].__dict__
        for name, value in held.items():
            kind = type(value)
            if kind in PLAIN:
                continue
            if kind in CONTAINERS and not value:  # mostly hooks
                held[name] = kind()
            elif name in ("_parameters", "_buffers"):
                held[name] = dict(value)
            elif not _may_be_shared(value):
                with _copying(model):
                    held[name] = copy.deepcopy(value, memo)
    with _copying(model):
        twin = copy.deepcopy(model, memo)
    if all(has_plain_modes(type(module)) for module in modules):
        return twin
    with in_mode(twin, True):
        return twin


def tensors_of(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """All parameters and buffers directly in these modules; shared tensors are repeated."""
    for module in modules:
        for held in (module._parameters, module._buffers):
            yield from (tensor for tensor in held.values() if tensor is not None)


def _may_be_shared(value: Any) -> bool:
    return isinstance(value, type) or (type(value) is tuple and all(type(part) in PLAIN for part in value))


def _is_ordinary(kind: type) -> bool:
    """Whether objects of a class can be copied by copying their attributes."""
    return all(getattr(kind, way, None) is getattr(nn.Module, way, None) for way in OWN_WAYS)


def computed_weights(module: nn.Module) -> dict[str, Tensor]:
    """The weights that a parametrized layer computes, by name."""
    parametrizations = module.parametrizations
    assert isinstance(parametrizations, nn.ModuleDict)
    with in_mode(parametrizations, False), torch.no_grad():  # in training, a spectral norm updates its vectors
        return {name: getattr(module, name).clone() for name in parametrizations}


def write_out_weights(model: nn.Module) -> None:
    """Replace parametrizations, in place, by the weights that they compute: after cutting, these would differ.

    Not torch's remove_parametrizations(): it changes the class and the tensors, which a copy shares with its original.
    """
    for module in [module for module in model.modules() if is_parametrized(module)]:
        parametrizations = module.parametrizations
        assert isinstance(parametrizations, nn.ModuleDict)
        computed = computed_weights(module)
        trained = any(p.requires_grad for p in parametrizations.parameters())
        module.__class__ = type(module).__mro__[1]
        del module._modules["parametrizations"]
        for name, value in computed.items():
            module.register_parameter(name, nn.Parameter(value, trained))
