"""Runs of a sweep end with it, whatever ends it, and a sweep that comes back waits for those that still save."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from paam.cli.stopping import Stopping
from paam.config.recipe import load_recipe
from paam.runs.leash import VARIABLE, leashed, when_orphaned
from paam.runs.liveness import lock_held
from paam.runs.lock import RunLock
from ran import run
from short_runs import assert_same_weights
from sweeps import NET, RECIPE, SWEEP, sweep, wait_for


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    (tmp_path / "held_net.py").write_text(NET, "utf-8")
    (tmp_path / "tiny.toml").write_text(RECIPE, "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("held_net", None)


def ended(out: Path) -> bool:
    """Whether nobody holds the lock of a run any more; the kernel frees it at the end of its process."""
    return lock_held(out / "lock") is False


@pytest.mark.parametrize("before", [[], ["nohup"]], ids=["", "nohup"])
def test_a_sweep_that_is_killed_takes_its_runs_along_and_they_save(here, before):
    """Also where SIGHUP is ignored. The sweep's second call goes on to the bits of an undisturbed run."""
    log, hold = here / "out" / "tiny-seed0.log", here / "hold"
    hold.touch()
    process = subprocess.Popen([*before, *SWEEP], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for((here / "reached").exists, process)
    finally:
        process.kill()
        process.wait()
    deadline = time.monotonic() + 120
    while "stopping after this step" not in log.read_text("utf-8"):
        assert time.monotonic() < deadline, log.read_text("utf-8")
    hold.unlink()
    while not (ended(here / "out" / "tiny-seed0") and "the state is saved" in log.read_text("utf-8")):
        assert time.monotonic() < deadline, log.read_text("utf-8")
    done = subprocess.run(SWEEP, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "resumed" in done.stdout
    run(load_recipe("tiny.toml"), here / "alone", device="cpu")
    assert_same_weights(here / "alone", here / "out" / "tiny-seed0")


def test_a_sweep_waits_for_a_run_that_another_process_is_at_work_on(monkeypatch, capsys, here):
    out = here / "out" / "tiny-seed0"
    lock = RunLock(out)
    lock.take()
    polls = []

    def poll(seconds: float) -> None:
        polls.append(seconds)
        if len(polls) == 3:
            lock.__exit__()

    monkeypatch.setattr("paam.runs.sweep.time", SimpleNamespace(sleep=poll))
    code, told, err = sweep(monkeypatch, capsys, "tiny.toml", "--out=out")
    assert (code, err) == (0, "")
    assert len(polls) == 3
    assert told.count("waiting   tiny-seed0: locked by another process") == 1
    assert told.index("waiting") < told.index("finished")


# ---------------------------------------------------------------- the leash itself

CHILD = """
import os, sys, threading
from paam.runs.leash import VARIABLE, when_orphaned
let_go = threading.Event()
when_orphaned(let_go.set)
assert VARIABLE not in os.environ
assert sys.stdin.read() == ""
print("ready", flush=True)
assert let_go.wait(60)
print("let go", flush=True)
"""


def test_a_process_learns_that_the_other_end_is_closed_and_reads_no_input():
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=leashed(dict(os.environ)),
        text=True,
    )
    with child:
        assert child.stdout.readline() == "ready\n"
        child.stdin.close()
        assert child.stdout.readline() == "let go\n"
    assert child.returncode == 0


def test_without_a_leash_nothing_is_watched(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    before = threading.active_count()
    when_orphaned(lambda: pytest.fail("nobody held this process"))
    assert threading.active_count() == before


def test_to_be_let_go_after_a_signal_does_not_end_the_run_at_once():
    """A sweep that is interrupted twice tells its runs, and leaves."""
    asked: list[str] = []
    stopping = Stopping(lambda: asked.append("asked"), lambda: asked.append("at once"))
    stopping.training = True
    stopping.receive(signal.SIGTERM)
    stopping.receive(signal.SIGHUP)
    assert asked == ["asked"]
    assert stopping.exit_code == 128 + signal.SIGTERM
