"""What comes back after a crash: whole checkpoints are used, names are on the disk, and what is lost is said."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from events import of_kind, typed
from paam.errors import ArtifactError, StoppedError
from paam.files import durable, system
from paam.files.tensors import read_tensors, write_tensors
from paam.runs.checkpoint import KIND, checkpoints, read_newest_checkpoint, write_checkpoint
from paam.runs.record import read_record
from paam.views.format import event_lines
from ran import run
from short_runs import Killed, assert_same_weights, killer, short, story

BRIEF = {"schedule__warmup": 1, "schedule__cycles": 1, "schedule__finetune": 2, "schedule__control": False}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    run(short(**BRIEF), out, device="cpu")
    return out


def killed(out: Path, epoch: int) -> None:
    with pytest.raises(Killed):
        run(short(**BRIEF), out, device="cpu", watch=killer("epoch", epoch))


def resumed(out: Path) -> tuple[list[dict], list[str]]:
    """Go on; the record, and what was said of how."""
    seen = []
    events = run(short(**BRIEF), out, device="cpu", resume=True, watch=seen.append)
    (event,) = of_kind(seen, "resumed")
    return events, event_lines(*typed([event]))


# ---------------------------------------------------------------- the record


@pytest.mark.parametrize("garbage", [b"{broken}\n", b"\x00" * 3000, b"\xfe\xff\n[]\n"], ids=["text", "zeros", "bytes"])
def test_garbage_behind_a_checkpoint_is_cut_off_and_said(tmp_path, whole, garbage):
    out = tmp_path / "run"
    killed(out, 4)
    with (out / "record.jsonl").open("ab") as file:
        file.write(garbage + b'{"event": "epoch"}\n')
    events, said = resumed(out)
    assert any("corrupt at line" in line and "truncated to" in line for line in said)
    assert said[-1].startswith("resumed after epoch 4")
    assert_same_weights(out, whole)
    assert story(events) == story(read_record(whole / "record.jsonl"))


def test_damage_before_a_checkpoint_is_refused_and_nothing_touched(tmp_path):
    out = tmp_path / "run"
    killed(out, 4)
    lines = (out / "record.jsonl").read_bytes().splitlines(keepends=True)
    (out / "record.jsonl").write_bytes(b"".join([*lines[:2], b"{broken}\n", *lines[2:]]))
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name != "lock"}
    with pytest.raises(ArtifactError, match="corrupt at line 3"):
        resumed(out)
    assert {path: path.read_bytes() for path in before} == before


def test_garbage_behind_a_finished_run_is_cut_off_and_said_where_it_can_be(tmp_path, whole):
    out = shutil.copytree(whole, tmp_path / "run")
    wanted = (whole / "record.jsonl").read_bytes()
    (out / "record.jsonl").write_bytes(wanted + b"\x00\n")
    events, said = resumed(out)
    assert events == read_record(whole / "record.jsonl")
    assert any("truncated to" in line for line in said)
    assert (out / "record.jsonl").read_bytes() == wanted


@pytest.mark.parametrize("left", [["lock"], ["lock", "recipe.toml"], ["lock", "recipe.toml", "record.jsonl"]])
def test_that_nothing_was_saved_is_said(tmp_path, whole, left):
    (tmp_path / "run").mkdir()
    for name in left:
        shutil.copy(whole / name, tmp_path / "run")
    record = tmp_path / "run" / "record.jsonl"
    if record.exists():
        record.write_text("".join(record.read_text().splitlines(keepends=True)[:2]))
    _, said = resumed(tmp_path / "run")
    assert said == ["no checkpoint was saved yet: the run starts over"]
    assert_same_weights(tmp_path / "run", whole)


# ---------------------------------------------------------------- checkpoints


def two_checkpoints(folder: Path) -> tuple[Path, Path]:
    for epoch in (4, 5):
        write_checkpoint(folder, (epoch, 0), {"a": torch.full((3,), float(epoch))}, {})
    older, newer = sorted(folder.iterdir())
    return older, newer


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOMEM, errno.EMFILE, errno.EACCES])
@pytest.mark.parametrize("call", ["open", "read"])
def test_a_checkpoint_that_cannot_be_read_once_is_not_put_aside(tmp_path, monkeypatch, number, call):
    _, newer = two_checkpoints(tmp_path)
    names = sorted(tmp_path.iterdir())

    def fails(*arguments, **options):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fails)
        with pytest.raises(ArtifactError, match=rf"(?s){newer.name} cannot be read: {os.strerror(number)}.*try again"):
            read_newest_checkpoint(tmp_path)
    assert sorted(tmp_path.iterdir()) == names
    state, skipped = read_newest_checkpoint(tmp_path)
    assert state[1]["epoch"] == 5
    assert skipped == []


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOMEM, errno.EMFILE, errno.EACCES])
def test_checkpoints_that_cannot_be_listed_are_not_taken_for_none(tmp_path, monkeypatch, number):
    two_checkpoints(tmp_path)
    names = sorted(tmp_path.iterdir())
    fail_listing(monkeypatch, tmp_path, number)
    for listed in (checkpoints, read_newest_checkpoint):
        with pytest.raises(ArtifactError, match=f"cannot be listed: {os.strerror(number)}"):
            listed(tmp_path)
    with pytest.raises(ArtifactError, match=f"cannot be listed: {os.strerror(number)}"):
        write_checkpoint(tmp_path, (6, 0), {"a": torch.zeros(1)}, {})
    monkeypatch.undo()
    assert set(names) < set(tmp_path.iterdir())


@pytest.mark.parametrize("call", range(4))
def test_a_run_whose_checkpoints_cannot_be_listed_once_does_not_begin_again(tmp_path, monkeypatch, call):
    out = tmp_path / "run"
    killed(out, 1)
    before = {path.name for path in (out / "checkpoints").iterdir()}
    seen = []
    fail_listing(monkeypatch, out / "checkpoints", errno.EACCES, once=call)
    with pytest.raises((ArtifactError, StoppedError)):
        run(short(**BRIEF), out, device="cpu", resume=True, watch=seen.append, stop=lambda: True)
    monkeypatch.undo()
    assert before <= {path.name for path in (out / "checkpoints").iterdir()}
    assert all(event["epoch"] for event in of_kind(seen, "resumed"))


def fail_listing(monkeypatch, folder: Path, number: int, once: int | None = None) -> None:
    """A folder cannot be listed, in either way to do so; or only the ``once``-th time."""
    calls = itertools.count()

    def failing(real):
        def listing(path="."):
            if str(path) == str(folder) and (once is None or next(calls) == once):
                raise OSError(number, os.strerror(number), str(path))
            return real(path)

        return listing

    for name in ("scandir", "listdir"):
        monkeypatch.setattr(os, name, failing(getattr(os, name)))


def test_too_little_memory_for_a_checkpoint_is_no_damage(tmp_path, monkeypatch):
    two_checkpoints(tmp_path)

    def fails(*arguments):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(os, "read", fails)
        with pytest.raises(ArtifactError, match="not enough memory"):
            read_newest_checkpoint(tmp_path)
    assert read_newest_checkpoint(tmp_path)[0][1]["epoch"] == 5


def test_a_whole_checkpoint_of_another_version_is_not_put_aside(tmp_path, monkeypatch):
    _, newer = two_checkpoints(tmp_path)
    state, header = read_tensors(newer, KIND)
    with monkeypatch.context() as patch:
        patch.setattr("paam.files.tensors.VERSION", 2)
        write_tensors(newer, KIND, state, {key: value for key, value in header.items() if key != "version"})
    names = sorted(tmp_path.iterdir())
    with pytest.raises(ArtifactError, match="version 2; this paam reads version 1"):
        read_newest_checkpoint(tmp_path)
    assert sorted(tmp_path.iterdir()) == names


# ---------------------------------------------------------------- on the disk


@pytest.fixture
def flushed(monkeypatch) -> list[tuple[str, Path]]:
    """What is flushed and renamed, in order; files under the names that they will have."""
    calls: list[tuple[str, Path]] = []
    replace = Path.replace

    def flush(descriptor):
        calls.append(("flushed", Path(f"/proc/self/fd/{descriptor}").readlink()))

    def rename(path, target):
        calls.append(("renamed", Path(target)))
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(Path, "replace", rename)
    return calls


def test_the_whole_path_to_a_checkpoint_is_flushed_before_it_is_relied_on(tmp_path, flushed):
    out = tmp_path / "runs" / "one"
    killed(out, 3)
    newest = flushed.index(("renamed", checkpoints(out / "checkpoints")[-1]))
    before = {path for what, path in flushed[:newest] if what == "flushed"}
    assert {tmp_path, out.parent, out, out / "record.jsonl"} <= before
    assert flushed[newest + 1] == ("flushed", out / "checkpoints")
    begun = flushed.index(("renamed", out / "record.jsonl"))
    assert flushed[begun + 1] == ("flushed", out)


def test_a_run_is_finished_when_its_end_is_on_the_disk(tmp_path, flushed):
    run(short(**BRIEF), tmp_path / "run", device="cpu")
    assert flushed[-1] == ("flushed", tmp_path / "run" / "record.jsonl")


def test_checkpoints_that_are_overwritten_are_gone_from_the_disk_before_a_new_run_begins(tmp_path, whole, flushed):
    out = shutil.copytree(whole, tmp_path / "run")
    run(short(**BRIEF), out, seed=1, device="cpu", overwrite=True)
    first, second = (place for place, call in enumerate(flushed) if call == ("renamed", out / "record.jsonl"))
    assert ("flushed", out / "checkpoints") in flushed[first:second]


def test_a_drives_own_cache_is_emptied_where_the_system_has_a_call_for_that(tmp_path, monkeypatch):
    """macOS: fsync leaves it full. A file system that does not know the call has fsync."""
    calls = []

    def control(descriptor, command):
        calls.append(command)
        if len(calls) > 1:
            raise OSError(errno.ENOTSUP, "not here")

    monkeypatch.setattr(system, "FULL_SYNC", 51)
    monkeypatch.setattr(system.fcntl, "fcntl", control)
    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append("fsync"))
    durable.write_atomically(tmp_path / "file", b"content")
    assert calls == [51, 51, "fsync"]


@pytest.mark.parametrize(("number", "fails"), [(errno.EINVAL, False), (errno.EACCES, False), (errno.EIO, True)])
def test_a_directory_that_cannot_be_flushed_is_no_error_and_a_broken_disk_is(tmp_path, monkeypatch, number, fails):
    def fsync(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    if fails:
        with pytest.raises(ArtifactError, match="cannot be written: Input/output error"):
            durable.make_directory(tmp_path / "a" / "b")
    else:
        durable.make_directory(tmp_path / "a" / "b")
        assert (tmp_path / "a" / "b").is_dir()


def test_what_says_that_a_run_is_being_replaced_names_its_command(tmp_path, whole, monkeypatch):
    """By that the demo knows its own."""
    out, unlink = shutil.copytree(whole, tmp_path / "run"), Path.unlink

    def dies(path, *arguments, **options):
        if path.suffix == ".safetensors":
            raise Killed
        unlink(path, *arguments, **options)

    monkeypatch.setattr(Path, "unlink", dies)
    with pytest.raises(Killed):
        run(short(**BRIEF), out, device="cpu", overwrite=True)
    (event,) = read_record(out / "record.jsonl")
    start = json.loads((whole / "record.jsonl").read_text().splitlines()[0])
    assert event == {"event": "replaced", "version": 2, "command": start["command"]}


def test_an_end_that_cannot_be_flushed_is_an_error_and_no_second_ending(tmp_path, monkeypatch):
    def breaks(event: dict) -> None:
        if event["event"] == "end":
            monkeypatch.setattr(os, "fsync", lambda descriptor: os.write(-1, b""))

    with pytest.raises(ArtifactError, match=r"record\.jsonl cannot be written: Bad file descriptor"):
        run(short(**BRIEF), tmp_path / "run", device="cpu", watch=breaks)
    assert [event["event"] for event in read_record(tmp_path / "run" / "record.jsonl")][-2:] == ["epoch", "end"]
