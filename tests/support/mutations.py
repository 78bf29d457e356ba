"""Ways to corrupt a file: flip, cut, duplicate and splice bytes; replace words of text and values of JSON."""

from __future__ import annotations

import re
from random import Random
from typing import Any

NUMBERS = ["0", "-1", "1e308", "1e999", "nan", "inf", "-0.0", "9" * 30, "0x7fffffff", "1_0", "9223372036854775808"]
WORDS = ['""', "true", "[]", "{}", "[[[[]]]]", "null", '"' + "a" * 5000 + '"', "'x'", "1979-05-27", '"\\ud800"']
VALUES: list[Any] = [None, True, 0, -1, 1.5, 1e308, 2**70, "", "x" * 999, [], {}, [[]], {"a": {}}, [0] * 99, "\ud800"]


def damaged(content: bytes, rng: Random, other: bytes = b"") -> bytes:
    """Apply up to eight random corruptions; ``other`` is a source of bytes to splice in."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        place = rng.randrange(len(data) + 1)
        length = rng.choice((1, 1, 2, 4, 16, 256))
        kind = rng.randrange(7)
        if kind == 0 and place < len(data):
            data[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[place : place + length] = rng.randbytes(length)
        elif kind == 2:
            del data[place : place + length]
        elif kind == 3:
            data[place:place] = data[place : place + length] * rng.choice((1, 2, 50))
        elif kind == 4:
            del data[place:]
        elif kind == 5 and other:
            start = rng.randrange(len(other))
            data[place:place] = other[start : start + length]
        else:
            data[place : place + length] = rng.choice((b"\x00", b"\xff", b"\x7f")) * length
    return bytes(data)


def reworded(text: str, rng: Random) -> str:
    """Replace a few numbers or words of a text."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        tokens = list(re.finditer(r'"[^"\n]*"|[A-Za-z_][\w.]*|-?\d[\d.e+-]*', text))
        if tokens:
            token = rng.choice(tokens)
            new = rng.choice((*NUMBERS, *WORDS, rng.choice(tokens)[0]))
            text = text[: token.start()] + new + text[token.end() :]
    return text


def revalued(tree: Any, rng: Random) -> Any:
    """Plain data with one value somewhere in it replaced, removed or duplicated."""
    places: list[tuple[Any, Any]] = []

    def collect(node: Any) -> None:
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], dict | list):
                collect(node[key])

    collect(tree)
    for _ in range(rng.choice((1, 1, 2, 4))):
        node, key = rng.choice(places)
        if (isinstance(node, list) and key >= len(node)) or (isinstance(node, dict) and key not in node):
            continue
        kind = rng.randrange(4)
        if kind == 0:
            del node[key]
        elif kind == 1 and isinstance(node, dict):
            node[rng.choice(("", "x", key * 2, "event", "version"))] = node[key]
        else:
            node[key] = rng.choice(VALUES)
    return tree
