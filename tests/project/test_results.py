"""Tables and figures of the results, from records made by hand: means, runs that did not finish, what is not there."""

from __future__ import annotations

import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from records import EPOCHS, RECIPE, Line, events, large, write
from render import figures, pages, tables
from render.widths import discovered

LABELS = tables.STRONG
OWN = sum(phase != "control" for phase, *_ in EPOCHS)  # 8: warm-up 2, two cycles of 2, fine-tune 2
SVG = "{http://www.w3.org/2000/svg}"


def rows(table: str) -> dict[str, list[str]]:
    """First cell -> the others, of every row below the head."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {first: others for first, *others in cells}


def pruned_to(params: int, record: list[Line]) -> list[Line]:
    return [*record[:-1], {**record[-1], "pruned": {**record[-1]["pruned"], "params": params}}]


def begun_with(setting: str, record: list[Line]) -> list[Line]:
    """The same run without its warm-up, given a file on the command line."""
    start = {**record[0], "command": f"{record[0]['command']} --set schedule.warmup=0 --set {setting}"}
    start["recipe"] = {**start["recipe"], "distill": {"teacher": "given" if "teacher" in setting else None}}
    record[-1]["dense"]["trained"] = "as given"
    return [start, *(event for event in record[1:] if event.get("phase") != "warmup")]


def test_mean_and_standard_deviation_over_finished_seeds_worked_by_hand(tmp_path):
    for seed, (accuracy, params) in enumerate([(93.0, 400), (94.0, 300), (95.6, 350)]):
        write(tmp_path / f"medium-seed{seed}", pruned_to(params, events(seed=seed, accuracy=accuracy)))
    write(tmp_path / "medium-seed3", events(seed=3, accuracy=10.0)[:-1])
    table = rows(tables.outcomes(tmp_path, LABELS))
    # Mean 94.2; squares of 1.2, 0.2 and 1.4 add up to 3.44; over 2 that is 1.72, whose root is 1.3115.
    # Removed: 60, 70 and 65 % of 1,000 parameters; 1,500 of 2,000 MACs.
    removed = ["65.0 %", "75.0 %"]
    paper = "94.28 %, 52.3 %, 49.3 % (Vanilla)"
    assert list(table) == [LABELS["medium"]]
    assert table[LABELS["medium"]] == ["94.20 % ± 1.31", "0, 1, 2", *removed, str(OWN), paper]


def test_warm_ups_by_hand(tmp_path):
    """The last epoch of warm-up counts, not what became of it."""
    before = [accuracy for phase, _, _, accuracy in EPOCHS if phase == "warmup"][-1]
    for seed, more in enumerate([0.0, 3.0]):
        record = events(seed=seed)
        for event in record:
            if event.get("phase") == "warmup":
                event["accuracy"] = before + more
        write(tmp_path / f"ramp-0-seed{seed}", record)
    write(tmp_path / "ramp-5-seed0", events(seed=0))
    table = rows(tables.warmups(tmp_path))
    # Two values 3 apart: a deviation of 3 / root of 2.
    assert table["ramp-0"] == [f"{before + 1.5:.2f} % ± 2.12", "0, 1"]
    assert table["ramp-5"] == [f"{before:.2f} %", "0"]


def test_one_seed_has_no_deviation_and_rows_follow_the_order_of_the_names(tmp_path):
    for name in ("scratch", "high", "medium", "l1"):
        write(tmp_path / f"{name}-seed0", events())
    table = rows(tables.outcomes(tmp_path, LABELS))
    assert list(table) == [LABELS[name] for name in ("medium", "high", "l1", "scratch")]
    assert table[LABELS["high"]][0] == "88.50 %"
    assert table[LABELS["high"]][-1] == "93.10 %, 70.0 %, 74.7 % (KQ)"  # Vanilla's row at this ratio is worse: 92.42
    assert table[LABELS["l1"]][-1] == ""


def test_the_papers_row_is_that_of_the_scorer_where_one_is_named(tmp_path):
    write(tmp_path / "vanilla-high-seed0", events())
    write(tmp_path / "kq-medium-seed0", events(recipe={**RECIPE, "model": {"name": "resnet110"}}))
    table = rows(tables.outcomes(tmp_path))
    assert table["vanilla-high"][-1] == "92.42 %, 83.0 %, 70.5 %"
    assert table["kq-medium"][-1] == "94.63 %, 48.3 %, 40.9 %"


def test_epochs_behind_a_network_count_those_of_the_network_it_began_with(tmp_path):
    write(tmp_path / "medium-seed0", events())
    dense = "/some/where/medium-seed0/dense.safetensors"
    write(tmp_path / "high-seed0", begun_with(f"model.weights={dense}", events()))
    write(tmp_path / "scratch-seed0", begun_with(f"distill.teacher={dense}", events()))
    write(tmp_path / "free-seed0", begun_with("model.weights=public.safetensors", events()))
    write(
        tmp_path / "l1-seed1", begun_with("model.weights=/some/where/medium-seed1/dense.safetensors", events(seed=1))
    )  # no medium-seed1 to ask
    table = rows(tables.outcomes(tmp_path, LABELS))
    epochs = {name: table[LABELS[name]][4] for name in ("medium", "high", "scratch", "free", "l1")}
    assert epochs == {
        "medium": "8",
        "high": "8",  # 6 of its own, 2 of warm-up
        "scratch": "6 (its teacher: 2)",
        "free": "6 + unknown",
        "l1": "6 + unknown",
    }


def test_where_accuracy_is_lost(tmp_path):
    write(tmp_path / "medium-seed0", events())
    write(tmp_path / "high-seed0", begun_with("model.weights=medium-seed0/dense.safetensors", events()))
    write(tmp_path / "l1-seed0", events())
    assert rows(tables.losses(tmp_path, LABELS)) == {
        LABELS["medium"]: ["70.00 %", "60.50 %", "76.00 %", "88.00 %"],
        LABELS["high"]: ["90.00 %", "60.50 %", "76.00 %", "88.00 %"],  # the dense network as it came
    }


def test_a_dense_network_that_was_trained_on_is_not_taken_for_the_one_a_run_began_with(tmp_path):
    record = begun_with("model.weights=medium-seed0/dense.safetensors", events())
    record[-1]["dense"]["trained"] = "as long"
    write(tmp_path / "high-seed0", record)
    assert rows(tables.losses(tmp_path, LABELS))[LABELS["high"]][0] == "–"


def test_runs_without_an_end_are_listed_with_their_epoch_and_in_no_other_table(tmp_path):
    cut = [event for event in events() if event["event"] != "end" and event.get("epoch", 0) < 7]
    write(tmp_path / "strong" / "medium-seed0", cut)
    write(tmp_path / "paper" / "kq-medium-seed0", events()[:1])
    assert tables.outcomes(tmp_path / "strong", LABELS) == tables.losses(tmp_path / "strong", LABELS) == ""
    assert rows(tables.unfinished([tmp_path / "strong", tmp_path / "paper"])) == {
        "`results/strong/medium-seed0`": ["7 of 10", "fine-tune", "70.00 %", "85.00 % (test set)"],
        "`results/paper/kq-medium-seed0`": ["0 of 10", "–", "–", "–"],
    }


def test_ablations_have_a_table_per_group_of_what_finished_and_begin_with_what_they_depart_from(tmp_path):
    write(tmp_path / "theta-0.5", events())
    write(tmp_path / "theta-0.25", events()[:-1])
    write(tmp_path / "activation-leaky-exponential", events(accuracy=87.0))
    write(tmp_path / "streams-tied", pruned_to(300, events(accuracy=89.0)))
    write(tmp_path / "widths-uniform", events(accuracy=86.0))
    found = tables.ablations(tmp_path)
    rest = ["60.5 %", "60.0 %", "75.0 %"]  # right after the second cut; parameters and MACs removed
    paper = "94.28 %, 52.3 %, 49.3 %"
    assert rows(found["theta"]) == {"0.5": ["88.50 %", *rest, paper]}
    assert rows(found["activation"]) == {"leaky-exponential": ["87.00 %", *rest, paper]}
    assert rows(found["streams"]) == {
        "independent": ["87.00 %", *rest],
        "tied": ["89.00 %", "60.5 %", "70.0 %", "75.0 %"],
    }
    assert list(rows(found["streams"])) == ["independent", "tied"]
    assert list(rows(found["widths"])) == ["discovered", "uniform"]  # with tied streams, both
    assert rows(found["widths"])["discovered"] == rows(found["streams"])["tied"]
    assert list(rows(tables.unfinished([tmp_path]))) == [f"`results/{tmp_path.name}/theta-0.25`"]


def test_discovered_widths_by_hand(tmp_path):
    """Two stages of two blocks; what inner layers keep: 1, 1/2, 1/2, 1/4 and 1/2, 1/4, 1, 1/4."""
    kept = [
        {"conv1": [4, 4], "1.0": [4, 4], "1.1": [2, 4], "stream": [7, 8], "2.0": [4, 8], "2.1": [2, 8]},
        {"conv1": [3, 4], "1.0": [2, 4], "1.1": [1, 4], "stream": [8, 8], "2.0": [8, 8], "2.1": [2, 8]},
    ]
    names = {"1.0": "layer1.0.conv1", "1.1": "layer1.1.conv1", "stream": "layer2.0.conv2"}
    names |= {"2.0": "layer2.0.conv1", "2.1": "layer2.1.conv1"}
    for seed, groups in enumerate(kept):
        record = events(seed=seed)
        record[-1]["kept_filters"] = {names.get(name, name): counts for name, counts in groups.items()}
        write(tmp_path / f"medium-seed{seed}", record)
    write(tmp_path / "free-seed0", events())  # no residual network
    table, _, below = discovered(tmp_path, ("medium", "high", "free")).partition("\n\n")
    assert rows(table) == {
        "medium-seed0": ["4 of 4, 7 of 8", "4 of 4, 4 of 8", "50 %, 25 %", "25 % in 1 of 4 inner layers"],
        "medium-seed1": ["3 of 4, 8 of 8", "2 of 4, 8 of 8", "25 %, 25 %", "25 % in 2 of 4 inner layers"],
    }
    # In quarters: 4, 2, 2, 1 and 2, 1, 4, 1. From their means 2.25 and 2 by (1.75, -0.25, -0.25, -1.25) and
    # (0, -1, 2, -1): products add up to 1, squares to 4.75 and 6. Without the first blocks the second has 1 and 1.
    assert f"of medium: {1 / math.sqrt(4.75 * 6):.2f};" in below
    assert "without the stages' first blocks that has no meaning" in below
    assert discovered(tmp_path, ("high", "free")) == ""


def test_sections_without_records_are_absent_and_appear_with_them(tmp_path):
    page = pages.ROOT / "docs" / "reference" / "results.md"
    sections = {
        "strong": ("medium-seed0", "## ResNet-56 on CIFAR-10, our recipe"),
        "resnet110": ("kq-high-seed0", "## ResNet-110 on CIFAR-10"),
        "ablations": ("theta-0.2", "### The threshold"),
    }
    empty = pages.filled(page, tmp_path)
    assert "92.28 %" not in empty.partition("<!-- /paper -->")[0]
    for folder, (name, heading) in sections.items():
        assert heading not in empty
        write(tmp_path / folder / name, events())
    full = pages.filled(page, tmp_path)
    order = [full.index(heading) for _, heading in sections.values()]
    assert order == sorted(order)
    assert full.index(sections["strong"][1]) < full.index("the paper's recipe read literally")
    assert "did not finish" not in full


def test_a_page_without_the_end_of_a_block_is_refused_and_one_with_it_keeps_the_rest(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- unfinished -->\nold\n<!-- /unfinished -->\nb\n")
    assert pages.filled(page, tmp_path) == "a\n<!-- unfinished -->\n<!-- /unfinished -->\nb\n"
    page.write_text("a\n<!-- unfinished -->\nb\n")
    with pytest.raises(AssertionError, match="/unfinished"):
        pages.filled(page, tmp_path)


# --- figures ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> dict[str, str]:
    return figures.draw(write(tmp_path_factory.mktemp("runs") / "by-hand", events()))


@pytest.mark.parametrize("path", sorted(pages.FIGURES.glob("*.svg")), ids=lambda path: path.stem)
def test_figures_are_small_stand_alone_and_know_both_schemes(path: Path):
    text = path.read_text()
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg"
    assert len(text.encode()) < 60_000
    assert "prefers-color-scheme:dark" in text
    assert not re.search(r"href|url\(|<script|@import|<image", text)
    coordinates = [value for element in root.iter() for key, value in element.items() if key != "aria-label"]
    assert not [value for value in coordinates if re.search(r"\.\d{3}|e-", value)]


def texts(picture: str, kind: str) -> list[str]:
    found = ElementTree.fromstring(picture).iter(f"{SVG}text")
    return ["".join(element.itertext()) for element in found if kind in (element.get("class") or "").split()]


def test_layers_show_how_many_filters_stay(pictures):
    assert texts(pictures["layers.svg"], "count") == ["3", "0", "3"]
    assert "6 of 12 filters" in pictures["layers.svg"]


def test_layers_of_a_deep_network_wrap_within_the_picture(tmp_path):
    root = ElementTree.fromstring(figures.draw(write(tmp_path / "deep", large()))["layers.svg"])
    panels = [group for group in root.findall(f"{SVG}g") if group.find(f"{SVG}g") is not None]
    assert sum(len(panel.findall(f"{SVG}g")) for panel in panels) == 109
    tops = set()
    for panel in panels:
        left, top = map(float, re.findall(r"[\d.]+", panel.get("transform")))
        last = panel.findall(f"{SVG}g")[-1]
        right = left + float(re.findall(r"[\d.]+", last.get("transform"))[0]) + 17  # 17: a bar with two digits over it
        assert 20 <= left < right <= 980
        tops.add(top)
    assert len(tops) > 1


def test_scores_show_the_first_and_the_last_cycle_with_their_threshold(pictures):
    assert "Cycle 1: 8 of 12 filters stay; threshold θ = 0.500" in pictures["scores.svg"]
    assert "Cycle 2: 6 of 12 filters stay; threshold θ = 0.500" in pictures["scores.svg"]
    assert texts(pictures["scores.svg"], "strong") == ["θ = 0.500"] * 4


def test_every_phase_is_shaded_under_both_curves(pictures):
    bands = [element.get("class") for element in ElementTree.fromstring(pictures["curves.svg"]).iter(f"{SVG}rect")]
    one = ["warmup", "score", "weight", "score", "weight", "finetune", "control"]
    assert [kind.split()[1] for kind in bands if kind.startswith("band ")] == one * 2


def test_activations_follow_their_formulas_from_the_points_of_the_lines(pictures):
    def sigmoid(z: float) -> float:
        return 1 / (1 + math.exp(-z))

    formulas = {
        "main": lambda z: math.exp(z) if z < 0 else 1 + 0.01 * z,
        "second": lambda z: 2 * sigmoid(z) if z < 0 else 1 + 0.01 * z,
        "third": sigmoid,
        "fourth": lambda z: sigmoid(100 * z),
    }
    root = ElementTree.fromstring(pictures["activations.svg"])
    for kind, formula in formulas.items():
        line = max((path.get("d") for path in root.iter(f"{SVG}path") if path.get("class") == kind), key=len)
        points = [tuple(map(float, pair.split())) for pair in re.split("[ML]", line)[1:]]
        assert (points[0][0], points[-1][0]) == (0, 100)
        for x, y in points:
            z, score = x / 10 - 5, 1.12 * (1 - y / 100)
            # x is rounded to 0.01 % of ten units, y to 0.01 % of 1.12; every activation rises.
            assert formula(z - 6e-4) - 1e-4 <= score <= formula(z + 6e-4) + 1e-4
    assert "θ = 0.5" in texts(pictures["activations.svg"], "strong")
    heights = sorted(
        float(c.get("cy")) for c in ElementTree.fromstring(pictures["activations.svg"]).iter(f"{SVG}circle")
    )
    assert heights == pytest.approx([220 * (1 - 1 / 1.12), 220 * (1 - 0.5 / 1.12)], abs=0.1)  # scores of 1 and 1/2
