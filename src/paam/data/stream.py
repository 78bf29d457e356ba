"""Stream images from their files: for folders that do not fit into memory."""

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
"""Blocks that each worker prefetches."""


class ImageFiles:
    """Replaces a tensor of images: it has a shape, is indexed by image indices, and is read in blocks.

    Blocks come from ``workers`` processes that persist between epochs; 0 reads them in this process.
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

    def __getitem__(self, indices: Tensor) -> ImageFiles:
        return ImageFiles([self.files[index] for index in indices.tolist()], self.side, self.decode, self.workers)

    def blocks(self, order: Tensor, size: int) -> Iterator[Tensor]:
        """uint8 [n, 3, side, side] in the given order, ``size`` images at a time, prefetched."""
        self._order[:] = [part.tolist() for part in torch.split(order, size)]
        if self._loader is None:
            self._loader = DataLoader(
                _Reader(self),
                batch_sampler=self._order,  # the same list object every epoch, refilled with the epoch's order
                collate_fn=_stacked,
                num_workers=self.workers,
                prefetch_factor=AHEAD if self.workers else None,
                persistent_workers=bool(self.workers),
                pin_memory=torch.cuda.is_available(),
                multiprocessing_context=_processes() if self.workers else None,
                generator=torch.Generator(),  # its own generator: drawing from torch's default one would change dropout
                worker_init_fn=_ignore_interrupts,
            )
        blocks = iter(self._loader)
        while (block := _next(blocks)) is not None:
            if isinstance(block, str):
                raise DataError(block)
            yield block

    def close(self) -> None:
        """Stop the processes; the next block starts new ones. Leaving that to the garbage collector takes seconds."""
        self._loader = None


def _processes() -> BaseContext:
    """Workers are forked from a server that has imported what they need once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "paam.data.folder"])
    return context


def _next(blocks: Iterator[Tensor | str]) -> Tensor | str | None:
    """The next block; None after the last."""
    try:
        return next(blocks, None)
    except RuntimeError as error:  # killed, usually out of memory
        raise DataError(
            f"An image worker process died ({one_line(error)}). Lower data.workers; 0 uses no worker processes."
        ) from error


class _Reader(torch.utils.data.Dataset[Tensor | str]):
    """The state of a worker process: the file list. Errors are returned as their message."""

    def __init__(self, images: ImageFiles) -> None:
        self.files, self.side, self.decode = images.files, images.side, images.decode

    def __getitem__(self, index: int) -> Tensor | str:
        try:
            return self.decode(self.files[index], self.side)
        except DataError as error:
            return str(error)


def _ignore_interrupts(worker: int) -> None:
    """Ignore Ctrl-C, which reaches every process of a terminal: the run needs images to finish its step."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _stacked(images: list[Tensor | str]) -> Tensor | str:
    problem = next((image for image in images if isinstance(image, str)), None)
    return problem if problem is not None else torch.stack([image for image in images if isinstance(image, Tensor)])


def usual_workers() -> int:
    """One process per core, at most eight: beyond that the disk or the network is the bottleneck."""
    return min(8, os.cpu_count() or 1)
