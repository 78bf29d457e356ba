"""Mutation testing: one operator of src/paam is changed at a time, and its tests are run.

    python tests/support/mutants.py [--count 200] [--seed 0] [--module flows] [--only graph/flows.py:159] [--sample]
                                    [--jobs 2]

Mutated are the modules in graph/, and pruning/select.py, in a copy of the sources: the working tree is not changed. A
mutant is one source line with another operator, number, bound or condition in it (mutant_places.py). It is noticed if a
test that belongs to its module fails, or times out; tests that never execute the line, according to a first run on
unchanged sources, are skipped. Of the others, the direct ones (DIRECT) run first and then the fastest, for at most 90 s
of their usual time in total: a mutant that passes these survives. Equivalent mutants are listed with the reason in
mutants.equivalent.toml. The script fails if less than 95 % of the mutants are noticed, if one survives without a
reason, and if the list contains a line that no longer exists or a mutant that is noticed.

(Not to be confused with mutations.py, which corrupts files for fuzz.py.)
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import functools
import gc
import importlib.util
import inspect
import itertools
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from types import FrameType
from typing import Any

from mutant_places import Mutant, Places

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "paam"
MODULES = ("graph/**/*.py", "pruning/select.py")
LISTED = Path(__file__).with_suffix(".equivalent.toml")
SURVIVE = 0.05
"""Maximum share of surviving mutants, all of them with a reason."""
SAMPLE = 12

SMALL_NETWORKS = (
    "test_found test_cost_rules test_rules test_operations generated_sample test_traps test_networks test_families"
)
TESTS = {
    "pruning/select.py": "test_selection test_select test_targets",
    "graph/cost.py": "test_cost test_cost_rules test_traps",
    "graph/network.py": f"test_selection {SMALL_NETWORKS} test_pruner test_breadth test_targets",
    "graph/flows.py": f"test_flows {SMALL_NETWORKS}",
    "graph/joins.py": f"test_flows {SMALL_NETWORKS}",
    "graph/shrink.py": f"test_layers_cut {SMALL_NETWORKS} test_exact",
    "graph/path.py": "test_selection test_select",
    "graph/*": (
        f"{SMALL_NETWORKS} test_verify test_unseen test_own_layers test_sizes test_layers_cut test_breadth test_exact"
        " test_pruner test_files test_small_networks"
    ),
}
"""Names of the test files that belong to a module, besides those of DIRECT: each must exist once under tests/."""
DIRECT = (
    *("test_flows", "test_layers_cut", "test_comparing", "test_draws", "test_layer_trials", "test_numbers"),
    *("test_record_parts", "test_graph_parts", "test_rule_parts", "test_settled", "test_trace_parts"),
    "test_cost",
)
"""Fast tests of single functions and classes: they belong to all modules, and run first."""
FAST = "not slow and not crash and not browser and not zoo and not gpu"

WARM = ("torch._dynamo", "torch.utils.flop_counter", "torch.fx", "safetensors.torch", "typer", "rich.console", "jinja2")
"""Slow imports from outside paam, done once before any mutant."""
BUDGET = 90.0
"""Seconds of tests per mutant, by their usual duration."""
SLACK = 30.0
"""Seconds that a mutant may take beyond three times the duration of its tests on unchanged sources."""
ROOM = 8 << 30
"""Memory limit of a mutant in bytes."""


Line = tuple[str, int]
"""Module and line number."""


@dataclass(frozen=True)
class Result:
    """``noticed_by``: the first test that failed, "" if none did."""

    mutant: Mutant
    noticed_by: str
    seconds: float


def drawn(places: Mapping[str, Sequence[Mutant]], count: int, seed: int) -> list[Mutant]:
    """A random sample of ``count`` mutants, spread evenly over the modules as far as possible."""
    shuffled = [random.Random(f"{seed} {name}").sample(found, len(found)) for name, found in places.items()]
    random.Random(seed).shuffle(shuffled)
    rounds = itertools.chain.from_iterable(itertools.zip_longest(*shuffled))
    return list(itertools.islice((mutant for mutant in rounds if mutant is not None), count))


def tests_of(module: str) -> list[str]:
    own = next(names for pattern, names in TESTS.items() if fnmatch(module, pattern)).split()
    return [file_named(name) for name in dict.fromkeys((*DIRECT, *own))]


@functools.cache
def file_named(name: str) -> str:
    """The single file of that name, anywhere under tests/."""
    found = sorted((ROOT / "tests").rglob(f"{name}.py"))
    if len(found) != 1:
        raise SystemExit(f"mutants.py names {name}.py, of which there are {len(found)} under tests/.")
    return found[0].relative_to(ROOT).as_posix()


def file_of(test: str) -> str:
    return test.partition("::")[0]


class Watcher:
    """A pytest plugin: the first test that failed. ``chosen``: the tests to run, in this order; by default all."""

    def __init__(self, chosen: Sequence[str] = ()) -> None:
        self.failed = ""
        self.chosen = {test: place for place, test in enumerate(chosen)}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self.chosen:
            items[:] = sorted((i for i in items if i.nodeid in self.chosen), key=lambda i: self.chosen[i.nodeid])

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid

    pytest_collectreport = pytest_runtest_logreport


class Recorder(Watcher):
    """Also records the seconds of each test, and the lines of paam that it executes."""

    def __init__(self, package: Path) -> None:
        super().__init__()
        self.seconds: Counter[str] = Counter()
        self.lines: defaultdict[str, set[Line]] = defaultdict(set)
        """By test; lines executed in its setup are recorded under its file, since other tests may share the setup."""
        self.test, self.before = "", 0.0
        self.tracers = {str(path): self.tracer(path.relative_to(package).as_posix()) for path in package.rglob("*.py")}
        sys.settrace(self.trace)

    def trace(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        return self.tracers.get(frame.f_code.co_filename)

    def tracer(self, module: str) -> Callable[..., Any]:
        def note(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
            inside = frame.f_code.co_flags & inspect.CO_OPTIMIZED  # in a function: an import executes all other code
            self.lines[self.test if inside else ""].add((module, frame.f_lineno))
            return note

        return note

    def pytest_runtest_logstart(self, nodeid: str, location: object) -> None:
        self.test = file_of(nodeid)
        self.before = time.process_time()  # CPU time: a test is not slow because the machine is busy

    def pytest_runtest_logreport(self, report: Any) -> None:
        super().pytest_runtest_logreport(report)
        now = time.process_time()
        self.seconds[report.nodeid] += now - self.before
        self.before = now
        self.test = report.nodeid

    pytest_collectreport = Watcher.pytest_collectreport


@dataclass(frozen=True)
class Usual:
    """Tests on unchanged sources: the seconds of each, and the lines that each executes."""

    seconds: Mapping[str, float]
    lines: Mapping[str, Container[Line]]

    def tests_for(self, mutant: Mutant) -> list[str]:
        """Tests that execute the changed line, or all of its module's tests if an import executes it: at most BUDGET.

        The direct ones come first, then the fastest.
        """
        line, files = (mutant.module, mutant.number), tests_of(mutant.module)

        def runs(name: str) -> bool:
            return line in self.lines.get(name, ())

        def place(test: str) -> tuple[bool, float]:
            return Path(file_of(test)).stem not in DIRECT, self.seconds[test]

        found = [test for test in self.seconds if file_of(test) in files]
        found = sorted((test for test in found if runs("") or runs(test) or runs(file_of(test))), key=place)
        ends = itertools.accumulate(map(self.seconds.__getitem__, found))
        return [test for test, end in zip(found, ends, strict=True) if end <= BUDGET or test is found[0]]


def warm_up() -> None:
    """Import what children need, except paam: forked children inherit it."""
    os.chdir(ROOT)
    sys.dont_write_bytecode = True
    for name in WARM:
        importlib.import_module(name)
    import torch
    from hypothesis import Phase, settings

    torch.set_num_threads(1)
    # Any failing example is enough: it need not be minimal or reproducible in the next run of the suite.
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("mutants", deadline=None, derandomize=True, database=None, phases=phases)
    gc.freeze()  # children need not garbage-collect what exists already


def fork(folder: Path, files: Sequence[str], chosen: Sequence[str] = ()) -> int:
    """Run tests on the sources in a folder, in a child: those chosen up to the first failure, or all of the files."""
    (folder / "failed").write_text("", "utf-8")
    if child := os.fork():
        return child
    code = 70
    try:
        os.setsid()
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM,) * 2)
        sys.path.insert(0, str(folder))
        os.environ["PYTHONPATH"] = str(folder)
        code = run_tests(folder, files, chosen)
    finally:
        os._exit(code)


def run_tests(folder: Path, files: Sequence[str], chosen: Sequence[str]) -> int:
    import pytest
    import torch

    torch.manual_seed(0)
    watcher = Watcher(chosen) if chosen else Recorder(folder / "paam")
    options = ["--assert=plain", "--tb=short", "-p", "no:cacheprovider", "-p", "no:anyio", "-m", FAST]
    options += ["--hypothesis-profile=mutants", *["-x"] * bool(chosen)]
    code = pytest.main([*options, *files], plugins=[watcher])
    (folder / "failed").write_text(watcher.failed, "utf-8")
    if isinstance(watcher, Recorder):
        sys.settrace(None)
        (folder / "usual").write_bytes(pickle.dumps((dict(watcher.seconds), dict(watcher.lines))))
    return int(code)


class Slot:
    """A copy of the sources, and the child that currently runs tests on it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.child, self.since, self.limit = folder, 0, 0.0, 0.0
        shutil.copytree(PACKAGE, folder / "paam", ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(folder / "paam", quiet=2)

    def usual(self, files: Sequence[str]) -> Usual:
        """Run the tests on unchanged sources; they must pass."""
        if os.waitpid(fork(self.folder, files), 0)[1]:
            raise SystemExit(f"Without any change:\n{(self.folder / 'log').read_text('utf-8')[-4000:]}")
        return Usual(*pickle.loads((self.folder / "usual").read_bytes()))

    def start(self, mutant: Mutant, tests: Sequence[str], limit: float) -> None:
        self.mutant, self.since, self.limit = mutant, time.monotonic(), limit
        self.write(mutant.source[: mutant.start] + mutant.new + mutant.source[mutant.end :])
        self.child = fork(self.folder, sorted(set(map(file_of, tests))), tests)

    def write(self, source: bytes) -> None:
        path = self.folder / "paam" / self.mutant.module
        # Bytecode is validated by the source's size and mtime in seconds, which a mutant may share.
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
        path.write_bytes(source)

    def result(self) -> Result | None:
        """None while the tests are still running."""
        done, status = os.waitpid(self.child, os.WNOHANG)
        if not done and time.monotonic() - self.since < self.limit:
            return None
        if not done:
            status = 1
            self.end()
        self.child = 0
        self.write(self.mutant.source)
        failed = (self.folder / "failed").read_text("utf-8") if done else "it does not end"
        noticed_by = (failed or f"ended with status {status}") if status else ""
        return Result(self.mutant, noticed_by, time.monotonic() - self.since)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.killpg(self.child, signal.SIGKILL)
            os.waitpid(self.child, 0)


def tried(mutants: Sequence[Mutant], jobs: int) -> Iterator[Result]:
    """Run the tests of each mutant, with ``jobs`` mutants in parallel."""
    warm_up()
    with tempfile.TemporaryDirectory(prefix="paam-mutants-") as folder, contextlib.ExitStack() as stack:
        slots = [Slot(Path(folder, str(number))) for number in range(jobs)]
        usual = slots[0].usual(list(dict.fromkeys(name for mutant in mutants for name in tests_of(mutant.module))))
        say(f"The tests take {sum(usual.seconds.values()):.0f} s without any change.\n")
        stack.callback(lambda: [slot.end() for slot in slots if slot.child])
        waiting = list(mutants)
        while waiting or any(slot.child for slot in slots):
            for slot in slots:
                if not slot.child and waiting:
                    tests = usual.tests_for(mutant := waiting.pop(0))
                    if tests:
                        slot.start(mutant, tests, SLACK + 3 * sum(map(usual.seconds.__getitem__, tests)))
                    else:
                        yield Result(mutant, "", 0.0)
                elif slot.child and (result := slot.result()) is not None:
                    yield result
            time.sleep(0.02)


def listed() -> dict[tuple[str, ...], str]:
    """Equivalent mutants, with the reason."""
    entries = tomllib.loads(LISTED.read_text("utf-8")).get("mutant", []) if LISTED.exists() else []
    return {tuple(entry[key] for key in ("module", "where", "line", "becomes")): entry["reason"] for entry in entries}


def table(results: Sequence[Result], reasons: Mapping[tuple[str, ...], str]) -> str:
    rows = [f"\n{'module':26}{'mutants':>8}{'noticed':>9}{'explained':>11}{'survive':>9}{'s each':>8}\n"]
    for name in (*sorted({result.mutant.module for result in results}), ""):
        of_it = [result for result in results if not name or result.mutant.module == name]
        noticed = sum(bool(result.noticed_by) for result in of_it)
        explained = sum(not result.noticed_by and result.mutant.key in reasons for result in of_it)
        each = sum(result.seconds for result in of_it) / max(len(of_it), 1)
        numbers = f"{len(of_it):8}{noticed:9}{explained:11}{len(of_it) - noticed - explained:9}{each:8.1f}"
        rows.append(f"{name or 'all':26}{numbers}\n")
    return "".join(rows)


def say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--module", action="append", help="only modules whose path holds this text, such as flows")
    parser.add_argument("--only", help="all mutants of one line, such as graph/flows.py:159")
    parser.add_argument("--sample", action="store_true", help=f"{SAMPLE} mutants, each of another module")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()

    paths = [path for pattern in MODULES for path in sorted(PACKAGE.glob(pattern))]
    names = [path.relative_to(PACKAGE).as_posix() for path in paths]
    places = {name: Places(name, path.read_bytes()).mutants for name, path in zip(names, paths, strict=True)}
    chosen = {name: found for name, found in places.items() if any(part in name for part in options.module or [""])}
    if options.only:
        mutants = [m for found in places.values() for m in found if f"{m.module}:{m.number}" == options.only]
    else:
        mutants = drawn(chosen, SAMPLE if options.sample else options.count, options.seed)
    if not mutants:
        parser.error("there is nothing to change")
    for name in (*DIRECT, *" ".join(TESTS.values()).split()):
        file_named(name)  # even if none of today's mutants needs it
    say(f"{len(mutants)} of {sum(map(len, chosen.values()))} places in {len(chosen)} modules.\n")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    reasons, results, start = listed(), [], time.monotonic()
    for number, result in enumerate(tried(mutants, options.jobs), 1):
        results.append(result)
        say(f"{number:4}  {result.mutant}\n{'':8}{result.noticed_by or 'SURVIVES'}  ({result.seconds:.1f} s)\n")
    say(table(results, reasons))
    survivors = [result.mutant for result in results if not result.noticed_by]
    for mutant in survivors:
        say(f"\n{mutant}\n{'':8}{reasons.get(mutant.key, 'UNEXPLAINED')}\n")
    there = {mutant.key for found in places.values() for mutant in found}
    problems = [f"is not there: {' | '.join(key)}" for key in reasons if key not in there]
    problems += [f"is noticed: {r.mutant}\n{r.noticed_by}" for r in results if r.noticed_by and r.mutant.key in reasons]
    for problem in problems:
        say(f"\n{LISTED.name} lists what {problem}\n")
    unexplained = sum(mutant.key not in reasons for mutant in survivors)
    say(
        f"\n{len(mutants) - len(survivors)} of {len(mutants)} noticed ({1 - len(survivors) / len(mutants):.1%}),"
        f" {unexplained} survive without a reason, {time.monotonic() - start:.0f} s\n"
    )
    sys.exit(bool(problems) or unexplained > 0 or len(survivors) > max(SURVIVE * len(mutants), 1))


if __name__ == "__main__":
    main()
