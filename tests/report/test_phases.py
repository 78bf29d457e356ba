"""Views know no phase by its name: what a run was trained in stands in its record, whatever its method calls it."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import events as running
import records
from paam.config.recipe import recipe_from_tree
from paam.errors import StoppedError
from paam.events import ROLES, Epoch, Event, Start, of_kind
from paam.methods import Method, known_methods, register_method
from paam.methods.parts import cut_by
from paam.pruning.criteria import L1
from paam.report.gathering import gather
from paam.report.page import page
from paam.report.stages import stages
from paam.runs.run import run
from paam.train.phase import Phase
from paam.views.lines import LinesView
from paam.views.listing import list_runs, runs_table
from paam.views.live_layout import frame
from paam.views.state import RunState, after
from paam.views.tensorboard import TensorBoardView

OTHER = {"warmup": "q1", "score": "q2", "weight": "q3", "finetune": "q4", "control": "q5"}
"""Names that nobody knows."""


def renamed(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same record of a method that calls its phases otherwise."""
    start = {**lines[0], "phases": [phase | {"name": OTHER[phase["name"]]} for phase in lines[0]["phases"]]}
    for phase, before in zip(start["phases"], lines[0]["phases"], strict=True):
        phase["role"] = before["name"]
    return [
        start,
        *(
            line | {"phase": OTHER[line["phase"]], "role": line["phase"]} if line["event"] == "epoch" else line
            for line in lines[1:]
        ),
    ]


def nameless(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As records were written before they said what a phase does."""
    told = json.loads(json.dumps(lines))
    for line in (*told, *told[0]["phases"]):
        line.pop("role", None)
        line.pop("label", None)
    return told


def test_the_page_of_a_run_depends_on_no_name_of_a_phase():
    lines = records.events()
    assert "q3" in json.dumps(renamed(lines))
    assert page([records.facts_of("run", renamed(lines))]) == page([records.facts_of("run", lines)])


@pytest.mark.parametrize("done", range(1, 10))
def test_the_screen_depends_on_no_name_of_a_phase(done):
    lines = running.controlled(2)
    many = [number for number, line in enumerate(lines) if line["event"] == "epoch"][done - 1] + 1

    def screen(lines: list[dict[str, Any]]) -> list[str]:
        state = RunState()
        for event in running.typed(lines[:many]):
            state = after(state, event)
        return [line.plain for line in frame(state, 100, 30, hint="", news=[])]

    assert screen(renamed(lines)) == screen(nameless(lines)) == screen(lines)


def test_lines_and_listing_depend_on_no_name_of_a_phase(tmp_path, capsys):
    lines = running.controlled(2)
    found = []
    for told in (lines, renamed(lines), nameless(lines)):
        view = LinesView()
        for event in running.typed(told):
            view.event(event)
        running.write_run(tmp_path / "run", told, age=3600)
        (row,) = list_runs(tmp_path)
        found.append((capsys.readouterr().out, dataclasses.replace(row, age_seconds=0)))
    assert found[0] == found[1] == found[2]
    assert found[0][1].control_accuracy == 99.46


class Written:
    """Stands in for TensorBoard's writer."""

    def __init__(self, folder: str) -> None:
        self.scalars: list[tuple[Any, ...]] = []

    def add_scalar(self, *scalar: Any) -> None:
        self.scalars.append(scalar)

    def add_image(self, *image: Any, **options: Any) -> None: ...
    def add_histogram(self, *values: Any) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


def test_tensorboard_depends_on_no_name_of_a_phase(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Written))
    found = []
    for told in (running.controlled(), renamed(running.controlled()), nameless(running.controlled())):
        with TensorBoardView(tmp_path) as view:
            for event in running.typed(told):
                view.event(event)
            found.append(view.writer.scalars)
    assert found[0] == found[1] == found[2]
    assert ("control/loss", 0.125, 8) in found[0]


# ---------------------------------------------------------------- a method of one's own


def phases(recipe) -> tuple[Phase, ...]:
    """Dense training; twice a cut, weights that grow and weights that settle; a small network; a control."""
    grow = Phase("g", 1, "weight", gates="binary", label="growing <i>weights</i>", enter=cut_by(L1))
    settle = Phase("s", 1, "weight", gates="binary", label="settling")
    cycles = [dataclasses.replace(phase, cycle=cycle) for cycle in (1, 2) for phase in (grow, settle)]
    return (
        Phase("d", 1, "warmup", makes_dense=True, label="dense training"),
        *cycles,
        Phase("f", 1, "finetune", network="small", gates="binary"),
        Phase("c", 2, "finetune", network="control", label="the other network"),
    )


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> tuple[Path, list[Event]]:
    """A run of a method that nothing in paam knows."""
    folder = tmp_path_factory.mktemp("own") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paam.methods.base._KNOWN", dict(known_methods()))
        register_method(Method("own", label=lambda recipe: "Own", phases=phases))
        recipe = recipe_from_tree(
            {
                "model": {"name": "resnet20"},
                "data": {"name": "digits", "batch_size": 512},
                "prune": {"method": "own", "streams": "tied"},
                "target": {"keep_filters": 0.5, "uniform": True},
            }
        )
        return folder, run(recipe, folder, device="cpu")


def test_the_record_says_what_each_phase_does(own):
    (start,) = of_kind(own[1], Start)
    assert [(phase.name, phase.role, phase.label) for phase in start.phases[:3]] == [
        ("d", "warmup", "dense training"),
        ("g", "weight", "growing <i>weights</i>"),
        ("s", "weight", "settling"),
    ]
    planned = [(phase.name, phase.role, phase.label) for phase in start.phases for _ in range(phase.epochs)]
    assert [(epoch.phase, epoch.role, epoch.label) for epoch in of_kind(own[1], Epoch)] == planned
    assert {phase.role for phase in start.phases} == {*ROLES} - {"score"}


def test_a_method_of_ones_own_has_its_stages_in_the_report(own):
    facts = gather("run", own[1])
    found = [(stage.label, stage.kind) for stage in stages(facts)]
    assert found == [
        ("after dense training", "warmup"),
        *(
            (f"cycle {cycle}: {label}", kind)
            for cycle in (1, 2)
            for label, kind in (
                ("right after the cut", "cut"),
                ("after growing <i>weights</i>", "weight"),
                ("after settling", "weight"),
            )
        ),
        ("after fine-tune", "finetune"),
        ("the other network", "control"),
    ]
    assert len(facts.own_epochs) == 6
    made = page([facts])
    legend = re.findall(r'class="swatch band (\w+)"></i>(.*?)</span>', made)
    assert legend == [
        ("warmup", "dense training"),
        ("weight", "growing &lt;i&gt;weights&lt;/i&gt;, settling"),
        ("finetune", "fine-tune"),
        ("control", "the other network"),
    ]
    strip = made.partition('class="strip"')[2].partition("</div>")[0]
    assert re.findall(r">([^<>]+)</span>", strip) == ["dense training", "cycles", "fine-tune", "the other network"]
    ticks = made.partition("Accuracy at each stage")[2].partition('class="x-ticks"')[2].partition("</div>")[0]
    assert re.findall(r">([^<>]+)</span>", ticks) == ["dense training", "1", "2", "tuned", "dense"]
    assert "In score phases" not in made


def test_a_method_of_ones_own_has_its_words_on_the_console(own, capsys):
    view = LinesView()
    for event in own[1]:
        view.event(event)
    said = [line.split("  ")[1].strip() for line in capsys.readouterr().out.splitlines() if re.match(r" +\d+/8", line)]
    assert len(said) == 8
    state = RunState()
    heads = []
    for event in own[1]:
        state = after(state, event)
        if isinstance(event, Start | Epoch) and state.place is not None:
            heads.append(frame(state, 120, 20, hint="", news=[])[2].plain.strip())
    assert [head.split("   ")[0] for head in heads] == [
        "dense training",
        *["growing <i>weights</i>", "settling"] * 2,
        "fine-tuning the small network",
        *["the other network"] * 2,
    ]
    assert heads[2].split("   ")[1:3] == ["cycle 1 of 2", "epoch 1 of 1"]
    capsys.readouterr()
    Console(width=200).print(runs_table(list_runs(own[0].parent), 200))
    assert "  Own  " in capsys.readouterr().out


def test_the_control_of_a_method_of_ones_own_is_another_network(own, tmp_path):
    """Stopped in it: its accuracy stands apart from that of the network that is pruned."""
    lines = [json.loads(line) for line in (own[0] / "record.jsonl").read_text().splitlines()]
    running.write_run(tmp_path / "run", lines[:-1], age=3600)
    accuracies = [line["accuracy"] for line in lines if line["event"] == "epoch"]
    (row,) = list_runs(tmp_path)
    assert (row.accuracy, row.control_accuracy) == (accuracies[5], accuracies[7])


# ---------------------------------------------------------------- when a cut was made


def test_a_cut_after_the_training_of_its_cycle_stands_after_it():
    """Soft pruning trains without gates, and cuts at the end of each cycle; no epoch has the cut."""
    lines = [line for line in records.events() if line.get("phase") != "score" and line["event"] != "scores"]
    for line in lines:
        if line.get("phase") == "weight":
            line |= {"phase": "soft", "role": "weight", "label": "soft pruning", "kept_macs": 1.0, "kept_params": 1.0}
    found = [stage.label for stage in stages(records.facts_of("sfp", lines))]
    assert found == [
        "end of warm-up",
        "cycle 1: after soft pruning",
        "cycle 1: right after the cut",
        "cycle 2: after soft pruning",
        "cycle 2: right after the cut",
        "after fine-tune",
        "dense control",
    ]


def test_a_cut_outside_of_cycles_has_no_number():
    lines = [line for line in records.events() if not line.get("cycle")]
    cut = {**next(line for line in records.events() if line["event"] == "selection"), "cycle": 0, "epoch": 6}
    lines.insert(3, cut)
    facts = records.facts_of("once", lines)
    assert "right after the cut" in [stage.label for stage in stages(facts)]
    assert "cycle 0" not in page([facts])


def test_a_run_begun_before_records_said_what_phases_do_is_resumed(tmp_path):
    tree = {"model": {"name": "resnet20"}, "data": {"name": "digits", "batch_size": 512}}
    tree |= {"prune": {"method": "sfp", "streams": "tied"}, "target": {"keep_filters": 0.5, "uniform": True}}
    schedule = {"warmup": 1, "cycles": 1, "score": 0, "weight": 1, "finetune": 1}
    recipe = recipe_from_tree({**tree, "schedule": schedule})
    done: list[Event] = []
    with pytest.raises(StoppedError):
        run(recipe, tmp_path / "run", device="cpu", watch=done.append, stop=lambda: len(of_kind(done, Epoch)) > 1)
    path = tmp_path / "run" / "record.jsonl"
    lines = nameless([json.loads(line) for line in path.read_text().splitlines()])
    assert "role" not in lines[0]["phases"][0]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    events = run(recipe, tmp_path / "run", device="cpu", resume=True)
    assert [epoch.role for epoch in of_kind(events, Epoch)] == ["", "", "finetune"]
