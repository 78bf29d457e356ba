"""Images read from their files as they are needed: the same bits as from memory, in every epoch, by any readers."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import paam.cli
import paam.data.batches
from paam.data import Augmentation, Dataset, load_data
from paam.data.batches import EvaluationBatches, Normalization, TrainingBatches
from paam.data.stream import ImageFiles
from paam.errors import DataError
from paam.runs.record import read_record
from short_runs import OWN, assert_same_weights, story

EVERYTHING = Augmentation(crop=2, flip=True, trivial=True, cutout=3, mixup=0.3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """40 images of three classes, of several sizes, modes and formats."""
    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for number in range(40):
        where = root / ("ants", "bees", "cats")[number % 3]
        where.mkdir(exist_ok=True)
        height, width = rng.integers(9, 30, 2)
        pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
        image = Image.fromarray(pixels).convert(("RGB", "L", "P")[number % 4 % 3])
        image.save(where / f"{number:02}.{('png', 'bmp', 'jpg')[number % 5 % 3] if image.mode == 'RGB' else 'png'}")
    return root


def loaded(folder: Path, workers: int | None, holdout: float = 0.2) -> Dataset:
    """workers None: in memory."""
    kept = {} if workers is None else {"memory": 0, "workers": workers}
    return load_data("folder", directory=folder, image_size=12, holdout=holdout, seed=5, **kept)


def training(data: Dataset) -> TrainingBatches:
    return TrainingBatches(
        data.train, Normalization(data.mean, data.std), EVERYTHING, batch_size=5, classes=3, seed=2, device="cpu"
    )


def same(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_from_files_are_those_from_memory_in_every_epoch(folder, workers, monkeypatch):
    monkeypatch.setattr(paam.data.batches, "BLOCK_VALUES", 10 * 3 * 12 * 12)  # blocks of two batches
    monkeypatch.setattr(paam.data.batches, "EVALUATION_BATCH", 3)
    memory, files = loaded(folder, None), loaded(folder, workers)
    assert isinstance(files.train.images, ImageFiles)
    assert isinstance(memory.train.images, torch.Tensor)
    for one, other in ((memory.train, files.train), (memory.holdout, files.holdout), (memory.test, files.test)):
        assert tuple(one.images.shape) == tuple(other.images.shape)
        assert torch.equal(one.labels, other.labels)
    trained, streamed = training(memory), training(files)
    seen = []
    state = torch.get_rng_state()
    for epoch in range(3):
        batches = list(streamed.epoch(epoch))
        assert len(batches) == trained.steps > 3
        assert all(same(*pair) for pair in zip(trained.epoch(epoch), batches, strict=True))
        seen.append(batches[0][0])
        # The monitor reads between epochs, from files of its own.
        for one, other in ((memory.holdout, files.holdout), (memory.test, files.test)):
            normalize = Normalization(memory.mean, memory.std)
            pairs = zip(*(EvaluationBatches(s, normalize, device="cpu") for s in (one, other)), strict=True)
            assert all(same(*pair) for pair in pairs)
    assert not torch.equal(seen[0], seen[1])
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_that_was_left_does_not_reach_into_the_next(folder, workers, monkeypatch):
    """What readers had read ahead belongs to the epoch that was stopped."""
    monkeypatch.setattr(paam.data.batches, "BLOCK_VALUES", 5 * 3 * 12 * 12)
    trained, streamed = training(loaded(folder, None)), training(loaded(folder, workers))
    for start in (0, 2, streamed.steps - 1, streamed.steps):
        left = streamed.epoch(7, 0)
        next(left)
        left.close()
        expected = list(trained.epoch(8, start))
        found = list(streamed.epoch(8, start))
        assert len(found) == streamed.steps - start
        assert all(same(*pair) for pair in zip(expected, found, strict=True))


@pytest.mark.parametrize("limit", [1, -1])
def test_memory_is_a_limit_in_bytes(folder, limit):
    """40 images of 3 x 12 x 12 bytes fit into exactly so many."""
    data = load_data("folder", directory=folder, image_size=12, memory=40 * 432 + min(limit, 0), workers=0)
    assert isinstance(data.train.images, torch.Tensor if limit > 0 else ImageFiles)
    assert len(data.train) + len(data.test) == 40


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_broken_image_is_named(folder, tmp_path, workers, damage):
    for path in folder.rglob("*.*"):
        copied = tmp_path / path.relative_to(folder)
        copied.parent.mkdir(exist_ok=True)
        copied.write_bytes(path.read_bytes())
    data = loaded(tmp_path, workers, holdout=0.0)
    broken = data.train.images.files[4]
    if damage == "cut":
        broken.write_bytes(broken.read_bytes()[:60])
    else:
        broken.unlink()
    with pytest.raises(DataError, match=rf"{broken.name} cannot be read as an image .*Replace or remove it\.$"):
        list(training(data).epoch(0))


def test_a_reader_that_is_killed_ends_the_epoch_in_one_sentence(folder, monkeypatch):
    monkeypatch.setattr(paam.data.batches, "BLOCK_VALUES", 5 * 3 * 12 * 12)
    before = multiprocessing.active_children()
    data = loaded(folder, 1)
    batches = training(data).epoch(0)
    next(batches)
    (reader,) = [process for process in multiprocessing.active_children() if process not in before]
    reader.kill()
    reader.join()
    with pytest.raises(DataError, match=r"An image worker process died .*data\.workers"):
        list(batches)


def prune(monkeypatch, capsys, *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["paam", "prune", *arguments])
    with pytest.raises(SystemExit) as exit_:
        paam.cli.main()
    return exit_.value.code or 0, capsys.readouterr().err


def test_a_run_from_files_gives_the_weights_of_one_from_memory(folder, tmp_path, monkeypatch, capsys):
    (tmp_path / "streamed_net.py").write_text(OWN, "utf-8")
    (tmp_path / "own.toml").write_text(
        "[model]\nname = 'streamed_net:make'\n"
        f"[data]\nname = 'folder'\ndirectory = '{folder}'\nimage_size = 12\nbatch_size = 7\ncrop = 1\ntrivial = true\n"
        "holdout = 0.2\n[target]\nkeep_macs = 0.6\n"
        "[schedule]\nwarmup = 1\ncycles = 1\nscore = 1\nweight = 1\nfinetune = 1\n",
        "utf-8",
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    given = ("own.toml", "--device=cpu", "--trust-code")
    for out, settings in (
        ("memory", []),
        ("files", ["--set", "data.memory=0", "--set", "data.workers=0"]),
        ("readers", ["--set", "data.memory=0", "--set", "data.workers=2"]),
    ):
        before = multiprocessing.active_children()
        assert prune(monkeypatch, capsys, *given, f"--out={out}", *settings) == (0, "")
        assert multiprocessing.active_children() == before  # readers do not outlive their run
    sys.modules.pop("streamed_net")
    told = story(read_record(tmp_path / "memory" / "record.jsonl"))
    for out in ("files", "readers"):
        assert_same_weights(tmp_path / out, tmp_path / "memory")
        assert story(read_record(tmp_path / out / "record.jsonl")) == told
    # One that cannot be read ends a run in one sentence.
    broken = next(folder.glob("ants/*"))
    content = broken.read_bytes()
    broken.write_bytes(b"no image")
    try:
        code, err = prune(monkeypatch, capsys, *given, "--out=broken", *settings)
    finally:
        broken.write_bytes(content)
        sys.modules.pop("streamed_net")
    assert code == 2
    assert str(broken) in err
    assert len(err.splitlines()) == 1
