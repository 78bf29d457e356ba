"""Code that a file names runs only where the user says so, and nothing is taken from the current folder unasked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import paam.cli
from events import of_kind, typed
from foreign import NET
from paam.config.recipe import load_recipe
from paam.config.trust import ZOOS, check_trusted, is_code
from paam.errors import TrustError
from paam.models import build_model
from paam.models.zoo import ZOOS as CALLED_BY_NAME
from paam.runs.finished import open_run
from paam.runs.record import read_record
from paam.views.listing import list_runs, resume_command
from ran import run

RECIPE = """
[model]
name = "foreign_net:make"
[data]
name = "digits"
batch_size = 512
[target]
keep_macs = 0.7
[schedule]
warmup = 1
cycles = 1
score = 1
weight = 1
finetune = 1
[train]
threads = 1
"""
HOSTILE = "import pathlib\npathlib.Path('hostile').touch()\nraise SystemExit('hostile')\n"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    (tmp_path / "foreign_net.py").write_text(NET, "utf-8")
    (tmp_path / "own.toml").write_text(RECIPE, "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("foreign_net", None)


@pytest.fixture
def finished(here) -> Path:
    """A finished run of that network, as it comes from elsewhere: nothing of this process knows it."""
    run(load_recipe("own.toml"), here / "run", device="cpu", command="paam prune own.toml --out run --trust-code")
    sys.modules.pop("foreign_net")
    sys.path.remove(str(here))
    (here / "ran").unlink()
    return here / "run"


COMMANDS = [
    ["prune", "own.toml", "--out=new", "--device=cpu"],
    ["prune", "run/recipe.toml", "--out=new", "--device=cpu"],
    ["prune", "run/recipe.toml", "--out=run", "--device=cpu", "--resume"],
    ["sweep", "own.toml", "--out=new", "--device=cpu"],
    ["sweep", "run/recipe.toml", "--vary=finetune.lr=1,2", "--out=new", "--device=cpu"],
    ["export", "run", "--format=safetensors"],
    ["bench", "run", "--batch=2", "--repeats=2", "--device=cpu"],
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_no_command_runs_what_a_file_names_until_it_is_told_to(cli, here, finished, arguments):
    if "--resume" in arguments:  # what is finished is only shown again
        lines = (finished / "record.jsonl").read_text("utf-8").splitlines(keepends=True)
        (finished / "record.jsonl").write_text("".join(lines[:-1]), "utf-8")
    done = cli(*arguments)
    assert done.code == 2
    (line,) = done.err.splitlines()
    assert "names code to run, 'foreign_net:make'" in line
    assert "--trust-code" in line
    assert not (here / "ran").exists()
    assert not (here / "new").exists()
    assert str(here) not in sys.path
    done = cli(*arguments, "--trust-code")
    assert (done.code, done.err) == (0, "")
    assert (here / "ran").exists()


def test_a_model_that_is_named_on_the_command_line_may_run(cli, here):
    assert not cli("inspect", "foreign_net:make", "--input=1x8x8").code
    assert (here / "ran").exists()
    sys.modules.pop("foreign_net")
    (here / "ran").unlink()
    settings = ["--set=model.name=foreign_net:make", "--device=cpu"]
    done = cli("prune", "own.toml", "--out=one", *settings)
    assert (done.code, done.err) == (0, "")
    assert (here / "ran").exists()


def test_a_sweeps_runs_take_its_model_but_no_package_from_the_current_folder(here, monkeypatch, cli):
    for name in ("torch", "rich", "numpy", "safetensors", "json"):
        (here / f"{name}.py").write_text(HOSTILE, "utf-8")
    # The empty part at its end is that folder.
    monkeypatch.setenv("PYTHONPATH", f"{os.environ.get('PYTHONPATH', '')}{os.pathsep}")
    given = ["--seeds=0,1", "--out=out", "--device=cpu"]
    for options in (
        ["--set=model.name=foreign_net:make"],
        ["--vary=model.name=foreign_net:make,resnet20"],
        ["--trust-code"],
    ):
        done = cli("sweep", "own.toml", *given, *options)
        assert (done.code, done.err) == (0, ""), (done.out, [log.read_text() for log in (here / "out").glob("*.log")])
    assert not (here / "hostile").exists()


@pytest.mark.parametrize(
    "start", [["-m", "paam"], ["-P", "-c", "from paam.entry import main; main()"]], ids=["module", "script"]
)
def test_neither_the_program_nor_what_it_starts_looks_into_the_current_folder(here, start):
    """Readers of images are processes that Python's own library starts."""
    pictures = here / "images"
    for name in ("a", "b"):
        (pictures / name).mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (8, 8), (number, 0, 0)).save(pictures / name / f"{number}.png")
    sources = str(Path(paam.__file__).parents[1])
    for name in ("rich", "numpy", "PIL", "typer"):
        (here / f"{name}.py").write_text(HOSTILE, "utf-8")
    settings = ["data.name=folder", "data.image_size=8", "data.memory=0", "data.workers=1", "model.name=resnet20"]
    done = subprocess.run(
        [sys.executable, *start, "prune", "own.toml", "--data=images", "--out=out", "--device=cpu"]
        + [f"--set={setting}" for setting in settings],
        env={**os.environ, "PYTHONPATH": sources},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert not (here / "hostile").exists()


def test_from_python_a_run_is_opened_with_its_code_only_where_that_is_said(finished, here):
    with pytest.raises(TrustError, match="foreign_net:make"):
        open_run(finished)
    assert not (here / "ran").exists()
    assert open_run(finished, trust_code=True).small is not None


def test_installed_packages_come_before_the_current_folder_once_the_model_is_there(here):
    (here / "tomllib.py").write_text(HOSTILE, "utf-8")
    build_model("foreign_net:make", num_classes=3, in_channels=1)
    assert sys.path[0] != str(here)
    assert sys.path[-1] == str(here)
    build_model("foreign_net:make", num_classes=3, in_channels=1)
    assert sys.path.count(str(here)) == 1


# ---------------------------------------------------------------- what is code, and what is printed to go on


def test_models_by_name_are_no_code():
    assert set(ZOOS) == set(CALLED_BY_NAME)
    assert not any(map(is_code, ("resnet20", "vgg16_bn", "torchvision:resnet50", "timm:resnet18", "")))
    assert all(map(is_code, ("mine:make", ":", "timm.models:resnet18", "paam.models:resnet20", "os:abort")))
    check_trusted("timm:resnet18", "The recipe", trusted=False)


def test_commands_to_go_on_carry_the_flag(here, finished, cli):
    """Also where the command that began the run did not need it yet."""
    lines = (finished / "record.jsonl").read_text("utf-8").splitlines(keepends=True)
    (finished / "record.jsonl").write_text("".join(lines[:-1]), "utf-8")
    (row,) = list_runs(here)
    assert row.resume.split().count("--trust-code") == 1
    start = of_kind(read_record(finished / "record.jsonl"), "start")[0]
    for command, flag in (
        ("paam prune own.toml", True),
        ("paam prune own.toml --trust-code", True),
        ("paam prune own.toml --set model.name=foreign_net:make", False),
        ("paam prune own.toml --set=model.name=foreign_net:make", False),
    ):
        assert ("--trust-code" in resume_command(finished, *typed([{**start, "command": command}]))) == flag
    plain = {**start, "recipe": {"model": {"name": "resnet20"}}, "command": "paam prune own.toml"}
    assert "--trust-code" not in resume_command(finished, *typed([plain]))
