"""The HTML report: its numbers against records made by hand, what it escapes, and what it makes of damage."""

from __future__ import annotations

import copy
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paam.errors import PaamError
from paam.report.comparison import GAP, LETTER, LINE, _clear, families, plane
from paam.report.figures import Mark, _grid, score_data, score_plots
from paam.report.headline import origins
from paam.report.page import page, write_report
from paam.report.scales import Axis, linear, logarithmic, round_steps
from paam.views.format import score_text
from records import EPOCHS, RECIPE, SCORES, events, facts_of, large, write

VOID = {"meta", "br", "input", "link", "img", "hr"}


class Tree(HTMLParser):
    """Elements of a page in order: tag, attributes, and all words inside."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[dict] = []
        self.all: list[dict] = []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {[e['tag'] for e in self.open]}"

    def handle_starttag(self, tag, attrs):
        element = {"tag": tag, "attrs": dict(attrs), "text": "", "within": [e["attrs"].get("class") for e in self.open]}
        self.all.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop()["tag"] == tag

    def handle_data(self, data):
        for element in self.open:
            element["text"] += data

    def find(self, tag: str, kind: str | None = None) -> list[dict]:
        """Elements of a tag, with a class where one is given; words without surrounding space."""
        found = [e for e in self.all if e["tag"] == tag]
        if kind is not None:
            found = [e for e in found if kind in (e["attrs"].get("class") or "").split()]
        return [{**e, "text": " ".join(e["text"].split())} for e in found]

    def texts(self, tag: str, kind: str | None = None) -> list[str]:
        return [e["text"] for e in self.find(tag, kind)]


def tree(record, name: str = "run") -> Tree:
    return Tree(page([facts_of(name, record)]))


@pytest.fixture(scope="module")
def made() -> Tree:
    return tree(events())


# ---------------------------------------------------------------- changed on the way


def changed_record() -> list[dict]:
    record = events()
    place = next(number for number, event in enumerate(record) if event.get("phase") == "finetune")
    section, key = next((s, k) for s, values in RECIPE.items() if isinstance(values, dict) for k in values)
    changes = {f"{section}.{key}": [RECIPE[section][key], "<b>other</b>"], "environment.hardware": ["here", "there"]}
    record.insert(place, {"event": "changed", "epoch": record[place]["epoch"], "step": 0, "changes": changes})
    return record


def test_what_was_changed_on_the_way_is_shown_and_in_force():
    record = changed_record()
    shown = tree(record)
    change = next(event for event in record if event["event"] == "changed")
    key = next(iter(change["changes"]))
    lines = shown.find("ul", "changes")[0]["text"]
    assert f"after epoch {change['epoch']}: {key} from {RECIPE[key.split('.')[0]][key.split('.')[1]]}" in lines
    assert "to <b>other</b>" in lines
    assert "environment.hardware from here to there" in lines
    facts = facts_of("run", record)
    assert facts.recipe[key.split(".")[0]][key.split(".")[1]] == "<b>other</b>"
    assert facts.problems == []


def test_a_changed_run_is_no_seed_of_another_recipe():
    runs = [
        facts_of(name, record) for name, record in (("a", events()), ("b", events(seed=1)), ("c", changed_record()))
    ]
    assert [family.numbers for family in families(runs)] == [[1, 2], [3]]


# ---------------------------------------------------------------- numbers


def test_the_headline_states_dense_against_pruned(made):
    assert made.texts("dd", "value") == ["88.50 %", "−60.0 %", "−75.0 %", "1.25 × as fast"]
    accuracy, params, macs, latency = made.texts("div", "card")
    assert "dense 90.00 % (the same epochs)" in accuracy
    assert "−1.50 points" in accuracy
    assert "1,000 → 400" in params
    assert "2,000 → 500" in macs
    assert "10.0 ms (9.0 to 12.0) →8.0 ms (7.5 to 8.5)batch 32, quartiles" in latency


@pytest.mark.parametrize(
    ("trained", "words"), [("warm-up", " (warm-up only)"), ("as given", " (as it came)"), ("", "")]
)
def test_a_dense_network_that_was_trained_for_less_is_not_compared(trained, words):
    accuracy = tree(events(trained=trained)).texts("div", "card")[0]
    assert f"dense 90.00 %{words}not comparable" in accuracy
    assert "not comparable" in accuracy
    assert "points" not in accuracy


@pytest.mark.parametrize(("monitor", "where"), [("holdout", "held-out "), ("test", "test ")])
@pytest.mark.parametrize(
    ("epochs", "line"),
    [
        (10, "88.00 % after epoch 8"),  # the dense control is trained, to 90.25 %
        (9, "88.00 % after epoch 8"),
        (8, "88.00 % after epoch 8"),
        (6, "76.00 % after epoch 6"),
        (2, "70.00 % after epoch 2"),
    ],
)
def test_an_unfinished_run_states_the_accuracy_of_its_own_network(epochs, line, monitor, where):
    whole = events(monitor=monitor)
    last = [number for number, event in enumerate(whole) if event["event"] == "epoch"][epochs - 1]
    made = tree(whole[: last + 1])
    card = made.texts("div", "card")[0]
    yet = "nothing is pruned yet" if epochs == 2 else ""
    assert card == f"Test accuracy – not recorded{where}{line}{yet}"
    assert ("dense control (so far)" in [row[0] for row in rows(made)]) == (epochs > 8)


def test_every_layer_has_a_bar_of_its_height(made):
    layers = made.find("g", "layer")
    assert [e["attrs"]["class"] for e in layers] == ["layer stream", "layer inner", "layer stream"]
    assert [e["text"] for e in made.find("text", "count")] == ["3", "0", "3"]
    # All layers are 4 wide: full bars are 150 pixels, kept ones 150 * kept / 4; bars stand on one line.
    for kind, heights in (("full", [150, 150, 150]), ("kept", [112.5, 0, 112.5])):
        bars = made.find("rect", kind)
        assert [float(b["attrs"]["height"]) for b in bars] == heights
        assert [float(b["attrs"]["y"]) + float(b["attrs"]["height"]) for b in bars] == [180] * 3
    assert made.texts("title")[1:] == [
        "stem: 3 of 4 filters kept (75 %), residual stream",
        "block.inner: 0 of 4 filters kept (0 %)",
        "block.outer: 3 of 4 filters kept (75 %), residual stream",
    ]
    assert "6 of 12 filters stay; 1 layer is emptied." in made.texts("section")[0]


def test_narrow_layers_beside_wide_ones_are_drawn_by_share():
    record = events()
    record[-1]["kept_filters"] = {"a": [32, 64], "b": [512, 2048]}
    bars = tree(record).find("rect", "kept")
    assert [float(b["attrs"]["height"]) for b in bars] == [75, 37.5]


def test_scores_are_counted_into_bins(made):
    data = json.loads(next(e["text"] for e in made.all if e["tag"] == "script" and "counts" in e["text"]))
    assert data["layers"] == list(SCORES[1])
    for cycle, seen in zip((1, 2), data["cycles"], strict=True):
        assert (seen["cycle"], seen["threshold"]) == (cycle, 0.5)
        for name, sparse in zip(data["layers"], seen["counts"], strict=True):
            bins = [place for place, count in zip(sparse[::2], sparse[1::2], strict=True) for _ in range(count)]
            # In hundredths, so that no rounding of ours is shared.
            assert bins == sorted(round(100 * score) // 2 for score in SCORES[cycle][name])
    assert "6 of 12 filters stay; threshold θ = 0.500" in made.texts("p", "score-line")[0]


def test_the_histogram_is_split_at_the_threshold_and_the_curve_ends_at_all():
    made = tree(events())
    cut, stay = (made.find("path", kind)[0]["attrs"]["d"] for kind in ("cut", "stay"))
    # Cycle 2: 0 four times and 0.1 twice below a half; 0.55, 0.8, 0.9, 1, 1 and 1.01 above.
    assert len(re.findall("M", cut)) == 2
    assert len(re.findall("M", stay)) == 4  # 1.00 and 1.01 share a bin
    (curve,) = (p["attrs"]["d"] for p in made.find("path", "main") if p["attrs"]["d"].startswith("M0 100L"))
    heights = [float(y) for y in re.findall(r"L[\d.]+ ([\d.]+)", curve)]
    assert heights == sorted(heights, reverse=True)
    assert heights[0] == pytest.approx(100 * (1 - 4 / 12), abs=0.01)
    assert heights[-1] == 0


def test_scores_that_lie_close_together_are_enlarged():
    """0.9984 to 0.9999 in bins of 5e-5, with one of air on both sides; what is at 0.9990 or above stays."""
    scores = [round(0.9984 + 0.00003 * number, 6) for number in range(51)]
    record = events()
    for event in record:
        if event["event"] == "scores":
            event["scores"] = {"stem": scores}
        if event["event"] == "selection":
            event["threshold"] = 0.999
    data = score_data(facts_of("run", record))
    assert data is not None
    assert (data["bin"], data["start"]) == pytest.approx((5e-5, 0.99835))
    (sparse,) = data["cycles"][-1]["counts"]
    counts = dict(zip(sparse[::2], sparse[1::2], strict=True))
    assert (min(counts), max(counts), data["bins"]) == (1, 31, 33)
    assert sum(counts.values()) == 51
    assert sum(count for place, count in counts.items() if place < 13) == 20  # 0.9984, 0.99843, ... 0.99897
    bars = score_plots(data)[0]
    assert bars.rule is not None
    assert bars.rule.label == "θ = 0.999000"
    assert bars.rule.left == pytest.approx(100 * (0.999 - 0.99835) / (33 * 5e-5), abs=0.01)


@pytest.mark.parametrize(
    ("scores", "grid"),
    [
        ([1.0] * 8, (0.99948, 2e-5, 53)),  # from 0.9995 to 1.0005, and a bin on both sides
        ([-0.5, -0.4], (-0.502, 0.002, 53)),
        ([-0.1, 0.9], (-0.1, 0.02, 56)),  # up to 1.02
        ([0.2, 1e300], (0.0, 0.02, 100)),  # up to 2
        ([5.0, 5.1], (1.99948, 2e-5, 53)),  # all of them in the last bin, which ends above 2
    ],
)
def test_bins_hold_scores_of_every_kind(scores, grid):
    assert _grid(scores) == pytest.approx(grid)


@pytest.mark.parametrize(
    ("score", "words"),
    [(0.5, "0.500"), (1.0, "1.000"), (0.99951, "0.99951"), (0.9999987, "0.9999987"), (1.02, "1.020")],
)
def test_a_score_is_told_from_one(score, words):
    assert score_text(score) == words


def test_curves_pass_through_every_epoch_and_phases_are_shaded(made):
    bands = made.find("i", "band")
    kinds = [b["attrs"]["class"].split()[1] for b in bands if "swatch" not in b["attrs"]["class"]]
    expected = ["warmup", "score", "weight", "score", "weight", "finetune", "control"]
    assert kinds == expected * 2  # under the loss and under the accuracy
    left = [float(re.search(r"left:([\d.]+)%", b["attrs"]["style"])[1]) for b in bands[:7]]
    assert left == [0, 20, 30, 40, 50, 60, 80]  # ten epochs
    assert [s["text"] for s in made.find("span") if "strip" in s["within"]] == [
        "warm-up",
        "cycles",
        "fine-tune",
        "dense control",
    ]
    data = json.loads(next(e["text"] for e in made.all if e["tag"] == "script" and "warm-up" in e["text"][:40]))
    assert [row[3:5] for row in data] == [[loss, accuracy] for _, _, loss, accuracy in EPOCHS]
    accuracy = made.find("path", "main")[-2]["attrs"]["d"]
    points = [(float(x), float(y)) for x, y in re.findall(r"[ML](\S+?) ([\d.]+)", accuracy)]
    assert [x for x, _ in points] == [5, 15, 25, 35, 45, 55, 65, 75]  # the control's line is another
    # Straight lines keep proportions: 40, 70 and 88 % stand as their differences say.
    ys = [y for _, y in points]
    assert (ys[0] - ys[1]) / (ys[0] - ys[-1]) == pytest.approx(30 / 48, abs=0.01)


def test_costs_fall_cycle_by_cycle(made):
    tips = [e["attrs"]["title"] for e in made.find("i", "mark") if "% of" in e["attrs"]["title"]]
    assert tips == [
        "cycle 1: 70.0 % of parameters",
        "cycle 2: 40.0 % of parameters",
        "cycle 1: 66.7 % of filters",
        "cycle 2: 50.0 % of filters",
        "cycle 1: 60.0 % of MACs",
        "cycle 2: 25.0 % of MACs",
    ]


def rows(made: Tree) -> list[list[str]]:
    cells = [e for e in made.all if e["tag"] in ("th", "td") and "stage-table" in e["within"]]
    words = [" ".join(e["text"].split()) for e in cells][4:]
    return [words[i : i + 4] for i in range(0, len(words), 4)]


def test_stages_say_what_each_cost(made):
    assert rows(made) == [
        ["end of warm-up", "100.0 %", "70.00 %", ""],
        ["cycle 1: right after the cut", "60.0 %", "30.00 %", "−40.00"],
        ["cycle 1: weights trained", "60.0 %", "74.00 %", "+44.00"],
        ["cycle 2: right after the cut", "25.0 %", "60.50 %", "−13.50"],
        ["end of the alternation", "25.0 %", "76.00 %", "+15.50"],
        ["after fine-tune", "25.0 %", "88.00 %", "+12.00"],
        ["dense control", "100.0 %", "90.25 %", ""],
    ]


def test_the_dense_control_has_a_label_under_its_point(made):
    ticks = {e["text"]: e["attrs"]["style"] for e in made.find("span") if {"stages", "x-ticks"} <= set(e["within"])}
    assert list(ticks) == ["warm-up", "1", "2", "tuned", "dense"]
    (control,) = (e for e in made.find("i", "mark") if "stages" in e["within"] and "control" in e["attrs"]["class"])
    assert control["attrs"]["style"].startswith(f"{ticks['dense']};")


def test_an_older_record_without_the_cost_of_a_cut_says_so():
    record = events()
    for event in record:
        if event["event"] == "selection":
            del event["accuracy"]
    made = tree(record)
    assert [row[0] for row in rows(made)][:3] == [
        "end of warm-up",
        "cycle 1: weights trained",
        "end of the alternation",
    ]
    assert "right after each selection is not in this record" in made.texts("section")[0]


SHOWN = {"None": "–", "True": "true", "False": "false", "[]": "none"}


def test_every_key_of_the_recipe_and_what_the_run_depends_on_is_there(made):
    cells = [e for e in made.all if e["tag"] in ("th", "td") and "recipe" in e["within"]]
    shown = dict(zip((e["text"] for e in cells[::2]), (e["text"] for e in cells[1::2]), strict=True))
    for section, values in RECIPE.items():
        for key, value in values.items() if isinstance(values, dict) else [(section, values)]:
            if key != "name":  # of the model and of the data
                assert shown[key] == (str(value) if isinstance(value, str) else SHOWN.get(str(value), str(value)))
    assert made.texts("caption") == ["recipe", *(key for key in RECIPE if key != "description")]
    words = made.texts("section")[0]
    for fact in (
        "methodPAAM (KQ)",
        "seed 0",
        "commitabc123",
        "hardwarean abacus",
        "time in epochs1 min 5 s",
        "train 50,000",
        "cat, dog",
    ):
        assert fact in words
    assert made.texts("code")[1] == "paam prune by-hand --seed 0"


def test_the_data_that_a_run_was_trained_on_are_among_its_origins():
    start = {"data": {"hash": "9c1e", "of": ["names", "labels", "split", "sizes"]}}
    assert origins(facts_of("x", events(**start)))["data"] == "9c1e (names, labels, split, sizes)"
    for nothing in ({}, {"data": {}}, {"data": {"hash": "9c1e", "of": 3}}):
        assert "data" not in origins(facts_of("x", events(**nothing)))


# ---------------------------------------------------------------- axes


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(2, 8))
def test_ticks_are_round_few_and_inside(low, span, count):
    ticks = round_steps(low, low + span, count)
    assert 1 <= len(ticks) <= 2 * count + 1
    assert all(low - 1e-6 * span <= tick <= low + span + 1e-6 * span for tick in ticks)


@given(st.lists(st.floats(-1e29, 1e29), max_size=5))
def test_axes_hold_any_values(values):
    for axis in (linear(values), logarithmic(values)):
        assert axis.high > axis.low
        assert all(0 <= axis.place(value) <= 100 for value in values)
        assert all(0 <= tick.at <= 100 for tick in axis.ticks)


def test_places_on_axes():
    assert [Axis(10, 20).place(v) for v in (5, 10, 15, 20, 25)] == [0, 0, 50, 100, 100]
    assert [Axis(0.01, 100, log=True).place(v) for v in (0.01, 1, 100)] == [0, 50, 100]
    assert [t.label for t in Axis(0, 2000).ticks] == ["0", "500", "1,000", "1,500", "2,000"]


# ---------------------------------------------------------------- several runs


def table(made: Tree) -> list[list[str]]:
    cells = [
        e
        for e in made.all
        if e["tag"] in ("th", "td") and "sortable" in e["within"] and "number" in (e["attrs"].get("class") or "")
    ]
    words = [" ".join(e["text"].split()) for e in cells][7:]
    return [words[i : i + 7] for i in range(0, len(words), 7)]


def test_seeds_of_one_recipe_are_shown_with_mean_and_spread():
    other = {**RECIPE, "prune": {**RECIPE["prune"], "scorer": "free"}}
    runs = [
        facts_of("kq-0", events(seed=0, accuracy=88.0)),
        facts_of("kq-1", events(seed=1, accuracy=89.0)),
        facts_of("free-0", events(accuracy=91.0, recipe=other, trained="warm-up")),
        facts_of("kq-2", events(seed=2, accuracy=90.0)),
    ]
    made = Tree(page(runs))
    # 88, 89, 90: mean 89, standard deviation of the sample 1; dense has 90. Ten epochs, two of them the control's.
    assert table(made) == [
        ["0, 1, 2", "89.00 % ± 1.00", "−1.00 points ± 1.00", "−60.0 % ± 0.0", "−75.0 % ± 0.0", "1.25 × ± 0.00", "8"],
        ["0", "91.00 %", "not comparable", "−60.0 %", "−75.0 %", "1.25 ×", "8"],
    ]
    assert [e["text"] for e in made.find("small")] == ["prune.scorer = kq", "prune.scorer = free"]
    assert [e["attrs"]["id"] for e in made.find("details", "run")] == ["run-1", "run-2", "run-3", "run-4"]


def test_a_run_that_repeats_a_seed_or_is_not_finished_is_a_row_of_its_own():
    runs = [
        facts_of("cut", events(seed=0)[:-1]),
        facts_of("zero", events(seed=0, accuracy=88.0)),
        facts_of("again", events(seed=0, accuracy=60.0)),
        facts_of("one", events(seed=1, accuracy=90.0)),
        facts_of("going", events(seed=2)[:-1]),
        facts_of("unknown", events(seed=None, accuracy=70.0)),
    ]
    found = families(runs)
    assert [family.numbers for family in found] == [[1], [2, 4], [3], [5], [6]]
    assert [family.differs for family in found] == [""] * 5  # one recipe: nothing sets a row apart
    made = Tree(page(runs))
    assert made.texts("small") == [
        "not finished, the same recipe and seed as zero",
        "the same recipe and seed as zero",
        "not finished",
    ]
    # 88 and 90: mean 89, standard deviation of the sample the root of 2. The 60 of the repeat is in neither.
    assert [cells[:2] for cells in table(made)] == [
        ["0", "–"],
        ["0, 1", "89.00 % ± 1.41"],
        ["0", "60.00 %"],
        ["2", "–"],
        ["?", "70.00 %"],
    ]
    (line,) = [p["attrs"]["d"] for p in made.find("path", "seeds")]
    assert line.count("L") == 1  # between the two seeds


def test_a_failed_run_says_why_in_the_table():
    failed = {"event": "failed", "epoch": 4, "reason": "The loss has exploded."}
    runs = [facts_of("one", events()), facts_of("two", [*events(seed=5)[:-1], failed])]
    assert [family.note for family in families(runs)] == ["", "failed: The loss has exploded."]


def test_labels_in_the_plane_cover_neither_each_other_nor_a_point():
    """Points of two crowded corners; boxes of labels worked out here, from what the page is told."""
    corner = [(97, 20, "medium-seed0"), (97.2, 23, "medium-seed1"), (97.4, 23.5, "Vanilla, medium"), (86, 28, "KQ")]
    others = [(6, 48, "KQ, high"), (5.5, 50, "high-seed0"), (5.5, 50.5, "high-seed1"), (12, 54.5, "kq-medium-seed0")]
    marks = _clear([Mark(x, y, "ours", "", "", name) for x, y, name in (*corner, *others)])
    boxes = []
    for mark in marks:
        length = LETTER * len(mark.name)
        left = mark.left - length if mark.before else mark.left + GAP
        boxes.append((left, left + length - GAP, mark.top + mark.shift))
    for place, (left, right, top) in enumerate(boxes):
        for other_left, other_right, other_top in boxes[:place]:
            assert right <= other_left or other_right <= left or abs(top - other_top) >= LINE - 0.01
        for other in marks:
            if other is not marks[place]:
                assert not left < other.left < right or abs(top - other.top) >= LINE - 0.01
    assert max(abs(mark.shift) for mark in marks) < 3 * LINE  # each still beside its own point
    alone, near = _clear([Mark(50, 50, "ours", "", "", "alone"), Mark(55, 50, "ours", "", "", "near")])
    assert (alone.before, alone.shift, near.before, near.shift) == (True, 0.0, False, 0.0)


def test_seeds_share_a_label_in_the_plane_at_the_best_of_them():
    other = {**RECIPE, "prune": {**RECIPE["prune"], "scorer": "free"}}
    runs = [
        facts_of("medium-seed0", events(seed=0, accuracy=88.0)),
        facts_of("free", events(seed=0, accuracy=87.0, recipe=other)),
        facts_of("medium-seed1", events(seed=1, accuracy=89.0)),
    ]
    assert [family.label for family in families(runs)] == ["medium", "free"]
    drawn = plane(families(runs))
    assert drawn is not None
    ours = {mark.tip.split(":")[0]: (mark.label, mark.name) for mark in drawn.marks if mark.kind == "ours"}
    assert ours == {"medium-seed0": ("", ""), "medium-seed1": ("1, 3", "medium"), "free": ("2", "free")}


def test_many_seeds_have_a_short_label_and_names_are_told_apart():
    other = {**RECIPE, "prune": {**RECIPE["prune"], "scorer": "free"}}
    runs = [facts_of(f"medium-seed{seed}", events(seed=seed)) for seed in range(30)]
    runs.append(facts_of("medium", events(seed=0, recipe=other)))
    found = families(runs)
    assert [family.label for family in found] == ["medium-seed0 and 29 more", "medium"]
    drawn = plane(found)
    assert drawn is not None
    assert {mark.label for mark in drawn.marks if mark.kind == "ours"} == {"1, 2, …, 30", "", "31"}


@pytest.mark.parametrize(
    ("names", "label"),
    [
        (["kq_seed_0", "kq_seed_12"], "kq"),
        (["a", "b", "c"], "a and 2 more"),
        (["seed0", "seed1"], "seed0 and 1 more"),
        (["resnet56-1", "resnet56-2"], "resnet56-1 and 1 more"),
        (["free-seed10", "free-seed12"], "free"),
    ],
)
def test_seeds_go_by_what_their_names_have_in_common(names, label):
    runs = [facts_of(name, events(seed=seed)) for seed, name in enumerate(names)]
    assert [family.label for family in families(runs)] == [label]


def plane_tips(runs) -> list[str]:
    marks = [e for e in Tree(page(runs)).find("i", "mark") if e["within"].count("run") == 0]
    return [e["attrs"]["title"] for e in marks]


def test_the_plane_holds_our_runs_and_the_papers_points():
    tips = plane_tips([facts_of("one", events()), facts_of("two", events(accuracy=93.0, trained="warm-up"))])
    assert "one: 88.50 % at 25.0 % of MACs" in tips
    assert "two: 93.00 % at 25.0 % of MACs" in tips
    assert "dense control of one: 90.00 %, trained for the same epochs" in tips
    assert not any("control of two" in tip for tip in tips)
    # PAAM's table: accuracy and FLOPs removed of ResNet-56.
    assert {tip for tip in tips if tip.startswith("paper")} == {
        "paper, Vanilla, medium: 94.28 % at 50.7 % of FLOPs",
        "paper, Vanilla, high: 92.42 % at 29.5 % of FLOPs",
        "paper, KQ, medium: 94.01 % at 47.7 % of FLOPs",
        "paper, KQ, high: 93.10 % at 25.3 % of FLOPs",
    }


@pytest.mark.parametrize(
    ("model", "data", "points"), [("resnet110", "cifar10", 4), ("resnet56", "digits", 0), ("vgg16_bn", "cifar10", 0)]
)
def test_the_papers_points_are_shown_for_its_networks_and_data_only(model, data, points):
    recipe = {**RECIPE, "model": {"name": model}, "data": {**RECIPE["data"], "name": data}}
    tips = plane_tips([facts_of(name, events(recipe=recipe)) for name in "ab"])
    assert sum(tip.startswith("paper") for tip in tips) == points


# ---------------------------------------------------------------- foreign text

EVIL = "</script x><script>alert(1)</script><!--\"'&amp;</title></style><img src=x onerror=alert(2)>{{7*7}}"


def poisoned(text: str) -> list[dict]:
    recipe = copy.deepcopy(RECIPE)
    recipe["description"] = recipe["model"]["name"] = recipe["data"]["name"] = text
    recipe["prune"]["ignore"] = [text]
    recipe[text] = {text: text}
    record = events(recipe=recipe, method=text, command=text, hardware=text, commit=text, classes=[text, text])
    renamed = json.loads(json.dumps(record).replace('"block.inner"', json.dumps(text)))
    renamed[0]["device"] = renamed[0]["torch"] = text
    renamed[0]["samples"] = {text: 3}
    renamed[0]["data"] = {"hash": text, "of": [text]}
    renamed[3]["loss"] = text
    renamed[-2]["phase"] = text
    return [*renamed, {"event": text}]


def test_text_from_a_record_stays_text():
    """The page with hostile text has the elements and attributes of the page with harmless text, and no other."""
    harmless = "x" * len(EVIL)
    pages = {}
    for text in (EVIL, harmless):
        runs = [facts_of(text, poisoned(text), [text]), facts_of("other", events())]
        pages[text] = Tree(page(runs, refused=[text]))
    shapes = [[(e["tag"], sorted(e["attrs"])) for e in pages[text].all] for text in (EVIL, harmless)]
    assert shapes[0] == shapes[1]
    words = [
        [
            e["text"].replace(harmless, EVIL)
            for e in pages[text].all
            if e["tag"] in ("li", "dd", "td", "code", "h1", "caption", "option")
        ]
        for text in pages
    ]
    assert words[0] == words[1]
    scripts = [e for e in pages[EVIL].all if e["tag"] == "script"]
    assert [e["attrs"].get("type") for e in scripts].count(None) == 1
    data = [json.loads(e["text"]) for e in scripts if e["attrs"].get("type") == "application/json"]
    assert any(isinstance(d, dict) and EVIL in d["layers"] for d in data)


def test_a_run_in_a_directory_with_a_hostile_name(tmp_path):
    name = "<script>alert(1)<"  # a slash ends a name
    write_report([write(tmp_path / name, events())], tmp_path / "out.html")
    text = (tmp_path / "out.html").read_text("utf-8")
    assert "<script>alert" not in text
    assert name in Tree(text).texts("code")


def test_nothing_points_outside():
    text = page([facts_of("a", events()), facts_of("b", events(seed=1))], ["c"]) + page([facts_of("a", events())])
    assert not re.search(r"https?:|//[a-z]|url\(|@import|\bsrc\s*=|<link|<iframe|fetch\(|XMLHttp|WebSocket", text)
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', text))
    assert "default-src 'none'" in text


# ---------------------------------------------------------------- size


def test_a_long_run_of_a_deep_network_stays_small(tmp_path):
    record = write(tmp_path / "run", large())
    write_report([record], tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 1_000_000
    Tree((tmp_path / "report.html").read_text("utf-8"))


# ---------------------------------------------------------------- damage


def test_every_prefix_of_a_record_gives_a_page_that_says_what_is_missing(tmp_path):
    path = write(tmp_path / "run", events())
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for count in range(1, len(lines)):
        for cut in (0, len(lines[count]) // 2):  # between two lines, and in the middle of one
            path.write_bytes(b"".join(lines[:count]) + lines[count][:cut])
            write_report([path], tmp_path / "out.html")
            made = Tree((tmp_path / "out.html").read_text("utf-8"))
            seen = sum(json.loads(line)["event"] == "epoch" for line in lines[:count])
            note = made.texts("aside", "note")[0]
            assert f"not finished: {seen} of 10 epochs" in note
            assert ("last line of the record is truncated" in note) == (cut > 0)
            assert "corrupt" not in note
    path.write_bytes(whole)
    write_report([path], tmp_path / "out.html")
    assert 'class="note"' not in (tmp_path / "out.html").read_text("utf-8")


def test_a_finished_record_that_lacks_lines_says_which():
    def note(kept) -> str:
        return " ".join(tree([event for event in events() if kept(event)]).texts("aside", "note"))

    assert note(lambda event: True) == ""
    assert "Of 10 epochs 4 are recorded." in note(lambda event: event.get("phase") is None or event["epoch"] < 4)
    assert "Of 10 epochs 0 are recorded." in note(lambda event: event["event"] != "epoch")
    missing = note(lambda event: event.get("cycle") != 2 or event["event"] == "epoch")
    assert "Of 2 cycles 1 are recorded." in missing
    assert "epochs" not in missing
    cut = note(lambda event: event["event"] != "end" and event.get("epoch", 0) not in range(2, 8))
    assert "not finished: 4 of 10 epochs" in cut


def test_a_value_nested_without_end_is_cut_off():
    record = copy.deepcopy(events())
    for depth in (1, 50):
        value: list = []
        for _ in range(depth):
            value = [value, 7]
        record[0]["recipe"]["prune"]["ignore"] = value
        assert "…, 7" in " ".join(tree(record).texts("td"))


def test_a_record_without_its_start_or_with_a_broken_middle_shows_the_rest(tmp_path):
    path = write(tmp_path / "run", events())
    lines = path.read_text().splitlines()
    lines[3] = lines[3][:20]
    lines[5] = "not \udcff json"
    path.write_text("\n".join(lines[1:]), "utf-8", "surrogateescape")
    write_report([path], tmp_path / "out.html")
    made = Tree((tmp_path / "out.html").read_text("utf-8"))
    note = made.texts("aside", "note")[0]
    assert "start of the record is missing" in note
    assert "The record is corrupt at line 3: it is not JSON (character 21: " in note
    assert "The record is corrupt at line 5: it is not UTF-8." in note
    assert made.texts("dd", "value")[0] == "88.50 %"


ODD = st.sampled_from(
    [None, True, -1, 0, 1e308, float("nan"), float("inf"), 10**400, "text", "\ud800", [], [1], {}, {"a": []}]
)


def mutate(draw, value):
    """The value with one thing in it dropped or replaced, at any depth."""
    if isinstance(value, (dict, list)) and value and draw(st.booleans()):
        key = draw(st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value))))
        if draw(st.booleans()):
            value[key] = mutate(draw, value[key])
        else:
            del value[key]
        return value
    return draw(ODD)


@settings(max_examples=100)
@given(st.data())
def test_dropped_keys_and_odd_values_never_break_the_page(data):
    record = events()
    for _ in range(data.draw(st.integers(1, 6))):
        index = data.draw(st.integers(0, len(record) - 1))
        event = mutate(data.draw, copy.deepcopy(record[index]))
        record[index] = event if isinstance(event, dict) and isinstance(event.get("event"), str) else record[index]
    try:
        facts = facts_of("run", record)
    except PaamError as error:
        refused = str(error)
        assert "has version" in refused
        return
    for text in (page([facts]), page([facts, facts_of("whole", events())])):
        for element in Tree(text.encode("utf-8", "replace").decode()).all:
            for key in ("style", "d", "x", "y", "width", "height", "transform", "data-value"):
                assert not re.search("nan|inf|None", element["attrs"].get(key) or "")


@pytest.mark.parametrize("pair", [[5, 4], [0, 0], [1], "4 of 4"])
def test_an_event_with_a_layer_that_keeps_more_than_it_has_is_left_out_and_named(pair):
    record = events()
    record[-1]["kept_filters"] = {"good": [2, 4], "odd": pair}
    made = tree(record)
    note = made.texts("aside", "note")[0]
    assert f"The record is corrupt at line {len(record)}: end.kept_filters.odd must be" in note
    assert "The run is not finished: 10 of 10 epochs are recorded" in note
    assert made.texts("text", "count") == ["3", "0", "3"]  # as of the last selection


def test_events_of_another_kind_are_named_and_skipped():
    assert "skipped: firework" in tree([*events(), {"event": "firework"}]).texts("aside", "note")[0]


def test_a_network_that_is_partly_dead_is_told_of():
    dead = {"event": "vanished", "epoch": 1, "scales": 269, "of": 2032, "layers": "a, b, c, d, e, <f>"}
    (note,) = tree([*events()[:-1], dead, events()[-1]]).texts("aside", "note")
    assert "269 of 2,032 batch-norm scales have vanished in warm-up, all those of a, b, c, d and 2 more:" in note
    assert "vanished.scales must be a whole number" in tree([*events(), {**dead, "scales": "many"}]).texts("aside")[0]


def test_an_epoch_whose_loss_is_no_number_is_left_out_and_named():
    record = events()
    line = next(number for number, e in enumerate(record) if e["event"] == "epoch" and e["epoch"] == 1)
    record[line]["loss"] = float("nan")
    made = tree(record)
    note = made.texts("aside", "note")[0]
    assert f"The record is corrupt at line {line + 1}: epoch.loss must be from" in note
    assert "Of 10 epochs 9 are recorded." in note
    data = json.loads(next(e["text"] for e in made.all if e["tag"] == "script" and "warm-up" in e["text"][:40]))
    assert [row[0] for row in data] == [1, 3, 4, 5, 6, 7, 8, 9, 10]


def test_many_damaged_lines_are_explained_as_far_as_three_and_counted_as_far_as_eight():
    record = events()
    for line in range(1, 11):
        record[line]["epoch"] = -line
    note = tree(record).texts("aside", "note")[0]
    assert [f"-{line})" in note for line in range(1, 11)] == [True] * 3 + [False] * 7
    assert "It is also corrupt at line 5, 6, 7, 8, 9 and others." in note


def test_without_a_start_nobody_knows_what_an_accuracy_was_measured_on():
    assert "88.00 % after epoch 8 (set not recorded)" in tree(events()[1:-1]).texts("div", "card")[0]


def test_what_is_no_run_is_named_and_the_others_are_shown(tmp_path):
    good = write(tmp_path / "good", events())
    (tmp_path / "empty").mkdir()
    future = write(tmp_path / "future", events(version=99))
    (tmp_path / "blank").mkdir()
    (tmp_path / "blank" / "record.jsonl").touch()
    bad = [
        tmp_path / "nowhere" / "record.jsonl",
        tmp_path / "empty" / "record.jsonl",
        future,
        tmp_path / "blank" / "record.jsonl",
    ]
    too_long = tmp_path / ("x" * 300) / "record.jsonl"
    assert "File name too long" in write_report([too_long, good], tmp_path / "out.html")[0]
    refused = write_report([bad[0], good, *bad[1:]], tmp_path / "out.html")
    made = Tree((tmp_path / "out.html").read_text("utf-8"))
    assert [e["text"] for e in made.find("li")] == refused
    for sentence, folder in zip(refused, ("nowhere", "empty", "future", "blank"), strict=True):
        assert folder in sentence
    assert "version 99" in refused[2]
    assert made.texts("dd", "value")[0] == "88.50 %"
    with pytest.raises(PaamError, match="nowhere.*empty.*version 99.*has no readable event"):
        write_report(bad, tmp_path / "none.html")
    assert not (tmp_path / "none.html").exists()


def test_runs_of_one_name_are_told_apart_and_one_given_twice_is_shown_once(tmp_path):
    one, two = (write(tmp_path / parent / "run", events(seed=i)) for i, parent in enumerate("ab"))
    write_report([one, two, one], tmp_path / "out.html")
    names = Tree((tmp_path / "out.html").read_text("utf-8")).texts("summary")
    assert len(names) == 2
    assert str(tmp_path / "a" / "run") in names[0]
    assert str(tmp_path / "b" / "run") in names[1]


def test_a_report_does_not_take_the_place_of_something_else(tmp_path):
    path = write(tmp_path / "run", events())
    before = path.read_bytes()
    with pytest.raises(PaamError, match=r"ends in \.html"):
        write_report([path], path)
    assert path.read_bytes() == before
    with pytest.raises(PaamError, match="cannot be written"):
        write_report([path], tmp_path / "nowhere" / "out.html")


def test_the_same_record_gives_the_same_bytes(tmp_path):
    path = write(tmp_path / "run", events())
    for name in ("one.html", "two.html"):
        write_report([path], Path(tmp_path / name))
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()
