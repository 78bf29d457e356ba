"""The record of a finished run may be compressed by gzip: listings and reports read it, whatever it holds."""

from __future__ import annotations

import contextlib
import gzip
import json
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paam.errors import ArtifactError
from paam.runs import record as records
from paam.runs.record import COMPRESSED_FILE, RECORD_FILE, read_events, record_in, salvage_events

DEMO = Path(__file__).parents[2] / "results" / "demo"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run, its record compressed by the program that users have."""
    folder = tmp_path / "runs" / "demo"
    folder.mkdir(parents=True)
    plain = read_plain()
    (folder / RECORD_FILE).write_bytes(plain)
    subprocess.run(["gzip", folder / RECORD_FILE], check=True)
    assert [path.name for path in folder.iterdir()] == [COMPRESSED_FILE]
    return folder


def read_plain() -> bytes:
    found = record_in(DEMO).read_bytes()
    return gzip.decompress(found) if found[:2] == b"\x1f\x8b" else found


def test_its_events_are_those_of_the_plain_record(run: Path, tmp_path: Path) -> None:
    plain = tmp_path / RECORD_FILE
    plain.write_bytes(read_plain())
    assert read_events(record_in(run)) == read_events(plain)


def test_it_is_listed_and_reported(run: Path, cli) -> None:
    (row,) = json.loads(cli("runs", str(run.parent), "--json").out)
    assert row["state"] == "finished"
    end = json.loads(read_plain().splitlines()[-1])
    assert row["accuracy"] == end["pruned"]["accuracy"]
    assert cli("report", str(run)).code == 0
    assert f"{end['pruned']['accuracy']:.2f}" in (run / "report.html").read_text("utf-8")


@pytest.mark.parametrize("command", [["watch"], ["prune", "digits-resnet20-kq", "--resume", "--out"]])
def test_what_follows_or_continues_a_run_says_how_to_unpack_it(run: Path, cli, command: list[str]) -> None:
    refusal = cli(*command, str(run))
    assert refusal.code == 2
    assert "gunzip record.jsonl.gz" in refusal.err
    assert len(refusal.err.splitlines()) <= 3


def test_a_plain_record_comes_first(run: Path) -> None:
    (run / RECORD_FILE).write_bytes(read_plain())
    assert record_in(run) == run / RECORD_FILE


def test_a_small_file_that_unpacks_to_a_flood_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "LARGEST_FILE", 1 << 20)
    (run / COMPRESSED_FILE).write_bytes(gzip.compress(b" " * ((1 << 20) + 1)))
    with pytest.raises(ArtifactError, match="unpacks to more than 1,048,576 bytes"):
        read_events(record_in(run))


def test_one_that_was_cut_off_is_named(run: Path, cli) -> None:
    path = run / COMPRESSED_FILE
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ArtifactError, match="not a complete gzip file"):
        read_events(path)
    (row,) = json.loads(cli("runs", str(run.parent), "--json").out)
    assert row["state"] == "unreadable"
    assert "not a complete gzip file" in row["why"]


@given(st.binary(max_size=200), st.integers(0, 200))
def test_damage_anywhere_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, noise: bytes, at: int) -> None:
    packed = bytearray(gzip.compress(read_plain()[:5000], mtime=0))
    packed[at : at + len(noise)] = noise
    path = tmp_path_factory.mktemp("damaged") / COMPRESSED_FILE
    path.write_bytes(packed)
    for read in (read_events, salvage_events):
        with contextlib.suppress(ArtifactError):
            assert read(path)
