"""What goes wrong with runs that nobody kills: damaged files, full disks, hopeless rates; and going on with others."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import paam
from events import of_kind, start, write_run
from paam.errors import ArtifactError, DivergedError, PaamError
from paam.files.tensors import read_tensors, write_tensors
from paam.runs import checkpoint
from paam.runs.checkpoint import CheckpointWriter, checkpoints, read_newest_checkpoint, snapshot, write_checkpoint
from paam.runs.directory import find_changes, may_change, started_events
from paam.runs.lock import RunLock
from paam.runs.record import read_record
from paam.runs.setup import check_recipe
from ran import run
from short_runs import EPOCHS, Killed, assert_same_weights, everything, killer, short, story


def killed(out: Path, epoch: int, **changes) -> None:
    with pytest.raises(Killed):
        run(short(**changes), out, device="cpu", resume=out.exists(), watch=killer("epoch", epoch))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    run(short(), out, device="cpu")
    return out


# ---------------------------------------------------------------- written behind training


def test_a_snapshot_is_a_copy_of_every_value_type_and_shape():
    tensors = {
        "a": torch.randn(3, 4),
        "turned": torch.randn(5, 2).t(),
        "image": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "count": torch.tensor(7),
        "half": torch.randn(3).bfloat16(),
        "mask": torch.tensor([True, False]),
        "empty": torch.empty(0, 3),
        "alone": torch.randn(2).double(),
    }
    truth = {name: value.clone() for name, value in tensors.items()}
    copies = snapshot(tensors)
    assert copies.keys() == tensors.keys()
    for value in tensors.values():
        value.zero_()
    for name, value in truth.items():
        assert copies[name].dtype == value.dtype
        assert copies[name].shape == value.shape
        assert torch.equal(copies[name], value), name


def test_our_files_are_what_the_safetensors_library_reads_and_writes(tmp_path):
    """Two programs, one format: theirs reads ours, with every type, and our content in their file is ours."""
    torch.manual_seed(0)
    types = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8)
    tensors = {f"{kind}": (torch.randn(3, 5) * 50).to(kind) for kind in types}
    tensors |= {"bool": torch.tensor([True, False, True]), "empty": torch.empty(4, 0), "scalar": torch.tensor(2.5)}
    tensors |= {"complex": torch.randn(3, dtype=torch.complex64)}
    write_tensors(tmp_path / "ours", "test", tensors, {"note": "ä"})
    theirs = load_file(tmp_path / "ours")
    assert theirs.keys() == tensors.keys()
    for name, value in tensors.items():
        assert theirs[name].dtype == value.dtype
        assert torch.equal(theirs[name], value)
    content = (tmp_path / "ours").read_bytes()
    index = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    save_file(tensors, tmp_path / "theirs", index["__metadata__"])
    state, header = read_tensors(tmp_path / "theirs", "test")
    assert header["note"] == "ä"
    assert all(torch.equal(state[name], value) for name, value in tensors.items())


def test_a_type_that_the_format_lacks_is_refused(tmp_path):
    with pytest.raises(ArtifactError, match=r"'odd' \(torch.complex128\)"):
        write_tensors(tmp_path / "file", "test", {"odd": torch.zeros(2, dtype=torch.complex128)}, {})
    assert not list(tmp_path.iterdir())


def test_what_is_written_is_what_was_there_when_it_was_asked_for(tmp_path):
    value, may_write = torch.zeros(1000), threading.Event()
    with CheckpointWriter(tmp_path, before=may_write.wait) as saver:
        for epoch in (1, 2, 3):
            value.fill_(epoch)
            saver.save((epoch, 0), {"value": value}, {})
            value.fill_(-1)  # training goes on before anything is written
            may_write.set()
            saver.wait()
            may_write.clear()
            (state, header), _ = read_newest_checkpoint(tmp_path)
            assert header["epoch"] == epoch
            assert torch.equal(state["value"], torch.full((1000,), float(epoch)))
    assert len(list(tmp_path.iterdir())) == 2


def test_a_write_begins_later_or_as_soon_as_it_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "DELAY", 1e6)
    begun = threading.Event()
    saver = CheckpointWriter(tmp_path, before=begun.set)
    saver.save((1, 0), {"a": torch.ones(3)}, {})
    assert not begun.wait(0.3)
    waiting = threading.Thread(target=saver.wait, daemon=True)
    waiting.start()
    waiting.join(timeout=60)
    assert not waiting.is_alive()
    assert len(checkpoints(tmp_path)) == 1


def test_writes_that_follow_each_other_closely_are_not_put_off(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "DELAY", 1e6)
    monkeypatch.setattr(checkpoint.time, "monotonic", iter([0.0, 0.1]).__next__)
    begun = threading.Event()
    saver = CheckpointWriter(tmp_path, before=begun.set)
    saver.save((1, 0), {"a": torch.ones(3)}, {})
    saver.finish()
    begun.clear()
    saver.save((2, 0), {"a": torch.ones(3)}, {})  # a tenth of a second later: put off by a fortieth
    assert begun.wait(60)
    saver.finish()


def test_a_checkpoint_reaches_the_disk_behind_the_record_and_its_name_behind_its_content(tmp_path, monkeypatch):
    """What a power cut may leave: no checkpoint is ahead of the record, none has a name before it is whole."""
    out, calls = tmp_path / "run", []
    flush, rename = os.fsync, Path.replace

    def flushed(descriptor):
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        unfinished = re.fullmatch(r"\.(.*)\.[0-9a-f]{16}\.tmp", path.name)
        calls.append(("flushed", path if unfinished is None else path.with_name(unfinished[1])))
        flush(descriptor)

    def renamed(path, target):
        calls.append(("renamed", Path(target)))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(Path, "replace", renamed)
    run(short(), out, device="cpu")
    folder = out / "checkpoints"
    calls = [call for call in calls if folder in (call[1], call[1].parent) or call[1] == out / "record.jsonl"]
    places = [place for place, (what, path) in enumerate(calls) if what == "renamed" and path.parent == folder]
    (lists,) = [place for place in places if calls[place][1].name.startswith("data-")]
    assert lists == min(places)  # what every checkpoint refers to
    places.remove(lists)
    assert places
    for place in places:
        target = calls[place][1]
        assert calls[place - 2 : place + 2] == [
            ("flushed", out / "record.jsonl"),
            ("flushed", target),
            ("renamed", target),
            ("flushed", folder),
        ]


def full_disk(*arguments: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_write_that_fails_surfaces_and_leaves_the_older_ones(tmp_path, monkeypatch):
    with CheckpointWriter(tmp_path) as saver:
        for epoch in (1, 2):
            saver.save((epoch, 0), {"a": torch.ones(3)}, {})
        saver.finish()
        before = everything(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full_disk)
            saver.save((3, 0), {"a": torch.ones(3)}, {})
            saver.wait()
        for call in (saver.check, saver.finish, lambda: saver.save((4, 0), {}, {})):
            with pytest.raises(ArtifactError, match=r"epoch-000003.*No space left.*--resume"):
                call()
    assert everything(tmp_path) == before


def test_a_disk_that_fills_up_stops_the_run_within_an_epoch_and_it_goes_on_to_the_same_bits(tmp_path, monkeypatch):
    recipe = short(schedule__warmup=20, train__checkpoint_every=5, schedule__control=False)
    run(recipe, tmp_path / "whole", device="cpu")
    out, seen = tmp_path / "run", []

    def fills_up(event: dict) -> None:
        seen.append(event)
        if event.get("epoch") == 9:
            monkeypatch.setattr(os, "fsync", full_disk)
        for thread in threading.enumerate():
            if thread.name == "checkpoint":
                thread.join()

    with pytest.raises(ArtifactError, match=r"epoch-000010.*No space left.*--resume|record.*No space left.*--resume"):
        run(recipe, out, device="cpu", watch=fills_up)
    assert 10 <= len(of_kind(seen, "epoch")) <= 11  # and not 15, where the next checkpoint is due
    monkeypatch.undo()
    assert [path.name for path in checkpoints(out / "checkpoints")] == ["epoch-000005-step-000000.safetensors"]
    run(recipe, out, device="cpu", resume=True)
    assert_same_weights(out, tmp_path / "whole")


@pytest.fixture
def unwritable():
    """Make a folder in which nobody can write; root, for whom there is none, becomes somebody else for the while."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)

        def seal() -> None:
            for path in (Path(folder), *Path(folder).rglob("*")):
                path.chmod(0o555 if path.is_dir() else 0o444)
            if root:
                os.seteuid(65534)

        root = os.geteuid() == 0
        yield Path(folder), seal
        if root:
            os.seteuid(0)
        for path in (Path(folder), *Path(folder).rglob("*")):
            path.chmod(0o755)


def test_a_directory_that_cannot_be_written_is_refused(unwritable):
    folder, seal = unwritable
    killed(folder / "run", 3)
    before = everything(folder)
    seal()
    for name, options in (("run", {"resume": True}), ("run", {"overwrite": True}), ("new", {}), ("a/b", {})):
        with pytest.raises(ArtifactError, match=f"{name} cannot be written: Permission denied"):
            run(short(), folder / name, device="cpu", **options)
    assert everything(folder) == before


def test_a_finished_run_is_shown_also_where_nothing_can_be_written(unwritable, whole):
    folder, seal = unwritable
    shutil.copytree(whole, folder / "run")
    events = read_record(whole / "record.jsonl")
    seal()
    assert run(short(), folder / "run", device="cpu", resume=True) == events


# ---------------------------------------------------------------- damaged


def test_a_newest_checkpoint_damaged_at_any_byte_is_skipped_and_the_user_told(tmp_path, whole):
    """One byte in some hundred places of a real checkpoint, header and tensors alike."""
    out = tmp_path / "run"
    killed(out, 8)
    newer, older = checkpoints(out / "checkpoints")
    content = newer.read_bytes()
    for place in range(0, len(content), len(content) // 97):
        for wrong in (content[place] ^ 1, content[place] ^ 0x80):
            newer.write_bytes(content[:place] + bytes([wrong]) + content[place + 1 :])
            (_, header), problems = read_newest_checkpoint(out / "checkpoints")
            assert (header["epoch"], len(problems)) == (7, 1), place
            assert str(newer) in problems[0]
            newer.with_name(f"{newer.name}.unreadable").unlink()
    newer.write_bytes(content[: len(content) // 2])
    kept, seen = older.read_bytes(), []
    with pytest.raises(Killed):  # before anything new is saved
        run(short(), out, device="cpu", resume=True, watch=lambda e: (seen.append(e), killer("epoch", 7)(e)))
    assert older.read_bytes() == kept
    (resumed,) = of_kind(seen, "resumed")
    assert resumed["epoch"] == 7
    assert str(newer) in resumed["skipped"][0]
    events = run(short(), out, device="cpu", resume=True)
    assert_same_weights(out, whole)
    assert story(events) == story(read_record(whole / "record.jsonl"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("other weights", r"Unexpected key.*layer"),
        ("other optimiser", r"has shape none there and .* in this network"),
        ("other shape", r"size mismatch for"),
        ("no weights", "gated"),
        ("no block", "gated/gated:0"),
        ("no layout", "layouts"),
    ],
)
def test_a_whole_checkpoint_of_another_network_is_refused_and_nothing_is_touched(tmp_path, change, message):
    out = tmp_path / "run"
    killed(out, 7)
    (tensors, header), _ = read_newest_checkpoint(out / "checkpoints")
    layouts = header["layouts"]
    weights, optimizer = layouts["gated/gated"], layouts["optimizer/weight/exp_avg"]
    if change == "other weights":
        weights["layer"] = weights.pop(next(iter(weights)))
    elif change == "other optimiser":
        optimizer["layer"] = optimizer.pop(next(iter(optimizer)))
    elif change == "other shape":
        name, (block, start, shape, axes) = next(iter(weights.items()))
        weights[name] = [block, start, [shape[0] - 1, *shape[1:]], axes]
    elif change == "no weights":
        header["layouts"] = {part: layout for part, layout in layouts.items() if not part.startswith("gated/")}
    elif change == "no block":
        del tensors["gated/gated:0"]
    else:
        del header["layouts"]
    told = {key: value for key, value in header.items() if key not in ("kind", "version", "epoch", "step")}
    write_checkpoint(out / "checkpoints", (8, 0), tensors, told)
    before = everything(out)
    with pytest.raises(ArtifactError, match=rf"(?s)does not fit this run \(.*{message}.*--overwrite"):
        run(short(), out, device="cpu", resume=True)
    assert everything(out) == before


UNFINISHED = f".recipe.toml.{'0' * 16}.tmp"
"""What a process leaves that is killed while it writes the recipe."""


@pytest.mark.parametrize("left", [[], ["recipe.toml"], ["recipe.toml", "record.jsonl"]])
def test_a_run_killed_before_its_first_checkpoint_begins_anew(tmp_path, whole, left):
    out = tmp_path / "run"
    out.mkdir()
    for name in ("lock", UNFINISHED, *left):
        (out / name).write_bytes((whole / name).read_bytes()[:100] if name in left else b"")
    run(short(), out, device="cpu", resume=True)
    assert_same_weights(out, whole)
    assert not (out / UNFINISHED).exists()


@pytest.mark.parametrize("kept", range(6))
def test_a_run_killed_while_it_made_room_for_itself_is_the_old_one_or_begins_anew(tmp_path, whole, monkeypatch, kept):
    """The record says first that it is being replaced: with or without what is gone, the run begins anew."""
    out, unlink, left = shutil.copytree(whole, tmp_path / "run"), Path.unlink, [kept]

    def killed_on_the_way(path, *arguments, **options):
        if path.is_file() and path.name != "lock":
            if not left[0]:
                raise Killed
            left[0] -= 1
        unlink(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed_on_the_way)
        with pytest.raises(Killed):
            run(short(), out, device="cpu", overwrite=True)
    (out / "notes.txt").write_text("mine")
    how = {"resume": True} if kept % 2 else {"overwrite": True}
    assert run(short(), out, device="cpu", **how)[-1]["event"] == "end"
    assert_same_weights(out, whole)
    assert (out / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("epoch", [None, 10**15, -1, "3", 0.5])
def test_a_damaged_epoch_without_any_checkpoint_is_begun_anew(tmp_path, whole, epoch):
    out = tmp_path / "run"
    out.mkdir()
    events = [json.loads(line) for line in (whole / "record.jsonl").read_text().splitlines()]
    (out / "record.jsonl").write_text("".join(json.dumps(e) + "\n" for e in [events[0], {**events[1], "epoch": epoch}]))
    run(short(), out, device="cpu", resume=True)
    assert_same_weights(out, whole)


def test_one_run_at_a_time_in_a_directory_also_within_a_process(tmp_path):
    seen = []

    def second(event: dict) -> None:
        if event["event"] == "epoch" and not seen:
            for options in ({"resume": True}, {"overwrite": True}):
                with pytest.raises(ArtifactError, match=f"is locked by process {os.getpid()}"):
                    run(short(), tmp_path / "run", device="cpu", **options)
                seen.append(options)

    run(short(), tmp_path / "run", device="cpu", watch=second)
    assert len(seen) == 2
    with RunLock(tmp_path / "run") as lock:
        lock.take()  # free again
        lock.take()


def test_a_run_that_came_and_went_while_this_one_loaded_is_not_overwritten(tmp_path, monkeypatch):
    """Two commands at the same time, both allowed to begin; the other one is through when this one has its data."""
    load, out = paam.runs.setup.load_data, tmp_path / "run"

    def slowly(*arguments, **options):
        monkeypatch.undo()
        run(short(), out, device="cpu")
        return load(*arguments, **options)

    monkeypatch.setattr(paam.runs.setup, "load_data", slowly)
    with pytest.raises(ArtifactError, match="not empty"):
        run(short(), out, device="cpu")
    assert of_kind(read_record(out / "record.jsonl"), "end")


# ---------------------------------------------------------------- hopeless training, and what may change


def test_a_rate_that_explodes_is_stopped_and_a_lower_one_goes_on_from_the_last_good_state(tmp_path):
    out = tmp_path / "run"
    wild = {"finetune__lr": 1e5, "finetune__momentum": 0.99}
    with pytest.raises(DivergedError, match=r"finetune\.lr.*last good state.*--resume"):
        run(short(**wild), out, device="cpu")
    path = checkpoints(out / "checkpoints")[0]
    assert all(value.isfinite().all() for value in load_file(path).values())
    seen = []
    tame = short(finetune__lr=0.01, finetune__momentum=0.5)
    events = run(tame, out, device="cpu", resume=True, watch=seen.append)
    assert of_kind(events, "end")
    (changed,) = of_kind(events, "changed")
    assert changed["changes"] == {"finetune.lr": [1e5, 0.01], "finetune.momentum": [0.99, 0.5]}
    assert changed in seen
    assert changed["epoch"] == of_kind(seen, "resumed")[0]["epoch"]
    assert events[0]["recipe"]["finetune"]["lr"] == 1e5  # how it began
    assert paam.config.recipe.load_recipe(str(out / "recipe.toml")) == check_recipe(tame)
    rates = [e["lr"] for e in of_kind(events, "epoch") if e["epoch"] >= changed["epoch"]]
    assert rates
    assert all(0 < rate <= 0.01 for rate in rates)
    assert len(of_kind(events, "epoch")) == EPOCHS


def test_a_change_is_found_against_what_was_followed_last_and_recorded_once(tmp_path):
    out = tmp_path / "run"
    killed(out, 3)
    killed(out, 6, weight__lr=1e-4)
    killed(out, 8, weight__lr=1e-4)
    events = run(short(weight__lr=1e-4, prune__penalty=1e-3), out, device="cpu", resume=True)
    assert [(e["epoch"], e["changes"]) for e in of_kind(events, "changed")] == [
        (3, {"weight.lr": [1e-3, 1e-4]}),
        (8, {"prune.penalty": [5e-4, 1e-3]}),
    ]


def test_a_change_that_was_never_saved_is_forgotten(tmp_path, whole):
    out = tmp_path / "run"
    killed(out, 3)
    with pytest.raises(Killed):
        run(short(weight__lr=1e-4), out, device="cpu", resume=True, watch=killer("changed"))
    events = run(short(), out, device="cpu", resume=True)
    assert not of_kind(events, "changed")
    assert_same_weights(out, whole)


def test_what_may_change_is_how_it_trains_and_not_what_it_is():
    keys = [
        f"{s}.{k}" for s, v in paam.config.recipe.dataclasses.asdict(short()).items() if isinstance(v, dict) for k in v
    ]
    changing = {key for key in keys if may_change(key)}
    phases = ("warmup", "score", "weight", "finetune")
    names = ("lr", "momentum", "nesterov", "weight_decay", "decay", "ramp", "reset", "average")
    expected = {f"{phase}.{name}" for phase in phases for name in names} | {"prune.penalty", "data.batch_size"}
    assert {key for key in changing if not key.startswith("train.")} == expected
    assert {key for key in keys if key.startswith("train.")} <= changing


@pytest.mark.parametrize("recipe", [None, 3, [], {"data": 3}, {"finetune": {"lr": []}}])
def test_a_start_that_names_no_recipe_is_refused(tmp_path, recipe):
    run_of = write_run(tmp_path / "run", [start(seed=0, recipe=recipe)])
    with pytest.raises(PaamError):
        find_changes(run_of, started_events(run_of), short(), 0)


def test_scores_that_all_fall_to_nothing_are_a_reason_to_stop(tmp_path):
    settings = {"prune__penalty": 1e4, "score__lr": 5.0, "prune__method": "free", "prune__activation": "sigmoid"}
    with pytest.raises(DivergedError, match=r"score is below.*score phase.*prune\.penalty or score\.lr.*--resume"):
        run(short(**settings), tmp_path / "run", device="cpu")
    settings |= {"prune__penalty": 1e-4, "score__lr": 0.01}
    assert of_kind(run(short(**settings), tmp_path / "run", device="cpu", resume=True), "end")


def test_a_run_whose_methods_phases_are_others_now_is_not_resumed(tmp_path, monkeypatch):
    """Else an epoch would stand at another place than where the run left off."""
    with pytest.raises(Killed):
        run(short(), tmp_path / "run", device="cpu", watch=killer("epoch", 5))
    whole = paam.runs.job.phases_of
    monkeypatch.setattr("paam.runs.job.phases_of", lambda recipe: (*whole(recipe)[:1], *whole(recipe)[2:]))
    with pytest.raises(ArtifactError, match="phases of the method 'paam' have changed since the run in .* was started"):
        run(short(), tmp_path / "run", device="cpu", resume=True)
