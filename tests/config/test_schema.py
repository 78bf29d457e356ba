"""The one reader of tables: what fields may hold, and how it says what they may not."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paam.config.recipe import Recipe
from paam.config.schema import InvalidError, OneOf, Range, check, fields_of, read


@dataclass(frozen=True)
class Inner:
    width: Annotated[int, Range(1, 8)]


@dataclass(frozen=True)
class Example:
    rate: Annotated[float, Range(0, above=True)]
    decay: Annotated[str, OneOf("constant", "cosine")] = "constant"
    layers: tuple[str, ...] = ()
    size: Annotated[int | None, Range(1, 4096)] = None
    scores: list[float] = field(default_factory=list)
    kept: dict[str, tuple[int, int]] = field(default_factory=dict)
    inner: Inner = Inner(1)
    anything: Any = None


@dataclass(frozen=True)
class Threshold:
    value: Annotated[float | None, Range(infinite=True)]


def test_a_whole_table_is_read_with_its_types():
    tree = {
        "rate": 1,
        "decay": "cosine",
        "layers": ["a", "b"],
        "size": 3,
        "scores": [1, 0.5],
        "kept": {"a": [1, 2]},
        "inner": {"width": 8, "later": "version"},
        "anything": [None],
    }
    found = read(Example, tree)
    assert found == Example(1.0, "cosine", ("a", "b"), 3, [1.0, 0.5], {"a": (1, 2)}, Inner(8), [None])
    assert type(found.rate) is float
    assert type(found.scores[0]) is float


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"rate": 0}, "section.rate must be > 0 (got 0)."),
        ({"rate": "0.1"}, "section.rate must be a number (got '0.1')."),
        ({"rate": True}, "section.rate must be a number (got True)."),
        ({"rate": math.nan}, "section.rate must be > 0 (got nan)."),
        ({"rate": math.inf}, "section.rate must be > 0 (got inf)."),
        ({"decay": "cosin"}, "section.decay cannot be 'cosin'. Did you mean 'cosine'?"),
        ({"decay": 3}, "section.decay must be text (got 3)."),
        ({"layers": "a"}, 'section.layers must be a list, such as ["layer1", "layer2"] (got \'a\').'),
        ({"layers": ["a", 3]}, "section.layers must be text (got 3)."),
        ({"size": 0}, "section.size must be from 1 to 4096 (got 0)."),
        ({"size": 1.0}, "section.size must be a whole number (got 1.0)."),
        ({"scores": [0.5, math.nan]}, "section.scores must be a finite number (got nan)."),
        ({"scores": [1e308, 1e308, math.inf]}, "section.scores must be a finite number (got inf)."),
        ({"kept": {"a": [1]}}, "section.kept.a must be a list of 2 (got [1])."),
        ({"kept": {"a": [1, "2"]}}, "section.kept.a must be a whole number (got '2')."),
        ({"kept": []}, "section.kept must be a table (got [])."),
        ({"inner": {"width": 9}}, "section.inner.width must be from 1 to 8 (got 9)."),
        ({"inner": 3}, "section.inner must be a table (got 3)."),
        ({"inner": {}}, "section.inner.width is missing."),
        ({"decay": "\ud800"}, r"section.decay must be text in UTF-8 (got '\ud800')."),
        ({"size": 10**30}, f"section.size must be a smaller number (got {10**30})."),
        ({"rte": 1}, "unknown key 'section.rte'. Did you mean 'section.rate'?"),
    ],
)
def test_what_a_field_may_not_hold_is_named_with_what_it_may(changed, sentence):
    with pytest.raises(InvalidError) as refusal:
        read(Example, {"rate": 0.5, **changed}, "section")
    assert str(refusal.value) == sentence


def test_what_is_missing_and_what_is_no_table():
    with pytest.raises(InvalidError, match=r"^rate is missing\.$"):
        read(Example, {})
    with pytest.raises(InvalidError, match=r"^this must be a table \(got 3\)\.$"):
        read(Example, 3)
    assert read(Example, {"rate": 1, "later": 2}, extra=True) == Example(1.0)


def test_what_was_made_with_wrong_values_is_found_by_a_check():
    check(Example(0.5), "section")
    with pytest.raises(InvalidError, match="section.decay cannot be 'x'"):
        check(Example(0.5, "x"), "section")


def test_an_infinite_number_only_where_one_may_stand():
    assert read(Threshold, {"value": -math.inf}).value == -math.inf
    assert read(Threshold, {"value": None}).value is None
    with pytest.raises(InvalidError):
        read(Threshold, {"value": math.nan})


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=6))
def test_lists_of_numbers_are_read_as_number_by_number(values):
    """The short way for lists of floats says what one look at each number says."""
    if all(map(math.isfinite, values)):
        assert read(Example, {"rate": 1, "scores": values}).scores == values
    else:
        with pytest.raises(InvalidError, match="scores must be a finite number"):
            read(Example, {"rate": 1, "scores": values})


@dataclass(frozen=True)
class Shares:
    values: list[Annotated[float, Range(0, 1)]]


@given(st.lists(st.floats(-2, 2) | st.sampled_from([math.nan, math.inf, 1e308, 0.0, 1.0]), max_size=6))
def test_lists_of_numbers_keep_to_their_limits(values):
    if all(0 <= value <= 1 for value in values):
        assert read(Shares, {"values": values}).values == values
    else:
        with pytest.raises(InvalidError, match="values must be from 0 to 1"):
            read(Shares, {"values": values})


def test_every_number_of_a_recipe_has_a_range():
    """A key that is added without one could hold a number that ends a run long after it was read."""
    without = []
    for section, outer in fields_of(Recipe).items():
        for item in dataclasses.fields(outer.kind) if outer.kind else ():
            is_number = any(part in str(item.type) for part in ("int", "float"))
            ranges = [c for c in fields_of(outer.kind)[item.name].constraints if isinstance(c, Range)]
            if is_number and not ranges:
                without.append(f"{section}.{item.name}")
    assert not without
