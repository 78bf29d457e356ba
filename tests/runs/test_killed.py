"""Real processes, really killed: at random moments, inside a checkpoint write, by Ctrl-C and SIGTERM, by full disks."""

from __future__ import annotations

import fcntl
import os
import pty
import random
import re
import resource
import select
import shlex
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import paam
from events import of_kind
from paam.files.tensors import read_tensors
from paam.runs.checkpoint import KIND, checkpoints, read_newest_checkpoint
from paam.runs.record import read_record
from short_runs import assert_same_weights, story

# A tiny network with randomness of its own. Where a file `slow` lies beside it, a training step takes for ever.
NET = """
import pathlib
import time

import torch.nn.functional as F
from torch import nn


class Tiny(nn.Module):
    def __init__(self, num_classes, in_channels):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 8, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 10, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(10)
        self.conv3 = nn.Conv2d(10, 8, 3, 1, 1, bias=False)
        self.drop = nn.Dropout(0.1)
        self.linear = Slow(8, num_classes)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(x + self.conv3(F.relu(self.bn2(self.conv2(x)))))
        return self.linear(self.drop(F.adaptive_avg_pool2d(x, 1).flatten(1)))


class Slow(nn.Linear):
    def forward(self, x):
        if x.requires_grad and pathlib.Path("slow").exists():
            pathlib.Path("reached").touch()
            time.sleep(600)
        return super().forward(x)


def tiny(num_classes, in_channels):
    return Tiny(num_classes, in_channels)


def sleeping():
    pathlib.Path("reached").touch()
    time.sleep(600)
"""
RECIPE = """
[model]
name = "tiny_net:tiny"
[data]
name = "digits"
holdout = 0.1
batch_size = 128
crop = 1
flip = false
[target]
keep_macs = 0.5
[schedule]
warmup = 3
cycles = 2
score = 2
weight = 2
finetune = 3
control = true
[score]
lr = 0.1
[weight]
weight_decay = 0.01
[train]
threads = 1
"""
PHASES = ["warmup"] * 3 + (["score"] * 2 + ["weight"] * 2) * 2 + ["finetune"] * 3 + ["control"] * 11


def prepare(folder: Path) -> Path:
    (folder / "tiny_net.py").write_text(NET, "utf-8")
    (folder / "tiny.toml").write_text(RECIPE, "utf-8")
    return folder


def begin(folder: Path, *arguments: str, **options) -> subprocess.Popen[str]:
    source = str(Path(paam.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-m", "paam", "prune", "tiny.toml", "--device=cpu", "--out=run", "--trust-code", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"},
        text=True,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
    )


def again(folder: Path) -> list[str]:
    """As a user would: --resume where there is a run."""
    return ["--resume"] if (folder / "run").exists() else []


def complete(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=300)
    assert "Traceback" not in err
    return process.returncode, out, err


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The run, never interrupted, in a process of its own."""
    folder = prepare(tmp_path_factory.mktemp("whole"))
    code, _, err = complete(begin(folder))
    assert (code, err) == (0, "")
    return folder / "run"


@pytest.fixture
def here(tmp_path) -> Path:
    return prepare(tmp_path)


def phase_under_way(out: Path) -> str:
    """The phase that a killed process was in, by the epochs that it had recorded."""
    record = out / "record.jsonl"
    epochs = of_kind(read_record(record), "epoch") if record.exists() else []
    return PHASES[len(epochs)] if len(epochs) < len(PHASES) else "end"


def kill_behind(process: subprocess.Popen[str], epoch: int, delay: float) -> None:
    """Kill -9 some time after the line of an epoch has been printed, or after the end of all output."""
    assert process.stdout is not None
    for line in process.stdout:
        found = re.match(r" *(\d+)/\d+  ", line)
        if (found and int(found[1]) >= epoch) or (not epoch and "parameters" in line):
            break
    time.sleep(delay)  # a random moment: every one of them must do
    process.kill()
    process.communicate()


def finish_and_compare(folder: Path, whole: Path) -> None:
    code, _, err = complete(begin(folder, *again(folder)))
    assert (code, err) == (0, "")
    assert_same_weights(folder / "run", whole)
    assert story(read_record(folder / "run" / "record.jsonl")) == story(read_record(whole / "record.jsonl"))
    kinds = sorted(path.name.partition("-")[0] for path in (folder / "run" / "checkpoints").iterdir())
    assert kinds == ["data", "epoch", "epoch"]  # nothing half written is left


def test_killed_twice_and_gone_on_to_the_same_bits(here, whole):
    for epoch in (4, 12):
        kill_behind(begin(here, *again(here)), epoch, 0.01)
    finish_and_compare(here, whole)


@pytest.mark.crash
def test_killed_at_random_moments_in_every_phase(tmp_path, whole):
    """Runs are killed seven times on their way, until each phase was hit four times and 25 kills are done."""
    rng = random.Random(0)
    firsts = [0, *(n for n in range(1, len(PHASES)) if PHASES[n] != PHASES[n - 1])]
    lengths = (3, 2, 2, 2, 2, 3, 11)
    hit: Counter[str] = Counter()
    rounds = 0
    while hit.total() < 25 or min(hit[phase] for phase in PHASES) < 4:
        rounds += 1
        assert rounds <= 12, hit
        folder = tmp_path / str(rounds)
        folder.mkdir()
        prepare(folder)
        for first, length in zip(firsts, lengths, strict=True):
            kill_behind(begin(folder, *again(folder)), first + rng.randrange(length), rng.uniform(0, 0.05))
            hit[phase_under_way(folder / "run")] += 1
        finish_and_compare(folder, whole)


@pytest.mark.crash
def test_killed_inside_a_checkpoint_write(tmp_path, whole):
    """Killed the moment that a temporary file is seen. A kill counts when the file was left behind unfinished."""
    folder = prepare(tmp_path)
    directory = folder / "run" / "checkpoints"
    inside = attempts = 0
    while inside < 6:
        attempts += 1
        assert attempts <= 60
        whole_ones = len(checkpoints(directory))
        process = begin(folder, *again(folder))
        written = set()
        while process.poll() is None:
            names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
            written |= {name for name in names if name.endswith(".tmp")}
            # Two writes further at least, so that the run gets on.
            if len(written) > 2 and any(name in written for name in names):
                process.kill()
        process.communicate()
        inside += any(path.name.endswith(".tmp") for path in directory.iterdir())
        assert len(checkpoints(directory)) >= min(whole_ones, 2)
        for path in checkpoints(directory):
            read_tensors(path, KIND)  # raises unless it is whole
        if process.returncode == 0:
            assert_same_weights(folder / "run", whole)
            shutil.rmtree(folder / "run")
    finish_and_compare(folder, whole)


# ---------------------------------------------------------------- asked to stop


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_asked_to_stop_it_saves_says_how_to_go_on_and_does(here, whole, number, code):
    process = begin(here)
    assert process.stdout is not None
    assert any(" 7/" in line for line in process.stdout), "the run has ended"
    process.send_signal(number)
    returned, _, err = complete(process)
    assert returned == code
    assert err.count("\n") == 1
    found = re.search(
        r"Stopped in epoch (\d+).* of 25; .*Resume with:  paam (prune tiny.toml .*--resume)$", err.strip()
    )
    assert found
    newest = checkpoints(here / "run" / "checkpoints")[0].name
    assert newest.startswith((f"epoch-{int(found[1]) - 1:06d}", f"epoch-{int(found[1]):06d}-step-000000"))
    assert shlex.split(found[2]) == ["prune", "tiny.toml", "--device=cpu", "--out=run", "--trust-code", "--resume"]
    finish_and_compare(here, whole)


def test_a_terminal_that_is_closed_saves_the_run(here, whole):
    """A real one: nothing can be written to it any more, and the system and its shell both tell of its end."""
    shown, terminal = pty.openpty()
    options = {"stdin": terminal, "stdout": terminal, "stderr": terminal, "start_new_session": True}
    process = begin(here, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0), **options)
    os.close(terminal)
    record = here / "run" / "record.jsonl"
    while not (record.exists() and record.read_text("utf-8").count('"event": "epoch"') >= 4):
        assert process.poll() is None
        if select.select([shown], [], [], 0.01)[0]:
            os.read(shown, 1 << 16)
    os.close(shown)
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) == 129
    saved, _ = read_newest_checkpoint(here / "run" / "checkpoints")
    assert saved is not None
    assert saved[1]["events"] == len(read_record(record))  # all that it had done, not the last of the usual ones
    finish_and_compare(here, whole)


def test_a_second_ctrl_c_does_not_wait_for_the_step(here):
    (here / "slow").touch()
    process = begin(here)
    while not (here / "reached").exists():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)  # it would finish its step first
    process.send_signal(signal.SIGINT)
    code, _, err = complete(process)
    assert code == 130
    assert "nothing is saved yet" in err


@pytest.mark.crash
def test_ctrl_c_before_training_stops_at_once(here):
    process = begin(here, "--set=model.name=tiny_net:sleeping")
    while not (here / "reached").exists():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    code, _, err = complete(process)
    assert code == 143
    assert "nothing is saved yet" in err
    assert not (here / "run").exists()


@pytest.mark.crash
@pytest.mark.parametrize("workers", [0, 1])
def test_ctrl_c_to_all_processes_of_a_run_that_reads_its_images_as_needed(here, workers):
    """As a terminal sends it. The loader's own random numbers must not move dropout's."""
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        (here / "images" / name).mkdir(parents=True)
        for number in range(60):
            Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).save(here / "images" / name / f"{number}.png")
    given = ["--data=images", "--set=data.name=folder", "--set=data.image_size=8", "--set=data.batch_size=8"]
    given += [f"--set=data.workers={workers}", "--set=data.memory=0", "--set=schedule.control=false"]
    code, _, err = complete(begin(here, *given))
    assert (code, err) == (0, "")
    whole = (here / "run").rename(here / "whole")
    for line in (" 3/", " 8/"):
        process = begin(here, *given, *again(here), start_new_session=True)
        assert process.stdout is not None
        while line not in process.stdout.readline():
            pass
        os.killpg(process.pid, signal.SIGINT)
        code, _, err = complete(process)
        assert code == 130
        assert "step" in checkpoints(here / "run" / "checkpoints")[0].name
    code, _, err = complete(begin(here, *given, "--resume"))
    assert (code, err) == (0, "")
    assert_same_weights(here / "run", whole)


# ---------------------------------------------------------------- nowhere to write


def limit(size: int):
    """Files may not grow beyond ``size`` bytes: writing more fails as a full disk does."""

    def apply() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    return apply


@pytest.mark.crash
def test_a_disk_that_is_full_stops_the_run_and_loses_nothing(here, whole):
    kill_behind(begin(here), 5, 0)
    kept = {p: p.read_bytes() for p in checkpoints(here / "run" / "checkpoints")}
    assert kept
    size = max(map(len, kept.values()))
    code, _, err = complete(begin(here, "--resume", preexec_fn=limit(size // 2)))
    assert code == 2
    assert err.count("\n") == 1
    assert "cannot be written: File too large" in err
    assert "--resume" in err
    assert {p: p.read_bytes() for p in checkpoints(here / "run" / "checkpoints")} == kept
    finish_and_compare(here, whole)


# ---------------------------------------------------------------- two at once


def test_a_second_process_is_refused_and_a_killed_one_blocks_nobody(here, whole):
    first = begin(here)
    assert first.stdout is not None
    while " 2/" not in first.stdout.readline():
        pass
    first.send_signal(signal.SIGSTOP)  # held still, so that it cannot finish first
    code, _, err = complete(begin(here, "--resume"))
    assert code == 2
    assert f"is locked by process {first.pid}" in err
    first.kill()
    first.communicate()
    finish_and_compare(here, whole)
