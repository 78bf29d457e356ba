"""Numeric arrays and byte strings in pickles, rebuilt as data without calling anything.

A pickle names a function, passes it a tuple of arguments, and later gives the result a tuple of state. The
names below only select a case here; nothing is looked up or called. A ValueError says what is refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

NUMERIC = frozenset(("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f4", "f8"))


def named(name: str) -> Name:
    """The allowed name for "module.attribute"."""
    if name not in _NAMES:
        raise ValueError(f"the global {name[:80]!a} is not allowed")
    return _NAMES[name]


def call(function: object, arguments: object) -> Dtype | Array | bytes:
    """The result of calling a named function, for the three calls that arrays and byte strings need."""
    match function, arguments:
        case Name.RECONSTRUCT, (Name.NDARRAY, (0,), "b" | b"b"):
            return Array()
        case Name.DTYPE, (code, 0, 1) if _text(code) in NUMERIC:
            return Dtype(_text(code))
        case Name.ENCODE, (str(text), "latin1"):
            return text.encode("latin-1")
    raise ValueError("it calls a function that does not build numeric arrays or byte strings")


def set_state(target: object, state: object) -> None:
    """Set the byte order of a dtype, or (1, shape, dtype, in Fortran order, content) of an array."""
    match target, state:
        case Dtype() as dtype, (_, order, None, None, None, *_) if _text(order) in ("|", "<", ">", "="):
            dtype.order = _text(order)
        case Array() as array, (1, tuple(shape), Dtype() as dtype, bool(fortran), bytes(content)):
            array.value = _view(shape, np.dtype(dtype.order + dtype.code), fortran, content)
        case _:
            raise ValueError("it sets the state of something that is not a numeric array")


def _view(shape: tuple[Any, ...], dtype: np.dtype[Any], fortran: bool, content: bytes) -> NDArray[Any]:
    """A read-only view, so that thousands of arrays over the same content cost no memory."""
    if not all(isinstance(side, int) for side in shape):
        raise ValueError("it has an array with an invalid shape")
    if math.prod(shape) * dtype.itemsize != len(content):
        raise ValueError(f"it has an array of shape {shape} and type {dtype} with {len(content):,} bytes")
    return np.ndarray(shape, dtype, buffer=content, order="F" if fortran else "C")


def _text(item: object) -> str:
    """Python 2 wrote the short codes of a dtype as byte strings, Python 3 as text; "" for anything else."""
    if isinstance(item, bytes):
        return item.decode("latin-1")
    return item if isinstance(item, str) else ""


class Name(Enum):
    """The only globals that a pickle may mention."""

    RECONSTRUCT = "numpy.core.multiarray._reconstruct"
    NDARRAY = "numpy.ndarray"
    DTYPE = "numpy.dtype"
    ENCODE = "_codecs.encode"


# NumPy 2 moved the first one
_NAMES = {name.value: name for name in Name} | {"numpy._core.multiarray._reconstruct": Name.RECONSTRUCT}


@dataclass(eq=False)
class Dtype:
    """A number type under construction: a code such as "u1", then its byte order."""

    code: str
    order: str = "="


@dataclass(eq=False)
class Array:
    """An array under construction: without a value until its state arrives."""

    value: NDArray[Any] | None = None
