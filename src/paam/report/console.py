"""A run in the terminal: live progress, then tables; plain lines where output is not a terminal."""

from __future__ import annotations

import math

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from paam.record import Event, of_kind

PHASES = {
    "warmup": "warm-up (dense)",
    "score": "scoring filters",
    "weight": "training weights",
    "finetune": "fine-tuning the small network",
    "control": "training the dense control",
}
SPARKS = "▁▂▃▄▅▆▇█"


class Progressing:
    """Shows events as they come; a context manager, so that the terminal is left in order."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.total = 0
        self.epoch = 0
        self.lines: dict[str, str] = {}
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            console=console,
            expand=True,
        )
        self.overall = self.progress.add_task("all epochs", total=1)
        self.live = Live(console=console, refresh_per_second=8, transient=True, get_renderable=self._render)

    def __enter__(self) -> Progressing:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.console.is_terminal:
            self.live.stop()

    def event(self, event: Event) -> None:
        kind = event["event"]
        if kind == "start":
            self.total = event["epochs"]
            self._say(start_line(event))
        elif kind == "resumed":
            self.epoch = event["epoch"]
            for problem in event["passed_over"]:
                self._say(f"an older checkpoint is used: {problem}")
            inside = f" and {event['step']} steps" if event["step"] else ""
            self._say(f"resumed after epoch {event['epoch']}{inside}")
        elif kind == "changed":
            for key, (before, now) in event["changes"].items():
                self._say(f"from here on {key} = {now} (was {before})")
        elif kind == "scores":
            self.lines["scores"] = f"scores    0 {sparkline(event)} 1"
        elif kind == "selection":
            self._say(selection_line(event))
        elif kind == "epoch":
            self.epoch = event["epoch"] + 1
            self.lines["epoch"] = epoch_line(event)
            self.progress.update(self.overall, completed=self.epoch, total=self.total)
            if not self.console.is_terminal:
                self._say(f"{self.epoch:4d}/{self.total}  {epoch_line(event)}")

    def step(self, step: int, steps: int) -> None:
        self.progress.update(self.overall, completed=self.epoch + step / steps, total=max(self.total, 1))

    def _render(self) -> Group:
        return Group(self.progress, *(Text(line) for line in self.lines.values()))

    def _say(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)


def start_line(event: Event) -> str:
    recipe, dense = event["recipe"], event["dense"]
    return (
        f"{recipe['model']['name']} on {recipe['data']['name']}:"
        f" {dense['params']:,} parameters, {dense['macs']:,} MACs;"
        f" PAAM-{recipe['prune']['scorer']}, seed {event['seed']}, {event['hardware']}"
    )


def selection_line(event: Event) -> str:
    kept = sum(k for k, _ in event["kept_filters"].values())
    width = sum(w for _, w in event["kept_filters"].values())
    return (
        f"cycle {event['cycle']}: {kept} of {width} filters stay (scores from {event['threshold']:.3f}),"
        f" {100 * event['kept_macs']:.1f} % of MACs, {100 * event['kept_params']:.1f} % of parameters"
    )


def epoch_line(event: Event) -> str:
    cycle = f" in cycle {event['cycle']}" if event["cycle"] else ""
    seen = "" if event["accuracy"] is None else f"   accuracy {event['accuracy']:.2f} %"
    return f"{PHASES[event['phase']]}{cycle}   loss {event['loss']:.4f}{seen}"


def sparkline(event: Event, bins: int = 20) -> str:
    """How all scores spread over 0 to 1, as a row of blocks; higher ones count in the last."""
    counts = [0] * bins
    for scores in event["scores"].values():
        for score in scores:
            counts[min(int(score * bins), bins - 1)] += 1
    top = max(counts)
    # Any count at all is visible: the lowest block is for one filter, a blank for none.
    return "".join(" " if not c else SPARKS[(len(SPARKS) - 1) * c // top] for c in counts)


def summary(events: list[Event]) -> Group:
    """Dense against pruned, and what each layer kept."""
    start, end = of_kind(events, "start")[0], of_kind(events, "end")[0]
    return Group(_headline(start, end), Text(), _layers(start, end))


def _headline(start: Event, end: Event) -> Table:
    dense, pruned = end["dense"], end["pruned"]
    table = Table(
        title=f"{start['recipe']['model']['name']} on {start['recipe']['data']['name']}", title_justify="left"
    )
    table.add_column("")
    for name in (f"dense ({dense['trained']})", "pruned", "change"):
        table.add_column(name, justify="right")
    fair = dense["trained"] == "the same epochs"
    gain = f"{pruned['accuracy'] - dense['accuracy']:+.2f} points" if fair else "not comparable"
    table.add_row("test accuracy", f"{dense['accuracy']:.2f} %", f"{pruned['accuracy']:.2f} %", gain)
    for key, label in (("params", "parameters"), ("macs", "MACs (conv + fc)")):
        removed = 100 * (1 - pruned[key] / dense[key])
        table.add_row(label, f"{dense[key]:,}", f"{pruned[key]:,}", f"-{removed:.1f} %")
    a, b = dense["latency_ms"], pruned["latency_ms"]
    table.add_row(
        f"latency, batch {end['latency_batch']} (quartiles)",
        f"{a['median']:.1f} ms ({a['low']:.1f} to {a['high']:.1f})",
        f"{b['median']:.1f} ms ({b['low']:.1f} to {b['high']:.1f})",
        f"{a['median'] / b['median']:.2f} x as fast",
    )
    return table


def _layers(start: Event, end: Event, bar: int = 32) -> Table:
    table = Table(title="filters kept in each layer", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("layer")
    table.add_column("kept", justify="right")
    table.add_column("of", justify="right")
    table.add_column("")
    for name, (kept, width) in end["kept_filters"].items():
        full = math.ceil(bar * kept / width)  # a single filter shows, none does not
        stream = " (stream)" if start["groups"][name]["stream"] else ""
        row = f"[green]{'█' * full}[/][dim]{'░' * (bar - full)}[/]"
        table.add_row(escape(name) + stream, str(kept), str(width), row)
    return table
