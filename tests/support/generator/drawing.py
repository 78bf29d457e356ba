"""How a network is generated: word by word from the vocabulary, each immediately tried on real values.

A word is a function of a :class:`Draw` and a value. It writes one step and returns the expression of its result. A step
that fails on the current value is discarded: words need not know all preconditions.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from generator import answers, attention, blocks, habits, linears, own
from generator.program import IMAGES, STEPS, Input, Program, Step

BATCH = 3
"""Number of samples for trying steps. Other batch sizes are tried when the network is complete."""
MOST_VALUES = 2000
"""Maximum size of one value per sample."""

MAP, LAST, TOKENS, VECTOR = "map", "last", "tokens", "vector"
"""Kinds of values: [N, C, ...], [N, ..., C], [N, L, C], [N, C]."""


class Unsuitable(Exception):  # noqa: N818  not an error: another word is drawn
    """The word does not apply to the value."""


@dataclass(frozen=True)
class Value:
    name: str
    shape: tuple[int, ...]
    kind: str

    @property
    def width(self) -> int:
        return self.shape[1 if self.kind in (MAP, VECTOR) else -1]

    @property
    def places(self) -> tuple[int, ...]:
        """Sizes of all axes except batch and channels."""
        return self.shape[2:] if self.kind == MAP else self.shape[1:-1]


@dataclass(frozen=True)
class Word:
    name: str
    function: Callable[[Draw, Value], Any]
    kinds: tuple[str, ...]
    to: str
    weight: float
    dims: tuple[int, ...]
    by_size: bool
    """Whether it may be limited to one batch size: the network then refuses others."""


VOCABULARY: dict[str, Word] = {}
UNSUITED: Counter[str] = Counter()
"""Word and error -> how often it was drawn for a value on which it fails."""


def word(
    kinds: str, weight: float = 1.0, *, to: str = "", dims: tuple[int, ...] = (1, 2, 3), by_size: bool = False
) -> Callable[..., Any]:
    """Add a function to the vocabulary. ``to``: the kind of its result; ``dims``: of the maps that it applies to."""

    def enter(function: Callable[[Draw, Value], Any]) -> Callable[[Draw, Value], Any]:
        name = function.__name__
        assert name not in VOCABULARY, name
        VOCABULARY[name] = Word(name, function, tuple(kinds.split()), to, weight, dims, by_size)
        return function

    return enter


class Draw:
    """A network under construction. ``dims``: spatial dimensions of its maps."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.dims = rng.choices((1, 2, 3), (2, 10, 1))[0]
        self.values: list[Value] = []
        self.kept: list[Step] = []  # of the program so far
        self.called: list[tuple[str, Value]] = []  # layers, with the value of their first call
        self.inputs: list[Input] = []
        self._layers: list[str] = []
        self._lines: list[str] = []
        self._newly_called: list[tuple[str, Value]] = []
        self._number = 0
        self.network = nn.Module().eval()
        self.space: dict[str, Any] = {"self": self.network, "torch": torch, "F": F, "nn": nn, "math": math}
        self.space |= {"own": own, "blocks": blocks, "attention": attention, "linears": linears, "habits": habits}
        self.space |= {"checkpoint": checkpoint, "parametrizations": parametrizations, "answers": answers}

    # ------------------------------------------------------------------ what words write

    def name(self, letter: str = "t") -> str:
        self._number += 1
        return f"{letter}{self._number}"

    def layer(self, expression: str, letter: str = "layer") -> str:
        name = f"self.{self.name(letter)}"
        self._layers.append(f"{name} = {expression}")
        return name

    def parameter(self, *shape: int) -> str:
        return self.layer(f"nn.Parameter(torch.ones({', '.join(map(str, shape))}))", "p")

    def buffer(self, *shape: int) -> str:
        name = self.name("b")
        self._layers.append(f'self.register_buffer("{name}", torch.ones({", ".join(map(str, shape))}))')
        return f"self.{name}"

    def stored(self, *shape: int) -> str:
        """A parameter or a buffer."""
        return self.parameter(*shape) if self.chance(0.7) else self.buffer(*shape)

    def form(self, v: Value, *forms: str, **names: Any) -> str:
        """One of several expressions, filled in.

        {x} is the value, {c} its number of channels, {n} the dimensions of maps, {a} their axes, {places} their sizes,
        {ones} and {nones} as many of ", 1" and ", None". $nn.ReLU()$ creates a layer for it, $4, 1$ a parameter of that
        shape, $b 4, 1$ a buffer.
        """
        known = {"x": v.name, "c": v.width, "n": self.dims, "a": self.axes, "places": ", ".join(map(str, v.places))}
        known |= {"ones": ", 1" * self.dims, "nones": ", None" * self.dims, **names}
        return re.sub(r"\$([^$]+)\$", self._made, self.rng.choice(forms).format(**known))

    def _made(self, match: re.Match[str]) -> str:
        text = match[1]
        if text.startswith("b "):
            return self.buffer(*map(int, text[2:].split(",")))
        return self.parameter(*map(int, text.split(","))) if text[0].isdigit() else self.layer(text)

    def call(self, layer: str, v: Value) -> str:
        """Call a layer, which later steps may call again."""
        self._newly_called.append((layer, v))
        return f"{layer}({v.name})"

    def line(self, text: str) -> None:
        self._lines.append(text)

    # ------------------------------------------------------------------ what words draw

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def one_of(self, *options: Any) -> Any:
        return self.rng.choice(options)

    def some(self, pieces: dict[str, float]) -> str:
        """Options of a call, each with its own probability."""
        return "".join(f", {piece}" for piece, share in pieces.items() if self.chance(share))

    def width(self, v: Value) -> int:
        """Often the value's own, for sums, or the size of another axis, so that sizes do not identify axes."""
        draw = self.rng.random()
        if draw < 0.4:
            return v.width
        if draw < 0.6 and v.places:
            return self.rng.choice(v.places)
        return self.rng.randint(2, 8)

    def part(self, number: int) -> int:
        """A divisor greater than one, if there is one."""
        divisors = [k for k in range(2, number + 1) if number % k == 0]
        if not divisors:
            raise Unsuitable
        return self.rng.choice(divisors)

    def like(self, v: Value) -> str:
        """Another value of the same shape."""
        others = [u for u in self.values if u.shape == v.shape and u.kind == v.kind and u is not v]
        if not others:
            raise Unsuitable
        return self.rng.choice(others).name

    def another(self, v: Value, *kinds: str) -> Value:
        others = [u for u in self.values if u.kind in (kinds or (v.kind,)) and u is not v]
        if not others:
            raise Unsuitable
        return self.rng.choice(others)

    @property
    def axes(self) -> tuple[int, ...]:
        """The spatial axes of a map."""
        return tuple(range(2, 2 + self.dims))

    # ------------------------------------------------------------------ steps

    def take_input(self, kind: str, *shape: int) -> Value | None:
        name = "x" if not self.inputs else f"y{len(self.inputs)}" if kind == IMAGES else "t"
        self.inputs.append(Input(name, kind, shape))
        self.space[name] = torch.randn(BATCH, *shape, dtype=torch.float64)
        if kind == STEPS:
            return None
        value = Value(name, (BATCH, *shape), MAP)
        self.values.append(value)
        return value

    def step(self, entry: Word, v: Value) -> bool:
        """Try a word on a value; returns whether it became a step."""
        known = set(self.space)
        try:
            made = entry.function(self, v)
            expression, count = made if isinstance(made, tuple) else (made, 1)
            outputs = tuple(self.name("v") for _ in range(count)) if expression else ()
            if outputs:
                self.line(f"{', '.join(outputs)} = {expression}")
            self._run()
            values = [self._value(name, entry.to or v.kind) for name in outputs]
        except Unsuitable:
            self._forget()
            return False
        except (NameError, SyntaxError):
            raise
        except Exception as error:
            UNSUITED[f"{entry.name}: {type(error).__name__}: {str(error)[:100]}"] += 1
            for name in set(self.space) - known:
                del self.space[name]
            self._forget()
            return False
        self.values += values
        self.keep(entry.name, *outputs)
        return True

    def keep(self, name: str, *outputs: str) -> None:
        """Turn everything written since the last step into one step, with the layers that it calls."""
        text = "\n".join(self._lines)
        called = [line for line in self._layers if re.search(rf"self\.{_name_of(line)}\b", text)]
        self.kept.append(Step(name, tuple(called), tuple(self._lines), outputs))
        self.called += self._newly_called
        self._forget()

    def _forget(self) -> None:
        self._layers, self._lines, self._newly_called = [], [], []

    def _run(self) -> None:
        with torch.no_grad():
            exec("\n".join(self._layers), self.space)
            self.network.double().eval()
            exec("\n".join(self._lines), self.space)

    def _value(self, name: str, kind: str) -> Value:
        value = self.space[name]
        if not isinstance(value, Tensor):
            raise Unsuitable
        dims = {MAP: 2 + self.dims, LAST: 2 + self.dims, TOKENS: 3, VECTOR: 2}[kind]
        shape = tuple(value.shape)
        fits = len(shape) == dims and shape[0] == BATCH and 0 < value.numel() <= MOST_VALUES * BATCH
        if not fits or not value.isfinite().all():
            raise Unsuitable
        return Value(name, shape, kind)

    def program(self, answer: tuple[str, ...], form: str) -> Program:
        shapes = {v.name: v.shape[1:] for v in self.values}
        return Program(tuple(self.inputs), tuple(self.kept), answer, form, shapes)


def _name_of(line: str) -> str:
    """The attribute that a line of __init__ sets."""
    found = re.match(r'self\.(?:register_buffer\(")?(\w+)', line)
    assert found is not None, line
    return found[1]
