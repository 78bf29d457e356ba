"""A second stream of a GPU: small kernels leave room for others beside them."""

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
def beside(device: torch.device) -> Iterator[None]:
    """Work that begins when all that was asked for so far is done, and that only :func:`join` waits for.

    What it reads must be held until then. Its own memory is used again by the second stream alone, and that always
    begins by waiting for the first: so what it leaves may be read on the first one and let go of.
    """
    second = second_stream(device)
    second.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(second):
        yield


def join(device: torch.device) -> None:
    """Let what follows wait for the second stream."""
    torch.cuda.current_stream(device).wait_stream(second_stream(device))
