"""Sweeps: which runs they are, real processes that finish, fail, are interrupted and go on, and the final table."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean

import pytest
from rich.console import Console

import paam.cli
from events import of_kind
from paam.artifacts.weights import save_weights
from paam.config.recipe import load_recipe
from paam.errors import RecipeError
from paam.events import End, Milliseconds, Outcome
from paam.models import build_model
from paam.runs.planned import Common, plan_sweep
from paam.runs.record import read_record
from paam.runs.sweep import check_variants, shared_gpu
from paam.views.tables import sweep_table
from ran import run
from short_runs import assert_same_weights
from sweeps import NET, RECIPE, SWEEP, sweep, wait_for


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    (tmp_path / "held_net.py").write_text(NET, "utf-8")
    (tmp_path / "tiny.toml").write_text(RECIPE, "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "200")
    yield tmp_path
    sys.modules.pop("held_net", None)


# ---------------------------------------------------------------- which runs


CPU = Common(device="cpu")


def test_every_combination_is_a_run_with_a_directory_of_its_own():
    vary = ["prune.method=paam,free", "finetune.lr=0.1"]
    runs = plan_sweep(["a-recipe", "own/b.toml"], [0, 7], vary, CPU, Path("out"))
    assert [run.out.name for run in runs] == [
        f"{recipe}-prune.method={method}-finetune.lr=0.1-seed{seed}"
        for seed in (0, 7)
        for recipe in ("a-recipe", "b")
        for method in ("paam", "free")
    ]
    last = runs[-1]
    assert last.variant == "b-prune.method=free-finetune.lr=0.1"
    assert last.out.parent == Path("out")
    assert last.arguments == [
        *("own/b.toml", "--seed", "7", "--out", str(last.out)),
        *("--set", "prune.method=free", "--set", "finetune.lr=0.1", "--device", "cpu"),
    ]
    assert last.overrides == {"prune.method": "free", "finetune.lr": 0.1}
    assert [run.variant for run in plan_sweep(["a"], [1], [], CPU, Path("out"))] == ["a"]


def test_sweeps_of_other_common_settings_have_other_directories():
    """Else the second of two sweeps would take the first one's runs for its own."""
    common = Common(("target.keep_macs=0.5", "finetune.lr=0.2"), data="images", device="cpu", trust_code=True)
    (run,) = plan_sweep(["a"], [0], ["prune.method=l1"], common, Path("out"))
    assert run.out.name == "a-prune.method=l1-target.keep_macs=0.5-finetune.lr=0.2-seed0"
    assert run.arguments[-5:] == ["--device", "cpu", "--data", "images", "--trust-code"]
    assert run.overrides == {
        **{"prune.method": "l1", "target.keep_macs": 0.5, "finetune.lr": 0.2},
        "data.directory": "images",
    }


def test_a_long_name_is_cut_and_stays_its_own():
    many = [f"prune.ignore=[{', '.join(repr(f'layer{number}') for number in range(size))}]" for size in (80, 81)]
    names = [plan_sweep(["a"], [0], [], Common((setting,)), Path("out"))[0].out.name for setting in many]
    (wide,) = plan_sweep(["a"], [0], [f"description={'剪' * 90}"], CPU, Path("out"))
    assert len(wide.out.name.encode()) < 200  # file systems count bytes
    assert len({*names}) == 2
    assert max(map(len, names)) < 200
    assert all(name.startswith("a-prune.ignore=['layer0', ") for name in names)


def test_a_value_with_a_slash_makes_no_directory_of_its_own():
    (run,) = plan_sweep(["a"], [0], ["model.weights=runs/x/dense.safetensors"], CPU, Path("out"))
    assert run.out == Path("out/a-model.weights=runs_x_dense.safetensors-seed0")
    assert "model.weights=runs/x/dense.safetensors" in run.arguments


@pytest.mark.parametrize("text", ["", "finetune.lr", "=1,2", "finetune.lr=", "finetune.lr=1,,2", "finetune.lr=1,"])
def test_what_is_no_list_of_values_is_refused(text):
    with pytest.raises(RecipeError, match="key=value,value"):
        plan_sweep(["a"], [0], [text], CPU, Path("out"))


def test_runs_that_would_share_a_directory_are_refused():
    with pytest.raises(RecipeError, match="one directory"):
        plan_sweep(["one/a.toml", "two/a.toml"], [0], [], CPU, Path("out"))
    for values in ("1,1", "0.5,0.50", "1e-4,0.0001", "1,1.0"):
        with pytest.raises(RecipeError, match="finetune.lr has a duplicate value"):
            plan_sweep(["a"], [0], [f"finetune.lr={values}"], CPU, Path("out"))


def test_a_value_may_be_a_list():
    lists = ['["b", "c"]', "[]", '["d[0]", "e"]']
    runs = plan_sweep(["a"], [0], [f"prune.ignore={','.join(lists)}"], CPU, Path("out"))
    assert [run.settings for run in runs] == [(f"prune.ignore={value}",) for value in lists]


@pytest.mark.parametrize("settings", [("finetune.lr=3",), ()])
def test_a_key_that_is_given_twice_is_refused(settings):
    """Otherwise the last would win, and runs of different names be the same."""
    vary = ["finetune.lr=1,2"] if settings else ["finetune.lr=1,2", "finetune.lr = 3"]
    with pytest.raises(RecipeError, match="finetune.lr is given twice"):
        plan_sweep(["a"], [0], vary, Common(settings), Path("out"))
    with pytest.raises(RecipeError, match="data.directory is given twice"):
        plan_sweep(["a"], [0], ["data.directory=a,b"], Common(data="c"), Path("out"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tiny.toml", "--seeds="], ["--seeds"]),
        (["tiny.toml", "--seeds=0,x"], ["--seeds", "'0,x'"]),
        (["tiny.toml", "--seeds=0,,1"], ["--seeds"]),
        (["tiny.toml", "--seeds=-1"], ["--seeds"]),
        (["tiny.toml", "--seeds=1.5"], ["--seeds"]),
        (["tiny.toml", "--seeds=1,01"], ["--seeds", "distinct"]),
        (["tiny.toml", "--seeds=²"], ["--seeds"]),
        (["tiny.toml", f"--seeds={'9' * 5000}"], ["--seeds"]),
        (["tiny.toml", "--vary=finetune.lr"], ["--vary", "key=value"]),
        (["tiny.toml", "--vary=finetune.ler=1,2"], ["finetune.ler", "'finetune.lr'"]),
        (["tiny.toml", "--vary=prune.scorer=kq,qk"], ["prune.scorer", "'qk'"]),
        (["tiny.toml", "--vary=data.directory=a,b", "--data=c"], ["data.directory", "twice"]),
        (["tiny.toml", "--keep-macs=0.5", "--threshold=0.5"], ["--keep-macs and --threshold", "one target"]),
        (["tiny.toml", "--keep-macs=0.5", "--vary=target.keep_macs=0.4,0.3"], ["target.keep_macs", "twice"]),
        (["tiny.toml", "--keep-macs=2"], ["keep_macs", "2"]),
        (["tiny.toml", "--set=finetune.lr=fast"], ["finetune.lr", "a number"]),
        (["tiny.toml", "nowhere.toml"], ["nowhere.toml"]),
        (["tiny.toml", "--device=warp"], ["'warp'", "cpu"]),
        (["tiny.toml", "--out=tiny.toml"], ["tiny.toml", "--out"]),
    ],
)
def test_a_bad_sweep_is_refused_in_one_sentence_before_anything_runs(monkeypatch, capsys, here, arguments, words):
    before = sorted(here.iterdir())
    monkeypatch.setattr(sys, "argv", ["paam", "sweep", "--device=cpu", "--trust-code", *arguments])
    with pytest.raises(SystemExit) as exit_:
        paam.cli.main()
    captured = capsys.readouterr()
    assert exit_.value.code == 2
    (line,) = captured.err.splitlines()
    assert line.startswith("paam: ")
    assert all(word in line for word in words), line
    runs = here / "runs" / "sweep"
    assert sorted(path for path in here.iterdir() if path.name != "runs") == before
    assert not runs.exists() or not any(runs.iterdir())


@pytest.mark.parametrize(
    ("vary", "words"),
    [
        ("target.keep_macs=0.5,0.0001", ["tiny-target.keep_macs=0.0001-distill", "between"]),
        (
            "model.name=held_net:make,nowhere:net",
            ["tiny-model.name=nowhere:net-distill", "nowhere"],
        ),
        ("data.name=digits,folder", ["tiny-data.name=folder-distill", "directory"]),
        (
            "distill.teacher=good.safetensors,nowhere.safetensors",
            ["teacher=nowhere.safetensors-distill", "No such"],
        ),
    ],
)
def test_what_the_last_variant_lacks_is_said_before_the_first_one_runs(monkeypatch, capsys, here, vary, words):
    save_weights(
        here / "good.safetensors", build_model("held_net:make", num_classes=10, in_channels=1).state_dict(), "a test"
    )
    settings = ["--set=distill.weight=0.5", f"--vary={vary}", "--seeds=0,1", "--out=out"]
    code, out, err = sweep(monkeypatch, capsys, "tiny.toml", *settings)
    assert (code, out) == (2, "checking  variants: 2\n")
    assert all(word in err for word in [*words, "weight=0.5 cannot be run"]), err
    assert not (here / "out").exists()


def test_data_is_loaded_once_for_all_variants_that_share_it(monkeypatch, here):
    loads = []
    load = paam.runs.setup.load_data
    monkeypatch.setattr(paam.runs.setup, "load_data", lambda *a, **o: loads.append(o["holdout"]) or load(*a, **o))
    variants = {
        f"{rate} {share}": {"warmup.lr": rate, "data.holdout": share} for rate in (0.1, 0.2) for share in (0, 0.5)
    }
    check_variants({name: load_recipe("tiny.toml", changes) for name, changes in variants.items()})
    assert loads == [0, 0.5]


def test_a_seed_or_a_folder_of_a_later_run_is_refused_first(monkeypatch, capsys, here):
    code, out, err = sweep(monkeypatch, capsys, "tiny.toml", "--seeds=0,3000000000", "--out=out")
    assert (code, out) == (2, "")
    assert "3000000000" in err
    (here / "out" / "tiny-seed1").mkdir(parents=True)
    (here / "out" / "tiny-seed1" / "notes.txt").touch()
    code, out, err = sweep(monkeypatch, capsys, "tiny.toml", "--seeds=0,1", "--out=out")
    assert (code, out) == (2, "")
    assert "tiny-seed1 is not empty" in err
    assert not (here / "out" / "tiny-seed0").exists()


# ---------------------------------------------------------------- the table


def end(accuracy: float, params: int, macs: int) -> End:
    time = Milliseconds(1.0, 1.0, 1.0)
    return End(1, {}, Outcome(0.0, 1000, 2000, time), Outcome(accuracy, params, macs, time))


def shown(results: dict) -> list[list[str]]:
    text = io.StringIO()
    Console(file=text, width=200).print(sweep_table(results))
    return [re.split(r"\s{2,}", line.strip()) for line in text.getvalue().splitlines()]


def test_mean_and_spread_by_hand():
    """90, 92 and 97: mean 93, deviations -3, -1, 4, squares 26, over two of them 13, its root 3.61."""
    rows = shown(
        {
            "three": [end(90, 400, 1000), end(92, 500, 900), end(97, 600, 800)],
            "one": [end(88.888, 250, 1999)],
            "none [yet]": [],
        }
    )
    assert rows[0] == ["run", "runs", "accuracy", "spread", "params", "MACs"]
    assert rows[1] == ["three", "3", "93.00 %", "± 3.61", "-50.0 %", "-55.0 %"]
    assert rows[2] == ["one", "1", "88.89 %", "-75.0 %", "0.0 %"]
    assert rows[3] == ["none [yet]", "0"]


# ---------------------------------------------------------------- real runs


def test_a_failing_run_is_named_and_does_not_stop_the_others_and_finished_ones_are_not_run_again(
    monkeypatch, capsys, here
):
    arguments = ["tiny.toml", "--vary=warmup.lr=0.1,1e6", "--seeds=0,1", "--jobs=2", "--out=out"]
    # What other failures leave: the second seed of the good variant finds a damaged record.
    broken = here / "out" / "tiny-warmup.lr=0.1-seed1"
    broken.mkdir(parents=True)
    (broken / "record.jsonl").write_text("{}\n{}\n", "utf-8")
    code, out, err = sweep(monkeypatch, capsys, *arguments)
    assert code == 1
    good, bad = "tiny-warmup.lr=0.1-seed0", ["tiny-warmup.lr=1e6-seed0", broken.name, "tiny-warmup.lr=1e6-seed1"]
    assert "3 of 4 runs failed" in err
    (line,) = [line for line in out.splitlines() if line.startswith("failed") and broken.name in line]
    assert "; paam: " in line
    assert all(name in err for name in bad)
    assert good not in err
    for name in bad:
        log = (here / "out" / f"{name}.log").read_text("utf-8")
        assert "paam: " in log
        assert "Traceback" not in log
    events = read_record(here / "out" / good / "record.jsonl")
    accuracy = of_kind(events, "end")[0]["pruned"]["accuracy"]
    rows = {line.split()[0]: line for line in out.splitlines() if line.startswith("tiny-")}
    assert f"{accuracy:.2f} %" in rows["tiny-warmup.lr=0.1"]
    assert rows["tiny-warmup.lr=1e6"].split()[1:] == ["0"]
    # The same run by itself has the same weights.
    run(load_recipe("tiny.toml", {"warmup.lr": 0.1}), here / "alone", device="cpu")
    assert_same_weights(here / "alone", here / "out" / good)
    # Again, without the broken one: nothing of the finished run changes.
    before = {path: path.stat().st_mtime_ns for path in (here / "out" / good).iterdir() if path.name != "lock"}
    code, out, err = sweep(monkeypatch, capsys, "tiny.toml", "--vary=warmup.lr=0.1", "--out=out")
    assert (code, err) == (0, "")
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_run_that_fails_now_does_not_count_by_what_it_was_before(monkeypatch, capsys, here):
    assert sweep(monkeypatch, capsys, "tiny.toml", "--out=out")[0] == 0
    text = (here / "tiny.toml").read_text("utf-8")
    (here / "tiny.toml").write_text(f"{text}\n[finetune]\nlr = 0.7\n", "utf-8")
    code, out, err = sweep(monkeypatch, capsys, "tiny.toml", "--out=out")
    assert code == 1
    assert "1 of 1 runs failed" in err
    assert "can no longer change" in out
    (row,) = [line for line in out.splitlines() if line.startswith("tiny ")]
    assert row.split() == ["tiny", "0"]


def test_a_target_on_the_command_line_is_that_of_all_runs(monkeypatch, capsys, here):
    assert sweep(monkeypatch, capsys, "tiny.toml", "--seeds=0,1", "--keep-params=0.4", "--out=out")[0] == 0
    for seed in (0, 1):
        end = read_record(here / "out" / f"tiny-target.keep_params=0.4-seed{seed}" / "record.jsonl")[-1]
        assert end["pruned"]["params"] <= 0.4 * end["dense"]["params"]


def test_an_interrupt_reaches_the_runs_they_save_and_the_sweep_goes_on(here):
    command = [*SWEEP, "--seeds=0,1"]
    log, hold, reached = here / "out" / "tiny-seed0.log", here / "hold", here / "reached"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        hold.touch()
        reached.unlink(missing_ok=True)
        log.unlink(missing_ok=True)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            wait_for(reached.exists, process)
            process.send_signal(number)
            wait_for(lambda: "stopping after this step" in log.read_text("utf-8"), process)
            hold.unlink()
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
        assert process.returncode == 128 + number
        assert "rerun the same command to resume the runs" in err
        assert "Traceback" not in out + err
        assert "the state is saved" in log.read_text("utf-8")
        assert not (here / "out" / "tiny-seed1").exists()
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    accuracies = []
    for seed in (0, 1):
        run(load_recipe("tiny.toml"), here / f"alone{seed}", seed=seed, device="cpu")
        assert_same_weights(here / f"alone{seed}", here / "out" / f"tiny-seed{seed}")
        accuracies.append(of_kind(read_record(here / f"alone{seed}" / "record.jsonl"), "end")[0]["pruned"]["accuracy"])
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("tiny ")]
    assert row.split()[1:3] == ["2", f"{mean(accuracies):.2f}"]


def test_a_second_interrupt_leaves_at_once_and_the_runs_still_save(here):
    """Both before the sweep has looked again: the runs are told all the same."""
    command = SWEEP
    (here / "hold").touch()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for((here / "reached").exists, process)
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline().startswith("started")
        assert process.stdout.readline().startswith("stopping")
        process.send_signal(signal.SIGINT)
        err = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Stopped without waiting; the runs still save their state." in err
    (here / "hold").unlink()
    log, deadline = here / "out" / "tiny-seed0.log", time.monotonic() + 60
    while "the state is saved" not in log.read_text("utf-8"):
        assert time.monotonic() < deadline, log.read_text("utf-8")


# ---------------------------------------------------------------- NVIDIA's MPS


def test_the_daemon_is_stopped_also_when_a_sweep_is_interrupted(here, monkeypatch):
    """A stand-in for the control program writes down how it was called."""
    tool = here / "bin" / "nvidia-cuda-mps-control"
    tool.parent.mkdir()
    calls = here / "calls"
    tool.write_text(f'#!/bin/sh\nif [ "$1" ]; then echo "begin $CUDA_MPS_PIPE_DIRECTORY"; else cat; fi >> {calls}\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    with shared_gpu(False) as shared:
        assert not shared
        assert not calls.exists()
    folder = ""

    def interrupted() -> None:
        nonlocal folder
        with shared_gpu(True) as shared:
            assert shared
            folder = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert calls.read_text() == f"begin {folder}\nquit\n"
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert not Path(folder).exists()
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/somebody/elses")
    with shared_gpu(True) as shared:
        assert shared
    assert calls.read_text().count("begin") == 1
