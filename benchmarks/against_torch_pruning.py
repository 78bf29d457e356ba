"""How long does pruning itself take? paam against torch-pruning 1.6.1 on ten networks, with the same share of filters.

    python benchmarks/against_torch_pruning.py [MODEL ...]

paam: trace and attach gates, plan, compact into a new network. Its checks have separate columns: the additional time of
compact() when it checks its result ("check", with its share of the total), and the comparison of the traced graph with
the model ("recording"). torch-pruning: build the dependency graph, prune in place; heads are not pruned, widths are not
rounded. Both start from a built network and one image of 224 x 224, and alternate on one thread; the table compares
medians of 5 in CPU seconds. Extra memory is the growth of the process' peak above its memory before pruning ResNet-50,
measured in a separate process each.
"""

from __future__ import annotations

import copy
import gc
import json
import math
import statistics
import subprocess
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

from paam import Pruner
from paam.errors import one_line
from paam.graph.checks.recording import sizes_to_hold
from paam.models import build_model
from paam.runs.environment import environment

KEEP = 0.5
REPEATS = 5
CLASSES = 1000
MODELS = (
    *("torchvision:resnet50", "torchvision:mobilenet_v3_large", "timm:tf_efficientnetv2_b0", "timm:gernet_s"),
    *("timm:repvit_m1", "timm:hgnet_tiny", "timm:dla34", "torchvision:densenet121", "torchvision:convnext_tiny"),
    "torchvision:regnet_y_400mf",
)
STREAMS = ("tied", "independent")
THEIRS = "torch-pruning 1.6.1"
PARTS = ("trace", "plan", "compact")
CHECKS = ("check", "recording")


def with_paam(
    model: nn.Module, example: torch.Tensor, seconds: dict[str, float], *, streams: str, check: bool
) -> nn.Module:
    """Every group loses the same share of its filters, as with torch-pruning's uniform ratio."""
    clock = _Clock(seconds)
    pruner = Pruner(model, example, scorer="free", streams=streams, inplace=True, check=False)
    clock.stop("trace")
    pruner.select(keep_filters=KEEP, uniform=True)
    clock.stop("plan")
    small = pruner.compact(check=False)
    clock.stop("compact")
    if check:
        pruner.compact()
        clock.stop("checked")
        sizes_to_hold(pruner.network.traced, pruner.network.ops)
        clock.stop("recording")
        seconds["check"] = seconds.pop("checked") - seconds["compact"]
    return small


def with_torch_pruning(model: nn.Module, example: torch.Tensor, seconds: dict[str, float]) -> nn.Module:
    import torch_pruning

    clock = _Clock(seconds)
    heads = [module for module in model.modules() if isinstance(module, nn.Linear) and module.out_features == CLASSES]
    importance = torch_pruning.importance.MagnitudeImportance(p=1)
    pruner = torch_pruning.pruner.MagnitudePruner(
        model, example, importance=importance, pruning_ratio=1 - KEEP, ignored_layers=heads
    )
    clock.stop("trace")
    pruner.step()
    clock.stop("plan and cut")
    return model


class _Clock:
    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds, self.last = seconds, time.process_time()

    def stop(self, part: str) -> None:
        now = time.process_time()
        self.seconds[part] = now - self.last
        self.last = time.process_time()


Way = Callable[[nn.Module, torch.Tensor, dict[str, float]], nn.Module]
WAYS: dict[str, Way] = {
    THEIRS: with_torch_pruning,
    **{f"paam, {streams}": partial(with_paam, streams=streams, check=True) for streams in STREAMS},
}
MEMORY_WAYS: dict[str, Way] = {
    THEIRS: with_torch_pruning,
    **{f"paam, {streams}": partial(with_paam, streams=streams, check=False) for streams in STREAMS},
    **{f"paam, {streams}, checked": partial(with_paam, streams=streams, check=True) for streams in STREAMS},
}


def build(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = build_model(name, num_classes=CLASSES, in_channels=3)
    return model.eval(), torch.randn(1, 3, 224, 224)


class Measured:
    """One network: CPU seconds of each step of each way, errors, parameters left."""

    def __init__(self, name: str) -> None:
        self.name = name.partition(":")[2]
        model, self.example = build(name)
        self.turns: dict[str, list[dict[str, float]]] = defaultdict(list)
        self.wrong: dict[str, str] = {}
        self.left: dict[str, float] = {}
        dense = sum(p.numel() for p in model.parameters())
        for turn in range(REPEATS + 1):  # the first turn warms up
            for way in WAYS:
                found = {} if way in self.wrong else self._turn(way, copy.deepcopy(model), dense)
                if turn and found:
                    self.turns[way].append(found)

    def _turn(self, way: str, model: nn.Module, dense: int) -> dict[str, float]:
        seconds: dict[str, float] = {}
        gc.collect()
        try:
            small = WAYS[way](model, self.example, seconds)
            with torch.no_grad():
                small.eval()(self.example)
        except Exception as error:  # any error of either library: reported in the table
            self.wrong[way] = f"{type(error).__name__}: {one_line(error)}"
        self.left[way] = sum(p.numel() for p in small.parameters()) / dense if way not in self.wrong else math.nan
        return seconds

    def total(self, way: str) -> float:
        """Median seconds in total, without the checks."""
        totals = [sum(value for part, value in turn.items() if part not in CHECKS) for turn in self.turns[way]]
        return statistics.median(totals) if totals else math.nan

    def part(self, way: str, part: str) -> float:
        parts = [turn[part] for turn in self.turns[way] if part in turn]
        return statistics.median(parts) if parts else math.nan

    def ratio(self, streams: str) -> float:
        return self.total(f"paam, {streams}") / self.total(THEIRS)


def extra_memory(way: str) -> float:
    """MiB by which one pruning raises the process' peak, after one forward pass as warm-up."""
    command = [sys.executable, __file__, "--memory", way]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def _measure_memory(way: str) -> None:
    model, example = build(MODELS[0])
    with torch.no_grad():
        model(example)
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak (Linux)
    before = _memory("VmRSS")
    MEMORY_WAYS[way](model, example, {})
    print((_memory("VmHWM") - before) / 1024)


def _memory(what: str) -> int:
    """KiB of this process: VmRSS is current, VmHWM the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{what}:"))


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch-pruning warns about parameters that belong to no layer
    if "--memory" in sys.argv:
        _measure_memory(sys.argv[sys.argv.index("--memory") + 1])
        return
    names = sys.argv[1:] or MODELS
    print(json.dumps({**environment("cpu"), "threads": torch.get_num_threads(), "keep": KEEP, "repeats": REPEATS}))
    print("CPU seconds, medians; left: share of the parameters; share: of paam's total that the check takes\n")
    heads = "".join(f"{part:>10}" for part in (*PARTS, "total", "ratio", "left", "check", "share", "recording"))
    print(f"{'':20}{'torch-pruning':>15}{'left':>6}  {'streams':12}{heads}")
    found = []
    for name in names:
        found.append(measured := Measured(name))
        for streams in STREAMS:
            _print_line(measured, streams)
    for streams in STREAMS:
        ratios = [ratio for measured in found if not math.isnan(ratio := measured.ratio(streams))]
        mean = math.exp(statistics.fmean(map(math.log, ratios))) if ratios else math.nan
        print(f"{streams}: geometric mean {mean:.2f}, largest {max(ratios, default=math.nan):.2f}")
    print("\nextra memory on resnet50, MiB: " + "; ".join(f"{way} {extra_memory(way):.0f}" for way in MEMORY_WAYS))


def _print_line(measured: Measured, streams: str) -> None:
    first, way = streams == STREAMS[0], f"paam, {streams}"
    theirs = f"{measured.total(THEIRS):>15.3f}{measured.left[THEIRS]:>6.2f}" if first else " " * 21
    total, check, recording = measured.total(way), *(measured.part(way, part) for part in CHECKS)
    parts = "".join(f"{measured.part(way, part):>10.3f}" for part in PARTS)
    ratio = f"{measured.ratio(streams):>10.2f}{measured.left[way]:>10.2f}"
    print(f"{measured.name if first else '':20}{theirs}  {streams:12}{parts}{total:>10.3f}{ratio}", end="")
    print(f"{check:>10.3f}{check / total:>10.2f}{recording:>10.3f}", flush=True)
    for who in (THEIRS, way) if first else (way,):
        if who in measured.wrong:
            print(f"    {who} fails: {measured.wrong[who]}", flush=True)


if __name__ == "__main__":
    main()
