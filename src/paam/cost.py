"""The one counter: parameters, multiply-accumulates, latency. It also names what it did not count.

MACs are those of convolutions and linear layers (matrix products included), for one pass over the given inputs
divided by the batch size. Everything else that ran is listed in ``uncounted``.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from paam.graph.modes import evaluating


@dataclass(frozen=True)
class Counted:
    """``macs`` are per sample. ``uncounted``: name of each operation that was not counted -> how often it ran."""

    params: int
    macs: int
    uncounted: dict[str, int]


@dataclass(frozen=True)
class Latency:
    """Milliseconds per batch: the median of the runs, and the quartiles around it."""

    median: float
    low: float
    high: float


def count(model: nn.Module, example_inputs: Tensor | tuple[Tensor, ...]) -> Counted:
    """Count a model by running it once, in evaluation mode, on the example."""
    examples = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    counter = MacCounter()
    with evaluating(model), torch.no_grad(), counter:
        model(*examples)
    params = sum(p.numel() for p in model.parameters())
    return Counted(params, counter.macs // examples[0].shape[0], dict(counter.uncounted))


def measure_latency(
    models: dict[str, nn.Module], example: Tensor, *, repeats: int = 30, warmup: int = 5
) -> dict[str, Latency]:
    """Time several models on one batch, taking turns, so that all of them meet the same disturbances."""
    times: dict[str, list[float]] = {name: [] for name in models}
    for model in models.values():
        with evaluating(model), torch.inference_mode():
            for _ in range(warmup):
                model(example)
    for _ in range(repeats):
        for name, model in models.items():
            with evaluating(model), torch.inference_mode():
                _wait(example.device)
                start = time.perf_counter()
                model(example)
                _wait(example.device)
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: _summary(values) for name, values in times.items()}


def _summary(times: list[float]) -> Latency:
    low, median, high = statistics.quantiles(times, n=4)
    return Latency(median, low, high)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# The parameter is called ``input`` as in torch, whose callers may give it by that name.
def _convolution(result: Tensor, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> int:
    # Weights are [out, in / groups, kernel...]: each output value reads all but the first axis of one of them.
    return result.numel() * math.prod(weight.shape[1:])


def _transposed(result: Tensor, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> int:
    # Weights are [in, out / groups, kernel...]: each input value is spread over all but the first axis of one of them.
    return input.numel() * math.prod(weight.shape[1:])


def _product(result: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> int:
    return result.numel() * input.shape[-1]


COUNTERS: dict[Callable[..., Any], Callable[..., int]] = {
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), _convolution),
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), _transposed),
    **dict.fromkeys((F.linear, torch.matmul, torch.bmm, torch.mm, Tensor.matmul, Tensor.__matmul__), _product),
}


class MacCounter(TorchFunctionMode):
    """Counts what runs inside: ``macs`` of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.macs = 0
        self.uncounted: Counter[str] = Counter()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in COUNTERS:
            self.macs += COUNTERS[func](result, *args, **(kwargs or {}))
        elif isinstance(result, Tensor) and (name := resolve_name(func)) and "__get__" not in name:
            self.uncounted[name.rpartition(".")[2]] += 1
        return result
