"""Common blocks on maps [N, C, H, W] and on tokens [N, L, C], with as many output channels as input channels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from generator import own


class Residual(nn.Module):
    """Adds its input if the layer's attributes show that it can."""

    def __init__(self, channels: int, width: int = 6) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(channels, width, 3, padding=1), nn.Conv2d(width, channels, 1)
        self.norm, self.drop = nn.BatchNorm2d(width), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.drop(F.relu(self.norm(self.a(x)))))
        return y + x if self.a.in_channels == self.b.out_channels else y


class ScaledResidual(nn.Module):
    """Normaliser-free: scaled by the width of a layer."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.a, self.b = own.Standardised2d(channels, 6, 3, padding=1), own.Standardised2d(6, channels, 1)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.a(F.silu(x) * 1.7)) * self.a.out_channels**-0.5
        return self.b(y).mul_(self.gain) * 0.2 + x


class DropPath(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.conv(x))

    def drop(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        keep = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(0.8)
        return x * keep.div_(0.8)


class ConvNext(nn.Module):
    """Depthwise, then linear layers with channels last, with a scale for each channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.norm, self.up, self.down = nn.LayerNorm(channels, eps=0.1), nn.Linear(channels, 7), nn.Linear(7, channels)
        self.scale = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(F.gelu(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


class ResponseNorm(nn.Module):
    """Global response normalisation, with channels last."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma, self.beta = (nn.Parameter(torch.zeros(1, 1, 1, channels)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        size = torch.norm(x, p=2, dim=(1, 2), keepdim=True)
        size = size / (size.mean(dim=-1, keepdim=True) + 0.1)
        return (self.gamma * (x * size) + self.beta + x).permute(0, 3, 1, 2)


class ChannelNorm(nn.Module):
    """A layer norm over the channels of a map."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        x = (x - mean) / torch.sqrt((x - mean).pow(2).mean(1, keepdim=True) + 0.1)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class RootMeanNorm(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(1, channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=1, eps=0.1) * self.g * (x.shape[1] ** 0.5)


class FrozenNorm(nn.Module):
    """A batch norm made of buffers, as in detectors."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name in ("weight", "running_var"):
            self.register_buffer(name, torch.ones(channels))
        for name in ("bias", "running_mean"):
            self.register_buffer(name, torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + 1e-5).rsqrt()
        bias = self.bias - self.running_mean * scale
        return x * scale.reshape(1, -1, 1, 1) + bias.reshape(1, -1, 1, 1)


class Ghost(nn.Module):
    """Ghost module: half of the channels are computed from the other half, then sliced to the required number."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.out_channels, half = channels, (channels + 1) // 2
        self.first = nn.Sequential(nn.Conv2d(channels, half, 1, bias=False), nn.BatchNorm2d(half), nn.ReLU())
        self.cheap = nn.Conv2d(half, half, 3, padding=1, groups=half)

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x)
        return torch.cat([a, self.cheap(a)], dim=1)[:, : self.out_channels]


class Fused(nn.Module):
    """BiFPN: three branches of one map, added with learned weights."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))
        self.a, self.b = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        w = F.relu(self.w)
        w = w / (w.sum(0) + 0.1)
        return w[0] * self.a(x) + w[1] * self.b(x) + w[2] * x


class CrossStage(nn.Module):
    """One half goes through a layer, the other around it; iterated as a list, as in YOLO."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(channels, 8, 1), nn.Conv2d(16, channels, 1)
        self.m = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = list(self.first(x).chunk(2, 1))
        y.extend(m(y[-1]) for m in self.m)
        return self.last(torch.cat(y, 1))


class Scales(nn.Module):
    """Res2Net: each part is processed together with the output of the previous part."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(channels, 6, 1), nn.Conv2d(6, channels, 1)
        self.convs = nn.ModuleList(nn.Conv2d(2, 2, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.split(self.first(x), 2, 1)
        done, y = [], parts[0]
        for place, conv in enumerate(self.convs):
            y = parts[place] if place == 0 else y + parts[place]
            y = F.relu(conv(y))
            done.append(y)
        return self.last(torch.cat([*done, parts[-1]], 1))


class Shuffled(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(channels, 8, 1, groups=1), nn.Conv2d(8, channels, 1)
        self.depthwise = nn.Conv2d(4, 4, 3, padding=1, groups=4)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x).chunk(2, dim=1)
        y = torch.cat((a, self.depthwise(b)), dim=1)
        n, c, h, w = y.shape
        y = y.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)
        return self.b(y)


class Blurred(nn.Module):
    """Blur: a buffer with the same filter for all channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.register_buffer("filt", torch.ones(1, 1, 3, 3).repeat(channels, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (1, 1, 1, 1), mode="reflect")
        return F.conv2d(x, self.filt, groups=x.shape[1])


class Conditional(nn.Module):
    """Conditional convolution: separate weights for each sample, by turning the batch into groups."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(2, channels * channels))
        self.route = nn.Linear(channels, 2)

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        weight = torch.matmul(torch.sigmoid(self.route(x.mean((2, 3)))), self.experts).view(n * c, c, 1, 1)
        return F.conv2d(x.reshape(1, n * c, h, w), weight, groups=n).view(n, c, h, w)


class Reparametrised(nn.Module):
    """RepVGG: three branches with a norm each; no identity if the width changes."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.wide, self.wide_norm = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.thin, self.thin_norm = nn.Conv2d(channels, channels, 1, bias=False), nn.BatchNorm2d(channels)
        self.identity = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.wide_norm(self.wide(x)) + self.thin_norm(self.thin(x)) + self.identity(x))


class Dense(nn.Module):
    """Every layer reads all previous outputs."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({f"l{i}": nn.Conv2d(channels + 2 * i, 2, 3, padding=1) for i in range(3)})
        self.last = nn.Conv2d(channels + 6, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        made = [x]
        for layer in self.layers.values():
            made.append(F.elu(layer(torch.cat(made, 1))))
        return self.last(torch.cat(made, 1))


class Mlp(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(channels, eps=0.1), nn.Linear(channels, 8), nn.Linear(8, channels)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class GatedMlp(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(channels, 10), nn.Linear(5, channels)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)


MAPS = (
    Residual,
    ScaledResidual,
    DropPath,
    ConvNext,
    ResponseNorm,
    ChannelNorm,
    RootMeanNorm,
    FrozenNorm,
    Ghost,
    Fused,
    CrossStage,
    Scales,
    Shuffled,
    Blurred,
    Conditional,
    Reparametrised,
    Dense,
)
TOKENS = (Mlp, GatedMlp)
