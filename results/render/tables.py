"""Records -> Markdown tables. Every function takes a folder and returns an empty string if it contains no record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean

from paam.events import Epoch, Outcome
from paam.report.comparison import PUBLISHED, spread
from paam.report.facts import Facts
from paam.report.figures import monitor, phase_label
from paam.report.stages import stages
from paam.views.format import NOTHING
from render.markdown import table
from render.runs import epochs_behind, experiments, given, runs

STRONG = {
    "medium": "our recipe, medium ratio",
    "high": "our recipe, high ratio",
    "high-400": "our recipe, high ratio, 40 epochs fewer, from the medium ratio's dense networks",
    "high-l1": "control at the high ratio: uniform widths, filters by l1 norm",
    "l1": "control: uniform widths, filters by l1 norm",
    "scratch": "control: uniform widths, from random weights",
    "free": "control: one free logit per filter",
    "widths": "control: the widths our recipe found, filters at random",
    "dense": "control: nothing removed, the dense network trained on for as long",
}
"""Names under results/strong in the order of the table. Controls are at the medium ratio unless they say otherwise."""

QUARTER = {
    "kq": "PAAM (KQ)",
    "free": "one free logit per filter",
    "l1": "uniform widths, filters by l1 norm",
    "l1-long": "the same, its fine-tune 20 epochs longer",
    "inner-l1": "whole streams, a quarter of every inner layer, filters by l1 norm",
    "inner-random": "the same, filters at random",
    "kq-widths": "the widths that PAAM found, filters at random",
    "scratch": "uniform widths, from random weights",
}
"""Arms under results/quarter in the order of the table."""

PAPER_ABLATIONS = {  # accuracy, parameters removed, FLOPs removed: arXiv 2210.11114, ResNet-56, Vanilla
    "theta-0.2": "94.30 %, 46.0 %, 36.7 %",
    "theta-0.3": "94.32 %, 50.2 %, 42.4 %",
    "theta-0.4": "94.29 %, 51.6 %, 46.6 %",
    "theta-0.5": "94.28 %, 52.3 %, 49.3 %",
    "theta-0.6": "93.97 %, 58.2 %, 57.6 %",
    "theta-0.7": "93.66 %, 64.7 %, 65.9 %",
    "activation-leaky-exponential": "94.28 %, 52.3 %, 49.3 %",
    "activation-leaky-2sigmoid": "94.10 %, 48.2 %, not given",
    "activation-sharp-sigmoid": "89.68 %, 51.5 %, not given",
    "activation-sigmoid": "did not converge",
}


def outcomes(folder: Path, labels: dict[str, str] | None = None, without: str = "") -> str:
    """Results next to the paper's: one row per experiment, mean over its seeds ± standard deviation."""
    found, labels = experiments(folder), labels or {}
    found.pop(without, None)
    rows = []
    for name in sorted(found, key=lambda name: [*labels, name].index(name)):
        seeds = found[name]
        accuracy = spread([run.pruned.accuracy for run in seeds], lambda mean: f"{mean:.2f} %").shown
        numbers = ", ".join(str(run.start.seed) for run in seeds)
        epochs = ", ".join(dict.fromkeys(epochs_behind(run, folder) for run in seeds))
        removed = [_percent(fmean(_removed(run.pruned, run.dense)[i] for run in seeds), 1) for i in (0, 1)]
        rows.append([labels.get(name, name), accuracy, numbers, *removed, epochs, _printed(seeds[0].model, name)])
    head = ["", "test accuracy", "seeds", "parameters removed", "MACs removed", "epochs behind it", "the paper's"]
    return table(head, rows)


def begun_with(folder: Path) -> str:
    """Accuracy of the dense networks that the runs of a folder started from, mean over seeds ± standard deviation."""
    dense = {run.start.seed: run.dense.accuracy for run in runs(folder) if run.finished and run.name[:5] != BEGUN_WITH}
    return spread([dense[seed] for seed in sorted(dense)], lambda mean: f"{mean:.2f} %").shown


def losses(folder: Path, labels: dict[str, str]) -> str:
    """Where accuracy is lost and regained, at both ratios."""
    head = ["", "dense, after warm-up", "right after the last cut", "after the alternation", "after fine-tune"]
    found = experiments(folder)
    rows = []
    for name in ("medium", "high"):
        if seeds := found.get(name):
            points = zip(*(_stage_accuracies(run) for run in seeds), strict=True)
            rows.append([labels[name], *(spread(point, lambda mean: f"{mean:.2f} %").shown for point in points)])
    return table(head, rows)


def measured_on(members: Iterable[Facts]) -> str:
    """The samples on which the accuracy per epoch and stage was measured."""
    return " or ".join(sorted({monitor(run) for run in members}))


def _stage_accuracies(run: Facts) -> list[float | None]:
    found = {stage.kind: stage.accuracy for stage in stages(run)}  # the last cut and the last weight phase win
    # Without warm-up, the end of the record has the given dense network's accuracy, on the test set like the stages.
    as_it_came = given(run, "model", "weights") and not run.fair and run.start.monitor == "test"
    dense = found.get("warmup", run.dense.accuracy if run.dense and as_it_came else None)
    return [dense, *(found.get(kind) for kind in ("cut", "weight", "finetune"))]


BEGUN_WITH = "dense"
"""In a folder of short looks, the run whose dense network the others start from; it is not one of them."""


LEARNS_NOTHING = ("L1 norm", "Random")


def looks(folder: Path, *, cuts_of_fixed: bool = True) -> str:
    """Short looks at one setting each, best first; the held-out accuracy of the last finished epoch.

    ``cuts_of_fixed``: whether these records have the correct accuracy after a cut for scorers that learn nothing.
    """
    rows = []
    for run in (run for run in runs(folder) if run.name != BEGUN_WITH):
        last, cuts = _last(run), [cycle.accuracy for cycle in run.cycles]
        known = cuts_of_fixed or run.start.method not in LEARNS_NOTHING
        cut = _percent(cuts[-1], 1) if cuts and known else ""
        cells = [run.name, _percent(last.accuracy, 2), cut, *_removed_by(last), _epochs(run)]
        rows.append((-1.0 if last.accuracy is None else last.accuracy, cells))
    head = ["", "held-out accuracy", "right after the last cut", "parameters removed", "MACs removed", "epochs"]
    return table(head, [row for _, row in sorted(rows, reverse=True)])


def warmups(folder: Path) -> str:
    """Dense networks at the end of warm-up, mean over seeds."""
    rows = []
    for name, seeds in experiments(folder).items():
        dense = [_stage_accuracies(run)[0] for run in seeds]
        numbers = ", ".join(str(run.start.seed) for run in seeds)
        rows.append([name, spread(dense, lambda mean: f"{mean:.2f} %").shown, numbers])
    return table(["", "held-out accuracy", "seeds"], rows)


BASE = "activation-leaky-exponential"
BESIDE = {
    "placement": ("sum", BASE),
    "balance": ("area", BASE),
    "streams": ("independent", BASE),
    "scorer": ("kq", BASE),
    "widths": ("discovered", "streams-tied"),
}
"""Group of ablations -> its baseline value, and the run with that value."""


def ablations(folder: Path) -> dict[str, str]:
    """Group of settings ("theta") -> a table of its finished runs, with their baseline first."""
    found = {run.name: run for run in runs(folder) if run.finished}
    groups: dict[str, dict[str, Facts]] = {}
    for name, run in found.items():
        group, _, value = name.partition("-")
        groups.setdefault(group, {})[value] = run
    for group, (value, name) in BESIDE.items():
        if group in groups and name in found:
            groups[group] = {value: found[name], **groups[group]}
    return {group: _ablation(group, members) for group, members in groups.items()}


def _ablation(group: str, members: Mapping[str, Facts]) -> str:
    printed = {value: PAPER_ABLATIONS.get(f"{group}-{value}", "") for value in members}
    head = ["", "test accuracy", "right after the last cut", "parameters removed", "MACs removed"]
    rows = []
    for value, run in members.items():
        removed = [_percent(part, 1) for part in _removed(run.pruned, run.dense)]
        cut = _percent(run.cycles[-1].accuracy, 1)
        row = [value, _percent(run.pruned.accuracy, 2), cut, *removed]
        rows.append([*row, printed[value]] if any(printed.values()) else row)
    return table([*head, "the paper's (Vanilla)"] if any(printed.values()) else head, rows)


def unfinished(folders: Iterable[Path]) -> str:
    """Unfinished runs: how many epochs they completed, and their state then. They are in no other table."""
    rows = []
    for folder in folders:
        for run in runs(folder):
            if not run.finished:
                last = run.epochs[-1] if run.epochs else None
                phase = phase_label(last) if last else NOTHING
                dense = next((stage.accuracy for stage in stages(run) if stage.kind == "warmup"), None)
                done = last.epoch + 1 if last else 0
                where = f"`results/{folder.name}/{run.name}`"
                so_far = f"{_percent(last.accuracy, 2)} ({monitor(run)})" if last else NOTHING
                rows.append([where, f"{done} of {run.start.epochs}", phase, _percent(dense, 2), so_far])
    return table(["", "epochs", "stopped in", "dense, after warm-up", "last epoch"], rows)


def short(folder: Path) -> str:
    """One row per run of the short comparison and its dense control, best accuracy first."""
    rows = []
    for run in (run for run in runs(folder) if run.finished):
        rows.append((run.pruned, run.dense, _label(run)))
        if run.setting("schedule.control"):
            epochs = Counter(epoch.does for epoch in run.epochs)
            rows.append((run.dense, run.dense, f"dense control, {epochs['warmup'] + epochs['control']} epochs"))
    rows.sort(key=lambda row: row[0].accuracy, reverse=True)
    return table(
        ["", "test accuracy", "parameters removed", "MACs removed"],
        [
            [label, _percent(result.accuracy, 2), *(_percent(x, 1) for x in _removed(result, dense))]
            for result, dense, label in rows
        ],
    )


def widths(folder: Path) -> str:
    """Filters kept per layer, one column per run of the short comparison: the learned budgets."""
    columns = {run.name.removeprefix("short-").removesuffix("-seed0"): run.kept for run in runs(folder) if run.finished}
    if not columns:
        return ""
    rows = []
    for layer, (_, width) in max(columns.values(), key=len).items():
        cells = [str(kept[layer][0]) if layer in kept else "=" for kept in columns.values()]
        rows.append([layer, str(width), *cells])
    return table(["layer", "of", *columns], rows)


def _label(run: Facts) -> str:
    prune = run.recipe["prune"]
    scorer = {"kq": "KQ", "vanilla": "Vanilla", "free": "Free (control)"}[prune["scorer"]]
    switches = ((prune["streams"], "independent"), (prune["placement"], "sum"))
    return ", ".join([scorer, *(value for value, default in switches if value != default)])


def _printed(model: str, name: str) -> str:
    """The paper's row for a scorer and ratio ("kq-medium"); for a ratio alone ("medium") the better of its two."""
    rows = {label.lower().replace(", ", "-"): (label, row) for label, row in PUBLISHED.get(model, {}).items()}
    if name in rows:
        return _triple(rows[name][1])
    both = [found for key, found in rows.items() if key.partition("-")[2] == name]
    if not both:
        return ""
    label, best = max(both, key=lambda found: found[1][0])
    return f"{_triple(best)} ({label.partition(',')[0]})"


def _triple(row: tuple[float, float, float]) -> str:
    """Accuracy, parameters removed, FLOPs removed."""
    return f"{row[0]:.2f} %, {row[1]:.1f} %, {row[2]:.1f} %"


def _last(run: Facts) -> Epoch:
    """The last epoch of the run's own network; the dense control is another network."""
    return run.own_epochs[-1]


def _epochs(run: Facts) -> str:
    done, total = run.epochs[-1].epoch + 1, run.start.epochs
    return str(total) if done >= total else f"{done} of {total}"


def _removed(result: Outcome, dense: Outcome) -> tuple[float, float]:
    """Parameters and MACs removed, in percent."""
    return 100 * (1 - result.params / dense.params), 100 * (1 - result.macs / dense.macs)


def _removed_by(epoch: Epoch) -> list[str]:
    return [_percent(100 * (1 - part), 1) for part in (epoch.kept_params, epoch.kept_macs)]


def _percent(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"{value:.{digits}f} %"
