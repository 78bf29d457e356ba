"""Several runs on one GPU: their total epochs per second, against one run alone, measured in one call.

    python benchmarks/sharing.py [--at-once 1,2,3,4] [--epochs 6] [--scorer kq]

Each run is a separate process, as in `paam sweep`, under NVIDIA's MPS if that is installed. Data are random images of
CIFAR-10's shape: only time is measured. Timed are epochs of the fine-tune of our CIFAR-10 recipe, inside the dense
network and with it as teacher, after every run has captured its graph; the evaluation is not included.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from multiprocessing.synchronize import Barrier
from typing import Any

import torch

from epoch_time import SHORT, make_engine, wait
from paam.runs.environment import environment
from paam.runs.sweep import shared_gpu
from paam.train.phase import place_of, total_epochs

TRAINED = {"train": {"masked": True}, "distill": {"weight": 0.7}}
SETTLING = 2
"""Epochs of a fine-tune before the clock starts: the first captures the graph."""
PATIENCE = 600
"""Timeout in seconds, for a run that died."""


def train(options: argparse.Namespace, ready: Barrier, found: Any) -> None:
    """One run: its epochs are timed from when all runs are warmed up until all have finished theirs."""
    torch.backends.cudnn.benchmark = True
    schedule = {**SHORT, "finetune": SETTLING + options.epochs}
    engine = make_engine(options, options.scorer, {**TRAINED, "schedule": schedule})
    total = total_epochs(engine.phases)
    begin = next(e for e in range(total) if place_of(engine.phases, e).phase.name == "finetune")
    for epoch in range(begin + SETTLING):
        engine.run_epoch(epoch, None)
    wait(options.device)
    ready.wait(PATIENCE)
    start = time.perf_counter()
    for epoch in range(begin + SETTLING, total):
        engine.run_epoch(epoch, None)
    wait(options.device)
    found.put(time.perf_counter() - start)


def together(options: argparse.Namespace, count: int) -> list[float]:
    """Seconds that each of ``count`` runs took for its epochs, with a simultaneous start."""
    context = multiprocessing.get_context("spawn")
    ready, found = context.Barrier(count), context.Queue()
    processes = [context.Process(target=train, args=(options, ready, found)) for _ in range(count)]
    for process in processes:
        process.start()
    seconds = [found.get(timeout=PATIENCE) for _ in processes]
    for process in processes:
        process.join()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet56")
    parser.add_argument("--scorer", default="kq")
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--at-once", default="1,2,3,4")
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args()
    counts = [int(number) for number in options.at_once.split(",")]
    if counts[0] != 1:
        parser.error("--at-once begins with 1: one run alone is what the others are compared with.")
    alone = 0.0
    with shared_gpu(options.device.startswith("cuda")) as shared:
        print(json.dumps({**environment(options.device), "mps": shared, **vars(options)}), flush=True)
        for count in counts:
            seconds = together(options, count)
            rate = count * options.epochs / max(seconds)
            alone = alone or rate
            each = sum(seconds) / count / options.epochs
            print(
                f"{count} at once: {each:.2f} s per epoch of each, {1 / rate:.3f} s of the GPU per epoch,"
                f" {rate / alone:.2f} times one at a time",
                flush=True,
            )


if __name__ == "__main__":
    main()
