"""Detect diverged training, and warn about dead batch-norm channels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from paam.errors import DataError, DivergedError
from paam.events import Vanished
from paam.graph.rules.layers import BATCH_NORMS
from paam.train.phase import Phase

LOSS_CHECK_EVERY = 50
"""Steps between checks of the losses: often enough to stop early, rarely enough not to stall a GPU."""

NO_SCORE = 1e-3
"""If every score is below this, the ranking of filters is meaningless."""

EXPLODED, TIMES = 100.0, 10.0
"""The loss has exploded if an epoch ends above the first, and by this factor above the start of epoch or phase."""

MAX_LOSS = 1e12
"""A loss above this counts as diverged, whatever its initial value."""

VANISHED, FEW = 0.02, 0.05
"""A batch-norm channel with a scale below the first is dead. A share up to the second is normal."""


def vanished_scales(model: nn.Module, epoch: int) -> Vanished | None:
    """An event about dead batch-norm channels: too high initial learning rates can kill whole blocks."""
    scales = {
        name: module.weight.detach().abs() < VANISHED
        for name, module in model.named_modules()
        if isinstance(module, BATCH_NORMS) and module.weight is not None
    }
    total, gone = sum(map(len, scales.values())), sum(int(below.sum()) for below in scales.values())
    if gone <= FEW * total:
        return None
    layers = ", ".join(name for name, below in scales.items() if below.all())
    return Vanished(epoch, gone, total, layers)


def check_losses(losses: Sequence[Tensor], phase: Phase, epoch: int) -> None:
    """Check an epoch's losses since the last check."""
    if not losses:
        raise DataError("The training batches are exhausted; pass batches that restart every epoch, like a DataLoader.")
    finite = torch.stack(list(losses[-LOSS_CHECK_EVERY:])).isfinite()
    if not finite.all():
        step = max(len(losses) - LOSS_CHECK_EVERY, 0) + int((~finite).nonzero()[0]) + 1
        raise DivergedError(
            f"The loss is not finite at step {step} of epoch {epoch + 1} ({phase.name} phase)."
            f" {_cause(losses, phase, epoch)}"
        )


def check_epoch(
    losses: Sequence[Tensor], values: Iterable[Tensor], phase: Phase, epoch: int, phase_began: float
) -> None:
    """Check losses, weights and statistics of an epoch, or of a part of it, before they are saved.

    ``phase_began``: the initial loss of the phase, for epochs of few steps.
    """
    every = torch.stack(list(losses))
    began, ended, mean = float(losses[0]), float(every[-LOSS_CHECK_EVERY:].mean()), float(every.mean())
    if not torch.stack([value.isfinite().all() for value in values]).all():
        raise DivergedError(
            f"A weight is not finite in epoch {epoch + 1} ({phase.name} phase). Lower {phase.settings}.lr."
        )
    if not mean < MAX_LOSS or ended > max(EXPLODED, TIMES * min(began, phase_began)):
        raise DivergedError(
            f"The loss has exploded in epoch {epoch + 1} ({phase.name} phase): {ended:.3g}, from {phase_began:.3g} at"
            f" the start of the phase. {_cause(losses, phase, epoch)}"
        )


def _cause(losses: Sequence[Tensor], phase: Phase, epoch: int) -> str:
    """What to check after divergence."""
    if epoch == 0 and not float(losses[0]) < MAX_LOSS:
        return (
            f"It was {float(losses[0]):.3g} before the first step, so the learning rate is not the cause. Check the"
            " network's code, its initial weights, and the data."
        )
    return f"Lower {phase.settings}.lr, or check the data for invalid values."


def check_scores(scores: Mapping[str, Tensor], epoch: int) -> None:
    if torch.cat(list(scores.values())).max() < NO_SCORE:
        raise DivergedError(
            f"Every score is below {NO_SCORE} in epoch {epoch + 1} (score phase): they no longer rank the"
            " filters. Lower prune.penalty or score.lr."
        )
