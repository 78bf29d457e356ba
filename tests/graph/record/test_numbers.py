"""Numbers that remember how they were computed, against plain numbers."""

from __future__ import annotations

import builtins
import copy
import math
import operator
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paam.errors import GraphError
from paam.graph.record.numbers import (
    LayerNumber,
    RecordedFloat,
    RecordedInt,
    Sizes,
    builtins_noticed,
    expect,
    itself,
    layer_number,
    number,
    parts_of,
    plain,
)


class Book:
    """Notes what it is told."""

    def __init__(self, active: bool = True) -> None:
        self.active = active
        self.computed: list[Any] = []
        self.decided: list[Any] = []
        self.read: list[str] = []

    def compute(self, function: Callable[..., Any], args: tuple[Any, ...], value: Any) -> Any:
        self.computed.append((function, args, value))
        return SimpleNamespace(value=value)

    def decide(self, function: Callable[..., Any], args: tuple[Any, ...], outcome: Any) -> None:
        self.decided.append((function, tuple(map(plain, args)), outcome))

    def read_layer(self, name: str) -> None:
        self.read.append(name)


def size(book: Book, value: float) -> Any:
    return number(book, value, itself, ("size",))


BINARY = [
    *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv, operator.mod, pow),
]
BITS = [operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift]
UNARY = [operator.neg, abs, math.ceil, math.floor, round, math.trunc]
COMPARISONS = [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]


@pytest.mark.parametrize("value", [7, 7.5])
@pytest.mark.parametrize("other", [2, 2.5])
@pytest.mark.parametrize("function", BINARY)
def test_arithmetic_is_that_of_plain_numbers_and_is_remembered(function: Any, value: Any, other: Any) -> None:
    # A plain fraction to the left of a whole number computes by itself: it takes any int for one.
    for turned in (False, *[True] * (isinstance(other, int) or isinstance(value, float))):
        book = Book()
        made = function(other, size(book, value)) if turned else function(size(book, value), other)
        truth = function(other, value) if turned else function(value, other)
        assert (plain(made), type(plain(made))) == (truth, type(truth))
        assert isinstance(made, RecordedInt if isinstance(truth, int) else RecordedFloat)
        asked, operands = made.source
        assert asked(*map(plain, operands)) == truth
        assert made.node() is made.node()
        assert [(f, tuple(map(plain, args)), result) for f, args, result in book.computed] == [
            (asked, (other, value) if turned else (value, other), truth)
        ]
        assert not book.decided


@pytest.mark.parametrize("function", BITS)
def test_bits_of_whole_numbers(function: Any) -> None:
    book = Book()
    assert plain(function(size(book, 6), 3)) == function(6, 3)
    assert plain(function(6, size(book, 3))) == function(6, 3)
    assert isinstance(function(6, size(book, 3)), RecordedInt)


@pytest.mark.parametrize("function", UNARY)
def test_functions_of_one_number(function: Any) -> None:
    for value in (-7, -7.5):
        made = function(size(Book(), value))
        assert plain(made) == function(value)
        assert isinstance(made, RecordedInt | RecordedFloat)


@pytest.mark.parametrize("function", COMPARISONS)
@pytest.mark.parametrize("other", [6, 7, 7.0, 8])
def test_comparisons_are_decisions(function: Any, other: Any) -> None:
    book = Book()
    assert function(size(book, 7), other) is function(7, other)
    assert book.decided == [(function, (7, other), function(7, other))]
    assert function(size(book, 7), layer_number(book, 7, "conv")) is function(7, 7)
    assert book.read == ["conv"]


def test_division_with_a_rest() -> None:
    book = Book()
    for made, truth in ((divmod(size(book, 7), 3), (2, 1)), (divmod(17, size(book, 7)), (2, 3))):
        assert tuple(map(plain, made)) == truth
        assert all(isinstance(part, RecordedInt) for part in made)


def test_others_are_no_operands() -> None:
    book = Book()
    with pytest.raises(TypeError):
        size(book, 7) + "x"
    with pytest.raises(TypeError):
        size(book, 7) < "x"  # noqa: B015
    assert (size(book, 7) == "x") is False
    assert not book.decided


class Others:
    """Something else that computes with numbers."""

    def __radd__(self, given: Any) -> Any:
        return given

    def __eq__(self, given: object) -> Any:
        return given

    __hash__ = object.__hash__


def test_others_are_given_the_number_as_it_is() -> None:
    seven = size(Book(), 7)
    assert (seven + Others()) is seven
    assert (seven == Others()) is seven


def test_nothing_is_remembered_once_the_book_is_closed() -> None:
    book = Book()
    seven, two = size(book, 7), size(book, 2.0)
    book.active = False
    for made in (seven + 1, 1 + seven, seven * two, -seven):
        assert not isinstance(made, RecordedInt | RecordedFloat)
    assert seven > 3
    assert seven
    assert int(seven) == hash(seven) == 7
    assert (book.computed, book.decided) == ([], [])


@pytest.mark.parametrize("use", [int, float, hash, str, repr, "{:d}".format, operator.index])
def test_what_takes_plain_numbers_settles_them(use: Any) -> None:
    if use is operator.index:
        return  # CPython reads the number in place
    book = Book()
    assert use(size(book, 7)) == use(7)
    assert type(use(size(book, 7))) is type(use(7))
    assert book.decided == [(itself, (7,), 7)] * 2


def test_messages_of_assertions_settle_nothing() -> None:
    def check(x: Any) -> str:
        text = f"{x} {x:d} {x!r}"
        torch._assert(True, text)
        return text

    def name(x: Any) -> str:
        return f"{x} {x:d} {x!r}"

    book = Book()
    assert check(size(book, 7)) == "7 7 7"
    assert not book.decided
    assert name(size(book, 7)) == "7 7 7"
    assert book.decided == [(itself, (7,), 7)] * 3


def test_truth_is_a_decision() -> None:
    book = Book()
    assert bool(size(book, 7)) is True
    assert bool(size(book, 0)) is False
    assert book.decided == [(operator.truth, (7,), True), (operator.truth, (0,), False)]


@pytest.mark.parametrize("value", [7, 7.5])
def test_copies_outlive_the_book(value: float) -> None:
    made = size(Book(), value)
    assert copy.copy(made) is made
    for twin in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert (twin, type(twin)) == (value, type(value))
    own = layer_number(Book(), 7, "conv")
    for twin in (copy.copy(own), copy.deepcopy(own), pickle.loads(pickle.dumps(own))):
        assert (twin, type(twin)) == (7, int)


def test_methods_of_numbers_settle_them() -> None:
    book = Book()
    assert size(book, 7).bit_length() == 3
    assert size(book, 7).bit_count() == 3
    assert size(book, 7.5).is_integer() is False
    assert size(book, 7.5).as_integer_ratio() == (15, 2)
    assert size(book, 7).to_bytes(size(book, 2), "big") == b"\0\7"
    assert [outcome for _, _, outcome in book.decided] == [7, 7, 7.5, 7.5, 7]


def test_what_is_no_size_stays_what_it_is() -> None:
    for value in (True, "x", None):
        assert number(Book(), value, itself, ()) is value
    assert (plain("x"), plain(3), plain(True)) == ("x", 3, True)
    assert type(plain(size(Book(), 3))) is int
    assert type(plain(size(Book(), 3.5))) is float
    assert type(plain(layer_number(Book(), 3, ""))) is int


def test_a_layers_own_number_is_noted_where_it_is_read() -> None:
    book = Book()
    own = layer_number(book, 8, "conv.out_channels")
    assert isinstance(own, LayerNumber)
    for use, truth in ((lambda: own + 1, 9), (lambda: 2 * own, 16), (lambda: own == 8, True), (lambda: int(own), 8)):
        book.read.clear()
        assert use() == truth
        assert type(use()) is type(truth)
        assert set(book.read) == {"conv.out_channels"}
    for use, truth in ((lambda: float(own), 8.0), (lambda: hash(own), 8), (lambda: str(own), "8")):
        book.read.clear()
        assert use() == truth
        assert book.read == ["conv.out_channels"]
    assert not book.decided
    made = size(book, 3) * own
    assert (plain(made), made.source) == (24, (operator.mul, (3, 8)))
    assert type(made.source[1][1]) is int
    book.read.clear()
    book.active = False
    assert int(own) == 8
    assert not book.read


def test_shapes_are_tuples_of_sizes() -> None:
    book = Book()
    shape = Sizes(size(book, n) for n in (2, 3, 4))
    assert isinstance(shape[1], RecordedInt)
    assert isinstance(shape[1:], Sizes)
    assert plain(shape[1:].numel()) == 12
    assert isinstance(shape.numel(), RecordedInt)
    assert Sizes().numel() == 1
    assert not book.decided


def test_builtins_notice_numbers_for_a_while() -> None:
    book = Book()
    originals = builtins.range, builtins.len, math.sqrt, math.ceil
    with builtins_noticed():
        assert len(torch.zeros(3, 2)) == 3
        assert len([1, 2]) == 2
        with pytest.raises(TypeError):
            len(torch.tensor(1))
        assert [*range(size(book, 3))] == [0, 1, 2]
        assert [*range(1, 7, size(book, 3))] == [1, 4]
        assert isinstance(range(2), range)
        assert not isinstance([], range)
        assert (math.sqrt(size(book, 16)), math.log2(8), math.isclose(1.0, 1.1, abs_tol=1)) == (4.0, 3.0, True)
        assert math.gcd(size(book, 6), 4) == 2
        assert isinstance(math.ceil(size(book, 2.5)), RecordedInt)
    assert [args for _, args, _ in book.decided] == [(3,), (3,), (16,), (6,)]
    assert (builtins.range, builtins.len, math.sqrt, math.ceil) == originals


@pytest.mark.parametrize("length", [1, 5, 6, 7, 12])
@pytest.mark.parametrize("into", [1, 2, 3, 4, 9])
def test_parts_are_as_many_as_torch_makes(length: int, into: int) -> None:
    x = torch.zeros(length)
    assert parts_of(length, into, True) == len(x.chunk(into))
    assert parts_of(length, into, False) == len(x.split(into))


def test_another_way_is_refused() -> None:
    expect(7, 7)
    expect(True, True, "if x > 3", "training")
    with pytest.raises(GraphError, match=r"at `if x > 3`: there 8 stands where 7 stood"):
        expect(8, 7, "if x > 3")
    with pytest.raises(GraphError, match=r"of this size: there False"):
        expect(False, True)
