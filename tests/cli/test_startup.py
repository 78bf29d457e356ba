"""What the program loads before it answers: torch takes seconds, so that only what trains or measures waits for it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[2] / "results"
EVERY_MODULE = """
import importlib, pkgutil, sys
for name in ("paam.config", "paam.views", "paam.report"):
    for module in pkgutil.walk_packages(importlib.import_module(name).__path__, f"{name}."):
        importlib.import_module(module.name)
        print(module.name)
for name in ("paam.events", "paam.runs.record"):
    importlib.import_module(name)
print("torch" in sys.modules)
"""
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # importing it fails
sys.argv = ["paam", *sys.argv[1:]]
from paam.entry import main
main()
"""


def python(code: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=cwd, capture_output=True, text=True, check=False
    )


def test_recipes_events_views_and_reports_need_no_torch(tmp_path):
    done = python(EVERY_MODULE, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    *modules, torch = done.stdout.split()
    assert torch == "False"
    assert {"paam.config.recipe", "paam.views.tables", "paam.views.tensorboard", "paam.report.page"} <= set(modules)


COMMANDS = {
    "--help": "inspect",
    "prune --help": "--keep-macs",
    "--version": "paam ",
    "recipes": "cifar10-resnet56-kq",
    "runs .": "finished",
    "watch demo": "x as fast",
    "watch demo --json": '"event": "end"',
    "report demo -o page.html": "page.html",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_that_only_read_need_no_torch(tmp_path, command):
    (tmp_path / "demo").mkdir()
    shutil.copy(RESULTS / "demo" / "record.jsonl", tmp_path / "demo")
    done = python(WITHOUT_TORCH, *command.split(), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert COMMANDS[command] in done.stdout


def test_a_command_that_computes_does_need_it(tmp_path):
    """So that the test above can fail."""
    done = python(WITHOUT_TORCH, "inspect", "resnet20", cwd=tmp_path)
    assert done.returncode != 0
    assert "torch" in done.stderr
