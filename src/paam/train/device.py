"""Choose the device and the number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from paam.errors import DeviceError
from paam.graph.modes import evaluating


def usual_device(name: str) -> str:
    """The device for "auto": a GPU if there is one. Does not initialize it."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def find_device(name: str) -> str:
    """Check a device and make it the current one; "auto" uses a GPU if there is one."""
    device = usual_device(name)
    try:
        torch.ones(1, device=device).item()  # fails for "meta", which has no data
        if device.startswith("cuda:"):  # without an index it is the current one
            torch.cuda.set_device(device)  # streams and graphs use the current one
    except (RuntimeError, AssertionError) as error:
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if gpus and device in ("cuda", *(f"cuda:{number}" for number in range(gpus))):
            raise DeviceError(
                f"The GPU '{device}' exists but cannot be used ({_first_line(error)}); wait until it is free,"
                " or give --device cpu."
            ) from error
        there = "cpu" + (f", cuda (0 to {gpus - 1})" if gpus else "")
        raise DeviceError(f"The device '{device}' does not exist; this machine has: {there}.") from error
    return device


def _first_line(error: BaseException) -> str:
    """CUDA's error, without the debugging advice that follows."""
    return str(error).partition("\n")[0].rstrip(".")


def on_device(model: nn.Module, image: Tensor, device: str) -> nn.Module:
    """Move the network to its device; on a GPU in channels last, if it supports that. ``image``: [1, C, H, W]."""
    model = model.to(device)
    if device.startswith("cuda"):
        put_channels_last(model, image.to(device))
    return model


def put_channels_last(model: nn.Module, image: Tensor) -> None:
    """Convert convolution weights to channels last, which is fastest on a GPU, unless the network then fails.

    Feature maps follow the weights' layout, and some networks depend on it: view() cannot flatten channels last.
    """
    weights = [parameter for parameter in model.parameters() if parameter.dim() == 4]  # five in 3-D ones
    before = [weight.data for weight in weights]
    for weight in weights:
        weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    try:
        with evaluating(model), torch.no_grad():
            model(image)
    except RuntimeError:
        for weight, plain in zip(weights, before, strict=True):
            weight.data = plain


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
