"""The 1,797 handwritten digits that are bundled with the package, for real data offline.

Source: "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, E. Alpaydin and
C. Kaynak, licensed under CC BY 4.0. These are the 1,797 images of its test part, unchanged.

`digits.npz` holds `images` uint8 [1797, 8, 8] (values 0..16) and `labels` uint8 [1797] in the order of the
source, and `test` int16 [500], the ascending indices of the test images. Those were drawn once, stratified
by class (48 to 51 of each), and are stored, so they never change. The rest is the training set.
"""

from __future__ import annotations

from importlib import resources

import numpy as np
import torch

from paam.data.dataset import Dataset, Split, check_native_size
from paam.data.marks import mark_pixels
from paam.data.registry import Wanted, register_dataset
from paam.errors import RecipeError


def load_digits(image_size: int | None = None) -> Dataset:
    """Train uint8 [1297, 1, 8, 8], test uint8 [500, 1, 8, 8]; no holdout.

    A stored value v in 0..16 becomes v * 255 // 16, so that 0 stays 0 and 16 becomes 255.
    mean and std are those of the 1,297 training images.
    """
    check_native_size("digits", image_size, native=8)
    with (
        resources.files("paam.data").joinpath("digits.npz").open("rb") as file,
        np.load(file, allow_pickle=False) as stored,
    ):
        values, labels, test_places = stored["images"], stored["labels"], stored["test"]
    # uint16, because 16 * 255 does not fit into the stored uint8
    images = torch.from_numpy((values.astype(np.uint16) * 255 // 16).astype(np.uint8)).unsqueeze(1)
    targets = torch.from_numpy(labels.astype(np.int64))
    in_test = torch.zeros(len(targets), dtype=torch.bool)
    in_test[torch.from_numpy(test_places.astype(np.int64))] = True
    whole = Split(images, targets, tuple(map(str, range(len(images)))), mark_pixels(images))
    train = whole.take((~in_test).nonzero().flatten())
    fractions = images[~in_test].double() / 255
    return Dataset(
        train=train,
        holdout=None,
        test=whole.take(in_test.nonzero().flatten()),
        classes=tuple("0123456789"),
        mean=(fractions.mean().item(),),
        std=(fractions.std(correction=0).item(),),
    )


def _wanted(wanted: Wanted) -> Dataset:
    if wanted.directory is not None:
        raise RecipeError("The digits are bundled with paam; leave out --data (data.directory).")
    return load_digits(wanted.image_size)


register_dataset("digits", _wanted)
