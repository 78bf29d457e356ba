"""States that nobody can go on from, named with what to do about them; and one that a run goes on from, but told so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from paam.errors import DataError, DivergedError
from paam.events import Vanished
from paam.graph.rules.layers import BATCH_NORMS
from paam.train.phase import Phase

LOSS_CHECK_EVERY = 50
"""Steps between looks at the losses: often enough to stop early, rarely enough not to stall a GPU."""

NO_SCORE = 1e-3
"""When every score is below this, none of the filters matters any more, and their order says nothing."""

EXPLODED, TIMES = 100.0, 10.0
"""The loss has exploded when it ends an epoch above the first, and so many times above where epoch or phase began."""

HOPELESS = 1e12
"""No loss above this is one to train on, wherever it began."""

VANISHED, FEW = 0.02, 0.05
"""A batch-norm scale below the first passes nothing on. Up to the second, as a share of all, that is usual."""


def vanished_scales(model: nn.Module, epoch: int) -> Vanished | None:
    """An event that says how much of a network has died: rates too high for its first steps do that to whole blocks."""
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
    """Of an epoch so far; those since the last look are looked at."""
    if not losses:
        raise DataError("The training batches are used up; they must come anew in every epoch, as a DataLoader's do.")
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
    """Losses, weights and statistics of an epoch, or of the part of it that was done, before that is saved as good.

    ``phase_began``: the loss that the phase began with, which an epoch of few steps does not know.
    """
    every = torch.stack(list(losses))
    began, ended, mean = float(losses[0]), float(every[-LOSS_CHECK_EVERY:].mean()), float(every.mean())
    if not torch.stack([value.isfinite().all() for value in values]).all():
        raise DivergedError(
            f"A weight is not finite in epoch {epoch + 1} ({phase.name} phase). Lower {phase.settings}.lr."
        )
    if not mean < HOPELESS or ended > max(EXPLODED, TIMES * min(began, phase_began)):
        raise DivergedError(
            f"The loss has exploded in epoch {epoch + 1} ({phase.name} phase): {ended:.3g} where the phase began with"
            f" {phase_began:.3g}. {_cause(losses, phase, epoch)}"
        )


def _cause(losses: Sequence[Tensor], phase: Phase, epoch: int) -> str:
    """What to look at when the loss is lost."""
    if epoch == 0 and not float(losses[0]) < HOPELESS:
        return (
            f"It was {float(losses[0]):.3g} before any step had been taken, so that no rate is to blame. Look at the"
            " network's code, at the weights that it begins with, and at the data."
        )
    return f"Lower {phase.settings}.lr, or look for broken values in the data."


def check_scores(scores: Mapping[str, Tensor], epoch: int) -> None:
    if torch.cat(list(scores.values())).max() < NO_SCORE:
        raise DivergedError(
            f"Every score has fallen below {NO_SCORE} in epoch {epoch + 1} (score phase): they no longer tell filters"
            " apart. Lower prune.penalty or score.lr."
        )
