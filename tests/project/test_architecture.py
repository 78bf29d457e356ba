"""The shape of the package: imports go downward, files stay small, what is light stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import paam

PACKAGE = Path(paam.__file__).parent
LAYERS = (
    *("errors", "version", "files", "config", "events", "graph", "artifacts", "pruning", "models", "data"),
    *("train", "methods", "runs", "views", "report", "loading", "cli", "entry", "__main__"),
)
"""From the bottom up: each imports from itself and from those before it."""
LONGEST = 400
"""Lines of a module."""


def modules() -> dict[str, Path]:
    """Name, without the package's -> file."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path) -> set[str]:
    """Modules of paam that a file imports, lazily or not, but for what only type checkers read."""
    tree = ast.parse(path.read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name.removeprefix("paam.") for name in found if name.startswith("paam.")}


def test_every_part_has_its_layer():
    assert {name.partition(".")[0] for name in modules()} - {""} == set(LAYERS)


def test_imports_go_downward():
    upward = []
    for name, path in modules().items():
        own = name.partition(".")[0]
        for other in imports(path):
            part = other.partition(".")[0]
            if own and part in LAYERS and LAYERS.index(part) > LAYERS.index(own):
                upward.append(f"{name} imports {other}")
    assert not upward


def test_the_test_itself_sees_an_import_that_goes_upward(tmp_path):
    (tmp_path / "module.py").write_text("def late():\n    from paam.runs import run\n", "utf-8")
    assert imports(tmp_path / "module.py") == {"runs", "runs.run"}


def test_no_module_is_longer_than_one_idea():
    too_long = {
        name: lines for name, path in modules().items() if (lines := len(path.read_text().splitlines())) > LONGEST
    }
    assert not too_long


@pytest.mark.parametrize("package", ["errors", "files.reading", "files.durable", "config", "events"])
def test_what_is_light_imports_no_torch(package):
    names = [f"paam.{name}" for name in modules() if name == package or name.startswith(f"{package}.")]
    script = f"import sys, importlib; [importlib.import_module(n) for n in {names!r}]; sys.exit('torch' in sys.modules)"
    assert names
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
