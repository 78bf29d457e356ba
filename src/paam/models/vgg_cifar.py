"""VGG-16 with batch norm for 32 x 32 images: thirteen convolutions, one classifier layer."""

from __future__ import annotations

from torch import Tensor, nn

VGG16 = (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512)
"""Widths of the convolutions; M is a 2 x 2 max-pool."""


class VGG(nn.Module):
    """Images [N, in_channels, H, W], H and W at least 16, to logits [N, num_classes]."""

    def __init__(self, num_classes: int = 10, in_channels: int = 3) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width = in_channels
        for item in VGG16:
            if isinstance(item, int):
                layers += [nn.Conv2d(width, item, 3, padding=1, bias=False), nn.BatchNorm2d(item), nn.ReLU()]
                width = item
            else:
                layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.pool(self.features(x)).flatten(1))  # type: ignore[no-any-return]


def vgg16_bn(num_classes: int = 10, in_channels: int = 3) -> VGG:
    """14,724,042 parameters on CIFAR-10."""
    return VGG(num_classes, in_channels)
