"""Fault scenarios and their required outcome: runs that are started, resumed and overwritten."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import paam.cli
import paam.runs.ends
import paam.runs.progress
from faulty.operations import Operation
from faulty.processes import Ended, forked
from paam.artifacts.latency import Latency
from paam.runs.checkpoint import CheckpointWriter
from paam.runs.record import Line, read_record

RECIPE = """
[model]
name = "faulty.network:tiny"
[data]
name = "digits"
batch_size = 768
crop = 1
flip = false
[target]
keep_macs = 0.5
[schedule]
warmup = 1
cycles = 1
score = 1
weight = 1
finetune = 2
control = false
[score]
lr = 0.1
[train]
threads = 1
"""
EPOCHS = 5
MINE = {"notes.txt": b"ten years of work", "checkpoints/thesis.txt": b"another ten"}
"""A user's files next to those of a run."""


class WrongError(Exception):
    """An outcome of a fault that must not happen."""


class Scenario(ABC):
    """``lay``: initial state. ``act``: the work of the fork. ``judge``: the outcome in a few words, or WrongError."""

    name: str

    @abstractmethod
    def lay(self, folder: Path) -> None: ...

    @abstractmethod
    def act(self) -> None: ...

    @abstractmethod
    def judge(self, folder: Path, ended: Ended | None, before: Sequence[Operation]) -> str:
        """``ended``: None after a power cut. ``before``: the operations done by then."""


def command(*arguments: str) -> None:
    """`paam ...` in this fork. It waits for checkpoints: otherwise two threads would number operations at random."""
    save = CheckpointWriter.save

    def save_now(writer: CheckpointWriter, *given: Any) -> None:
        save(writer, *given)
        writer.wait()

    CheckpointWriter.save = save_now
    paam.runs.progress.WRITE_EVERY = math.inf  # progress is written only at the first step
    paam.runs.ends.measure_latency = lambda models, example: {name: Latency(1.0, 1.0, 1.0) for name in models}
    torch.set_num_threads(1)
    sys.argv = ["paam", *arguments]
    paam.cli.main()


def require(holds: bool, what: str) -> None:
    if not holds:
        raise WrongError(what)


def one_sentence(ended: Ended) -> None:
    """A system error is reported in one sentence, with exit code 2."""
    require(ended.code == 2, f"exit code {ended.code}: {ended.said[-2000:]}")
    told = [line for line in ended.said.splitlines() if line.startswith("paam: ")]
    require(len(told) == 1 and "Traceback" not in ended.said, f"not one sentence: {ended.said[-2000:]}")


def story(events: list[Line]) -> list[Line]:
    """The events without durations and starting points."""
    return [{key: v for key, v in event.items() if key != "seconds"} for event in events if event["event"] != "start"]


@dataclasses.dataclass(frozen=True)
class Result:
    """The required result of a run, whatever its history."""

    weights: bytes
    plan: bytes
    events: list[Line]

    @staticmethod
    def of(out: Path) -> Result:
        record = story(read_record(out / "record.jsonl"))
        return Result((out / "model.safetensors").read_bytes(), (out / "plan.json").read_bytes(), record)


class Run(Scenario):
    """A new run; it must resume to the same bits, and lose no epoch whose checkpoint was flushed."""

    name = "prune"
    flags: tuple[str, ...] = ()

    def __init__(self, work: Path) -> None:
        self.work = work
        self.recipe = work / "tiny.toml"
        self.recipe.write_text(RECIPE, "utf-8")
        self.begun_at = 0
        """Epochs finished and flushed before."""
        self.result: Result | None = None

    def lay(self, folder: Path) -> None:
        folder.mkdir()

    def act(self) -> None:
        self.paam(*self.flags)

    def paam(self, *flags: str) -> None:
        command("prune", str(self.recipe), "--set=model.name=faulty.network:tiny", "--device=cpu", "--out=run", *flags)

    def judge(self, folder: Path, ended: Ended | None, before: Sequence[Operation]) -> str:
        if ended is not None and ended.code == 0:
            self.compare(folder / "run")
            return "unhurt"
        if ended is not None and ended.code > 0:
            one_sentence(ended)
        return self.goes_on(folder, self.flushed(before))

    def goes_on(self, folder: Path, flushed: int) -> str:
        again = forked(lambda: self.paam("--resume"), folder)
        if "There is no run in run to resume; start it without --resume." in again.said:
            one_sentence(again)
            require(flushed == 0, f"nothing is left of {flushed} epochs that were flushed")
            again, done = forked(self.act, folder), "nothing there"
        else:
            done = self.told(again, flushed)
        require(again.code == 0, f"going on: exit code {again.code}: {again.said[-2000:]}")
        self.compare(folder / "run")
        return done

    def told(self, again: Ended, flushed: int) -> str:
        """The state from which the run resumed, according to its output."""
        if "starts over" in again.said:
            require(flushed == 0, f"begun again, though {flushed} epochs were flushed")
            return "begun again"
        found = re.search(r"resumed after epoch (\d+)", again.said)
        require(found is not None, f"it does not say from where it goes on: {again.said[-2000:]}")
        assert found is not None
        require(int(found[1]) >= flushed, f"{flushed} epochs were flushed, but it goes on after {found[1]}")
        return "gone on"

    def flushed(self, before: Sequence[Operation]) -> int:
        """Epochs of the newest checkpoint that must be on the disk: another operation of the run has followed it."""
        promised = renamed = self.begun_at
        for operation in before:
            if operation.kind == "rename" and (found := re.search(r"/epoch-(\d+)-step-0+\.", operation.target)):
                renamed = int(found[1])
            elif not operation.path.startswith("run/checkpoints"):
                promised = renamed
        return promised

    def compare(self, out: Path) -> None:
        """The same bits and the same events, no partial files and nothing set aside."""
        assert self.result is not None
        found = Result.of(out)
        require(found.weights == self.result.weights, "other weights")
        require(found.plan == self.result.plan, "another plan")
        require(found.events == self.result.events, "another record")
        names = [path.name for path in out.rglob("*")]
        require(not [name for name in names if name.endswith((".tmp", ".unreadable"))], f"left behind: {names}")


class Resumed(Run):
    """A run that was killed after two epochs, then resumed."""

    name = "prune --resume"
    flags = ("--resume",)

    def lay(self, folder: Path) -> None:
        kept = self.work / "killed"
        if not kept.exists():
            self._kill(kept)
        shutil.copytree(kept, folder)
        self.begun_at = 2

    def _kill(self, folder: Path) -> None:
        """Kill it after its second checkpoint, with a partial line at the end of its record."""
        folder.mkdir()

        def work() -> None:
            save = CheckpointWriter.save

            def save_two(writer: CheckpointWriter, position: tuple[int, int], *given: Any) -> None:
                save(writer, position, *given)
                if position >= (2, 0):
                    writer.wait()
                    os._exit(0)  # an exception would be reported

            CheckpointWriter.save = save_two
            self.paam()

        ended = forked(work, folder)
        assert ended.code == 0, ended.said
        with (folder / "run" / "record.jsonl").open("a") as file:
            file.write('{"event": "epoch", "epo')


class Overwritten(Run):
    """A finished run with another seed, overwritten; a user's files are next to it."""

    name = "prune --overwrite"
    flags = ("--overwrite",)

    def lay(self, folder: Path) -> None:
        kept = self.work / "other"
        if not kept.exists():
            kept.mkdir()
            ended = forked(lambda: self.paam("--seed=1"), kept)
            assert ended.code == 0, ended.said
            for name, content in MINE.items():
                (kept / "run" / name).write_bytes(content)
        shutil.copytree(kept, folder)

    def goes_on(self, folder: Path, flushed: int) -> str:
        before = {path: path.read_bytes() for path in (folder / "run").rglob("*") if path.is_file()}
        again = forked(lambda: self.paam("--resume"), folder)
        if "was started with another recipe or seed (seed = 1)" in again.said:
            one_sentence(again)
            require(flushed == 0, f"nothing is left of {flushed} epochs that were flushed")
            old = self.work / "other" / "run"
            for path in old.rglob("*"):
                if path.is_file() and path.name not in ("lock", "report.html", "progress.json"):
                    require(before.get(folder / "run" / path.relative_to(old)) == path.read_bytes(), f"{path} differs")
            again, done = forked(self.act, folder), "the old run"
        else:
            done = self.told(again, flushed)
        require(again.code == 0, f"going on: exit code {again.code}: {again.said[-2000:]}")
        self.compare(folder / "run")
        return done

    def compare(self, out: Path) -> None:
        super().compare(out)
        for name, content in MINE.items():
            require((out / name).read_bytes() == content, f"{name}, a file of the user's, is lost")
