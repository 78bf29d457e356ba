"""Tables of TOML and JSON as dataclasses: a field's annotation has its constraints, and one reader checks them.

    @dataclass(frozen=True)
    class Example:
        rate: Annotated[float, Range(0, above=True)] = 0.1     # a finite number > 0
        decay: Annotated[str, OneOf("constant", "cosine")] = "constant"
        layers: tuple[str, ...] = ()

    read(Example, {"rate": 0.5}, "finetune")     # Example(rate=0.5)
    read(Example, {"rate": 0}, "finetune")       # InvalidError: finetune.rate must be > 0 (got 0).

Recipes, plans and events are such dataclasses.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import numbers
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from paam.errors import PaamError, nearest
from paam.files.reading import shown

T = TypeVar("T")
Plain = bool | int | float | str
"""What a key may hold whose own range is known elsewhere."""
LARGEST = 2**63
"""Larger integers do not fit everywhere that they are used."""


class InvalidError(ValueError):
    """An invalid value; the message says which key, what it must be, and what it is."""


@dataclass(frozen=True, init=False)
class OneOf:
    """Allowed strings of a field."""

    names: tuple[str, ...]

    def __init__(self, *names: str) -> None:
        object.__setattr__(self, "names", names)


@dataclass(frozen=True)
class Range:
    """Finite numbers from ``low`` to ``high``; ``above``: low is exclusive; ``infinite``: inf and -inf are allowed."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    infinite: bool = False

    def holds(self, value: float) -> bool:
        if not math.isfinite(value):
            return self.infinite and not math.isnan(value)
        return (self.low < value if self.above else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        if self.low == -math.inf:
            return "a finite number"
        if self.high < math.inf:
            joined = ("above", "and at most") if self.above else ("from", "to")
            return f"{joined[0]} {self.low:.15g} {joined[1]} {self.high:.15g}"
        return f"{'>' if self.above else '>='} {self.low:.15g}"


Check = Callable[[Any, str], Any]
"""Value, name of its key -> the value with the field's type, or an InvalidError."""


@dataclass(frozen=True)
class Field:
    """``needed``: without a default. ``kind``: the dataclass of a table, None for a value with ``constraints``."""

    check: Check
    needed: bool
    kind: type | None
    constraints: tuple[Any, ...]


_KNOWN: dict[Any, dict[str, Field]] = {}


def fields_of(kind: Any) -> dict[str, Field]:
    """The fields of a dataclass, by name."""
    if kind in _KNOWN:
        return _KNOWN[kind]
    hints = get_type_hints(kind, include_extras=True)
    found = {}
    for field in dataclasses.fields(kind):
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        hint = hints[field.name]
        table = hint if isinstance(hint, type) and dataclasses.is_dataclass(hint) else None
        constraints = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
        found[field.name] = Field(_checker(hint), needed, table, constraints)
    _KNOWN[kind] = found
    return found


def arguments_of(function: Callable[..., Any]) -> dict[str, tuple[Check, Any]]:
    """Of the keyword-only arguments of a function, or of a class, by name: what checks a value, and the default."""
    own = function.__init__ if isinstance(function, type) else function  # type: ignore[misc]
    hints = get_type_hints(own, include_extras=True)
    named = [one for one in inspect.signature(function).parameters.values() if one.kind is one.KEYWORD_ONLY]
    return {one.name: (_checker(hints[one.name]), one.default) for one in named}


def read(kind: type[T], tree: Any, where: str = "", *, extra: bool = False) -> T:
    """Parse a table into the dataclass ``kind``. ``where``: the name of the table, for messages.

    ``extra``: skip unknown keys, as from a later version. Nested tables always skip them.
    """
    if not isinstance(tree, Mapping):
        raise InvalidError(f"{where or 'this'} must be a table (got {shown(tree)}).")
    fields = fields_of(kind)
    prefix = f"{where}." if where else ""
    if not extra:
        for key in tree:
            if key not in fields:
                hint = nearest(key, fields).replace("mean '", f"mean '{prefix}")
                raise InvalidError(f"unknown key '{prefix}{key}'.{hint}")
    values = {}
    for name, field in fields.items():
        if name in tree:
            values[name] = field.check(tree[name], f"{prefix}{name}")
        elif field.needed:
            raise InvalidError(f"{prefix}{name} is missing.")
    try:
        return kind(**values)
    except PaamError as error:
        raise InvalidError(f"{where}: {error}" if where else str(error)) from error


def check(settings: Any, where: str = "") -> None:
    """Refuse an instance of a dataclass with invalid field values."""
    prefix = f"{where}." if where else ""
    for name, field in fields_of(type(settings)).items():
        if field.kind is None:
            field.check(_plain(getattr(settings, name)), f"{prefix}{name}")


def check_field(kind: type, name: str, value: Any) -> None:
    """Refuse an invalid value for one field of a dataclass, as :func:`check` does."""
    fields_of(kind)[name].check(_plain(value), name)


def _plain(value: Any) -> Any:
    """Convert a numpy number or a path to what a file would contain."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _checker(hint: Any) -> Check:
    origin, inner = get_origin(hint), get_args(hint)
    if hint == Plain:
        return check_plain
    if origin is Annotated:
        return _value_checker(inner[0], inner[1])
    if origin in (Union, UnionType):
        (other,) = (part for part in inner if part is not NoneType)
        return _or_none(_checker(other))
    if origin is tuple and inner[-1] is Ellipsis:
        return _items_checker(_checker(inner[0]), tuple)
    if origin is tuple:
        return _pair_checker([_checker(part) for part in inner])
    if origin is list:
        items = _checker(inner[0])
        kind, *constraints = get_args(inner[0]) if get_origin(inner[0]) is Annotated else (inner[0],)
        return _numbers_checker(items, *constraints) if kind is float else _items_checker(items, list)
    if origin is dict:
        return _table_checker(_checker(inner[1]))
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return lambda value, name: value if isinstance(value, hint) else read(hint, value, name, extra=True)
    if hint is Any:
        return lambda value, name: value
    return _value_checker(hint, None)


_WANTED = {float: "a number", int: "a whole number", str: "text", bool: "true or false"}


def _value_checker(hint: Any, constraint: OneOf | Range | None) -> Check:
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (part for part in get_args(hint) if part is not NoneType)
        return _or_none(_value_checker(hint, constraint))
    limits = constraint if isinstance(constraint, Range) else Range()

    def check_value(value: Any, name: str) -> Any:
        given = value
        if hint is float and type(value) is int and abs(value) <= LARGEST:
            value = float(value)
        if type(value) is not hint:
            raise InvalidError(f"{name} must be {_WANTED[hint]} (got {shown(given)}).")
        if hint is int and abs(value) > LARGEST:
            raise InvalidError(f"{name} must be a smaller number (got {shown(given)}).")
        if hint in (int, float) and not limits.holds(value):
            raise InvalidError(f"{name} must be {limits} (got {shown(given)}).")
        if hint is str and not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise InvalidError(f"{name} must be text in UTF-8 (got {shown(given)}).")
        if isinstance(constraint, OneOf) and value not in constraint.names:
            raise InvalidError(f"{name} cannot be {shown(given)}.{nearest(value, constraint.names)}")
        return value

    return check_value


def check_plain(value: Any, name: str) -> Any:
    """A value that a :data:`Plain` key may hold."""
    if type(value) not in _WANTED:
        raise InvalidError(f"{name} must be a number, text, true or false (got {shown(value)}).")
    return _value_checker(type(value), None)(value, name)


def _or_none(inner: Check) -> Check:
    return lambda value, name: None if value is None else inner(value, name)


def _items_checker(inner: Check, made: Callable[[list[Any]], Any]) -> Check:
    def check_items(value: Any, name: str) -> Any:
        if not isinstance(value, list | tuple):
            example = ', such as ["layer1", "layer2"]' if made is tuple else ""
            raise InvalidError(f"{name} must be a list{example} (got {shown(value)}).")
        return made([inner(item, name) for item in value])

    return check_items


def _numbers_checker(one: Check, limits: Range | None = None) -> Check:
    """Same result as number by number, but fast if all are floats within limits, as for a million scores."""
    one_by_one = _items_checker(one, list)
    limits = limits or Range()

    def check_numbers(value: Any, name: str) -> Any:
        # A finite sum rules out NaN, which min and max would miss.
        if isinstance(value, list) and set(map(type, value)) == {float} and math.isfinite(sum(value)):
            if limits.holds(min(value)) and limits.holds(max(value)):
                return value
        return one_by_one(value, name)

    return check_numbers


def _pair_checker(inner: Sequence[Check]) -> Check:
    def check_pair(value: Any, name: str) -> Any:
        if not isinstance(value, list | tuple) or len(value) != len(inner):
            raise InvalidError(f"{name} must be a list of {len(inner)} (got {shown(value)}).")
        return tuple(one(item, name) for one, item in zip(inner, value, strict=True))

    return check_pair


def _table_checker(inner: Check) -> Check:
    def check_table(value: Any, name: str) -> Any:
        if not isinstance(value, dict):
            raise InvalidError(f"{name} must be a table (got {shown(value)}).")
        return {key: inner(item, f"{name}.{key}") for key, item in value.items()}

    return check_table
