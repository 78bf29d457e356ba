"""Random inputs for a traced graph, from small images to those of the example's size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from paam.graph.record.recording import DTYPE
from paam.graph.trace import MAP, Traced

Inputs = tuple[Tensor, ...]


SMALLER = (8.0, 4.0, 2.0)
"""Factors by which images are made smaller."""


def random_inputs(
    traced: Traced, shrinks: Sequence[float] = (*SMALLER, 1.0), *, more: int = 0, also_examples: bool = True
) -> Iterator[Inputs]:
    """One float64 tensor for each input of the graph, with images of several sizes.

    ``shrinks``: factors by which images are smaller than the example's. ``more``: samples beyond ``traced.batch``.
    ``also_examples``: include images of the example's size if no other size is possible.
    """
    models = _models(traced, more)
    seen = set() if also_examples else {tuple(x.shape for x in models)}
    for shrink in shrinks:
        generator = torch.Generator().manual_seed(int(8 * shrink))
        inputs = tuple(_like(x, shrink, generator) for x in models)
        if (shapes := tuple(x.shape for x in inputs)) not in seen:
            seen.add(shapes)
            yield inputs


def inputs_of_other_sides(traced: Traced) -> Iterator[Inputs]:
    """Images with one side longer or shorter by one than the example's, one side at a time."""
    models = _models(traced, 0)
    for axis in range(MAP, max(x.dim() for x in models)):
        for more in (-1, 1):
            generator = torch.Generator().manual_seed(axis)
            shapes = [[n + more * (place == axis) for place, n in enumerate(x.shape)] for x in models]
            if all(all(shape) for shape in shapes):
                yield tuple(_of_shape(x, shape, generator) for x, shape in zip(models, shapes, strict=True))


def tame_inputs(traced: Traced) -> Iterator[Inputs]:
    """Inputs for networks that require them: values between 0 and 1, as in images, and the example itself."""
    models = _models(traced, 0)
    generator = torch.Generator().manual_seed(0)
    yield tuple(
        torch.rand(x.shape, generator=generator, dtype=torch.float64).to(x.device) if x.is_floating_point() else x
        for x in models
    )
    if not traced.own_code:
        pairs = zip(tree_leaves(traced.examples), models, strict=True)
        samples = ((x, torch.arange(len(model)).to(x.device) % len(x)) for x, model in pairs)
        yield tuple(x[places].double() if x.is_floating_point() else x[places] for x, places in samples)


def device_of(traced: Traced) -> torch.device:
    device: torch.device = tree_leaves(traced.examples)[0].device
    return device


def _models(traced: Traced, more: int) -> list[Tensor]:
    """A tensor of the right shape and dtype for each input of the graph; integer inputs are the example's."""
    device = device_of(traced)
    examples = [] if traced.own_code else tree_leaves(traced.examples)
    models = []
    for place, node in enumerate(node for node in traced.graph.nodes if node.op == "placeholder"):
        shape, dtype = traced.shapes[node.name], node.meta[DTYPE]
        shape = tuple(size + more * grows for size, grows in zip(shape, traced.growth(node), strict=True))
        if dtype.is_floating_point:
            models.append(torch.empty(shape, device=device))
        elif traced.own_code:
            models.append(torch.zeros(shape, dtype=dtype, device=device))
        else:
            example = examples[place]
            models.append(example[torch.arange(shape[0]).to(device) % len(example)])
    return models


def _like(model: Tensor, shrink: float, generator: torch.Generator) -> Tensor:
    sizes = [_shrunk(size, shrink) for size in model.shape[MAP:]]
    return _of_shape(model, (*model.shape[:MAP], *sizes), generator)


def _of_shape(model: Tensor, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    if not model.is_floating_point():
        return model
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(model.device)


def _shrunk(size: int, shrink: float) -> int:
    """A smaller size, at least 8 pixels; large sizes are rounded to multiples of 32."""
    if shrink < 1:
        return int(size / shrink)
    return min(_in_steps(max(int(size / shrink), 8)), size)


def _in_steps(size: int) -> int:
    """Networks that halve their maps five times, and later concatenate them, need multiples of 32."""
    return size if size < 24 else -(-size // 32) * 32
