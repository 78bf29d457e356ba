"""Attention over channels or positions, on maps [N, C, H, W] and on tokens [N, L, C]."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(channels, 3, 1), nn.Conv2d(3, channels, 1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.expand(self.relu(self.reduce(F.adaptive_avg_pool2d(x, 1))))
        return x * torch.sigmoid(scale)


class LinearExcite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc = nn.Sequential(nn.Linear(channels, 4), nn.ReLU(), nn.Linear(4, channels), nn.Hardsigmoid())

    def forward(self, x: Tensor) -> Tensor:
        b, c, _, _ = x.size()
        y = self.fc(x.mean((2, 3)).view(b, c)).view(b, c, 1, 1)
        return x * y.expand_as(x)


class NeighbourExcite(nn.Module):
    """ECA: a 1-d convolution along the channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = x.mean((2, 3)).view(x.shape[0], 1, -1)
        y = self.conv(y).view(x.shape[0], -1, 1, 1)
        return x * y.sigmoid().expand_as(x)


class Attentive(nn.Module):
    """CBAM: channel attention by mean and maximum, then spatial attention by mean and maximum over channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(channels, 3, 1), nn.Conv2d(3, channels, 1)
        self.places = nn.Conv2d(2, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        mean, most = x.mean((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
        x = x * torch.sigmoid(self.b(F.relu(self.a(mean))) + self.b(F.relu(self.a(most))))
        seen = torch.cat([x.mean(1, keepdim=True), x.max(dim=1, keepdim=True)[0]], dim=1)
        return x * self.places(seen).sigmoid()


class Selective(nn.Module):
    """Selective kernel: two branches, weighted against each other by a softmax."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.a = nn.Conv2d(channels, channels, 3, padding=1)
        self.b = nn.Conv2d(channels, channels, 3, padding=2, dilation=2)
        self.less, self.more = nn.Linear(channels, 4), nn.Linear(4, 2 * channels)

    def forward(self, x: Tensor) -> Tensor:
        branches = torch.stack([self.a(x), self.b(x)], dim=1)
        weights = self.more(F.relu(self.less(branches.sum(1).mean((2, 3)))))
        weights = weights.view(x.shape[0], 2, -1).softmax(dim=1)
        return (branches * weights[:, :, :, None, None]).sum(dim=1)


class Crossed(nn.Module):
    """Coordinate attention: pooled along each axis separately, concatenated, and split again."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.both, self.h, self.w = nn.Conv2d(channels, 5, 1), nn.Conv2d(5, channels, 1), nn.Conv2d(5, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        h, w = x.shape[2:]
        y = torch.cat([x.mean(3, keepdim=True), x.mean(2, keepdim=True).permute(0, 1, 3, 2)], dim=2)
        a, b = torch.split(F.relu(self.both(y)), [h, w], dim=2)
        return x * self.h(a).sigmoid() * self.w(b.permute(0, 1, 3, 2)).sigmoid()


class Global(nn.Module):
    """Non-local: attention over all positions by matrix products."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Conv2d(channels, 3, 1), nn.Conv2d(channels, 3, 1), nn.Conv2d(channels, 4, 1)
        self.out = nn.Conv2d(4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        n, _, h, w = x.size()
        q, k, v = self.q(x).flatten(2).transpose(1, 2), self.k(x).flatten(2), self.v(x).view(n, -1, h * w)
        y = torch.bmm(F.softmax(torch.bmm(q, k), -1), v.transpose(1, 2))
        return x + self.out(y.transpose(1, 2).reshape(n, -1, h, w))


class Attention(nn.Module):
    """On tokens [N, L, C], as in vision transformers."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.heads, self.size = 2, 3
        self.qkv, self.proj = nn.Linear(channels, 18), nn.Linear(6, channels)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).reshape(b, n, self.heads * self.size))


class WrittenAttention(nn.Module):
    """The same, written out."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(channels, 4) for _ in range(3))
        self.proj = nn.Linear(4, channels)

    def forward(self, x: Tensor) -> Tensor:
        weights = (self.q(x) * self.q.out_features**-0.5) @ self.k(x).transpose(-2, -1)
        return x + self.proj(weights.softmax(dim=-1) @ self.v(x))


class Torchs(nn.Module):
    """torch's built-in attention."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.reads, self.attend = nn.Linear(channels, 4), nn.MultiheadAttention(4, 2, batch_first=True)
        self.out = nn.Linear(4, channels)

    def forward(self, x: Tensor) -> Tensor:
        y = self.reads(x)
        y, _ = self.attend(y, y, y, need_weights=False)
        return x + self.out(y)


MAPS = (SqueezeExcite, LinearExcite, NeighbourExcite, Attentive, Selective, Crossed, Global)
TOKENS = (Attention, WrittenAttention, Torchs)
