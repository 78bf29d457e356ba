"""The schedule against a slow twin that lists every epoch, and learning rates against values worked out by hand."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paam.config.recipe import Recipe
from paam.config.schedule import Schedule, learning_rate
from paam.errors import RecipeError
from paam.methods import phases_of
from paam.train.phase import place_of, total_epochs

schedules = st.builds(
    Schedule,
    warmup=st.integers(0, 6),
    cycles=st.integers(1, 4),
    score=st.integers(1, 4),
    weight=st.integers(1, 4),
    finetune=st.integers(0, 6),
    control=st.booleans(),
)


def all_epochs(schedule: Schedule) -> list[tuple[str, int, int, int]]:
    """(phase, cycle, index in the phase, length of the phase) of every epoch, phase by phase."""
    phases = [("warmup", 0, schedule.warmup)]
    for cycle in range(1, schedule.cycles + 1):
        phases.append(("score", cycle, schedule.score))
        phases.append(("weight", cycle, schedule.weight))
    phases.append(("finetune", 0, schedule.finetune))
    if schedule.control:
        phases.append(("control", 0, schedule.cycles * (schedule.score + schedule.weight) + schedule.finetune))
    return [(name, cycle, index, length) for name, cycle, length in phases for index in range(length)]


# ---------------------------------------------------------------- phases


def placed(schedule: Schedule, epoch: int) -> tuple[str, int, int, int]:
    place = place_of(phases_of(Recipe(schedule=schedule)), epoch)
    assert place.first == (place.index == 0)
    assert place.last == (place.index == place.phase.epochs - 1)
    return place.phase.name, place.phase.cycle, place.index, place.phase.epochs


@given(schedules)
def test_phases_are_those_of_the_slow_twin(schedule):
    expected = all_epochs(schedule)
    assert schedule.total == total_epochs(phases_of(Recipe(schedule=schedule))) == len(expected)
    assert [placed(schedule, epoch) for epoch in range(schedule.total)] == expected


@given(schedules, st.integers())
def test_only_epochs_of_the_schedule_have_a_phase(schedule, epoch):
    if 0 <= epoch < len(all_epochs(schedule)):
        assert placed(schedule, epoch) == all_epochs(schedule)[epoch]
    else:
        with pytest.raises(ValueError, match=f"epoch {epoch} "):
            placed(schedule, epoch)


def test_the_papers_schedule_is_50_warmup_90_alternating_300_finetune():
    schedule = Schedule()
    assert schedule.alternation == 90
    assert schedule.total == 440
    assert placed(schedule, 49) == ("warmup", 0, 49, 50)
    assert placed(schedule, 50) == ("score", 1, 0, 3)
    assert placed(schedule, 53) == ("weight", 1, 0, 6)
    assert placed(schedule, 58) == ("weight", 1, 5, 6)
    assert placed(schedule, 59) == ("score", 2, 0, 3)
    assert placed(schedule, 139) == ("weight", 10, 5, 6)
    assert placed(schedule, 140) == ("finetune", 0, 0, 300)
    assert placed(schedule, 439) == ("finetune", 0, 299, 300)
    assert Schedule(control=True).total == 830
    assert placed(Schedule(control=True), 440) == ("control", 0, 0, 390)


@pytest.mark.parametrize("lengths", [{"warmup": -3}, {"warmup": 0.5}, {"cycles": 0}, {"weight": 0}, {"score": True}])
def test_lengths_that_make_no_schedule_are_refused(lengths):
    (name,) = lengths
    with pytest.raises(RecipeError, match=rf"schedule\.{name} must be"):
        Schedule(**lengths)


# ---------------------------------------------------------------- learning rates


def rate(decay, epoch, *, length=10, ramp=0, done=0.0, initial=0.1):
    return learning_rate(initial, decay, ramp, epoch + done, length)


def test_constant_stays():
    assert [rate("constant", epoch, done=done) for epoch in (0, 5, 9) for done in (0, 0.5, 0.99)] == [0.1] * 9


@pytest.mark.parametrize(
    ("epoch", "done", "expected"),
    [
        (0, 0.0, 0.1),  # cos 0 = 1
        (2, 0.5, 0.1 * (2 + math.sqrt(2)) / 4),  # a quarter: (1 + cos 45 degrees) / 2
        (5, 0.0, 0.05),  # half: cos 90 degrees = 0
        (7, 0.5, 0.1 * (2 - math.sqrt(2)) / 4),
        (9, 1.0, 0.0),  # cos 180 degrees = -1
    ],
)
def test_cosine(epoch, done, expected):
    assert rate("cosine", epoch, done=done) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    ("epoch", "done", "expected"),
    [(0, 0.0, 0.1), (4, 0.99, 0.1), (5, 0.0, 0.01), (7, 0.49, 0.01), (7, 0.5, 0.001), (9, 1.0, 0.001)],
)
def test_step_falls_to_a_tenth_at_half_and_at_three_quarters(epoch, done, expected):
    assert rate("step", epoch, done=done) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("epoch", "done", "expected"),
    [
        (0, 0.0, 0.1 * 0.001 / 5),  # a thousandth of an epoch, so that the first step moves
        (0, 0.5, 0.1 * 0.5 / 5),
        (2, 0.5, 0.1 * 2.5 / 5),
        (4, 0.0, 0.1 * 4 / 5),
        (5, 0.0, 0.1),  # and then the decay begins at its start: 5 + 10 epochs
        (10, 0.0, 0.05),
        (14, 1.0, 0.0),
    ],
)
def test_ramp_rises_linearly_and_the_decay_begins_behind_it(epoch, done, expected):
    assert rate("cosine", epoch, length=15, ramp=5, done=done) == pytest.approx(expected, abs=1e-15)


@given(
    st.sampled_from(["constant", "cosine", "step"]),
    st.integers(1, 30),
    st.integers(0, 30),
    st.floats(1e-6, 10),
    st.data(),
)
def test_rates_are_never_negative_never_above_the_initial_one_and_never_rise_after_the_ramp(
    decay, length, ramp, initial, data
):
    places = sorted(data.draw(st.lists(st.floats(0, length, exclude_max=True), min_size=2, max_size=6)))
    rates = [rate(decay, int(p), length=length, ramp=ramp, done=p - int(p), initial=initial) for p in places]
    # The thousandth of an epoch that the ramp starts with may show at its end.
    assert all(0 <= value <= initial * 1.001 for value in rates)
    behind = [value for place, value in zip(places, rates, strict=True) if place >= ramp]
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in pairwise(behind))
    inside = [value for place, value in zip(places, rates, strict=True) if place < ramp]
    assert inside == sorted(inside)


def test_a_rate_depends_on_the_position_alone():
    # The same fraction of the way through, however the epochs are cut: 3.25 of 13 epochs is a quarter.
    assert rate("cosine", 3, length=13, done=0.25) == pytest.approx(rate("cosine", 0, length=1, done=0.25))
    # A score phase of the third cycle begins again at the full rate.
    assert learning_rate(0.1, "cosine", 0, 0.0, 3) == 0.1
