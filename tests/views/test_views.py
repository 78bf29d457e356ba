"""Views of a going run: what they say is worked out by hand, and no line is ever wider than the terminal."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from events import (
    END,
    FAILED,
    KEPT,
    SCORES,
    SELECTION,
    Line,
    changed,
    controlled,
    epoch,
    record,
    resumed,
    start,
    typed,
)
from paam.config.schema import InvalidError
from paam.events import read_event
from paam.runs.progress import Progress, ProgressFile, StepClock, read_progress
from paam.views.format import age, countdown, curve_blocks, result_line, score_blocks, selection_line
from paam.views.lines import JsonView, LinesView
from paam.views.live import LiveView
from paam.views.live_layout import frame
from paam.views.state import RunState, after
from paam.views.summary import summary


class Clock:
    """Time as the test says."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def state_of(lines: list[Line], progress: Progress | None = None) -> RunState:
    state = RunState()
    for event in typed(lines):
        state = after(state, event)
    state.progress = progress
    return state


def screen(state: RunState, width: int = 80, height: int = 24, **options) -> list[str]:
    return [line.plain for line in frame(state, width, height, **{"hint": "a hint", "news": [], **options})]


# ---------------------------------------------------------------- time


def test_pace_leaves_out_the_first_step_of_each_epoch():
    clock = Clock()
    steps = StepClock(clock)
    clock.time += 60  # compiling
    assert steps.step(1, 20).pace is None
    clock.time += 8
    assert steps.step(5, 20) == Progress(epoch=0, step=5, steps=20, pace=2.0)
    assert steps.step(5, 20).seconds_left == 30.0
    steps.event(*typed([epoch(0)]))
    assert steps.step(7, 20) == Progress(epoch=1, step=7, steps=20, pace=None)  # goes on inside of an epoch
    clock.time += 6
    assert steps.step(10, 20).pace == 2.0


def test_time_left_takes_each_phase_at_its_own_pace():
    warm = [start(), epoch(0, seconds=10), epoch(1, seconds=20), SCORES, epoch(2, seconds=4)]
    # Two epochs of weights and two of fine-tuning are left, none seen yet: each as the median of 10, 20 and 4.
    assert state_of(warm).seconds_left() == 4 * 10
    assert state_of(warm, Progress(3, 5, 10, 1.0)).seconds_left() == 4 * 10 - 10 / 2
    # One epoch of weights of 6 is left, and two of fine-tuning at the median of 10, 20, 4 and 6.
    assert state_of([*warm, SELECTION, epoch(3, seconds=6)]).seconds_left() == 6 + 2 * 8
    # Progress of an epoch that is over says nothing.
    assert state_of(warm, Progress(2, 5, 10, 1.0)).seconds_left() == 40


def test_time_left_in_the_first_epoch_goes_by_its_steps():
    assert state_of([start()]).seconds_left() is None
    assert state_of([start()], Progress(0, 20, 100, 0.5)).seconds_left() == 7 * 50 - 10
    assert state_of(record()).seconds_left() == 0


def test_time_left_after_a_change_goes_by_the_epochs_after_it():
    """A run that moved from a GPU to a CPU: epochs of 1 s are now 300 s, by its steps and then by its epochs."""
    moved = changed(2, {"environment.device": ["cuda", "cpu"]})
    here = [start(), epoch(0, seconds=1), epoch(1, seconds=1), moved]
    assert state_of(here).seconds_left() is None
    assert state_of(here, Progress(2, 20, 100, 3.0)).seconds_left() == 5 * 300 - 60
    assert state_of([*here, SCORES, epoch(2, seconds=310)]).seconds_left() == 4 * 310
    assert state_of([start(), epoch(0, seconds=900), moved, epoch(1, seconds=5)]).longest == 900


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-:--"), (0, "0:00"), (7.4, "0:07"), (754, "12:34"), (11045, "3:04:05"), (2 * 86400 + 11040, "2 d 03:04")],
)
def test_durations(seconds, text):
    assert countdown(seconds) == text


def test_ages():
    assert [age(s) for s in (-3, 59, 60, 7199, 86399, 200000)] == ["0 s", "59 s", "1 min", "1 h", "23 h", "2 d"]


# ---------------------------------------------------------------- blocks


def test_scores_are_spread_over_0_to_1():
    # Four bins: seven scores in the first, one below 0.75, two in the last: 7/7, 1 of 7 and 2 of 7 of the eighths.
    assert score_blocks(SCORES["scores"].values(), 4) == "█ ▂▃"
    assert score_blocks([[-3.0, 9.0]], 4) == "█  █"


def test_a_curve_runs_from_its_lowest_to_its_highest():
    assert curve_blocks([0, 70, 35], 10) == "▁█▅"
    assert curve_blocks([5, 5], 10) == "▁▁"
    assert curve_blocks([], 10) == ""
    assert curve_blocks([0, 20, 70, 70], 2) == "▁█"  # averaged in pairs: 10 and 70
    assert len(curve_blocks(list(range(441)), 60)) == 60


# ---------------------------------------------------------------- the live view


def test_the_screen_says_where_the_run_is():
    state = state_of(record(4), Progress(4, 5, 10, 1.0))
    lines = screen(state)
    text = "\n".join(lines)
    assert lines[0].split() == ["tiny", "on", "beads", "PAAM", "(KQ)", "seed", "7"]
    assert "training weights   cycle 1 of 1   epoch 2 of 2" in text
    assert re.search(r"epoch +━+╸?━* +step 5 of 10 +0:05 left", text)
    # 2 s per epoch: half an epoch of weights and two of fine-tuning.
    assert re.search(r"all epochs +━+╸?━* +4 of 7 +0:05 left", text)
    labels = next(n for n, line in enumerate(lines) if "loss" in line)
    assert lines[labels].split("  ")[0].strip() == "loss"
    assert "held-out accuracy" in lines[labels]
    assert re.split(" {2,}", lines[labels + 1].strip()) == ["0.2500", "50.00 %", "55.0 %", "40.0 %"]
    assert "3 of 10 filters kept" in text
    assert re.search(r"conv1 +3/4 +█+░+", text)
    assert re.search(r"conv2 +0/6 +░+ ", text + " ")
    assert lines[-1].strip() == "a hint"


def test_bars_are_as_full_as_the_run():
    lines = screen(state_of(record(4), Progress(4, 5, 10, 1.0)), width=140)
    half, most = (frame_bar(state_of(record(4), Progress(4, 5, 10, 1.0)), 140, row) for row in (3, 4))
    assert half == pytest.approx(5 / 10, abs=0.02)
    assert most == pytest.approx(4.5 / 7, abs=0.02)
    assert len({line.index("━") for line in lines if "━" in line}) == 1


def frame_bar(state: RunState, width: int, row: int) -> float:
    """The coloured share of a bar."""
    line = frame(state, width, 40, hint="", news=[])[row]
    first, end = line.plain.index("━"), max(line.plain.rindex(c) for c in "━╸" if c in line.plain) + 1
    coloured = sum(min(span.end, end) - max(span.start, first) for span in line.spans if span.style == "cyan")
    return coloured / (end - first)


def test_the_accuracy_says_what_it_is_measured_on():
    assert "test accuracy" in "\n".join(screen(state_of(record(2, monitor="test"))))
    assert "held-out accuracy" in "\n".join(screen(state_of(record(2))))


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([], "preparing"),
        ([start()], "warm-up (dense)   epoch 1 of 2"),
        (record(3), "training weights   cycle 1 of 1   epoch 1 of 2"),
        (record(5), "fine-tuning the small network   epoch 1 of 2"),
        (record(7, end=False), "measuring the result"),
        (record(7), "finished"),
    ],
)
def test_every_moment_of_a_run_has_its_words(events, words):
    assert words in "\n".join(screen(state_of(events)))


def test_a_warning_takes_the_place_of_the_hint_and_news_stand_above_it():
    lines = screen(state_of(record(2)), warning="it is quiet", news=["one", "two"])
    assert [line.strip() for line in lines[-3:]] == ["one", "two", "it is quiet"]


def test_the_accuracy_stays_that_of_the_pruned_network_during_the_dense_control():
    state = state_of(controlled(1))
    assert state.accuracies == [50.0] * 7
    lines = screen(state)
    labels = next(n for n, line in enumerate(lines) if "loss" in line)
    assert re.split(" {2,}", lines[labels + 1].strip()) == ["0.2500", "50.00 %", "55.0 %", "40.0 %"]
    assert any(
        re.search(r"training the dense control   epoch 2 of \d+   dense control 98\.46 %", line) for line in lines
    )
    assert sum("98.46" in line for line in lines) == 1
    assert "50.00 to 50.00 %" in "\n".join(lines)
    unmeasured = {**controlled(1)[-1], "epoch": 8, "accuracy": None}
    assert state_of([*controlled(1), unmeasured]).control == 98.46


def test_a_failed_run_says_so():
    assert screen(state_of([*record(4), FAILED]))[2].strip() == "failed"
    # A resumed run knows nothing of it any more.
    again = [resumed(4, told=len(record(4))), *record(4)]
    assert state_of([*record(4), FAILED, *again]).failed is None


@pytest.mark.parametrize(
    ("kept", "width", "full"), [(16, 16, 8), (15, 16, 7), (1, 16, 1), (0, 16, 0), (8, 16, 4), (99, 100, 7), (1, 1, 8)]
)
def test_a_bar_is_full_only_where_all_filters_stay(kept, width, full):
    layers = {f"layer.{number}": [kept, width] for number in range(19)}  # two columns, so that bars are shortest
    state = state_of([*record(4), {**SELECTION, "kept_filters": layers}])
    bars = [bar for line in screen(state) for bar in re.findall(r"\d+/\d+ +([█░]+)", line)]
    assert len(bars) == 19
    length = len(bars[0])
    assert length >= 8
    if length == 8:
        assert bars[0].count("█") == full
    for bar in bars:
        assert (bar.count("█") == length) == (kept == width)
        assert (bar.count("█") == 0) == (kept == 0)
    table = Console(record=True, width=200, file=io.StringIO())
    table.print(summary(*typed([start(), {**END, "kept_filters": layers}])))
    shown = re.findall("[█░]{32}", table.export_text())
    assert {bar.count("█") for bar in shown} == {32 * kept // width or min(kept, 1)}


NAMES = ["tiny", "[bold]x[/bold][/]", "\x1b[31mred\x1b[0m\r\n\x07", "模型" * 40, "x" * 300, "", "e\u0301\u200d"]


def test_no_line_is_wider_and_no_screen_higher_than_the_terminal():
    for name in NAMES:
        events = record(5)
        events[0]["recipe"]["model"]["name"] = name
        events[0]["hardware"] = name
        many = {f"{name}.{number}": [number % 7, 7] for number in range(60)}
        state = state_of([*events, {**SELECTION, "kept_filters": many}], Progress(5, 123456, 1234567, 3600.0))
        for width in (1, 2, 5, 17, 40, 79, 80, 81, 119, 140, 250):
            for height in (1, 2, 5, 12, 24, 40, 90):
                lines = screen(state, width, height, news=[name] * 3)
                assert len(lines) == height
                assert max(map(cell_len, lines)) <= width, (name, width)
                assert all(character.isprintable() for line in lines for character in line)


def test_at_80_by_24_the_demos_network_fits_whole():
    layers = {f"layer{number // 6}.{number % 3}.conv{number % 2}.{number}": [9, 16] for number in range(19)}
    lines = screen(state_of([*record(4), {**SELECTION, "kept_filters": layers}]))
    assert sum(line.count("9/16") for line in lines) == 19
    assert not any("first" in line for line in lines)
    small = screen(state_of([*record(4), {**SELECTION, "kept_filters": layers}]), height=18)
    shown = sum(line.count("9/16") for line in small)
    assert any(f"the first {shown} of 19 layers" in line for line in small)


def terminal(width: int = 80, height: int = 24) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=True, width=width, height=height, color_system=None), file


def test_the_live_view_uses_the_second_screen_and_leaves_a_transcript():
    console, file = terminal()
    with LiveView(console, "hint") as view:
        for event in typed(record()):
            view.event(event)
            view.step(1, 2)
        sys.stdout.write("a model's own words\n")
        sys.stderr.write("mind this\n")
        view.live.refresh()
    shown, _, after_it = file.getvalue().partition("\x1b[?1049l")
    assert shown.startswith("\x1b[?1049h")
    assert "finished" in shown
    assert "a model's own words" in shown
    lines = after_it.replace("\x1b[?25h", "").splitlines()
    assert lines[0].startswith("tiny on beads: 1,000 parameters, 20,000 MACs; PAAM (KQ), seed 7, 1 x Abacus")
    assert lines[1].startswith("cycle 1: 3 of 10 filters stay (scores from 0.500), 55.0 % of MACs, 40.0 % of")
    assert lines[2:4] == ["a model's own words", "mind this"]
    assert sys.stdout is not view.said


def test_a_selection_that_removes_nothing_says_so():
    kept = {name: [width, width] for name, (_, width) in SELECTION["kept_filters"].items()}
    line = selection_line(*typed([{**SELECTION, "kept_filters": kept}]))
    assert line == "cycle 1: all 10 filters stay at a threshold of 0.500"


def test_a_talkative_model_cannot_fill_the_memory():
    console, file = terminal()
    with LiveView(console, "hint"):
        for number in range(1500):
            sys.stdout.write(f"step {number}\r")
        sys.stdout.write("half a line")
    lines = file.getvalue().partition("\x1b[?1049l")[2].replace("\x1b[?25h", "").splitlines()
    assert lines == ["(500 lines before these are lost)", *(f"step {n}" for n in range(500, 1500)), "half a line"]


def test_an_error_leaves_the_terminal_in_order():
    console, file = terminal()
    with contextlib.suppress(ZeroDivisionError), LiveView(console, "hint") as view:
        view.event(*typed([start()]))
        raise ZeroDivisionError
    assert file.getvalue().count("\x1b[?1049h") == file.getvalue().count("\x1b[?1049l") == 1
    assert "\x1b[?25h" in file.getvalue()
    assert not view.live.is_started


def test_who_leaves_by_ctrl_c_is_told_only_what_libraries_have_said():
    console, file = terminal()
    with contextlib.suppress(KeyboardInterrupt), LiveView(console, "hint") as view:
        view.event(*typed([start()]))
        sys.stdout.write("a warning\n")
        raise KeyboardInterrupt
    assert file.getvalue().partition("\x1b[?1049l")[2].replace("\x1b[?25h", "") == "a warning\n"


def test_a_resumed_run_keeps_its_curve_and_says_its_story_once():
    console, file = terminal()
    old = record(4)
    with LiveView(console, "hint") as view:
        for event in typed([resumed(4, told=len(old)), *old]):
            view.event(event)
        assert view.state.accuracies == [50.0] * 4
        assert view.state.done == 4
        view.event(*typed([epoch(4)]))
    assert file.getvalue().partition("\x1b[?1049l")[2].replace("\x1b[?25h", "").strip() == "resumed after epoch 4"


# ---------------------------------------------------------------- plain lines


def test_plain_lines(capsys):
    view = LinesView()
    for event in typed([*record(4), epoch(4, accuracy=None)]):
        view.event(event)
    assert capsys.readouterr().out.splitlines() == [
        "tiny on beads: 1,000 parameters, 20,000 MACs; PAAM (KQ), seed 7, 1 x Abacus",
        "   1/7  warm-up (dense)   loss 0.2500   held-out accuracy 50.00 %",
        "   2/7  warm-up (dense)   loss 0.2500   held-out accuracy 50.00 %",
        "   3/7  scoring filters in cycle 1   loss 0.2500   held-out accuracy 50.00 %",
        "cycle 1: 3 of 10 filters stay (scores from 0.500), 55.0 % of MACs, 40.0 % of parameters",
        "   4/7  training weights in cycle 1   loss 0.2500   held-out accuracy 50.00 %",
        "   5/7  training weights in cycle 1   loss 0.2500",
    ]


def test_a_long_epoch_speaks_every_thirty_seconds(capsys):
    clock = Clock()
    view = LinesView(clock)
    view.event(*typed([start()]))
    capsys.readouterr()
    for step in range(1, 101):  # a second each
        clock.time += 1
        view.step(step, 200)
    # After 30, 60 and 90 steps; the first is not timed, so 29 steps took 29 s.
    assert capsys.readouterr().out.splitlines() == [
        "   1/7  warm-up (dense)   step 30 of 200, 2:50 left, 22:50 of the run",
        "   1/7  warm-up (dense)   step 60 of 200, 2:20 left, 22:20 of the run",
        "   1/7  warm-up (dense)   step 90 of 200, 1:50 left, 21:50 of the run",
    ]
    clock.time += 29
    view.event(*typed([epoch(0)]))
    clock.time += 29
    view.step(1, 200)
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_plain_lines_of_a_resumed_run_begin_where_it_goes_on(capsys):
    view = LinesView()
    old = record(4)
    for event in typed([resumed(4, told=len(old)), *old, epoch(4)]):
        view.event(event)
    first, second = capsys.readouterr().out.splitlines()
    assert first == "resumed after epoch 4"
    assert second.startswith("   5/7  training weights")


def test_what_a_resumed_run_says_of_its_checkpoint_and_its_recipe(capsys):
    view = LinesView()
    skipped = ["epoch-5 is cut short\x1b[1m"]
    for event in typed([resumed(4, told=0, step=9, skipped=skipped), changed(4, {"finetune.lr": [0.5, 0.05]})]):
        view.event(event)
    assert capsys.readouterr().out.splitlines() == [
        "an older checkpoint is used: epoch-5 is cut short\N{REPLACEMENT CHARACTER}[1m",
        "resumed after epoch 4 and 9 steps",
        "from here on finetune.lr = 0.05 (was 0.5)",
    ]


def test_a_warning_is_said_once_until_it_is_taken_back(capsys):
    view = LinesView()
    for sentence in ("quiet", "quiet", "", "quiet"):
        view.warn(sentence)
    assert capsys.readouterr().out.splitlines() == ["quiet", "quiet"]


def test_json_lines_are_the_record(capsys):
    view = JsonView()
    for event in typed(record()):
        view.event(event)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == record()


# ---------------------------------------------------------------- tables


def test_the_result_in_one_line():
    assert result_line(*typed([start(), END])) == (
        "tiny on beads: test accuracy 88.50 %, 45.0 % of MACs and 60.0 % of parameters removed"
    )


@pytest.mark.parametrize("width", [40, 80, 140])
def test_the_summary_shows_names_as_they_are(width):
    events = record()
    events[0]["recipe"]["model"]["name"] = "[red]net[/]\x1b[2J"
    end = {**END, "kept_filters": {"[b]\x1b[1m": [1, 2], **KEPT}}
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(summary(*typed([events[0], end])))
    text = console.file.getvalue()
    assert "[red]net[/]" in text
    assert "\x1b" not in text
    assert all(cell_len(line) <= width for line in text.splitlines())
    if width >= 80:
        assert "-45.0 %" in text
        assert "-60.0 %" in text
        assert "2.00 x as fast" in text
        assert "not comparable" in text
        assert "conv1 (stream)" in text


def test_eighty_columns_hold_the_quartiles_of_a_slow_network():
    times = {"latency_ms": {"median": 1230.12, "low": 1100.1, "high": 2200.1}}
    end = {**END, "dense": {**END["dense"], **times, "trained": "as long"}, "pruned": {**END["pruned"], **times}}
    console = Console(file=io.StringIO(), width=80)
    console.print(summary(*typed([start(), end])))
    lines = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    assert "│ quartiles │ 1100.1 to 2200.1 ms │ 1100.1 to 2200.1 ms │ │" in lines


# ---------------------------------------------------------------- odd events


def leaves(tree: Line, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    return [
        found
        for key, value in tree.items()
        for found in ([(*path, key)] + (leaves(value, (*path, key)) if isinstance(value, dict) else []))
    ]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=5), inside, max_size=3),
    max_leaves=6,
)


@given(data=st.data())
def test_what_can_be_read_can_be_shown(data):
    """Random values in random places: an event is refused, or every view takes it."""
    line = json.loads(json.dumps(data.draw(st.sampled_from(record()))))
    path = data.draw(st.sampled_from(leaves(line)))
    inside = line
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = data.draw(values)
    try:
        event = read_event(line)
    except InvalidError:
        return
    if event is None:  # of a kind that nobody knows
        return
    state = state_of([] if line["event"] == "start" else [start()])
    state = after(state, event)
    state.progress = Progress(0, 1, 2, 1.0)
    assert len(screen(state)) == 24
    state.seconds_left()
    with contextlib.redirect_stdout(io.StringIO()):
        LinesView().event(event)
    if line["event"] == "end":
        terminal()[0].print(summary(*typed([start()]), event))


# ---------------------------------------------------------------- the progress file


def test_the_progress_file_says_what_is_going_on_and_goes_with_the_run(tmp_path):
    file = ProgressFile(tmp_path / "progress.json")
    file.event(*typed([epoch(0)]))
    file.step(3, 9)
    assert read_progress(tmp_path / "progress.json") == Progress(1, 3, 9, None)
    file.step(4, 9)  # within the same half second
    assert read_progress(tmp_path / "progress.json").step == 3
    file.event(*typed([END]))
    assert not list(tmp_path.iterdir())


def test_a_progress_file_that_cannot_be_written_stops_nothing(tmp_path):
    file = ProgressFile(tmp_path / "gone" / "progress.json")
    file.step(1, 2)
    assert not (tmp_path / "gone").exists()
    (tmp_path / "gone").mkdir()
    ticking = ProgressFile(tmp_path / "gone" / "progress.json")
    ticking.step(1, 2)
    assert read_progress(tmp_path / "gone" / "progress.json").step == 1


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"epoch": 1}', '{"epoch": 0, "step": 3, "steps": 2, "pace": 1}']
    + [f'{{"epoch": 0, "step": 1, "steps": 2, "pace": {pace}}}' for pace in ("NaN", "Infinity", '"x"', "-1")]
    + ['{"epoch": 0, "step": 0, "steps": 0, "pace": null}', '{"epoch": 1e999, "step": 1, "steps": 2, "pace": 1}'],
)
def test_progress_that_makes_no_sense_is_none(tmp_path, text):
    (tmp_path / "progress.json").write_text(text)
    assert read_progress(tmp_path / "progress.json") is None
    assert read_progress(tmp_path / "nowhere.json") is None
