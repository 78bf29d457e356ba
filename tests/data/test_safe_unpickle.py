"""The restricted reader against the real pickle module: equal on honest files, deaf to hostile ones."""

from __future__ import annotations

import os
import pickle
import struct
import sys
import time
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paam.data.safe_unpickle import MAX_FILE_BYTES, safe_load
from paam.errors import DataError

PIXELS = np.arange(24, dtype=np.uint8).reshape(4, 6) * 10
SAMPLE = {b"batch_label": b"training batch", b"labels": [6, 9, 300, 70000, -1], b"data": PIXELS}


class Touch:
    """Creates a file when the real unpickler meets it."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch '{self.marker}'",)


def load(tmp_path: Path, raw: bytes):
    path = tmp_path / "batch"
    path.write_bytes(raw)
    return safe_load(path)


def assert_same(ours, truth) -> None:
    assert list(ours) == list(truth)
    for key, value in truth.items():
        if isinstance(value, np.ndarray):
            assert ours[key].dtype == value.dtype
            np.testing.assert_array_equal(ours[key], value)
        else:
            assert type(ours[key]) is type(value)
            assert ours[key] == value


def python2_batch() -> bytes:
    """Spelled out opcode by opcode as Python 2's cPickle wrote the official files."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    dtype = b"cnumpy\ndtype\nq\x0a" + text(b"u1") + b"K\x00K\x01\x87Rq\x0b"
    dtype += b"(K\x03" + text(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\nq\x06cnumpy\nndarray\nq\x07K\x00\x85" + text(b"b") + b"\x87Rq\x08"
    content = b"T" + struct.pack("<i", PIXELS.size) + PIXELS.tobytes()
    array += b"(K\x01K\x04K\x06\x86q\x09" + dtype + b"\x89" + content + b"tb"
    labels = b"]q\x04(K\x06K\x09M\x2c\x01J\x70\x11\x01\x00J\xff\xff\xff\xffe"
    body = text(b"batch_label") + b"q\x02" + text(b"training batch") + b"q\x03"
    return b"\x80\x02}q\x01(" + body + text(b"labels") + labels + text(b"data") + b"q\x05" + array + b"u."


def test_python2_spelling_reads_as_the_real_module_reads_it(tmp_path):
    raw = python2_batch()
    assert_same(pickle.loads(raw, encoding="bytes"), SAMPLE)
    assert_same(load(tmp_path, raw), SAMPLE)


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_python3_files_read_back_equal(tmp_path, protocol):
    assert_same(load(tmp_path, pickle.dumps(SAMPLE, protocol)), SAMPLE)


plain = st.none() | st.booleans() | st.integers(-(2**31), 2**31 - 1) | st.text() | st.binary(min_size=1)
codes = st.sampled_from(["u1", "i1", "<u2", ">i2", "<i4", ">i4", "<i8", ">f4", "<f8"])
shapes = st.lists(st.integers(1, 4), max_size=3)
arrays = st.builds(
    lambda code, shape, order: np.asarray(
        np.arange(np.prod(shape, dtype=int)).astype(code).reshape(shape), order=order
    ),
    codes,
    shapes,
    st.sampled_from("CF"),
)
dicts = st.dictionaries(
    st.text() | st.binary(min_size=1) | st.integers(0, 9), plain | st.lists(plain) | arrays, max_size=6
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=dicts, protocol=st.sampled_from([2, 3, 4]))
def test_any_flat_dict_reads_back_equal(tmp_path, content, protocol):
    assert_same(load(tmp_path, pickle.dumps(content, protocol)), content)


def test_arrays_share_one_memory_and_cannot_be_written(tmp_path):
    ours = load(tmp_path, pickle.dumps({"a": PIXELS, "b": PIXELS}, 4))
    assert ours["a"] is ours["b"]
    assert not ours["a"].flags.writeable


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_a_reduce_payload_is_not_executed(tmp_path, protocol):
    marker = tmp_path / "executed"
    raw = pickle.dumps({b"data": Touch(marker)}, protocol)
    with pytest.raises(DataError, match=r"batch is refused.*not allowed"):
        load(tmp_path, raw)
    assert not marker.exists()
    pickle.loads(raw)
    assert marker.exists()  # the payload was live


HOSTILE = {
    "os.system": (b"\x80\x02cos\nsystem\nU\x02ls\x85R.", r"'os\.system' is not allowed"),
    "eval": (b"\x80\x02c__builtin__\neval\nU\x011\x85R.", r"'__builtin__\.eval' is not allowed"),
    "stack global": (b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93.", r"'builtins\.eval' is not allowed"),
    "import": (b"\x80\x02cthis\ns\n.", r"'this\.s' is not allowed"),
    "near miss": (b"\x80\x02cnumpy.core.multiarray\nscalar\n.", r"multiarray\.scalar' is not allowed"),
    "dotted": (b"\x80\x04\x8c\x05numpy\x8c\x0ddtype.__new__\x93.", r"dtype\.__new__' is not allowed"),
    "no text global": (b"\x80\x04K\x01K\x02\x93.", "not allowed"),
    "inst": (b"(U\x02lsios\nsystem\n.", "INST is not allowed"),
    "obj": (b"(cnumpy\ndtype\no.", "OBJ is not allowed"),
    "newobj": (b"\x80\x02cnumpy\ndtype\n)\x81.", "NEWOBJ is not allowed"),
    "extension": (b"\x80\x02\x82\x01.", "EXT1 is not allowed"),
    "persistent id": (b"Pfile\n.", "PERSID is not allowed"),
    "bad escape in a global": (b"\x80\x02cnum\\qpy\ndtype\n.", "invalid escape"),
    "bad escape": (b"S'\\q'\n.", "STRING is not allowed"),
    "big int": (pickle.dumps({"a": 2**40}, 2), "LONG1 is not allowed"),
    "float": (pickle.dumps({"a": 0.5}, 2), "BINFLOAT is not allowed"),
    "set": (pickle.dumps({"a": {1}}, 4), "EMPTY_SET is not allowed"),
    "unknown byte": (b"\x80\x02\xff.", "0xff is not allowed"),
    "ordered dict": (pickle.dumps(OrderedDict(a=1), 2), r"collections\.OrderedDict' is not allowed"),
    "numpy scalar": (pickle.dumps({"a": np.float32(1)}, 4), r"multiarray\.scalar' is not allowed"),
    "protocol 5 array": (pickle.dumps({"a": PIXELS}, 5), r"_frombuffer' is not allowed"),
    "object array": (pickle.dumps({"a": np.array([None])}, 4), "calls a function that does not build"),
    "record array": (pickle.dumps({"a": np.zeros(1, "i4,f4")}, 4), "calls a function that does not build"),
    "bytes array": (pickle.dumps({"a": np.zeros(2, "S3")}, 4), "calls a function that does not build"),
    "direct ndarray": (b"\x80\x02cnumpy\nndarray\nK\x09\x85\x85R.", "calls a function that does not build"),
    "called list": (b"\x80\x02]]R.", "calls a function that does not build"),
    "other codec": (
        b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00utf-7\x86R.",
        "calls a function that does not build",
    ),
    "not latin-1": (
        b"\x80\x02c_codecs\nencode\nX\x02\x00\x00\x00\xce\xb1X\x06\x00\x00\x00latin1\x86R.",
        "latin-1",
    ),
    "state of a list": (b"\x80\x02](K\x01tb.", "sets the state"),
    "no dict": (b"\x80\x02K\x01.", "exactly one dict"),
    "two values": (b"\x80\x02}}.", "exactly one dict"),
    "open mark": (b"\x80\x02(}.", "exactly one dict"),
    "trailing": (b"\x80\x02}.N", "has bytes after its end"),
    "empty": (b"", "truncated"),
    "empty stack": (b"\x80\x02a.", "empty stack"),
    "no mark": (b"\x80\x02]e.", "pops to a mark that does not exist"),
    "below a mark": (b"\x80\x02]K\x01(a.", "empty stack"),
    "unknown memo": (b"\x80\x02h\x07.", "never stored"),
    "key without value": (b"\x80\x02}(K\x01u.", "keys without values"),
    "keys of a list": (b"\x80\x02]K\x01K\x02s.", "not a dict"),
    "items of a dict": (b"\x80\x02}K\x01a.", "list with values that are not plain"),
    "list in a list": (pickle.dumps({"a": [[1]]}, 2), "list with values that are not plain"),
    "dict in a dict": (pickle.dumps({"a": {"b": 1}}, 2), "dict with values that are not plain"),
    "tuple in a dict": (pickle.dumps({"a": (1,)}, 2), "dict with values that are not plain"),
    "tuple as a key": (pickle.dumps({(1,): 1}, 2), "keys that are not plain"),
    "list that holds itself": (b"\x80\x02]q\x00h\x00a.", "list with values that are not plain"),
    "dict that holds itself": (b"\x80\x02}q\x00K\x01h\x00s.", "dict with values that are not plain"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_or_foreign_pickles_are_refused(tmp_path, case):
    raw, message = HOSTILE[case]
    with pytest.raises(DataError, match=message) as caught:
        load(tmp_path, raw)
    assert str(tmp_path / "batch") in str(caught.value)
    assert "this" not in sys.modules  # looking a name up would have imported it


@pytest.mark.parametrize(
    "shape",
    [
        b"K\x05K\x05\x86",
        b"K\x04K\x05\x86",
        b"J\xff\xff\xff\xffJ\xe8\xff\xff\xff\x86",
        b"N\x85",
        b"(" + b"K\x01" * 17 + b"t",
    ],
)
def test_an_array_must_have_the_bytes_of_its_shape(tmp_path, shape):
    raw = python2_batch()
    assert raw.count(b"K\x04K\x06\x86") == 1
    with pytest.raises(DataError, match=r"array|tuple"):
        load(tmp_path, raw.replace(b"K\x04K\x06\x86", shape))


def test_an_array_without_content_is_refused(tmp_path):
    raw = python2_batch()
    start = raw.index(b"(K\x01K\x04K\x06")
    with pytest.raises(DataError, match="without content"):
        load(tmp_path, raw[:start] + b"u.")


@pytest.mark.parametrize("raw", [python2_batch(), pickle.dumps(SAMPLE, 2), pickle.dumps(SAMPLE, 4)])
def test_every_truncation_is_refused(tmp_path, raw):
    for end in range(len(raw)):
        with pytest.raises(DataError, match="refused"):
            load(tmp_path, raw[:end])


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_bytes_give_a_dict_or_a_data_error_and_nothing_else(tmp_path, data):
    raw = bytearray(data.draw(st.sampled_from([python2_batch(), pickle.dumps(SAMPLE, 2), pickle.dumps(SAMPLE, 4)])))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        ours = load(tmp_path, bytes(raw))
    except DataError:
        return
    assert isinstance(ours, dict)


def wrapped(codes: bytes) -> bytes:
    return b"\x80\x02" + codes + b"."


MIB = 2**20
BOMBS = {
    "deep lists": wrapped(b"]" * 100_000 + b"a" * 99_999),
    "deep tuples": wrapped(b"}K\x01" + b"\x85" * 100_000 + b"s"),
    # 2**60 leaves: hashing or comparing it once would never end
    "doubling tuples": wrapped(b"})" + b"q\x00h\x00\x86" * 60 + b"K\x01s"),
    "doubling lists": wrapped(b"]" + b"q\x00]h\x00ah\x00a" * 60),
    "long tuple, again and again": wrapped(b"(" + b"N" * 50_000 + b"tq\x00" + b"h\x00\x85" * 50_000),
    "many steps": wrapped(b"}" + b"N" * (2 * MIB)),
    "many memos": wrapped(b"}" + b"".join(b"r" + struct.pack("<I", 2**32 - 1 - i) for i in range(300_000))),
    # 1 MiB of text encoded 20,000 times would be 20 GiB
    "encode, again and again": wrapped(
        b"](c_codecs\nencode\nq\x00X"
        + struct.pack("<I", MIB)
        + b"a" * MIB
        + b"q\x01X\x06\x00\x00\x00latin1q\x02\x86R"
        + b"h\x00h\x01h\x02\x86R" * 20_000
        + b"e"
    ),
    "length beyond the file": wrapped(b"T\xff\xff\xff\x7f"),
    "negative length": wrapped(b"T\xff\xff\xff\xff"),
}


@pytest.mark.parametrize("case", BOMBS)
def test_bombs_are_refused_quickly(tmp_path, case):
    start = time.perf_counter()
    with pytest.raises(DataError, match="refused"):
        load(tmp_path, BOMBS[case])
    assert time.perf_counter() - start < 5


def test_a_file_over_the_limit_is_not_read(tmp_path):
    path = tmp_path / "batch"
    with path.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)  # sparse
    with pytest.raises(DataError, match=r"67,108,865 bytes, and 67,108,864 is the limit"):
        safe_load(path)


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir()])
def test_no_file_is_a_data_error(tmp_path, make):
    make(tmp_path / "batch")
    with pytest.raises(DataError, match=r"cannot be read: (No such file|it is a folder)"):
        safe_load(tmp_path / "batch")
