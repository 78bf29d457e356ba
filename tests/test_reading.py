"""Files of the wrong kind, size or depth: each reader refuses them in one sentence, and none waits or fills memory."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch import nn

import paam
import paam.runs.liveness
from events import END, lines, start, typed
from paam.artifacts.saved import load
from paam.artifacts.weights import load_weights
from paam.config.recipe import load_recipe
from paam.data.folder import decode
from paam.data.safe_unpickle import safe_load
from paam.errors import ArtifactError, DamagedError, PaamError, RecipeError
from paam.files.reading import DEEPEST, is_deep, open_to_read, parse_json, read_bytes, shown
from paam.files.tensors import read_tensors
from paam.graph.plan import LARGEST_FILE as LARGEST_PLAN
from paam.graph.plan import Plan
from paam.runs.liveness import Silence, life, lock_held, silent_for
from paam.runs.progress import read_progress
from paam.runs.record import LARGEST_FILE as LARGEST_RECORD
from paam.runs.record import LONGEST_LINE, read_events, read_line, read_record, salvage_events
from paam.views.follow import Follower


def following(path: Path) -> None:
    with Follower(path) as follower:
        follower.poll()


READERS = {
    "record": read_record,
    "events": read_events,
    "salvaged": salvage_events,
    "followed": following,
    "plan": Plan.read,
    "network": lambda path: load(path, nn.Linear(1, 1)),
    "recipe.toml": lambda path: load_recipe(str(path)),
    "weights": lambda path: load_weights(nn.Linear(1, 1), path, "model.weights"),
    "checkpoint": lambda path: read_tensors(path, "checkpoint"),
    "pickle": safe_load,
    "image": lambda path: decode(path, 8),
}


@pytest.mark.parametrize("kind", ["fifo", "zero", "folder"])
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_regular_file_is_refused_at_once(tmp_path, name, kind):
    path = tmp_path / name
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(PaamError) as refused:
        READERS[name](path)
    if name == "network":  # the plan in it is looked for
        return
    assert str(path) in str(refused.value)
    assert ("it is a folder" if kind == "folder" else "not a regular file") in str(refused.value)


@pytest.mark.parametrize("kind", ["fifo", "zero"])
def test_a_lock_or_progress_of_the_wrong_kind_says_nothing(tmp_path, kind):
    for name in ("lock", "progress.json"):
        if kind == "fifo":
            os.mkfifo(tmp_path / name)
        else:
            (tmp_path / name).symlink_to("/dev/zero")
    assert lock_held(tmp_path / "lock") is None
    assert read_progress(tmp_path / "progress.json") is None


@pytest.mark.parametrize("name", READERS)
def test_what_is_too_large_is_refused_unread(tmp_path, name):
    path = tmp_path / name
    with path.open("wb") as file:
        file.truncate(1 << 37)  # sparse: it takes no room, and would take all memory
    with pytest.raises(PaamError, match=r"it has 137,438,953,472 bytes, and [0-9,]+ is the most"):
        READERS[name](path)


def test_a_plan_of_70_megabytes_is_refused(tmp_path):
    assert LARGEST_PLAN < 70e6 < LARGEST_RECORD
    (tmp_path / "plan.json").write_bytes(b'{"format": "paam-plan", "groups": [' + b"0," * 35_000_000 + b"0]}")
    with pytest.raises(ArtifactError, match=r"plan\.json cannot be read: it has 70,\d+,\d+ bytes"):
        Plan.read(tmp_path / "plan.json")


def test_a_file_that_grows_while_it_is_read_ends_at_its_limit(tmp_path, monkeypatch):
    path = tmp_path / "growing"
    path.write_bytes(b"x" * 11)
    monkeypatch.setattr(paam.files.reading, "open_to_read", lambda path, limit: path.open("rb"))
    assert read_bytes(path, 11) == b"x" * 11
    with pytest.raises(OSError, match="10 is the most"):
        read_bytes(path, 10)


def test_a_file_that_is_swapped_for_a_fifo_after_the_first_look_is_refused(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.setattr(paam.files.reading, "check_regular", lambda path, limit: None)
    with pytest.raises(OSError, match="not a regular file"):
        open_to_read(tmp_path / "fifo", 10)


def test_a_regular_file_that_has_nothing_to_read_is_refused(tmp_path, monkeypatch):
    """As some of /proc: what is opened so that it need not be waited for has nothing yet."""
    (tmp_path / "silent").touch()

    def nothing_yet(*arguments):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with monkeypatch.context() as patch:
        patch.setattr(os, "read", nothing_yet)
        with pytest.raises(OSError, match="nothing can be read"):
            read_bytes(tmp_path / "silent", 10)


# ---------------------------------------------------------------- what is small and takes long, or is deep


@pytest.mark.parametrize(
    "text",
    [
        ".".join("a" * 100_000) + " = 1",
        ".".join(['"a"'] * 60_000) + " = 1",
        "[" + " . ".join("a" * 50_000) + "]",
        "x = { " + ".".join("a" * 100_000) + " = 1 }",
        'description = """"a"""" # """\n' + ".".join("a" * 100_000) + " = 1",
    ],
    ids=["bare", "quoted", "header", "inline", "after-text"],
)
def test_a_key_of_many_parts_is_refused_before_it_is_parsed(tmp_path, monkeypatch, text):
    """400 kB of one took minutes. Texts may hold as many dots as they like."""
    parsed = []
    monkeypatch.setattr(paam.config.recipe.tomllib, "loads", lambda text: parsed.append(text) or {})
    (tmp_path / "own.toml").write_text(text)
    with pytest.raises(RecipeError, match=r"dots outside of texts|is the most"):
        load_recipe(str(tmp_path / "own.toml"))
    assert not parsed


def test_dots_in_texts_and_comments_are_no_parts_of_keys(tmp_path):
    dots = ". " * 2000
    (tmp_path / "own.toml").write_text(
        f'description = """{dots}\n{dots}"""  # {dots}\nprune.ignore = ["{dots}", \'{dots}\']'
    )
    assert load_recipe(str(tmp_path / "own.toml")).prune.ignore == (dots, dots)


def test_a_number_that_python_will_not_write_out_is_refused_in_a_sentence(tmp_path):
    for key in ("model.name", "schedule.warmup", "finetune.lr"):
        (tmp_path / "own.toml").write_text(f"{key} = 0x{'f' * 9000}")
        with pytest.raises(RecipeError, match=key):
            load_recipe(str(tmp_path / "own.toml"))
    assert len(shown("x" * 10_000)) == 200


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def test_json_is_as_deep_as_plans_are_and_no_deeper():
    assert parse_json(nested(DEEPEST))
    assert parse_json(json.dumps("[" * 10_000)) == "[" * 10_000
    assert is_deep("[" * 10_000)
    inner = '"{]"'  # brackets in a text that do not match hide nothing
    assert is_deep("[" * (DEEPEST + 1) + inner + "]" * (DEEPEST + 1))
    for text in (nested(DEEPEST + 1), '{"a":' * 300 + "1" + "}" * 300, nested(100_000)):
        with pytest.raises(ValueError, match="nested too deeply"):
            parse_json(text)


def test_one_event_has_a_limit_too(tmp_path):
    line = '{"event": "weather", "x": "' + "x" * LONGEST_LINE + '"}'
    with pytest.raises(DamagedError, match="line 3: it has"):
        read_line(line.encode(), tmp_path / "record.jsonl", 3)
    (tmp_path / "record.jsonl").write_text(f"{lines([start()])}{line}\n{lines([END])}")
    events, problems = salvage_events(tmp_path / "record.jsonl")
    assert events == typed([start(), END])
    assert problems == [f"The record is damaged at line 2: it has {len(line):,} characters."]


def test_a_record_of_more_lines_than_any_run_writes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(paam.runs.record, "MOST_LINES", 3)
    path, foreign = tmp_path / "record.jsonl", '{"event": "weather"}\n'
    path.write_text(f"{lines([start()])}{foreign * 2}")
    assert read_events(path) == salvage_events(path)[0] == typed([start()])
    path.write_text(f"{lines([start()])}{foreign * 3}")
    for read in (read_events, salvage_events, following):
        with pytest.raises(ArtifactError, match=r"has more than 3 lines"):
            read(path)


def test_a_record_that_goes_on_growing_without_an_end_of_its_line_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(paam.views.follow, "LARGEST_FILE", 100)
    path = tmp_path / "record.jsonl"
    path.write_text("x" * 60)
    with Follower(path) as follower:
        assert follower.poll() == []
        with path.open("a") as file:
            file.write("x" * 60)
        with pytest.raises(ArtifactError, match="more than 100 bytes"):
            follower.poll()


def test_reading_that_fails_while_a_run_is_followed_is_said_in_a_sentence(tmp_path):
    (tmp_path / "record.jsonl").write_text("")

    class Broken(io.BytesIO):
        def read(self, count: int = -1) -> bytes:
            raise OSError(5, "Input/output error")

    with Follower(tmp_path / "record.jsonl") as follower:
        follower.poll()
        follower.file.close()
        follower.file, follower._replaced = Broken(), lambda: False
        with pytest.raises(ArtifactError, match="cannot be read: Input/output error"):
            follower.poll()


# ---------------------------------------------------------------- clocks


def aged(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def test_a_clock_that_was_set_back_brings_no_run_back_to_life(tmp_path, monkeypatch):
    """The record then seems to have been written an hour from now."""
    clock = [1000.0]
    monkeypatch.setattr(paam.runs.liveness.time, "monotonic", lambda: clock[0])
    record, lock = tmp_path / "record.jsonl", tmp_path / "lock"
    record.touch()
    lock.touch()
    silence = Silence(tmp_path)
    aged(record, -3600)
    assert silence.seconds() == 0.0  # something was written
    clock[0] += 6
    assert silence.seconds() == 6.0
    assert life(tmp_path, 0.0, silence.seconds()) == "gone"
    lock.unlink()
    clock[0] += 60
    assert life(tmp_path, 0.0, silence.seconds()) == "silent"
    aged(record, 7200)  # written again, with the clock set back further
    assert silence.seconds() == 0.0
    aged(record, -3600)
    assert silent_for(tmp_path) == 0.0
    assert Silence(tmp_path).seconds() == 0.0
    aged(record, 3600)
    assert Silence(tmp_path).seconds() == pytest.approx(3600, abs=60)


# ---------------------------------------------------------------- the whole program


def test_no_command_waits_for_a_pipe_in_a_run_directory(tmp_path):
    for name in ("record.jsonl", "lock", "progress.json", "plan.json", "model.safetensors", "recipe.toml"):
        os.mkfifo(tmp_path / name)
    os.mkfifo(tmp_path / "dense.safetensors")
    run = str(tmp_path)
    weights = f"--set=model.weights={tmp_path}/dense.safetensors"
    for arguments in (
        ["runs", run],
        ["watch", run],
        ["report", run],
        ["export", run],
        ["prune", f"{run}/recipe.toml", f"--out={run}/new"],
        ["prune", "digits-resnet20-kq", weights, "--set=schedule.warmup=0", "--device=cpu", f"--out={run}/new"],
    ):
        done = subprocess.run([sys.executable, "-m", "paam", *arguments], capture_output=True, text=True, timeout=300)
        assert "Traceback" not in done.stderr
        assert done.returncode == (0 if arguments[0] == "runs" else 2), (arguments, done)
    assert not (tmp_path / "new").exists()
