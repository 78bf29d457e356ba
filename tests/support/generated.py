"""Random networks, pruned at random: each is exact to 1e-9, or refused by the library, and never anything else.

python tests/support/generated.py 17                       # one seed: its source, plan and outcome, minimised
python tests/support/generated.py --count 20000 --jobs 2 --out FILE
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from generator.check import EXACT, REFUSED, Outcome, check
from generator.drawing import VOCABULARY
from generator.generating import generate
from generator.shrink import shrunk
from generator.table import by_word, table


def outcome_of(seed: int) -> Outcome:
    torch.set_num_threads(1)
    program, network = generate(seed)
    return check(program, network, seed)


def report(seed: int) -> str:
    """A report on one seed: the network, minimised if it fails, and how to rerun it."""
    program, network = generate(seed)
    outcome = check(program, network, seed)
    text = [f"seed {seed}: {outcome.verdict} {outcome.reason}", outcome.plan, "", program.source()]
    if outcome.verdict != EXACT:
        smaller, found = shrunk(program, outcome)
        text += ["---- shrunk", "", f"{found.verdict} {found.reason}", found.plan, "", smaller.source()]
    text.append(f"python tests/support/generated.py {seed}")
    return "\n".join(text) + "\n"


def outcomes_of(seeds: range, jobs: int) -> Iterator[Outcome]:
    if jobs == 1:
        yield from map(outcome_of, seeds)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(outcome_of, seeds, chunksize=20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", type=int, nargs="*", help="only these, in detail")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the table to this file")
    parser.add_argument("--without", choices=VOCABULARY, nargs="+", default=[], help="words that are not to be drawn")
    parser.add_argument("--words", action="store_true", help="print what became of the networks by word, too")
    parser.add_argument("--list", action="store_true", help="print every seed that is not exact")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.without:
        del VOCABULARY[name]
    for seed in options.seeds:
        sys.stdout.write(report(seed))
    if options.seeds:
        return
    start, found = time.perf_counter(), []
    for outcome in outcomes_of(range(options.start, options.start + options.count), options.jobs):
        found.append(outcome)
        if outcome.verdict not in (EXACT, REFUSED) or (options.list and outcome.verdict != EXACT):
            sys.stdout.write(f"seed {outcome.seed}: {outcome.verdict}: {outcome.reason[:200]}\n")
            sys.stdout.flush()
    text = table(found)
    sys.stdout.write(f"{text}{time.perf_counter() - start:.0f} s\n")
    if options.words:
        sys.stdout.write(by_word(found))
    if options.out:
        command = f"python tests/support/generated.py --start {options.start} --count {options.count}"
        options.out.write_text(f"{command}\n\n{text}")
    sys.exit(any(outcome.verdict not in (EXACT, REFUSED) for outcome in found))


if __name__ == "__main__":
    main()
