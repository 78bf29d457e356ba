"""What ends training unforeseen: memory, a user's code, torch. A sentence, an event, a log, and a way to go on."""

from __future__ import annotations

import errno
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

import paam
from events import of_kind
from paam.errors import DivergedError, FailedError, PaamError, StoppedError
from paam.runs.checkpoint import checkpoints
from paam.runs.failures import LOG_FILE, out_of_memory
from paam.runs.record import read_record
from paam.runs.sweep import check_variants
from paam.train import engine as engine_module
from paam.views.choose import Harmless
from paam.views.live import LiveView
from ran import run
from short_runs import assert_same_weights, short, story

GPU = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.72 GiB of which 1 is free."
CPU = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"
FIRST = {"warmup": 0, "score": 2, "weight": 4, "finetune": 10, "control": 12}
"""First epoch of each phase, counted from 0."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The short run, never interrupted."""
    out = tmp_path_factory.mktemp("whole") / "run"
    run(short(), out, device="cpu")
    return out


def fail_in(monkeypatch, phase: str, step: int, error: BaseException) -> None:
    """The steps of a phase raise from this one on, behind the work of the step."""
    make = paam.train.engine.make_step
    taken: list[int] = []

    def made(*arguments, **options):
        take = make(*arguments, **options)

        def take_or_fail(images, labels):
            loss = take(images, labels)
            if engine_module_phase[-1] == phase:
                taken.append(1)
                if len(taken) >= step:
                    raise error
            return loss

        return take_or_fail

    engine_module_phase: list[str] = [""]
    mode = engine_module.Engine._mode

    def entered(engine, current):
        engine_module_phase.append(current.name)
        return mode(engine, current)

    monkeypatch.setattr(engine_module.Engine, "_mode", entered)
    monkeypatch.setattr(engine_module, "make_step", made)


MEMORY = {
    "memory": (MemoryError(), r"Out of main memory in step 3 of epoch {epoch} \({phase} phase\)\."),
    "cuda": (
        torch.OutOfMemoryError(GPU),
        r"Out of memory on cpu in step 3 of epoch {epoch} \({phase} phase\) \(tried to allocate 2\.00 GiB\)\.",
    ),
    "torch": (RuntimeError(f"{CPU} 64 bytes."), r"Out of main memory .* \(tried to allocate 64 bytes\)\."),
}


@pytest.mark.parametrize("phase", FIRST)
@pytest.mark.parametrize("kind", MEMORY)
def test_out_of_memory_in_a_step_of_any_phase(tmp_path, whole, monkeypatch, phase, kind):
    out, (error, words) = tmp_path / "run", MEMORY[kind]
    with monkeypatch.context() as patch:
        fail_in(patch, phase, 3, error)
        with pytest.raises(FailedError, match=words.format(epoch=FIRST[phase] + 1, phase=phase)) as failed:
            run(short(), out, device="cpu")
    assert "Use a smaller batch (data.batch_size, now 256)." in str(failed.value)
    assert str(failed.value).endswith(f"The traceback is in {out / LOG_FILE}.")
    assert failed.value.change == "data.batch_size=128"
    assert "\n" not in str(failed.value)
    last = read_record(out / "record.jsonl")[-1]
    assert last == {"event": "failed", "epoch": FIRST[phase], "reason": str(failed.value)}
    log = (out / LOG_FILE).read_text("utf-8")
    assert log.startswith("Traceback")
    assert "take_or_fail" in log
    events = run(short(), out, device="cpu", resume=True)
    assert_same_weights(out, whole)
    assert story(events) == story(read_record(whole / "record.jsonl"))
    assert not (out / LOG_FILE).exists()


class UnspokenError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


OTHERS = {
    "torch": (RuntimeError("shapes do not\nmatch. " * 500), "RuntimeError: shapes do not match. .* \\.\\.\\.\\."),
    "user": (KeyError("head"), "KeyError: 'head'"),
    "silent": (AssertionError(), "AssertionError\\."),
    "exit": (SystemExit(0), r"called sys\.exit\(0\) in step 3 of epoch 5 \(weight phase\); remove that call"),
    "exit with a code": (SystemExit(7), r"called sys\.exit\(7\)"),
    "file": (FileNotFoundError(2, "No such file", "table.txt"), "FileNotFoundError: .*table.txt"),
    "without words": (UnspokenError(), "UnspokenError\\."),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_any_exception_is_a_sentence_an_event_and_a_log(tmp_path, whole, monkeypatch, kind):
    out, (error, words) = tmp_path / "run", OTHERS[kind]
    with monkeypatch.context() as patch:
        fail_in(patch, "weight", 3, error)
        with pytest.raises(FailedError, match=words) as failed:
            run(short(), out, device="cpu")
    told = str(failed.value)
    assert "in step 3 of epoch 5 (weight phase)" in told
    assert "\n" not in told
    assert len(told) < 600
    assert not failed.value.change
    assert read_record(out / "record.jsonl")[-1] == {"event": "failed", "epoch": 4, "reason": told}
    assert type(error).__name__ in (out / LOG_FILE).read_text("utf-8")
    run(short(), out, device="cpu", resume=True)
    assert_same_weights(out, whole)


@pytest.mark.parametrize(
    ("place", "where"),
    [
        ("paam.runs.run.Monitor.__call__", r"in epoch 1 \(warmup phase\), between steps"),
        ("paam.pruning.pruner.Pruner.select", r"in epoch 5 \(weight phase\), between steps"),
        ("paam.pruning.pruner.Pruner.compact", r"in epoch 11 \(finetune phase\), between steps"),
        ("paam.runs.checkpoint.snapshot", r"in epoch 1 \(warmup phase\), between steps"),
        ("paam.runs.run.EvaluationBatches.__init__", "before the first epoch"),
        ("paam.runs.ends.measure_latency", "while the result was measured"),
        ("paam.runs.ends.save", "while the result was measured"),
    ],
)
def test_out_of_memory_outside_of_steps_says_where_and_does_not_blame_the_batch(
    tmp_path, whole, monkeypatch, place, where
):
    def full(*arguments, **options):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(place, full)
        with pytest.raises(FailedError, match=rf"Out of main memory {where}\. Free memory or use another") as failed:
            run(short(), tmp_path / "run", device="cpu")
    assert not failed.value.change
    assert read_record(tmp_path / "run" / "record.jsonl")[-1]["reason"] == str(failed.value)
    run(short(), tmp_path / "run", device="cpu", resume=True)
    assert_same_weights(tmp_path / "run", whole)


def test_out_of_memory_before_a_run_begins_leaves_nothing_and_no_checkpoint_is_blamed_for_it(tmp_path, monkeypatch):
    out = tmp_path / "run"

    def full(*arguments, **options):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("paam.runs.setup.Pruner", full)
        with pytest.raises(FailedError, match="Out of main memory before training began"):
            run(short(), out, device="cpu")
    assert not out.exists()
    with pytest.raises(StoppedError):
        run(short(), out, device="cpu", stop=lambda: True)
    with monkeypatch.context() as patch:
        patch.setattr("paam.runs.beginning.restore_engine", full)
        with pytest.raises(FailedError, match="Out of main memory before training began"):
            run(short(), out, device="cpu", resume=True)
    run(short(), out, device="cpu", resume=True)


def test_a_checkpoint_that_memory_did_not_suffice_for_is_named_so(tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise MemoryError

    monkeypatch.setattr("paam.runs.checkpoint.write_tensors", full)
    with pytest.raises(PaamError, match=r"MemoryError\. Older checkpoints are intact"):
        run(short(), tmp_path / "run", device="cpu")


def test_a_log_that_cannot_be_written_does_not_hide_the_failure(tmp_path, monkeypatch):
    (tmp_path / "run" / LOG_FILE / "folder").mkdir(parents=True)
    (tmp_path / "run" / "lock").touch()
    monkeypatch.setattr(paam.runs.directory, "LOG_FILE", "other")
    fail_in(monkeypatch, "warmup", 1, KeyError("head"))
    with pytest.raises(FailedError, match="KeyError: 'head'.*could not be written"):
        run(short(), tmp_path / "run", device="cpu", resume=True)


def test_lack_of_memory_is_found_behind_what_it_caused():
    def hidden() -> None:
        try:
            raise torch.OutOfMemoryError(GPU)
        finally:
            raise RuntimeError("a capture was left open")

    with pytest.raises(RuntimeError, match="left open") as raised:
        hidden()
    assert isinstance(out_of_memory(raised.value), torch.OutOfMemoryError)
    assert out_of_memory(RuntimeError("a loop")) is None
    assert out_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory")) is not None
    assert out_of_memory(OSError(errno.EIO, "Input/output error")) is None


# ---------------------------------------------------------------- a smaller batch on the way


@pytest.mark.parametrize(("asked", "following"), [(2, 5), (3, 7), (4, 1), (7, 5)])
def test_a_run_goes_on_with_another_size_of_batches_from_as_far_into_its_epoch(tmp_path, asked, following):
    """1,167 images: 4 steps of 256, 9 of 128. Stopped behind two steps, three or all of an epoch, and two of the next.

    It is asked to stop after every step, and after every epoch.
    """
    out, left = tmp_path / "run", [asked]

    def stop() -> bool:
        left[0] -= 1
        return left[0] <= 0

    with pytest.raises(StoppedError):
        run(short(), out, device="cpu", stop=stop)
    seen: list[tuple[int, int]] = []
    events = run(
        short(data__batch_size=128), out, device="cpu", resume=True, on_step=lambda step, of: seen.append((step, of))
    )
    assert len(of_kind(events, "epoch")) == 22
    (changed,) = of_kind(events, "changed")
    assert changed["changes"] == {"data.batch_size": [256, 128]}
    assert seen[0] == (following, 9)


# ---------------------------------------------------------------- from the command line

NETS = """
import sys

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, num_classes, in_channels):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 6, 3, 1, 1)
        self.conv2 = nn.Conv2d(6, 8, 3, 1, 1)
        self.head = Head(8, num_classes)

    def forward(self, x):
        x = torch.relu(self.conv2(torch.relu(self.conv1(x))))
        return self.head(x.mean((2, 3)))


class Head(nn.Linear):
    pass


class Leaving(nn.Linear):
    def forward(self, x):
        if x.requires_grad and len(x) > 2:
            sys.exit(0)
        return super().forward(x)


class Hungry(nn.Linear):
    def forward(self, x):
        if x.requires_grad and len(x) > 64:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return super().forward(x)


class Broken(nn.Linear):
    def forward(self, x):
        return super().forward(x) * float("inf")


def make(num_classes, in_channels):
    return Net(num_classes, in_channels)


def of(head):
    def made(num_classes, in_channels):
        net = Net(num_classes, in_channels)
        net.head = head(8, num_classes)
        return net

    return made


leaving, hungry, broken = of(Leaving), of(Hungry), of(Broken)


class Gone(nn.Linear):
    def forward(self, x):
        sys.exit(0)


leaves_at_once = of(Gone)


class Single(nn.Linear):
    def forward(self, x):
        if len(x) == 2 and not self.training:  # not what its recording is compared with
            raise KeyError("one image at a time")
        return super().forward(x)


single = of(Single)


def exits():
    sys.exit(0)


def lost(num_classes, in_channels):
    net = Net(num_classes, in_channels)
    net.conv2.weight.data[3] = float("nan")
    return net


def lost_norm(num_classes, in_channels):
    net = Net(num_classes, in_channels)
    net.norm = nn.BatchNorm2d(6)
    net.norm.running_mean[0] = float("nan")
    return net


def huge(num_classes, in_channels):
    net = Net(num_classes, in_channels)
    net.head.weight.data *= 1e30
    return net
"""
QUICK = {
    "schedule.warmup": 2,
    "schedule.cycles": 1,
    "schedule.score": 1,
    "schedule.weight": 1,
    "schedule.finetune": 1,
    "schedule.control": "false",
    "data.batch_size": 128,
}


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    (tmp_path / "failing_nets.py").write_text(NETS, "utf-8")
    (tmp_path / "leaving_module.py").write_text("import sys\nsys.exit(0)\n", "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("failing_nets", "leaving_module"):
        monkeypatch.delitem(paam.cli.training.sys.modules, name, raising=False)
    return tmp_path


@pytest.fixture
def prune(cli, here):
    """`paam prune` of one of these networks into the directory `out`."""

    def call(model: str, *arguments: str, **settings: object):
        given = {"model.name": model, **QUICK, **{key.replace("__", "."): value for key, value in settings.items()}}
        words = [word for key, value in given.items() for word in ("--set", f"{key}={value}")]
        return cli("prune", "digits-resnet20-kq", *words, "--device=cpu", "--out=out", *arguments)

    return call


def sentence(done) -> str:
    assert done.code == 2
    assert "Traceback" not in done.out + done.err
    (line,) = done.err.splitlines()
    assert line.startswith("paam: ")
    return line


def test_the_command_that_goes_on_has_the_smaller_batch_that_it_needs(cli, prune, here):
    told = sentence(prune("failing_nets:hungry"))
    assert "Out of memory on cpu in step 1 of epoch 1 (warmup phase) (tried to allocate 20.00 MiB)." in told
    assert f"The traceback is in out/{LOG_FILE}." in told
    assert "torch.OutOfMemoryError" in (here / "out" / LOG_FILE).read_text()
    command = shlex.split(told.partition("Resume with:  ")[2])
    assert command[:2] == ["paam", "prune"]
    assert command[-3:] == ["--resume", "--set", "data.batch_size=64"]
    assert cli(*command[1:]).code == 0
    assert of_kind(read_record(here / "out" / "record.jsonl"), "end")


@pytest.mark.parametrize(
    ("model", "words", "began"),
    [
        ("failing_nets:leaving", r"called sys\.exit\(0\) in step 1 of epoch 1 \(warmup phase\).* Resume with:  ", True),
        ("failing_nets:leaves_at_once", r"called sys\.exit\(0\) before training began", False),
        ("failing_nets:exits", r"could not be built, SystemExit: 0", False),
        ("failing_nets:single", r"'failing_nets:single' fails on two images, KeyError: 'one image at a time'", False),
        ("leaving_module:make", r"cannot be imported \(SystemExit: 0\)", False),
    ],
)
def test_a_model_that_leaves_the_program_or_fails_before_training_is_told_in_a_sentence(
    prune, here, model, words, began
):
    assert re.search(words, sentence(prune(model)))
    assert (here / "out").exists() == began
    if began:
        assert read_record(here / "out" / "record.jsonl")[-1]["event"] == "failed"


@pytest.mark.parametrize(
    ("model", "words"),
    [("exits", r"one cannot be run: .*SystemExit: 0"), ("leaves_at_once", r"one cannot be run: .*sys\.exit\(0\)")],
)
def test_a_model_that_leaves_the_program_fails_the_check_of_a_sweep(here, model, words):
    with pytest.raises(PaamError, match=words):
        check_variants({"one": short(model__name=f"failing_nets:{model}")})


# ---------------------------------------------------------------- the right cause


@pytest.mark.parametrize(
    ("model", "settings", "words"),
    [
        ("failing_nets:lost", {}, r"has initial weights that are not finite, in 'conv2.weight'"),
        ("failing_nets:lost_norm", {}, r"has initial weights that are not finite, in 'norm.running_mean'"),
        ("failing_nets:broken", {}, r"not finite at step 1 of epoch 1 .*rate is not the cause.*network's code"),
        ("failing_nets:huge", {}, r"epoch 1 .*It was 1\.\d*e\+29 before .*rate is not the cause.*initial weights"),
        ("failing_nets:make", {"prune.penalty": 1e38}, r"prune\.penalty = 1e\+38 is too high"),
        ("failing_nets:make", {"prune.penalty": 1e20}, r"prune\.penalty = 1e\+20 is too high"),
    ],
)
def test_what_is_not_finite_is_blamed_on_its_cause(prune, model, settings, words):
    told = sentence(prune(model, **settings))
    assert re.search(words, told)
    assert "lr" not in told.replace("failing_nets", "").split()


@pytest.mark.parametrize("key", ["model.weights", "distill.teacher"])
def test_weights_of_a_file_that_are_not_finite_are_named(cli, prune, here, key):
    assert prune("failing_nets:make").code == 0
    weights = load_file(here / "out" / "dense.safetensors")
    weights["conv1.bias"][2] = float("nan")
    save_file(weights, here / "lost.safetensors")
    settings = {"distill.weight": 0.5, "schedule.warmup": 0, key: "lost.safetensors"}
    told = sentence(prune("failing_nets:make", "--overwrite", **settings))
    assert f"{key} = lost.safetensors cannot be loaded: conv1.bias has values that are not finite" in told
    assert of_kind(read_record(here / "out" / "record.jsonl"), "end")  # the run that was there


def test_a_penalty_that_is_too_high_is_refused_on_the_way_too(prune, here):
    fails = {"schedule.finetune": 3, "finetune.lr": 1e6, "finetune.momentum": 0.99}
    assert "finetune.lr" in sentence(prune("failing_nets:make", **fails))
    told = sentence(prune("failing_nets:make", "--resume", **fails, **{"prune.penalty": 1e38}))
    assert "prune.penalty = 1e+38 is too high" in told


@pytest.mark.parametrize("lr", [30, 1e3, 1e6])
def test_a_run_of_one_step_per_epoch_that_diverges_is_shown_as_that(cli, prune, here, lr):
    settings = {"data.batch_size": 2000, "schedule.warmup": 40, "warmup.lr": lr, "warmup.momentum": 0.99}
    settings |= {"warmup.decay": "constant", "warmup.optimizer": "sgd", "warmup.ramp": 0}
    told = sentence(prune("failing_nets:make", **settings))
    assert re.search(r"exploded|not finite", told)
    assert "warmup.lr" in told
    (row,) = json.loads(cli("runs", ".", "--json").out)
    assert (row["state"], row["why"]) == ("failed", told.removeprefix("paam: "))
    for command in ("watch", "report"):
        assert "corrupt" not in cli(command, "out").err


def test_a_loss_that_grows_from_epoch_to_epoch_is_found_by_where_the_phase_began(tmp_path, monkeypatch):
    """Five times as much in every epoch of a single step: never ten times within one."""
    losses = iter(torch.tensor(2.0 * 5**number) for number in range(20))
    monkeypatch.setattr(engine_module, "make_step", lambda *a, **o: lambda images, labels: next(losses))
    with pytest.raises(DivergedError, match=r"exploded in epoch 4 \(warmup phase\): 250, from 2 at the start"):
        run(short(data__batch_size=2000, schedule__warmup=20), tmp_path / "run", device="cpu")


# ---------------------------------------------------------------- views


class Failing:
    """A view in which one of its parts does not work."""

    heard = True

    def __init__(self, part: str) -> None:
        self.part, self.told = part, []

    def __getattr__(self, name: str):
        def tell(*what: object) -> None:
            self.told.append(name)
            if name == self.part:
                raise ValueError("no such\ncolour")

        return tell

    def __enter__(self):
        return self.__getattr__("__enter__")()

    def __exit__(self, *exception: object):
        return self.__getattr__("__exit__")()


@pytest.mark.parametrize("part", ["__enter__", "event", "step", "warn", "close", "__exit__"])
def test_a_view_that_fails_is_reported_once_and_the_run_goes_on(tmp_path, whole, part):
    said, view = [], Failing(part)
    with Harmless(view, "The view", said.append) as shown:
        shown.warn("a warning")
        run(short(), tmp_path / "run", device="cpu", watch=shown.event, on_step=shown.step)
        shown.close()
    assert said == ["The view failed and is skipped from here on; the run continues (ValueError: no such colour)."]
    assert view.told.count(part) == (2 if part == "__exit__" else 1)
    assert_same_weights(tmp_path / "run", whole)


def test_a_live_view_that_cannot_be_drawn_gives_the_terminal_back_and_training_ends_well(tmp_path, whole, monkeypatch):
    """The drawing is done by a thread, whose failure nobody would hear of."""
    import io

    def undrawable(*arguments, **options):
        raise ZeroDivisionError("no columns")

    out, said = io.StringIO(), []
    view = LiveView(Console(file=out, force_terminal=True, width=80, height=24), "")
    monkeypatch.setattr("paam.views.live.frame", undrawable)
    with Harmless(view, "The view", said.append) as shown:
        run(short(), tmp_path / "run", device="cpu", watch=shown.event, on_step=shown.step)
    assert said == ["The view failed and is skipped from here on; the run continues (ZeroDivisionError: no columns)."]
    assert out.getvalue().count("\x1b[?1049h") == out.getvalue().count("\x1b[?1049l") == 1
    assert_same_weights(tmp_path / "run", whole)


def test_a_broken_view_does_not_cost_the_run_of_the_command_line(prune, here, monkeypatch):
    def broken(view, event):
        raise ZeroDivisionError("no columns")

    monkeypatch.setattr("paam.views.lines.LinesView.event", broken)
    done = prune("failing_nets:make")
    assert done.code == 0
    assert done.err.splitlines() == [
        "paam: The view of the run failed and is skipped from here on; the run continues"
        " (ZeroDivisionError: no columns)."
    ]
    assert "test accuracy" in done.out
    assert of_kind(read_record(here / "out" / "record.jsonl"), "end")


def test_the_last_good_state_of_a_failed_run_is_finite(prune, here):
    prune("failing_nets:make", **{"schedule.finetune": 3, "finetune.lr": 1e6, "finetune.momentum": 0.99})
    for path in checkpoints(here / "out" / "checkpoints"):
        assert all(value.isfinite().all() for value in load_file(path).values())
