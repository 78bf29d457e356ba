"""Terminal tables: results of inspect, bench and sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import TYPE_CHECKING

from rich import markup
from rich.console import Group, RenderableType
from rich.table import Table

from paam.events import End
from paam.views.format import change, clean, removed

if TYPE_CHECKING:  # both need torch
    from paam.artifacts.latency import Speed
    from paam.pruning.inspection import Inspection


def escape(text: object) -> str:
    """External text without rich markup and control characters."""
    return markup.escape(clean(text))


UNSTEADY = 1.5
"""Ratio of the quartiles of timings above which a ratio of medians is unreliable."""


def inspection_table(model: str, sizes: Sequence[int], classes: int, found: Inspection) -> RenderableType:
    """Layers in the order of the model, then notes."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("layer", "kind"):
        table.add_column(column, overflow="fold")
    for column in ("filters", "parameters", "MACs"):
        table.add_column(column, justify="right")
    table.add_column("gate")
    for layer in found.layers:
        group = found.groups.get(layer.group or "")
        if layer.note:
            gate = f"[dim]{escape(layer.note)}[/]"
        else:
            stream = group and group["stream"]
            gate = f"[cyan]stream of {escape(stream)}[/]" if stream else "[green]own[/]"
        cost = _short(layer.params), "" if layer.macs is None else _short(layer.macs)
        table.add_row(escape(layer.name), escape(layer.kind), str(layer.filters), *cost, gate)
    filters = sum(group["width"] for group in found.groups.values())
    streams = {group["stream"] for group in found.groups.values()} - {None}
    params, macs = _short(found.params), _short(found.macs)
    lines: list[RenderableType] = [
        f"\n[bold]{escape(model)}[/], input {'x'.join(map(str, sizes))}, {classes:,} classes: {params} parameters,"
        f" {macs} MACs",
        f"{filters} filters can be removed; groups: {len(found.groups)}, residual streams: {len(streams)}",
    ]
    lines += [f"[yellow]{escape(limit)}[/]" for limit in found.limits]
    if found.whole:
        lines.append(f"[dim]channels are made whole again at:[/] {escape(', '.join(found.whole))}")
    if found.ignored:
        lines.append(f"[dim]left alone:[/] {escape(', '.join(found.ignored))}")
    return Group(table, *lines)


def comparison_table(where: str, rows: Sequence[Speed]) -> RenderableType:
    """Dense against pruned, with the speed-up of each mode: the ratio of medians, and its range given the quartiles."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", title=escape(where), pad_edge=False)
    if any(row.latency.high > UNSTEADY * row.latency.low for row in rows):
        table.caption = "These timings vary so much that they say little: measure again when nothing else runs here."
    for column in ("network", "mode"):
        table.add_column(column, no_wrap=True)
    for column in ("ms per batch", "images / s", "peak memory", "speed-up"):
        table.add_column(column, justify="right", no_wrap=True)
    dense = {row.mode: row.latency for row in rows if row.network == "dense"}
    for row in rows:
        latency = row.latency
        memory = "" if row.memory is None else f"{row.memory / 2**20:.1f} MiB"
        base = dense[row.mode]
        ratio = f"{base.median / latency.median:.2f} x"
        table.add_row(row.network, row.mode, f"{latency.median:.2f}", f"{row.throughput:,.0f}", memory, ratio)
        # The range of the ratio given the variance of timings; on a separate line, to fit into 80 columns.
        left = "" if row.network == "dense" else f"{base.low / latency.high:.2f} to {base.high / latency.low:.2f}"
        table.add_row("", "quartiles", f"{latency.low:.2f} to {latency.high:.2f}", "", "", left, style="dim")
    return table


def sweep_table(results: Mapping[str, Sequence[End]]) -> RenderableType:
    """One row per variant: mean and spread over its finished runs."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("run", overflow="fold")
    for column in ("runs", "accuracy", "spread", "params", "MACs"):
        table.add_column(column, justify="right", no_wrap=True)
    for variant, ends in results.items():
        if not ends:
            table.add_row(escape(variant), "0", "", "", "", "")
            continue
        accuracies = [end.pruned.accuracy for end in ends]
        gone = [change(mean(removed(end, key) for end in ends)) for key in ("params", "macs")]
        spread = f"± {stdev(accuracies):.2f}" if len(ends) > 1 else ""
        table.add_row(escape(variant), str(len(ends)), f"{mean(accuracies):.2f} %", spread, *gone)
    return table


def _short(number: int) -> str:
    for size, unit in ((10**9, " G"), (10**6, " M"), (10**3, " k")):
        if number >= size:
            return f"{number / size:.2f}{unit}"
    return str(number)
