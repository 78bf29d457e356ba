"""TensorBoard view: scalars, histograms of scores, an image of what each layer kept. Steps are finished epochs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paam.errors import ArtifactError, PaamError, reason
from paam.events import End, Epoch, Event, Scores, Selected, Start
from paam.views.format import filters

FILES = "events.out.tfevents.*"
"""File names of TensorBoard's writer."""
KEPT, GONE, PAPER = (31, 136, 61), (208, 215, 222), (255, 255, 255)
BAR, GAP = 6, 2
"""Pixel rows of a layer, and between two layers."""
PICTURE = 512
"""Minimum pixel columns: narrow networks are stretched to about this width."""


class TensorBoardView:
    """Writes events as they arrive. A start empties the folder: a resumed run repeats all of its events."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise PaamError("--tensorboard needs TensorBoard: pip install tensorboard.") from error
        self.make_writer: Any = SummaryWriter
        self.folder = folder
        self.writer: Any = None
        self.monitor = ""
        self.done = 0

    def __enter__(self) -> TensorBoardView:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.writer is not None:
            self.writer.close()

    def event(self, event: Event) -> None:
        try:
            self._write(event)
        except OSError as error:
            raise ArtifactError(f"{self.folder} cannot be written: {reason(error)}.") from error

    def _write(self, event: Event) -> None:
        if isinstance(event, Start):
            if self.writer is not None:
                self.writer.close()
            for old in self.folder.glob(FILES):
                old.unlink()
            self.monitor = event.monitor
            self.writer = self.make_writer(str(self.folder))
        if self.writer is None:
            return  # before the start is repeated
        match event:
            case Epoch():
                self.done = event.epoch + 1
                self._epoch(event)
            case Scores():
                for layer, scores in event.scores.items():
                    self.writer.add_histogram(f"scores/{layer}", np.asarray(scores), event.epoch + 1)
            case Selected():
                self.writer.add_image("kept filters", kept_picture(event), event.epoch, dataformats="HWC")
                kept, width = filters(event)
                self._scalars({"kept/filters": kept / width if width else 1.0}, event.epoch)
            case End():
                accuracies = {"test/dense": event.dense.accuracy, "test/pruned": event.pruned.accuracy}
                self._scalars(accuracies, self.done)

    def _epoch(self, event: Epoch) -> None:
        scalars = {"loss": event.loss, "learning rate": event.lr, f"accuracy/{self.monitor}": event.accuracy}
        if event.does == "control":  # another network: it has separate curves
            self._scalars({f"control/{name}": value for name, value in scalars.items()}, self.done)
        else:
            shares = {"kept/MACs": event.kept_macs, "kept/parameters": event.kept_params}
            self._scalars(scalars | shares, self.done)

    def _scalars(self, scalars: Mapping[str, float | None], step: int) -> None:
        for name, value in scalars.items():
            if value is not None:
                self.writer.add_scalar(name, value, step)
        self.writer.flush()


def kept_picture(selection: Selected) -> npt.NDArray[np.uint8]:
    """Pixels [H, W, 3]: a bar per layer from top to bottom, a cell per filter; kept filters first, in green."""
    layers = list(selection.kept_filters.values())
    widest = max((width for _, width in layers), default=1)
    cell = max(PICTURE // widest, 1)
    picture = np.full((max(len(layers) * (BAR + GAP) - GAP, 1), widest * cell, 3), PAPER, np.uint8)
    for place, (kept, width) in enumerate(layers):
        rows = slice(place * (BAR + GAP), place * (BAR + GAP) + BAR)
        picture[rows, : kept * cell] = KEPT
        picture[rows, kept * cell : width * cell] = GONE
    return picture
