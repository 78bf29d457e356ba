"""The command line: what it says, how it exits, and that a refusal never touches a run that is there."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
import typer.main
from rich.console import Console
from safetensors.torch import load_file

import paam
import paam.cli
import paam.runs.run
from paam.artifacts.latency import Latency, Speed
from paam.models import build_model
from paam.runs.record import read_record
from paam.views.tables import comparison_table

DIGITS = "digits-resnet20-kq"
RECIPES = {
    "-".join([file.stem, *variant])
    for file in (Path(paam.__file__).parent / "config" / "recipes").glob("*.toml")
    for variant in [(), *((name,) for name in tomllib.loads(file.read_text("utf-8")).get("variants", ()))]
}
COMMANDS = sorted(typer.main.get_command(paam.cli.app).commands)
CIFAR_FILES = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
FOREIGN = {"thesis.txt": b"ten years of work", "record.txt": b"", "model.safetensors": b"mine"}

# A user's own networks, as they would stand in a file beside them.
NETS = """
import torch.nn.functional as F
from torch import nn


class Small(nn.Module):
    def __init__(self, num_classes, in_channels):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 6, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 8, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(8)
        self.linear = nn.Linear(8, num_classes)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.linear(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Branching(Small):
    def forward(self, x):
        if x.sum() > 0:
            x = -x
        return super().forward(x)


def small(num_classes, in_channels):
    return Small(num_classes, in_channels)


def branching(num_classes, in_channels):
    return Branching(num_classes, in_channels)


def seven_classes(in_channels):
    return Small(7, in_channels)


def coloured():
    return Small(10, 3)


def broken():
    raise RuntimeError("no such\\nlayer")


def a_list():
    return [1, 2]
"""

BRANCH = next(number for number, line in enumerate(NETS.split("\n"), 1) if "if x.sum() > 0" in line)

QUICK = [
    "--set=schedule.warmup=1",
    "--set=schedule.cycles=1",
    "--set=schedule.weight=1",
    "--set=schedule.finetune=1",
    "--set=schedule.control=false",
    "--set=data.batch_size=128",
    "--set=model.name=own_nets:small",
    "--device=cpu",
]


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Every path below a folder with its bytes; None for folders."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    """A working directory of one's own, with one's own networks in it; imports are forgotten afterwards."""
    (tmp_path / "own_nets.py").write_text(NETS, "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("own_nets", "no_such_module", "half_module"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path
    sys.modules.pop("own_nets", None)


@pytest.fixture
def refuse(cli):
    """Run something that must be refused: exit code 2 and one message, of one line, which is returned."""

    def call(*arguments: str) -> str:
        done = cli(*arguments)
        assert done.code == 2
        return one_message(done.err)

    return call


def one_message(err: str) -> str:
    assert "Traceback" not in err
    assert err.endswith("\n")
    (line,) = err.splitlines()
    assert line.startswith("paam: ")
    message = line.removeprefix("paam: ")
    assert message[-1] in ".?"
    assert len(message.split()) > 4
    return message


@pytest.fixture(scope="module")
def good_run(tmp_path_factory) -> Path:
    """A finished run."""
    folder = tmp_path_factory.mktemp("good")
    (folder / "own_nets.py").write_text(NETS, "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", list(sys.path))
        patch.setattr(sys, "argv", ["paam", "prune", DIGITS, *QUICK, "--out=run"])
        with pytest.raises(SystemExit) as exit_:
            paam.cli.main()
    assert not exit_.value.code
    return folder / "run"


@pytest.fixture
def run(good_run, here) -> Path:
    """A copy of the finished run, under runs/good of the working directory; it must be there, unchanged, at the end."""
    copied = Path(shutil.copytree(good_run, here / "runs" / "good"))
    before = snapshot(copied)
    files = {"recipe.toml", "record.jsonl", "plan.json", "model.safetensors", "report.html", "checkpoints"}
    assert files <= before.keys()
    yield copied
    assert snapshot(copied) == before


# ---------------------------------------------------------------- input that is refused before anything is written


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["digits-resnet20-kp"], ["'digits-resnet20-kp'", f"'{DIGITS}'", ".toml"], id="recipe"),
        pytest.param(["nowhere.toml"], ["nowhere.toml", "No such file"], id="recipe-file"),
        pytest.param(["own_nets.py.toml"], ["own_nets.py.toml"], id="recipe-missing"),
        pytest.param(["x" * 300], [".toml"], id="recipe-long"),
        pytest.param([DIGITS, "--set=finetune.ler=1"], ["finetune.ler", "'finetune.lr'"], id="key"),
        pytest.param([DIGITS, "--set=finetun.lr=1"], ["finetun", "'finetune'"], id="section"),
        pytest.param([DIGITS, "--set=finetune.lr"], ["finetune.lr", "key=value"], id="no-value"),
        pytest.param([DIGITS, "--set=finetune.lr=fast"], ["finetune.lr", "a number", "'fast'"], id="text-for-number"),
        pytest.param([DIGITS, "--set=schedule.warmup=1.5"], ["schedule.warmup", "whole", "1.5"], id="number-for-int"),
        pytest.param([DIGITS, "--set=schedule.warmup=true"], ["schedule.warmup", "whole"], id="bool-for-int"),
        pytest.param([DIGITS, "--set=data.flip=1"], ["data.flip", "true or false"], id="int-for-bool"),
        pytest.param([DIGITS, "--set=data.holdout=1.5"], ["data.holdout", "0.9", "1.5"], id="range"),
        pytest.param([DIGITS, "--set=schedule.cycles=0"], ["schedule.cycles", "from 1"], id="no-cycles"),
        pytest.param([DIGITS, f"--set=finetune.lr={'9' * 400}"], ["finetune.lr"], id="huge"),
        pytest.param([DIGITS, f"--set=finetune.lr={'9' * 5000}"], ["finetune.lr"], id="huger"),
        pytest.param([DIGITS, f"--set=finetune.lr={'[' * 5000}"], ["finetune.lr"], id="nested"),
        pytest.param([DIGITS, "--set=prune.scorer=qk"], ["prune.scorer", "'qk'", "kq"], id="choice"),
        pytest.param(
            [DIGITS, "--set=finetune.nesterov=true", "--set=finetune.momentum=0"], ["momentum"], id="nesterov"
        ),
        pytest.param([DIGITS, "--keep-macs=1.5"], ["keep_macs", "at most 1", "1.5"], id="share"),
        pytest.param([DIGITS, "--keep-macs=nan"], ["keep_macs"], id="share-nan"),
        pytest.param([DIGITS, "--keep-macs=0.5", "--threshold=0.5"], ["--keep-macs and --threshold"], id="targets"),
        pytest.param([DIGITS, "--threshold=0.5", "--keep-filters=0.5"], ["--keep-filters", "--threshold"], id="both"),
        pytest.param(
            [DIGITS, "--set=target.keep_macs=0.5", "--set=target.threshold=0.5"], ["target"], id="targets-set"
        ),
        pytest.param([DIGITS, "--set=target.keep_filters=0.5", "--keep-params=0.5"], ["target"], id="targets-mixed"),
        pytest.param([DIGITS, "--keep-macs=0.0001"], ["keep_macs", "0.0001", "between 0.", "and 1"], id="unreachable"),
        pytest.param([DIGITS, "--set=model.name=resnet21"], ["resnet21", "resnet2"], id="model"),
        pytest.param(
            [DIGITS, "--set=model.name=vgg16_bn"], ["[1, 1, 8, 8]", "Output size is too small"], id="too-small-images"
        ),
        pytest.param([DIGITS, "--set=data.image_size=9"], ["image_size", "8 x 8"], id="image-size"),
        pytest.param([DIGITS, "--device=warp"], ["'warp'", "cpu"], id="device"),
        pytest.param([DIGITS, "--device=cuda:99"], ["'cuda:99'", "cpu"], id="device-number"),
        pytest.param([DIGITS, "--device=meta"], ["'meta'", "cpu"], id="device-meta"),
        pytest.param([DIGITS, "--resume"], ["--resume", "--overwrite"], id="resume-and-overwrite"),
    ],
)
def test_bad_input_is_refused_in_one_sentence_and_leaves_the_run_alone(refuse, run, arguments, words):
    message = refuse("prune", arguments[0], *QUICK, *arguments[1:], f"--out={run}", "--overwrite")
    assert all(word in message for word in words), message


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_an_absent_gpu_is_refused_and_auto_goes_on_without(refuse, run):
    message = refuse("prune", DIGITS, *QUICK, "--device=cuda", f"--out={run}", "--overwrite")
    assert "'cuda'" in message
    assert "this machine has: cpu" in message


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("own_nets:branching", ["Branching decides by the values", f"own_nets.py:{BRANCH}", "if x.sum() > 0"]),
        ("own_nets:seven_classes", ["own_nets:seven_classes", "[N, 10]", "10 classes", "[2, 7]"]),
        ("own_nets:coloured", ["[1, 1, 8, 8]", "3 channels"]),
        ("own_nets:broken", ["own_nets:broken", "RuntimeError: no such layer"]),
        ("own_nets:a_list", ["own_nets:a_list", "list", "torch.nn.Module"]),
        ("own_nets:smal", ["own_nets", "'smal'", "'small'"]),
        ("own_nets:", ["own_nets"]),
        ("no_such_module:make", ["no_such_module", "PYTHONPATH"]),
        ("half_module:make", ["half_module", "SyntaxError"]),
        (":make", ["':make'"]),
    ],
)
def test_a_model_of_ones_own_that_does_not_fit_is_refused(refuse, run, here, model, words):
    (here / "half_module.py").write_text("def make(:\n", "utf-8")
    message = refuse("prune", DIGITS, *QUICK, f"--set=model.name={model}", f"--out={run}", "--overwrite")
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("files", "size", "words"),
    [
        (None, 0, ["no directory", "cifar", "--data"]),
        ([], 0, ["cifar", "cifar-10-binary.tar.gz", "--data"]),
        (CIFAR_FILES[:5], 0, ["test_batch.bin", "missing", "cifar-10-binary.tar.gz"]),
        (CIFAR_FILES[1:], 0, ["data_batch_1.bin", "missing"]),
        (CIFAR_FILES, 100, ["data_batch_1.bin", "100 bytes", "30,730,000"]),
    ],
    ids=["directory", "empty", "last", "first", "size"],
)
def test_data_that_are_not_there_or_not_whole_are_refused(refuse, run, here, files, size, words):
    if files is not None:
        (here / "cifar").mkdir()
        for name in files:
            (here / "cifar" / name).write_bytes(bytes(size))
    settings = ["--set=data.name=cifar10", "--data=cifar"]
    message = refuse("prune", DIGITS, *QUICK, *settings, f"--out={run}", "--overwrite")
    assert all(word in message for word in words), message


def test_cifar10_without_a_directory_says_which_option_is_missing(refuse, run):
    message = refuse("prune", DIGITS, *QUICK, "--set=data.name=cifar10", f"--out={run}", "--overwrite")
    assert "--data DIR" in message


@pytest.mark.parametrize(
    "arguments",
    [
        ["--data", os.fsdecode(b"\xff")],  # the digits need no directory, but its name is written into recipe.toml
        ["--seed=-1"],
        [f"--seed={2 * 10**13}"],
        [f"--seed={10**20}"],
    ],
    ids=["name-not-utf8", "seed-negative", "seed-large", "seed-huge"],
)
def test_odd_values_work_or_are_refused_before_anything_is_written(cli, here, arguments):
    done = cli("prune", DIGITS, *QUICK, *arguments, "--out=new")
    if done.code == 0:
        assert (here / "new" / "model.safetensors").is_file()
    else:
        assert done.code == 2
        one_message(done.err)
        assert not (here / "new").exists()


# ---------------------------------------------------------------- run directories


def test_an_existing_run_needs_resume_or_overwrite(refuse, run):
    message = refuse("prune", DIGITS, *QUICK, f"--out={run}")
    assert all(word in message for word in (str(run), "not empty", "--resume", "--overwrite", "--out"))


def test_a_file_in_the_place_of_the_run_directory_is_refused_and_kept(refuse, here):
    (here / "file").write_bytes(b"mine")
    for flags in ([], ["--resume"], ["--overwrite"]):
        message = refuse("prune", DIGITS, *QUICK, "--out=file", *flags)
        assert "file is a file" in message
        assert "--out" in message
        assert "file/inside" in refuse("prune", DIGITS, *QUICK, "--out=file/inside", *flags)
    assert (here / "file").read_bytes() == b"mine"


def test_a_name_that_no_directory_can_have_is_refused(refuse):
    assert "xxx" in refuse("prune", DIGITS, *QUICK, f"--out={'x' * 300}")


@pytest.mark.parametrize("command", [["prune", DIGITS, *QUICK], ["demo"]], ids=["prune", "demo"])
def test_overwrite_never_deletes_what_is_no_run(refuse, here, command):
    for name, content in FOREIGN.items():
        (here / "mine" / "checkpoints").mkdir(parents=True, exist_ok=True)
        (here / "mine" / name).write_bytes(content)
        (here / "mine" / "checkpoints" / name).write_bytes(content)
    before = snapshot(here / "mine")
    message = refuse(*command, "--out=mine", *(["--overwrite"] if command[0] == "prune" else []))
    assert "mine" in message
    assert "--out" in message
    assert snapshot(here / "mine") == before


def test_overwrite_keeps_a_users_own_files_beside_a_run(cli, good_run, here):
    out = Path(shutil.copytree(good_run, here / "out"))
    (out / "notes.txt").write_bytes(b"mine")
    (out / "figures").mkdir()
    (out / "figures" / "one.png").write_bytes(b"mine too")
    assert cli("prune", DIGITS, *QUICK, "--out=out", "--overwrite", "--seed=1").code == 0
    assert (out / "notes.txt").read_bytes() == b"mine"
    assert (out / "figures" / "one.png").read_bytes() == b"mine too"
    assert read_record(out / "record.jsonl")[0]["seed"] == 1
    assert (out / "model.safetensors").read_bytes() != (good_run / "model.safetensors").read_bytes()


def test_resume_with_nothing_there_is_refused(refuse, here):
    (here / "empty").mkdir()
    for out in ("empty", "nowhere"):
        message = refuse("prune", DIGITS, *QUICK, f"--out={out}", "--resume")
        assert out in message
        assert "without --resume" in message
    assert not (here / "nowhere").exists()
    assert not any((here / "empty").iterdir())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("--seed=1", ["another recipe or seed", "(seed = 0)"]),
        ("--keep-macs=0.7", ["another recipe or seed", "target.keep_macs = 0.5"]),
        ("--set=weight.optimizer=sgd", ["another recipe or seed", "weight.optimizer = 'adam'"]),
        ("--set=finetune.lr=0.5", ["is finished", "finetune.lr"]),
    ],
)
def test_resume_with_another_seed_or_recipe_is_refused(refuse, run, change, words):
    message = refuse("prune", DIGITS, *QUICK, f"--out={run}", "--resume", change)
    assert str(run) in message
    for word in words:
        assert word in message


def test_resume_of_a_finished_run_shows_it_again_and_changes_nothing(cli, run):
    done = cli("prune", DIGITS, *QUICK, f"--out={run}", "--resume")
    assert done.code == 0
    assert done.err == ""
    accuracy = read_record(run / "record.jsonl")[-1]["pruned"]["accuracy"]
    assert f"{accuracy:.2f} %" in done.out


def test_resume_of_a_damaged_record_is_refused(refuse, good_run, here):
    out = Path(shutil.copytree(good_run, here / "out"))
    lines = (out / "record.jsonl").read_text("utf-8").splitlines()
    (out / "record.jsonl").write_text("\n".join([lines[0], lines[1][:20], *lines[2:]]), "utf-8")
    before = snapshot(out)
    message = refuse("prune", DIGITS, *QUICK, "--out=out", "--resume")
    assert "line 2" in message
    assert snapshot(out) == before


# ---------------------------------------------------------------- how it is shown


def test_json_on_standard_output_is_the_record(cli, here):
    done = cli("prune", DIGITS, *QUICK, "--out=out", "--json")
    assert (done.code, done.err) == (0, "")
    assert done.out == (here / "out" / "record.jsonl").read_text("utf-8")
    assert "<!doctype html>" in (here / "out" / "report.html").read_text("utf-8")
    resumed, *rest = cli("prune", DIGITS, *QUICK, "--out=out", "--json", "--resume").out.splitlines(keepends=True)
    assert json.loads(resumed) == {
        "event": "resumed",
        "told": len(rest),
        "epoch": 4,
        "step": 0,
        "skipped": [],
        "notes": [],
    }
    assert "".join(rest) == done.out


def test_quiet_prints_the_result_in_one_line(cli, here):
    done = cli("prune", DIGITS, *QUICK, "--out=out", "--quiet")
    assert (done.code, done.err) == (0, "")
    end = read_record(here / "out" / "record.jsonl")[-1]
    macs = 100 * (1 - end["pruned"]["macs"] / end["dense"]["macs"])
    assert f"test accuracy {end['pruned']['accuracy']:.2f} %, {macs:.1f} % of MACs" in done.out
    assert done.out.endswith("; out\n")
    assert len(done.out.splitlines()) == 1
    page = here / "out" / "report.html"
    assert "<!doctype html>" in page.read_text("utf-8")
    page.write_text("an older one")
    os.utime(page, (0, 0))
    assert cli("prune", DIGITS, *QUICK, "--out=out", "--quiet", "--resume").code == 0
    assert "<!doctype html>" in page.read_text("utf-8")


def test_quiet_and_json_contradict_each_other(refuse, here):
    assert "--quiet and --json" in refuse("prune", DIGITS, *QUICK, "--out=out", "--quiet", "--json")
    assert not (here / "out").exists()


def test_a_missing_tensorboard_is_said_before_anything_is_written(refuse, here, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert "pip install tensorboard." in refuse("prune", DIGITS, *QUICK, "--out=out", "--tensorboard")
    assert not (here / "out").exists()


def test_a_reader_that_goes_away_does_not_cost_the_run(here):
    command = [sys.executable, "-m", "paam", "prune", DIGITS, *QUICK, "--out=out", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=here, env=environment) as run:
        assert json.loads(run.stdout.readline())["event"] == "start"
        run.stdout.close()
        message = one_message(run.stderr.read().decode())
    assert message == "The run in out is finished, but standard output could not be written."
    assert run.returncode == 0
    assert read_record(here / "out" / "record.jsonl")[-1]["event"] == "end"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_behind_standard_output_does_not_cost_the_run(here):
    command = [sys.executable, "-m", "paam", "prune", DIGITS, *QUICK, "--out=out"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, cwd=here, check=False)
    message = one_message(done.stderr.decode())
    assert message == "The run in out is finished, but standard output could not be written."
    assert done.returncode == 0
    assert read_record(here / "out" / "record.jsonl")[-1]["event"] == "end"
    assert (here / "out" / "report.html").is_file()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize(
    "arguments", [("recipes",), ("runs", "runs"), ("runs", "runs", "--json"), ("inspect", "resnet20")]
)
def test_a_full_disk_behind_standard_output_is_one_sentence(run, monkeypatch, capsys, arguments):
    monkeypatch.setattr(sys, "argv", ["paam", *arguments])
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as exit_:
            paam.cli.main()
    assert exit_.value.code == 1
    assert one_message(capsys.readouterr().err) == "Standard output cannot be written: No space left on device."


TABLES = {
    "recipes": ["recipes"],
    "inspect": ["inspect", "resnet20"],
    "runs": ["runs", "runs"],
    "watch": ["watch", "runs/good"],
    "bench": ["bench", "runs/good", "--trust-code", "--batch=2", "--repeats=2", "--device=cpu"],
    "prune": ["prune", DIGITS, *QUICK, "--out=runs/good", "--resume"],
}


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("command", TABLES)
def test_tables_need_no_character_that_standard_output_does_not_know(run, monkeypatch, command, encoding):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    monkeypatch.setattr(sys, "argv", ["paam", *TABLES[command]])
    with pytest.raises(SystemExit) as exit_:
        paam.cli.main()
    sys.stdout.flush()
    assert not exit_.value.code
    assert len(written.getvalue().decode(encoding).splitlines()) > 1


@pytest.mark.parametrize(
    ("number", "again"), [(signal.SIGINT, "Ctrl-C once more"), (signal.SIGTERM, "Ctrl-C or SIGTERM")]
)
def test_a_signal_says_what_the_next_one_would_do(cli, monkeypatch, number, again):
    begin, sent = paam.runs.run.run, []

    def signalled(*arguments, on_step, **options):
        def step(step: int, steps: int) -> None:
            if not sent:
                sent.append(number)
                signal.raise_signal(number)
            on_step(step, steps)

        return begin(*arguments, on_step=step, **options)

    monkeypatch.setattr(paam.runs.run, "run", signalled)
    done = cli("prune", DIGITS, *QUICK, "--out=out")
    assert done.code == 128 + number
    assert f"\nstopping after this step; {again} stops immediately, without saving\n" in done.out


# ---------------------------------------------------------------- a loss that is lost


def test_a_loss_that_is_not_finite_names_the_step_and_keeps_the_checkpoints(refuse, here):
    command = ["prune", DIGITS, *QUICK, "--out=out", "--set=finetune.lr=1e6", "--set=finetune.momentum=0.99"]
    command += ["--set=schedule.finetune=9", "--set=data.batch_size=32"]
    message = refuse(*command)
    found = re.search(r"not finite at step (\d+) of epoch (\d+) \(finetune phase\)", message)
    assert found
    step, epoch = map(int, found.groups())
    assert 1 <= step <= 36  # 1,167 images to train on in batches of 32
    assert epoch >= 4  # behind one of warm-up, one of scores, one of weights
    assert "finetune.lr" in message
    assert "out/checkpoints" in message
    checkpoints = sorted((here / "out" / "checkpoints").iterdir())
    assert checkpoints
    for path in checkpoints:
        assert all(value.isfinite().all() for value in load_file(path).values())
    assert [e["epoch"] for e in read_record(here / "out" / "record.jsonl") if e["event"] == "epoch"] == list(
        range(epoch - 1)
    )
    before = snapshot(here / "out")
    assert refuse(*command, "--resume") == message  # the same seed goes the same way again
    assert snapshot(here / "out").keys() == before.keys()


def test_a_loss_that_explodes_ends_the_run_before_its_state_is_saved_and_a_lower_rate_goes_on(refuse, cli, here):
    command = ["prune", DIGITS, *QUICK, "--set=schedule.finetune=4", "--out=out"]
    message = refuse(*command, "--set=finetune.lr=100")
    assert re.search(r"The loss has exploded in epoch 4 \(finetune phase\)", message)
    assert cli(*command, "--resume").code == 0
    assert cli(*command[:-1], "--out=other").code == 0
    ends = [read_record(here / name / "record.jsonl")[-1]["pruned"]["accuracy"] for name in ("out", "other")]
    assert ends[0] == ends[1]  # nothing of the lost epoch is left


def test_a_loss_lost_in_the_first_epoch_promises_no_checkpoint(refuse, here):
    settings = ["--set=warmup.lr=1e6", "--set=warmup.momentum=0.99", "--set=data.batch_size=32"]
    message = refuse("prune", DIGITS, *QUICK, *settings, "--out=out")
    assert re.search(r"step \d+ of epoch 1 \(warmup phase\)", message)
    assert "warmup.lr" in message
    assert ("checkpoints" in message) == (here / "out" / "checkpoints").is_dir()


# ---------------------------------------------------------------- places


@pytest.mark.parametrize(
    "command", ["watch", "report", "runs", "export --format pt2", "bench", "demo --out", f"sweep {DIGITS} --out"]
)
def test_a_place_that_cannot_be_looked_at_is_refused_in_one_sentence(refuse, here, command):
    assert "File name too long" in refuse(*command.split(), "x" * 300)
    (here / "loop").symlink_to("loop")
    refuse(*command.split(), "loop")


def test_a_directory_whose_name_is_not_utf_8_is_refused_before_training(refuse, here, run):
    """What would be written there could not be read again."""
    assert "not UTF-8" in refuse("prune", DIGITS, *QUICK, "--out=out\udcff")
    assert "not UTF-8" in refuse("export", str(run), "--trust-code", "--format=safetensors", "--out=out\udcff")
    assert not list(here.glob("out*"))


@pytest.mark.parametrize("shown", ["--json", "--quiet"])
def test_what_a_model_prints_is_no_part_of_what_a_program_reads(cli, here, shown):
    (here / "loud.py").write_text(NETS.replace("return self.linear", "print('loud'); return self.linear"), "utf-8")
    done = cli("prune", DIGITS, *QUICK, "--set=model.name=loud:small", "--out=out", shown)
    sys.modules.pop("loud", None)
    assert done.code == 0
    assert "loud" in done.err
    if shown == "--json":
        assert done.out == (here / "out" / "record.jsonl").read_text("utf-8")
    else:
        assert done.out.count("\n") == 1


def test_json_of_inspect_and_bench_is_json_whatever_a_model_prints(cli, here, run):
    (here / "loud.py").write_text(NETS.replace("return self.linear", "print('loud'); return self.linear"), "utf-8")
    found = cli("inspect", "loud:small", "--input=1x8x8", "--json")
    assert "loud" in found.err
    assert json.loads(found.out)["model"] == "loud:small"
    (here / "own_nets.py").write_text((here / "loud.py").read_text("utf-8"), "utf-8")
    sys.modules.pop("own_nets", None)
    assert (
        len(
            json.loads(
                cli("bench", str(run), "--trust-code", "--batch=4", "--repeats=2", "--device=cpu", "--json").out
            )["rows"]
        )
        == 2
    )
    sys.modules.pop("loud", None)


def test_an_interrupt_while_the_result_is_measured_stops_and_goes_on_from_there(cli, monkeypatch, here):
    measure = paam.runs.ends.measure_latency

    def interrupted(*arguments, **options):
        signal.raise_signal(signal.SIGINT)
        return measure(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(paam.runs.ends, "measure_latency", interrupted)
        done = cli("prune", DIGITS, *QUICK, "--out=out")
    assert done.code == 130
    assert "Stopped while measuring the result; all training is saved. Resume with:  paam prune" in done.err
    trained = read_record(here / "out" / "record.jsonl")
    assert cli("prune", DIGITS, *QUICK, "--out=out", "--resume").code == 0
    assert read_record(here / "out" / "record.jsonl")[:-1] == trained  # not an epoch again


# ---------------------------------------------------------------- the demo


def test_the_demo_runs_its_recipe_and_replaces_an_earlier_demo(cli, monkeypatch, good_run, here):
    monkeypatch.setattr(paam.cli.training, "DEMO_RECIPE", str(good_run / "recipe.toml"))
    for seed in (0, 1):
        done = cli("demo", f"--seed={seed}")
        assert done.code == 0
        assert done.err == ""
        assert "runs/demo" in done.out
        assert read_record(here / "runs" / "demo" / "record.jsonl")[0]["seed"] == seed


def test_an_unfinished_demo_is_gone_on_with_or_said_to_be_replaced(cli, monkeypatch, good_run, here):
    monkeypatch.setattr(paam.cli.training, "DEMO_RECIPE", str(good_run / "recipe.toml"))
    record = here / "runs" / "demo" / "record.jsonl"

    def unfinish() -> None:
        record.write_text("".join(record.read_text("utf-8").splitlines(keepends=True)[:-1]), "utf-8")

    assert cli("demo").code == 0
    begun = read_record(record)
    unfinish()
    done = cli("demo", "--resume")
    assert (done.code, done.err) == (0, "")
    assert "resumed after epoch 4" in done.out
    assert read_record(record)[:-1] == begun[:-1]  # seconds and all: nothing was trained again
    unfinish()
    done = cli("demo")
    assert done.code == 0
    assert one_message(done.err) == (
        "The unfinished demo in runs/demo is overwritten; use --resume to continue a demo instead."
    )
    assert "resumed" not in done.out
    assert read_record(record)[-1]["event"] == "end"


@pytest.mark.parametrize(
    "left", ["lock", f"lock .recipe.toml.{'0' * 16}.tmp", "lock recipe.toml", "lock recipe.toml record.jsonl"]
)
@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_a_demo_that_was_stopped_before_its_first_event_begins_anew(cli, monkeypatch, good_run, here, left, resume):
    monkeypatch.setattr(paam.cli.training, "DEMO_RECIPE", str(good_run / "recipe.toml"))
    for name in left.split():
        (here / "mine").mkdir(exist_ok=True)
        (here / "mine" / name).touch()
    done = cli("demo", "--out=mine", *resume)
    assert (done.code, done.err) == (0, "")
    assert read_record(here / "mine" / "record.jsonl")[-1]["event"] == "end"


def test_the_demo_does_not_replace_what_was_saved_by_hand(refuse, good_run, here):
    for name in ("plan.json", "model.safetensors"):
        (here / "mine").mkdir(exist_ok=True)
        shutil.copy(good_run / name, here / "mine" / name)
    before = snapshot(here / "mine")
    assert "does not hold an earlier demo" in refuse("demo", "--out=mine")
    assert snapshot(here / "mine") == before


def test_an_interrupted_demo_says_how_to_go_on(cli, monkeypatch, good_run):
    monkeypatch.setattr(paam.cli.training, "DEMO_RECIPE", str(good_run / "recipe.toml"))
    begin = paam.runs.run.run

    def interrupted(*arguments, **options):
        return begin(*arguments, **{**options, "on_step": lambda step, steps: signal.raise_signal(signal.SIGINT)})

    with monkeypatch.context() as patch:
        patch.setattr(paam.runs.run, "run", interrupted)
        done = cli("demo", "--out=mine", "--seed=3")
    assert done.code == 130
    assert done.err.endswith(" Resume with:  paam demo --out=mine --seed=3 --resume\n")
    done = cli("demo", "--out=mine", "--seed=3", "--resume")
    assert (done.code, done.err) == (0, "")
    assert "resumed after epoch 0 and 1 steps" in done.out


# ---------------------------------------------------------------- what it tells


def words(text: str) -> str:
    """The text without frames and line breaks."""
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())


def test_every_shipped_recipe_is_listed_with_what_it_is(cli):
    done = cli("recipes")
    assert done.code == 0
    assert done.err == ""
    assert set(done.out.split()) >= RECIPES >= {DIGITS}
    assert "ResNet-20 on the embedded 8 x 8 digits" in words(done.out)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_has_an_example(cli, command):
    done = cli(command, "--help")
    assert done.code == 0
    assert done.err == ""
    assert re.search(rf"Examples?: paam {command}", words(done.out))


def test_help_lists_every_command_with_what_it_does(cli):
    done = cli("--help")
    assert done.code == 0
    for command, function in typer.main.get_command(paam.cli.app).commands.items():
        first_words = " ".join(function.help.split()[:4])
        assert f"{command} {first_words}" in words(done.out)


def test_help_of_prune_names_every_target_and_flag(cli):
    text = words(cli("prune", "--help").out)
    for option in ("--data", "--keep-macs", "--keep-params", "--keep-filters", "--threshold", "--set", "--out"):
        assert option in text
    for option in ("--seed", "--device", "--resume", "--overwrite", "--quiet", "--json", "--tensorboard"):
        assert option in text


def test_version(cli):
    done = cli("--version")
    assert (done.code, done.out, done.err) == (0, f"paam {paam.__version__}\n", "")


@pytest.mark.parametrize("arguments", [["prun"], ["prune"], ["prune", DIGITS, "--seed=x"], ["prune", DIGITS, "--fast"]])
def test_usage_errors_exit_with_2_and_a_hint(cli, arguments):
    done = cli(*arguments)
    assert done.code == 2
    assert "Usage" in done.err
    assert "Traceback" not in done.err


# ---------------------------------------------------------------- in a process of its own


def program(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paam", *arguments],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_python_m_paam_is_the_same_program(here):
    done = program("--version", cwd=here)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"paam {paam.__version__}\n", "")


def test_ctrl_c_while_the_program_is_loaded_is_one_sentence(here):
    """A torch that interrupts whoever imports it, and would swallow what is raised then."""
    (here / "torch.py").write_text(
        "import signal\ntry:\n    signal.raise_signal(signal.SIGINT)\nexcept BaseException:\n    raise ImportError\n"
    )
    path = os.pathsep.join([str(here), *sys.path])
    done = program("prune", DIGITS, cwd=here, PYTHONPATH=path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "paam: Stopped before anything started.\n")
    assert not (here / "runs").exists()


def test_every_public_name_is_there_though_importing_paam_loads_no_torch(here):
    said = "import sys, paam; early = 'torch' in sys.modules; print(early, all(hasattr(paam, n) for n in paam.__all__))"
    done = subprocess.run([sys.executable, "-c", said], cwd=here, capture_output=True, text=True, check=True)
    assert done.stdout == "False True\n"
    with pytest.raises(AttributeError, match="no attribute 'purne'"):
        _ = paam.purne


def test_the_installed_command_is_the_same_program(here):
    script = shutil.which("paam", path=str(Path(sys.executable).parent))
    if script is None:
        pytest.skip("the command is not installed beside this Python")
    done = subprocess.run([script, "--version"], cwd=here, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"paam {paam.__version__}\n", "")


def test_a_refusal_in_a_process_of_its_own(run, here):
    done = program("prune", "digits-resnet20-kp", f"--out={run}", "--overwrite", cwd=here)
    assert done.returncode == 2
    assert f"Did you mean '{DIGITS}'?" in one_message(done.stderr)
    assert done.stdout == ""


def test_a_network_beside_the_user_or_on_their_path_is_found(here, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    shutil.move(here / "own_nets.py", elsewhere / "own_nets.py")
    missing = program("prune", DIGITS, *QUICK, "--out=out", cwd=here)
    assert missing.returncode == 2
    assert "PYTHONPATH" in one_message(missing.stderr)
    assert not (here / "out").exists()
    found = program("prune", DIGITS, *QUICK, "--out=out", cwd=here, PYTHONPATH=str(elsewhere))
    assert found.returncode == 0
    assert found.stderr == ""
    assert (here / "out" / "model.safetensors").is_file()


# ---------------------------------------------------------------- inspect, export, bench


def test_inspect_shows_layers_groups_and_what_is_left_alone(cli):
    done = cli("inspect", "own_nets:small", "--input=1x8x8", "--classes=3")
    assert not done.code
    rows = {line.split()[0]: " ".join(line.split()) for line in done.out.splitlines() if line.strip()}
    assert rows["conv1"] == "conv1 Conv2d 3x3 6 54 3.46 k own"  # 1 * 6 * 9 weights, times 8 * 8 positions
    assert rows["conv2"] == "conv2 Conv2d 3x3 8 432 27.65 k own"
    assert "left alone" in rows["linear"]
    assert "14 filters can be removed; groups: 2" in done.out


def test_inspect_as_json(cli):
    done = cli("inspect", "resnet20", "--json", "--streams=tied")
    found = json.loads(done.out)
    assert (found["params"], found["input"]) == (269_722, [1, 3, 32, 32])
    assert sum(layer["macs"] for layer in found["layers"]) == found["macs"]
    assert len(found["groups"]) == 12  # three streams, nine inner layers
    assert {group["stream"] for group in found["groups"].values()} == {
        "conv1",
        "layer2.0.conv2",
        "layer3.0.conv2",
        None,
    }
    assert found["groups"]["conv1"]["layers"] == ["conv1", *(f"layer1.{i}.conv2" for i in range(3))]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no_model"], ["no model 'no_model'", "torchvision:resnet50"]),
        (["timm:efficientnet_b00"], ["timm"]),
        (["resnet20", "--input=3xbig"], ["--input", "3xbig"]),
        (["resnet20", "--input=3x65535x65535"], ["--input", "3x65535x65535"]),
        (["resnet20", "--ignore=layer9"], ["layer9", "Did you mean"]),
        (["own_nets:branching", "--input=1x8x8"], ["own_nets.py", "if x.sum() > 0"]),
    ],
)
def test_what_cannot_be_inspected_is_explained(refuse, arguments, words):
    message = refuse("inspect", *arguments)
    assert all(word in message for word in words)


def test_exported_networks_load_and_agree(cli, run, here):
    x = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    truth = paam.load(run, _digits_network(run))(x)
    assert not cli("export", str(run), "--trust-code", "--format=pt2", "--out=small.pt2").code
    code = "import sys, torch; print(torch.export.load('small.pt2').module()(torch.load('x.pt')).tolist()); "
    code += "assert not any(name.startswith('paam') for name in sys.modules)"
    torch.save(x, "x.pt")
    done = subprocess.run([sys.executable, "-c", code], cwd=here, capture_output=True, text=True, check=True)
    assert torch.allclose(torch.tensor(json.loads(done.stdout)), truth, atol=1e-5)
    done = cli("export", str(run), "--trust-code", "--format=safetensors", "--out=small.safetensors")
    assert "paam.load" in done.out
    assert torch.equal(paam.load("small.safetensors", _digits_network(run))(x), truth)


def _digits_network(run: Path) -> torch.nn.Module:
    return build_model(tomllib.loads((run / "recipe.toml").read_text())["model"]["name"], num_classes=10, in_channels=1)


def test_a_name_in_square_brackets_is_printed_as_it_is(cli, run):
    Path("odd[").mkdir()
    done = cli("export", str(run), "--trust-code", "--format=safetensors", "--out=odd[/q][bold].safetensors")
    assert not done.code
    assert done.out.startswith("odd[/q][bold].safetensors  (")


def test_an_exported_file_that_is_damaged_is_refused(cli, run):
    cli("export", str(run), "--trust-code", "--format=safetensors", "--out=small.safetensors")
    content = Path("small.safetensors").read_bytes()
    rng = np.random.default_rng(0)
    for place in rng.integers(0, len(content), 60):
        damaged = bytearray(content)
        damaged[place] ^= 1 << rng.integers(0, 8)
        Path("damaged.safetensors").write_bytes(damaged)
        with pytest.raises(paam.PaamError):
            paam.load("damaged.safetensors", _digits_network(run))
    Path("cut.safetensors").write_bytes(content[:-1])
    with pytest.raises(paam.PaamError, match=r"cut.safetensors is not a valid tensor file"):
        paam.load("cut.safetensors", _digits_network(run))


@pytest.mark.parametrize(
    "name", ["plan.json", "record.jsonl", "model.safetensors", "../good/recipe.toml", "checkpoints/x"]
)
def test_an_export_does_not_take_the_place_of_the_runs_own_files(refuse, run, name):
    message = refuse("export", str(run), "--trust-code", "--format=safetensors", f"--out={run / name}")
    assert "one of the run's own files" in message
    assert "cannot be written" in refuse("export", str(run), "--trust-code", "--format=safetensors", f"--out={run}")


def test_what_export_says_loads_its_file(cli, run):
    done = cli("export", str(run), "--trust-code", "--format=safetensors", "--out=small.safetensors")
    code = done.out.split("load it with  ")[1].split("\n")[0]
    checked = f"import paam; print(sum(p.numel() for p in ({code}).parameters()))"
    loaded = subprocess.run([sys.executable, "-c", checked], capture_output=True, text=True, check=True)
    assert int(loaded.stdout) == read_record(run / "record.jsonl")[-1]["pruned"]["params"]


def test_bench_measures_both_networks(cli, run):
    done = cli("bench", str(run), "--trust-code", "--batch=4", "--repeats=3", "--device=cpu", "--json")
    found = json.loads(done.out)
    assert [(row["network"], row["mode"]) for row in found["rows"]] == [("dense", "eager"), ("pruned", "eager")]
    assert found["rows"][1]["memory"] < found["rows"][0]["memory"]
    assert "speed-up" in cli("bench", str(run), "--trust-code", "--batch=4", "--repeats=2", "--device=cpu").out


def test_a_speed_up_says_what_the_quartiles_leave_open():
    """12 ms (10 to 14) against 8 ms (7 to 20): 1.5 times, but between 10 / 20 and 14 / 7."""
    rows = [
        Speed("dense", "eager", Latency(12.0, 10.0, 14.0), 1000.0, None),
        Speed("pruned", "eager", Latency(8.0, 7.0, 20.0), 1500.0, None),
    ]
    text = io.StringIO()
    Console(file=text, width=200).print(comparison_table("a CPU", rows))
    title, _, dense, _, pruned, left, *note = text.getvalue().splitlines()
    assert title.strip() == "a CPU"
    assert "vary so much" in note[0]  # 20 is more than 1.5 times 7
    assert dense.rstrip().endswith("1.00 x")
    assert pruned.rstrip().endswith("1.50 x")
    assert " ".join(left.split()) == "quartiles 7.00 to 20.00 0.50 to 2.00"


def test_eighty_columns_hold_timings_of_seconds_and_their_quartiles():
    times = {"dense": Latency(21234.56, 20200.12, 21300.34), "pruned": Latency(10612.34, 10600.11, 10650.99)}
    rows = [
        Speed(network, mode, latency, 103456.0, 8 * 2**30)
        for mode in ("eager", "compiled")
        for network, latency in times.items()
    ]
    text = io.StringIO()
    Console(file=text, width=80).print(comparison_table("NVIDIA H200, batch 128", rows))
    lines = [" ".join(line.split()) for line in text.getvalue().splitlines()[2:]]
    assert lines[:4] == [
        "dense eager 21234.56 103,456 8192.0 MiB 1.00 x",
        "quartiles 20200.12 to 21300.34",
        "pruned eager 10612.34 103,456 8192.0 MiB 2.00 x",
        "quartiles 10600.11 to 10650.99 1.90 to 2.01",
    ]
    assert len(lines) == 8


@pytest.mark.parametrize("command", ["export --format=pt2", "bench"])
def test_what_is_no_finished_run_is_refused(refuse, good_run, here, command):
    assert "is not a run directory" in refuse(*command.split(), str(here))
    copied = Path(shutil.copytree(good_run, here / "cut"))
    lines = (copied / "record.jsonl").read_text().splitlines(keepends=True)
    (copied / "record.jsonl").write_text("".join(lines[:-1]))
    assert "not finished" in refuse(*command.split(), str(copied))


def test_an_unknown_format_is_refused(refuse, run):
    assert "onnx, pt2, safetensors" in refuse("export", str(run), "--trust-code", "--format=tflite", "--out=x")


# ---------------------------------------------------------------- report


def test_prune_writes_a_report_and_says_where(cli, good_run, here):
    arguments = ["prune", DIGITS, *QUICK, "--out=out", "--set=description=two words"]
    done = cli(*arguments)
    assert "report: out/report.html" in done.out
    command = read_record(here / "out" / "record.jsonl")[0]["command"]
    assert shlex.split(command) == ["paam", *arguments]  # it can be pasted into a shell
    accuracy = read_record(here / "out" / "record.jsonl")[-1]["pruned"]["accuracy"]
    assert f'<dd class="value">{accuracy:.2f} %</dd>' in (here / "out" / "report.html").read_text("utf-8")
    (here / "out" / "record.jsonl").unlink()
    # What is left is still ours to overwrite.
    assert not cli("prune", DIGITS, *QUICK, "--out=out", "--overwrite").code


def test_resume_of_a_finished_run_brings_an_old_report_up_to_date(cli, good_run, here):
    out = Path(shutil.copytree(good_run, here / "out"))
    (out / "report.html").write_text("written while the run went on", "utf-8")
    os.utime(out / "report.html", (0, 0))
    assert not cli("prune", DIGITS, *QUICK, "--out=out", "--resume").code
    assert "<!doctype html>" in (out / "report.html").read_text("utf-8")


def test_report_of_one_run_lies_in_it_and_of_several_here(cli, good_run, here):
    run = Path(shutil.copytree(good_run, here / "run"))
    (run / "report.html").unlink()
    done = cli("report", str(run))
    assert (done.code, done.out, done.err) == (0, f"{run}/report.html\n", "")
    done = cli("report", str(run), "nowhere", str(run))
    assert (done.code, done.out) == (0, "report.html\n")
    assert "nowhere is not a run directory" in one_message(done.err)
    done = cli("report", str(run), "-o", "mine.html")
    assert (done.code, done.out) == (0, "mine.html\n")
    assert (here / "mine.html").read_bytes() == (good_run / "report.html").read_bytes()


def test_what_cannot_be_reported_is_explained(refuse, run, here):
    assert "nowhere is not a run directory" in refuse("report", "nowhere")
    assert ".html" in refuse("report", str(run), "-o", str(run / "record.jsonl"))
    assert "cannot be written" in refuse("report", str(run), "-o", "nowhere/report.html")
    (here / "folder.html").mkdir()
    assert "folder.html" in refuse("report", str(run), "-o", "folder.html")
