"""The loaders against files written by hand, and against known facts about the data sets."""

from __future__ import annotations

import dataclasses
import hashlib
import pickle
import re
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from paam.data import Split, hold_out, load_data
from paam.data.differences import compare
from paam.data.manifest import manifest_of
from paam.data.marks import mark_pixels
from paam.errors import DataError, PaamError, RecipeError

REAL_CIFAR10 = Path(__file__).resolve().parents[3] / "shared" / "data" / "cifar10"
BATCHES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


# ---------------------------------------------------------------- the door


@pytest.mark.parametrize(
    ("name", "hint"), [("cifar-10", "Did you mean 'cifar10'"), ("imagenet", "cifar10, digits, folder")]
)
def test_unknown_names_are_refused_with_a_hint(name, hint):
    with pytest.raises(RecipeError, match=hint):
        load_data(name, directory=None, image_size=None, holdout=0, seed=0)


@pytest.mark.parametrize("share", [-0.1, 1.0, 1.5, float("nan")])
def test_holdout_must_be_a_share_before_anything_is_read(share):
    with pytest.raises(RecipeError, match="at least 0 and less than 1"):
        load_data("cifar10", directory="nowhere", image_size=None, holdout=share, seed=0)


@pytest.mark.parametrize(("name", "native"), [("digits", 8), ("cifar10", 32)])
def test_fixed_sizes_cannot_be_changed(tmp_path, name, native):
    with pytest.raises(RecipeError, match=f"{native} x {native}"):
        load_data(name, directory=None if name == "digits" else tmp_path, image_size=native + 1, holdout=0, seed=0)


def test_digits_lie_in_no_folder(tmp_path):
    with pytest.raises(RecipeError, match="leave out --data"):
        load_data("digits", directory=tmp_path)


@pytest.mark.parametrize("name", ["cifar10", "folder"])
def test_a_directory_that_cannot_exist_is_a_data_error(name):
    with pytest.raises(DataError):
        load_data(name, directory="x" * 5000, image_size=32, holdout=0, seed=0)


# ---------------------------------------------------------------- digits


def test_digits_are_the_ones_of_the_repository():
    data = load_data("digits", directory=None, image_size=8, holdout=0, seed=0)
    assert data.train.images.shape == (1297, 1, 8, 8)
    assert data.test.images.shape == (500, 1, 8, 8)
    assert data.train.images.dtype == data.test.images.dtype == torch.uint8
    assert data.train.labels.dtype == data.test.labels.dtype == torch.int64
    assert data.holdout is None
    assert data.classes == tuple("0123456789")
    total = torch.bincount(data.train.labels) + torch.bincount(data.test.labels)
    assert total.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    # the first sample of the source, a zero; it is one of the training images
    assert data.train.labels[0] == 0
    values = [[0, 0, 5, 13, 9, 1, 0, 0], [0, 0, 13, 15, 10, 15, 5, 0], [0, 3, 15, 2, 0, 11, 8, 0]]
    assert data.train.images[0, 0, :3].tolist() == [[v * 255 // 16 for v in row] for row in values]
    levels = torch.cat([data.train.images, data.test.images]).unique().tolist()
    assert levels == [v * 255 // 16 for v in range(17)]


def test_digits_split_is_stratified_disjoint_and_never_changes():
    data = load_data("digits", holdout=0, seed=0)
    for label, total in enumerate([178, 182, 177, 183, 181, 182, 181, 179, 174, 180]):
        assert abs(int((data.test.labels == label).sum()) - total * 500 / 1797) < 1
    train, test = ({image.numpy().tobytes() for image in part.images} for part in (data.train, data.test))
    assert len(train) == 1297  # no image occurs twice, so a shared one would show
    assert not train & test
    digest = hashlib.sha256(data.test.images.numpy().tobytes() + bytes(data.test.labels.tolist()))
    assert digest.hexdigest() == "ea311e1f3268d58cb8b5d272777c8a1e1ae51abd01f9b28280f660cfb5d42134"


def test_digits_mean_and_std_normalise_the_train_set():
    data = load_data("digits", holdout=0.2, seed=3)
    whole = torch.cat([data.train.images, data.holdout.images]).double() / 255
    normal = (whole - data.mean[0]) / data.std[0]
    assert len(data.mean) == len(data.std) == 1
    assert normal.mean().abs() < 1e-12
    assert (normal.pow(2).mean() - 1).abs() < 1e-12


# ---------------------------------------------------------------- hold_out


def numbered(labels: list[int]) -> Split:
    """Images that carry their own number, so that a part can be traced back."""
    numbers = torch.arange(len(labels))
    images = torch.stack([numbers // 256, numbers % 256], 1).to(torch.uint8).view(-1, 2, 1, 1)
    return Split(images, torch.tensor(labels))


def numbers_of(part: Split) -> list[int]:
    return [256 * int(high) + int(low) for high, low in part.images.flatten(1).tolist()]


@settings(deadline=None)
@given(
    labels=st.lists(st.integers(0, 4), min_size=2, max_size=300),
    share=st.floats(0, 1, exclude_max=True, exclude_min=True),
    seed=st.integers(0, 2**40),
)
def test_hold_out_takes_its_share_of_each_class_and_loses_nothing(labels, share, seed):
    train = numbered(labels)
    if max(map(labels.count, labels)) == 1:
        with pytest.raises(RecipeError, match="second image"):
            hold_out(train, share, seed)
        return
    kept, held = hold_out(train, share, seed)
    assert sorted(numbers_of(kept) + numbers_of(held)) == list(range(len(labels)))
    for part in (kept, held):
        numbers = numbers_of(part)
        assert numbers == sorted(numbers)
        assert part.labels.tolist() == [labels[number] for number in numbers]
    for label in set(labels):
        count, taken = labels.count(label), held.labels.tolist().count(label)
        assert abs(taken - share * count) <= 1
        assert (1 <= taken < count) if count > 1 else taken == 0
    again = hold_out(train, share, seed)
    assert numbers_of(again[1]) == numbers_of(held)


def test_hold_out_depends_on_its_seed_and_on_nothing_else():
    train = numbered([0, 1] * 500)
    state = torch.random.get_rng_state()
    drawn = {tuple(numbers_of(hold_out(train, 0.1, seed)[1])) for seed in range(20)}
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(5)
    assert tuple(numbers_of(hold_out(train, 0.1, 0)[1])) in drawn
    assert len(drawn) == 20
    chosen = np.bincount([number for numbers in drawn for number in numbers], minlength=1000)
    # 20 draws of 10 %: an even draw leaves about 122 images out of all of them, an uneven one many more
    assert (chosen == 0).sum() < 200


def test_hold_out_of_nothing_is_nothing():
    train = numbered([0, 1, 1])
    assert hold_out(train, 0, 1) == (train, None)


@pytest.mark.parametrize("share", [-1e-9, 1, float("nan")])
def test_hold_out_refuses_what_is_no_share(share):
    with pytest.raises(RecipeError, match="at least 0"):
        hold_out(numbered([0, 0]), share, 0)


def test_load_data_holds_out_of_the_train_set():
    data = load_data("digits", holdout=0.1, seed=7)
    whole = load_data("digits", holdout=0, seed=7)
    assert len(data.holdout) == 130
    assert len(data.train) == 1297 - 130
    assert torch.equal(data.test.images, whole.test.images)
    expected = hold_out(whole.train, 0.1, 7)[1]
    assert torch.equal(data.holdout.images, expected.images)


# ---------------------------------------------------------------- CIFAR-10


def pixel(batch, record, channel, row, column):
    """Differs along every axis, so that no two of them can be mixed up."""
    return (97 * batch + 3 * record + 101 * channel + 5 * row + 11 * column) % 251


def label(batch, record):
    return (3 * batch + record) % 10


@pytest.fixture(scope="module")
def cifar():
    """A folder with both layouts of the same synthetic images, written once and by hand."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "cifar-10-batches-bin").mkdir()
        (root / "cifar-10-batches-py").mkdir()
        place, record = np.arange(3072, dtype=np.uint16), np.arange(10_000, dtype=np.uint16)[:, None]
        for number, batch in enumerate(BATCHES):
            pixels = pixel(number, record, place // 1024, place // 32 % 32, place % 32).astype(np.uint8)
            labels = label(number, record).astype(np.uint8)
            np.hstack([labels, pixels]).tofile(root / "cifar-10-batches-bin" / f"{batch}.bin")
            content = {b"batch_label": b"x", b"labels": labels[:, 0].tolist(), b"data": pixels}
            content[b"filenames"] = [b"image_%d.png" % i for i in range(10_000)]
            # Python 2's protocol, and what Python 3 writes of its own accord
            with (root / "cifar-10-batches-py" / batch).open("wb") as file:
                pickle.dump(content, file, protocol=2 if number % 2 else 4)
        yield root


def linked(cifar: Path, folder: str, target: Path, without: str) -> Path:
    """A copy of a layout by links, but for one file."""
    target.mkdir(parents=True)
    for path in (cifar / folder).iterdir():
        if path.name != without:
            (target / path.name).symlink_to(path)
    return target


@pytest.fixture(scope="module")
def loaded(cifar):
    return load_data("cifar10", directory=str(cifar), image_size=32, holdout=0, seed=0)


def test_binary_pixels_land_where_the_format_says(loaded):
    assert loaded.train.images.shape == (50_000, 3, 32, 32)
    assert loaded.test.images.shape == (10_000, 3, 32, 32)
    assert loaded.train.images.dtype == torch.uint8
    assert loaded.train.labels.dtype == torch.int64
    assert (loaded.mean, loaded.std) == IMAGENET
    assert loaded.classes[3] == "cat"
    assert len(loaded.classes) == 10
    rng = np.random.default_rng(0)
    for _ in range(300):
        batch, record, channel, row, column = rng.integers((6, 10_000, 3, 32, 32)).tolist()
        part, place = (loaded.test, record) if batch == 5 else (loaded.train, batch * 10_000 + record)
        assert part.images[place, channel, row, column] == pixel(batch, record, channel, row, column)
        assert part.labels[place] == label(batch, record)


def test_both_layouts_give_the_same_tensors(cifar, loaded):
    data = load_data("cifar10", directory=cifar / "cifar-10-batches-py", holdout=0, seed=0)
    for ours, other in ((data.train, loaded.train), (data.test, loaded.test)):
        assert torch.equal(ours.images, other.images)
        assert torch.equal(ours.labels, other.labels)
    assert manifest_of(data).digest == manifest_of(loaded).digest


def test_one_pixel_and_one_label_of_60_000_images_are_found(loaded):
    before = manifest_of(loaded)
    images, labels = loaded.train.images.clone(), loaded.test.labels.clone()
    images[12_345, 2, 31, 31] ^= 1
    labels[77] = (labels[77] + 1) % 10
    train = dataclasses.replace(loaded.train, images=images, marks=mark_pixels(images))
    test = dataclasses.replace(loaded.test, labels=labels)
    now = manifest_of(dataclasses.replace(loaded, train=train, test=test))
    assert now.digest != before.digest
    label, image = compare(before, now).words
    was, became = (loaded.classes[number] for number in (loaded.test.labels[77], labels[77]))
    assert label == f"1 label changed (50077 was '{was}', is '{became}')"
    assert image == f"1 image changed ({loaded.classes[loaded.train.labels[12_345]]}/12345)"


def test_binary_is_preferred_and_python_is_used_where_binary_is_incomplete(cifar, tmp_path):
    linked(cifar, "cifar-10-batches-bin", tmp_path / "cifar-10-batches-bin", without="test_batch.bin")
    (tmp_path / "cifar-10-batches-py").mkdir()
    for batch in BATCHES:
        (tmp_path / "cifar-10-batches-py" / batch).write_bytes(b"not read")
    with pytest.raises(DataError, match="data_batch_1 is refused"):
        load_data("cifar10", directory=tmp_path)
    (tmp_path / "cifar-10-batches-bin" / "test_batch.bin").symlink_to(cifar / "cifar-10-batches-bin" / "test_batch.bin")
    assert len(load_data("cifar10", directory=tmp_path / "cifar-10-batches-bin").test) == 10_000
    assert len(load_data("cifar10", directory=tmp_path).test) == 10_000


def test_missing_cifar_says_what_to_fetch(tmp_path):
    with pytest.raises(DataError, match=r"cifar-10-binary\.tar\.gz.*--data DIR"):
        load_data("cifar10", directory=None)
    with pytest.raises(DataError, match=r"no directory .*nowhere.*cifar-10-binary\.tar\.gz.*--data DIR"):
        load_data("cifar10", directory=tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"does not contain CIFAR-10.*cifar-10-python\.tar\.gz.*--data DIR"):
        load_data("cifar10", directory=tmp_path)
    (tmp_path / "cifar-10-batches-py").mkdir()
    with pytest.raises(DataError, match=r"data_batch_1 \(about 31.*cifar-10-python\.tar\.gz"):
        load_data("cifar10", directory=tmp_path)


def test_a_missing_binary_file_is_named_with_its_size(cifar, tmp_path):
    folder = linked(cifar, "cifar-10-batches-bin", tmp_path / "bin", without="data_batch_4.bin")
    with pytest.raises(
        DataError,
        match=r"data_batch_4\.bin \(30,730,000 bytes\) is missing.*cifar-10-binary\.tar\.gz.*--data DIR",
    ):
        load_data("cifar10", directory=folder)


@pytest.mark.parametrize("size", [0, 30_729_999, 30_730_001])
def test_a_binary_file_of_the_wrong_size_is_named(cifar, tmp_path, size):
    folder = linked(cifar, "cifar-10-batches-bin", tmp_path / "bin", without="data_batch_1.bin")
    with (folder / "data_batch_1.bin").open("wb") as file:
        file.truncate(size)
    with pytest.raises(DataError, match=rf"data_batch_1\.bin has {size:,} bytes, not 30,730,000"):
        load_data("cifar10", directory=folder)


def test_a_label_over_nine_names_its_file_and_record(cifar, tmp_path):
    folder = linked(cifar, "cifar-10-batches-bin", tmp_path / "bin", without="data_batch_2.bin")
    raw = bytearray((cifar / "cifar-10-batches-bin" / "data_batch_2.bin").read_bytes())
    raw[1234 * 3073] = 10
    raw[5000 * 3073] = 255
    (folder / "data_batch_2.bin").write_bytes(raw)
    with pytest.raises(DataError, match=r"data_batch_2\.bin is corrupt: record 1234 .* label 10,"):
        load_data("cifar10", directory=folder)


GOOD = {b"labels": [0] * 10_000, b"data": np.zeros((10_000, 3072), np.uint8)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({b"labels": [0] * 9_998 + [-1, 0]}, "record 9998 .* label -1,"),
        ({b"labels": [0] * 9_999}, "no b'labels' of 10,000 integers"),
        ({b"labels": ["0"] * 10_000}, "no b'labels'"),
        ({b"labels": None}, "no b'labels'"),
        ({b"data": np.zeros((10_000, 3071), np.uint8)}, "no b'data' of type uint8"),
        ({b"data": np.zeros((10_000, 3072), np.int8)}, "no b'data' of type uint8"),
        ({b"data": [0]}, "no b'data' of type uint8"),
        ({b"data": {1}}, "opcode EMPTY_SET is not allowed"),
    ],
)
def test_a_pickle_that_is_no_batch_is_refused(cifar, tmp_path, changes, message):
    folder = linked(cifar, "cifar-10-batches-py", tmp_path / "py", without="data_batch_1")
    (folder / "data_batch_1").write_bytes(pickle.dumps(GOOD | changes, 4))
    with pytest.raises(DataError, match=f"data_batch_1 .*{message}"):
        load_data("cifar10", directory=folder)


def test_text_keys_and_label_arrays_are_read_too(cifar, tmp_path):
    folder = linked(cifar, "cifar-10-batches-py", tmp_path / "py", without="test_batch")
    labels = np.arange(10_000) % 10
    pixels = np.asfortranarray(np.arange(10_000 * 3072, dtype=np.uint32).reshape(10_000, 3072).astype(np.uint8))
    (folder / "test_batch").write_bytes(pickle.dumps({"labels": labels, "data": pixels}, 4))
    data = load_data("cifar10", directory=folder)
    assert data.test.labels.tolist() == labels.tolist()
    assert torch.equal(data.test.images.flatten(1), torch.from_numpy(np.ascontiguousarray(pixels)))


@pytest.mark.slow
def test_real_cifar10():
    if not (REAL_CIFAR10 / "unpack.py").is_file():
        pytest.skip("the real CIFAR-10 is not here: it is not shipped with the project")
    with tempfile.TemporaryDirectory() as root:
        subprocess.run([sys.executable, REAL_CIFAR10 / "unpack.py", root], check=True, capture_output=True)
        data = load_data("cifar10", directory=root, holdout=0, seed=0)
        names = (Path(root) / "cifar-10-batches-bin" / "batches.meta.txt").read_text().split()
    assert torch.bincount(data.train.labels).tolist() == [5000] * 10
    assert torch.bincount(data.test.labels).tolist() == [1000] * 10
    assert data.classes[int(data.test.labels[0])] == "cat"
    assert data.classes == tuple(names)


# ---------------------------------------------------------------- image folders


def save(image: Image.Image, path: Path, **options) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)


def solid(color, size=(8, 8), mode="RGB") -> Image.Image:
    return Image.new(mode, size, color)


def fill(root: Path, classes=("cat", "dog"), count=1) -> None:
    for place, name in enumerate(classes):
        for number in range(count):
            save(solid((10 * place, number, 200)), root / name / f"{number:03d}.png")


def folder_data(root: Path, image_size: int | None = 8, seed: int = 0):
    return load_data("folder", directory=root, image_size=image_size, holdout=0, seed=seed)


def only_image(tmp_path: Path, write, image_size: int = 8) -> list:
    """uint8 [3, S, S] of one file that `write` puts into a folder, as a nested list."""
    fill(tmp_path / "train")
    fill(tmp_path / "test", classes=("dog",))
    (tmp_path / "test" / "cat").mkdir()
    write(tmp_path / "test" / "cat")
    data = folder_data(tmp_path, image_size)
    assert data.test.labels.tolist() == [0, 1]
    return data.test.images[0].tolist()


def uniform(*color: int) -> list:
    return [[[value] * 8] * 8 for value in color]


def test_split_folders_are_read_in_sorted_order(tmp_path):
    for part in ("train", "val"):
        fill(tmp_path / part, classes=("dog", "Ant", "cat"), count=3)
    data = folder_data(tmp_path)
    assert data.classes == ("Ant", "cat", "dog")
    assert data.train.labels.tolist() == data.test.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert data.train.images.dtype == torch.uint8
    assert data.train.images.shape == (9, 3, 8, 8)
    assert data.train.images[:, 0, 0, 0].tolist() == [10, 10, 10, 20, 20, 20, 0, 0, 0]
    assert data.train.images[:, 1, 0, 0].tolist() == [0, 1, 2] * 3
    assert (data.mean, data.std) == IMAGENET


def test_test_folder_goes_before_val(tmp_path):
    fill(tmp_path / "train")
    fill(tmp_path / "test", count=2)
    fill(tmp_path / "val", count=3)
    assert len(folder_data(tmp_path).test) == 4


def test_one_folder_per_class_is_split_by_the_seed(tmp_path):
    fill(tmp_path, classes=("car", "train"), count=20)  # `train` is a class here: it holds images
    first, again, other = (folder_data(tmp_path, seed=seed) for seed in (1, 1, 2))
    assert first.classes == ("car", "train")
    for label_value in (0, 1):
        train, test = (part.images[part.labels == label_value, 1, 0, 0].tolist() for part in (first.train, first.test))
        assert len(test) == 4
        assert sorted(train + test) == list(range(20))
    assert torch.equal(first.test.images, again.test.images)
    assert not torch.equal(first.test.images, other.test.images)


def test_other_and_hidden_files_are_ignored(tmp_path):
    fill(tmp_path, count=5)
    (tmp_path / "readme.txt").write_text("not a class")
    (tmp_path / ".cache").mkdir()
    (tmp_path / "cat" / "notes.txt").write_text("not an image")
    (tmp_path / "cat" / ".hidden.png").write_bytes(b"")
    (tmp_path / "cat" / "inner.png").mkdir()
    data = folder_data(tmp_path)
    assert data.classes == ("cat", "dog")
    assert len(data.train) + len(data.test) == 10


def test_grey_becomes_three_equal_channels(tmp_path):
    grey = Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8))
    pixels = only_image(tmp_path, lambda folder: save(grey, folder / "a.bmp"))
    assert pixels == [np.arange(64).reshape(8, 8).tolist()] * 3


def test_deep_grey_is_scaled_and_not_clipped(tmp_path):
    deep = Image.fromarray(np.full((8, 8), 0x8040, dtype=np.uint16))
    assert only_image(tmp_path, lambda folder: save(deep, folder / "a.png")) == uniform(128, 128, 128)


def test_transparency_is_dropped(tmp_path):
    image = solid((10, 20, 30, 0), mode="RGBA")
    assert only_image(tmp_path, lambda folder: save(image, folder / "a.webp", lossless=True, exact=True)) == uniform(
        10, 20, 30
    )


def test_palettes_are_looked_up_even_with_transparency(tmp_path):
    image = solid(1, mode="P")
    image.putpalette([0, 0, 0, 9, 8, 7])
    assert only_image(tmp_path, lambda folder: save(image, folder / "a.PNG", transparency=b"\x00\x80")) == uniform(
        9, 8, 7
    )


def test_the_first_frame_of_an_animation_counts(tmp_path):
    frames = [solid(color) for color in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    pixels = only_image(
        tmp_path, lambda folder: save(frames[0], folder / "a.gif", save_all=True, append_images=frames[1:])
    )
    assert pixels == uniform(255, 0, 0)


@pytest.mark.parametrize("name", ["a.jpg", "a.jpeg", "a.tif", "a.tiff", "a.JPG"])
def test_other_formats_are_read(tmp_path, name):
    pixels = np.array(only_image(tmp_path, lambda folder: save(solid((200, 100, 50)), folder / name)))
    assert np.abs(pixels - np.array([200, 100, 50]).reshape(3, 1, 1)).max() <= 2


@pytest.mark.parametrize("tall", [False, True])
def test_the_centre_square_is_kept(tmp_path, tall):
    image = solid((255, 0, 0), size=(29, 8))
    image.paste((0, 0, 255), (10, 0, 18, 8))  # columns 10 to 17: the middle of 29, rounded down
    image.putpixel((10, 0), (1, 2, 3))
    image = image.transpose(Image.Transpose.TRANSPOSE) if tall else image
    pixels = torch.tensor(only_image(tmp_path, lambda folder: save(image, folder / "a.png")))
    assert pixels[:, 0, 0].tolist() == [1, 2, 3]
    assert pixels[:, 1:, 1:].flatten(1).unique(dim=1).tolist() == [[0], [0], [255]]


def test_the_shorter_side_is_scaled(tmp_path):
    stripes = np.zeros((16, 48), np.uint8)
    stripes[:, 16:24], stripes[:, 24:32] = 100, 200
    pixels = only_image(tmp_path, lambda folder: save(Image.fromarray(stripes), folder / "a.png"))
    row = pixels[0][4]
    assert row[1:3] == [100, 100]
    assert row[5:7] == [200, 200]


def test_scaling_down_averages(tmp_path):
    board = (np.indices((64, 64)).sum(0) % 2 * 255).astype(np.uint8)
    pixels = np.array(only_image(tmp_path, lambda folder: save(Image.fromarray(board), folder / "a.png")))
    assert np.abs(pixels - 127.5).max() < 8  # picking single pixels would leave 0 and 255


def test_a_long_strip_costs_no_memory(tmp_path):
    strip = solid((5, 6, 7), size=(1, 4_000_000))  # scaled as a whole it would take 65 GB
    pixels = torch.tensor(only_image(tmp_path, lambda folder: save(strip, folder / "a.png"), image_size=64))
    assert pixels.flatten(1).unique(dim=1).tolist() == [[5], [6], [7]]


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds next to nothing."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")


def encoded(tmp_path: Path, name: str) -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    save(Image.fromarray(noise), tmp_path / name)
    return (tmp_path / name).read_bytes()


@pytest.mark.parametrize("extension", ["png", "jpg", "bmp", "gif", "webp", "tif"])
def test_broken_images_are_named(tmp_path, extension):
    whole = encoded(tmp_path / "source", f"a.{extension}")
    for kind, content in {
        "zero bytes": b"",
        "half": whole[: len(whole) // 2],
        "header": whole[:20],
        "text": b"<html>404</html>",
    }.items():
        root = tmp_path / kind
        fill(root, count=3)
        bad = root / "dog" / f"001.{extension}"
        bad.write_bytes(content)
        with pytest.raises(DataError, match=rf"{re.escape(str(bad))} cannot be read as an image"):
            folder_data(root)


def test_formats_outside_the_list_are_not_decoded(tmp_path):
    fill(tmp_path, count=3)
    save(solid((1, 2, 3)), tmp_path / "dog" / "000.png", format="PPM")
    with pytest.raises(DataError, match=r"dog.000\.png cannot be read as an image"):
        folder_data(tmp_path)


def test_pixels_without_a_range_are_refused(tmp_path):
    fill(tmp_path, count=3)
    save(solid(0.5, mode="F"), tmp_path / "dog" / "float.tif")
    with pytest.raises(DataError, match=r"float\.tif .*mode F"):
        folder_data(tmp_path)


# over our limit; over the size where Pillow warns; over the size where Pillow refuses
@pytest.mark.parametrize("size", [(10_000, 5_001), (12_000, 8_000), (60_000, 60_000)])
def test_decompression_bombs_are_refused_by_their_header(tmp_path, size):
    fill(tmp_path, count=3)
    (tmp_path / "cat" / "bomb.png").write_bytes(png_header(*size))
    with pytest.raises(DataError, match=r"bomb\.png has .*pixels"):
        folder_data(tmp_path)


@pytest.mark.parametrize("image_size", [None, 0, -3])
def test_folder_needs_an_image_size(tmp_path, image_size):
    fill(tmp_path, count=3)
    with pytest.raises(RecipeError, match="image_size"):
        folder_data(tmp_path, image_size=image_size)


LAYOUTS = {
    "no directory": (lambda root: None, "There is no directory"),
    "empty": (lambda root: root.mkdir(), "0 class folders"),
    "one class": (lambda root: fill(root, classes=("cat",), count=3), "1 class folders"),
    "single image": (lambda root: fill(root, count=1), "cat has a single image"),
    "no test": (lambda root: fill(root / "train"), "neither test nor val"),
    "class without images": (
        lambda root: (fill(root, count=3), (root / "emu").mkdir(), (root / "emu" / "a.txt").write_text("x")),
        "emu has no images",
    ),
    "classes differ": (
        lambda root: (fill(root / "train"), fill(root / "test", classes=("cat", "doge"))),
        "differ: only one of them has dog, doge",
    ),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_wrong_layouts_are_explained(tmp_path, case):
    make, message = LAYOUTS[case]
    make(tmp_path / "images")
    with pytest.raises(DataError, match=message):
        folder_data(tmp_path / "images")


def test_folder_without_a_directory_names_the_option():
    with pytest.raises(PaamError, match="--data DIR"):
        load_data("folder", directory=None, image_size=8)
