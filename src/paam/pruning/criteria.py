"""Built-in criteria. Your own is a function: Criterion("mine", lambda rows: rows.std(1))."""

from __future__ import annotations

import torch
from torch import Tensor

from paam.pruning.criterion import Criterion, register_criterion


def distances(rows: Tensor) -> Tensor:
    """Sum of a filter's Euclidean distances to all others in its layer: small near the geometric median."""
    return torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").sum(1)


def rank(maps: Tensor) -> Tensor:
    """Mean rank of the feature maps of each filter: [images, F, height, width] -> [F]; 1 without spatial axes."""
    if maps.dim() < 4:
        return (maps.flatten(2) != 0).any(2).float().mean(0) if maps.dim() > 2 else (maps != 0).float().mean(0)
    ranks: Tensor = torch.linalg.matrix_rank(maps.flatten(2, -2).float())
    return ranks.float().mean(0)


L1 = register_criterion(Criterion("l1", lambda rows: rows.abs().sum(1)))
L2 = register_criterion(Criterion("l2", lambda rows: rows.norm(dim=1)))
FPGM = register_criterion(Criterion("fpgm", distances))
HRANK = register_criterion(Criterion("hrank", rank, reads="maps"))
RANDOM = register_criterion(Criterion("random", lambda noise: noise, reads="noise", relative=False))
