"""Networks for filter selection, and random scores for them."""

from __future__ import annotations

import torch

from paam.graph.network import Network, prepare
from paam.models import resnet20, vgg16_bn

IMAGE = torch.zeros(1, 3, 32, 32)
NETWORKS = {
    "resnet20": prepare(resnet20(), IMAGE),
    "resnet20 tied": prepare(resnet20(), IMAGE, streams="tied"),
    "resnet20 branch": prepare(resnet20(), IMAGE, placement="branch"),
    "vgg16_bn": prepare(vgg16_bn(), IMAGE),
}


def random_scores(network: Network, seed: int, spread: float = 0.3) -> dict[str, torch.Tensor]:
    """Scores whose level differs from layer to layer, like trained ones."""
    rng = torch.Generator().manual_seed(seed)
    return {
        g.name: (0.5 + spread * torch.randn(1, generator=rng) + 0.2 * torch.randn(g.width, generator=rng)).clamp(0, 1.2)
        for g in network.groups
    }
