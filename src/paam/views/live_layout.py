"""One screen of the live view: state and size -> lines of text, none wider than the screen."""

from __future__ import annotations

import math

from rich.text import Text

from paam.events import Selected, Start
from paam.views.format import (
    MONITORS,
    bar_cells,
    clean,
    control_line,
    countdown,
    curve_blocks,
    filters,
    phase_name,
    score_blocks,
    title,
)
from paam.views.state import RunState

MARGIN = 1
LABEL = 12
"""Columns of the labels on the left."""
NARROWEST, WIDEST_BAR, COUNTS = 38, 64, 11
"""Minimum columns of a layer in a multi-column layout, maximum columns of its bar, and columns of "   16/64   "."""


def frame(state: RunState, width: int, height: int, *, hint: str, warning: str = "", news: list[str]) -> list[Text]:
    """At most ``height`` lines of at most ``width`` columns.

    ``hint`` is the last line, replaced by ``warning`` if there is one; ``news``: recent output of the program and its
    libraries.
    """
    inner = max(width - 2 * MARGIN, 1)
    if state.start is None:
        lines = [Text("preparing" if not warning else "", "dim")]
    else:
        lines = [*_header(state, state.start, inner), *_progress(state, inner), Text(), *_figures(state, inner), Text()]
        lines += [*_curves(state, inner), Text()]
    bottom = [Text(clean(line), "dim") for line in news]
    bottom.append(Text(warning, "yellow") if warning else Text(hint, "dim"))
    room = height - len(lines) - len(bottom)
    if state.selection is not None and room >= 3:
        lines += _layers(state.selection, inner, room)
    lines = lines[: max(height - len(bottom), 0)]
    lines += [Text()] * (height - len(bottom) - len(lines))
    return [_fitted(line, width) for line in [*lines, *bottom][-height:]]


def _fitted(line: Text, width: int) -> Text:
    line = Text.assemble(" " * min(MARGIN, width), line)
    line.no_wrap, line.overflow = True, "ellipsis"
    line.truncate(width, overflow="ellipsis")
    return line


def _apart(left: Text, right: Text, width: int) -> Text:
    """Left- and right-aligned text on one line; the left one is truncated if needed."""
    room = width - right.cell_len - 2
    if room < min(left.cell_len, 16):
        return left
    left.truncate(room, overflow="ellipsis")
    return Text.assemble(left, " " * (width - left.cell_len - right.cell_len), right)


def _header(state: RunState, start: Start, width: int) -> list[Text]:
    right = f"{clean(start.method)}   seed {start.seed}"
    if width >= 100:
        right += f"   {clean(start.hardware)}"
    where = Text("")
    if state.end is not None:
        where.append("finished", "bold green")
    elif state.failed is not None:
        where.append("failed", "bold red")
    elif state.done >= state.epochs:
        where.append("measuring the result", "bold cyan")
    elif (place := state.place) is not None:
        where.append(phase_name(place.phase), "bold cyan")
        if place.phase.cycle:
            where.append(f"   cycle {place.phase.cycle} of {state.cycles}")
        where.append(f"   epoch {place.index + 1} of {place.phase.epochs}")
    if state.control is not None:
        where.append(f"   {control_line(state.control)}")
    return [_apart(Text(title(start), "bold"), Text(right, "dim"), width), Text("─" * width, "dim"), where]


def _progress(state: RunState, width: int) -> list[Text]:
    now, left = state.current, state.seconds_left()
    finished = state.end is not None or state.done >= state.epochs
    step, steps = (now.step, now.steps) if now else (0, 0)
    done = state.done + (step / steps if steps and not finished else 0)
    rows = [
        ("epoch", step, max(steps, 1), f"step {step} of {steps}" if steps else "", now.seconds_left if now else None),
        ("all epochs", done, max(state.epochs, 1), f"{state.done} of {state.epochs}", left),
    ]
    if finished:
        rows = rows[1:]
    known = state.progress.steps if state.progress else 0  # constant width: bars must not jump from epoch to epoch
    counts = max(len(f"step {known} of {known}"), len(f"{state.epochs} of {state.epochs}"), 15)
    lines = []
    for label, part, whole, count, seconds in rows:
        tail = f"  {count:>{counts}}  " + ("" if finished else f"{countdown(seconds):>8} left")
        room = width - LABEL - len(tail)
        bar = _bar(part / whole, room) if room >= 8 else ""
        lines.append(Text.assemble(_label(label), bar, tail))
    return lines


def _label(name: str) -> tuple[str, str]:
    return f"{name:<{LABEL}}", "dim"


def _bar(share: float, width: int) -> Text:
    """Resolution of half a column; the last half is filled only at 100 %."""
    halves = math.floor(2 * width * min(max(share, 0.0), 1.0))
    full, half = divmod(halves, 2)
    bar = Text().append("━" * full + "╸" * half, "cyan")
    return bar.append("━" * (width - full - half), "bright_black")


def _figures(state: RunState, width: int) -> list[Text]:
    """Labels over values of the last finished epoch of the pruned network; epochs of the dense control are ignored."""
    assert state.start is not None
    last, chosen = state.last, state.selection
    accuracy = None if last is None else last.accuracy
    shares = chosen or last
    cells = [
        ("loss", "-" if last is None else f"{last.loss:.4f}"),
        (f"{MONITORS[state.start.monitor]} accuracy", "-" if accuracy is None else f"{accuracy:.2f} %"),
        ("MACs kept", "-" if shares is None else f"{100 * shares.kept_macs:.1f} %"),
        ("parameters kept", "-" if shares is None else f"{100 * shares.kept_params:.1f} %"),
    ]
    column = min(width // len(cells), 30)
    labels, values = Text(), Text()
    for label, value in cells:
        labels.append(_cell(Text(label, "dim"), column))
        values.append(_cell(Text(value, "bold"), column))
    return [labels, values]


def _cell(text: Text, width: int) -> Text:
    text.truncate(max(width - 1, 1), overflow="ellipsis", pad=True)
    return Text.assemble(text, " ")


def _curves(state: RunState, width: int) -> list[Text]:
    room = max(min(width - LABEL - 22, 60), 8)
    scores = Text.assemble(_label("scores"))
    if state.scores is None:
        scores.append("not scored yet", "dim")
    else:
        scores.append("0 ", "dim").append(score_blocks(state.scores.scores.values(), room - 4), "magenta")
        scores.append(" 1", "dim").append(f"  cycle {state.scores.cycle}" if state.scores.cycle else "", "dim")
    accuracy = Text.assemble(_label("accuracy"))
    if state.accuracies:
        low, high = min(state.accuracies), max(state.accuracies)
        accuracy.append(curve_blocks(state.accuracies, room), "green")
        accuracy.append(f"  {low:.2f} to {high:.2f} %", "dim")
    else:
        accuracy.append("not measured yet", "dim")
    return [scores, accuracy]


def _layers(selection: Selected, width: int, height: int) -> list[Text]:
    """What each layer kept, in as few columns as the rows allow."""
    kept, total = filters(selection)
    head = Text(f"{kept} of {total} filters kept", "dim")
    if selection.cycle:
        head.append(f"   cycle {selection.cycle}")
    layers = [(clean(name), *pair) for name, pair in selection.kept_filters.items()]
    columns = max(min(math.ceil(len(layers) / (height - 1)), width // NARROWEST), 1)
    rows = min(height - 1, math.ceil(len(layers) / columns))
    shown = layers[: rows * columns]
    if len(shown) < len(layers):
        head.append(f"   (the first {len(shown)} of {len(layers)} layers)")
    cell = width // columns
    longest = max((Text(name).cell_len for name, _, _ in shown), default=0)
    bar = min(max(cell - longest - COUNTS - 2, 8), WIDEST_BAR)
    lines = [Text() for _ in range(rows)]
    for place, layer in enumerate(shown):
        lines[place % rows].append(_layer(*layer, label=min(longest, cell - bar - COUNTS - 2), bar=bar, cell=cell))
    return [head, *lines]


def _layer(name: str, kept: int, width: int, *, label: int, bar: int, cell: int) -> Text:
    shown = Text(name)
    shown.truncate(max(label, 1), overflow="ellipsis", pad=True)
    full = bar_cells(kept, width, bar)
    line = Text.assemble(shown, f"{kept:>5}/{width:<5}", ("█" * full, "green"), ("░" * (bar - full), "bright_black"))
    line.truncate(cell, overflow="ellipsis", pad=True)
    return line
