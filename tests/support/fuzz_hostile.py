"""Deliberately hostile inputs for fuzz.py: files of another kind or size, data that take long to parse, commands."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import torch
from torch import nn

import paam
from mutations import damaged, revalued
from paam.artifacts.saved import PLAN_FILE, WEIGHTS_FILE
from paam.artifacts.weights import load_weights
from paam.config.recipe import load_recipe
from paam.config.trust import FLAG, is_code, is_named
from paam.data.folder import decode
from paam.data.safe_unpickle import safe_load
from paam.errors import PaamError
from paam.events import Start, read_event
from paam.graph.plan import Plan
from paam.report.page import write_report
from paam.runs.checkpoint import read_newest_checkpoint
from paam.runs.directory import CHECKPOINTS
from paam.runs.liveness import life, lock_held, silent_for
from paam.runs.progress import PROGRESS_FILE, read_progress
from paam.runs.record import LOCK_FILE, RECIPE_FILE, RECORD_FILE
from paam.views.follow import Follower
from paam.views.lines import LONGEST, complain
from paam.views.listing import list_runs, resume_command
from records import events

Attempt = Callable[[Random, Path], None]
CHECKPOINT = f"{CHECKPOINTS}/epoch-000001-step-000000.safetensors"


def net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 3))


def follow(path: Path) -> None:
    with Follower(path) as follower:
        follower.poll()
        follower.poll()


READERS: dict[str, Callable[[Path], object]] = {
    RECORD_FILE: lambda path: (list_runs(path.parent), follow(path), write_report([path], path.parent / "page.html")),
    PROGRESS_FILE: read_progress,
    LOCK_FILE: lambda path: (lock_held(path), life(path.parent, 0.0, silent_for(path.parent), grace=0)),
    RECIPE_FILE: lambda path: load_recipe(str(path)),
    PLAN_FILE: lambda path: paam.load(path.parent, net()),
    WEIGHTS_FILE: lambda path: paam.load(path.parent, net()),
    CHECKPOINT: lambda path: read_newest_checkpoint(path.parent),
    "dense.safetensors": lambda path: load_weights(net(), path, "model.weights"),
    "image.png": lambda path: decode(path, 8),
    "test_batch": safe_load,
}
"""Every file name that paam opens, and the function that opens it."""


def odd_files() -> Attempt:
    pruner = paam.Pruner(net(), torch.zeros(1, 1, 8, 8), scorer="free")
    pruner.select(keep_filters=0.5)
    small = pruner.compact()

    def attempt(rng: Random, here: Path) -> None:
        shutil.rmtree(here)
        (here / CHECKPOINTS).mkdir(parents=True)
        paam.save(small, here)
        name = rng.choice(list(READERS))
        path = here / name
        path.unlink(missing_ok=True)
        kind = rng.randrange(7)
        if kind == 0:
            os.mkfifo(path)
        elif kind == 1:
            path.symlink_to(rng.choice(("/dev/zero", "/dev/random", "/dev/full", "/dev/tty", "/dev/null")))
        elif kind == 2:
            path.mkdir()
        elif kind == 3:
            path.symlink_to(path.name)
        elif kind == 4:
            with path.open("wb") as file:
                file.write(rng.randbytes(rng.choice((0, 8, 100))))
                file.truncate(1 << rng.choice((30, 37, 41)))  # sparse
        elif kind == 5:
            path.symlink_to(rng.choice(("/proc/self/mem", "/proc/kmsg", "/proc/self/fd/0", "/proc/self/environ")))
        else:
            path.write_bytes(rng.randbytes(rng.choice((0, 1, 100, 5000))))
        READERS[name](path)

    return attempt


PIECES = ("a.", '"a".', "[", "{", "[[", '{"a":', "a={", "\\", '"', "'", '"""', "'''", "[a]\n", "#", ".")
HEADS = ("", "[model]\nname=", "[a.b]\n", "x=", "[finetune]\nlr.", "0x", "0", '{"event": ', "[", '{"base":')


def bombs() -> Attempt:
    """Text that is small but takes long to parse or is deeply nested, for a careless reader."""

    def attempt(rng: Random, here: Path) -> None:
        size = rng.choice((10, 1000, 30_000, 250_000))
        piece = rng.choice(PIECES) + rng.choice(("", "", "a", "\n", '"', " ", "=1\n", "],", "0,", ".a"))
        head = rng.choice(HEADS)
        text = head + piece * (size // len(piece)) + rng.choice(("", "=1", "]" * size, "}" * size, "1" * size, '"'))
        (here / "own.toml").write_text(text)
        (here / PLAN_FILE).write_text(text)
        (here / PROGRESS_FILE).write_text(text)
        record = Path(__file__).parents[2] / "results" / "demo" / RECORD_FILE
        lines = record.read_text("utf-8").splitlines(keepends=True)
        (here / RECORD_FILE).write_text("".join([*lines[: rng.randrange(3)], text.replace("\n", ""), "\n", lines[-1]]))
        for name, read in ((PLAN_FILE, Plan.read), (RECORD_FILE, READERS[RECORD_FILE])):
            with contextlib.suppress(PaamError):
                read(here / name)
        assert read_progress(here / PROGRESS_FILE) is None
        load_recipe(str(here / "own.toml"))

    return attempt


def progress_files() -> Attempt:
    tree = {"epoch": 3, "step": 2, "steps": 7, "pace": 0.25}

    def attempt(rng: Random, here: Path) -> None:
        text = json.dumps(revalued(dict(tree), rng)) if rng.random() < 0.6 else json.dumps(tree)
        content = text.encode() if rng.random() < 0.6 else damaged(text.encode(), rng)
        (here / PROGRESS_FILE).write_bytes(content)
        found = read_progress(here / PROGRESS_FILE)
        if found is None:
            raise PaamError("skipped")
        assert 0 <= found.step <= found.steps
        assert found.seconds_left is None or found.seconds_left >= 0

    return attempt


WORDS = ("paam", "prune", "own.toml", "--out", "--out=x", "--resume", "--", "'", '"', "\\", "--set", "model.name=m:f")
WORDS += ("\x1b[2J", "\r", "\n", ";rm -rf ~", "$(id)", "`id`", "| sh", "--seed", "0", "[red]", "\u202e", "\ud800")
WORDS += (FLAG, "")


def commands() -> Attempt:
    """The recorded command of a run, which paam prints for the user to copy into a shell."""

    def attempt(rng: Random, here: Path) -> None:
        (here / LOCK_FILE).touch()
        begin = ["paam", "prune"] if rng.random() < 0.8 else []
        said = rng.choice((" ", "  ", "")).join([*begin, *rng.choices(WORDS, k=rng.randrange(8))])
        model = rng.choice(("resnet20", "timm:resnet18", "evil:make", ":", "a:b:c"))
        start = read_event(events()[0])
        assert isinstance(start, Start)
        told = resume_command(here, replace(start, command=said, recipe={"model": {"name": model}}))
        if not told:
            raise PaamError("no command is told")
        assert told.isprintable(), told
        words = shlex.split(told)
        assert words[0] == "paam"
        assert words[-3:] == ["--out", str(here), "--resume"]
        assert not is_code(model) or FLAG in words or is_named(word.removeprefix("--set=") for word in words)

    return attempt


def check_told(error: PaamError) -> None:
    """A refusal prints one line without control characters."""
    with contextlib.redirect_stderr(io.StringIO()) as told:
        complain(str(error))
    line = told.getvalue()
    assert line.endswith("\n")
    assert line[:-1].isprintable(), ascii(line)
    assert len(line) < 2 * LONGEST


KINDS: dict[str, Callable[[], Attempt]] = {
    "odd-file": odd_files,
    "bomb": bombs,
    "progress": progress_files,
    "command": commands,
}
