"""Is the cost of pruning linear in depth? CIFAR ResNets from 20 to 1001 layers, independent streams.

    python benchmarks/depth.py

Per network: seconds to trace and attach gates, to select a MAC budget, to compact; the last column divides their sum by
the number of layers. Basic blocks allow 6 n + 2 layers: 1004 is in place of the ResNet-1001 of bottleneck blocks.
"""

from __future__ import annotations

import json
import time

import torch

from paam import Pruner
from paam.models import CifarResNet
from paam.runs.environment import environment

DEPTHS = (20, 56, 110, 218, 506, 1004)


def main() -> None:
    torch.set_num_threads(1)
    example = torch.zeros(1, 3, 32, 32)
    print(json.dumps(environment("cpu")))
    print(f"{'layers':>8}{'attach':>9}{'select':>9}{'compact':>9}{'sum':>9}{'ms per layer':>14}")
    measure(20, example)  # warm-up
    for depth in DEPTHS:
        times = measure(depth, example)
        total = sum(times)
        print(
            f"{depth:>8}" + "".join(f"{t:>9.3f}" for t in (*times, total)) + f"{1e3 * total / depth:>14.2f}", flush=True
        )


def measure(depth: int, example: torch.Tensor) -> list[float]:
    model = CifarResNet(depth)
    start = time.perf_counter()
    pruner = Pruner(model, example, scorer="free", inplace=True)
    attached = time.perf_counter()
    pruner.select(keep_macs=0.5)
    selected = time.perf_counter()
    pruner.compact()
    return [attached - start, selected - attached, time.perf_counter() - selected]


if __name__ == "__main__":
    main()
