"""How long does pruning itself take? paam against torch-pruning 1.6.1 on ResNet-50, the same share of filters.

    python benchmarks/against_torch_pruning.py

paam: trace, attach gates, plan, compact into a new network. torch-pruning: build the dependency graph, prune in place.
Both start from a built network and take turns; the medians of 5 are compared. Extra memory is the growth of the
process' peak above what it held before, each measured in a process of its own.
"""

from __future__ import annotations

import copy
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from paam import Pruner
from paam.models import build_model
from paam.record import environment

KEEP = 0.5
REPEATS = 5


def with_paam(model: nn.Module, example: torch.Tensor, streams: str) -> nn.Module:
    """Uniform scores fall evenly over the layers, as torch-pruning's uniform ratio does."""
    pruner = Pruner(model, example, scorer="free", streams=streams, inplace=True)
    pruner.select(keep_filters=KEEP)
    return pruner.compact()


def with_torch_pruning(model: nn.Module, example: torch.Tensor) -> nn.Module:
    import torch_pruning

    ignored = [module for module in model.modules() if isinstance(module, nn.Linear)]
    importance = torch_pruning.importance.MagnitudeImportance(p=1)
    torch_pruning.pruner.MagnitudePruner(
        model, example, importance=importance, pruning_ratio=1 - KEEP, ignored_layers=ignored
    ).step()
    return model


WAYS: dict[str, Callable[[nn.Module, torch.Tensor], nn.Module]] = {
    "torch-pruning 1.6.1": with_torch_pruning,
    "paam, tied": lambda model, example: with_paam(model, example, "tied"),
    "paam, independent": lambda model, example: with_paam(model, example, "independent"),
}


def build() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return build_model("torchvision:resnet50", num_classes=1000, in_channels=3).eval(), torch.randn(1, 3, 224, 224)


def extra_memory(way: str) -> float:
    """MiB by which one pruning raises the process' peak, after one forward pass has warmed it up."""
    command = [sys.executable, __file__, "--memory", way]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def _measure_memory(way: str) -> None:
    model, example = build()
    with torch.no_grad():
        model(example)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far (Linux)
    before = _memory("VmRSS")
    WAYS[way](model, example)
    print((_memory("VmHWM") - before) / 1024)


def _memory(what: str) -> int:
    """KiB of this process: VmRSS now, VmHWM at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{what}:"))


def main() -> None:
    if "--memory" in sys.argv:
        _measure_memory(sys.argv[sys.argv.index("--memory") + 1])
        return
    model, example = build()
    print(json.dumps({**environment("cpu"), "threads": torch.get_num_threads(), "keep": KEEP, "repeats": REPEATS}))
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    sizes = {}
    for turn in range(REPEATS + 1):  # the first turn warms up
        for name, way in WAYS.items():
            fresh = copy.deepcopy(model)
            start = time.perf_counter()
            small = way(fresh, example)
            if turn:
                times[name].append(time.perf_counter() - start)
            sizes[name] = sum(p.numel() for p in small.parameters())
    base = statistics.median(times["torch-pruning 1.6.1"])
    print(f"{'':22}{'seconds (least to most)':>28}{'ratio':>8}{'extra MiB':>12}{'parameters left':>18}")
    for name, found in times.items():
        middle = statistics.median(found)
        spread = f"{middle:.3f} ({min(found):.3f} to {max(found):.3f})"
        print(f"{name:22}{spread:>28}{middle / base:>8.2f}{extra_memory(name):>12.0f}{sizes[name]:>18,}")


if __name__ == "__main__":
    main()
