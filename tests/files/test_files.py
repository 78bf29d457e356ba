"""Everything on disk: plans, records, checkpoints, weights. Whole or refused, and never anything that runs code."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import paam
from events import END, FAILED, start, typed
from events import epoch as epoch_line
from paam.errors import ArtifactError, DamagedError, PaamError
from paam.events import Epoch, of_kind
from paam.files.durable import write_atomically
from paam.files.tensors import read_tensors, write_tensors
from paam.graph.plan import Kept, Plan
from paam.graph.trace import trace
from paam.models import resnet20, resnet32
from paam.runs.checkpoint import read_newest_checkpoint, write_checkpoint
from paam.runs.record import RecordWriter, read_events, read_record

DEEP = "[" * 100_000


def bit_flips(content: bytes):
    """Every copy of the content with one bit turned."""
    for place in range(len(content)):
        for bit in range(8):
            yield content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]


# ---------------------------------------------------------------- plans

PLAN = Plan(
    fingerprint="0123abcd",
    inputs=((1, 3, 32, 32),),
    placement="sum",
    streams="independent",
    groups={"conv1": Kept(16, (0, 3, 15)), "layer1.0": Kept(12, ())},
)


def kept(width: int):
    return st.sets(st.integers(0, width - 1)).map(lambda chosen: Kept(width, tuple(sorted(chosen))))


plans = st.builds(
    Plan,
    fingerprint=st.text(),
    inputs=st.lists(st.lists(st.integers(1, 128), min_size=1, max_size=4).map(tuple), min_size=1, max_size=3).map(
        tuple
    ),
    placement=st.sampled_from(["sum", "branch"]),
    streams=st.sampled_from(["independent", "tied"]),
    groups=st.dictionaries(st.text(), st.integers(1, 40).flatmap(kept), max_size=5),
)


def sound(plan: Plan) -> bool:
    return all(
        type(k.width) is int and k.width >= 1 and list(k.filters) == sorted(set(k.filters) & set(range(k.width)))
        for k in plan.groups.values()
    )


@given(plans)
def test_a_plan_reads_back_equal(plan):
    assert sound(plan)
    assert Plan.from_json(plan.to_json()) == plan


def test_a_plan_is_the_json_that_it_was_documented_as():
    assert json.loads(PLAN.to_json()) == {
        "format": "paam-plan",
        "version": 1,
        "fingerprint": "0123abcd",
        "inputs": [[1, 3, 32, 32]],
        "placement": "sum",
        "streams": "independent",
        "ignore": [],
        "groups": {"conv1": {"width": 16, "keep": [0, 3, 15]}, "layer1.0": {"width": 12, "keep": []}},
        "base": None,
    }
    again = dataclasses.replace(PLAN, ignore=("head",), base=PLAN)
    assert Plan.from_json(again.to_json()) == again
    assert PLAN.kept_filters == 3
    assert PLAN.all_filters == 28
    assert PLAN.groups["conv1"].mask.nonzero()[0].tolist() == [0, 3, 15]


def test_a_plan_cut_short_anywhere_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    content = PLAN.to_json().encode()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(ArtifactError, match="JSON|cannot be read"):
            Plan.read(path)


def test_a_plan_with_one_wrong_character_is_refused_or_sound():
    text = PLAN.to_json()
    outcomes: Counter[str] = Counter()
    for place in range(len(text)):
        for character in map(chr, range(128)):
            damaged = text[:place] + character + text[place + 1 :]
            try:
                plan = Plan.from_json(damaged)
            except ArtifactError:
                outcomes["refused"] += 1
                continue
            assert sound(plan), damaged
            outcomes["read"] += 1
    assert outcomes["refused"] > outcomes["read"] > len(text)  # each position has its own right character


def test_a_plan_file_with_one_wrong_bit_is_refused_or_sound(tmp_path):
    path = tmp_path / "plan.json"
    for damaged in bit_flips(PLAN.to_json().encode()):
        path.write_bytes(damaged)
        try:
            plan = Plan.read(path)
        except ArtifactError:
            continue
        assert sound(plan), damaged


def changed(**entries) -> str:
    return json.dumps({**json.loads(PLAN.to_json()), **entries})


def regrouped(width, keep) -> str:
    return changed(groups={"conv1": {"width": width, "keep": keep}})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "3",
        '"plan"',
        "{}",
        '{"version": 1}',
        DEEP,
        '{"format": ' + DEEP,
        changed(format="other"),
        changed(version=2),
        changed(version="1"),
        changed(version=None),
        changed(fingerprint=None),
        changed(fingerprint=3),
        changed(placement=["sum"]),
        changed(streams={}),
        changed(inputs=[]),
        changed(inputs=[[]]),
        changed(inputs=[[0, 3]]),
        changed(inputs=[[-1, 3]]),
        changed(inputs=[[1.0, 3]]),
        changed(inputs=[[True, 3]]),
        changed(inputs="1, 3"),
        changed(inputs=[[1 << 40]]),
        changed(ignore="head"),
        changed(ignore=[3]),
        changed(base=3),
        changed(base={}),
        changed(base=[]),
        changed(groups=[]),
        changed(groups={"conv1": 3}),
        changed(groups={"conv1": {"width": 4}}),
        changed(groups={"conv1": {"keep": []}}),
        regrouped(4, [0, 4]),
        regrouped(4, [-1, 0]),
        regrouped(4, [1, 0]),
        regrouped(4, [1, 1]),
        regrouped(4, [0.0, 1]),
        regrouped(4, ["0"]),
        regrouped(4, "01"),
        regrouped("4", [0]),
        regrouped(4.0, [0]),
        regrouped(float("nan"), [0]),
        regrouped(float("inf"), [0]),
        regrouped(-4, []),
        regrouped(True, [0]),
    ],
    ids=lambda text: text[-32:] or "empty",
)
def test_what_is_no_plan_is_refused(text):
    with pytest.raises(ArtifactError, match="my plan"):
        Plan.from_json(text, "my plan")


def test_another_version_is_refused_with_both_versions():
    with pytest.raises(ArtifactError, match="version 7.*version 1"):
        Plan.from_json(changed(version=7))


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00", b"\x80\x04K\x01."], ids=["missing", "binary", "pickle"])
def test_a_plan_file_that_cannot_be_read_is_refused_by_name(tmp_path, content):
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"plan\.json"):
        Plan.read(path)


# ---------------------------------------------------------------- whole or not at all


def fail_with(number: int):
    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    return fail


def test_writing_replaces_a_file_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "file"
    for content in (b"old", b"", b"new" * 100_000):
        write_atomically(path, content)
        assert path.read_bytes() == content
        assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("old", [b"old", None])
def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch, step, old):
    path = tmp_path / "file"
    if old is not None:
        path.write_bytes(old)
    if step == "fsync":
        monkeypatch.setattr(os, "fsync", fail_with(errno.ENOSPC))
    else:
        monkeypatch.setattr(Path, "replace", fail_with(errno.EIO))
    with pytest.raises(ArtifactError, match=r"file cannot be written: .+\."):
        write_atomically(path, b"new")
    assert (path.read_bytes() if path.exists() else None) == old
    assert [p.name for p in tmp_path.iterdir()] == (["file"] if old is not None else [])


def test_a_disk_that_takes_only_a_part_leaves_what_was_there(tmp_path):
    resource = pytest.importorskip("resource")
    path = tmp_path / "file"
    path.write_bytes(b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(ArtifactError, match="cannot be written"):
            write_atomically(path, bytes(1 << 21))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("target", ["missing/file", "file/inside", "folder", "x" * 300])
def test_where_nothing_can_be_written_is_an_artifact_error(tmp_path, target):
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ArtifactError, match="cannot be written"):
        write_atomically(tmp_path / target, b"new")
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "file").read_bytes() == b"old"


# ---------------------------------------------------------------- records

EVENTS = [start(), epoch_line(0, loss=2.5), {**FAILED, "reason": "ä\u2028\n"}, epoch_line(1, loss=0.1 + 0.2), END]


@pytest.fixture
def record(tmp_path) -> Path:
    path = tmp_path / "record.jsonl"
    write = RecordWriter(path)
    for event in typed(EVENTS):
        write(event)
    return path


def test_a_record_has_one_json_object_per_line(record):
    assert [json.loads(line) for line in record.read_bytes().decode().removesuffix("\n").split("\n")] == EVENTS
    assert read_record(record) == EVENTS
    assert of_kind(read_events(record), Epoch) == typed([EVENTS[1], EVENTS[3]])


def test_a_last_line_cut_short_is_left_out(record):
    content = record.read_bytes()
    last = content.rstrip(b"\n").rindex(b"\n") + 1
    for length in range(last, len(content) - 2):
        record.write_bytes(content[:length])
        assert read_record(record) == EVENTS[:-1]
    record.write_bytes(content.rstrip(b"\n"))  # all of it but the end of the line
    assert read_record(record) == EVENTS


@pytest.mark.parametrize(
    "damage", ["{", '{"event": "epoch", "lo', "", "12", "[]", '{"epoch": 3}', '{"event": "epoch"}', DEEP, "\x00"]
)
def test_a_damaged_line_in_the_middle_is_refused_by_number(record, damage):
    lines = record.read_text("utf-8").split("\n")
    lines[2] = damage
    record.write_text("\n".join(lines), "utf-8")
    for read in (read_record, read_events):
        with pytest.raises(DamagedError, match=r"record\.jsonl.*line 3"):
            read(record)


def test_a_record_of_another_version_is_refused(record):
    record.write_text(record.read_text("utf-8").replace('"version": 2', '"version": 3'), "utf-8")
    with pytest.raises(ArtifactError, match="version 3; this paam reads 2") as refused:
        read_record(record)
    assert not isinstance(refused.value, DamagedError)


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00\x80"], ids=["missing", "binary"])
def test_a_record_that_cannot_be_read_is_refused_by_name(tmp_path, content):
    path = tmp_path / "record.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"record\.jsonl"):
        read_record(path)


def test_going_on_drops_what_will_be_written_again(record):
    record.write_bytes(record.read_bytes()[:-5])  # as a crash leaves it
    write = RecordWriter(record)
    assert write.cut_back(2) == (typed(EVENTS[:2]), [])
    write(*typed([epoch_line(1, loss=7.0)]))
    assert read_record(record) == [EVENTS[0], EVENTS[1], epoch_line(1, loss=7.0)]
    assert write.count == 3


def test_what_only_a_later_version_knows_stays_where_the_record_is_cut_back(record):
    lines = record.read_text("utf-8").splitlines(keepends=True)
    foreign = [lines[0].replace("{", '{"moon": 1, ', 1), '{"event": "weather", "sun": true}\n']
    record.write_text("".join([*foreign, *lines[1:]]), "utf-8")
    assert read_events(record) == typed(EVENTS)
    assert RecordWriter(record).cut_back(3) == (typed(EVENTS[:2]), [])
    assert record.read_text("utf-8") == "".join([*foreign, lines[1]])


GARBAGE = [
    b'{"event": "epoch"}\n',
    b"{\n",
    b"\x00" * 4096 + b"\n",
    b"\xff\xfe",
    b"[]\n",
    b'{"epoch": 3}\n',
    DEEP.encode() + b"\n",
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
@pytest.mark.parametrize("tail", [b"", json.dumps(EVENTS[3]).encode() + b"\n"], ids=["last", "followed"])
def test_damage_after_the_events_that_are_kept_is_cut_off_and_said(record, garbage, tail):
    lines = record.read_bytes().splitlines(keepends=True)
    record.write_bytes(b"".join(lines[:3]) + garbage + tail)
    with pytest.raises(ArtifactError, match="line 4"):
        RecordWriter(record).cut_back(4)
    kept, (note,) = RecordWriter(record).cut_back(3)
    assert kept == typed(EVENTS[:3])
    assert "line 4" in note
    assert "truncated to its first 3 events" in note
    assert record.read_bytes() == b"".join(lines[:3])


def test_an_event_that_finds_no_room_leaves_no_half_of_itself(record, monkeypatch):
    """What comes next, the reason why the run failed, must not follow half a line."""
    write, written = RecordWriter(record), os.write
    write.cut_back(2)
    before = record.read_bytes()

    def half_then_full(descriptor, content):
        monkeypatch.setattr(os, "write", fail_with(errno.ENOSPC))
        return written(descriptor, content[:7])

    monkeypatch.setattr(os, "write", half_then_full)
    with pytest.raises(ArtifactError, match=r"record\.jsonl cannot be written: No space left"):
        write(*typed([epoch_line(2)]))
    monkeypatch.undo()
    assert record.read_bytes() == before
    assert write.count == 2


def test_a_record_that_is_shorter_than_its_checkpoint_says_is_refused_and_kept(record):
    before = record.read_bytes()
    with pytest.raises(ArtifactError, match="5 events, fewer than the 6"):
        RecordWriter(record).cut_back(6)
    assert record.read_bytes() == before


# ---------------------------------------------------------------- checkpoints


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model/weight": torch.randn(3, 4, generator=generator),
        "turned": torch.randn(5, 2, generator=generator).t(),
        "double": torch.randn(3, dtype=torch.float64, generator=generator),
        "half": torch.randn(3, generator=generator).bfloat16(),
        "count": torch.tensor(seed),
        "mask": torch.tensor([True, False]),
        "empty": torch.empty(0, 3),
    }


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[key].dtype == other[key].dtype and torch.equal(one[key], other[key]) for key in one
    )


def test_the_newest_checkpoint_wins_and_the_last_two_are_kept(tmp_path):
    assert read_newest_checkpoint(tmp_path / "none") == (None, [])
    for place in ((1, 0), (2, 3), (9, 99), (10, 0), (10, 7)):
        write_checkpoint(tmp_path, place, tensors(sum(place)), {"note": "ä", "place": place})
    (state, header), skipped = read_newest_checkpoint(tmp_path)
    assert skipped == []
    assert same(state, tensors(17))
    assert header == {"kind": "checkpoint", "version": 1, "epoch": 10, "step": 7, "note": "ä", "place": [10, 7]}
    stored = [file_header(p)["__metadata__"]["paam"].partition(" ")[2] for p in sorted(tmp_path.iterdir())]
    assert [json.loads(body)["place"] for body in stored] == [[10, 0], [10, 7]]


def test_the_newest_checkpoint_wins_beyond_six_digits(tmp_path):
    for epoch in (999_999, 1_000_000):  # each phase alone may have a million epochs
        write_checkpoint(tmp_path, (epoch, 0), tensors(epoch), {})
    assert newest(tmp_path)[1]["epoch"] == 1_000_000


def newest(folder: Path) -> tuple[dict, dict]:
    return read_newest_checkpoint(folder)[0]


def file_header(path: Path) -> dict:
    """The header of a safetensors file, read by hand: 8 bytes of length, JSON, and then the tensors, nothing else."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    assert 8 + length + max(ends) == len(content)
    return header


def two_checkpoints(folder: Path) -> tuple[Path, Path]:
    for epoch in (4, 5):
        write_checkpoint(folder, (epoch, 0), tensors(epoch), {})
    older, newer = sorted(folder.iterdir())
    return older, newer


def test_a_newest_checkpoint_cut_short_anywhere_falls_back_to_the_older(tmp_path):
    _, newer = two_checkpoints(tmp_path)
    content = newer.read_bytes()
    for length in range(len(content)):
        newer.write_bytes(content[:length])
        (state, header), (problem,) = read_newest_checkpoint(tmp_path)
        assert header["epoch"] == 4
        assert same(state, tensors(4))
        assert str(newer) in problem
        assert not newer.exists()  # put aside, so that it does not count among the last two
        assert newer.with_name(f"{newer.name}.unreadable").read_bytes() == content[:length]


@pytest.mark.parametrize("garbage", [b"", b"\x00" * 100, b"not a checkpoint", b"\x80\x04K\x01.", b"\xff" * 64])
def test_only_damaged_checkpoints_are_an_error_that_names_each_and_the_way_out(tmp_path, garbage):
    for path in two_checkpoints(tmp_path):
        path.write_bytes(garbage)
    with pytest.raises(ArtifactError, match="--overwrite") as refusal:
        read_newest_checkpoint(tmp_path)
    assert all(path.name in str(refusal.value) for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {"format": "other", "version": "1", "header": '{"epoch": 6}'},
        {"format": "paam-checkpoint", "version": "2", "header": '{"epoch": 6}'},
        {"format": "paam-checkpoint", "version": "1"},
        {"format": "paam-checkpoint", "version": "1", "header": '{"epoch": 6'},
        {"format": "paam-checkpoint", "version": "1", "header": "[6]"},
        {"format": "paam-checkpoint", "version": "1", "header": "{}"},
    ],
    ids=["none", "format", "version", "headless", "cut", "list", "empty"],
)
def test_a_foreign_file_in_the_place_of_a_checkpoint_is_skipped(tmp_path, metadata):
    older, newer = two_checkpoints(tmp_path)
    save_file({"a": torch.zeros(3)}, newer, metadata)
    assert newest(tmp_path)[1]["epoch"] == 4
    older.unlink()
    save_file({"a": torch.zeros(3)}, newer, metadata)
    with pytest.raises(ArtifactError):
        read_newest_checkpoint(tmp_path)


def test_a_checkpoint_with_one_wrong_bit_is_refused_or_has_its_epoch(tmp_path):
    write_checkpoint(tmp_path, (3, 0), {"a": torch.ones(2)}, {})
    (path,) = tmp_path.iterdir()
    refused = 0
    for damaged in bit_flips(path.read_bytes()):
        path.write_bytes(damaged)
        try:
            _, header = newest(tmp_path)
        except ArtifactError:
            refused += 1
            continue
        assert type(header["epoch"]) is int, damaged
    assert refused > 500


# ---------------------------------------------------------------- pruned networks


def shaken(model: nn.Module, seed: int = 0) -> nn.Module:
    """Every batch norm away from its defaults, so that a dropped or swapped statistic shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.5, generator=generator)
                module.running_var.uniform_(0.5, 2, generator=generator)
                module.weight.uniform_(0.5, 1.5, generator=generator)
                module.bias.normal_(0, 0.5, generator=generator)
    return model


def pruned(model: nn.Module, *, side: int, keep_macs: float, seed: int = 0) -> nn.Module:
    """A compacted network of a random plan: the scorers are shaken so that scores differ."""
    torch.manual_seed(seed)
    pruner = paam.Pruner(shaken(model, seed), torch.zeros(1, 3, side, side), scorer="free")
    with torch.no_grad():
        for parameter in pruner.scorer_parameters():
            parameter.normal_()
    pruner.select(keep_macs=keep_macs)
    return pruner.compact().eval()


@pytest.fixture(scope="module")
def half_resnet(tmp_path_factory) -> tuple[Path, nn.Module]:
    folder = tmp_path_factory.mktemp("artifacts") / "half"
    small = pruned(resnet20(), side=32, keep_macs=0.5)
    paam.save(small, folder)
    return folder, small


LOAD = """
import sys
import torch
from safetensors.torch import load_file, save_file
import paam
from paam.models import resnet20
torch.set_num_threads(1)
small = paam.load(sys.argv[1], resnet20()).eval()
with torch.no_grad():
    save_file({"outputs": small(load_file(sys.argv[2])["inputs"])}, sys.argv[3])
"""


def test_a_network_loaded_in_another_process_gives_the_same_bits(half_resnet, tmp_path):
    folder, small = half_resnet
    inputs = torch.randn(5, 3, 32, 32)
    save_file({"inputs": inputs}, tmp_path / "inputs")
    command = [sys.executable, "-c", LOAD, str(folder), str(tmp_path / "inputs"), str(tmp_path / "outputs")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ})
    assert done.stderr == ""
    with torch.no_grad():
        expected = small(inputs)
    assert expected.std() > 0
    assert torch.equal(load_file(tmp_path / "outputs")["outputs"], expected)


def test_a_loaded_network_has_every_tensor_and_can_be_saved_again(half_resnet, tmp_path):
    folder, small = half_resnet
    given_model = resnet20()
    before = {name: value.clone() for name, value in given_model.state_dict().items()}
    again = paam.load(folder, given_model)
    assert same(again.state_dict(), small.state_dict())
    assert same(given_model.state_dict(), before)  # a fresh model that was only read
    paam.save(again, tmp_path / "again")
    assert Plan.read(tmp_path / "again" / "plan.json") == Plan.read(folder / "plan.json")
    assert same(load_file(tmp_path / "again" / "model.safetensors"), load_file(folder / "model.safetensors"))


def test_the_same_network_is_saved_as_the_same_bytes(small_files, tmp_path):
    small = paam.load(small_files, tiny())
    for name in ("plan.json", "model.safetensors"):
        written = set()
        for _ in range(20):
            paam.save(small, tmp_path)
            written.add((tmp_path / name).read_bytes())
        assert written == {(small_files / name).read_bytes()}


def test_only_json_and_safetensors_are_written_and_no_pickle_is_read(half_resnet, monkeypatch):
    folder, small = half_resnet
    assert sorted(p.name for p in folder.iterdir()) == ["model.safetensors", "plan.json"]
    json.loads((folder / "plan.json").read_text("utf-8"))
    header = file_header(folder / "model.safetensors")
    assert header.keys() - {"__metadata__"} == small.state_dict().keys()

    def refuse(*args, **kwargs):
        raise AssertionError("something was unpickled")

    for owner, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(owner, name, refuse)
    paam.load(folder, resnet20())


@pytest.mark.parametrize(
    "make",
    [resnet32, lambda: resnet20(num_classes=100), lambda: resnet20(in_channels=1), lambda: tiny()],
    ids=["deeper", "classes", "channels", "tiny"],
)
def test_another_architecture_is_refused(half_resnet, make):
    with pytest.raises(PaamError, match="."):
        paam.load(half_resnet[0], make())


def tiny(stride: int = 1, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    first = (nn.Conv2d(3, 8, 3, stride, 1), nn.BatchNorm2d(8), act())
    second = (nn.Conv2d(8, 8, 3, 1, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
    return nn.Sequential(*first, *second)


@pytest.fixture(scope="module")
def small_files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("artifacts") / "tiny"
    paam.save(pruned(tiny(), side=8, keep_macs=0.5), folder)
    return folder


@pytest.fixture
def copied(small_files, tmp_path) -> Path:
    return Path(shutil.copytree(small_files, tmp_path / "copied"))


def test_artifacts_outlive_how_torch_describes_its_layers(small_files, monkeypatch):
    """Between 2.11 and 2.13 the text of a batch norm has changed."""
    x = torch.randn(2, 3, 8, 8)
    wanted = paam.load(small_files, tiny()).eval()(x)
    monkeypatch.setattr(nn.BatchNorm2d, "extra_repr", lambda self: "in other words")
    monkeypatch.setattr(nn.Conv2d, "__repr__", lambda self: "a layer")
    assert torch.equal(paam.load(small_files, tiny()).eval()(x), wanted)


def test_the_fingerprint_of_a_known_network_stays():
    """Files of an older paam must be readable: whoever changes this breaks every plan that was ever written."""
    assert trace(resnet20(), torch.zeros(1, 3, 32, 32)).fingerprint == "b99aa399a114a8c7"


PAIRS = {
    "slope": (nn.LeakyReLU(0.1), nn.LeakyReLU(0.2)),
    "pool": (nn.MaxPool2d(2), nn.AvgPool2d(2)),
    "stride": (nn.MaxPool2d(3, 1, 1), nn.MaxPool2d(3, 2, 1)),
    "border": (nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")),
    "groups": (nn.GroupNorm(1, 3), nn.GroupNorm(3, 3)),
    "ceil": (nn.MaxPool2d(2), nn.MaxPool2d(2, ceil_mode=True)),
    "inside": (nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU6())),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_layers_without_other_tensors_have_fingerprints_of_their_own(pair):
    one, other, again = (trace(nn.Sequential(layer), torch.zeros(1, 3, 8, 8)).fingerprint for layer in (*pair, pair[0]))
    assert one != other
    assert one == again


@pytest.mark.parametrize("other", [{"stride": 2}, {"act": nn.Tanh}], ids=["stride", "activation"])
def test_an_architecture_that_differs_without_a_tensor_of_its_own_is_refused(small_files, other):
    with pytest.raises(ArtifactError, match="another architecture"):
        paam.load(small_files, tiny(**other))


def test_a_save_over_an_earlier_one_cut_anywhere_is_the_old_network_or_the_new(tmp_path, monkeypatch):
    """Killed before each step of it: before every write, flush and rename."""
    old, new = pruned(tiny(), side=8, keep_macs=0.5), pruned(tiny(), side=8, keep_macs=0.3, seed=1)
    found = []

    def cut_before(number: int) -> bool:
        shutil.rmtree(tmp_path / "saved", ignore_errors=True)
        paam.save(old, tmp_path / "saved")
        left = [number]
        with monkeypatch.context() as patch:
            for owner, name in ((os, "write"), (os, "fsync"), (Path, "replace")):
                patch.setattr(owner, name, stopping(getattr(owner, name), left))
            try:
                paam.save(new, tmp_path / "saved")
            except Cut:
                return True
        return False

    number = 0
    while cut_before(number):
        state = paam.load(tmp_path / "saved", tiny()).state_dict()
        found.append(same(state, new.state_dict()))
        (tmp_path / "saved" / f".plan.json.{'0' * 16}.tmp").touch()  # a kill leaves what an exception does not
        paam.save(new, tmp_path / "saved")
        assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["model.safetensors", "plan.json"]
        assert found[-1] or same(state, old.state_dict())
        number += 1
    assert {False, True} == set(found)
    assert found == sorted(found)  # old ones first, and from one moment on the new one


class Cut(BaseException):
    """Nothing catches it, as nothing catches a kill."""


def stopping(operation, left: list[int]):
    def counted(*arguments, **options):
        if not left[0]:
            raise Cut
        left[0] -= 1
        return operation(*arguments, **options)

    return counted


def test_a_plan_beside_the_weights_is_a_copy_and_theirs_counts(copied, small_files, tmp_path):
    wanted = paam.load(small_files, tiny()).state_dict()
    paam.save(pruned(tiny(), side=8, keep_macs=0.3), tmp_path / "other")
    for change in (lambda path: shutil.copy(tmp_path / "other" / path.name, path), Path.unlink):
        change(copied / "plan.json")
        assert same(paam.load(copied, tiny()).state_dict(), wanted)


def test_weights_of_another_architecture_are_refused(half_resnet):
    with pytest.raises(ArtifactError, match="made for another architecture"):
        paam.load(half_resnet[0], tiny())


def test_weights_cut_short_anywhere_are_refused(copied):
    weights = copied / "model.safetensors"
    content = weights.read_bytes()
    for length in [*range(0, 64, 4), *range(64, len(content), 97), len(content) - 1]:
        weights.write_bytes(content[:length])
        with pytest.raises(ArtifactError, match=r"model\.safetensors"):
            paam.load(copied, tiny())


@pytest.mark.parametrize("change", ["missing", "renamed", "reshaped", "added", "unmarked"])
def test_weights_that_were_tampered_with_are_refused(copied, change):
    weights = copied / "model.safetensors"
    metadata = file_header(weights)["__metadata__"]
    state = load_file(weights)
    name = next(name for name in state if name.endswith("weight"))
    if change == "missing":
        del state[name]
    elif change == "renamed":
        state["elsewhere"] = state.pop(name)
    elif change == "reshaped":
        state[name] = state[name][:-1].contiguous()
    elif change == "added":
        state["more"] = torch.zeros(1)
    save_file(state, weights, None if change == "unmarked" else metadata)
    with pytest.raises(ArtifactError, match=r"model\.safetensors"):
        paam.load(copied, tiny())


def test_weights_without_their_plan_are_refused_with_what_to_do(copied):
    state, _ = read_tensors(copied / "model.safetensors", "weights")
    for header in ({}, {"plan": "0123456789abcdef"}, {"plan": {}}):
        write_tensors(copied / "model.safetensors", "weights", state, header)
        with pytest.raises(ArtifactError, match=r"model\.safetensors has no plan.*save the network again"):
            paam.load(copied, tiny())


def test_missing_weights_are_named(copied):
    (copied / "model.safetensors").unlink()
    with pytest.raises(ArtifactError, match=r"model\.safetensors"):
        paam.load(copied, tiny())


@pytest.mark.parametrize(
    "change",
    [
        {"placement": "nowhere"},
        {"streams": "crossed"},
        {"fingerprint": "0" * 16},
        {"groups": {}},
        {"inputs": [[1, 5, 8, 8]]},
        {"inputs": [[8]]},
        {"inputs": [[1, 3, 1_000_000, 1_000_000]]},
        {"version": 2},
    ],
    ids=lambda change: str(change)[:40],
)
def test_an_edited_plan_is_refused(copied, change):
    state, header = read_tensors(copied / "model.safetensors", "weights")
    plan = json.dumps({**json.loads(header["plan"]), **change})
    write_tensors(copied / "model.safetensors", "weights", state, {"plan": plan})
    with pytest.raises(PaamError):
        paam.load(copied, tiny())


def test_only_pruned_networks_can_be_saved(tmp_path):
    with pytest.raises(ArtifactError, match="compact"):
        paam.save(tiny(), tmp_path / "whole")
    assert not (tmp_path / "whole").exists()


def test_saving_where_a_file_stands_is_refused_and_leaves_it(tmp_path, small_files):
    small = paam.load(small_files, tiny())
    (tmp_path / "file").write_bytes(b"mine")
    for place in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(ArtifactError, match="file"):
            paam.save(small, place)
    assert (tmp_path / "file").read_bytes() == b"mine"
