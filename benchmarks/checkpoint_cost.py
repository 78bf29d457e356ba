"""What checkpoints cost: epochs of ResNet-56 with one behind every epoch, against the same epochs without.

    python benchmarks/checkpoint_cost.py [--scorer kq] [--phase weight] [--samples 50000] [--device cuda] [--epochs 20]

Data are random images of CIFAR-10's shape: only time is measured. Epochs that begin with a checkpoint and epochs
without one take turns in one process. "held up" is the time that training waits inside of save(); "share" compares
whole epochs, in which the writing thread also takes its part of the processor. Files go to --out, by default the
folder for temporary ones.
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
from paam.record import environment
from paam.schedule import phase_at
from paam.train.checkpoint import CheckpointWriter, checkpoints
from paam.train.engine import Engine


def measure(engine: Engine, phase: str, directory: Path) -> None:
    """Print seconds of plain epochs and of epochs that begin with a checkpoint, taking turns."""
    schedule = engine.recipe.schedule
    plain: list[float] = []
    saving: list[float] = []
    held_up: list[float] = []
    inside = [epoch for epoch in range(schedule.total) if phase_at(schedule, epoch).name == phase]
    with CheckpointWriter(directory) as saver:
        for epoch in range(inside[-1] + 1):
            start = time.perf_counter()
            saves = epoch in inside[3:] and (epoch - inside[0]) % 2 == 0
            if saves:
                saver.save((epoch, 0), *engine.state(epoch))
                held_up.append(time.perf_counter() - start)
            engine.run_epoch(epoch, None)
            if epoch in inside[3:]:  # the first ones set the phase up
                (saving if saves else plain).append(time.perf_counter() - start)
            if saves:
                saver.finish()
    size = checkpoints(directory)[0].stat().st_size
    base, cost = statistics.median(plain), statistics.median(saving)
    print(f"checkpoint {size / 1e6:.1f} MB, {len(saving)} of them; epoch {base:.3f} s, with a checkpoint {cost:.3f} s")
    wait = statistics.median(held_up)
    print(f"held up {1000 * wait:.1f} ms = {100 * wait / base:.2f} % of an epoch")
    more = [100 * (with_one - without) / base for without, with_one in zip(plain, saving, strict=True)]
    error = statistics.stdev(more) / len(more) ** 0.5
    print(
        f"share {statistics.fmean(more):+.2f} +- {error:.2f} % of an epoch (mean of neighbours' differences, its error)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet56")
    parser.add_argument("--scorer", default="kq")
    parser.add_argument("--phase", default="weight", choices=["warmup", "score", "weight", "finetune"])
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--epochs", type=int, default=20, help="epochs with a checkpoint, and as many without")
    parser.add_argument("--out", type=Path, help="where the checkpoints go")
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    print(json.dumps({**environment(options.device), **vars(options)}, default=str))
    with tempfile.TemporaryDirectory(dir=options.out) as directory:
        engine = make_engine(options, options.scorer, {"schedule": {options.phase: 2 * options.epochs + 3}})
        measure(engine, options.phase, Path(directory))


if __name__ == "__main__":
    main()
