"""Events of the engine about scores and selections."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from paam.events import Scores, Selected
from paam.pruning.select import Selection


def scores_event(scores: Mapping[str, Tensor], epoch: int, cycle: int) -> Scores:
    """``scores``: group name -> [width]."""
    values = {name: [_seven_digits(score) for score in group.tolist()] for name, group in scores.items()}
    return Scores(epoch, cycle, values)


def selection_event(selection: Selection, epoch: int, cycle: int, accuracy: float | None) -> Selected:
    """``accuracy``: right after the cut, before the weights adapt."""
    return Selected(
        epoch=epoch,
        cycle=cycle,
        threshold=None if selection.threshold is None else _seven_digits(selection.threshold),
        kept_params=selection.kept_params,
        kept_macs=selection.kept_macs,
        kept_filters=selection.plan.counts,
        accuracy=accuracy,
    )


def _seven_digits(value: float) -> float:
    """Round to float32's precision. Scores and threshold are rounded alike, so that comparisons stay valid."""
    return float(f"{value:.7g}")
