"""Attention networks: a layer's filter weights in, one pre-activation per filter out.

Shapes: ``filters_FN`` holds F filters as rows of N = C * K * K weights. Weights are data here: callers detach them, so
that no gradient reaches the network through its scorer.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from paam.errors import RecipeError, nearest


class Vanilla(nn.Module):
    """One linear map over all weights of the layer: vec(filters) W, with W of shape (F*N, F), from zero."""

    def __init__(self, filters: int, weights: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(filters * weights, filters))

    def forward(self, filters_FN: Tensor) -> Tensor:
        return filters_FN.flatten() @ self.weight


class KQ(nn.Module):
    """Key-query attention averaged over keys: mean_j (Q K^T)_ij / (alpha sqrt(d)), Q = filters W_Q, K = filters W_K.

    The mean over keys commutes with both products, so only vectors are ever formed: filters (W_Q (W_K^T mean filter)).
    W_K starts at zero and W_Q at random: all scores are equal and the gradient is alive from the first step.
    """

    def __init__(self, filters: int, weights: int, *, dim: int | None = None, alpha: float = 1.0) -> None:
        super().__init__()
        d = filters if dim is None else dim
        bound = 1 / math.sqrt(weights)
        self.query = nn.Parameter(torch.empty(weights, d).uniform_(-bound, bound))
        self.key = nn.Parameter(torch.zeros(weights, d))
        self.scale = 1 / (alpha * math.sqrt(d))

    def forward(self, filters_FN: Tensor) -> Tensor:
        mean_key_D = filters_FN.mean(0) @ self.key
        return self.scale * (filters_FN @ (self.query @ mean_key_D))


class Free(nn.Module):
    """One learnable logit per filter, blind to the weights: the control for the two attention networks."""

    def __init__(self, filters: int, weights: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(filters))

    def forward(self, filters_FN: Tensor) -> Tensor:
        return self.logits


SCORERS: dict[str, Callable[..., nn.Module]] = {"vanilla": Vanilla, "kq": KQ, "free": Free}

LEARNING_RATES = {"vanilla": 1e-6, "kq": 1e-3, "free": 1e-2}
"""Adam's default rate for each scorer: what lets scores travel from 1 to 0 within ten score phases."""


def check_scorer(name: str) -> None:
    """Raise the error that names the nearest scorer when there is none called ``name``."""
    if name not in SCORERS:
        raise RecipeError(f"There is no scorer '{name}'.{nearest(name, SCORERS)}")


def make_scorer(name: str, filters: int, weights: int, *, dim_ratio: float = 1.0, alpha: float = 1.0) -> nn.Module:
    """A scorer for ``filters`` filters of ``weights`` weights each. dim_ratio (d over F) and alpha concern KQ only."""
    check_scorer(name)
    if name == "kq":
        return KQ(filters, weights, dim=max(1, round(filters * dim_ratio)), alpha=alpha)
    return SCORERS[name](filters, weights)
