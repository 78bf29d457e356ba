"""How fast do read-only commands respond? Wall and CPU time of whole processes, against an empty one.

    python benchmarks/startup.py [--repeats 15]

All commands alternate, so that they see the same load; the first round, which fills caches, does not count. "over" is
the difference of medians to `python -c pass`. Records are those under results/. CPU time is about what an idle machine
would need; wall time is larger if other processes compute.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from paam.runs.environment import environment

ROOT = Path(__file__).parents[1]
COMMANDS = {
    "paam --version": ["--version"],
    "paam --help": ["--help"],
    "paam prune --help": ["prune", "--help"],
    "paam recipes": ["recipes"],
    "paam runs results/strong": ["runs", "results/strong"],
    "paam runs results": ["runs", "results"],
    "paam watch results/demo": ["watch", "results/demo"],
    "paam report results/demo": ["report", "results/demo", "-o"],
}


def seconds(command: list[str]) -> tuple[float, float]:
    """Wall time and CPU time of a process."""
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{command} failed")
    return time.perf_counter() - start, used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    print(json.dumps({**environment("cpu"), "repeats": repeats}))
    with tempfile.TemporaryDirectory() as folder:
        page = str(Path(folder) / "page.html")
        commands = {"python -c pass": [sys.executable, "-c", "pass"]}
        for name, arguments in COMMANDS.items():
            commands[name] = [sys.executable, "-m", "paam", *arguments, *([page] if arguments[-1] == "-o" else [])]
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        for turn in range(repeats + 1):
            for name, command in commands.items():
                taken = seconds(command)
                if turn:
                    times[name].append(taken)
    empty = [statistics.median(column) for column in zip(*times["python -c pass"], strict=True)]
    for name, taken in times.items():
        wall, cpu = zip(*taken, strict=True)
        low, median, high = statistics.quantiles(wall, n=4)
        over, busy = median - empty[0], statistics.median(cpu) - empty[1]
        print(f"{name:26} wall {median:.3f} s ({low:.3f} to {high:.3f}), over {over:.3f} s   CPU over {busy:.3f} s")


if __name__ == "__main__":
    main()
