"""Seconds per epoch of every phase, side by side in one process, and a breakdown of a step's time.

    python benchmarks/epoch_time.py [--scorers kq,vanilla] [--modes loader,plain,captured,compiled,fused] [--profile]

loader     the naive baseline: a DataLoader with workers, an eager loop in bfloat16, nothing of paam's engine;
           the dense network, the score phase and the weight phase by paam.Pruner (fewer steps, scaled to an epoch)
plain      paam's engine with capture and compilation off
captured   one CUDA graph for the step
compiled   the same with torch.compile
fused      the same with paam's own kernels

Data are random images of CIFAR-10's shape: only time is measured. Epochs are timed after the set-up of their phase, and
the median of three is shown, without the evaluation. Modes fine-tune the pruned network inside the dense one, as the
recipes for CIFAR-10 do (train.masked); the loader fine-tunes the compacted one. With fused kernels and KQ there are
further variants: compacted, with widths rounded to multiples of 8, also with tied streams, and inside the dense network
with a teacher.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from paam.config.recipe import recipe_from_tree
from paam.data import Augmentation, Split
from paam.data.batches import Normalization, TrainingBatches
from paam.methods import phases_of
from paam.models import build_model
from paam.pruning.pruner import Pruner
from paam.runs.environment import environment
from paam.train.engine import Engine
from paam.train.phase import place_of, total_epochs

MODES = {
    "plain": {"capture": False, "compile": False, "fused": False, "masked": True},
    "captured": {"capture": True, "compile": False, "fused": False, "masked": True},
    "compiled": {"capture": True, "compile": True, "fused": False, "masked": True},
    "fused": {"capture": True, "compile": False, "fused": True, "masked": True},
}
FINETUNES: dict[str, dict[str, dict[str, Any]]] = {
    "finetune compact": {"train": {"masked": False}},
    "finetune compact, steps of 8": {"train": {"masked": False}, "target": {"keep_macs": 0.5, "round_to": 8}},
    "finetune compact, tied, steps of 8": {
        "train": {"masked": False},
        "target": {"keep_macs": 0.5, "round_to": 8},
        "prune": {"streams": "tied"},
    },
    "finetune inside, taught": {"distill": {"weight": 0.7}},
}
BATCH = 256
TIMED = 4
"""Epochs of each phase: the first sets it up, its time is the median of the others."""
SETTLING = 10
"""Steps of the loader before the clock starts: by then autotuning and the workers' start are over."""
LEAST_SAMPLES = BATCH * (SETTLING + 1)


def random_split(samples: int) -> Split:
    torch.manual_seed(0)
    images = torch.randint(0, 256, (samples, 3, 32, 32), dtype=torch.uint8)
    return Split(images, torch.randint(0, 10, (samples,)))


SHORT = {"warmup": 0, "score": 1, "weight": 1}
"""A schedule for benchmarks of the fine-tune."""


def make_engine(options: argparse.Namespace, scorer: str, tree: dict[str, dict[str, Any]]) -> Engine:
    """An engine on random images; ``tree``: sections of its recipe, which override the defaults here."""
    sections: dict[str, dict[str, Any]] = {
        "model": {"name": options.model},
        "prune": {"scorer": scorer},
        "target": {"keep_macs": 0.5},
        "schedule": {"warmup": TIMED, "cycles": 1, "score": TIMED, "weight": TIMED, "finetune": TIMED},
    }
    for section, values in tree.items():
        sections[section] = {**sections.get(section, {}), **values}
    recipe = recipe_from_tree(sections)
    batches = TrainingBatches(
        random_split(options.samples),
        Normalization((0.5,) * 3, (0.25,) * 3),
        Augmentation(crop=4, flip=True),
        batch_size=BATCH,
        classes=10,
        seed=0,
        device=options.device,
    )
    model = build_model(options.model, num_classes=10, in_channels=3).to(options.device)
    model = model.to(memory_format=torch.channels_last)
    example = torch.zeros(1, 3, 32, 32, device=options.device)
    settings = {key: value for key, value in sections["prune"].items() if key != "scorer"}
    pruner = Pruner(model, example, inplace=True, scorer=scorer, score_lr=recipe.score.lr, **settings)
    return Engine(pruner, recipe, phases_of(recipe), batches, seed=0, emit=lambda event: None)


def time_phases(engine: Engine, device: str, profiled: list[str] | None = None) -> dict[str, float]:
    """Median seconds per epoch of each phase; its first epoch includes the set-up and is reported separately.

    ``profiled``: list that receives the kernels of a step of each phase, as lines.
    """
    seconds: dict[str, list[float]] = {}
    for epoch in range(total_epochs(engine.phases)):
        place = place_of(engine.phases, epoch)
        phase = place.phase
        start = time.perf_counter()
        engine.run_epoch(epoch, None)
        wait(device)
        key = f"{phase.name} set-up" if place.first else phase.name
        seconds.setdefault(key, []).append(time.perf_counter() - start)
        if profiled is not None and len(seconds[key]) == TIMED - 1:  # after the last timed epoch of the phase
            profiled += profile(engine, phase.name)
    return {key: median(times) for key, times in seconds.items()}


class PlainImages(Dataset[tuple[Tensor, int]]):
    """Crops and flips one image at a time, as a DataLoader's worker does."""

    def __init__(self, split: Split) -> None:
        assert isinstance(split.images, Tensor)
        self.images, self.labels = F.pad(split.images, (4,) * 4), split.labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        top, left = torch.randint(0, 9, (2,)).tolist()
        image = self.images[place, :, top : top + 32, left : left + 32]
        image = image.flip(2) if torch.rand(()) < 0.5 else image
        return (image.float() / 255 - 0.5) / 0.25, int(self.labels[place])


def time_loader(options: argparse.Namespace, scorer: str, steps: int = 40) -> dict[str, float]:
    """The usual loop around a Pruner, in the phases that apply; seconds per epoch, from ``steps`` of them."""
    device = options.device
    model = build_model(options.model, num_classes=10, in_channels=3).to(device).to(memory_format=torch.channels_last)
    pruner = Pruner(model, torch.zeros(1, 3, 32, 32, device=device), inplace=True, scorer=scorer)
    loader = DataLoader(
        PlainImages(random_split(options.samples)), BATCH, shuffle=True, drop_last=True, num_workers=8, pin_memory=True
    )
    steps = min(steps, len(loader) - SETTLING)
    network = torch.optim.SGD(pruner.network_parameters(), 0.1, momentum=0.9, weight_decay=5e-4)
    assert pruner.optimizer is not None

    def epoch(model: nn.Module, optimizer: torch.optim.Optimizer, penalty: Callable[[], Tensor] | None = None) -> float:
        start = 0.0
        for done, (images, labels) in enumerate(loader, 1):
            images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
            labels = labels.to(device, non_blocking=True)
            optimizer.zero_grad()
            with torch.autocast(torch.device(device).type, torch.bfloat16):
                loss = F.cross_entropy(model(images), labels)
            loss = loss + penalty() if penalty else loss
            loss.backward()
            optimizer.step()
            if done == SETTLING:
                wait(device)
                start = time.perf_counter()
            if done == SETTLING + steps:
                break
        wait(device)
        return (time.perf_counter() - start) / steps * len(loader)

    seconds = {}
    with pruner.dense():
        seconds["warmup"] = epoch(pruner.model, network)
    with pruner.scoring():
        seconds["score"] = epoch(pruner.model, pruner.optimizer, pruner.penalty)
    with pruner.weighting(keep_macs=0.5):
        seconds["weight"] = epoch(pruner.model, network)
    small = pruner.compact().train()
    seconds["finetune"] = epoch(small, torch.optim.SGD(small.parameters(), 0.1, momentum=0.9, weight_decay=5e-4))
    return seconds


def profile(engine: Engine, phase: str) -> list[str]:
    """Kernels of one replayed step by kind: milliseconds and count."""
    step = engine.steps[phase]
    batch = next(iter(engine.batches.epoch(0)))
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as seen:
        for _ in range(5):
            step(*batch)
        torch.cuda.synchronize()
    kinds: dict[str, tuple[float, int]] = {}
    for event in seen.key_averages():
        kind = kind_of(event.key)
        time_ms, count = kinds.get(kind, (0.0, 0))
        kinds[kind] = (time_ms + event.device_time_total / 5000, count + event.count // 5)
    total = sum(time_ms for time_ms, _ in kinds.values())
    lines = [f"{phase}: {total:.2f} ms in {sum(n for _, n in kinds.values())} kernels"]
    for kind, (time_ms, count) in sorted(kinds.items(), key=lambda item: -item[1][0])[:9]:
        lines.append(f"  {time_ms:6.3f} ms  {count:5d}  {kind}")
    return lines


OURS = {
    "_convolve": "ours, convolution",
    "_weight_partial": "ours, weight gradient",
    "_sum_parts": "ours, weight gradient",
    "_statistics": "ours, norm forward",
    "_forward": "ours, norm forward",
    "_backward_sums": "ours, norm backward",
    "_backward": "ours, norm backward",
}
KINDS = {
    "convolution, weight gradient": ("wgrad",),
    "convolution, input gradient": ("dgrad",),
    "convolution, forward": ("fprop", "implicit_gemm", "convolve", "xmma", "cutlass"),
    "batch norm (eager)": ("batch_norm", "bn_fw", "bn_bw"),
    "fused by the compiler": ("triton",),
    "optimiser and gradients together": ("multi_tensor", "FusedSgd", "FusedAdam", "fused"),
    "copies": ("Memcpy", "copy", "Memset", "CatArray"),
    "element-wise": ("elementwise", "reduce"),
}


def kind_of(kernel: str) -> str:
    """The purpose of a kernel by its name: our kernels by full name, others by a substring."""
    theirs = (kind for kind, parts in KINDS.items() if any(part in kernel for part in parts))
    return OURS.get(kernel) or next(theirs, kernel[:70])


def wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet56")
    parser.add_argument("--scorers", default="kq,vanilla")
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--modes", default="loader,plain,captured,compiled,fused")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    if "loader" in options.modes and options.samples < LEAST_SAMPLES:
        parser.error(
            f"the loader is timed behind its first {SETTLING} steps: --samples takes at least {LEAST_SAMPLES}."
        )
    torch.backends.cudnn.benchmark = True
    print(json.dumps({**environment(options.device), **vars(options)}))
    for scorer in options.scorers.split(","):
        usual: dict[str, float] = {}
        for name in options.modes.split(","):
            if name == "loader":
                usual = time_loader(options, scorer)
                _show(scorer, name, usual)
                continue
            tree: dict[str, dict[str, Any]] = {"train": MODES[name]}
            if name == "compiled":  # warm-up is the weight phase without gates; compiling it too would only take time
                tree["schedule"] = {"warmup": 0}
            engine = make_engine(options, scorer, tree)
            profiled: list[str] | None = [] if options.profile and name != "plain" else None
            seconds = time_phases(engine, options.device, profiled)
            _show(scorer, name, seconds)
            if usual:
                faster = {key: usual[key] / seconds[key] for key in usual if key in seconds}
                _show(scorer, f"{name}: times as fast", faster)
            print("".join(f"{line}\n" for line in profiled or ()), end="", flush=True)
            if name == "fused" and scorer == "kq":
                for label, changes in FINETUNES.items():
                    tree = {**changes, "schedule": SHORT, "train": {**MODES[name], **changes.get("train", {})}}
                    seconds = time_phases(make_engine(options, scorer, tree), options.device)
                    _show(scorer, label, {key: value for key, value in seconds.items() if "finetune" in key})


def _show(scorer: str, name: str, seconds: dict[str, float]) -> None:
    print(f"{scorer:8} {name:36}", "  ".join(f"{key} {value:.2f}" for key, value in seconds.items()), flush=True)


if __name__ == "__main__":
    main()
