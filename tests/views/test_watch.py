"""Runs looked at from outside: followed while their records grow, listed, and told apart from dead ones."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from events import (
    END,
    FAILED,
    SELECTION,
    changed,
    controlled,
    epoch,
    lines,
    record,
    resumed,
    start,
    typed,
    write_run,
)
from paam.errors import ArtifactError
from paam.runs.liveness import life, silent_for
from paam.views.follow import Follower
from paam.views.listing import list_runs, runs_table

HOUR = 3600.0


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)


# ---------------------------------------------------------------- following


@pytest.fixture
def follow():
    with contextlib.ExitStack() as followers:
        yield lambda path: followers.enter_context(Follower(path))


def append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def replace(path: Path, text: str) -> None:
    """As a resumed run does it: a new file over the old one."""
    path.with_name("new").write_text(text, "utf-8")
    path.with_name("new").replace(path)


def test_a_growing_record_is_told_line_by_line(follow, tmp_path):
    path = tmp_path / "record.jsonl"
    path.touch()
    follower = follow(path)
    assert follower.poll() == []
    append(path, lines([start(), epoch(0)]))
    assert follower.poll() == typed([start(), epoch(0)])
    assert follower.poll() == []
    half = lines([epoch(1)])
    append(path, half[:30])
    assert follower.poll() == []
    append(path, half[30:] + lines([epoch(2)]))
    assert follower.poll() == typed([epoch(1), epoch(2)])


def test_a_record_cut_back_by_a_resume_is_told_from_its_start(follow, tmp_path):
    path = write_run(tmp_path, record(5)) / "record.jsonl"
    append(path, lines([epoch(5)])[:25])  # the crash
    follower = follow(path)
    assert follower.poll() == typed(record(5))
    replace(path, lines(record(4)))
    assert follower.poll() == typed([resumed(4, told=len(record(4))), *record(4)])
    append(path, lines([epoch(4)]))
    assert follower.poll() == typed([epoch(4)])


def test_a_resume_is_told_also_when_more_was_written_before_the_next_look(follow, tmp_path):
    """A run that goes on elsewhere writes what has changed at once."""
    path = write_run(tmp_path, record(5)) / "record.jsonl"
    follower = follow(path)
    follower.poll()
    moved = changed(4, {"finetune.lr": [0.5, 0.1]})
    now = [*record(4), moved, epoch(4, loss=7.0)]
    replace(path, lines(now))
    assert follower.poll() == typed([resumed(4, told=len(record(4))), *now])
    replace(path, lines([start(), moved]))  # stopped inside of its first epoch, gone on elsewhere
    assert follower.poll() == typed([resumed(0, told=1), start(), moved])


def test_a_run_begun_anew_is_no_resumed_one_though_it_begins_alike(follow, tmp_path):
    path = write_run(tmp_path, [start(), SELECTION, epoch(0, loss=1.0)]) / "record.jsonl"
    follower = follow(path)
    follower.poll()
    replace(path, lines([start(), SELECTION, epoch(0, loss=2.0)]))
    assert follower.poll() == typed([start(), SELECTION, epoch(0, loss=2.0)])


def test_another_run_in_the_same_place_is_no_resumed_one(follow, tmp_path):
    path = write_run(tmp_path, record(5)) / "record.jsonl"
    follower = follow(path)
    follower.poll()
    path.unlink()
    assert follower.poll() == []
    path.write_text(lines([start(seed=8), epoch(0)]))
    assert follower.poll() == typed([start(seed=8), epoch(0)])
    path.write_text("")  # emptied in place
    assert follower.poll() == []
    append(path, lines([start(seed=9)]))
    assert follower.poll() == typed([start(seed=9)])


DAMAGED = {
    "text": ("hello\nyou\n", "line 1"),
    "list": ("[1]\n\n", "line 1"),
    "no-name": ('{"version": 2, "event": null}\n', "it is not an event"),
    "no-start": ('{"event": "odd", "version": 2}\n', "does not begin"),
    "no-recipe": (lines([{"event": "start", "version": 2}]), "line 1: start.seed is missing"),
    "no-loss": (lines([start(), {"event": "epoch", "epoch": 0}]), "line 2: epoch.phase is missing"),
    "phases": (lines([start(phases=start()["phases"][1:])]), "start.epochs must be"),
    "nan": (lines([start(), epoch(0, loss=float("nan"))]), "epoch.loss must be from"),
    "middle": (lines([start()]) + "{\n" + lines([epoch(0)]), "line 2"),
    "binary": ("\x00\x01\n\n", "line 1"),
    "widths": (lines([start(), {**SELECTION, "kept_filters": {"a": [2, 1]}}]), "selection.kept_filters.a"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_record_is_a_sentence(cli, follow, tmp_path, name):
    text, words = DAMAGED[name]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "record.jsonl").write_text(text, "utf-8")
    with pytest.raises(ArtifactError, match=re.escape(words)):
        follow(tmp_path / "run" / "record.jsonl").poll()
    done = cli("watch", "run")
    assert done.code == 2
    assert len(done.err.splitlines()) == 1
    assert words in done.err
    listed = cli("runs", ".")
    assert listed.code == 0
    assert "damaged" in listed.out
    assert "unreadable" not in listed.out
    assert words in listed.out


UNREADABLE = {
    "version": (lines([start(version=1)]), "version 1; this paam reads 2"),
    "folder": (None, "cannot be read: "),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_record_that_cannot_be_read_here_is_not_called_damaged(cli, tmp_path, name):
    text, words = UNREADABLE[name]
    record = tmp_path / "run" / "record.jsonl"
    record.parent.mkdir()
    record.mkdir() if text is None else record.write_text(text, "utf-8")
    listed = cli("runs", ".")
    assert listed.code == 0
    assert "unreadable" in listed.out
    assert "damaged" not in listed.out
    assert words in listed.out


def test_events_of_a_later_version_are_skipped(cli, tmp_path):
    foreign = [{"event": "weather", "epoch": "rain"}, {"event": "epochs"}]
    write_run(tmp_path / "run", [*record()[:3], *foreign, *record()[3:]])
    done = cli("watch", "run")
    assert done.code == 0
    assert "88.50 %" in done.out
    assert list_runs(tmp_path)[0].state == "finished"


# ---------------------------------------------------------------- dead or alive


@pytest.fixture
def held(tmp_path):
    """A lock that a process holds, as a run does."""
    with (tmp_path / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield tmp_path


def test_a_lock_that_is_held_means_alive_however_silent(held):
    write_run(held, record(3), age=HOUR)
    assert life(held, 0.0, silent_for(held)) == "alive"


def test_a_lock_that_nobody_holds_means_gone(tmp_path):
    write_run(tmp_path, record(3), age=10)
    (tmp_path / "lock").touch()
    assert life(tmp_path, 0.0, silent_for(tmp_path)) == "gone"
    os.utime(tmp_path / "record.jsonl")
    assert life(tmp_path, 0.0, silent_for(tmp_path)) == "alive"  # it has only just written


def test_without_a_lock_silence_counts_against_the_longest_epoch(tmp_path):
    write_run(tmp_path, record(3), age=100)
    assert life(tmp_path, 0.0, silent_for(tmp_path)) == "silent"
    assert life(tmp_path, 30.0, silent_for(tmp_path)) == "silent"
    assert life(tmp_path, 40.0, silent_for(tmp_path)) == "alive"
    (tmp_path / "progress.json").write_text("{}")
    assert life(tmp_path, 0.0, silent_for(tmp_path)) == "alive"


# ---------------------------------------------------------------- paam watch


def test_a_finished_run_is_shown_at_once(cli, tmp_path):
    write_run(tmp_path / "run", record(), age=HOUR)
    done = cli("watch", "run")
    assert (done.code, done.err) == (0, "")
    assert "   7/7  fine-tuning the small network   loss 0.2500   held-out accuracy 50.00 %" in done.out
    assert "-45.0 %" in done.out
    done = cli("watch", "run", "--json")
    assert done.out == (tmp_path / "run" / "record.jsonl").read_text()


def test_a_run_whose_process_is_gone_ends_the_watch(cli, tmp_path):
    write_run(tmp_path / "run", record(3), age=HOUR)
    (tmp_path / "run" / "lock").touch()
    done = cli("watch", "run")
    assert done.code == 1
    assert "   3/7  scoring filters" in done.out
    assert done.err == "paam: The run in run stopped in epoch 4 of 7. Resume with:  paam prune --out run --resume\n"
    write_run(tmp_path / "run", record(3, command=""), age=HOUR)
    assert cli("watch", "run").err.endswith("4 of 7.\n")  # a program's own run: it knows how
    for events, where in ((record(7, end=False), "while measuring its result"), ([], "before its first event")):
        write_run(tmp_path / "run", events, age=HOUR)
        assert f"stopped {where}." in cli("watch", "run").err


def test_a_run_that_failed_ends_the_watch_at_once(cli, tmp_path):
    write_run(tmp_path / "run", [*record(4), FAILED])  # neither its lock nor its silence is waited for
    done = cli("watch", "run")
    assert done.code == 1
    assert done.out.endswith("\nfailed: The loss of step 3 is not finite.\n")
    assert done.err == "paam: The run in run failed in epoch 5 of 7.\n"  # a record alone: nothing can go on
    (tmp_path / "run" / "lock").touch()
    assert cli("watch", "run").err.endswith(" in epoch 5 of 7. Resume with:  paam prune --out run --resume\n")


@pytest.mark.parametrize("text", ["", lines([start()])[:40]], ids=["empty", "cut"])
def test_a_record_without_any_event_ends_the_watch_with_the_words_of_the_listing(cli, tmp_path, text):
    write_run(tmp_path / "run", [])
    path = tmp_path / "run" / "record.jsonl"
    path.write_text(text)
    os.utime(path, (0, 0))
    done = cli("watch", "run")
    assert done.code == 2
    assert done.err == "paam: The record run/record.jsonl is empty: its run never started.\n"
    assert "The record run/record.jsonl is empty: its run never started." in cli("runs", ".").out


def test_a_folder_without_a_record_is_refused(cli, tmp_path):
    for name in ("empty", "nowhere"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        done = cli("watch", name)
        assert done.code == 2
        assert f"{name} is not a run directory" in done.err


@pytest.fixture
def watching(tmp_path):
    """``paam watch`` in a process of its own, on a run that goes on."""
    started = []

    def watch(*options: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "paam", "watch", str(tmp_path / "run"), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield watch
    for process in started:
        process.kill()
        process.communicate()


def test_watch_follows_a_run_through_a_resume_to_its_end(watching, tmp_path):
    path = write_run(tmp_path / "run", record(4)) / "record.jsonl"
    process = watching("--json")
    told = [json.loads(process.stdout.readline()) for _ in record(4)]
    assert told == record(4)
    replace(path, lines(record(3)))
    again = [resumed(3, told=len(record(3))), *record(3)]
    assert [json.loads(process.stdout.readline()) for _ in again] == again
    append(path, lines(record()[len(record(3)) :]))
    rest, err = process.communicate()
    assert [json.loads(line) for line in rest.splitlines()] == record()[len(record(3)) :]
    assert (process.returncode, err) == (0, "")


def test_ctrl_c_leaves_the_watch_and_not_the_run(watching, tmp_path):
    run = write_run(tmp_path / "run", record(2))
    process = watching()
    for _ in range(3):
        process.stdout.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, out, err) == (130, "", "")
    assert [path.name for path in run.iterdir()] == ["record.jsonl"]


def test_a_folder_that_cannot_be_looked_into_is_as_old_as_itself(tmp_path):
    os.utime(tmp_path, (time.time() - 7200,) * 2)
    assert silent_for(tmp_path) == pytest.approx(7200, abs=60)


def test_a_silent_run_is_said_to_be_silent(watching, tmp_path):
    write_run(tmp_path / "run", record(2), age=HOUR)
    process = watching()
    for _ in range(3):
        process.stdout.readline()
    assert process.stdout.readline() == "no output for 1 h: the run may have stopped\n"


# ---------------------------------------------------------------- paam runs


@pytest.fixture
def many(tmp_path):
    """One run of every state."""
    write_run(tmp_path / "old", record(), age=2 * HOUR)
    write_run(tmp_path / "a" / "b" / "new", record(), age=HOUR)
    write_run(tmp_path / "dead", record(4), age=HOUR)
    write_run(tmp_path / "alive", record(2, monitor="test"), age=2)
    write_run(tmp_path / "empty", [], age=HOUR)
    write_run(tmp_path / "[bold]\x1b[5mbad", [{"event": "start", "version": 3}], age=HOUR)
    write_run(tmp_path / "1" / "2" / "3" / "4" / "5", record())  # too deep to be looked for
    write_run(tmp_path / ".hidden", record())
    write_run(tmp_path / "old" / "copy", record())  # inside of a run
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    return tmp_path


def test_runs_are_listed_by_state_then_by_age(many):
    rows = list_runs(many)
    assert [(Path(row.path).name, row.state) for row in rows] == [
        ("alive", "running"),
        ("dead", "stopped"),
        ("new", "finished"),
        ("old", "finished"),
        ("empty", "damaged"),
        ("[bold]\N{REPLACEMENT CHARACTER}[5mbad", "unreadable"),
    ]
    alive, dead, new, _, empty, bad = rows
    assert (alive.epochs_done, alive.epochs, alive.accuracy, alive.measured_on) == (2, 7, 50.0, "test")
    assert (alive.macs_removed, alive.params_removed) == (None, None)
    assert (dead.epochs_done, dead.accuracy, dead.measured_on) == (4, 50.0, "holdout")
    assert (dead.macs_removed, dead.params_removed) == pytest.approx((45.0, 60.0))
    assert (new.accuracy, new.measured_on, new.seed, new.model, new.method) == (88.5, "test", 7, "tiny", "PAAM (KQ)")
    assert (new.macs_removed, new.params_removed) == pytest.approx((45.0, 60.0))
    assert new.age_seconds == pytest.approx(HOUR, abs=60)
    assert "version 3" in bad.why
    assert "never started" in empty.why


def test_runs_as_a_table_and_as_json(cli, many):
    (many / "dead" / "lock").touch()
    done = cli("runs", ".")
    assert (done.code, done.err) == (0, "")
    by_name: dict[str, list[str]] = {}
    for line in done.out.splitlines():
        if line.strip():
            by_name.setdefault(line.split()[0], line.split())  # the table comes first, notes below it
    assert "dead: resume with:  paam prune" in done.out
    assert by_name["dead"][1:6] == ["stopped", "after", "4", "of", "7"]
    assert by_name["alive"][1:3] == ["running", "2/7"]
    assert " ".join(by_name["old"][1:]) == "finished tiny beads PAAM (KQ) 7 88.50 % -45.0 % -60.0 % 2 h ago"
    assert "\x1b" not in done.out
    found = json.loads(cli("runs", ".", "--json").out)
    assert [row["state"] for row in found] == ["running", "stopped", "finished", "finished", "damaged", "unreadable"]


def test_a_free_lock_means_stopped_in_the_listing_however_fresh_the_record(tmp_path):
    write_run(tmp_path / "run", record(3))
    (tmp_path / "run" / "lock").touch()
    assert list_runs(tmp_path)[0].state == "stopped"
    with (tmp_path / "run" / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert list_runs(tmp_path)[0].state == "running"


def test_the_listing_tells_the_dense_control_from_the_pruned_network(cli, tmp_path):
    write_run(tmp_path / "run", controlled(2), age=HOUR)
    (row,) = list_runs(tmp_path)
    assert (row.accuracy, row.measured_on, row.control_accuracy) == (50.0, "holdout", 99.46)
    assert row.macs_removed == pytest.approx(45.0)
    assert " 50.00 % (held-out), dense control 99.46 % " in cli("runs", ".").out
    write_run(tmp_path / "run", [*controlled(2), END], age=HOUR)
    assert " 88.50 %, dense control 90.00 % " in cli("runs", ".").out
    write_run(tmp_path / "run", record(), age=HOUR)
    assert "control" not in cli("runs", ".").out


def test_what_goes_on_with_a_run_has_what_was_changed_on_the_way(cli, tmp_path):
    command = "paam prune a.toml --set finetune.lr=0.05 --resume"
    later = changed(4, {"finetune.lr": [0.5, 0.05]}, command)
    write_run(tmp_path / "run", [*record(4, command="paam prune a.toml"), later], age=HOUR)
    (tmp_path / "run" / "lock").touch()
    goes_on = "paam prune a.toml --set finetune.lr=0.05 --out run --resume"
    assert f"run: resume with:  {goes_on}\n" in cli("runs", ".").out
    assert f"Resume with:  {goes_on}\n" in cli("watch", "run").err


@pytest.mark.parametrize("given", ["--out first", "--out=first", "--out 'my runs'", "--out a --out=b", ""])
def test_what_goes_on_with_a_run_names_the_place_where_it_lies_now(cli, tmp_path, given):
    write_run(tmp_path / "b c", record(4, command=f"paam prune a.toml {given} --seed 3"), age=HOUR)
    assert "resume with" not in cli("runs", ".").out  # a record that was brought here alone
    (tmp_path / "b c" / "lock").touch()
    assert "b c: resume with:  paam prune a.toml --seed 3 --out 'b c' --resume\n" in cli("runs", ".").out


def test_a_run_without_its_recipe_file_goes_on_with_its_own_copy(cli, tmp_path):
    write_run(tmp_path / "run", record(4, command="paam prune mine/a.toml --data d"), age=HOUR)
    (tmp_path / "run" / "lock").touch()
    (tmp_path / "run" / "recipe.toml").touch()
    assert "run: resume with:  paam prune run/recipe.toml --data d --out run --resume\n" in cli("runs", ".").out
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.toml").touch()
    assert "run: resume with:  paam prune mine/a.toml --data d --out run --resume\n" in cli("runs", ".").out


@pytest.mark.parametrize(
    ("name", "command"), [("run", "paam prune 'a"), ("run", "python my.py"), ("a\xa0b", "paam prune")]
)
def test_a_command_that_would_not_work_is_not_given(cli, tmp_path, name, command):
    write_run(tmp_path / name, record(4, command=command), age=HOUR)
    (tmp_path / name / "lock").touch()
    assert "resume with" not in cli("runs", ".").out


def test_the_listing_says_why_a_run_failed_and_what_goes_on_with_it(cli, tmp_path):
    write_run(tmp_path / "bad", [*record(4, command="paam prune a.toml --out 'my runs'"), FAILED])
    write_run(tmp_path / "dead", record(4), age=HOUR)
    write_run(tmp_path / "going", record(4))
    for name in ("bad", "dead"):
        (tmp_path / name / "lock").touch()
    out = cli("runs", ".").out
    assert "failed after 4 of 7 epochs" in out
    assert out[out.index("\n\n") :].split("\n") == [
        "",
        "",
        "dead: resume with:  paam prune --out dead --resume",
        "bad failed: The loss of step 3 is not finite.",
        "bad: resume with:  paam prune a.toml --out bad --resume",
        "",
    ]


@pytest.mark.parametrize("width", [30, 80, 119, 120, 160])
def test_the_listing_keeps_to_its_width(many, width):
    console = Console(record=True, width=width, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
    with console.file:
        console.print(runs_table(list_runs(many), width))
    text = console.export_text()
    assert all(len(line) <= width for line in text.splitlines())
    if width >= 80:
        assert "88.50 %" in text


def test_nothing_to_list_is_said(cli, tmp_path):
    assert "no runs in" in cli("runs", ".").err
    assert "no folder" in cli("runs", "nowhere").err
    assert cli("runs", ".", "--json").out == "[]\n"


def test_a_record_that_is_a_folder_or_closed_breaks_no_listing(tmp_path):
    (tmp_path / "odd" / "record.jsonl").mkdir(parents=True)
    write_run(tmp_path / "good", [*record()[:-1], END])
    assert [row.state for row in list_runs(tmp_path)] == ["finished", "unreadable"]


def test_phases_that_cannot_be_are_a_damaged_run_among_good_ones(tmp_path):
    write_run(tmp_path / "good", record())
    write_run(tmp_path / "odd", [start(epochs=10**9)])
    assert [row.state for row in list_runs(tmp_path)] == ["finished", "damaged"]


def test_a_pipe_in_place_of_a_record_is_an_unreadable_run(tmp_path):
    """Who opened it would wait for ever."""
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "record.jsonl")
    write_run(tmp_path / "good", record())
    good, pipe = list_runs(tmp_path)
    assert (good.state, pipe.state) == ("finished", "unreadable")
    assert "not a regular file" in pipe.why
    (tmp_path / "loop").mkdir()
    (tmp_path / "loop" / "record.jsonl").symlink_to("record.jsonl")
    assert [row.state for row in list_runs(tmp_path)] == ["finished", "unreadable", "unreadable"]
