"""The complete state of a model, to check that it is unchanged."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def other_than_before(model: nn.Module, before: nn.Module) -> str:
    """The first part of a model's state that differs from its earlier copy, bit by bit; empty if there is none."""
    pairs = itertools.zip_longest(held(model), held(before), fillvalue=("nothing", None))
    for (name, now), (was_name, was) in pairs:
        if name != was_name or not same(now, was):
            return was_name if was_name != "nothing" else name
    return ""


def held(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Parameters, buffers, modes, hooks and plain attributes, with the items of lists and dictionaries one by one."""
    for place, module in model.named_modules(remove_duplicate=False):
        for name, value in vars(module).items():
            if name == "_modules":
                continue
            yield f"{place}.{name}", type(value)
            if isinstance(value, dict):
                yield f"{place}.{name}", list(value)
            for leaf in tree_leaves(value):
                yield f"{place}.{name}", leaf


def same(now: Any, was: Any) -> bool:
    if isinstance(now, Tensor) and isinstance(was, Tensor):
        facts, were = ((x.dtype, x.shape, x.stride(), x.requires_grad) for x in (now, was))
        return facts == were and torch.equal(now, was)
    return type(now) is type(was) and (callable(now) or bool(now == was))
