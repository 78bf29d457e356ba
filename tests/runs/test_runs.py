"""Whole runs: one seed gives one result to the bit, killed and resumed or not, and the record tells the truth."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import paam
import paam.cli
from paam.config.recipe import OptimizerSettings, Recipe, load_recipe
from paam.config.schedule import Schedule
from paam.data import load_data
from paam.errors import ArtifactError, DataError, DivergedError, StoppedError
from paam.methods import phases_of
from paam.models import resnet20
from paam.report.gathering import gather
from paam.runs.record import read_events, read_record
from paam.runs.setup import check_recipe
from paam.train.engine import Engine
from paam.train.networks import Networks
from ran import run
from short_runs import (
    DIGITS,
    EPOCHS,
    FIRST_FINETUNE,
    OWN,
    PHASES,
    SCHEDULE,
    Killed,
    assert_same_weights,
    killer,
    short,
    small,
    story,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The short run, never interrupted."""
    out = tmp_path_factory.mktemp("whole") / "run"
    run(short(), out, device="cpu")
    return out


# ---------------------------------------------------------------- reproducible


def test_a_seed_decides_everything_and_another_seed_something_else(tmp_path):
    """The shipped network, with two threads: sums must not depend on which of them is first."""
    quick = {"schedule.warmup": 1, "schedule.cycles": 1, "schedule.weight": 1, "schedule.finetune": 1}
    recipe = load_recipe(DIGITS, {**quick, "schedule.control": False, "train.threads": 2, "data.batch_size": 256})
    threads = torch.get_num_threads()
    try:
        stories = [
            story(run(recipe, tmp_path / name, seed=seed, device="cpu"))
            for name, seed in (("one", 5), ("two", 5), ("other", 6))
        ]
    finally:
        torch.set_num_threads(threads)
    assert stories[0] == stories[1]
    assert_same_weights(tmp_path / "one", tmp_path / "two")
    losses = [[e["loss"] for e in events if e["event"] == "epoch"] for events in stories]
    assert len(losses[0]) == 4
    assert all(a != b for a, b in zip(losses[0], losses[2], strict=True))
    name = "linear.bias"
    assert not torch.equal(*(load_file(tmp_path / r / "model.safetensors")[name] for r in ("one", "other")))


def test_the_same_run_writes_the_same_bytes(tmp_path):
    recipe = short(schedule__warmup=1, schedule__cycles=1, schedule__finetune=1, schedule__control=False)
    for number in range(4):
        run(recipe, tmp_path / str(number), device="cpu")
    for name in ("recipe.toml", "plan.json", "model.safetensors"):
        assert len({(tmp_path / str(number) / name).read_bytes() for number in range(4)}) == 1, name


def test_what_ran_before_in_the_process_does_not_matter(tmp_path, whole):
    torch.manual_seed(99)
    np.random.seed(99)
    run(short(), tmp_path / "run", device="cpu")
    assert_same_weights(tmp_path / "run", whole)


def test_the_written_recipe_runs_to_the_same_weights(tmp_path, whole):
    again = load_recipe(str(whole / "recipe.toml"))
    assert again == check_recipe(short())  # with the defaults of options, which recipes do not know
    events = run(again, tmp_path / "run", device="cpu")
    assert_same_weights(tmp_path / "run", whole)
    assert story(events) == story(read_record(whole / "record.jsonl"))


# ---------------------------------------------------------------- killed and resumed


def test_the_short_run_goes_through_every_phase(whole):
    epochs = [e for e in read_record(whole / "record.jsonl") if e["event"] == "epoch"]
    assert [(e["epoch"], e["phase"]) for e in epochs] == list(enumerate(PHASES))
    assert len(epochs) == EPOCHS


@pytest.mark.parametrize(
    ("kind", "epoch"),
    [
        *(("epoch", epoch) for epoch in range(EPOCHS)),
        ("start", None),
        ("scores", 3),
        ("selection", 4),
        ("selection", 8),
    ],
)
def test_a_killed_run_goes_on_to_the_same_bits(tmp_path, whole, kind, epoch):
    out = tmp_path / "run"
    with pytest.raises(Killed):
        run(short(), out, device="cpu", watch=killer(kind, epoch))
    assert not (out / "model.safetensors").exists()
    torch.manual_seed(99)  # another process has another state
    events = run(short(), out, device="cpu", resume=True)
    assert_same_weights(out, whole)
    assert story(events) == story(read_record(whole / "record.jsonl"))
    assert events == read_record(out / "record.jsonl")


@pytest.mark.parametrize("every", [3, 100])
def test_rare_checkpoints_resume_to_the_same_bits(tmp_path, whole, every):
    out = tmp_path / "run"
    for epoch in (1, 5, 9, 13):  # killed once in almost every phase, one after the other
        with pytest.raises(Killed):
            run(
                short(train__checkpoint_every=every),
                out,
                device="cpu",
                resume=out.exists(),
                watch=killer_of_new(out, epoch),
            )
    events = run(short(train__checkpoint_every=every), out, device="cpu", resume=True)
    assert_same_weights(out, whole)
    assert story(events) == story(read_record(whole / "record.jsonl"))


def killer_of_new(out: Path, epoch: int):
    """Kill at an epoch's event; what a resumed run only shows again is earlier than that."""
    assert not out.exists() or all(e.get("epoch", -1) < epoch for e in read_record(out / "record.jsonl"))
    return killer("epoch", epoch)


@pytest.mark.parametrize("reset", ["score", "weight"])
def test_optimisers_that_start_afresh_every_phase_resume_to_the_same_bits(tmp_path, whole, reset):
    recipe = short(**{f"{reset}__reset": True})
    run(recipe, tmp_path / "plain", device="cpu")
    epoch = {"score": 7, "weight": 9}[reset]  # inside the phase's second turn
    with pytest.raises(Killed):
        run(recipe, tmp_path / "run", device="cpu", watch=killer("epoch", epoch))
    run(recipe, tmp_path / "run", device="cpu", resume=True)
    assert_same_weights(tmp_path / "run", tmp_path / "plain")
    plain = load_file(tmp_path / "plain" / "model.safetensors")["linear.bias"]
    assert not torch.equal(plain, load_file(whole / "model.safetensors")["linear.bias"])  # the switch does something


@pytest.mark.parametrize("crash", ["checkpoint", "record", "both"])
def test_a_crash_while_writing_resumes_to_the_same_bits(tmp_path, whole, crash):
    out = tmp_path / "run"
    with pytest.raises(Killed):
        run(short(), out, device="cpu", watch=killer("epoch", 8))
    if crash != "record":
        newest = max((out / "checkpoints").iterdir())
        newest.write_bytes(newest.read_bytes()[:-100])
    if crash != "checkpoint":
        (out / "record.jsonl").write_bytes((out / "record.jsonl").read_bytes()[:-30])
    events = run(short(), out, device="cpu", resume=True)
    assert_same_weights(out, whole)
    assert story(events) == story(read_record(whole / "record.jsonl"))


def test_a_run_killed_before_its_end_was_recorded_finishes_without_training(tmp_path, whole):
    out = Path(shutil.copytree(whole, tmp_path / "run"))
    lines = (out / "record.jsonl").read_text("utf-8").splitlines(keepends=True)
    (out / "record.jsonl").write_text("".join(lines[:-1]), "utf-8")
    for name in ("plan.json", "model.safetensors"):
        (out / name).unlink()
    steps = []
    events = run(short(), out, device="cpu", resume=True, on_step=lambda step, of: steps.append(step))
    assert steps == []
    assert_same_weights(out, whole)
    assert story(events) == story(read_record(whole / "record.jsonl"))


def test_a_run_whose_checkpoints_are_all_damaged_is_refused_and_kept(tmp_path):
    out = tmp_path / "run"
    with pytest.raises(Killed):
        run(short(), out, device="cpu", watch=killer("epoch", 4))
    for path in (out / "checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:50])
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    with pytest.raises(ArtifactError, match="--overwrite"):
        run(short(), out, device="cpu", resume=True)
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before


def test_an_error_that_ends_a_run_is_the_last_event_until_it_is_resumed(tmp_path, whole):
    def fail(event: dict) -> None:
        if event["event"] == "epoch" and event["epoch"] == 5:
            raise DataError("The image cat.png has gone.")

    with pytest.raises(DataError, match="cat.png"):
        run(short(), tmp_path, device="cpu", watch=fail, overwrite=True)
    last = {"event": "failed", "epoch": 6, "reason": "The image cat.png has gone."}
    assert read_record(tmp_path / "record.jsonl")[-1] == last
    assert "The run failed: The image cat.png has gone." in gather("x", read_events(tmp_path / "record.jsonl")).problems
    told: list[dict] = []
    events = run(short(), tmp_path, device="cpu", watch=told.append, resume=True)
    assert last not in [*events, *told]
    assert story(events) == story(read_record(whole / "record.jsonl"))
    assert_same_weights(tmp_path, whole)


def test_an_error_while_the_result_is_measured_is_recorded_and_a_stop_is_none(tmp_path, monkeypatch):
    out = tmp_path / "run"
    with pytest.raises(StoppedError):
        run(short(), out, device="cpu", stop=lambda: True)
    assert "failed" not in [event["event"] for event in read_record(out / "record.jsonl")]

    def refused(*arguments: object) -> None:
        raise ArtifactError("No room for the plan.")

    monkeypatch.setattr(paam.runs.run, "finish", refused)
    with pytest.raises(ArtifactError):
        run(short(), out, device="cpu", resume=True)
    last = {"event": "failed", "epoch": EPOCHS, "reason": "No room for the plan."}
    assert read_record(out / "record.jsonl")[-1] == last


def test_a_resumed_run_tells_its_record_again_and_what_follows(tmp_path):
    with pytest.raises(Killed):
        run(short(), tmp_path / "run", device="cpu", watch=killer("epoch", 6))
    seen: list[dict] = []
    events = run(short(), tmp_path / "run", device="cpu", resume=True, watch=seen.append)
    before = [event for event in events if event.get("epoch", 99) < 6 or event["event"] == "start"]
    assert seen == [
        {"event": "resumed", "told": len(before), "epoch": 6, "step": 0, "skipped": [], "notes": []},
        *events,
    ]
    assert events[: len(before)] == before


def test_a_run_goes_on_elsewhere_and_its_record_says_where(tmp_path, whole, monkeypatch):
    """Another machine, another place of the run: the same bits, and the latency is not credited to the first one."""
    out = tmp_path / "run"
    with pytest.raises(Killed):
        run(short(), out, device="cpu", watch=killer("epoch", 6))
    shutil.move(out, tmp_path / "elsewhere")
    monkeypatch.setattr(
        "paam.runs.beginning.environment", lambda device: {"hardware": "another", "torch": str(torch.__version__)}
    )
    events = run(short(), tmp_path / "elsewhere", device="cpu", resume=True)
    assert_same_weights(tmp_path / "elsewhere", whole)
    changed = [event for event in events if event["event"] == "changed"]
    assert [event["changes"] for event in changed] == [{"environment.hardware": [events[0]["hardware"], "another"]}]
    assert changed[0]["epoch"] == 6


def test_a_run_whose_checkpoints_are_gone_is_not_started_over(tmp_path):
    out = tmp_path / "run"
    with pytest.raises(Killed):
        run(short(), out, device="cpu", watch=killer("epoch", 6))
    shutil.rmtree(out / "checkpoints")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name != "lock"}
    with pytest.raises(ArtifactError, match="checkpoints of the run.*are missing.*--overwrite"):
        run(short(), out, device="cpu", resume=True)
    assert {path: path.read_bytes() for path in before} == before


def test_a_run_goes_on_without_the_weights_it_began_with(tmp_path):
    first = tmp_path / "first"
    run(short(), first, device="cpu")
    shutil.copy(first / "dense.safetensors", tmp_path / "start.safetensors")
    second = short(model__weights=str(tmp_path / "start.safetensors"), schedule__warmup=0)
    with pytest.raises(Killed):
        run(second, tmp_path / "second", device="cpu", watch=killer("epoch", 3))
    (tmp_path / "start.safetensors").rename(tmp_path / "moved.safetensors")
    assert run(second, tmp_path / "second", device="cpu", resume=True)[-1]["event"] == "end"


@pytest.mark.parametrize("method", ["paam", "random"])
def test_parameters_stay_where_a_captured_evaluation_would_read_them(tmp_path, monkeypatch, method):
    """A graph that was captured in a phase's first evaluation must still read the network's memory at its end."""
    places: dict[str, set[tuple[int, ...]]] = {}

    def watched(self, model, phase):
        places.setdefault(phase, set()).add(tuple(p.data_ptr() for p in model.parameters()))
        return 50.0

    monkeypatch.setattr("paam.train.evaluation.Monitor.__call__", watched)
    fixed = {"schedule__score": 0} if method == "random" else {}
    run(short(prune__method=method, schedule__warmup=0, **fixed), tmp_path / "run", device="cpu")
    assert set(places) == {"weight", "finetune", "control"} | ({"score"} if method == "paam" else set())
    assert {phase: len(found) for phase, found in places.items()} == dict.fromkeys(places, 1)
    assert len(set.union(*(places[phase] for phase in places if phase in ("score", "weight")))) == 1


@pytest.mark.parametrize(("begun", "goes_on"), [(True, False), (False, True)])
@pytest.mark.parametrize("epoch", [FIRST_FINETUNE, FIRST_FINETUNE + 1, FIRST_FINETUNE + 2])
def test_a_fine_tune_goes_on_as_it_was_begun(tmp_path, monkeypatch, begun, goes_on, epoch):
    """Inside the gated network (as on a GPU) or cut out of it; killed in its middle and at its end."""

    class Masked(Networks):
        wanted = begun

        def __init__(self, pruner, **options):
            super().__init__(pruner, **{**options, "masked": Masked.wanted})

    monkeypatch.setattr("paam.train.engine.Networks", Masked)
    run(short(), tmp_path / "whole", device="cpu")
    with pytest.raises(Killed):
        run(short(), tmp_path / "run", device="cpu", watch=killer("epoch", epoch))
    # Killed at the event of its first epoch, a fine-tune has no checkpoint yet: it is not begun.
    Masked.wanted = goes_on if epoch > FIRST_FINETUNE else begun
    run(short(), tmp_path / "run", device="cpu", resume=True)
    assert_same_weights(tmp_path / "run", tmp_path / "whole")


# ---------------------------------------------------------------- what a run leaves behind


def counted_by_hooks(model: nn.Module, example: Tensor) -> int:
    """Multiply-accumulates of convolutions and linear layers, from the shapes that pass through them."""
    total = 0

    def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal total
        total += output.numel() * module.weight[0].numel()

    handles = [m.register_forward_hook(hook) for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    with torch.no_grad():
        model.eval()(example)
    for handle in handles:
        handle.remove()
    return total


def test_a_run_directory_holds_recipe_record_plan_and_weights(whole):
    names = {p.name for p in whole.iterdir()}
    kept = {"recipe.toml", "record.jsonl", "dense.safetensors", "control.safetensors", "plan.json", "model.safetensors"}
    assert names == kept | {"checkpoints", "lock"}
    digest = read_record(whole / "record.jsonl")[0]["data"]["hash"]
    assert [path.name[:6] for path in sorted((whole / "checkpoints").iterdir())] == [
        f"data-{digest[0]}",
        "epoch-",
        "epoch-",
    ]


def test_weight_files_say_whose_they_are_and_the_controls_are_those_that_were_measured(whole):
    data, end = load_data("digits"), read_record(whole / "record.jsonl")[-1]
    images = (data.test.images / 255 - data.mean[0]) / data.std[0]
    control = small().eval()
    control.load_state_dict(load_file(whole / "control.safetensors"))
    with torch.no_grad():
        right = (control(images.float()).argmax(1) == data.test.labels).float().mean()
    assert 100 * float(right) == pytest.approx(end["dense"]["accuracy"], abs=0.21)  # one image in 500 may be rounded
    for name, what in (("dense", "dense network after warm-up"), ("control", "dense control, trained for as long")):
        with safe_open(whole / f"{name}.safetensors", "pt") as file:
            assert f'"network": "{what}"' in file.metadata()["paam"]


@pytest.mark.parametrize("target", ["keep_macs", "keep_params", "keep_filters"])
@pytest.mark.parametrize("share", [0.3, 0.6])
def test_the_record_states_the_cost_of_what_was_saved_and_keeps_the_target(tmp_path, target, share):
    quick = {"schedule__warmup": 0, "schedule__cycles": 1, "schedule__finetune": 1, "schedule__control": False}
    recipe = short(**quick, **{f"target__{target}": share})
    end = run(recipe, tmp_path / "run", device="cpu")[-1]
    example = torch.zeros(1, 1, 8, 8)
    loaded = paam.load(tmp_path / "run", small())
    for name, model in (("pruned", loaded), ("dense", small())):
        assert end[name]["params"] == sum(p.numel() for p in model.parameters()) == paam.count(model, example).params
        assert end[name]["macs"] == counted_by_hooks(model, example) == paam.count(model, example).macs
    plan = json.loads((tmp_path / "run" / "plan.json").read_text("utf-8"))
    kept = {name: [len(group["keep"]), group["width"]] for name, group in plan["groups"].items()}
    assert end["kept_filters"] == kept
    assert sum(width for _, width in kept.values()) == 8 + 10 + 8
    shares = {
        "keep_macs": end["pruned"]["macs"] / end["dense"]["macs"],
        "keep_params": end["pruned"]["params"] / end["dense"]["params"],
        "keep_filters": sum(k for k, _ in kept.values()) / 26,
    }
    assert share - 0.2 < shares[target] <= share


def test_the_dense_network_of_the_record_is_the_published_one(tmp_path):
    """ResNet-20 has 269,722 parameters on three channels: two channels of 16 x 9 weights less on one."""
    quick = {"schedule.warmup": 0, "schedule.cycles": 1, "schedule.weight": 1, "schedule.finetune": 0}
    recipe = load_recipe(DIGITS, {**quick, "schedule.control": False, "data.batch_size": 1024})
    events = run(recipe, tmp_path / "run", device="cpu")
    assert events[0]["dense"]["params"] == events[-1]["dense"]["params"] == 269_722 - 2 * 16 * 9
    example = torch.zeros(1, 1, 8, 8)
    loaded = paam.load(tmp_path / "run", resnet20(in_channels=1))
    assert events[-1]["pruned"]["macs"] == counted_by_hooks(loaded, example)
    assert events[-1]["dense"]["macs"] == counted_by_hooks(resnet20(in_channels=1), example)
    assert counted_by_hooks(loaded, example) <= 0.5 * counted_by_hooks(resnet20(in_channels=1), example)


def test_the_recorded_accuracy_is_that_of_the_saved_network(whole):
    data = load_data("digits")
    end = read_record(whole / "record.jsonl")[-1]
    pixels = data.test.images.double() / 255
    images = ((pixels - data.mean[0]) / data.std[0]).float()
    with torch.no_grad():
        answers = paam.load(whole, small()).eval()(images).argmax(1)
    right = int((answers == data.test.labels).sum())
    assert end["pruned"]["accuracy"] == pytest.approx(100 * right / 500, abs=0.21)  # one image on the edge


def test_the_record_tells_how_much_each_phase_kept(whole):
    events = read_record(whole / "record.jsonl")
    selections = [e for e in events if e["event"] == "selection"]
    assert [(e["epoch"], e["cycle"]) for e in selections] == [(4, 1), (8, 2)]
    assert all(e["kept_macs"] <= 0.5 for e in selections)
    epochs = [e for e in events if e["event"] == "epoch"]
    for event in epochs:
        if event["phase"] in ("warmup", "control") or (event["cycle"] == 1 and event["phase"] == "score"):
            assert event["kept_macs"] == event["kept_params"] == 1
        else:
            last = [e for e in selections if e["epoch"] <= event["epoch"]][-1]
            assert event["kept_macs"] == last["kept_macs"]
            assert event["kept_params"] == last["kept_params"]
    assert events[-1]["pruned"]["macs"] / events[-1]["dense"]["macs"] == selections[-1]["kept_macs"]


def test_the_start_of_the_record_says_what_the_run_depends_on(whole):
    start = read_record(whole / "record.jsonl")[0]
    assert start["event"] == "start"
    assert start["seed"] == 0
    assert start["torch"] == torch.__version__
    assert start["recipe"]["schedule"] == SCHEDULE
    assert start["samples"] == {"train": 1297 - 130, "holdout": 130, "test": 500}
    assert start["monitor"] == "holdout"
    assert start["method"] == "PAAM (KQ)"
    assert start["epochs"] == EPOCHS
    epochs = [e for e in read_record(whole / "record.jsonl") if e["event"] == "epoch"]
    trained = groupby((e["phase"], e["cycle"]) for e in epochs)
    assert start["phases"] == [
        {"name": name, "epochs": len([*every]), "cycle": cycle, "role": name, "label": ""}
        for (name, cycle), every in trained
    ]
    assert start["dense"]["params"] == sum(p.numel() for p in small().parameters())


@pytest.mark.parametrize("change", [{"control": True}, {"control": False}, {"control": False, "warmup": 0}], ids=str)
def test_the_end_says_how_long_the_dense_network_was_trained(tmp_path, change):
    schedule = {"warmup": 1, "cycles": 1, "score": 1, "weight": 1, "finetune": 1} | change
    settings = {f"schedule__{key}": value for key, value in schedule.items()}
    end = run(short(**settings), tmp_path / "run", device="cpu")[-1]
    after_warmup = "warm-up" if schedule["warmup"] else "as given"
    assert end["dense"]["trained"] == ("as long" if change["control"] else after_warmup)
    assert end["pruned"]["trained"] == ""
    for network in (end["dense"], end["pruned"]):
        assert sum(network["layers"].values()) == network["macs"]
    assert end["dense"]["layers"].keys() == end["pruned"]["layers"].keys()


def test_learning_rates_of_the_record_are_those_of_the_recipe(whole):
    events = [e for e in read_record(whole / "record.jsonl") if e["event"] == "epoch"]
    recipe = short()
    constant = {"warmup": recipe.warmup.lr, "score": 0.1, "weight": recipe.weight.lr}
    for event in events:
        if event["phase"] in constant:
            assert event["lr"] == constant[event["phase"]]
    # Cosine: the last of 4 steps of epoch i of n is (i + 3/4) / n of the way.
    for phase, n in (("finetune", 2), ("control", 10)):
        expected = [recipe.finetune.lr * 0.5 * (1 + np.cos(np.pi * (i + 0.75) / n)) for i in range(n)]
        assert [e["lr"] for e in events if e["phase"] == phase] == pytest.approx(expected)


# ---------------------------------------------------------------- a loss that is lost


@pytest.mark.parametrize(("epoch", "step"), [(0, 0), (0, 48), (0, 49), (0, 50), (0, 99), (0, 119), (1, 7), (2, 60)])
def test_the_step_of_the_first_loss_that_is_not_finite_is_named(epoch, step):
    class Batches:
        steps = 120

        def epoch(self, number: int, start: int):
            assert start == 0
            for place in range(self.steps):
                broken = (number, place) == (epoch, step)
                yield torch.full((2, 1, 4, 4), float("nan") if broken else 1.0 + place), torch.tensor([0, 1])

    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2))
    tame = OptimizerSettings("sgd", 1e-3, 0.0)
    recipe = dataclasses.replace(
        Recipe(), schedule=Schedule(1, 1, 1, 1, 0), warmup=tame, score=tame, weight=tame, finetune=tame
    )
    pruner = paam.Pruner(network, torch.zeros(1, 1, 4, 4), inplace=True)
    engine = Engine(pruner, recipe, phases_of(recipe), Batches(), seed=0, emit=lambda event: None)
    for number in range(epoch):
        engine.run_epoch(number, None)
    phase = ("warmup", "score", "weight")[epoch]
    cause = rf"{phase}\.lr" if (epoch, step) != (0, 0) else "before the first step.*rate is not the cause"
    with pytest.raises(DivergedError, match=rf"step {step + 1} of epoch {epoch + 1} \({phase} phase\).*{cause}"):
        engine.run_epoch(epoch, None)


# ---------------------------------------------------------------- one's own network and images


def test_ones_own_network_learns_ones_own_images_from_the_command_line(tmp_path, monkeypatch, capsys):
    rng = np.random.default_rng(0)
    for name, colour in (("apples", (200, 40, 40)), ("berries", (40, 40, 200))):
        folder = tmp_path / "images" / name
        folder.mkdir(parents=True)
        for number in range(40):
            pixels = np.clip(np.array(colour) + rng.integers(-40, 40, (12, 12, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
    (tmp_path / "own_network.py").write_text(OWN, "utf-8")
    (tmp_path / "own.toml").write_text(
        "description = 'apples and berries'\n"
        "[model]\nname = 'own_network:make'\n"
        "[data]\nname = 'folder'\ndirectory = 'images'\nimage_size = 12\nbatch_size = 16\ncrop = 1\n"
        "[target]\nkeep_macs = 0.5\n"
        "[schedule]\nwarmup = 3\ncycles = 1\nscore = 1\nweight = 2\nfinetune = 10\n",
        "utf-8",
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["paam", "prune", "own.toml", "--out=run", "--device=cpu", "--trust-code"])
    with pytest.raises(SystemExit) as exit_:
        paam.cli.main()
    make = sys.modules.pop("own_network").make
    assert not exit_.value.code
    assert capsys.readouterr().err == ""
    events = read_record(tmp_path / "run" / "record.jsonl")
    assert events[0]["samples"] == {"train": 64, "holdout": 0, "test": 16}  # a fifth of each class is for the test
    assert events[-1]["pruned"]["accuracy"] == 100  # red and blue
    loaded = paam.load(tmp_path / "run", make(2)).eval()
    example = torch.zeros(1, 3, 12, 12)
    assert counted_by_hooks(loaded, example) <= 0.5 * counted_by_hooks(make(2), example)
    # The saved network tells plain colours apart, normalised as the data were.
    plain = torch.tensor([[200, 40, 40], [40, 40, 200]]).view(2, 3, 1, 1).expand(2, 3, 12, 12) / 255
    mean = torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1)
    with torch.no_grad():
        assert loaded((plain - mean) / std).argmax(1).tolist() == [0, 1]
