"""What TensorBoard's own reader finds in RUN/tensorboard, against the record."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from events import KEPT, SCORES, SELECTION, Line, controlled, record, resumed, typed
from paam.config.recipe import load_recipe
from paam.errors import PaamError
from paam.events import Epoch, Event, Selected, of_kind
from paam.runs.run import run
from paam.views.tensorboard import TensorBoardView, kept_picture

GREEN, GREY, WHITE = (31, 136, 61), (208, 215, 222), (255, 255, 255)


def test_the_picture_of_kept_filters_pixel_by_pixel():
    """Two layers of 4 and 6 filters: 512 // 6 = 85 columns per filter, six rows per layer, two between them."""
    picture = kept_picture(*typed([SELECTION]))
    assert picture.shape == (14, 6 * 85, 3)
    for row in range(14):
        for column in range(6 * 85):
            layer, inside = divmod(row, 8)
            kept, width = list(KEPT.values())[layer]
            number = column // 85
            colour = GREEN if number < kept else GREY if number < width else WHITE
            assert tuple(picture[row, column]) == (colour if inside < 6 else WHITE), (row, column)


def test_wide_layers_have_a_pixel_per_filter():
    picture = kept_picture(*typed([{**SELECTION, "kept_filters": {"a": [100, 2048], "b": [2048, 2048]}}]))
    assert picture.shape == (14, 2048, 3)
    assert (picture[:6] == GREEN).all(2).sum() == 6 * 100
    assert (picture[8:] == GREEN).all()


def read(folder: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), {"scalars": 0, "images": 0, "histograms": 0}).Reload()


def scalars(found, tag: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in found.Scalars(tag)]


def told(folder: Path, events: list[Event]) -> None:
    with TensorBoardView(folder) as view:
        for event in events:
            view.event(event)


@pytest.mark.zoo
def test_a_dense_control_has_curves_of_its_own(tmp_path):
    told(tmp_path, typed(controlled()))
    found = read(tmp_path)
    assert [step for step, _ in scalars(found, "loss")] == [1, 2, 3, 4, 5, 6, 7]
    assert scalars(found, "control/loss") == [(8, 0.125), (9, 0.125)]
    assert scalars(found, "control/accuracy/holdout")[0] == (8, pytest.approx(98.46))
    assert {step for step, _ in scalars(found, "kept/MACs")} == {1, 2, 3, 4, 5, 6, 7}


@pytest.mark.zoo
def test_events_come_back_out_of_the_files(tmp_path):
    lines: list[Line] = record()
    lines[1]["accuracy"] = None
    told(tmp_path, typed(lines))
    found = read(tmp_path)
    assert found.Tags()["scalars"] == [
        "loss",
        "learning rate",
        "kept/MACs",
        "kept/parameters",
        "accuracy/holdout",
        "kept/filters",
        "test/dense",
        "test/pruned",
    ]
    assert scalars(found, "loss") == [(step, 0.25) for step in range(1, 8)]
    assert scalars(found, "accuracy/holdout") == [(step, 50.0) for step in range(2, 8)]
    assert scalars(found, "learning rate") == [(step, pytest.approx(0.1 / step)) for step in range(1, 8)]
    assert scalars(found, "kept/MACs") == [(s, pytest.approx(1.0 if s <= 3 else 0.55)) for s in range(1, 8)]
    assert scalars(found, "kept/parameters") == [(s, pytest.approx(1.0 if s <= 3 else 0.4)) for s in range(1, 8)]
    assert scalars(found, "kept/filters") == [(3, pytest.approx(3 / 10))]
    assert scalars(found, "test/pruned") == [(7, 88.5)]
    assert found.Tags()["histograms"] == ["scores/conv1", "scores/conv2"]
    for layer, values in SCORES["scores"].items():
        (point,) = found.Histograms(f"scores/{layer}")
        histogram = point.histogram_value
        assert point.step == 3
        assert (histogram.num, histogram.min, histogram.max) == (len(values), min(values), max(values))
        assert histogram.sum == pytest.approx(sum(values))
    (picture,) = found.Images("kept filters")
    assert picture.step == 3
    pixels = np.asarray(Image.open(io.BytesIO(picture.encoded_image_string)).convert("RGB"))
    assert np.array_equal(pixels, kept_picture(*typed([SELECTION])))


@pytest.mark.zoo
def test_a_resumed_run_leaves_no_duplicates_and_no_gaps(tmp_path):
    told(tmp_path, typed(record(5)))
    whole = record()
    told(tmp_path, typed([resumed(4, told=len(record(4))), *whole]))
    found = read(tmp_path)
    assert [step for step, _ in scalars(found, "loss")] == list(range(1, 8))
    assert len(found.Images("kept filters")) == 1
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.zoo
def test_a_real_run_killed_and_resumed_shows_its_record(tmp_path):
    schedule = {"warmup": 1, "cycles": 2, "score": 1, "weight": 1, "finetune": 1, "control": False}
    changes = {f"schedule.{key}": value for key, value in schedule.items()}
    recipe = load_recipe("digits-resnet20-kq", {**changes, "data.batch_size": 256})
    folder = tmp_path / "run" / "tensorboard"
    with TensorBoardView(folder) as view:

        def dies(event: Event) -> None:
            view.event(event)
            if isinstance(event, Epoch) and event.epoch == 3:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run(recipe, tmp_path / "run", device="cpu", watch=dies)
    with TensorBoardView(folder) as view:
        events = run(recipe, tmp_path / "run", device="cpu", resume=True, watch=view.event)
    found = read(folder)
    epochs = of_kind(events, Epoch)
    assert [event.epoch for event in epochs] == list(range(6))
    assert scalars(found, "loss") == [(e.epoch + 1, pytest.approx(e.loss)) for e in epochs]
    assert [step for step, _ in scalars(found, "accuracy/holdout")] == [1, 2, 3, 4, 5, 6]
    cuts = of_kind(events, Selected)
    for picture, cut in zip(found.Images("kept filters"), cuts, strict=True):
        pixels = np.asarray(Image.open(io.BytesIO(picture.encoded_image_string)).convert("RGB"))
        assert np.array_equal(pixels, kept_picture(cut))
    before = run(recipe, tmp_path / "again", device="cpu")
    assert not (tmp_path / "again" / "tensorboard").exists()
    told(tmp_path / "again" / "tensorboard", before)
    run(recipe, tmp_path / "again", device="cpu", overwrite=True)
    assert not list((tmp_path / "again" / "tensorboard").iterdir())  # a run that is gone leaves no curves behind


def test_without_the_package_the_option_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(PaamError, match="pip install tensorboard"):
        TensorBoardView(tmp_path)
    assert not list(tmp_path.iterdir())
