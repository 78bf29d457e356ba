"""Reads the pickles of the official CIFAR-10 archive without executing anything.

A pickle is a program. This interpreter supports only the opcodes that a dict of plain values, flat lists and
numeric arrays needs; `pickletools.genops` parses the bytes and executes nothing. Everything else is refused.
Python's Unpickler with an allow-list of classes would be shorter, but a few bytes can make it exhaust memory
(a memo index of two billion), and the objects that it builds have no size limit.

The cost of a hostile file is bounded too: its size, the number of opcodes, the length of tuples, and the total
length of re-encoded text. Lists contain plain values only and tuples nest once, so nothing is deep or cyclic
and no later traversal can blow up.
"""

from __future__ import annotations

import io
import pickletools
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from paam.data.pickled_arrays import Array, Dtype, Name, call, named, set_state
from paam.errors import DataError, reason
from paam.files.reading import read_bytes

MAX_FILE_BYTES = 64 * 2**20
# a CIFAR-10 batch takes about 30,000 opcodes, or 90,000 if Python 3 wrote its strings as bytes
MAX_STEPS = 2**18
# the longest legitimate tuple is the state of a dtype, with 9 items
MAX_TUPLE = 16

Key = int | str | bytes
Plain = int | str | bytes | None
Value = Plain | list[Plain] | NDArray[Any]


def safe_load(path: Path) -> dict[Key, Value]:
    """Load a dict from a pickle of protocol 2, 3 or 4.

    Strings of Python 2 become bytes; arrays are read-only. Raises DataError, naming the file, for anything
    but plain values, flat lists of them and numeric arrays.
    """
    try:
        raw = read_bytes(path, MAX_FILE_BYTES)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {reason(error)}.") from error
    stream = io.BytesIO(raw)
    try:
        # genops warns about odd escapes in the names of globals; no legitimate name has any
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return _interpret(raw, stream)
    except (ValueError, Warning) as error:
        raise DataError(
            f"{path} is refused near byte {stream.tell():,}: {error}. paam reads only plain values, lists "
            "and numeric arrays from a pickle; take the file from the official archive."
        ) from error


def _interpret(raw: bytes, stream: io.BytesIO) -> dict[Key, Value]:
    """Interpret the opcodes in raw, which stream reads from its start. Raises ValueError with what is refused."""
    operations = pickletools.genops(stream)
    machine = _Machine(max_encoded=len(raw))
    for _ in range(MAX_STEPS):
        # checked before genops gets there, so that arguments of forbidden opcodes are not even parsed
        name = _opcode_name(raw[stream.tell() : stream.tell() + 1])
        _, argument, _ = next(operations)
        if name == "STOP":
            if stream.tell() != len(raw):
                raise ValueError("it has bytes after its end")
            return machine.result()
        _STEPS[name](machine, argument)
    raise ValueError(f"it has more than {MAX_STEPS:,} opcodes")


def _opcode_name(code: bytes) -> str:
    if not code:
        raise ValueError("it is truncated")
    name = _OPCODE_NAMES.get(code.decode("latin-1"), f"0x{code.hex()}")
    if name != "STOP" and name not in _STEPS:
        raise ValueError(f"the opcode {name} is not allowed")
    return name


def _is_plain(item: object) -> bool:
    return item is None or isinstance(item, int | str | bytes)


def _fits_tuple(item: object) -> bool:
    """Arguments and states consist of these; an inner tuple (a shape) has plain values only."""
    if isinstance(item, tuple):
        return all(map(_is_plain, item))
    return _is_plain(item) or isinstance(item, Dtype | Name)


class _Machine:
    """The stack and the memo of a pickle."""

    def __init__(self, max_encoded: int) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.encodable = max_encoded

    def result(self) -> dict[Key, Value]:
        content = self.pop()
        if self.stack or self.marks or not isinstance(content, dict):
            raise ValueError("it does not contain exactly one dict")
        if any(isinstance(item, Array) and item.value is None for item in content.values()):
            raise ValueError("it has an array without content")
        return {key: item.value if isinstance(item, Array) else item for key, item in content.items()}

    def push(self, item: object) -> None:
        self.stack.append(item)

    def pop(self) -> Any:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise ValueError("it pops from an empty stack")
        return self.stack.pop()

    def pop_last(self, count: int) -> list[Any]:
        return [self.pop() for _ in range(count)][::-1]

    def pop_to_mark(self) -> list[Any]:
        if not self.marks:
            raise ValueError("it pops to a mark that does not exist")
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def put(self, index: int) -> None:
        self.memo[index] = self.pop()
        self.push(self.memo[index])

    def get(self, index: int) -> None:
        if index not in self.memo:
            raise ValueError(f"it gets memo {index}, which was never stored")
        self.push(self.memo[index])

    def push_tuple(self, items: Sequence[object]) -> None:
        if len(items) > MAX_TUPLE or not all(map(_fits_tuple, items)):
            raise ValueError("it has a tuple that no array needs")
        self.push(tuple(items))

    def extend(self, items: list[Any]) -> None:
        target = self.pop()
        if not isinstance(target, list) or not all(map(_is_plain, items)):
            raise ValueError("it has a list with values that are not plain")
        target.extend(items)
        self.push(target)

    def update(self, items: list[Any]) -> None:
        target, keys, values = self.pop(), items[::2], items[1::2]
        if not isinstance(target, dict) or len(keys) != len(values):
            raise ValueError("it sets keys without values, or on something that is not a dict")
        # tuples as keys could take exponential time to hash
        if not all(isinstance(key, int | str | bytes) for key in keys):
            raise ValueError("it has a dict with keys that are not plain")
        if not all(_is_plain(value) or isinstance(value, list | Array) for value in values):
            raise ValueError("it has a dict with values that are not plain, lists or arrays")
        target.update(zip(keys, values, strict=True))
        self.push(target)

    def stack_global(self) -> None:
        module, name = self.pop_last(2)
        self.push(named(f"{module}.{name}"))

    def reduce(self) -> None:
        function, arguments = self.pop_last(2)
        built = call(function, arguments)
        if isinstance(built, bytes):
            # a legitimate file encodes each text once, so the total stays below the file's size
            self.encodable -= len(built)
            if self.encodable < 0:
                raise ValueError("it encodes the same text again and again")
        self.push(built)

    def build(self) -> None:
        target, state = self.pop_last(2)
        set_state(target, state)
        self.push(target)


_OPCODE_NAMES = {info.code: info.name for info in pickletools.opcodes}
# the effect of each allowed opcode on the machine m, with the opcode's argument a
_STEPS: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": lambda m, a: None,
    "FRAME": lambda m, a: None,
    "NONE": lambda m, a: m.push(None),
    "NEWTRUE": lambda m, a: m.push(True),
    "NEWFALSE": lambda m, a: m.push(False),
    **dict.fromkeys(("BININT", "BININT1", "BININT2"), _Machine.push),
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES"), _Machine.push),
    "BINSTRING": lambda m, a: m.push(a.encode("latin-1")),
    "SHORT_BINSTRING": lambda m, a: m.push(a.encode("latin-1")),
    "MARK": lambda m, a: m.marks.append(len(m.stack)),
    "EMPTY_TUPLE": lambda m, a: m.push(()),
    "TUPLE": lambda m, a: m.push_tuple(m.pop_to_mark()),
    "TUPLE1": lambda m, a: m.push_tuple(m.pop_last(1)),
    "TUPLE2": lambda m, a: m.push_tuple(m.pop_last(2)),
    "TUPLE3": lambda m, a: m.push_tuple(m.pop_last(3)),
    "EMPTY_LIST": lambda m, a: m.push([]),
    "APPEND": lambda m, a: m.extend(m.pop_last(1)),
    "APPENDS": lambda m, a: m.extend(m.pop_to_mark()),
    "EMPTY_DICT": lambda m, a: m.push({}),
    "SETITEM": lambda m, a: m.update(m.pop_last(2)),
    "SETITEMS": lambda m, a: m.update(m.pop_to_mark()),
    "GLOBAL": lambda m, a: m.push(named(a.replace(" ", "."))),
    "STACK_GLOBAL": lambda m, a: m.stack_global(),
    "REDUCE": lambda m, a: m.reduce(),
    "BUILD": lambda m, a: m.build(),
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "MEMOIZE": lambda m, a: m.put(len(m.memo)),
    "BINGET": _Machine.get,
    "LONG_BINGET": _Machine.get,
}
