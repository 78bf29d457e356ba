"""Augmentation against Pillow, loops over single pixels and hand-worked cases; and what is drawn for an epoch."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

import paam.data.batches
from paam.data import Augmentation, Split
from paam.data.augment import OPERATIONS, STRENGTHS, crop_and_flip, cut_out, draw, mix_up, trivial_augment
from paam.data.batches import Normalization, TrainingBatches

LEVELS = [*range(STRENGTHS)]
SIGNS = (1.0, -1.0)
SIDE = 32


def some_images(channels: int = 3, height: int = SIDE, width: int = SIDE, count: int = 4) -> torch.Tensor:
    """uint8: noise, smooth shades, few levels, and one plain image."""
    generator = torch.Generator().manual_seed(7)
    noise = torch.randint(0, 256, (count, channels, height, width), generator=generator)
    rows, columns = torch.arange(height).view(-1, 1), torch.arange(width)
    shape = noise.shape[1:]
    noise[1] = (30 + 3 * rows + columns + 20 * torch.arange(channels).view(-1, 1, 1)).expand(shape)
    noise[2] = noise[2] // 64 * 64
    noise[3] = 77
    return noise.to(torch.uint8)


def applied(name: str, images: torch.Tensor, strength: float, sign: float) -> np.ndarray:
    number = list(OPERATIONS).index(name)
    count = len(images)
    result = trivial_augment(
        images, torch.full((count,), number), torch.full((count,), strength), torch.full((count,), sign)
    )
    assert result.dtype == torch.uint8
    return result.numpy()


def pillow(images: torch.Tensor, change) -> np.ndarray:
    """uint8 [N, C, H, W] through a function of Pillow images."""
    changed = []
    for image in images.numpy():
        picture = Image.fromarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0))
        array = np.asarray(change(picture))
        changed.append(array[None] if array.ndim == 2 else array.transpose(2, 0, 1))
    return np.stack(changed)


# ---------------------------------------------------------------- pixels that move


def away_from_edges(matrix: tuple[float, ...], height: int = SIDE, width: int = SIDE) -> np.ndarray:
    """[H, W]: where a read position lies clearly inside a pixel, so that rounding cannot decide."""
    a, b, c, d, e, f = matrix
    y, x = np.mgrid[:height, :width] + 0.5
    places = np.stack([a * x + b * y + c, d * x + e * y + f])
    return (np.abs(places - np.round(places)) > 1e-3).all(0)


def assert_moved(name: str, images: torch.Tensor, level: int, sign: float, matrix: tuple[float, ...]) -> None:
    height, width = images.shape[2:]
    theirs = pillow(
        images, lambda i: i.transform(i.size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST, fillcolor=0)
    )
    sure = away_from_edges(matrix, height, width)
    assert sure.mean() > 0.9
    ours = applied(name, images, level / 30, sign)
    assert np.array_equal(ours[:, :, sure], theirs[:, :, sure]), (name, level, sign)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("sign", SIGNS)
def test_shears_hold_the_top_left_corner(channels, sign):
    images = some_images(channels, 20, SIDE)
    for level in LEVELS:
        slope = 0.99 * level / 30 * sign
        assert_moved("shear x", images, level, sign, (1, slope, 0, 0, 1, 0))
        assert_moved("shear y", images, level, sign, (1, 0, 0, slope, 1, 0))


@pytest.mark.parametrize("sign", SIGNS)
def test_translations_move_by_whole_pixels_up_to_32(sign):
    images = some_images(3, 20, 40)
    for level in LEVELS:
        pixels = sign * (32 * level // 30)
        for name, axis in (("translate x", 3), ("translate y", 2)):
            ours = applied(name, images, level / 30, sign)
            expected = np.zeros_like(ours)
            for place in range(images.shape[axis]):
                source = place - int(pixels)
                if 0 <= source < images.shape[axis]:
                    index = [slice(None)] * 4
                    index[axis] = place
                    expected[tuple(index)] = images.select(axis, source).numpy()
            assert np.array_equal(ours, expected), (name, level)


@pytest.mark.parametrize("sign", SIGNS)
def test_rotations_are_pillows(sign):
    images = some_images()
    for level in LEVELS:
        degrees = 135 * level / 30 * sign
        angle = math.radians(degrees)
        cos, sin, half = math.cos(angle), math.sin(angle), SIDE / 2
        # output -> input, around the centre: what Image.rotate documents as counter-clockwise
        matrix = (cos, -sin, half - half * cos + half * sin, sin, cos, half - half * sin - half * cos)
        sure = away_from_edges(matrix)
        assert sure.mean() > 0.9
        theirs = pillow(images, lambda i, degrees=degrees: i.rotate(degrees, Image.Resampling.NEAREST, fillcolor=0))
        ours = applied("rotate", images, level / 30, sign)
        assert np.array_equal(ours[:, :, sure], theirs[:, :, sure]), level


# ---------------------------------------------------------------- pixels that change


def enhanced(kind, factor: float):
    return lambda image: kind(image).enhance(factor)


@pytest.mark.parametrize(
    ("name", "kind", "levels"),
    [
        # Pillow rounds grey and its mean to whole levels, we as torchvision does; far away from them that is doubled.
        ("brightness", ImageEnhance.Brightness, 1),
        ("colour", ImageEnhance.Color, 2),
        ("contrast", ImageEnhance.Contrast, 2),
        ("sharpness", ImageEnhance.Sharpness, 1),
    ],
)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("sign", SIGNS)
def test_enhancements_are_pillows_but_for_rounding(name, kind, levels, channels, sign):
    images = some_images(channels, 20, SIDE)
    moved = 0.0
    for level in LEVELS:
        ours = applied(name, images, level / 30, sign).astype(int)
        theirs = pillow(images, enhanced(kind, 1 + sign * 0.99 * level / 30)).astype(int)
        assert np.abs(ours - theirs).max() <= levels, (name, level)
        assert np.abs(ours - theirs).mean() < 0.5 * levels, (name, level)
        moved = max(moved, float(np.abs(ours - images.numpy()).mean()))
    if (name, channels) == ("colour", 1):
        assert moved == 0  # grey has no colour to lose, and must not fade by rounding
    else:
        assert moved > 10


def test_posterize_keeps_eight_down_to_two_bits():
    images, seen = some_images(), set()
    for level in LEVELS:
        bits = 8 - round(6 * level / 30)
        seen.add(bits)
        theirs = pillow(images, lambda i, bits=bits: ImageOps.posterize(i, bits))
        assert np.array_equal(applied("posterize", images, level / 30, 1.0), theirs), level
    assert seen == {8, 7, 6, 5, 4, 3, 2}


def test_solarize_inverts_from_the_threshold_on():
    images = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    for level in LEVELS:
        threshold = 255 * (30 - level) / 30
        theirs = pillow(images, lambda i, threshold=threshold: ImageOps.solarize(i, threshold))
        assert np.array_equal(applied("solarize", images, level / 30, -1.0), theirs), level


@pytest.mark.parametrize("channels", [1, 3])
def test_autocontrast_and_equalize_are_pillows(channels):
    images = some_images(channels)
    for batch in (images, images[:, :, :5, :5]):  # of 25 pixels, a step is less than one level
        assert np.array_equal(applied("equalize", batch, 0.5, 1.0), pillow(batch, ImageOps.equalize))
        ours = applied("autocontrast", batch, 0.5, 1.0).astype(int)
        theirs = pillow(batch, ImageOps.autocontrast).astype(int)
        assert np.abs(ours - theirs).max() <= 1
        assert (ours != theirs).mean() < 0.01
        assert ours.max() == 255


def test_identity_and_strength_zero_change_nothing():
    images = some_images()
    for name in OPERATIONS:
        strength = 1.0 if name == "identity" else 0.0
        if name not in ("autocontrast", "equalize", "solarize"):  # those have no strength, or begin at white
            for sign in SIGNS:
                assert np.array_equal(applied(name, images, strength, sign), images.numpy()), name


def test_images_too_small_to_sharpen_stay():
    images = some_images(3, 2, 9)
    assert np.array_equal(applied("sharpness", images, 1.0, 1.0), images.numpy())


def test_every_image_goes_through_its_own_operation():
    images = some_images(3, 12, 12, count=4).repeat(14, 1, 1, 1)
    generator = torch.Generator().manual_seed(1)
    operation = torch.randperm(56, generator=generator) % len(OPERATIONS)
    strength = torch.randint(0, 31, (56,), generator=generator) / 30
    sign = torch.randint(0, 2, (56,), generator=generator) * 2.0 - 1
    before = images.clone()
    mixed = trivial_augment(images, operation, strength, sign)
    assert torch.equal(images, before)
    for place in range(56):
        one = slice(place, place + 1)
        alone = applied(list(OPERATIONS)[operation[place]], images[one], float(strength[place]), float(sign[place]))
        assert np.array_equal(mixed[one].numpy(), alone)


# ---------------------------------------------------------------- crops, holes, mixtures


def test_crops_and_mirrors_are_those_of_a_loop():
    images = some_images(3, 9, 7, count=6)
    border = 2
    generator = torch.Generator().manual_seed(3)
    shifts = torch.randint(0, 2 * border + 1, (2, 6), generator=generator)
    shifts[:, 0], shifts[:, 1] = 0, 2 * border
    flips = torch.tensor([True, False, True, False, True, False])
    ours = crop_and_flip(images, border, shifts, flips)
    for n in range(6):
        for y in range(9):
            for x in range(7):
                row = y + int(shifts[0, n]) - border
                column = (6 - x if flips[n] else x) + int(shifts[1, n]) - border
                inside = 0 <= row < 9 and 0 <= column < 7
                expected = images[n, :, row, column] if inside else torch.zeros(3, dtype=torch.uint8)
                assert torch.equal(ours[n, :, y, x], expected), (n, y, x)


@pytest.mark.parametrize("side", [1, 2, 3, 6, 40])
def test_holes_are_squares_clipped_at_the_edges(side):
    images = torch.randn(5, 2, 8, 11, generator=torch.Generator().manual_seed(0)) + 5
    holes = torch.tensor([[0.0, 0.999, 0.5, 0.3, 0.06], [0.0, 0.999, 0.5, 0.7, 0.99]])
    ours = cut_out(images, side, holes)
    for n in range(5):
        centre = int(holes[0, n] * 8), int(holes[1, n] * 11)
        for y in range(8):
            for x in range(11):
                inside = all(
                    middle - side // 2 <= place < middle - side // 2 + side
                    for middle, place in zip(centre, (y, x), strict=True)
                )
                expected = torch.zeros(2) if inside else images[n, :, y, x]
                assert torch.equal(ours[n, :, y, x], expected), (n, y, x)


def test_mixtures_by_hand():
    images = torch.tensor([1.0, 2.0, 10.0]).view(3, 1, 1, 1)
    mixed, shares = mix_up(images, torch.tensor([0, 2, 1]), torch.tensor(0.75), 4)
    # each with the one before it, the first with the last
    assert mixed.flatten().tolist() == [0.75 * 1 + 0.25 * 10, 0.75 * 2 + 0.25 * 1, 0.75 * 10 + 0.25 * 2]
    assert shares.tolist() == [[0.75, 0.25, 0, 0], [0.25, 0, 0.75, 0], [0, 0.75, 0.25, 0]]


# ---------------------------------------------------------------- what is drawn

EVERYTHING = Augmentation(crop=3, flip=True, trivial=True, cutout=4, mixup=0.4)


def test_draws_depend_on_their_arguments_and_on_nothing_else():
    torch.manual_seed(1)
    first = draw(EVERYTHING, 100, 5, seed=8)
    torch.manual_seed(2)
    np.random.seed(3)
    state = torch.get_rng_state()
    again, other = draw(EVERYTHING, 100, 5, seed=8), draw(EVERYTHING, 100, 5, seed=9)
    assert torch.equal(state, torch.get_rng_state())
    for field in dataclasses.fields(first):
        assert torch.equal(getattr(first, field.name), getattr(again, field.name)), field.name
        assert not torch.equal(getattr(first, field.name), getattr(other, field.name)), field.name


@pytest.mark.parametrize(
    ("off", "own"),
    [
        ({"crop": 0}, "shifts"),
        ({"flip": False}, "flips"),
        ({"trivial": False}, None),
        ({"cutout": 0}, None),
        ({"mixup": 0.0}, "mix"),
    ],
)
def test_switching_one_augmentation_does_not_change_what_others_draw(off, own):
    whole, less = draw(EVERYTHING, 500, 9, seed=4), draw(dataclasses.replace(EVERYTHING, **off), 500, 9, seed=4)
    for field in dataclasses.fields(whole):
        same = torch.equal(getattr(whole, field.name), getattr(less, field.name))
        assert same == (field.name != own), field.name


def test_draws_have_the_ranges_and_frequencies_they_should():
    count = 14_000
    draws = draw(EVERYTHING, count, 4000, seed=0)
    assert torch.equal(draws.order.sort().values, torch.arange(count))
    assert draws.shifts.unique().tolist() == [*range(7)]
    assert set(draws.sign.tolist()) == {-1.0, 1.0}
    assert torch.equal((draws.strength * 30).round().unique(), torch.arange(31.0))
    assert draws.holes.min() >= 0
    assert draws.holes.max() < 1
    # Each within five standard deviations of an even choice.
    for values, cells in ((draws.operation, 14), (draws.shifts[0], 7), (draws.flips.long(), 2), (draws.sign > 0, 2)):
        counts = torch.bincount(values.long(), minlength=cells)
        assert len(counts) == cells
        assert (counts - count / cells).abs().max() < 5 * math.sqrt(count / cells)
    # Beta(a, a) has mean 1/2 and variance 1 / (4 (2 a + 1)).
    assert draws.mix.mean() == pytest.approx(0.5, abs=0.03)
    assert draws.mix.var() == pytest.approx(1 / (4 * 1.8), abs=0.01)


# ---------------------------------------------------------------- blocks


def batches_of(images: torch.Tensor, what: Augmentation, values: int, monkeypatch, seed: int = 0) -> TrainingBatches:
    monkeypatch.setattr(paam.data.batches, "BLOCK_VALUES", values)
    split = Split(images, torch.arange(len(images)) % 5)
    normalize = Normalization((0.4, 0.5, 0.6)[: images.shape[1]], (0.2, 0.25, 0.3)[: images.shape[1]])
    return TrainingBatches(split, normalize, what, batch_size=8, classes=5, seed=seed, device="cpu")


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (0, 7), (5, 7)])
def test_batches_do_not_depend_on_the_size_of_blocks(monkeypatch, channels, seed, epoch):
    images = some_images(channels, 10, 10).repeat(23, 1, 1, 1)[:91]  # a rest of 3 behind 11 batches
    made = [
        list(batches_of(images, EVERYTHING, values, monkeypatch, seed).epoch(epoch))
        for values in (1, 3 * 8 * channels * 100, 1 << 25)
    ]
    assert [len(batches) for batches in made] == [11] * 3
    for other in made[1:]:
        for (one, labels), (two, shares) in zip(made[0], other, strict=True):
            assert torch.equal(one, two)
            assert torch.equal(labels, shares)


def test_an_epoch_of_batches_is_that_of_a_loop_over_images(monkeypatch):
    images = some_images(3, 10, 10, count=40)
    what = dataclasses.replace(EVERYTHING, mixup=0.3)
    made = list(batches_of(images, what, 3 * 8 * 300, monkeypatch, seed=2).epoch(3))
    draws = draw(what, 40, 5, 2 * 1_000_003 + 3)
    mean, std = np.array([0.4, 0.5, 0.6]).reshape(3, 1, 1), np.array([0.2, 0.25, 0.3]).reshape(3, 1, 1)
    for step, (batch, shares) in enumerate(made):
        plain, targets = [], []
        for place in range(8 * step, 8 * step + 8):
            number = int(draws.order[place])
            padded = np.pad(images[number].numpy(), ((0, 0), (3, 3), (3, 3)))
            top, left = (int(shift) for shift in draws.shifts[:, place])
            window = padded[:, top : top + 10, left : left + 10]
            window = window[:, :, ::-1] if draws.flips[place] else window
            name = list(OPERATIONS)[draws.operation[place]]
            image = torch.from_numpy(window.copy())[None]
            changed = applied(name, image, float(draws.strength[place]), float(draws.sign[place]))[0]
            values = (changed / 255 - mean) / std
            middle = [int(float(hole) * 10) for hole in draws.holes[:, place]]
            values[:, max(middle[0] - 2, 0) : max(middle[0] + 2, 0), max(middle[1] - 2, 0) : max(middle[1] + 2, 0)] = 0
            plain.append(values)
            targets.append(np.eye(5)[number % 5])
        share = float(draws.mix[step])
        for found, made, near in ((batch, plain, 1e-5), (shares, targets, 1e-6)):
            expected = share * np.stack(made) + (1 - share) * np.stack([made[-1], *made[:-1]])
            assert np.abs(found.numpy() - expected).max() < near
