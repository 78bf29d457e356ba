"""Runs side by side: colours that everyone can tell apart, points that hide no other, and controls that are runs."""

from __future__ import annotations

import copy
import itertools
import re
from pathlib import Path

import numpy as np
import pytest

import paam.report
from paam.report.comparison import HUES, RINGS, families, looks, plane, row
from paam.report.control import control_of
from paam.report.facts import Facts
from paam.report.page import page
from records import RECIPE, events, facts_of

STYLE = (Path(paam.report.__file__).parent / "templates" / "page.css").read_text()


def recipe(number: int) -> dict:
    return {**RECIPE, "prune": {**RECIPE["prune"], "penalty": number}}


# ---------------------------------------------------------------- colours

# What is left of red, green and blue for each kind of eye: Machado, Oliveira and Fernandes 2009, severity 1.
EYES = {
    "usual": np.eye(3),
    "no red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "no blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def linear(colour: str) -> np.ndarray:
    parts = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def oklab(light: np.ndarray) -> np.ndarray:
    """Ottosson's: distances are as large as they look."""
    cones = [[0.41222, 0.53633, 0.05145], [0.21190, 0.68070, 0.10740], [0.08830, 0.28172, 0.62998]]
    axes = [[0.21045, 0.79362, -0.00407], [1.97800, -2.42859, 0.45059], [0.02590, 0.78277, -0.80868]]
    return np.array(axes) @ np.cbrt(np.array(cones) @ light.clip(0, 1))


def schemes() -> list[tuple[str, list[str]]]:
    """Paper and colours of each block of the style sheet: light, dark twice, print."""
    papers = re.findall(r"--paper: (#\w{6})", STYLE)
    hues = re.findall(r"--hue-\d: (#\w{6})", STYLE)
    assert len(hues) == len(papers) * HUES
    return [(paper, hues[number * HUES : (number + 1) * HUES]) for number, paper in enumerate(papers)]


@pytest.mark.parametrize("eye", EYES)
def test_colours_of_recipes_are_told_apart_by_every_eye(eye):
    for _, hues in schemes():
        seen = [oklab(np.array(EYES[eye]) @ linear(hue)) for hue in hues]
        assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 0.09


def test_colours_of_recipes_stand_out_from_the_paper():
    for paper, hues in schemes():
        for hue in hues:
            low, high = sorted(linear(colour) @ [0.2126, 0.7152, 0.0722] for colour in (paper, hue))
            assert (high + 0.05) / (low + 0.05) >= 3  # WCAG's least for what is no text


def test_print_has_the_colours_of_light():
    found = schemes()
    assert found[0] == found[-1]
    assert found[1] == found[2] != found[0]


def test_each_recipe_has_a_look_of_its_own_and_its_row_shows_it():
    runs = [facts_of(f"run{i}", events(recipe=recipe(i), accuracy=80.0 + i)) for i in range(18)]
    runs.insert(3, facts_of("going", events(recipe=recipe(99))[:-1]))
    found = families(runs)
    given = looks(found)
    assert given[3] == ""
    assert len(set(given)) == 19
    drawn = plane(found)
    assert drawn is not None
    by_run = {mark.tip.split(":")[0]: mark.look for mark in drawn.marks if mark.kind == "ours"}
    assert by_run == {family.label: look for family, look in zip(found, given, strict=True) if look}
    shown = re.findall(r'<i class="dot ours ([^"]+)"></i>\s*<a class="key" href="#run-(\d+)"', page(runs))
    assert [(look, int(number)) for look, number in shown] == [
        (look, number) for number, look in enumerate(given, 1) if look
    ]


def test_seeds_and_their_line_share_a_look():
    runs = [facts_of(f"a{seed}", events(seed=seed, accuracy=80 + 5 * seed)) for seed in (0, 1)]
    runs.append(facts_of("b", events(recipe=recipe(1), accuracy=70.0)))
    drawn = plane(families(runs))
    assert drawn is not None
    assert [line.kind for line in drawn.lines] == ["seeds hue-0"]
    assert sorted(mark.look for mark in drawn.marks if mark.kind == "ours") == ["hue-0", "hue-0", "hue-1"]


def test_points_at_one_place_lie_in_each_other():
    accuracies = [90.0, 90.0, 90.001, 70.0, 90.0, 90.0]
    runs = [facts_of(f"run{i}", events(recipe=recipe(i), accuracy=seen)) for i, seen in enumerate(accuracies)]
    drawn = plane(families(runs))
    assert drawn is not None
    rings = {mark.tip.split(":")[0]: mark.ring for mark in drawn.marks if mark.kind == "ours"}
    assert rings == {"run0": 0, "run1": 1, "run2": 2, "run3": 0, "run4": RINGS, "run5": RINGS}
    sizes = re.findall(r"\.mark\.ring-(\d) \{ z-index: (\d); width: (\d+)px", STYLE)
    widths = [int(width) for _, _, width in sizes]
    assert [int(number) for number, _, _ in sizes] == list(range(1, RINGS + 1))
    # Two pixels of each show beyond the one above and its white edge of two.
    assert all(large - small >= 8 for small, large in itertools.pairwise([10, *widths]))
    assert [int(layer) for _, layer, _ in sizes] == [3, 2, 1]


# ---------------------------------------------------------------- controls that are runs


def pruned(name: str, accuracy: float = 88.5, **start) -> Facts:
    return facts_of(name, events(accuracy=accuracy, trained="as given", **start))


def control(name: str = "dense", accuracy: float = 91.0, **start) -> Facts:
    record = events(accuracy=accuracy, trained="as given", recipe=recipe(0), **start)
    record[-1]["pruned"] |= {"params": 1000, "macs": 2000}
    return facts_of(name, record)


def test_a_run_that_removes_nothing_is_the_control_of_others():
    runs = [pruned("run"), control()]
    assert control_of(runs[0], runs) is runs[1]
    assert control_of(runs[1], runs) is None
    assert [row(family, runs)[2].shown for family in families(runs)] == ["−2.50 points", "nothing removed"]
    made = page(runs)
    assert "−2.50 points against dense" in made
    assert ">not comparable<" not in made
    assert ">not comparable<" in page([runs[0], pruned("other")])


def test_what_differs_in_more_than_pruning_is_no_control():
    run = pruned("run")
    fewer = events(trained="as given", recipe=recipe(0))
    fewer = [event for event in fewer if event.get("epoch") != 7]
    fewer[-1]["pruned"] |= {"params": 1000, "macs": 2000}
    elsewhere = copy.deepcopy(recipe(0)) | {"data": {**RECIPE["data"], "name": "digits"}}
    larger = events(trained="as given", recipe=recipe(0))
    larger[-1]["dense"]["accuracy"] = 93.0  # it went on from another dense network
    larger[-1]["pruned"] |= {"params": 1000, "macs": 2000}
    moved = events(trained="as given", recipe=elsewhere)
    moved[-1]["pruned"] |= {"params": 1000, "macs": 2000}
    others = [control(seed=1), control(data={"hash": "other"}), *map(facts_of, "abc", (fewer, larger, moved))]
    for other in others:
        assert control_of(run, [run, other]) is None, other.name
    assert control_of(run, [run, *others, control()]) is not None


@pytest.mark.parametrize(
    ("section", "change"),
    [("finetune", {"lr": 9.0}), ("weight", {"lr": 9.0}), ("distill", {"weight": 0.7}), ("data", {"mixup": 1.0})],
)
def test_what_is_trained_otherwise_is_no_control(section, change):
    run, other = pruned("run"), control()
    assert control_of(run, [run, other]) is other
    other.start.recipe[section] = {**other.start.recipe.get(section, {}), **change}
    assert control_of(run, [run, other]) is None


@pytest.mark.parametrize("damage", [None, 3, [], "text"])
def test_damaged_sections_of_recipes_have_no_control_and_break_no_page(damage):
    run, other = pruned("run"), control()
    for section in ("finetune", "weight", "distill"):
        other.start.recipe[section] = damage
    assert "run" in page([run, other])


def test_a_control_of_some_seeds_says_of_which():
    runs = [pruned("run-seed0"), pruned("run-seed1", seed=1), control()]
    assert row(families(runs)[0], runs)[2].shown == "−2.50 points (seed 0)"


def test_a_dense_control_in_the_run_itself_comes_first():
    runs = [facts_of("fair", events()), control()]
    assert row(families(runs)[0], runs)[2].shown == "−1.50 points"
    assert "−1.50 points against" not in page(runs)
