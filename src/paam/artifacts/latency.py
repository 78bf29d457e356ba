"""Measure latency and memory of several networks in one process."""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paam.graph.modes import evaluating


@dataclass(frozen=True)
class Latency:
    """Milliseconds per batch: median and quartiles over the passes."""

    median: float
    low: float
    high: float


def measure_latency(
    models: Mapping[str, nn.Module | Callable[..., Any]], example: Tensor, *, repeats: int = 30, warmup: int = 5
) -> dict[str, Latency]:
    """Time several models on one batch, interleaved, so that noise affects all of them alike."""
    times: dict[str, list[float]] = {name: [] for name in models}
    for model in models.values():
        for _ in range(warmup):
            _timed(model, example)
    for _ in range(repeats):
        for name, model in models.items():
            times[name].append(_timed(model, example))
    return {name: _summary(values) for name, values in times.items()}


def _timed(model: Any, example: Tensor) -> float:
    with evaluating(model), torch.inference_mode():
        _wait(example.device)
        start = time.perf_counter()
        model(example)
        _wait(example.device)
        return 1e3 * (time.perf_counter() - start)


def _summary(times: list[float]) -> Latency:
    low, median, high = statistics.quantiles(times, n=4)
    return Latency(median, low, high)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Speed:
    """One network in one mode. ``throughput``: samples per second at the median. ``memory``: bytes, or None."""

    network: str
    mode: str
    latency: Latency
    throughput: float
    memory: int | None


def compare(
    models: Mapping[str, nn.Module], example: Tensor, *, repeats: int = 30, compiled: bool = False
) -> list[Speed]:
    """Time every network in eager mode, and compiled if requested, interleaved on one batch."""
    rows = []
    for mode in ("eager", "compiled") if compiled else ("eager",):
        runners = {name: torch.compile(model) if mode == "compiled" else model for name, model in models.items()}
        latencies = measure_latency(runners, example, repeats=repeats)
        for name, model in models.items():
            latency = latencies[name]
            memory = peak_memory(model, example) if mode == "eager" else None
            rows.append(Speed(name, mode, latency, 1e3 * len(example) / latency.median, memory))
    return rows


def peak_memory(model: nn.Module, example: Tensor) -> int:
    """Peak bytes of one forward pass in evaluation mode, without weights and input.

    On a GPU from the allocator; on a CPU the live tensors, without the kernels' internal workspace.
    """
    with evaluating(model), torch.inference_mode():
        if example.device.type == "cuda":
            torch.cuda.synchronize(example.device)
            before = torch.cuda.memory_allocated(example.device)
            torch.cuda.reset_peak_memory_stats(example.device)
            model(example)
            return torch.cuda.max_memory_allocated(example.device) - before
        live = _LiveTensors()
        with live:
            model(example)
        return live.peak


class _LiveTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tracks every storage allocated inside until it is freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                address, size = storage.data_ptr(), storage.nbytes()
                if address not in given and address not in self.seen:
                    self.seen.add(address)
                    self.now += size
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._freed, address, size)
        return result

    def _freed(self, address: int, size: int) -> None:
        self.seen.discard(address)
        self.now -= size
