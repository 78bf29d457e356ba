"""A snapshot of a model, to restore it after a call, and the names of its modules and tensors."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from paam.errors import GraphError
from paam.graph.record.own_lines import leave_alone

OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that every module has."""


class Names:
    """The names of a model's modules, parameters and buffers, by id()."""

    def __init__(self, model: nn.Module) -> None:
        self.every = list(model.named_modules())
        self.modules = {id(module): name for name, module in self.every}
        self.tensors: dict[int, str] = {}
        for prefix, module in self.every:
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    self.tensors.setdefault(id(tensor), f"{prefix}.{name}" if prefix else name)


class AsFound:
    """Modes, attributes, submodules, parameters and buffer values of a model, restored after a ``with`` block.

    A forward() may change its buffers during recording, and store results in attributes, or in lists and dictionaries
    that it holds. Replacing a parameter or buffer by another tensor is refused, except in ignored modules
    (``ignored``).
    """

    def __init__(self, model: nn.Module, ignored: Sequence[str] = ()) -> None:
        self.kind = type(model).__name__
        self.names = Names(model)
        self._alone = tuple(f"{name}." for name in ignored)
        self._modules = [
            (module, dict(vars(module)), dict(module._parameters), dict(module._buffers))
            for _, module in self.names.every
        ]
        buffers = {id(b): b for *_, held in self._modules for b in held.values() if b is not None}
        self._values = [(buffer, buffer.clone()) for buffer in buffers.values()]
        own = (value for _, held, *_ in self._modules for name, value in held.items() if name not in OF_MODULES)
        self._containers: list[tuple[Any, Any]] = [(x, x.copy()) for x in own if type(x) in (dict, list, set)]

    def __enter__(self) -> AsFound:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: Any) -> None:
        replaced = self._put_back()
        if replaced and error is None:
            raise GraphError(
                f"{self.kind}.forward() puts another tensor in the place of '{replaced}', which gates and pruning would"
                f" lose. Compute the changed tensor and use it.{leave_alone(replaced.rpartition('.')[0])}"
            )

    def _put_back(self) -> str:
        """Undo what a call changed. Returns the name of a parameter or buffer that was replaced, if any."""
        replaced = ""
        for module, attributes, parameters, buffers in self._modules:
            for now, was in ((module._parameters, parameters), (module._buffers, buffers)):
                if not _is_same(now, was):
                    owner = self.names.modules[id(module)]
                    names = (f"{owner}.{name}".lstrip(".") for name in was if now.get(name) is not was[name])
                    replaced = next((name for name in names if not name.startswith(self._alone)), replaced)
                    now.clear()
                    now.update(was)
            held = vars(module)
            if not _is_same(held, attributes):
                held.clear()
                held.update(attributes)
        for container, contents in self._containers:
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(contents)
        self.put_back_buffers()
        return replaced

    def put_back_buffers(self) -> None:
        with torch.no_grad():
            for buffer, value in self._values:
                buffer.copy_(value)


def _is_same(now: Mapping[str, Any], was: Mapping[str, Any]) -> bool:
    """Whether the same objects have the same names, in the same order."""
    return [*now] == [*was] and all(map(operator.is_, now.values(), was.values()))
