"""Attention networks: a layer's filter weights in, one pre-activation per filter out.

Shapes: ``filters_FN`` holds F filters as rows of N = C * K * K weights. Weights are data here: callers detach them, so
that no gradient reaches the network through its scorer.

A scorer's computation is a pure function of filters and parameters, ``attend``, that also takes a stack of layers of
the same shape (with one more leading axis): 55 layers are then scored in a handful of operations.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from paam.config.schema import Check, InvalidError, Range, arguments_of
from paam.errors import RecipeError, nearest


class Scorer(nn.Module):
    """One layer's attention network. ``attend`` reads its parameters in the order in which they are registered.

    Keyword arguments of a scorer in SCORERS are its options: keys of [prune] in recipes, and arguments of Pruner.
    """

    reads_filters = True
    """False for scorers that do not read the weights: they get none."""
    default_lr = 1e-3
    """Adam's learning rate at which scores can move from 1 to 0 within ten score phases."""

    def attend(self, filters_FN: Tensor, *parameters: Tensor) -> Tensor:
        raise NotImplementedError

    def tensors(self) -> tuple[Tensor, ...]:
        """Parameters and buffers, as ``attend`` takes them."""
        return (*self.parameters(), *self.buffers())


class Vanilla(Scorer):
    """One linear map over all weights of the layer: vec(filters) W, with W of shape (F*N, F), zero at the start."""

    default_lr = 1e-6

    def __init__(self, filters: int, weights: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(filters * weights, filters))

    def attend(self, filters_FN: Tensor, *parameters: Tensor) -> Tensor:
        (weight,) = parameters
        return (filters_FN.flatten(-2).unsqueeze(-2) @ weight).squeeze(-2)


class KQ(Scorer):
    """Key-query attention averaged over keys: mean_j (Q K^T)_ij / (alpha sqrt(d)), Q = filters W_Q, K = filters W_K.

    The mean over keys commutes with both products, so only vectors are ever formed: filters (W_Q (W_K^T mean filter)).
    W_K starts at zero and W_Q at random: all scores are equal, and gradients are nonzero from the first step.
    """

    def __init__(
        self,
        filters: int,
        weights: int,
        *,
        dim_ratio: Annotated[float, Range(1e-6, 64)] = 1.0,
        alpha: Annotated[float, Range(0, above=True)] = 1.0,
    ) -> None:
        super().__init__()
        d = max(1, round(filters * dim_ratio))
        bound = 1 / math.sqrt(weights)
        self.query = nn.Parameter(torch.empty(weights, d).uniform_(-bound, bound))
        self.key = nn.Parameter(torch.zeros(weights, d))
        self.scale = 1 / (alpha * math.sqrt(d))

    def attend(self, filters_FN: Tensor, *parameters: Tensor) -> Tensor:
        query, key = parameters
        mean_key_D1 = (filters_FN.mean(-2, keepdim=True) @ key).transpose(-1, -2)
        return self.scale * (filters_FN @ (query @ mean_key_D1)).squeeze(-1)


class Free(Scorer):
    """One learnable logit per filter, independent of the weights: the control for the two attention networks."""

    reads_filters = False
    default_lr = 1e-2

    def __init__(self, filters: int, weights: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(filters))

    def attend(self, filters_FN: Tensor, *parameters: Tensor) -> Tensor:
        (logits,) = parameters
        return logits


MakeScorer = Callable[[int, int], Scorer]
"""Number of filters, weights of each -> the scorer of a layer."""

SCORERS: dict[str, Callable[..., Scorer]] = {"vanilla": Vanilla, "kq": KQ, "free": Free}


def check_scorer(name: str) -> None:
    """Raise an error with the nearest name if there is no scorer ``name``."""
    if name not in SCORERS:
        raise RecipeError(f"There is no scorer '{name}'.{nearest(name, SCORERS)}")


def known_options() -> dict[str, tuple[Check, Any]]:
    """The options of all scorers, by name: the check of a value, and the default."""
    found: dict[str, tuple[Check, Any]] = {}
    for make in SCORERS.values():
        for name, (check, default) in arguments_of(make).items():
            if default is inspect.Parameter.empty or found.setdefault(name, (check, default))[1] != default:
                raise TypeError(f"The scorers' option '{name}' needs a default, the same in all scorers that have it.")
    return found


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Check options, and add the defaults of those that are missing.

    Options of other scorers than the one in use have no effect, so that one key takes a recipe from one to another.
    """
    known = known_options()
    for name in options:
        if name not in known:
            raise RecipeError(f"There is no scorer with an option '{name}'.{nearest(name, known)}")
    try:
        given = {name: known[name][0](value, name) for name, value in options.items()}
    except InvalidError as error:
        raise RecipeError(str(error)) from error
    return {name: given.get(name, default) for name, (_, default) in known.items()}


def scorer_of(name: str, **options: Any) -> MakeScorer:
    """The factory of scorers for a name, with its options."""
    check_scorer(name)
    checked = check_options(options)
    return partial(SCORERS[name], **{option: checked[option] for option in arguments_of(SCORERS[name])})
