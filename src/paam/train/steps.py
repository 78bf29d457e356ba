"""One training step of a phase: forward, loss, backward, update; compiled and captured where that is faster."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from paam.config.settings import DistillSettings, TrainSettings
from paam.train.cuda.capture import CapturedStep, Step
from paam.train.cuda.side_stream import join, on_side_stream
from paam.train.ema import EMA
from paam.train.flat import FlatParameters, RoundedWeights

Loss = Callable[[Tensor, Tensor], Tensor]
"""Images and labels (or soft labels) -> the loss, with its gradient."""
Extra = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Images, labels and logits -> a term to add to the loss."""

COMPILING_PAYS_AFTER = 20_000
"""Steps from which compiling pays off: for ResNet-56 it took a minute and saved 1.5 ms per step."""


def make_loss(
    network: nn.Module,
    *,
    bfloat16: bool = False,
    extra: Extra | None = None,
    teacher: nn.Module | None = None,
    distill: DistillSettings | None = None,
    concurrent: bool = False,
) -> Loss:
    """Cross-entropy, plus distillation if there is a teacher, plus what a phase adds to it.

    ``concurrent``: run teacher and network on separate CUDA streams.
    """
    teaching = distill or DistillSettings()

    def loss_of(images: Tensor, labels: Tensor) -> Tensor:
        # Autocast's cached casts would outlive a captured graph.
        with torch.autocast("cuda", torch.bfloat16, enabled=bfloat16, cache_enabled=False):
            if teacher is not None:
                with on_side_stream(images.device) if concurrent else nullcontext(), torch.no_grad():
                    wanted = teacher(images)
            logits = network(images)
            loss = F.cross_entropy(logits, labels)
            if teacher is not None:
                if concurrent:
                    join(images.device)
                drawn = distillation(logits, wanted, teaching.temperature)
                loss = torch.lerp(loss.to(drawn.dtype), drawn, teaching.weight)
        return loss if extra is None else loss + extra(images, labels, logits)

    return loss_of


def distillation(logits: Tensor, wanted: Tensor, temperature: float) -> Tensor:
    """Kullback-Leibler divergence from the teacher's softened answers, times the squared temperature.

    Computed in float32 at least.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    ours = F.log_softmax(logits.to(dtype) / temperature, 1)
    theirs = F.log_softmax(wanted.to(dtype) / temperature, 1)
    return F.kl_div(ours, theirs, reduction="batchmean", log_target=True) * temperature**2


def compiled(loss_of: Loss, settings: TrainSettings, steps: int) -> Loss:
    """The loss, compiled if the recipe says so, or by default if enough steps remain."""
    wanted = settings.compile
    if wanted is None:
        wanted = steps >= COMPILING_PAYS_AFTER and importlib.util.find_spec("triton") is not None
    return torch.compile(loss_of, dynamic=False) if wanted else loss_of


def make_step(
    loss_of: Loss,
    optimizer: Optimizer,
    flat: FlatParameters,
    rounded: RoundedWeights | None = None,
    ema: EMA | None = None,
    *,
    capture: bool,
) -> Step:
    """A step that updates ``flat`` and its ``ema``.

    ``rounded``: the rounded weights that the network reads instead, if it trains in bfloat16.
    """
    leaves = flat.parameters if rounded is None else rounded.leaves

    def step(images: Tensor, labels: Tensor) -> Tensor:
        if rounded is not None:
            rounded.refresh()
        loss = loss_of(images, labels)
        flat.take_gradients(loss, leaves)
        optimizer.step()
        if ema is not None:
            ema.update()
        return loss.detach()

    return CapturedStep(step) if capture else step
