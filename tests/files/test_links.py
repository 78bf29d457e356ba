"""Files are written where they were asked for and nowhere else: through no link, into no pipe, by several at once."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest

from events import record, write_run
from paam.errors import ArtifactError
from paam.files.durable import left_half_written, remove_left, write_atomically
from paam.report.page import write_report
from paam.runs.directory import CHECKPOINTS, OWN_FILES, TENSORBOARD, check_directory, tidy
from paam.runs.liveness import lock_held
from paam.runs.lock import RunLock
from paam.runs.planned import Common, Planned
from paam.runs.sweep import _log_of


@pytest.fixture
def victim(tmp_path):
    """A file that links name; it must stay as it is."""
    path = tmp_path / "victim"
    path.write_bytes(b"ten years of work")
    yield path
    assert path.read_bytes() == b"ten years of work"


def fixed(size: int) -> str:
    return "0" * 2 * size


# ---------------------------------------------------------------- temporary names


@pytest.mark.parametrize("name", [".page.html.tmp", f".page.html.{fixed(8)}.tmp"], ids=["known", "guessed"])
@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
def test_nothing_is_written_through_a_link_at_a_temporary_name(tmp_path, victim, monkeypatch, name, link):
    link(tmp_path / name, victim)
    if fixed(8) in name:
        monkeypatch.setattr(secrets, "token_hex", fixed)
        with pytest.raises(ArtifactError, match="File exists"):
            write_atomically(tmp_path / "page.html", b"new")
        assert not (tmp_path / "page.html").exists()
    else:
        write_atomically(tmp_path / "page.html", b"new")
        assert (tmp_path / "page.html").read_bytes() == b"new"
    assert (tmp_path / name).exists()


def test_a_link_in_the_place_of_a_file_is_replaced_and_what_it_names_stays(tmp_path, victim):
    (tmp_path / "page.html").symlink_to(victim)
    write_atomically(tmp_path / "page.html", b"new")
    assert not (tmp_path / "page.html").is_symlink()
    assert (tmp_path / "page.html").read_bytes() == b"new"


@pytest.mark.parametrize("linked", [False, True])
def test_what_is_no_file_is_not_replaced_by_one(tmp_path, linked):
    """As /dev/null would be, for root, and /dev/stdout, which is a link to a pipe."""
    os.mkfifo(tmp_path / "pipe")
    path = tmp_path / "pipe"
    if linked:
        path = tmp_path / "link"
        path.symlink_to("pipe")
    with pytest.raises(ArtifactError, match=f"{path.name} cannot be written: it is not a regular file"):
        write_atomically(path, b"new")
    assert (tmp_path / "pipe").is_fifo()
    assert path.is_symlink() == linked
    assert len(list(tmp_path.iterdir())) == 1 + linked


def test_two_reports_into_one_file_at_once_both_succeed(tmp_path, monkeypatch):
    """The second is written whole between the last write of the first and its renaming."""
    run, page, replace, inside = write_run(tmp_path / "run", record()), tmp_path / "page.html", Path.replace, []

    def meanwhile(path, target):
        if not inside:
            inside.append(True)
            assert write_report([run / "record.jsonl"], page) == []
            inside.append(page.read_bytes())
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", meanwhile)
    assert write_report([run / "record.jsonl"], page) == []
    assert page.read_bytes() == inside[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "run"]


def test_what_killed_processes_left_is_removed_and_what_is_being_written_is_not(tmp_path, monkeypatch):
    (tmp_path / CHECKPOINTS).mkdir()
    left = [f".recipe.toml.{fixed(8)}.tmp", f"{CHECKPOINTS}/.epoch-000001-step-000000.safetensors.{fixed(8)}.tmp"]
    mine = [".mine.tmp", f".notes.txt.{fixed(8)}.tmp", ".recipe.toml.tmp", f"{CHECKPOINTS}/.x.{fixed(8)}.tmp"]
    for name in (*left, *mine):
        (tmp_path / name).touch()
    replace = Path.replace

    def begins(path, target):
        tidy(tmp_path)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", begins)
    write_atomically(tmp_path / "report.html", b"whole")
    assert (tmp_path / "report.html").read_bytes() == b"whole"
    assert not any((tmp_path / name).exists() for name in left)
    assert all((tmp_path / name).exists() for name in mine)


def test_a_file_that_is_taken_for_a_left_one_before_it_is_locked_is_begun_anew(tmp_path, monkeypatch):
    from paam.files import durable

    lock, seen = durable.try_lock, []

    def late(descriptor, **options):
        if not seen:
            seen.append(left_half_written(tmp_path, lambda name: True))
            remove_left(tmp_path, lambda name: True)
        return lock(descriptor, **options)

    monkeypatch.setattr(durable, "try_lock", late)
    write_atomically(tmp_path / "file", b"whole")
    assert len(seen[0]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"whole"


def test_links_and_pipes_at_temporary_names_are_left_alone(tmp_path, victim):
    (tmp_path / f".report.html.{fixed(8)}.tmp").symlink_to(victim)
    os.mkfifo(tmp_path / f".recipe.toml.{fixed(8)}.tmp")
    remove_left(tmp_path, OWN_FILES.__contains__)
    assert len(left_half_written(tmp_path, OWN_FILES.__contains__)) == 2


def test_files_have_the_rights_that_the_users_mask_gives(tmp_path):
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "file", b"")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


# ---------------------------------------------------------------- the lock, and folders of a run


def test_a_lock_that_is_a_link_is_refused_with_the_way_out(tmp_path, victim):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").symlink_to(victim)
    with RunLock(tmp_path / "run") as lock, pytest.raises(ArtifactError, match=r"lock is a link\. Remove .*run/lock"):
        lock.take()


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir], ids=["pipe", "folder"])
def test_a_lock_that_is_no_file_is_refused_at_once(tmp_path, make):
    make(tmp_path / "lock")
    with RunLock(tmp_path) as lock, pytest.raises(ArtifactError, match=r"lock|Is a directory"):
        lock.take()
    assert lock_held(tmp_path / "lock") is None


def test_a_lock_with_other_names_locks_and_is_not_written_into(tmp_path, victim):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").hardlink_to(victim)
    with RunLock(tmp_path / "run") as lock:
        lock.take()
        assert lock_held(tmp_path / "run" / "lock")
        with RunLock(tmp_path / "run") as second, pytest.raises(ArtifactError, match="is locked by process"):
            second.take()
    assert lock_held(tmp_path / "run" / "lock") is False


@pytest.mark.parametrize("name", [CHECKPOINTS, TENSORBOARD])
@pytest.mark.parametrize("how", ["resume", "overwrite"])
def test_a_folder_of_a_run_that_is_a_link_is_refused(tmp_path, name, how):
    """What lies behind it would be removed and written."""
    write_run(tmp_path / "run", record())
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArtifactError, match=f"{name} is a link"):
        check_directory(tmp_path / "run", **{"resume": False, "overwrite": False, how: True})


def planned(out: Path) -> Planned:
    return Planned(out, out.name, 0, "a", (), Common())


def test_a_sweeps_log_that_is_a_link_is_refused(tmp_path, victim):
    (tmp_path / "one.log").symlink_to(victim)
    with pytest.raises(ArtifactError, match=r"one\.log is a link"):
        _log_of(planned(tmp_path / "one"))


def test_logs_of_a_sweep_are_appended_to_regular_files_only(tmp_path):
    os.mkfifo(tmp_path / "fifo.log")
    with pytest.raises(ArtifactError, match=r"fifo\.log cannot be written"):
        _log_of(planned(tmp_path / "fifo"))
    for expected in (0, 4):
        with _log_of(planned(tmp_path / "run")) as log:
            assert log.tell() == expected
            log.write(b"said")
