"""What reaches a terminal: text that somebody else chose is shown and never obeyed; and it may be closed or gone."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

from paam.graph.network import prepare
from paam.pruning.inspection import inspect
from paam.views.lines import LONGEST, complain, put, show, write
from paam.views.tables import inspection_table, sweep_table
from test_trust import NET

ESCAPES = "\x1b[2J\x1b]0;owned\x07\x9b31m\r\b\u202e[bold red]"
"""Clears the screen, sets the title, and so on; and what rich would take for a style."""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@contextlib.contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """Standard output and error are one."""
    monkeypatch.setenv("TERM", "xterm-256color")
    shared = Terminal()
    with contextlib.redirect_stdout(shared), contextlib.redirect_stderr(shared):
        yield shared


def unstyled(text: str) -> str:
    """Without the colours that rich puts around."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


# ---------------------------------------------------------------- text of others


def test_sentences_and_lines_hold_nothing_that_a_terminal_obeys(monkeypatch):
    with terminal(monkeypatch) as shared:
        complain(f"There is no {ESCAPES} here.")
        put(f"started   {ESCAPES}")
        show(Console(), f"{ESCAPES}\nsecond line")
    told = unstyled(shared.getvalue())
    assert set(told) - set("\n") == {letter for letter in told if letter.isprintable()}
    assert told.count("[bold red]") == 3
    assert told.startswith("paam: There is no \ufffd[2J")
    assert told.endswith("\nsecond line\n")


def test_a_sentence_is_cut_in_its_middle_where_it_would_flood_the_terminal(monkeypatch):
    with terminal(monkeypatch) as shared:
        complain(f"The recipe has no key '{'x' * 200_000}'. Resume with:  paam prune --resume")
    line = shared.getvalue()
    assert len(line) < LONGEST + 100
    assert "The recipe has no key" in line
    assert "[...]" in line
    assert "Resume with:  paam prune --resume" in line


def test_names_in_tables_are_shown_as_they_are(monkeypatch):
    layers = torch.nn.Sequential()
    layers.add_module("\x1b[2J[red]", torch.nn.Conv2d(1, 4, 3))
    layers.add_module("flat", torch.nn.Flatten())
    layers.add_module("last", torch.nn.Linear(4, 2))
    found = inspect(prepare(layers, torch.zeros(1, 1, 3, 3)))
    with terminal(monkeypatch) as shared:
        console = Console(width=200)
        console.print(inspection_table(ESCAPES, (1, 3, 3), 2, found))
        console.print(sweep_table({ESCAPES: []}))
    told = unstyled(shared.getvalue())
    assert all(letter.isprintable() for letter in told.replace("\n", ""))
    assert "\ufffd[2J[red]" in told
    assert told.count("[bold red]") == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["prune", "odd.toml"],
        ["prune", f"{ESCAPES}.toml"],
        ["prune", "digits-resnet20-kq", "--set=data.name=folder", "--set=data.image_size=8", "--data=images"],
        ["inspect", "odd_net:make"],
        ["inspect", f"{ESCAPES}:make"],
        ["runs", ESCAPES],
        ["report", ESCAPES],
        ["watch", "digits", ESCAPES],
        ["prune", f"--{ESCAPES}"],
        ["prune", "digits-resnet20-kq", f"--seed={ESCAPES}"],
        [ESCAPES],
    ],
    ids=["key", "file", "class", "exception", "module", "folder", "run", "usage", "option", "value", "command"],
)
def test_no_refusal_passes_escapes_on(cli, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("odd.toml").write_text(f'"{ascii(ESCAPES)[1:-1]}" = 1'.replace("\\x", "\\u00"))
    for name in (f"a{ESCAPES}", "b"):
        (tmp_path / "images" / name).mkdir(parents=True)
    Path("odd_net.py").write_text(f"def make():\n    raise ValueError({ESCAPES!a})\n")
    done = cli(*arguments)
    assert done.code == 2
    assert all(letter.isprintable() for letter in (done.err + done.out).replace("\n", "")), ascii(done.err)
    sys.modules.pop("odd_net", None)


def test_where_a_report_lies_is_shown_to_people_and_said_to_programs(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record = Path(__file__).parents[1] / "results" / "demo" / "record.jsonl"
    run = tmp_path / "\x1b[2J"
    run.mkdir()
    (run / "record.jsonl").write_bytes(record.read_bytes())
    assert cli("report", "\x1b[2J").out == "\x1b[2J/report.html\n"  # a file name, for programs
    monkeypatch.setattr("paam.cli.reporting.sys.stdout", Terminal())
    told = sys.stdout
    assert not cli("report", "\x1b[2J").code
    assert told.getvalue() == "\ufffd[2J/report.html\n"


def test_flags_are_shown_without_a_type(cli):
    for command in ("demo", "prune", "sweep", "watch", "runs", "report", "export", "bench", "inspect", "recipes", ""):
        done = cli(*([command] if command else []), "--help")
        assert not done.code
        assert "--help" in done.out
        assert "bool" not in done.out.lower()


# ---------------------------------------------------------------- streams that are closed or gone

OPTIONS = ["--device=cpu", "--set=model.name=small_net:make", "--set=data.batch_size=512", "--keep-macs=0.7"]
OPTIONS += ["--out=run"]
OPTIONS += [f"--set=schedule.{key}" for key in ("warmup=1", "cycles=1", "weight=1", "finetune=1", "control=false")]
COMMANDS = {
    "prune": ["prune", "digits-resnet20-kq", *OPTIONS],
    "watch": ["watch", "run"],
    "export": ["export", "run", "--format=safetensors", "--trust-code"],
    "runs": ["runs", "."],
    "report": ["report", "run"],
}


def in_shell(arguments: list[str], redirection: str) -> subprocess.CompletedProcess[str]:
    line = f'"$0" -m paam "$@" {redirection}'
    return subprocess.run(["sh", "-c", line, sys.executable, *arguments], capture_output=True, text=True, check=False)


def test_a_standard_output_that_cannot_be_written_is_told_in_a_sentence(tmp_path):
    for redirection in ("1</dev/null", ">/dev/full"):
        for arguments in (["recipes"], ["--version"], ["--help"], ["runs", str(tmp_path / ".."), "--json"]):
            done = in_shell(arguments, redirection)
            assert done.returncode == 1
            assert done.stderr.startswith("paam: Standard output cannot be written: ")
            assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("redirection", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_end_nothing(tmp_path, monkeypatch, redirection):
    monkeypatch.chdir(tmp_path)
    Path("small_net.py").write_text(NET, "utf-8")
    for arguments in COMMANDS.values():
        done = in_shell(arguments, redirection)
        assert (done.returncode, done.stderr) == (0, ""), (arguments, done)
    assert Path("run/model.safetensors").is_file()
    assert Path("run/pruned.safetensors").is_file()
    text = Path("run/record.jsonl").read_text("utf-8")
    assert all(line.startswith("{") for line in text.splitlines())  # nothing was printed into a file of the run
    refused = in_shell(["prune", "nowhere.toml"], redirection)
    assert refused.returncode == 2


def test_a_reader_that_goes_away_ends_no_sentence_in_a_traceback(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reader, writer = os.pipe()
    os.close(reader)
    try:
        for streams in ({"stderr": writer, "stdout": subprocess.PIPE}, {"stdout": writer, "stderr": subprocess.PIPE}):
            command = [sys.executable, "-m", "paam", "prune", "nowhere.toml"]
            done = subprocess.run(command, text=True, check=False, **streams)
            assert done.returncode == 2
            assert "Traceback" not in f"{done.stdout}{done.stderr}"
    finally:
        os.close(writer)


def test_a_stream_that_somebodys_code_has_closed_is_let_go():
    stream = io.StringIO()
    stream.close()
    assert not write("a line", stream)
