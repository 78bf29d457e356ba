"""Fill the tables of README.md and docs/results.md from the committed records: python results/render.py

A table stands between `<!-- name -->` and `<!-- /name -->`; tests/test_docs.py fails when one is out of date.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from paam.record import Event, of_kind, read_record
from paam.report.comparison import PUBLISHED
from paam.scorers import FIXED

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "results.md")


def short_runs() -> dict[str, list[Event]]:
    """Records of the short-schedule comparison by name of the run."""
    paths = sorted(ROOT.glob("results/short/*/record.jsonl"))
    return {path.parent.name.removeprefix("short-").removesuffix("-seed0"): read_record(path) for path in paths}


def accuracies() -> str:
    """One row per run and the dense control, best accuracy first."""
    rows = []
    for events in short_runs().values():
        start, end = of_kind(events, "start")[0], of_kind(events, "end")[0]
        rows.append((end["pruned"]["accuracy"], _row(_label(start["recipe"]["prune"]), end["pruned"], end["dense"])))
        if start["recipe"]["schedule"]["control"]:
            epochs = Counter(e["phase"] for e in of_kind(events, "epoch"))
            label = f"dense control, {epochs['warmup'] + epochs['control']} epochs"
            rows.append((end["dense"]["accuracy"], _row(label, end["dense"], end["dense"])))
    head = "| | test accuracy | parameters removed | MACs removed |\n|---|---|---|---|\n"
    return head + "".join(row for _, row in sorted(rows, reverse=True))


def paper() -> str:
    """The paper's recipe, read literally, beside what it printed."""
    lines = ["| | test accuracy | parameters removed | MACs removed | the paper's |", "|---" * 5 + "|"]
    for path in sorted(ROOT.glob("results/paper/*/record.jsonl")):
        name = path.parent.name.removesuffix("-seed0")
        end = of_kind(read_record(path), "end")[0]
        scorer, ratio = name.split("-")
        printed = PUBLISHED["resnet56"][f"{'KQ' if scorer == 'kq' else 'Vanilla'}, {ratio}"]
        theirs = ", ".join(f"{value:.{digits}f} %" for value, digits in zip(printed, (2, 1, 1), strict=True))
        lines.append(_row(name, end["pruned"], end["dense"]).rstrip("\n") + f" {theirs} |")
    return "\n".join(lines) + "\n"


def proxies() -> str:
    """Short looks at which filters to keep, best first; the held-out accuracy of the last epoch that ran."""
    rows = []
    for path in sorted(ROOT.glob("results/proxies/*/record.jsonl")):
        events = read_record(path)
        total, last = of_kind(events, "start")[0]["epochs"], of_kind(events, "epoch")[-1]
        done = f"{last['epoch'] + 1} of {total}" if last["epoch"] + 1 < total else str(total)
        # Of scorers that learn nothing the accuracy after a cut is wrong in these records: see docs/results.md.
        fixed = of_kind(events, "start")[0]["recipe"]["prune"]["scorer"] in FIXED
        cut = "" if fixed else f"{of_kind(events, 'selection')[-1]['accuracy']:.1f} %"
        removed = f"{100 * (1 - last['kept_params']):.1f} % | {100 * (1 - last['kept_macs']):.1f} %"
        rows.append(
            (last["accuracy"], f"| {path.parent.name} | {last['accuracy']:.2f} % | {cut} | {removed} | {done} |")
        )
    head = [
        "| | held-out accuracy | right after the last cut | parameters removed | MACs removed | epochs |",
        "|---" * 6 + "|",
    ]
    return "\n".join([*head, *(row for _, row in sorted(rows, reverse=True))]) + "\n"


def widths() -> str:
    """Filters kept per layer, one column per run: the budgets that were discovered."""
    columns = {name: of_kind(events, "end")[0]["kept_filters"] for name, events in short_runs().items()}
    lines = ["| layer | of | " + " | ".join(columns) + " |", "|---" * (len(columns) + 2) + "|"]
    for layer, (_, width) in columns["kq"].items():
        cells = [str(kept[layer][0]) if layer in kept else "=" for kept in columns.values()]
        lines.append(f"| {layer} | {width} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _label(prune: Event) -> str:
    scorer = {"kq": "KQ", "vanilla": "Vanilla", "free": "Free (control)"}[prune["scorer"]]
    switches = ((prune["streams"], "independent"), (prune["placement"], "sum"))
    return ", ".join([scorer, *(value for value, default in switches if value != default)])


def _row(label: str, result: Event, dense: Event) -> str:
    removed = [100 * (1 - result[key] / dense[key]) for key in ("params", "macs")]
    return f"| {label} | {result['accuracy']:.2f} % | {removed[0]:.1f} % | {removed[1]:.1f} % |\n"


def filled(page: Path) -> str:
    """The page with every table replaced by what the records say."""
    text = page.read_text()
    for name, table in (("short", accuracies), ("short-widths", widths), ("paper", paper), ("proxies", proxies)):
        before, after = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        if before in text:
            text = text.partition(before)[0] + before + table() + after + text.partition(after)[2]
    return text


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page))
