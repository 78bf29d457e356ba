"""A run that is asked to stop, at any step of any phase, goes on to the same weights and the same record."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import paam.data.batches
from paam.data import Augmentation, load_data
from paam.data.batches import Normalization, TrainingBatches, epoch_seed
from paam.errors import StoppedError
from paam.runs.checkpoint import checkpoints, read_newest_checkpoint
from paam.runs.record import read_record
from paam.train.packing import from_tensors
from ran import run
from short_runs import EPOCHS, PHASES, assert_same_weights, short, story

STEPS = 4
"""Steps of an epoch: 1,167 images in batches of 256."""
# Weight decay and momentum move closed filters in a weight phase, which puts them back at its end.
MOVING = {"weight__optimizer": "sgd", "weight__lr": 0.05, "weight__weight_decay": 0.05, "weight__momentum": 0.9}


def stop_behind(*steps: int):
    """Says yes from the first of these steps on; steps are counted over the process. For on_step and for stop."""
    taken = []

    def on_step(step: int, of: int) -> None:
        assert of == STEPS
        taken.append(step)

    return on_step, lambda: len(taken) >= min(steps)


def stopped(out: Path, recipe, steps: int) -> str:
    """Go on for so many steps; what the run says then."""
    on_step, stop = stop_behind(steps)
    with pytest.raises(StoppedError) as info:
        run(recipe, out, device="cpu", resume=out.exists(), on_step=on_step, stop=stop)
    return str(info.value)


@pytest.fixture(scope="module")
def moving(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("moving") / "run"
    run(short(**MOVING), out, device="cpu")
    return out


def test_a_run_stopped_at_every_single_step_ends_with_the_same_bits_and_record(tmp_path, moving):
    out, recipe = tmp_path / "run", short(**MOVING)
    for count in range(EPOCHS * STEPS):
        message = stopped(out, recipe, 1)
        assert f"epoch {count // STEPS + 1}, step {count % STEPS + 1} of {STEPS}, of {EPOCHS}" in message
        kinds = [path.name.partition("-")[0] for path in (out / "checkpoints").iterdir()]
        assert sorted(kinds) == ["data", *["epoch"] * min(2, count + 1)]
        torch.manual_seed(count)  # another process has another state
    events = run(recipe, out, device="cpu", resume=True)
    assert_same_weights(out, moving)
    assert story(events) == story(read_record(moving / "record.jsonl"))
    assert events == read_record(out / "record.jsonl")


@pytest.mark.parametrize("settings", [{}, {"score__reset": True, "weight__reset": True}], ids=["kept", "reset"])
def test_other_optimisers_stopped_now_and_then_end_with_the_same_bits_and_record(tmp_path, settings):
    recipe = short(**settings)
    plain = run(recipe, tmp_path / "plain", device="cpu")
    for _ in range(EPOCHS * STEPS // 7):
        stopped(tmp_path / "run", recipe, 7)
    assert story(run(recipe, tmp_path / "run", device="cpu", resume=True)) == story(plain)
    assert_same_weights(tmp_path / "run", tmp_path / "plain")


def test_closed_filters_moved_in_the_phase_and_both_values_are_in_the_checkpoint(tmp_path):
    """Otherwise the tests above would prove nothing about them."""
    out, recipe = tmp_path / "run", short(**MOVING)
    stopped(out, recipe, 4 * STEPS + 2)
    assert PHASES[4] == "weight"
    (tensors, header), _ = read_newest_checkpoint(out / "checkpoints")
    parts = from_tensors(tensors, header["layouts"])
    moved = {name: value for name, value in parts["pause"].items() if name.startswith("moved/")}
    (name,) = [name.removeprefix("moved/") for name in moved if name.endswith("conv2.weight")]
    (mask,) = [value for key, value in parts["gated/rest"].items() if value.shape == (10,) and "mask" in key]
    differing = (moved[f"moved/{name}"] != parts["gated/gated"][name]).flatten(1).any(1)
    assert differing.any()
    assert torch.equal(differing, mask == 0)


def test_a_stop_between_two_epochs_is_saved_at_the_boundary(tmp_path, moving):
    out, recipe = tmp_path / "run", short(**MOVING, train__checkpoint_every=100)
    asked = threading.Event()

    def watch(event: dict) -> None:
        if event["event"] == "epoch" and event["epoch"] == 8:
            asked.set()

    with pytest.raises(StoppedError, match="epoch 9 of 22"):
        run(recipe, out, device="cpu", watch=watch, stop=asked.is_set)
    assert checkpoints(out / "checkpoints")[0].name == "epoch-000009-step-000000.safetensors"
    run(recipe, out, device="cpu", resume=True)
    assert_same_weights(out, moving)


def test_a_run_that_reads_its_images_as_needed_ends_with_the_same_bits(tmp_path):
    """Its loader draws random numbers too, whenever it begins; they must not move those of dropout."""
    rng = np.random.default_rng(0)
    for number in range(40):
        folder = tmp_path / "images" / str(number % 2)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).save(folder / f"{number}.png")
    data = {"data__name": "folder", "data__directory": str(tmp_path / "images"), "data__image_size": 8}
    recipe = short(**data, data__memory=0, data__workers=0, data__batch_size=7, schedule__control=False)
    run(recipe, tmp_path / "plain", device="cpu")
    for steps in (2, 2, 4, 10):
        stopped(tmp_path / "run", recipe, steps)
    run(recipe, tmp_path / "run", device="cpu", resume=True)
    assert_same_weights(tmp_path / "run", tmp_path / "plain")


def test_a_run_in_a_thread_leaves_signals_alone_and_can_be_stopped(tmp_path, moving):
    out, recipe = tmp_path / "run", short(**MOVING)
    said = []
    thread = threading.Thread(target=lambda: said.append(stopped(out, recipe, 30)))
    thread.start()
    thread.join()
    assert "step 2 of 4" in said[0]
    run(recipe, out, device="cpu", resume=True)
    assert_same_weights(out, moving)


def test_the_seconds_of_a_stopped_epoch_are_those_of_both_parts(tmp_path):
    out = tmp_path / "run"
    stopped(out, short(), 2)
    (path,) = checkpoints(out / "checkpoints")
    spent = float(re.search(rb'seconds\\": ([0-9.e-]+)', path.read_bytes())[1])
    stopped(out, short(), 2)  # the rest of the epoch, and no more
    stopped(out, short(), 1)
    (epoch,) = [e for e in read_record(out / "record.jsonl") if e["event"] == "epoch"]
    assert epoch["seconds"] > spent > 0


# ---------------------------------------------------------------- why so little needs to be saved


def test_order_and_augmentation_of_an_epoch_are_pure_functions_of_seed_and_epoch():
    data = load_data("digits")
    normalize, what = Normalization(data.mean, data.std), Augmentation(crop=1, flip=True)

    def batches(seed: int, epoch: int) -> list[torch.Tensor]:
        made = TrainingBatches(data.train, normalize, what, batch_size=256, classes=10, seed=seed, device="cpu")
        return [part for batch in made.epoch(epoch) for part in batch]

    torch.manual_seed(1)
    first = batches(3, 5)
    torch.manual_seed(2)
    batches(3, 4)  # epochs before it do not matter
    state = torch.get_rng_state()
    assert all(torch.equal(a, b) for a, b in zip(first, batches(3, 5), strict=True))
    assert torch.equal(torch.get_rng_state(), state)  # nor do they touch the generator that dropout draws from
    assert not torch.equal(first[1], batches(3, 6)[1])
    assert not torch.equal(first[1], batches(4, 5)[1])
    assert len({epoch_seed(seed, epoch) for seed in range(20) for epoch in range(2000)}) == 20 * 2000


@pytest.mark.parametrize("batches_in_a_block", [1, 3, 100])
def test_batches_from_a_step_on_are_those_of_the_whole_epoch(monkeypatch, batches_in_a_block):
    """Wherever the step stands in a block of batches, and also with images mixed by the step."""
    data = load_data("digits")
    monkeypatch.setattr(paam.data.batches, "BLOCK_VALUES", batches_in_a_block * 128 * 64)
    made = TrainingBatches(
        data.train,
        Normalization(data.mean, data.std),
        Augmentation(crop=1, flip=True, cutout=2, mixup=0.2),
        batch_size=128,
        classes=10,
        seed=3,
        device="cpu",
    )
    whole = list(made.epoch(2))
    assert len(whole) == made.steps == 10
    for start in range(made.steps + 1):
        rest = list(made.epoch(2, start))
        assert len(rest) == made.steps - start
        for one, other in zip(rest, whole[start:], strict=True):
            assert torch.equal(one[0], other[0])
            assert torch.equal(one[1], other[1])
