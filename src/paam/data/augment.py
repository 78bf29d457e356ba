"""Augmentation on the device: pure functions of pixels and pre-drawn random numbers.

Pixels are uint8 [N, C, H, W] until normalised. Every random number of an epoch comes from one generator on the CPU
(:func:`draw`), so that all devices and resumed runs see the same batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from paam.config.settings import Augmentation


@dataclass(frozen=True)
class Draws:
    """Random numbers of one epoch of N images in B batches, on the CPU.

    order [N]: permutation of the images; all others are indexed by position in it. shifts [2, N]: rows and columns,
    0 to 2 crop. flips [N]. operation [N]: index in OPERATIONS. strength [N]: 0 to 1. sign [N]: -1 or 1. holes [2, N]:
    0 to 1, centre of the cutout square. mix [B]: mixup weight of a batch's own images.
    """

    order: Tensor
    shifts: Tensor
    flips: Tensor
    operation: Tensor
    strength: Tensor
    sign: Tensor
    holes: Tensor
    mix: Tensor


def draw(augmentation: Augmentation, total: int, batches: int, seed: int) -> Draws:
    """All random numbers of an epoch. Switching one augmentation on does not change the draws of the others."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(total, generator=generator)
    shifts = torch.randint(0, 2 * augmentation.crop + 1, (2, total), generator=generator)
    flips = torch.rand(total, generator=generator) < (0.5 if augmentation.flip else 0.0)
    operation = torch.randint(0, len(OPERATIONS), (total,), generator=generator)
    strength = torch.randint(0, STRENGTHS, (total,), generator=generator) / (STRENGTHS - 1)
    sign = torch.randint(0, 2, (total,), generator=generator) * 2.0 - 1
    holes = torch.rand((2, total), generator=generator)
    beta = np.random.default_rng(seed).beta(augmentation.mixup or 1, augmentation.mixup or 1, batches)
    return Draws(order, shifts, flips, operation, strength, sign, holes, torch.from_numpy(beta).float())


def augment_pixels(pixels: Tensor, augmentation: Augmentation, draws: Draws, part: slice) -> Tensor:
    """Crop, flip and TrivialAugment for uint8 images, those of ``part`` of the epoch's order."""
    device = pixels.device
    if augmentation.crop or augmentation.flip:
        pixels = crop_and_flip(
            pixels, augmentation.crop, draws.shifts[:, part].to(device), draws.flips[part].to(device)
        )
    if augmentation.trivial:
        pixels = trivial_augment(pixels, draws.operation[part], draws.strength[part], draws.sign[part])
    return pixels


def crop_and_flip(pixels: Tensor, border: int, shifts: Tensor, flips: Tensor) -> Tensor:
    """Random crops after zero padding, and flips; shifts [2, N], flips [N]. The result is in channels-last memory."""
    count, _, height, width = pixels.shape
    device = pixels.device
    padded = F.pad(pixels, (border,) * 4)
    rows, columns = torch.arange(height, device=device), torch.arange(width, device=device)
    down = rows + shifts[0, :, None]
    across = torch.where(flips[:, None], columns.flip(0), columns) + shifts[1, :, None]
    which = torch.arange(count, device=device)[:, None, None]
    # Indexing three axes around a slice puts channels last: [N, H, W, C].
    return padded[which, :, down[:, :, None], across[:, None, :]].permute(0, 3, 1, 2)


def cut_out(images: Tensor, side: int, holes: Tensor) -> Tensor:
    """Cutout: set a square of ``side`` pixels around ``holes`` [2, N] to the mean, clipped at the image's edges."""
    height, width = images.shape[2:]
    inside = []
    for axis, size in enumerate((height, width)):
        first = (holes[axis] * size).floor() - side // 2
        position = torch.arange(size, device=images.device)
        inside.append((position >= first[:, None]) & (position < first[:, None] + side))
    return images.masked_fill((inside[0][:, :, None] & inside[1][:, None, :])[:, None], 0.0)


def mix_up(images: Tensor, labels: Tensor, share: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Mixup of each image, with weight ``share``, with the previous one; labels [N] become soft labels [N, classes].

    A batch is shuffled already, so the previous image is a random partner.
    """
    targets = F.one_hot(labels, classes).float()
    return share * images + (1 - share) * images.roll(1, 0), share * targets + (1 - share) * targets.roll(1, 0)


# --- TrivialAugment, wide ---------------------------------------------------------------------------------------------

STRENGTHS = 31

Operation = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Images as floats 0 to 255 [n, C, H, W], strength [n] (0 to 1) and sign [n] -> images of the same kind."""


def trivial_augment(pixels: Tensor, operation: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    """Apply each image's own operation. ``operation`` is on the CPU, where images are grouped by operation."""
    result = pixels.clone()
    for number, function in enumerate(OPERATIONS.values()):
        rows = (operation == number).nonzero().flatten()
        if len(rows):
            where = rows.to(pixels.device)
            column = [values[rows].view(-1, 1, 1, 1).to(pixels.device) for values in (strength, sign)]
            changed = function(pixels[where].float(), *column)
            result[where] = changed.round().clamp(0, 255).to(torch.uint8)
    return result


def _moved(images: Tensor, matrices: Tensor) -> Tensor:
    """Affine sampling by matrices [n, 2, 3], in pixels from the centre; outside is black."""
    height, width = images.shape[2:]
    # affine_grid counts from -1 to 1 along each axis, so pixels are scaled by half of its length.
    scale = torch.tensor([width / 2, height / 2], device=images.device)
    relative = torch.cat([matrices[:, :, :2] * scale, matrices[:, :, 2:]], 2) / scale.view(1, 2, 1)
    grid = F.affine_grid(relative, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="nearest", padding_mode="zeros", align_corners=False)


def _matrices(like: Tensor, entries: dict[tuple[int, int], Tensor]) -> Tensor:
    matrices = torch.eye(2, 3, device=like.device).repeat(len(like), 1, 1)
    for (row, column), values in entries.items():
        matrices[:, row, column] = values.flatten()
    return matrices


def _shear(row: int, column: int) -> Operation:
    def shear(images: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
        slope = 0.99 * strength * sign
        # The top left corner is fixed, not the centre.
        corner = images.shape[2 if column else 3] / 2
        return _moved(images, _matrices(images, {(row, column): slope, (row, 2): slope * corner}))

    return shear


def _translate(row: int) -> Operation:
    def translate(images: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
        return _moved(images, _matrices(images, {(row, 2): -(32.0 * strength * sign).trunc()}))

    return translate


def _rotate(images: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    angle = 135.0 * strength * sign * math.pi / 180
    cos, sin = angle.cos(), angle.sin()
    return _moved(images, _matrices(images, {(0, 0): cos, (0, 1): -sin, (1, 0): sin, (1, 1): cos}))


def _grey(images: Tensor) -> Tensor:
    """Luminance, rounded down; images without three channels are returned unchanged."""
    if images.shape[1] != 3:
        return images
    weights = torch.tensor([0.2989, 0.587, 0.114], device=images.device).view(1, 3, 1, 1)
    return (images * weights).sum(1, keepdim=True).floor().expand_as(images)


def _blend(images: Tensor, other: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    """Interpolate towards ``other`` or extrapolate away from it, almost by 1 at strength 1. Rounds down."""
    factor = 1 + 0.99 * strength * sign
    # This form is exact where both are equal: a sum of two products may round below that and lose a grey level.
    return (other + factor * (images - other)).clamp(0, 255).floor()


def _brightness(images: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    return _blend(images, torch.zeros_like(images), strength, sign)


def _colour(images: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    return _blend(images, _grey(images), strength, sign)


def _contrast(images: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    return _blend(images, _grey(images).mean((1, 2, 3), keepdim=True).expand_as(images), strength, sign)


def _sharpness(images: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    channels, height, width = images.shape[1:]
    if min(height, width) <= 2:
        return images
    kernel = torch.ones(3, 3, device=images.device)
    kernel[1, 1] = 5
    blurred = images.clone()  # border pixels are unchanged
    inner = F.conv2d(images, (kernel / kernel.sum()).repeat(channels, 1, 1, 1), groups=channels)
    blurred[:, :, 1:-1, 1:-1] = inner.round()
    return _blend(images, blurred, strength, sign)


def _posterize(images: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    step = 2.0 ** (6 * strength).round()  # keeps 8 to 2 bits
    return (images / step).floor() * step


def _solarize(images: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    return torch.where(images >= 255 * (1 - strength), 255 - images, images)


def _autocontrast(images: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    spread = high - low
    stretched = ((images - low) * (255 / spread.clamp(min=1))).clamp(0, 255).floor()
    return torch.where(spread > 0, stretched, images)


def _equalize(images: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    """Histogram equalization per channel."""
    levels = images.long().flatten(0, 1).flatten(1)  # [n * C, H * W]
    histogram = torch.zeros(len(levels), 256, dtype=torch.long, device=images.device)
    histogram.scatter_add_(1, levels, torch.ones_like(levels))
    total = histogram.cumsum(1)
    last = histogram.gather(1, levels.amax(1, keepdim=True))
    step = (levels.shape[1] - last) // 255
    table = ((total - histogram + step // 2) // step.clamp(min=1)).clamp(0, 255)
    spread = torch.where(step > 0, table.gather(1, levels), levels)
    return spread.view(images.shape).float()


OPERATIONS: dict[str, Operation] = {
    "identity": lambda images, strength, sign: images,
    "shear x": _shear(0, 1),
    "shear y": _shear(1, 0),
    "translate x": _translate(0),
    "translate y": _translate(1),
    "rotate": _rotate,
    "brightness": _brightness,
    "colour": _colour,
    "contrast": _contrast,
    "sharpness": _sharpness,
    "posterize": _posterize,
    "solarize": _solarize,
    "autocontrast": _autocontrast,
    "equalize": _equalize,
}
