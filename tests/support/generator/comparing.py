"""Compare the outputs of two networks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from paam.errors import GraphError

BOUND = 1e-9
SMALL = 1e-3
"""If all values are smaller than this, errors are relative to this instead of to the values."""
DOUBTFUL = 1e-7
"""An error between the bound and this may be rounding, in a network that amplifies it."""

Inputs = tuple[Tensor, ...]
Network = Callable[..., Any]


class WrongError(Exception):
    """A network is not what it should be."""


class RefusedThereError(Exception):
    """A network refuses inputs of this size, with a message."""


def compare(network: Network, truth: Network, inputs: Inputs, what: str, of_truth: str = "the model") -> None:
    expect_same(called(network, inputs, what), called(truth, inputs, of_truth), what, f"batch {len(inputs[0])}")


def expect_same(found: Any, truth: Any, what: str, where: str) -> None:
    """Check that outputs are equal and have the same structure."""
    expected, form = tree_flatten(truth)
    answers, found_form = tree_flatten(found)
    expect(form == found_form, f"{what} returns {found_form}, not {form}")
    for answer, value in zip(answers, expected, strict=True):
        expect(answer.shape == value.shape, f"{what} returns shape {list(answer.shape)} on {where}")
        expect(answer.dtype == value.dtype, f"{what} returns {answer.dtype}")
        error = apart(answer, value)
        close = "by little, " if error < DOUBTFUL else ""
        expect(error < BOUND, f"{what} is off {close}by {error:.0e}")


def apart(found: Tensor, truth: Tensor) -> float:
    """The largest difference relative to the largest value; infinite if non-finite values are at other positions."""
    if found.shape != truth.shape or not truth.numel():
        return 0.0 if found.shape == truth.shape else float("inf")
    if not truth.isfinite().all() or not found.isfinite().all():
        if not torch.equal(numberless(found), numberless(truth)):
            return float("inf")
        found, truth = (torch.where(x.isfinite(), x, 0) for x in (found, truth))
    return float((found - truth).abs().max() / truth.abs().max().clamp(min=SMALL))


def numberless(x: Tensor) -> Tensor:
    """Which values are not finite, and whether they are NaN, inf or -inf."""
    return x.isnan() + 2 * x.isposinf() + 3 * x.isneginf()


def called(network: Network, inputs: Inputs, what: str) -> Any:
    try:
        with torch.no_grad():
            return network(*(x.clone() for x in inputs))
    except GraphError as refusal:
        raise RefusedThereError(f"{what} refuses other inputs: {refusal}") from refusal
    except Exception as error:
        message = str(error).strip().partition("\n")[0]
        raise WrongError(f"{what} does not run: {type(error).__name__}: {message}") from error


def shapes_of(network: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in network.state_dict().items()}


def expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise WrongError(otherwise)
