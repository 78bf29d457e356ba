"""Events as lines of a record: what is written comes back, and whatever stands in a line is read or refused."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from events import (
    END,
    FAILED,
    SCORES,
    SELECTION,
    VANISHED,
    Line,
    as_lines,
    changed,
    controlled,
    epoch,
    resumed,
    start,
    typed,
)
from paam.config.schema import InvalidError
from paam.events import (
    KINDS,
    ROLES,
    Changed,
    Cost,
    End,
    Epoch,
    Event,
    Failed,
    GroupFacts,
    Milliseconds,
    Outcome,
    PhaseFacts,
    Resumed,
    Scores,
    Selected,
    Start,
    Vanished,
    as_line,
    read_event,
)

LINES = [
    start(),
    resumed(1, told=3),
    changed(1, {"finetune.lr": [0.5, 0.1]}),
    epoch(0),
    SCORES,
    SELECTION,
    VANISHED,
    FAILED,
    END,
]


def paths(tree: Line, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    return [
        found
        for key, value in tree.items()
        for found in ([(*path, key)] + (paths(value, (*path, key)) if isinstance(value, dict) else []))
    ]


# ---------------------------------------------------------------- lines written by hand


def test_every_kind_is_read_as_its_class_and_written_as_it_stood():
    assert [line["event"] for line in LINES] == list(KINDS)
    for line, event in zip(LINES, typed(LINES), strict=True):
        assert type(event) is KINDS[line["event"]]
        assert json.dumps(as_line(event)) == json.dumps(line)


def test_numbers_of_a_line_are_those_of_its_event():
    cut, end, _, first = typed([SELECTION, END, FAILED, start()])
    assert isinstance(cut, Selected)
    assert (cut.epoch, cut.threshold, cut.kept_macs, cut.kept_filters["conv1"]) == (3, 0.5, 0.55, (3, 4))
    assert isinstance(end, End)
    assert (end.pruned.latency_ms.median, end.dense.latency_ms.median, end.dense.trained) == (2.0, 4.0, "warm-up")
    assert isinstance(first, Start)
    assert first.phases[2] == PhaseFacts("weight", 2, 1, "weight")
    assert (first.setting("model.name"), first.setting("model.x"), first.setting("y.x")) == ("tiny", None, None)


def test_a_later_version_may_know_more():
    assert read_event({"event": "weather", "sun": True}) is None
    assert typed([{**epoch(0), "sun": True}]) == typed([epoch(0)])
    more = {**END, "dense": {**END["dense"], "sun": True}}
    assert typed([more]) == typed([END])


ANY = {("start", "recipe"), ("start", "data"), ("changed", "changes")}
"""Tables of anything."""
DEFAULTS = {"paam", "python", "torch", "commit", "device", "command", "data", "samples", "classes", "normalization"}
DEFAULTS |= {"step", "skipped", "notes", "uncounted", "trained", "stream", "cycle", "role", "label", "layers"}
"""Keys that may be missing."""
NEEDED = [
    (line, path)
    for line in LINES
    for path in paths(line)
    if path != ("event",) and not any((line["event"], key) in ANY for key in path[:1] if len(path) > 1)
]


def allowed(damage: object, kind: str, path: tuple[str, ...], value: object) -> bool:
    """Values that are no damage there."""
    key = path[-1]
    if damage == "gone":
        named_by_users = key in ("conv1", "conv2", "softmax", "mean", "std") or (len(path) > 1 and path[0] == "samples")
        optional = key in DEFAULTS - {"cycle"} or (kind, key) == ("selection", "accuracy")
        return named_by_users or optional
    if damage == -1:
        return key in ("loss", "seed", "threshold", "version", "softmax") or path[0] == "samples"
    if damage is True:
        return value is True or value is False
    if isinstance(damage, dict):
        return isinstance(value, dict)
    if isinstance(damage, list):
        return isinstance(value, list)
    if damage is None:
        return key == "threshold" or (key == "accuracy" and len(path) == 1)
    return isinstance(damage, str) and isinstance(value, str) and key not in ("monitor", "trained", "role")


@pytest.mark.parametrize(("line", "path"), NEEDED, ids=lambda value: ".".join(value) if type(value) is tuple else "")
@pytest.mark.parametrize("damage", ["gone", None, "\x00", [], {"a": 1}, math.nan, 10**400, -1, True], ids=repr)
def test_what_is_missing_or_senseless_is_named(line, path, damage):
    changed = json.loads(json.dumps(line))
    inside = changed
    for key in path[:-1]:
        inside = inside[key]
    if allowed(damage, line["event"], path, inside[path[-1]]):
        return
    if damage == "gone":
        del inside[path[-1]]
    else:
        inside[path[-1]] = damage
    with pytest.raises(InvalidError) as error:
        read_event(changed)
    assert path[-1] in str(error.value)
    assert str(error.value).endswith(".")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (start(epochs=8), "start.epochs must be the total of all phases (got 8)."),
        (
            start(epochs=2 * 10**6, phases=[{"name": "warmup", "epochs": 2 * 10**6, "cycle": 0}]),
            "start.epochs must be at most 1,000,000",
        ),
        (start(monitor="train"), "start.monitor cannot be 'train'."),
        ({**SELECTION, "kept_filters": {"a": [2, 1]}}, "selection.kept_filters.a must be"),
        ({**SELECTION, "kept_filters": {"a": [0, 0]}}, "selection.kept_filters.a must be"),
        ({**SELECTION, "kept_filters": {"a": [-1, 4]}}, "selection.kept_filters.a must be"),
        ({**SELECTION, "threshold": math.nan}, "selection.threshold"),
        ({**END, "kept_filters": {"a": [2, 1]}}, "end.kept_filters.a must be"),
        ({**END, "dense": {**END["dense"], "macs": 0}}, "end.dense.macs must be > 0"),
        ({**END, "dense": {**END["dense"], "trained": "the same epochs"}}, "end.dense.trained cannot be"),
        ({**epoch(0), "accuracy": 100.5}, "epoch.accuracy"),
        ({**epoch(0), "loss": math.inf}, "epoch.loss"),
        ({**SCORES, "scores": {"a": [0.5, math.nan]}}, "scores.scores.a"),
        ({**SCORES, "scores": {"a": [0.5, 1e300]}}, "scores.scores.a"),
        ({"event": 3}, "it is not an event."),
        ([1], "it is not an event."),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_makes_no_sense_is_refused(line, words):
    with pytest.raises(InvalidError) as error:
        read_event(line)
    assert words in str(error.value)


def test_infinite_thresholds_are_read():
    """Where nothing is kept, or everything."""
    for threshold in (math.inf, -math.inf):
        (event,) = typed([{**SELECTION, "threshold": threshold}])
        assert isinstance(event, Selected)
        assert event.threshold == threshold


def test_a_dense_control_belongs_to_the_epochs():
    first = typed(controlled())[0]
    assert isinstance(first, Start)
    assert first.epochs == 12


# ---------------------------------------------------------------- any lines, any events

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=8), inside, max_size=3),
    max_leaves=6,
)


@given(values)
def test_any_json_is_read_or_refused(line):
    try:
        assert read_event(line) is None
    except InvalidError as error:
        refused = str(error)
        assert refused.endswith(".")


@given(st.data())
def test_any_value_anywhere_is_read_or_refused(data):
    line = json.loads(json.dumps(data.draw(st.sampled_from(LINES))))
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(paths(line)))
        inside = line
        for key in path[:-1]:
            inside = inside[key]
        inside[path[-1]] = data.draw(values)
    try:
        event = read_event(line)
    except InvalidError as error:
        refused = str(error)
        assert refused.endswith(".")
        return
    if event is not None:
        assert read_event(json.loads(json.dumps(as_line(event)))) == event


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
counts = st.integers(0, 2**62)
costs = st.integers(1, 2**62)
anything = st.dictionaries(texts, st.none() | st.booleans() | counts | texts | st.lists(texts, max_size=2), max_size=2)
shares = st.floats(0, 1)
accuracies = st.floats(0, 100)
numbers = st.floats(-1e18, 1e18)
positive = st.floats(0, 1e18)
widths = st.dictionaries(texts, costs.flatmap(lambda w: st.tuples(st.integers(0, w), st.just(w))), max_size=3)
roles = st.sampled_from(["", *ROLES])
lengths = st.lists(st.builds(PhaseFacts, texts, st.integers(0, 1000), counts, roles, texts), max_size=4)
outcomes = st.builds(
    Outcome,
    accuracies,
    costs,
    costs,
    st.builds(Milliseconds, st.floats(1e-9, 1e18), positive, positive),
    st.dictionaries(texts, counts, max_size=2),
    st.sampled_from(["", "as long", "warm-up", "as given"]),
    st.dictionaries(texts, counts, max_size=2),
)


def starts(phases: list[PhaseFacts]) -> st.SearchStrategy[Start]:
    return st.builds(
        Start,
        version=st.just(2),
        seed=counts,
        monitor=st.sampled_from(["holdout", "test"]),
        hardware=texts,
        recipe=anything,
        method=texts,
        epochs=st.just(sum(phase.epochs for phase in phases)),
        phases=st.just(phases),
        dense=st.builds(Cost, costs, costs),
        groups=st.dictionaries(texts, st.builds(GroupFacts, counts, st.booleans()), max_size=2),
        command=texts,
        data=anything,
        samples=st.dictionaries(texts, counts, max_size=2),
        classes=st.lists(texts, max_size=2),
    )


events: st.SearchStrategy[Any] = st.one_of(
    lengths.flatmap(starts),
    st.builds(Resumed, counts, counts, counts, st.lists(texts, max_size=2), st.lists(texts, max_size=2)),
    st.builds(Changed, counts, st.dictionaries(texts, st.tuples(texts, st.none() | counts), max_size=2), counts, texts),
    st.builds(
        Epoch,
        counts,
        texts,
        counts,
        numbers,
        positive,
        st.none() | accuracies,
        shares,
        shares,
        positive,
        roles,
        texts,
    ),
    st.builds(Scores, counts, counts, st.dictionaries(texts, st.lists(numbers, max_size=4), max_size=3)),
    st.builds(
        Selected,
        counts,
        counts,
        st.none() | st.floats(allow_nan=False),
        shares,
        shares,
        widths,
        st.none() | accuracies,
    ),
    st.builds(Vanished, counts, counts, costs, texts),
    st.builds(Failed, counts, texts),
    st.builds(End, counts, widths, outcomes, outcomes),
)


@given(events)
def test_what_is_written_comes_back(event: Event):
    (line,) = as_lines([event])
    assert read_event(line) == event
    assert as_lines(typed([line])) == [line]
