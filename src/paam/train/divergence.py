"""States that nobody can go on from, named with what to do about them; and one that a run goes on from, but told so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from paam.errors import DataError, DivergedError
from paam.graph.layers import BATCH_NORMS
from paam.record import Event
from paam.schedule import PhaseName, section_of

LOSS_CHECK_EVERY = 50
"""Steps between looks at the losses: often enough to stop early, rarely enough not to stall a GPU."""

NO_SCORE = 1e-3
"""When every score is below this, none of the filters matters any more, and their order says nothing."""

EXPLODED, TIMES = 100.0, 10.0
"""The loss has exploded when it ends an epoch above the first, and so many times above where the epoch began."""

VANISHED, FEW = 0.02, 0.05
"""A batch-norm scale below the first passes nothing on. Up to the second, as a share of all, that is usual."""


def vanished_scales(model: nn.Module, epoch: int) -> Event | None:
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
    return {"event": "vanished", "epoch": epoch, "scales": gone, "of": total, "layers": layers}


def check_losses(losses: Sequence[Tensor], phase: PhaseName, epoch: int) -> None:
    """Of an epoch so far; those since the last look are looked at."""
    if not losses:
        raise DataError("The training batches are used up; they must come anew in every epoch, as a DataLoader's do.")
    finite = torch.stack(list(losses[-LOSS_CHECK_EVERY:])).isfinite()
    if not finite.all():
        step = max(len(losses) - LOSS_CHECK_EVERY, 0) + int((~finite).nonzero()[0]) + 1
        raise DivergedError(
            f"The loss is not finite at step {step} of epoch {epoch + 1} ({phase} phase)."
            f" Lower {section_of(phase)}.lr, or look for broken values in the data."
        )


def check_epoch(losses: Sequence[Tensor], values: Iterable[Tensor], phase: PhaseName, epoch: int) -> None:
    """Losses, weights and statistics of an epoch, or of the part of it that was done, before that is saved as good."""
    began, ended = float(losses[0]), float(torch.stack(list(losses[-LOSS_CHECK_EVERY:])).mean())
    reason = "The loss has exploded" if ended > max(EXPLODED, TIMES * began) else None
    if not torch.stack([value.isfinite().all() for value in values]).all():
        reason = "A weight is not finite"
    if reason is not None:
        raise DivergedError(f"{reason} in epoch {epoch + 1} ({phase} phase). Lower {section_of(phase)}.lr.")


def check_scores(scores: Mapping[str, Tensor], epoch: int) -> None:
    if torch.cat(list(scores.values())).max() < NO_SCORE:
        raise DivergedError(
            f"Every score has fallen below {NO_SCORE} in epoch {epoch + 1} (score phase): they no longer tell filters"
            " apart. Lower prune.penalty or score.lr."
        )
