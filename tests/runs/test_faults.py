"""A seeded sample of the faults of faults.py, and that they are found where there is something to find."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest
import torch

from faults import WRONG, Case, Faults, sampled, table, verdicts
from faulty.disk import CUTS, Disk
from faulty.operations import CHANGING, ERRORS, Operation
from faulty.scenarios import Run
from paam.files import durable
from paam.runs import checkpoint

SAMPLE, SEED = 800, 0
JOBS = 2


@pytest.fixture(scope="module")
def faults(tmp_path_factory) -> Faults:
    torch.set_num_threads(1)
    return Faults(tmp_path_factory.mktemp("faults").resolve())


@pytest.mark.faults
def test_a_sample_of_all_faults_loses_nothing_that_was_flushed(faults, capsys):
    cases = sampled(faults.cases(), SAMPLE, SEED)
    found = list(verdicts(faults, cases, JOBS))
    with capsys.disabled():
        sys.stdout.write("\n" + table(faults, found))
    wrong = [verdict for _, verdict in found if verdict.startswith(WRONG)]
    assert not wrong, "\n".join(wrong)
    assert {case.fault for case in cases} == {*CUTS, *ERRORS, "kill", "half"}


@pytest.mark.faults
def test_the_runs_do_each_kind_of_operation(faults):
    kinds = Counter(operation.kind for operations in faults.operations.values() for operation in operations)
    assert kinds.keys() == {*CHANGING, "open", "read"}


@pytest.mark.faults
@pytest.mark.parametrize(
    ("owner", "name", "instead", "fault", "told"),
    [
        (durable, "sync_directory", lambda folder: None, "strict", "nothing is left of 2 epochs"),
        (durable, "sync", lambda descriptor: None, "lost", "No checkpoint is usable"),
        (checkpoint, "KEPT", 0, "kill", "2 epochs were flushed|checkpoints .* are missing"),
    ],
    ids=["names", "contents", "kept"],
)
def test_a_promise_that_is_not_kept_is_found(tmp_path, monkeypatch, owner, name, instead, fault, told):
    """The tool itself: paam as it must not be, and a fault behind its second checkpoint."""
    monkeypatch.setattr(owner, name, instead)
    faults = Faults(tmp_path.resolve(), [Run])
    number = next(n for n, o in enumerate(faults.operations["prune"]) if "epoch-000003" in o.target)
    verdict = faults.verdict(Case("prune", fault, number))
    assert verdict.startswith(WRONG)
    assert re.search(told, verdict), verdict


# ---------------------------------------------------------------- the disk that forgets


def after(cut: str, folder: Path, operations: list[Operation], seed: int = 0) -> dict[str, bytes]:
    """What a power cut leaves of operations on an empty disk."""
    (folder / "before").mkdir()
    disk = Disk(folder / "before")
    for operation in operations:
        disk.follow(operation)
    disk.after(cut, Random(seed), folder / "after")
    found = {str(path.relative_to(folder / "after")): path for path in (folder / "after").rglob("*")}
    return {name: path.read_bytes() for name, path in found.items() if path.is_file()}


WRITTEN = [Operation("create", "new", 1), Operation("write", "new", 1, b"content", 0)]
FLUSHED = [*WRITTEN, Operation("fsync", "new", 1)]
RENAMED = [*FLUSHED, Operation("rename", "new", target="file")]
DURABLE = [*RENAMED, Operation("fsync-directory", ".")]
APPENDED = [*DURABLE, Operation("open", "file", 2), Operation("append", "file", 2, b", more", None)]


@pytest.mark.parametrize(
    ("operations", "lost", "strict"),
    [
        (WRITTEN, {"new": b""}, {}),
        (FLUSHED, {"new": b"content"}, {}),
        (RENAMED, {"file": b"content"}, {}),
        (DURABLE, {"file": b"content"}, {"file": b"content"}),
        (APPENDED, {"file": b"content"}, {"file": b"content"}),
        ([*APPENDED, Operation("fsync", "file", 2)], {"file": b"content, more"}, {"file": b"content, more"}),
        ([*DURABLE, Operation("unlink", "file")], {}, {"file": b"content"}),
        (
            [*WRITTEN, Operation("rename", "new", target="file"), Operation("fsync-directory", ".")],
            *[{"file": b""}] * 2,
        ),
        ([*DURABLE, Operation("mkdir", "a"), Operation("create", "a/b", 3)], {"file": b"content", "a/b": b""}, None),
        (
            [*APPENDED, Operation("truncate", "file", 2, offset=3), Operation("fsync", "file", 2)],
            *[{"file": b"con"}] * 2,
        ),
    ],
)
@pytest.mark.parametrize("cut", ["lost", "strict"])
def test_a_power_cut_takes_what_was_not_flushed(tmp_path, cut, operations, lost, strict):
    wanted = lost if cut == "lost" or strict is None else strict
    if strict is None and cut == "strict":
        wanted = {"file": b"content"}
    assert after(cut, tmp_path, operations) == wanted


def test_a_torn_write_is_a_beginning_of_it_with_or_without_rubbish_behind(tmp_path):
    seen = set()
    for seed in range(60):
        (tmp_path / str(seed)).mkdir()
        content = after("torn", tmp_path / str(seed), APPENDED, seed)["file"]
        assert content.startswith(b"content")
        assert len(content) <= len(b"content, more")
        seen.add(content)
    assert len(seen) > 10
    assert any(b", m" in content for content in seen)
    assert any(b"\x00" in content for content in seen)


def test_a_sample_has_all_kinds_before_it_has_one_of_them_twice():
    cases = [Case(scenario, fault, n) for scenario in "ab" for fault in ("kill", "EIO") for n in range(9)]
    chosen = sampled(cases, 8, 0)
    assert set(Counter((case.scenario, case.fault) for case in chosen).values()) == {2}
    assert chosen == sampled(cases, 8, 0) != sampled(cases, 8, 1)
