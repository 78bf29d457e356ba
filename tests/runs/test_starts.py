"""How runs begin: from weights of another run, without score epochs, on a device that can be used or not."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import paam.train.device
from events import of_kind
from paam.artifacts.weights import load_weights
from paam.config.recipe import load_recipe
from paam.data import load_data
from paam.data.batches import EvaluationBatches, Normalization
from paam.errors import ArtifactError, DeviceError, RecipeError, StoppedError
from paam.report.page import write_report
from paam.runs.record import read_record
from paam.train.device import find_device, put_channels_last
from paam.train.evaluation import accuracy
from paam.train.networks import Networks
from ran import run
from short_runs import short, small

FIXED = {"schedule__score": 0, "schedule__control": False}


@pytest.fixture(scope="module")
def warm(tmp_path_factory) -> Path:
    """A finished run with a warm-up worth the name."""
    out = tmp_path_factory.mktemp("warm") / "run"
    run(short(data__batch_size=64, schedule__warmup=8, schedule__cycles=1, schedule__control=False), out, device="cpu")
    return out


# ---------------------------------------------------------------- model.weights


def test_the_dense_weights_of_a_run_start_another_with_the_same_accuracy(warm, tmp_path):
    dense = warm / "dense.safetensors"
    last = [e for e in of_kind(read_record(warm / "record.jsonl"), "epoch") if e["phase"] == "warmup"][-1]
    model = small()
    load_weights(model, dense, "model.weights")
    for name, value in load_file(dense).items():
        assert torch.equal(model.state_dict()[name], value), name
    data = load_data("digits", holdout=0.1, seed=0)
    held = EvaluationBatches(data.holdout, Normalization(data.mean, data.std), device="cpu")
    assert accuracy(model, held) == last["accuracy"]
    assert last["accuracy"] > 2 * accuracy(small(), held)
    # In a run without warm-up they are the dense network that the record speaks of.
    recipe = short(model__weights=str(dense), schedule__warmup=0, schedule__cycles=1, schedule__control=False)
    end = run(recipe, tmp_path / "run", device="cpu")[-1]
    assert end["dense"]["accuracy"] == read_record(warm / "record.jsonl")[-1]["dense"]["accuracy"]
    assert end["dense"]["trained"] == "as given"
    assert not (tmp_path / "run" / "dense.safetensors").exists()  # nothing new to keep


def changed(tensors: dict[str, Tensor], **changes: Tensor | None) -> dict[str, Tensor]:
    merged = {**tensors, **{name.replace("__", "."): value for name, value in changes.items()}}
    return {name: value for name, value in merged.items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"linear__bias": None}, ["it lacks 1 of the network's tensors (linear.bias)"]),
        ({"extra": torch.zeros(2)}, ["it has 1 that the network does not (extra)"]),
        ({"linear__bias": torch.zeros(7)}, ["linear.bias is (7,) there and (10,) in the network"]),
        ({"linear__bias": torch.zeros(10, dtype=torch.complex64)}, ["linear.bias", "complex64", "float32"]),
        ({"linear__bias": torch.zeros(10, dtype=torch.int64)}, ["linear.bias", "int64", "float32"]),
        ({"bn1__num_batches_tracked": torch.tensor(1.5)}, ["bn1.num_batches_tracked", "float32", "int64"]),
    ],
    ids=["missing", "unexpected", "shape", "complex", "whole", "fraction"],
)
def test_weights_that_do_not_fit_are_refused_and_nothing_is_written(warm, tmp_path, changes, words):
    path = tmp_path / "weights.safetensors"
    save_file(changed(load_file(warm / "dense.safetensors"), **changes), path)
    with pytest.raises(ArtifactError, match=re.escape(str(path))) as caught:
        run(short(model__weights=str(path)), tmp_path / "run", device="cpu")
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message
    assert not (tmp_path / "run").exists()


def test_weights_in_another_precision_are_taken_up(warm, tmp_path):
    path = tmp_path / "weights.safetensors"
    tensors = load_file(warm / "dense.safetensors")
    save_file({name: v.double() if v.is_floating_point() else v.int() for name, v in tensors.items()}, path)
    model = small()
    load_weights(model, path, "model.weights")
    for name, value in model.state_dict().items():
        assert value.dtype == tensors[name].dtype
        assert torch.equal(value, tensors[name])


def test_weights_without_the_counters_of_batch_norms_are_taken_up(warm, tmp_path):
    """Public checkpoints of older torch, those of the CIFAR ResNets among them, do not have them."""
    path = tmp_path / "weights.safetensors"
    tensors = {k: v for k, v in load_file(warm / "dense.safetensors").items() if "num_batches_tracked" not in k}
    save_file(tensors, path)
    model = small()
    load_weights(model, path, "model.weights")
    assert len(tensors) < len(model.state_dict())
    for name, value in tensors.items():
        assert torch.equal(model.state_dict()[name], value)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("absent", "No such file"),
        ("directory", "it is a folder"),
        ("cut", "not a valid safetensors file"),
        ("text", "not a valid safetensors file"),
        ("pickled", "safetensors.torch.save_file(state_dict, path)"),
        ("empty", "not a valid safetensors file"),
    ],
)
def test_a_weight_file_that_cannot_be_read_is_refused(warm, tmp_path, kind, words):
    path = tmp_path / "weights.safetensors"
    whole = (warm / "dense.safetensors").read_bytes()
    if kind == "directory":
        path.mkdir()
    elif kind != "absent":
        torch.save(small().state_dict(), tmp_path / "pickled")
        pickled = (tmp_path / "pickled").read_bytes()
        path.write_bytes({"cut": whole[:-100], "text": b"no tensors here", "pickled": pickled, "empty": b""}[kind])
    with pytest.raises(ArtifactError, match=rf"model\.weights = {re.escape(str(path))} cannot be loaded") as caught:
        run(short(model__weights=str(path)), tmp_path / "run", device="cpu")
    assert "\n" not in str(caught.value)
    assert words in str(caught.value)
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------- no score epochs


@pytest.mark.parametrize("method", ["l1", "random", "fpgm", "hrank", "sfp"])
def test_methods_that_learn_no_scores_are_refused_score_epochs(tmp_path, method):
    with pytest.raises(RecipeError, match=f"'{method}' does not learn scores: set schedule.score to 0"):
        run(short(prune__method=method), tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", ["paam", "free"])
def test_a_method_that_learns_scores_wants_score_epochs(tmp_path, method):
    """Without them all filters have one score, and chance would choose."""
    with pytest.raises(RecipeError, match=f"'{method}' learns in score phases: set schedule.score to 1 or more"):
        run(short(prune__method=method, **FIXED), tmp_path / "run", device="cpu")


@pytest.mark.parametrize(
    ("key", "typed", "meant"),
    [
        ("prune__method", "fgpm", "fpgm"),
        ("prune__scorer", "vannila", "vanilla"),
        ("prune__activation", "leaky-exp", "leaky-exponential"),
        ("data__name", "cifar-10", "cifar10"),
    ],
)
def test_a_name_that_there_is_not_is_refused_before_anything_else(tmp_path, key, typed, meant):
    with pytest.raises(RecipeError, match=f"'{typed}'.*'{meant}'"):
        run(short(**{key: typed}), tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", ["l1", "random", "fpgm", "hrank"])
def test_a_run_without_score_epochs_selects_prunes_and_is_reported(tmp_path, method):
    out = tmp_path / "run"
    events = run(
        short(prune__method=method, target__keep_filters=0.5, target__uniform=True, **FIXED), out, device="cpu"
    )
    assert [e["phase"] for e in of_kind(events, "epoch")] == ["warmup"] * 2 + ["weight"] * 4 + ["finetune"] * 2
    assert [(e["epoch"], e["cycle"]) for e in of_kind(events, "selection")] == [(2, 1), (4, 2)]
    assert of_kind(events, "scores") == []
    plan = json.loads((out / "plan.json").read_text("utf-8"))
    assert sum(len(group["keep"]) for group in plan["groups"].values()) == 13  # of 8 + 10 + 8
    assert {len(group["keep"]) for group in plan["groups"].values()} == {4, 5}
    write_report([out / "record.jsonl"], tmp_path / "report.html")
    assert f"{events[-1]['pruned']['accuracy']:.2f}" in (tmp_path / "report.html").read_text("utf-8")


def test_random_filters_stay_chosen_over_cycles_and_a_resume(tmp_path):
    """What is drawn depends on the seed of the run alone, whatever another process has drawn before."""

    class Killed(BaseException):
        pass

    def killer(event: dict) -> None:
        if event["event"] == "epoch" and event["epoch"] == 3:
            raise Killed

    recipe = short(prune__method="random", **FIXED)
    whole = run(recipe, tmp_path / "whole", device="cpu")
    with pytest.raises(Killed):
        run(recipe, tmp_path / "run", device="cpu", watch=killer)
    torch.manual_seed(77)
    resumed = run(recipe, tmp_path / "run", device="cpu", resume=True)
    first, second = (
        [{k: e[k] for k in ("kept_filters", "threshold")} for e in of_kind(events, "selection")]
        for events in (whole, resumed)
    )
    assert first == second
    assert first[0] == first[1]  # the scores do not move, so neither does the choice


# ---------------------------------------------------------------- devices


def with_gpus(monkeypatch, message: str | None, gpus: int = 2) -> None:
    """As on a machine with GPUs; with a message they refuse, as one does that another process holds for itself."""

    def ones(*size: int, device: str) -> Tensor:
        if device == "cpu" or message is None:
            return torch.zeros(1) + 1
        raise getattr(torch, "AcceleratorError", RuntimeError)(message)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(paam.train.device.torch, "ones", ones)


BUSY = "CUDA error: CUDA-capable device(s) is/are busy or unavailable\nSearch elsewhere.\nCUDA kernel errors might.\n"


@pytest.mark.parametrize(("name", "meant"), [("auto", "cuda"), ("cuda", "cuda"), ("cuda:1", "cuda:1")])
def test_a_gpu_that_cannot_be_used_is_refused_in_one_sentence(monkeypatch, name, meant):
    """Also by auto: days on a CPU are not what anyone meant who has a GPU."""
    with_gpus(monkeypatch, BUSY)
    with pytest.raises(DeviceError) as caught:
        find_device(name)
    message = str(caught.value)
    assert "\n" not in message
    assert f"'{meant}' exists but cannot be used (CUDA error: CUDA-capable device(s) is/are busy" in message
    assert message.endswith("give --device cpu.")
    assert find_device("cpu") == "cpu"


def test_a_gpu_that_is_not_there_is_refused_with_what_is(monkeypatch):
    with_gpus(monkeypatch, "CUDA error: invalid device ordinal")
    with pytest.raises(DeviceError, match=r"'cuda:7' does not exist; this machine has: cpu, cuda \(0 to 1\)\.$"):
        find_device("cuda:7")
    with_gpus(monkeypatch, "no NVIDIA driver", gpus=0)
    with pytest.raises(DeviceError, match=r"'cuda' does not exist; this machine has: cpu\.$"):
        find_device("cuda")
    assert find_device("auto") == "cpu"


def test_a_gpu_with_a_number_becomes_the_current_one(monkeypatch):
    """torch itself refuses to make "cuda" the current device: without a number there is nothing to choose."""
    with_gpus(monkeypatch, None)
    current = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert [find_device(name) for name in ("auto", "cuda", "cpu")] == ["cuda", "cuda", "cpu"]
    assert current == []
    assert find_device("cuda:1") == "cuda:1"
    assert current == ["cuda:1"]
    monkeypatch.undo()
    with pytest.raises(ValueError, match="specified index"):
        torch.cuda.set_device("cuda")


@pytest.mark.parametrize(("flatten", "moves"), [(lambda x: x.view(len(x), -1), False), (lambda x: x.flatten(1), True)])
def test_channels_come_last_where_a_network_runs_so(flatten, moves):
    """A GPU's convolutions want them so, view() does not; what the network computes is the same either way."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 5, 3)
            self.head = torch.nn.Linear(5 * 16, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(flatten(self.two(self.one(x))))

    model, image = Net(), torch.randn(1, 3, 8, 8)
    answer = model(image)
    put_channels_last(model, image)
    for layer in (model.one, model.two):
        assert layer.weight.is_contiguous(memory_format=torch.channels_last) is moves
    torch.testing.assert_close(model(image), answer)
    assert model.training


# ---------------------------------------------------------------- a teacher of one's own


def test_a_teacher_of_ones_own_teaches(warm, tmp_path, monkeypatch):
    """The weights in the file are those of the teacher; the network itself begins at random."""
    taught = []
    make = Networks.teacher

    def watched(self, **how):
        taught.append(make(self, **how))
        return taught[-1]

    monkeypatch.setattr(Networks, "teacher", watched)
    short_cut = {"schedule__warmup": 0, "schedule__cycles": 1, "schedule__control": False, "distill__weight": 0.5}
    run(short(distill__teacher=str(warm / "dense.safetensors"), **short_cut), tmp_path / "run", device="cpu")
    stored = load_file(warm / "dense.safetensors")
    assert taught
    for teacher in taught:
        assert all(torch.equal(value, stored[name]) for name, value in teacher.state_dict().items())
    with pytest.raises(ArtifactError, match="distill.teacher = nowhere cannot be loaded"):
        run(short(distill__teacher="nowhere", **short_cut), tmp_path / "other", device="cpu")
    assert not (tmp_path / "other" / "record.jsonl").exists()


def stopped(recipe, out: Path, *, epochs: int) -> None:
    """A run that was asked to stop behind so many epochs."""
    told: list[str] = []
    with pytest.raises(StoppedError):
        run(
            recipe,
            out,
            device="cpu",
            watch=lambda e: told.append(e["event"]),
            stop=lambda: told.count("epoch") >= epochs,
        )


def test_a_resumed_run_has_its_teacher_in_the_checkpoint(warm, tmp_path):
    """The file may be gone by then, as on another machine. Without saying that there is a teacher it does not go on."""
    settings = {"schedule__warmup": 0, "schedule__cycles": 1, "schedule__control": False, "distill__weight": 0.5}
    file = tmp_path / "teacher.safetensors"
    file.write_bytes((warm / "dense.safetensors").read_bytes())
    recipe = short(distill__teacher=str(file), **settings)
    whole = run(recipe, tmp_path / "whole", device="cpu")
    stopped(recipe, tmp_path / "cut", epochs=1)
    file.unlink()
    with pytest.raises(ArtifactError, match=re.escape("distill.teacher")):
        run(short(**settings), tmp_path / "cut", device="cpu", resume=True)
    elsewhere = short(distill__teacher="elsewhere.safetensors", **settings)
    resumed = run(elsewhere, tmp_path / "cut", device="cpu", resume=True)
    losses = [[event["loss"] for event in of_kind(events, "epoch")] for events in (whole, resumed)]
    assert losses[0] == losses[1]
    moves = {"environment.distill.teacher": [str(file), "elsewhere.safetensors"]}
    assert [event["changes"] for event in of_kind(resumed, "changed")] == [moves]


def test_widths_may_lie_elsewhere_when_a_run_goes_on_but_not_differ(warm, tmp_path):
    settings = {"schedule__cycles": 2, **FIXED, "prune__method": "l1"}
    plan = warm / "plan.json"
    moved, other = tmp_path / "moved.json", tmp_path / "other.json"
    tree = json.loads(plan.read_text())
    moved.write_text(json.dumps({**tree, "groups": dict(reversed(tree["groups"].items()))}))
    name, group = next((name, group) for name, group in tree["groups"].items() if len(group["keep"]) > 1)
    other.write_text(json.dumps({**tree, "groups": {**tree["groups"], name: {**group, "keep": group["keep"][1:]}}}))
    stopped(short(target__widths=str(plan), **settings), tmp_path / "run", epochs=3)
    start = read_record(tmp_path / "run" / "record.jsonl")[0]
    kept = sum(len(group["keep"]) for group in tree["groups"].values())
    width = sum(group["width"] for group in tree["groups"].values())
    assert start["recipe"]["target"]["widths"].startswith(f"{kept} of {width} filters (")
    with pytest.raises(ArtifactError, match=re.escape("target.widths")):
        run(short(target__widths=str(other), **settings), tmp_path / "run", device="cpu", resume=True)
    with pytest.raises(ArtifactError, match="nowhere"):
        run(short(target__widths=str(tmp_path / "nowhere"), **settings), tmp_path / "run", device="cpu", resume=True)
    *_, end = events = run(short(target__widths=str(moved), **settings), tmp_path / "run", device="cpu", resume=True)
    assert [event["changes"] for event in of_kind(events, "changed")] == [
        {"environment.target.widths": [str(plan), str(moved)]}
    ]
    assert load_recipe(str(tmp_path / "run" / "recipe.toml")).target.widths == str(moved)
    assert {name: kept for name, (kept, _) in end["kept_filters"].items()} == {
        name: len(kept["keep"]) for name, kept in tree["groups"].items()
    }
