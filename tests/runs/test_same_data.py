"""A run goes on with the data it was trained on: moved is the same, other data are named and refused, or recorded."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import paam
from events import of_kind
from paam.data import DATASETS, Dataset, Split, load_data, marks
from paam.data.differences import as_before, compare
from paam.data.manifest import manifest_of, manifests, read_manifest, splits, write_manifest
from paam.errors import ArtifactError, DataError
from paam.runs.checkpoint import read_newest_checkpoint
from paam.runs.record import read_record
from ran import run
from short_runs import Killed, assert_same_weights, everything, killer, short, story

CLASSES = ("bird", "cat", "dog")
PER_CLASS = 10


def draw(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(path)


@pytest.fixture
def images(tmp_path) -> Path:
    """A folder per class, which a run splits by its seed."""
    for label, name in enumerate(CLASSES):
        for number in range(PER_CLASS):
            draw(tmp_path / "images" / name / f"{name[0]}{number}.png", 100 * label + number)
    return tmp_path / "images"


@pytest.fixture
def halves(tmp_path) -> Path:
    """The same, split by its folders."""
    for label, name in enumerate(CLASSES):
        for number in range(PER_CLASS):
            half = "test" if number < 3 else "train"
            draw(tmp_path / "halves" / half / name / f"{number}.png", 100 * label + number)
    return tmp_path / "halves"


def recipe_of(folder: Path, **changes):
    data = {"data__name": "folder", "data__image_size": 8, "data__directory": str(folder), "data__batch_size": 8}
    return short(**{**data, "data__holdout": 0.25, "schedule__control": False, **changes})


def cut(folder: Path, out: Path, epoch: int = 3, **options) -> None:
    with pytest.raises(Killed):
        run(recipe_of(folder), out, device="cpu", watch=killer("epoch", epoch), **options)


def loaded(folder: Path, **options) -> Dataset:
    return load_data("folder", directory=folder, image_size=8, holdout=0.25, **options)


def swap(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def swap_pixels(folder: Path) -> None:
    swap(folder / "cat" / "c1.png", folder / "cat" / "c2.png")


def swap_labels(folder: Path) -> None:
    (folder / "cat" / "c1.png").rename(folder / "dog" / "c1.png")
    (folder / "dog" / "d1.png").rename(folder / "cat" / "d1.png")


def rename_class(folder: Path) -> None:
    (folder / "cat").rename(folder / "kat")


def rename_class_across(folder: Path) -> None:
    """Its place among the sorted names changes, and with it the position of every other class."""
    (folder / "bird").rename(folder / "zebra")


def add_images(folder: Path) -> None:
    for label, name in enumerate(CLASSES):
        for number in range(10):
            draw(folder / name / f"0new{number}.png", 1000 + 100 * label + number)


def remove_images(folder: Path) -> None:
    for number in (2, 4, 7):
        (folder / "bird" / f"b{number}.png").unlink()


def edit_image(folder: Path) -> None:
    draw(folder / "dog" / "d5.png", 4321)


def rename_image(folder: Path) -> None:
    (folder / "dog" / "d5.png").rename(folder / "dog" / "other.png")


CHANGES = {
    swap_pixels: "2 images renamed (cat/c2.png is cat/c1.png, ...)",
    swap_labels: "2 labels changed (d1.png was 'dog', is 'cat', ...)",
    rename_class: "class 'cat' renamed to 'kat'",
    rename_class_across: "class 'bird' renamed to 'zebra'",
    add_images: "30 images added (bird/0new0.png, ...)",
    remove_images: "3 images removed (bird/b2.png, ...)",
    edit_image: "1 image changed (dog/d5.png)",
    rename_image: "1 image renamed (dog/d5.png is dog/other.png)",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_other_data_are_refused_by_name_or_accepted_and_recorded(tmp_path, images, change):
    out = tmp_path / "run"
    cut(images, out)
    header = read_newest_checkpoint(out / "checkpoints")[0][1]
    before = read_manifest(out / "checkpoints", header["data"])
    change(images)
    untouched = everything(out)
    with pytest.raises(ArtifactError) as refused:
        run(recipe_of(images), out, device="cpu", resume=True)
    assert CHANGES[change] in str(refused.value)
    assert "--accept-changed-data" in str(refused.value)
    assert everything(out) == untouched

    cut(images, out, 6, resume=True, accept_changed_data=True)
    events = run(recipe_of(images), out, device="cpu", resume=True)  # the same data again: nothing to accept
    (changed,) = of_kind(events, "changed")
    had, has = changed["changes"]["environment.data"]
    assert changed["epoch"] == 3
    assert header["data"] in had
    assert CHANGES[change] in has
    header = read_newest_checkpoint(out / "checkpoints")[0][1]
    after = read_manifest(out / "checkpoints", header["data"])
    assert header["data"] in has
    trained = {bytes(mark) for name in ("train", "holdout") for mark in before.parts[name].marks.numpy()}
    assert trained.isdisjoint(bytes(mark) for mark in after.parts["test"].marks.numpy())
    assert len(after.classes) == 3
    for position, (old, new) in enumerate(zip(before.classes, after.classes, strict=True)):
        assert old == new or f"class '{old}' renamed to '{new}'" in has, position


def test_data_that_only_moved_are_the_same_to_the_bit(tmp_path, images):
    """Another place, another time of every file, and another order in which the system lists them."""
    run(recipe_of(images), tmp_path / "whole", device="cpu")
    cut(images, tmp_path / "run")
    for path in sorted(images.rglob("*.png"), reverse=True):
        copy = tmp_path / "elsewhere" / path.relative_to(images)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
        os.utime(copy, (1, 1))
    shutil.rmtree(images)
    events = run(recipe_of(tmp_path / "elsewhere"), tmp_path / "run", device="cpu", resume=True)
    assert_same_weights(tmp_path / "run", tmp_path / "whole")
    assert [set(e["changes"]) for e in of_kind(events, "changed")] == [{"environment.data.directory"}]


def test_the_split_is_state_and_not_drawn_anew(tmp_path, images, monkeypatch):
    """Another draw of the same images, as another version might make: the run keeps its own."""
    run(recipe_of(images), tmp_path / "whole", device="cpu")
    cut(images, tmp_path / "run")
    before = manifest_of(loaded(images))
    draw_split = paam.data.folder.stratified_mask
    monkeypatch.setattr(paam.data.folder, "stratified_mask", lambda labels, share, seed: draw_split(labels, share, 99))
    assert manifest_of(loaded(images)).parts["test"].names != before.parts["test"].names
    events = run(recipe_of(images), tmp_path / "run", device="cpu", resume=True)
    assert_same_weights(tmp_path / "run", tmp_path / "whole")
    assert story(events) == story(read_record(tmp_path / "whole" / "record.jsonl"))


@pytest.mark.parametrize("accept", [False, True])
def test_classes_that_come_or_go_are_refused_whatever_is_accepted(tmp_path, images, accept):
    out = tmp_path / "run"
    cut(images, out)
    draw(images / "eel" / "e1.png", 1)
    draw(images / "eel" / "e2.png", 2)
    shutil.rmtree(images / "dog")
    with pytest.raises(ArtifactError, match=r"class 'dog' removed; class 'eel' added;.*classes cannot change"):
        run(recipe_of(images), out, device="cpu", resume=True, accept_changed_data=accept)


def test_the_shipped_digits_are_checked_too(tmp_path, monkeypatch):
    out = tmp_path / "run"
    with pytest.raises(Killed):
        run(short(), out, device="cpu", watch=killer("epoch", 3))

    def other(*arguments, **options):
        data = load_data(*arguments, **options)
        labels = data.train.labels.clone()
        labels[:2] = (labels[:2] + 1) % 10
        return dataclasses.replace(data, train=dataclasses.replace(data.train, labels=labels))

    monkeypatch.setattr(paam.runs.setup, "load_data", other)
    with pytest.raises(ArtifactError, match="2 labels changed"):
        run(short(), out, device="cpu", resume=True)


def test_the_record_and_every_checkpoint_name_the_data(tmp_path, images, halves):
    for folder in (images, halves):
        out = tmp_path / f"run of {folder.name}"
        cut(folder, out)
        data = manifest_of(loaded(folder))
        assert data.covers == "contents"
        start = read_record(out / "record.jsonl")[0]
        assert start["data"] == {"hash": data.digest, "of": ["names", "labels", "split", "contents"]}
        assert read_newest_checkpoint(out / "checkpoints")[0][1]["data"] == data.digest
        (path,) = manifests(out / "checkpoints")
        assert data.digest in path.name


def test_a_large_data_set_goes_by_names_sizes_and_labels_and_says_so(tmp_path, images, monkeypatch):
    monkeypatch.setattr(marks, "CONTENTS_UP_TO", 1000)
    out = tmp_path / "run"
    cut(images, out)
    assert read_record(out / "record.jsonl")[0]["data"]["of"] == ["names", "labels", "split", "sizes"]
    swap_labels(images)
    (images / "bird" / "b3.png").write_bytes((images / "bird" / "b3.png").read_bytes() + b"longer")
    rename_class(images)
    with pytest.raises(ArtifactError) as refused:
        run(recipe_of(images), out, device="cpu", resume=True)
    for words in ("class 'cat' renamed to 'kat'", "2 labels changed", "1 image changed (bird/b3.png)"):
        assert words in str(refused.value)


def test_images_that_make_a_data_set_too_large_to_read_do_not_make_all_others_new(images, monkeypatch):
    before = manifest_of(loaded(images))
    size = sum(path.stat().st_size for path in images.rglob("*.png"))
    monkeypatch.setattr(marks, "CONTENTS_UP_TO", size)
    add_images(images)
    found = compare(before, manifest_of(loaded(images)))
    added, how = found.words
    assert added.startswith("30 images added")
    assert how == "images identified by their sizes, by their contents before"


@pytest.mark.parametrize("streams", [False, True])
def test_a_data_set_of_ones_own_needs_no_names_to_be_known(tmp_path, images, monkeypatch, streams):
    def load(wanted) -> Dataset:
        found = load_data("folder", directory=images, image_size=8, memory=0 if streams else math.inf, workers=0)
        parts = {name: Split(part.images, part.labels) for name, part in splits(found).items()}
        return dataclasses.replace(found, **parts)

    monkeypatch.setitem(DATASETS, "own", load)
    out, recipe = tmp_path / "run", recipe_of(images, data__name="own")
    with pytest.raises(Killed):
        run(recipe, out, device="cpu", watch=killer("epoch", 3))
    swap(images / "cat" / "c1.png", images / "dog" / "d1.png")
    with pytest.raises(ArtifactError, match="trained on: 2 labels changed"):
        run(recipe, out, device="cpu", resume=True)
    swap(images / "cat" / "c1.png", images / "dog" / "d1.png")
    assert of_kind(run(recipe, out, device="cpu", resume=True), "end")


@pytest.mark.parametrize("what", ["gone", "damaged", "another's"])
def test_without_its_list_other_data_cannot_be_taken(tmp_path, images, what):
    out = tmp_path / "run"
    cut(images, out)
    (path,) = manifests(out / "checkpoints")
    if what == "gone":
        path.unlink()
    elif what == "damaged":
        path.write_bytes(path.read_bytes()[:-9])
    else:
        other = manifest_of(loaded(images, seed=7))
        write_manifest(tmp_path / "other", other)
        shutil.copy(manifests(tmp_path / "other")[0], path)
    run_again = {"device": "cpu", "resume": True, "accept_changed_data": True}
    edit_image(images)
    with pytest.raises(ArtifactError, match=f"cannot be compared: .*{path.name}"):
        run(recipe_of(images), out, **run_again)
    draw(images / "dog" / "d5.png", 205)  # as it was
    assert of_kind(run(recipe_of(images), out, **run_again), "end")


def test_it_is_for_runs_that_go_on(tmp_path, images):
    with pytest.raises(ArtifactError, match=r"add --resume"):
        run(recipe_of(images), tmp_path / "run", device="cpu", accept_changed_data=True)
    assert not (tmp_path / "run").exists()


def test_files_read_as_they_are_needed_are_the_same_data(tmp_path, images):
    in_memory, from_files = loaded(images), loaded(images, memory=0, workers=0)
    assert manifest_of(in_memory).digest == manifest_of(from_files).digest
    cut(images, tmp_path / "run")
    add_images(images)
    found = compare(manifest_of(in_memory), manifest_of(loaded(images)))
    kept = [as_before(data, found) for data in (loaded(images), loaded(images, memory=0, workers=0))]
    order = torch.arange(len(kept[0].train))
    (block,) = kept[1].train.images.blocks(order, len(order))
    assert torch.equal(block, kept[0].train.images)
    assert torch.equal(kept[0].train.labels, kept[1].train.labels)


def test_what_is_known_stays_where_it_was_and_keeps_its_label(halves):
    """An image moved from the training folder into the test folder was trained on, and is not tested on."""
    before = loaded(halves)
    (halves / "train" / "cat" / "7.png").rename(halves / "test" / "cat" / "7.png")
    (halves / "test" / "dog").rename(halves / "test" / "hound")
    (halves / "train" / "dog").rename(halves / "train" / "hound")
    draw(halves / "test" / "cat" / "0new.png", 77)
    now = loaded(halves)
    found = compare(manifest_of(before), manifest_of(now))
    assert found.words == [
        "class 'dog' renamed to 'hound'",
        "1 image added (test/cat/0new.png)",
        "1 image renamed (train/cat/7.png is test/cat/7.png)",
    ]
    after = as_before(now, found)
    assert after.classes == ("bird", "cat", "hound")
    for part in ("train", "holdout"):
        was, has = getattr(before, part), getattr(after, part)
        assert torch.equal(was.images, has.images)
        assert torch.equal(was.labels, has.labels)
    assert len(after.test) == len(before.test) + 1
    assert torch.equal(after.test.images[:-1], before.test.images)
    assert not compare(manifest_of(after), manifest_of(now)).words


def test_a_part_that_lost_all_its_images_is_refused(halves):
    before = manifest_of(loaded(halves))
    for name in CLASSES:
        for path in (halves / "test" / name).iterdir():
            path.unlink()
        draw(halves / "test" / name / "train.png", 9)
        shutil.copy(halves / "train" / name / "5.png", halves / "test" / name / "train.png")
        (halves / "train" / name / "5.png").unlink()
    now = loaded(halves)
    with pytest.raises(DataError, match=r"None of the images in this run's test set is left"):
        as_before(now, compare(before, manifest_of(now)))


def test_every_part_of_the_data_counts_in_the_hash(images, halves):
    """Name, label, content, split and class, each alone."""
    data = loaded(images)
    digests = {manifest_of(data).digest}
    labels = data.train.labels.roll(1)
    names = (*data.train.names[1:], data.train.names[0])
    for train in (
        dataclasses.replace(data.train, labels=labels),
        dataclasses.replace(data.train, names=names),
        dataclasses.replace(data.train, marks=data.train.marks.roll(1, 0)),
    ):
        digests.add(manifest_of(dataclasses.replace(data, train=train)).digest)
    digests.add(manifest_of(dataclasses.replace(data, train=data.test, test=data.train)).digest)
    digests.add(manifest_of(dataclasses.replace(data, train=data.holdout, holdout=data.train)).digest)
    digests.add(manifest_of(dataclasses.replace(data, classes=("bird", "cat", "fox"))).digest)
    digests.add(manifest_of(dataclasses.replace(data, covers="sizes")).digest)
    digests.add(manifest_of(loaded(halves)).digest)
    assert len(digests) == 9


def test_a_manifest_is_read_as_it_was_written_whatever_files_are_called(tmp_path, images):
    (images / "cat" / "c1.png").rename(os.fsdecode(os.fsencode(images / "cat") + b"/\xff\n\xe4 .png"))
    manifest = manifest_of(loaded(images))
    write_manifest(tmp_path, manifest)
    again = read_manifest(tmp_path, manifest.digest)
    assert again.digest == manifest.digest
    assert not compare(manifest, again).words
    (path,) = manifests(tmp_path)
    written = path.stat().st_mtime_ns
    write_manifest(tmp_path, again)
    assert path.stat().st_mtime_ns == written


def test_a_damaged_manifest_is_refused_wherever_it_is_damaged(tmp_path, images):
    manifest = manifest_of(loaded(images))
    write_manifest(tmp_path, manifest)
    (path,) = manifests(tmp_path)
    content = path.read_bytes()
    for place in range(0, len(content), len(content) // 200):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x11]) + content[place + 1 :])
        with pytest.raises(ArtifactError, match=path.name):
            read_manifest(tmp_path, manifest.digest)


@pytest.mark.parametrize("wrong", ["label", "names", "marks", "parts"])
def test_a_whole_manifest_of_what_is_no_data_set_is_refused(tmp_path, images, wrong):
    manifest = manifest_of(loaded(images))
    parts = dict(manifest.parts)
    train = parts["train"]
    if wrong == "label":
        parts["train"] = train._replace(labels=train.labels + 3)
    elif wrong == "names":
        parts["train"] = train._replace(names=train.names[1:])
    elif wrong == "marks":
        parts["train"] = train._replace(marks=train.marks[:, 1:].contiguous())
    else:
        del parts["test"]
    odd = dataclasses.replace(manifest, parts=parts)
    write_manifest(tmp_path, odd)
    with pytest.raises(ArtifactError, match="is not a data manifest"):
        read_manifest(tmp_path, odd.digest)


OWN = """
from torch import nn


def make(num_classes, in_channels):
    pooled = nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(nn.Conv2d(in_channels, 4, 3), nn.ReLU(), *pooled, nn.Linear(4, num_classes))
"""
RECIPE = """
[model]
name = "own_small:make"
[data]
name = "folder"
image_size = 8
batch_size = 8
[target]
keep_macs = 0.5
[schedule]
warmup = 1
cycles = 1
score = 1
weight = 1
finetune = 1
"""


def test_from_the_command_line_what_is_accepted_once_is_not_accepted_by_the_command_that_is_recorded(
    cli, tmp_path, images, monkeypatch
):
    (tmp_path / "own_small.py").write_text(OWN, "utf-8")
    (tmp_path / "own.toml").write_text(RECIPE, "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_small", raising=False)
    command = ["prune", "own.toml", "--trust-code", "--data=images", "--out=run", "--device=cpu"]
    with monkeypatch.context() as patch:
        patch.setattr("paam.runs.run.finish", lambda *arguments: 1 / 0)
        assert cli(*command).code == 2
    edit_image(images)
    refused = cli(*command, "--resume")
    assert refused.code == 2
    assert len(refused.err.splitlines()) == 1
    assert "1 image changed (dog/d5.png)" in refused.err
    assert "add --resume" in cli(*command, "--accept-changed-data").err
    with monkeypatch.context() as patch:
        patch.setattr("paam.runs.run.finish", lambda *arguments: 1 / 0)
        failed = cli(*command, "--resume", "--accept-changed-data")
    # No checkpoint has been written since, so that the run's own data are still those before.
    assert failed.err.rstrip().endswith("--resume --accept-changed-data")
    accepted = cli(*command, "--resume", "--accept-changed-data")
    assert accepted.code == 0
    assert "from here on environment.data = train 24, test 6 (" in accepted.out
    (changed,) = of_kind(read_record(tmp_path / "run" / "record.jsonl"), "changed")
    assert changed["command"] == " ".join(["paam", *command])
    assert cli("report", "run").code == 0
    assert "1 image changed (dog/d5.png)" in (tmp_path / "run" / "report.html").read_text("utf-8")
