"""Minimise a failing network while it keeps failing in the same way."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from generator.check import Outcome, check
from generator.generating import randomise, runs
from generator.program import Program, names_in


def shrunk(program: Program, outcome: Outcome) -> tuple[Program, Outcome]:
    """Remove steps one by one, as long as the verdict and the kind of reason stay the same."""
    smaller = True
    while smaller:
        smaller = False
        for candidate in _candidates(program):
            found = _same(candidate, outcome)
            if found is not None:
                program, outcome, smaller = candidate, found, True
                break
    return program, outcome


def _candidates(program: Program) -> Iterator[Program]:
    if len(program.answer) > 1:
        for place in range(len(program.answer)):
            answer = program.answer[:place] + program.answer[place + 1 :]
            yield dataclasses.replace(program, answer=answer, form=", ".join(["{}"] * len(answer)))
    for place in reversed(range(len(program.steps))):
        step = program.steps[place]
        before = {one.name: one.shape for one in program.inputs if one.shape}
        for earlier in program.steps[:place]:
            before |= {name: program.shapes[name] for name in earlier.outputs if name in program.shapes}
        read_later = [name for name in step.outputs if _is_read(program, name, place)]
        if not read_later:
            yield program.without(place, {})
            continue
        for source, shape in reversed(before.items()):
            if all(program.shapes.get(name) == shape for name in read_later):
                yield program.without(place, dict.fromkeys(read_later, source))


def _is_read(program: Program, name: str, place: int) -> bool:
    later = [line for step in program.steps[place + 1 :] for line in step.lines]
    return name in program.answer or any(name in names_in(line) for line in later)


def _same(program: Program, outcome: Outcome) -> Outcome | None:
    try:
        network = program.build()
    except Exception:  # without a step, the rest may not even be valid Python
        return None
    randomise(network, outcome.seed)
    if not runs(program, network):
        return None
    found = check(program, network, outcome.seed)
    same = found.verdict == outcome.verdict and kind(found.reason) == kind(outcome.reason)
    return found if same else None


def kind(reason: str) -> str:
    """A reason without the network's names, numbers and source lines."""
    reason = re.sub(r"`[^`]*`", "`...`", reason)
    reason = re.sub(r"'[^']*'", "'...'", reason)
    reason = re.sub(r"<generated \w+>:\d+", "<...>", reason)
    reason = re.sub(r"\[[\d, ]*\]|\([\d, ]*\)", "[...]", reason)
    reason = re.sub(r"\d+e[+-]\d+", "#", reason)
    return re.sub(r"\d+", "#", reason)
