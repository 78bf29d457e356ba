"""Images that are read from their files when they are needed: for folders that memory cannot hold."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.context import BaseContext
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from paam.errors import DataError, one_line

Decode = Callable[[Path, int], Tensor]
"""A file and a side in pixels -> uint8 [3, side, side]; raises DataError."""

AHEAD = 3
"""Blocks that each worker reads ahead."""


class ImageFiles:
    """Stands where a tensor of images would: it has a shape, is indexed by places, and is read in blocks.

    Blocks come from ``workers`` processes that stay between epochs; 0 reads them in this process.
    """

    def __init__(self, files: Sequence[Path], side: int, decode: Decode, workers: int) -> None:
        self.files = list(files)
        self.side = side
        self.decode = decode
        self.workers = workers
        self._order: list[list[int]] = []
        self._loader: DataLoader[Tensor | str] | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return len(self.files), 3, self.side, self.side

    def __getitem__(self, places: Tensor) -> ImageFiles:
        return ImageFiles([self.files[place] for place in places.tolist()], self.side, self.decode, self.workers)

    def blocks(self, order: Tensor, size: int) -> Iterator[Tensor]:
        """uint8 [n, 3, side, side] in the given order, ``size`` images at a time, read ahead."""
        self._order[:] = [part.tolist() for part in torch.split(order, size)]
        if self._loader is None:
            self._loader = DataLoader(
                _Reader(self),
                batch_sampler=self._order,  # the same list every epoch, with that epoch's order in it
                collate_fn=_stacked,
                num_workers=self.workers,
                prefetch_factor=AHEAD if self.workers else None,
                persistent_workers=bool(self.workers),
                pin_memory=torch.cuda.is_available(),
                multiprocessing_context=_processes() if self.workers else None,
                generator=torch.Generator(),  # of its own: a loader that draws from torch's moves what dropout sees
                worker_init_fn=_ignore_interrupts,
            )
        blocks = iter(self._loader)
        while (block := _next(blocks)) is not None:
            if isinstance(block, str):
                raise DataError(block)
            yield block

    def close(self) -> None:
        """End the processes; the next block begins new ones. Left to the garbage collector, that takes seconds."""
        self._loader = None


def _processes() -> BaseContext:
    """Readers are forked from a server that has imported what they need, once for all of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "paam.data.folder"])
    return context


def _next(blocks: Iterator[Tensor | str]) -> Tensor | str | None:
    """The next block; None behind the last."""
    try:
        return next(blocks, None)
    except RuntimeError as error:  # killed, as a rule for want of memory
        raise DataError(
            f"A process that reads images has ended ({one_line(error)}). Lower data.workers; 0 needs no such process."
        ) from error


class _Reader(torch.utils.data.Dataset[Tensor | str]):
    """What a worker process holds: where the files are. A refusal travels back as its sentence."""

    def __init__(self, images: ImageFiles) -> None:
        self.files, self.side, self.decode = images.files, images.side, images.decode

    def __getitem__(self, place: int) -> Tensor | str:
        try:
            return self.decode(self.files[place], self.side)
        except DataError as error:
            return str(error)


def _ignore_interrupts(worker: int) -> None:
    """Ctrl-C reaches every process of a terminal; the run finishes its step first, and needs its images for that."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _stacked(images: list[Tensor | str]) -> Tensor | str:
    problem = next((image for image in images if isinstance(image, str)), None)
    return problem if problem is not None else torch.stack([image for image in images if isinstance(image, Tensor)])


def usual_workers() -> int:
    """One process per core, eight at most: by then a disk or the network is what limits."""
    return min(8, os.cpu_count() or 1)
