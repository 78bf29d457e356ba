"""Canonical form of recorded torch functions in a graph: x + y, x.add(y) and x.add_(y) are one operation."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paam.errors import GraphError

OPERATORS: dict[str, Callable[..., Any]] = {
    **{"add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv},
    **{"true_divide": operator.truediv, "matmul": operator.matmul, "pow": operator.pow, "remainder": operator.mod},
    **{"__floordiv__": operator.floordiv, "__pow__": operator.pow, "neg": operator.neg, "__eq__": operator.eq},
    **{"__ne__": operator.ne, "gt": operator.gt, "ge": operator.ge, "lt": operator.lt, "le": operator.le},
    **{"eq": operator.eq, "ne": operator.ne, "__getitem__": operator.getitem, "__and__": operator.and_},
    **{"__or__": operator.or_, "__invert__": operator.invert, "__mod__": operator.mod, "__matmul__": operator.matmul},
}
REFLECTED: dict[str, Callable[..., Any]] = {
    **{"__rsub__": operator.sub, "__rdiv__": operator.truediv, "__rtruediv__": operator.truediv},
    **{"__rpow__": operator.pow, "__rmatmul__": operator.matmul, "__rfloordiv__": operator.floordiv},
    **{"__rmod__": operator.mod, "__radd__": operator.add, "__rmul__": operator.mul},
}


def copied_into(values: Tensor, x: Tensor) -> Tensor:
    """The value of x after x.copy_(values)."""
    return values.expand_as(x).to(x.dtype)


def assigned(x: Tensor, key: Any, values: Any) -> Tensor:
    """The value of x after x[key] = values."""
    changed = x.clone()
    changed[key] = values
    return changed


FILLS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "copy": (copied_into, (1, 0)),
    "fill": (torch.full_like, (0, 1)),
    "zero": (torch.zeros_like, (0,)),
}
"""Out-of-place forms of x.copy_(y) and similar: a function, and which of the call's arguments it takes."""
RANDOM = frozenset(
    (
        *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli"),
        *("normal", "bernoulli_", "normal_", "uniform_", "random_", "multinomial", "poisson", "exponential_"),
    )
)
READS_VALUES = frozenset(
    (
        *("__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__", "item", "tolist"),
        *("numpy", "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "is_nonzero", "equal"),
        *("allclose", "__array__", "__nonzero__", "bincount", "histc", "nms"),
    )
)
"""Functions that turn tensor values into Python numbers, or into tensors with a data-dependent shape."""


class Called(NamedTuple):
    """``op`` and ``target`` of a node, and its arguments.

    ``in_place``: the first argument is changed; for :func:`copied_into` the second.
    """

    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    in_place: bool


def is_getter(func: Any) -> bool:
    return type(func).__name__ == "method-wrapper" and func.__name__ == "__get__"


def is_setter(func: Any) -> bool:
    return type(func).__name__ == "method-wrapper" and func.__name__ == "__set__"


def is_method(func: Any) -> bool:
    kind = type(func).__name__
    return kind in ("method_descriptor", "wrapper_descriptor") or getattr(func, "__module__", "") == "torch._tensor"


def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Called:
    """The out-of-place form of a call in the graph."""
    name: str = getattr(func, "__name__", str(func))
    if name == "__setitem__":
        return Called("call_function", assigned, args, kwargs, True)
    method = is_method(func)
    changes = name.endswith("_") and not name.endswith("__")
    if kwargs.get("inplace"):
        changes, kwargs = True, {**kwargs, "inplace": False}
    elif changes:
        name = name[:-1]
    if changes and name in FILLS:
        function, order = FILLS[name]
        given = (*args, *kwargs.values())
        return Called("call_function", function, tuple(given[place] for place in order), {}, True)
    if method:
        if changes and not hasattr(Tensor, name):
            raise GraphError(f"{name}_() has no copying form that paam knows; use another operation.")
        if name in REFLECTED:
            return Called("call_function", REFLECTED[name], args[::-1], kwargs, changes)
        if name in OPERATORS and not kwargs:
            return Called("call_function", OPERATORS[name], args, kwargs, changes)
        return Called("call_method", name, args, kwargs, changes)
    target = func
    if name != getattr(func, "__name__", name):
        target = getattr(torch, name, None) or getattr(nn.functional, name, None) or func
    return Called("call_function", target, args, kwargs, changes)


def property_as_call(name: str, x: Tensor) -> tuple[str, Any, tuple[Any, ...]] | None:
    """Attributes that are operations: x.T, x.mT, x.data. None for metadata such as x.dtype."""
    if name == "mT" or (name == "T" and x.dim() == 2):
        return "call_function", torch.transpose, (x, -2, -1)
    if name == "data":
        return "call_method", "detach", (x,)
    if name in ("T", "H", "mH", "real", "imag"):
        return "call_function", getattr, (x, name)
    return None


def taken_apart(
    name: str,
    input: Tensor,
    into: Any = None,
    dim: int = 0,
    *,
    chunks: Any = None,
    split_size: Any = None,
    split_size_or_sections: Any = None,
) -> tuple[Tensor, Any, int]:
    """What x.chunk(3, 1), x.split(8, 2) and x.unbind(1) split: the tensor, number or size of the parts, and axis."""
    if name == "unbind":
        return input, 1, dim if into is None else into
    given = (into, chunks, split_size, split_size_or_sections)
    return input, next((value for value in given if value is not None), None), dim


def reads_mask(key: Any) -> bool:
    keys = key if isinstance(key, tuple | list) else (key,)
    return any(isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) for part in keys)
