"""Fault scenarios besides runs: networks saved and exported over earlier ones, a report over an earlier one."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

import paam
from faulty.network import tiny
from faulty.operations import Operation
from faulty.processes import Ended, forked
from faulty.scenarios import Run, Scenario, command, one_sentence, require
from paam.errors import PaamError

CLASSES, CHANNELS = 10, 1


class Replaced(Scenario):
    """Overwrites an earlier result: either the old or the new one must exist, and writing again must work."""

    file: str
    """The file whose content shows which of them exists."""

    def __init__(self, run: Run) -> None:
        self.run = run

    @property
    def work(self) -> Path:
        return self.run.work

    def contents(self) -> dict[str, bytes]:
        """Content of the old one and the new one."""
        return {name: (self.work / f"{self.name}-{name}" / self.file).read_bytes() for name in ("old", "new")}

    def judge(self, folder: Path, ended: Ended | None, before: Sequence[Operation]) -> str:
        if ended is not None and ended.code > 0:
            one_sentence(ended)
        found = (folder / self.file).read_bytes()
        kinds = [name for name, content in self.contents().items() if content == found]
        require(len(kinds) == 1, f"{self.file} is neither the old one nor the new one")
        if kinds == ["new"]:
            self.readable(folder)
        if ended is not None and ended.code == 0:
            require(kinds == ["new"], "it says that it has written, but the old one is there")
        again = forked(self.act, folder)
        require(again.code == 0, f"once more: exit code {again.code}: {again.said[-2000:]}")
        require((folder / self.file).read_bytes() == self.contents()["new"], "once more: not the new one")
        return "unhurt" if ended is not None and ended.code == 0 else f"the {kinds[0]} one"

    def readable(self, folder: Path) -> None:
        """Check that the result is complete and readable."""


def as_program(work: object) -> None:
    """Report an error of paam like its program does."""
    assert callable(work)
    try:
        work()
    except PaamError as error:
        print(f"paam: {error}", flush=True)  # noqa: T201
        raise SystemExit(2) from None


class Saved(Replaced):
    """paam.save over an earlier save. Its plan.json is a copy: it may be of the other version, but must be complete."""

    name = "paam.save"
    file = "saved/model.safetensors"

    def lay(self, folder: Path) -> None:
        for name, seed in (("old", 1), ("new", 0)):
            where = self.work / f"{self.name}-{name}"
            if not where.exists():
                shutil.copytree(self.work / f"seed-{seed}" / "run", where / "saved", ignore=_all_but_network)
        shutil.copytree(self.work / f"{self.name}-old", folder)

    def act(self) -> None:
        small = paam.load(self.work / f"{self.name}-new" / "saved", tiny(CLASSES, CHANNELS))
        as_program(lambda: paam.save(small, "saved"))

    def readable(self, folder: Path) -> None:
        paam.load(folder / "saved", tiny(CLASSES, CHANNELS))
        paam.Plan.read(folder / "saved" / "plan.json")


class Exported(Replaced):
    """paam.export over an earlier export."""

    name = "paam.export"
    file = "small.safetensors"

    def lay(self, folder: Path) -> None:
        for name, seed in (("old", 1), ("new", 0)):
            where = self.work / f"{self.name}-{name}"
            if not where.exists():
                where.mkdir()
                run = self.work / f"seed-{seed}" / "run"
                ended = forked(lambda run=run: _export(run), where)
                assert ended.code == 0, ended.said
        shutil.copytree(self.work / f"{self.name}-old", folder)

    def act(self) -> None:
        as_program(lambda: _export(self.work / "seed-0" / "run"))

    def readable(self, folder: Path) -> None:
        paam.load(folder / self.file, tiny(CLASSES, CHANNELS))


def _export(run: Path) -> None:
    small = paam.load(run, tiny(CLASSES, CHANNELS))
    paam.export(small, torch.zeros(1, CHANNELS, 8, 8), Exported.file, "safetensors")


class Reported(Replaced):
    """`paam report` over an earlier page."""

    name = "paam report"
    file = "page.html"

    def lay(self, folder: Path) -> None:
        for name, seed in (("old", 1), ("new", 0)):
            where = self.work / f"{self.name}-{name}"
            if not where.exists():
                shutil.copytree(self.work / f"seed-{seed}" / "run", where / "run", ignore=_all_but_record)
                ended = forked(self.act, where)
                assert ended.code == 0, ended.said
        shutil.copytree(self.work / f"{self.name}-new" / "run", folder / "run")
        shutil.copy(self.work / f"{self.name}-old" / self.file, folder)

    def act(self) -> None:
        command("report", "run", "-o", self.file)


def _all_but_network(folder: str, names: list[str]) -> set[str]:
    return set(names) - {"model.safetensors", "plan.json"}


def _all_but_record(folder: str, names: list[str]) -> set[str]:
    return set(names) - {"record.jsonl"}
