"""Which device a run uses, and how many threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from paam.errors import DeviceError
from paam.graph.modes import evaluating


def usual_device(name: str) -> str:
    """What "auto" stands for: a GPU when there is one. It is not touched."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def find_device(name: str) -> str:
    """A device that can be used, made the current one; "auto" takes a GPU when there is one."""
    device = usual_device(name)
    try:
        torch.ones(1, device=device).item()  # "meta" holds no values to train
        if device.startswith("cuda:"):  # without a number it is the current one
            torch.cuda.set_device(device)  # streams and graphs belong to the current one
    except (RuntimeError, AssertionError) as error:
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if gpus and device in ("cuda", *(f"cuda:{number}" for number in range(gpus))):
            raise DeviceError(
                f"The GPU '{device}' is there but cannot be used ({_first_line(error)}); wait until it is free,"
                " or give --device cpu."
            ) from error
        there = "cpu" + (f", cuda (0 to {gpus - 1})" if gpus else "")
        raise DeviceError(f"The device '{device}' is not there; this machine has: {there}.") from error
    return device


def _first_line(error: BaseException) -> str:
    """What CUDA says; advice on debugging follows it."""
    return str(error).partition("\n")[0].rstrip(".")


def on_device(model: nn.Module, image: Tensor, device: str) -> nn.Module:
    """The network where it trains; on a GPU with channels last in memory, where it runs so. ``image``: [1, C, H, W]."""
    model = model.to(device)
    if device.startswith("cuda"):
        put_channels_last(model, image.to(device))
    return model


def put_channels_last(model: nn.Module, image: Tensor) -> None:
    """Order convolutions' weights in memory as a GPU's kernels are fastest; not where a network then cannot run.

    Feature maps follow the weights, and some networks take them for granted: view() does not flatten the other order.
    """
    weights = [parameter for parameter in model.parameters() if parameter.dim() == 4]  # 3-D convolutions have five
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
