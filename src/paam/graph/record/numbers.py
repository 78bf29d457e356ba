"""Numbers that record how they were computed: sizes of tensors while a model's call is recorded.

``x.shape[1] // 2`` is an ordinary int for the model's code, and a node of the graph for paam, so that the graph runs
at other batch and image sizes. If such a number decides a branch, ``if x.shape[2] > 7``, the graph checks at run time
that the decision is the recorded one (:func:`expect`).
"""

from __future__ import annotations

import builtins
import functools
import math
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, fx

from paam.errors import GraphError


class Book(Protocol):
    """Where numbers record their use: the notebook."""

    active: bool

    def compute(self, function: Callable[..., Any], args: tuple[Any, ...], value: Any) -> fx.Node: ...

    def decide(self, function: Callable[..., Any], args: tuple[Any, ...], outcome: Any) -> None: ...

    def read_layer(self, name: str) -> None: ...


class Worded:
    """A number that becomes fixed when formatted as text, which may be parsed again; except in assertion messages."""

    book: Book

    def __str__(self) -> str:
        return str(self._in_words())

    __repr__ = __str__

    def __format__(self, form: str) -> str:
        return format(self._in_words(), form)

    def _in_words(self) -> Any:
        names = sys._getframe(2).f_code.co_names
        return plain(self) if any("assert" in name for name in names) else self.settle()

    def settle(self) -> Any:
        raise NotImplementedError


class Number(Worded):
    """Base of recorded ints and floats. The node is created when the number is first read."""

    source: tuple[Callable[..., Any], tuple[Any, ...]]
    _node: fx.Node | None

    def node(self) -> fx.Node:
        if self._node is None:
            self._node = self.book.compute(*self.source, plain(self))
        return self._node

    def settle(self) -> Any:
        """The plain number, for code that needs one: the graph is then valid for this value only."""
        value = plain(self)
        if self.book.active:
            self.book.decide(itself, (self,), value)
        return value

    def __reduce__(self) -> Any:
        return itself, (plain(self),)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return plain(self)

    def __bool__(self) -> bool:
        return bool(_compared(operator.truth, self))

    def __hash__(self) -> int:
        return hash(self.settle())

    def __int__(self) -> int:
        return int(self.settle())

    def __float__(self) -> float:
        return float(self.settle())


class RecordedInt(Number, int):
    """An int, such as one size of a tensor."""

    __hash__ = Number.__hash__


class RecordedFloat(Number, float):
    """A float computed from sizes, such as ``x.shape[1] ** -0.5``."""

    __hash__ = Number.__hash__


class LayerNumber(Worded, int):
    """A layer's attribute such as ``conv.out_channels``; reads by the forward() of another module are noted.

    The attribute differs in the small network, so that code which reads it would compute something else.
    """

    book: Book
    name: str

    def settle(self) -> int:
        if self.book.active:
            self.book.read_layer(self.name)
        return int(plain(self))

    def __hash__(self) -> int:
        return hash(self.settle())

    def __int__(self) -> int:
        return self.settle()

    def __float__(self) -> float:
        return float(self.settle())

    def __reduce__(self) -> Any:
        return itself, (plain(self),)

    def __copy__(self) -> Any:
        return plain(self)

    def __deepcopy__(self, memo: Any) -> Any:
        return plain(self)


class Sizes(tuple[Any, ...]):
    """The shape of a tensor, as recorded numbers."""

    def __getitem__(self, place: Any) -> Any:
        chosen = super().__getitem__(place)
        return Sizes(chosen) if isinstance(place, slice) else chosen

    def numel(self) -> Any:
        return functools.reduce(operator.mul, self) if self else 1


def itself(value: Any) -> Any:
    return value


def number(book: Book, value: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """A recorded number, or the value itself if it is not a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    made: Any = RecordedInt(value) if isinstance(value, int) else RecordedFloat(value)
    made.book, made.source, made._node = book, (function, args), None
    return made


def layer_number(book: Book, value: int, name: str) -> LayerNumber:
    made = LayerNumber(value)
    made.book, made.name = book, name
    return made


def plain(value: Any) -> Any:
    """A plain number of the same value."""
    if isinstance(value, RecordedInt | LayerNumber):
        return int.__int__(value)
    return float.__float__(value) if isinstance(value, RecordedFloat) else value


def _operate(function: Callable[..., Any], *operands: Any) -> Any:
    if not all(isinstance(operand, int | float) for operand in operands):
        return NotImplemented
    value = function(*map(plain, operands))
    book = next(o.book for o in operands if isinstance(o, Worded))
    operands = tuple(o.settle() if isinstance(o, LayerNumber) else o for o in operands)
    if not book.active or not any(isinstance(operand, Number) for operand in operands):
        return value
    return number(book, value, function, operands)


def _compared(function: Callable[..., Any], *operands: Any) -> Any:
    if not all(isinstance(operand, int | float) for operand in operands):
        return NotImplemented
    outcome = function(*map(plain, operands))
    operands = tuple(o.settle() if isinstance(o, LayerNumber) else o for o in operands)
    recorded = [operand for operand in operands if isinstance(operand, Number)]
    if recorded and recorded[0].book.active:
        recorded[0].book.decide(function, operands, outcome)
    return outcome


def _divided(over: Any, by: Any) -> Any:
    return _operate(operator.floordiv, over, by), _operate(operator.mod, over, by)


def _settling(name: str) -> Callable[..., Any]:
    """A method of plain numbers, applied to the fixed value."""
    return lambda self, *others: getattr(self.settle(), name)(*map(plain, others))


def _forward(function: Callable[..., Any], use: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *others: use(function, self, *others)


def _reflected(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, other: _operate(function, other, self)


_ARITHMETIC = ("add", "sub", "mul", "floordiv", "truediv", "mod")
_BITS = ("and_", "or_", "xor", "lshift", "rshift")
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_UNARY: dict[str, Callable[..., Any]] = {
    **{"neg": operator.neg, "abs": abs, "ceil": math.ceil, "floor": math.floor},
    **{"round": round, "trunc": math.trunc, "pow": pow},
}
_METHODS = ("is_integer", "as_integer_ratio", "bit_length", "bit_count", "to_bytes", "hex")
"""Methods of int or float that have no operation in the graph."""

_RECORDED = ("ceil", "floor", "trunc", "prod", "fsum", "sumprod")
"""Functions of math that call the numbers' methods. All others read the C value directly."""
_MATH = [name for name, value in vars(math).items() if callable(value) and name not in _RECORDED]

_class: type
_function: Callable[..., Any]
for _class in (RecordedInt, RecordedFloat, LayerNumber):
    for _name in (*_ARITHMETIC, *(_BITS if issubclass(_class, int) else ())):
        _function = getattr(operator, _name)
        _bare = _name.rstrip("_")
        setattr(_class, f"__{_bare}__", _forward(_function, _operate))
        setattr(_class, f"__r{_bare}__", _reflected(_function))
    for _name in _COMPARISONS:
        setattr(_class, f"__{_name}__", _forward(getattr(operator, _name), _compared))
    for _name, _function in _UNARY.items():
        setattr(_class, f"__{_name}__", _forward(_function, _operate))
    for _name in _METHODS:
        if hasattr(_class, _name):
            setattr(_class, _name, _settling(_name))
    setattr(_class, "__rpow__", _reflected(pow))  # noqa: B010
    setattr(_class, "__divmod__", lambda self, other: _divided(self, other))  # noqa: B010
    setattr(_class, "__rdivmod__", lambda self, other: _divided(other, self))  # noqa: B010


@contextmanager
def builtins_noticed() -> Iterator[None]:
    """Make len() of a tensor return a recorded size, and range() and math fix the numbers that they get.

    A loop over a range is unrolled, so that the graph is valid for these numbers alone; likewise for results of C code.
    """
    original, plain_len = builtins.range, builtins.len
    in_c = {name: getattr(math, name) for name in _MATH}

    class Noticing(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

        def __call__(cls, *bounds: Any) -> range:
            for bound in bounds:
                if isinstance(bound, Worded):
                    bound.settle()
            return original(*map(plain, bounds))

    builtins.range = Noticing("range", (), {})  # type: ignore[misc, assignment]
    builtins.len = lambda x: x.shape[0] if isinstance(x, Tensor) and x.dim() else plain_len(x)
    for name, function in in_c.items():
        setattr(math, name, _taking_plain(function))
    try:
        yield
    finally:
        builtins.range, builtins.len = original, plain_len  # type: ignore[misc]
        for name, function in in_c.items():
            setattr(math, name, function)


def _taking_plain(function: Callable[..., Any]) -> Callable[..., Any]:
    def take(*numbers: Any, **options: Any) -> Any:
        return function(*(x.settle() if isinstance(x, Worded) else x for x in numbers), **options)

    return take


def parts_of(size: int, into: int, chunks: bool) -> int:
    """Number of parts that x.chunk(into) or x.split(into) makes along an axis of a given size."""
    return -(-size // (-(-size // into) if chunks else into))


def expect(value: Any, recorded: Any, line: str = "", way: str = "") -> None:
    """Check that a decision made during recording has the same outcome now.

    ``way``: the mode in which the network makes it, if only in one (ways.py).
    """
    if value != recorded:
        where = f" at `{line}`" if line else ""
        raise GraphError(
            f"The network takes another way for an input of this size{where}: there {value} stands where {recorded}"
            " stood for the example. Use inputs of the example's size, or an example of the size that is used."
        )
