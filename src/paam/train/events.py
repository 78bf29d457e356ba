"""What an engine writes into the record about scores and cuts."""

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
    """``accuracy``: before the weights adapt, what the cut itself costs."""
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
    """As much as float32 has. Scores and threshold are rounded alike, so that they still compare."""
    return float(f"{value:.7g}")
