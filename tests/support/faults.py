"""A fault at every file operation of short runs, saves, exports and reports: only unflushed data may be lost.

Each operation has a number. Before it, the process is killed (for a write, also halfway through); power is lost, in the
three ways of faulty/disk.py; or the operation fails once, as on a broken or full disk, or without memory.

python tests/support/faults.py                                   # all cases
python tests/support/faults.py --sample 250                      # some of each kind, drawn by --seed
python tests/support/faults.py --only "prune/strict/17"          # one case
"""

from __future__ import annotations

import argparse
import os
import pickle
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch

from faulty.disk import CUTS, Disk
from faulty.files import Exported, Reported, Saved
from faulty.operations import CHANGING, ERRORS, Fault, Operation
from faulty.processes import Ended, forked, load_modules
from faulty.scenarios import Overwritten, Result, Resumed, Run, Scenario

WRONG = "WRONG"


@dataclass(frozen=True)
class Case:
    scenario: str
    fault: str
    number: int

    def __str__(self) -> str:
        return f"{self.scenario}/{self.fault}/{self.number}"


class Faults:
    """The scenarios, each recorded once without a fault."""

    def __init__(self, work: Path, only: Sequence[type[Scenario]] = ()) -> None:
        os.environ["PAAM_COMMIT"] = "unknown"  # do not run git
        run = Run(work)
        for seed in (0, 1):
            folder = work / f"seed-{seed}"
            run.lay(folder)
            ended = forked(lambda seed=seed: run.paam(f"--seed={seed}"), folder, watched=not seed)
            assert ended.code == 0, ended.said
            load_modules(ended.modules)
        runs: list[Run] = [run, Resumed(work), Overwritten(work)]
        for one in runs:
            one.result = Result.of(work / "seed-0" / "run")
        every: list[Scenario] = [*runs, Saved(run), Exported(run), Reported(run)]
        every = [scenario for scenario in every if not only or type(scenario) in only]
        self.work = work
        self.scenarios = {scenario.name: scenario for scenario in every}
        self.operations = {scenario.name: self._recorded(scenario) for scenario in every}

    def _recorded(self, scenario: Scenario) -> list[Operation]:
        folder = self.work / "recorded"
        scenario.lay(folder)
        ended = forked(scenario.act, folder, watched=True)
        assert ended.code == 0, ended.said
        assert not ended.unseen, ended.unseen
        assert scenario.judge(folder, ended, ended.operations) == "unhurt"
        shutil.rmtree(folder)
        return ended.operations

    def cases(self) -> list[Case]:
        found = []
        for name, operations in self.operations.items():
            for number, operation in enumerate(operations):
                kinds = [*ERRORS]
                if operation.kind in CHANGING:
                    kinds += ["kill", *CUTS, *(["half"] if len(operation.data) > 1 else [])]
                found += [Case(name, kind, number) for kind in kinds]
            found += [Case(name, cut, len(operations)) for cut in CUTS]  # after the last operation
        return found

    def verdict(self, case: Case) -> str:
        """The outcome of a fault, in a word or two."""
        scenario, operations = self.scenarios[case.scenario], self.operations[case.scenario]
        before = operations[: case.number]
        folder = Path(tempfile.mkdtemp(dir=self.work)) / "here"
        try:
            scenario.lay(folder)
            ended: Ended | None = None
            if case.fault in CUTS:
                disk = Disk(folder)
                for operation in before:
                    disk.follow(operation)
                shutil.rmtree(folder)
                disk.after(case.fault, Random(str(case)), folder)
            else:
                ended = forked(scenario.act, folder, Fault(case.fault, case.number))
                killed = case.fault in ("kill", "half")
                assert (ended.code == -9) == killed, f"exit code {ended.code}: {ended.said[-2000:]}"
            return scenario.judge(folder, ended, before)
        except Exception as error:
            what = operations[case.number] if case.number < len(operations) else "the end"
            return f"{WRONG}: {case} ({what}): {type(error).__name__} {error}"
        finally:
            shutil.rmtree(folder.parent)


def verdicts(faults: Faults, cases: Sequence[Case], jobs: int) -> Iterator[tuple[Case, str]]:
    """The verdicts of all cases, each run in a separate fork, with ``jobs`` in parallel."""
    waiting, running = list(reversed(cases)), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            case = waiting.pop()
            reading, writing = os.pipe()
            child = os.fork()
            if not child:
                os.write(writing, pickle.dumps(faults.verdict(case))[:60_000])
                os._exit(0)
            os.close(writing)
            running[child] = case, reading
        child, _ = os.wait()
        case, reading = running.pop(child)
        with os.fdopen(reading, "rb") as pipe:
            content = pipe.read()
        yield case, pickle.loads(content) if content else f"{WRONG}: {case}: it was not judged"


def sampled(cases: Sequence[Case], count: int, seed: int) -> list[Case]:
    """The same number of each scenario and fault, in random order."""
    random = Random(seed)
    mixed = random.sample(cases, len(cases))
    places: Counter[tuple[str, str]] = Counter()
    rank = {}
    for case in mixed:
        places[case.scenario, case.fault] += 1
        rank[case] = places[case.scenario, case.fault]
    return sorted(mixed, key=rank.__getitem__)[:count]


def table(faults: Faults, found: Sequence[tuple[Case, str]]) -> str:
    """Cases by scenario, kind of fault and outcome."""
    came: dict[tuple[str, str], Counter[str]] = {}
    for case, verdict in found:
        came.setdefault((case.scenario, case.fault), Counter())[verdict.partition(":")[0]] += 1
    lines = []
    for name, operations in faults.operations.items():
        kinds = Counter(operation.kind for operation in operations)
        told = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        lines.append(f"{name}: {len(operations)} operations ({told})")
        for (scenario, fault), counts in came.items():
            if scenario == name:
                results = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
                lines.append(f"  {fault:7} {counts.total():5} cases: {results}")
    wrong = sum(verdict.startswith(WRONG) for _, verdict in found)
    return "\n".join([*lines, f"{len(found)} cases, {wrong} of them wrong", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, help="so many cases, of all kinds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="one case, as this script names it")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the table to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    start, found = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as work:
        faults = Faults(Path(work).resolve())
        cases = faults.cases()
        if options.only:
            cases = [case for case in cases if str(case) == options.only]
        elif options.sample:
            cases = sampled(cases, options.sample, options.seed)
        for case, verdict in verdicts(faults, cases, options.jobs):
            found.append((case, verdict))
            if verdict.startswith(WRONG):
                sys.stdout.write(f"{verdict}\n")
                sys.stdout.flush()
            if len(found) % 100 == 0:
                sys.stderr.write(f"{len(found)} of {len(cases)} after {time.perf_counter() - start:.0f} s\n")
        found.sort(key=lambda pair: cases.index(pair[0]) if options.only else str(pair[0]))
        text = table(faults, found)
    sys.stdout.write(f"{text}{time.perf_counter() - start:.0f} s\n")
    if options.out:
        options.out.write_text(text, "utf-8")
    sys.exit(any(verdict.startswith(WRONG) for _, verdict in found))


if __name__ == "__main__":
    main()
