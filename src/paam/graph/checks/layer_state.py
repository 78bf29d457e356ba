"""Fingerprint of a custom layer: layers with equal state compute the same, apart from the values of their weights."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

PLAIN = (str, bytes, int, float, complex, bool, type(None))
AT_ONCE = frozenset((str, int, bool, type(None)))
APART = ("_parameters", "_buffers", "_modules")
"""Attributes of a module that are handled separately."""


class Itself:
    """Equal to nothing but itself. Keeps its value alive, so that no other object gets the same id()."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def state_of(layer: nn.Module) -> Hashable:
    """Equal for layers of one class that differ only in the values of their weights.

    Class attributes are not compared: they are assumed not to change while one network is examined.
    """
    return tuple((name, *_state_of_module(module)) for name, module in layer.named_modules())


def _state_of_module(module: nn.Module) -> tuple[Any, ...]:
    attributes = [(name, *_attribute(value)) for name, value in vars(module).items() if name not in APART]
    parameters = [(name, _shape(p)) for name, p in module._parameters.items()]
    buffers = [(name, _shape(b), _whole_numbers(b)) for name, b in module._buffers.items()]
    return type(module), tuple(attributes), tuple(parameters), tuple(buffers)


def _attribute(value: Any) -> tuple[Hashable, ...]:
    """An attribute's value in comparable form; most are plain values or empty hook dictionaries."""
    kind = type(value)
    if kind in AT_ONCE:
        return kind.__name__, value
    return (kind,) if kind in (dict, OrderedDict) and not value else (comparable(value),)


def _shape(tensor: Tensor | None) -> Hashable:
    return None if tensor is None else (tuple(tensor.shape), tensor.dtype)


def _whole_numbers(buffer: Tensor | None) -> Hashable:
    """Integer buffers, such as indices and masks, are no weights and not redrawn: trial results hold for these only."""
    return None if buffer is None or buffer.is_floating_point() else _content(buffer)


def _content(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def comparable(value: Any, inside: tuple[int, ...] = ()) -> Hashable:
    """A form that is equal for equal values; values that cannot be compared are equal to themselves only."""
    if isinstance(value, PLAIN):
        return type(value), repr(value) if isinstance(value, float | complex) else value
    if isinstance(value, Tensor) and type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided:
        return _shape(value), str(value.device), _content(value)
    if id(value) in inside:
        return Itself(value)
    inside = (*inside, id(value))
    if isinstance(value, Mapping):
        return type(value), tuple((comparable(k, inside), comparable(v, inside)) for k, v in value.items())
    if isinstance(value, tuple | list):
        return type(value), tuple(comparable(part, inside) for part in value)
    if isinstance(value, set | frozenset):
        return type(value), frozenset(comparable(part, inside) for part in value)
    if isinstance(value, functools.partial):
        return functools.partial, comparable((value.func, value.args, value.keywords), inside)
    return Itself(value)
