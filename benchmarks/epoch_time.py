"""Seconds per epoch of every phase: plain eager, captured in a CUDA graph, captured and compiled; one process, one run.

    python benchmarks/epoch_time.py [--model resnet56] [--scorer kq] [--samples 50000] [--device cuda]

Data are random images of CIFAR-10's shape: only time is measured. An epoch is timed once its phase has been set up.
"""

from __future__ import annotations

import argparse
import json
import time

import torch

from paam.data import Split
from paam.models import build_model
from paam.pruner import Pruner
from paam.recipe import recipe_from_tree
from paam.record import environment
from paam.schedule import phase_at
from paam.train.batches import Normalization, TrainingBatches
from paam.train.engine import Engine

MODES = {
    "plain": {"capture": False, "compile": False},
    "captured": {"capture": True, "compile": False},
    "captured + compiled": {"capture": True, "compile": True},
}


def time_phases(mode: dict[str, bool], options: argparse.Namespace) -> dict[str, float]:
    """Seconds of the second epoch of each phase; the first one pays for the set-up and is reported as its own."""
    tree = {
        "model": {"name": options.model},
        "prune": {"scorer": options.scorer},
        "target": {"keep_macs": 0.5},
        "schedule": {"warmup": 2, "cycles": 1, "score": 2, "weight": 2, "finetune": 2},
        "train": mode,
    }
    recipe = recipe_from_tree(tree)
    torch.manual_seed(0)
    images = torch.randint(0, 256, (options.samples, 3, 32, 32), dtype=torch.uint8)
    split = Split(images, torch.randint(0, 10, (options.samples,)))
    normalize = Normalization((0.5,) * 3, (0.25,) * 3)
    batches = TrainingBatches(split, normalize, batch_size=256, crop=4, flip=True, seed=0, device=options.device)
    model = build_model(options.model, num_classes=10, in_channels=3).to(options.device)
    model = model.to(memory_format=torch.channels_last)
    example = torch.zeros(1, 3, 32, 32, device=options.device)
    pruner = Pruner(model, example, inplace=True, scorer=options.scorer, score_lr=recipe.score_lr)
    engine = Engine(pruner, recipe, batches, seed=0, emit=lambda event: None)
    seconds: dict[str, float] = {}
    for epoch in range(recipe.schedule.total):
        phase = phase_at(recipe.schedule, epoch)
        start = time.perf_counter()
        engine.run_epoch(epoch, None)
        key = f"{phase.name} set-up" if phase.first else phase.name
        seconds[key] = time.perf_counter() - start
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet56")
    parser.add_argument("--scorer", default="kq")
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--modes", default=",".join(MODES))
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    print(json.dumps({**environment(options.device), **vars(options)}))
    for name in options.modes.split(","):
        seconds = time_phases(MODES[name], options)
        print(f"{name:20}", "  ".join(f"{key} {value:.2f}" for key, value in seconds.items()), flush=True)


if __name__ == "__main__":
    main()
