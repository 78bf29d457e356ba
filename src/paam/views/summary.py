"""The final tables of a run: dense against pruned, and what each layer kept."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from paam.events import End, Start
from paam.views.format import NOTHING, TRAINED, bar_cells, change, clean, removed, title


def summary(start: Start, end: End) -> Group:
    """Dense against pruned, and what each layer kept."""
    return Group(_headline(start, end), Text(), _layers(start, end))


def _headline(start: Start, end: End) -> Table:
    dense, pruned = end.dense, end.pruned
    table = Table(title=Text(title(start), "italic"), title_justify="left")
    table.add_column("")
    for name in (f"dense\n({TRAINED.get(dense.trained, NOTHING)})", "pruned", "change"):
        table.add_column(Text(name), justify="right", no_wrap=True)
    fair = dense.trained == "as long"
    gain = f"{pruned.accuracy - dense.accuracy:+.2f} points" if fair else "not comparable"
    table.add_row("test accuracy", f"{dense.accuracy:.2f} %", f"{pruned.accuracy:.2f} %", gain)
    for key, label in (("params", "parameters"), ("macs", "MACs (conv + fc)")):
        table.add_row(label, f"{getattr(dense, key):,}", f"{getattr(pruned, key):,}", change(removed(end, key)))
    a, b = dense.latency_ms, pruned.latency_ms
    faster = f"{a.median / b.median:.2f} x as fast"
    table.add_row(f"latency, batch {end.latency_batch}", f"{a.median:.1f} ms", f"{b.median:.1f} ms", faster)
    table.add_row("  quartiles", *(f"{time.low:.1f} to {time.high:.1f} ms" for time in (a, b)), "")
    return table


def _layers(start: Start, end: End, bar: int = 32) -> Table:
    table = Table(title="filters kept in each layer", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("layer")
    table.add_column("kept", justify="right")
    table.add_column("of", justify="right")
    table.add_column("")
    for name, (kept, width) in end.kept_filters.items():
        full = bar_cells(kept, width, bar)
        stream = " (stream)" if name in start.groups and start.groups[name].stream else ""
        row = Text.assemble(("█" * full, "green"), ("░" * (bar - full), "dim"))
        table.add_row(Text(clean(name) + stream), str(kept), str(width), row)
    return table
