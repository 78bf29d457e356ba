"""A small part of `make fuzz`, with another seed; in a process of its own, because it limits its own memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import paam

FUZZ = Path(__file__).parents[1] / "support" / "fuzz.py"


def test_damaged_input_is_read_or_refused():
    done = subprocess.run(
        [sys.executable, "-W", "error", str(FUZZ), "--count=100", "--seed=1"],
        env={**os.environ, "PYTHONPATH": str(Path(paam.__file__).parents[1]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *kinds, last = done.stdout.splitlines()
    assert len(kinds) == 12
    assert last.startswith("940 inputs")
    for line in kinds:
        assert int(line.split()[3]) > 0, line  # of all kinds, some are refused
