"""The one counter of parameters and multiply-accumulates. It also reports what it did not count.

MACs are those of convolutions and linear layers (matrix products included), for one pass over the given inputs
divided by the batch size. All other operations that ran are listed in ``uncounted``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
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


def count(model: nn.Module, example_inputs: Any) -> Counted:
    """Count a model by running it once on the example, in evaluation mode."""
    examples = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    counter = MacCounter()
    with evaluating(model), torch.no_grad(), counter:
        model(*examples)
    params = sum(p.numel() for p in model.parameters())
    return Counted(params, counter.macs // batch_of(examples), dict(counter.uncounted))


def macs_by_layer(model: nn.Module, example: Tensor) -> dict[str, int]:
    """MACs per sample, without submodules, of each module, in the order in which they first ran."""
    counter, found = MacCounter(), dict[str, int]()
    inside: list[tuple[str, int]] = []  # running modules, and the count when each started or its last submodule ended

    def book() -> None:
        if inside and counter.macs > inside[-1][1]:
            name, before = inside[-1]
            found[name] = found.get(name, 0) + counter.macs - before

    def enter(name: str) -> None:
        book()
        inside.append((name, counter.macs))

    def leave() -> None:
        book()
        inside.pop()
        if inside:
            inside[-1] = (inside[-1][0], counter.macs)

    with evaluating(model), torch.no_grad(), ExitStack() as hooks, counter:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_pre_hook(lambda *_, name=name: enter(name)))
            hooks.enter_context(module.register_forward_hook(lambda *_: leave()))
        model(example)
    return {name: macs // len(example) for name, macs in found.items()}


def batch_of(examples: Sequence[Any]) -> int:
    """Number of samples in a model's arguments: the first is a batch, or a list of images."""
    first = examples[0]
    return first.shape[0] if isinstance(first, Tensor) else len(first)


# The parameter is called ``input`` as in torch, because callers may pass it by name.
def _convolution(result: Tensor, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> int:
    # Weights are [out, in / groups, kernel...]: each output value reads all but the first axis of one of them.
    return result.numel() * math.prod(weight.shape[1:])


def _transposed(result: Tensor, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> int:
    # Weights are [in, out / groups, kernel...]: each input value is spread over all but the first axis of one of them.
    return input.numel() * math.prod(weight.shape[1:])


def _product(result: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> int:
    return result.numel() * input.shape[-1]


def _attention(result: Tensor, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> int:
    # Each of the [..., L, d] queries is multiplied with S keys, and its weights with S values.
    return 2 * query.numel() * key.shape[-2]


def _multi_head(batch_first: bool) -> Callable[..., int]:
    def macs(result: Any, query: Tensor, key: Tensor, value: Tensor, width: int, *args: Any, **kwargs: Any) -> int:
        # Four projections, plus the products of queries with keys and of attention weights with values.
        keys = key.shape[1 if batch_first else 0]
        return (2 * query.numel() + 2 * key.numel()) * width + 2 * query.numel() * keys

    return macs


COUNTERS: dict[Callable[..., Any], Callable[..., int]] = {
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), _convolution),
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), _transposed),
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _multi_head(batch_first=False),
    torch._native_multi_head_attention: _multi_head(batch_first=True),
    **dict.fromkeys((F.linear, torch.matmul, torch.bmm, torch.mm, Tensor.matmul, Tensor.__matmul__), _product),
}


class MacCounter(TorchFunctionMode):
    """Counts everything that runs inside the block: ``macs`` are of the whole batch."""

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
        elif isinstance(result, Tensor | tuple) and (name := resolve_name(func)) and "__get__" not in name:
            self.uncounted[name.rpartition(".")[2]] += 1
        return result
