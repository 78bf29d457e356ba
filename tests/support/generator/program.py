"""A random network as Python source: its steps, and the class that contains them."""

from __future__ import annotations

import dataclasses
import linecache
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

HEADER = """\
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from generator import answers, attention, blocks, habits, linears, own

"""
IMAGES, STEPS = "images", "steps"
"""Kinds of inputs: [N, C, ...], and one number for each sample, [N]."""


@dataclass(frozen=True)
class Input:
    """``shape``: without the batch."""

    name: str
    kind: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """The code that one word of the vocabulary wrote: ``layers`` in __init__, ``lines`` in forward().

    ``outputs``: the values that later steps may read; empty if it modifies a value in place.
    """

    word: str
    layers: tuple[str, ...]
    lines: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """A network. ``shapes``: of every value, without the batch. ``answer``: what forward() returns."""

    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    answer: tuple[str, ...]
    form: str
    """Format of the return value, with {} for each output."""
    shapes: dict[str, tuple[int, ...]]

    @property
    def words(self) -> frozenset[str]:
        return frozenset(step.word for step in self.steps)

    def source(self) -> str:
        layers = [line for step in self.steps for line in step.layers]
        lines = [line for step in self.steps for line in step.lines]
        names = ", ".join(one.name for one in self.inputs)
        return "\n".join(
            [
                HEADER,
                "class Net(nn.Module):",
                "    def __init__(self):",
                "        super().__init__()",
                *(f"        {line}" for line in layers),
                "",
                f"    def forward(self, {names}):",
                *(f"        {line}" for line in lines),
                f"        return {self.form.format(*self.answer)}",
                "",
            ]
        )

    def build(self) -> nn.Module:
        """The network with its initial weights. Tracebacks show its source lines."""
        source = self.source()
        name = f"<generated {zlib.crc32(source.encode()):08x}>"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        space: dict[str, Any] = {"__name__": "generated"}
        exec(compile(source, name, "exec"), space)
        network: nn.Module = space["Net"]()
        return network.double().eval()

    def examples(self, batch: int, seed: int, sizes: Sequence[int] = ()) -> tuple[Tensor, ...]:
        """Random inputs. ``sizes``: of their images, if other than the program's."""
        generator = torch.Generator().manual_seed(seed)
        made = []
        for one in self.inputs:
            if one.kind == STEPS:
                made.append(torch.randint(0, 50, (batch,), generator=generator).double())
            else:
                shape = (one.shape[0], *sizes) if sizes else one.shape
                made.append(torch.randn(batch, *shape, generator=generator, dtype=torch.float64))
        return tuple(made)

    def without(self, place: int, by: dict[str, str]) -> Program:
        """The same without one step, whose outputs are replaced by other values."""
        before, after = self.steps[:place], self.steps[place + 1 :]
        changed = [
            dataclasses.replace(step, lines=tuple(substituted(line, by) for line in step.lines)) for step in after
        ]
        answer = tuple(by.get(name, name) for name in self.answer)
        return dataclasses.replace(self, steps=(*before, *changed), answer=answer)


def substituted(text: str, by: dict[str, str]) -> str:
    return re.sub(r"\b(?<!self\.)\w+\b", lambda match: by.get(match[0], match[0]), text)


def names_in(text: str) -> set[str]:
    """Names of values in a line; names of layers begin with self."""
    return set(re.findall(r"(?<![\w.])[a-z]+\d+\b", text))
