"""Overhead of checkpoints: epochs of ResNet-56 with one before every epoch, against the same epochs without.

    python benchmarks/checkpoint_cost.py [--scorer kq] [--phase weight] [--samples 50000] [--device cuda] [--epochs 20]

Data are random images of CIFAR-10's shape: only time is measured. Four ways alternate in one process: no checkpoint,
only the copy of the state in memory, a file written immediately, and a file written after a short delay, as paam does.
"held up" is the time before the epoch begins; "share" compares whole epochs, including the end of the write, during
which the writing thread also uses the processor. Files go to --out, by default the folder for temporary files.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from epoch_time import make_engine
from paam.runs import checkpoint
from paam.runs.environment import environment
from paam.train.engine import Engine
from paam.train.phase import place_of, total_epochs
from paam.train.state import engine_state

DELAYS = {"plain": None, "copy": None, "at once": 0.0, "as paam does": checkpoint.DELAY}
"""Way -> seconds before a file is written; None if none is."""
SET_UP = 3
"""Epochs of a phase that are not measured."""


def measure(engine: Engine, phase: str, directory: Path) -> None:
    """Print seconds of epochs for each way."""
    seconds: dict[str, list[float]] = {way: [] for way in DELAYS}
    held_up: dict[str, list[float]] = {way: [] for way in DELAYS}
    places = [place_of(engine.phases, epoch) for epoch in range(total_epochs(engine.phases))]
    inside = [epoch for epoch, place in enumerate(places) if place.phase.name == phase]
    ways = list(DELAYS)
    with checkpoint.CheckpointWriter(directory) as saver:
        for epoch in range(inside[-1] + 1):
            measured = epoch in inside[SET_UP:]
            way = ways[(epoch - inside[0] - SET_UP) % len(ways)] if measured else "plain"
            delay = DELAYS[way]
            start = time.perf_counter()
            if way == "copy":
                checkpoint.snapshot(engine_state(engine, epoch)[0])
            elif delay is not None:
                checkpoint.DELAY = delay
                saver.save((epoch, 0), *engine_state(engine, epoch))
            begun = time.perf_counter()
            engine.run_epoch(epoch, None)
            saver.finish()
            if measured:
                seconds[way].append(time.perf_counter() - start)
                held_up[way].append(begun - start)
    size = checkpoint.checkpoints(directory)[0].stat().st_size
    base = statistics.median(seconds["plain"])
    print(f"checkpoint {size / 1e6:.1f} MB; epochs of {base:.3f} s, {len(seconds['plain'])} of each way")
    for way in ways[1:]:
        more = [100 * (one - plain) / base for plain, one in zip(seconds["plain"], seconds[way], strict=True)]
        error = statistics.stdev(more) / len(more) ** 0.5
        wait = statistics.median(held_up[way])
        print(
            f"{way:13} held up {1000 * wait:4.1f} ms = {100 * wait / base:.2f} %,"
            f" share {statistics.fmean(more):+.2f} +- {error:.2f} % of an epoch (mean of differences, its error)"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet56")
    parser.add_argument("--scorer", default="kq")
    parser.add_argument("--phase", default="weight", choices=["warmup", "score", "weight", "finetune"])
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--epochs", type=int, default=20, help="epochs of each way")
    parser.add_argument("--out", type=Path, help="where the checkpoints go")
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    print(json.dumps({**environment(options.device), **vars(options)}, default=str))
    with tempfile.TemporaryDirectory(dir=options.out) as directory:
        engine = make_engine(
            options, options.scorer, {"schedule": {options.phase: len(DELAYS) * options.epochs + SET_UP}}
        )
        measure(engine, options.phase, Path(directory))


if __name__ == "__main__":
    main()
