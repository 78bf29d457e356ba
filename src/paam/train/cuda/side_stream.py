"""A side CUDA stream: small kernels leave room for concurrent ones."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@functools.cache
def second_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def on_side_stream(device: torch.device) -> Iterator[None]:
    """Run work on the side stream, after everything queued so far; only :func:`join` waits for it.

    Keep its inputs alive until then. Memory allocated in it is reused by the side stream only, which always waits for
    the main stream first: so its results may be read and freed on the main stream.
    """
    second = second_stream(device)
    second.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(second):
        yield


def join(device: torch.device) -> None:
    """Make the main stream wait for the side stream."""
    torch.cuda.current_stream(device).wait_stream(second_stream(device))
