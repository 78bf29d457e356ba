"""Fill README.md and docs/ from the records: tables and sections between markers, and the figures.

A block is between `<!-- name -->` and `<!-- /name -->` and stays empty until its records exist.
tests/project/test_docs.py fails if a page or a figure is out of date.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from paam.runs.record import record_in
from render import tables
from render.figures import draw
from render.runs import runs
from render.widths import discovered

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "reference" / "results.md")
FIGURES = ROOT / "docs" / "pictures" / "figures"
DRAWN = "strong/medium-seed1"
"""The run shown in the figures; they are in the section of its folder."""

GROUPS = {
    "theta": "The threshold",
    "activation": "The activation of scores",
    "placement": "Where the last gate of a block multiplies",
    "balance": "The balance between parameters and MACs",
    "streams": "Residual streams",
    "scorer": "The scorer",
    "widths": "Uniform widths, streams tied",
}


def strong(results: Path) -> str:
    """Our recipe and its controls: the result, and where accuracy is lost."""
    folder = results / "strong"
    table = tables.outcomes(folder, tables.STRONG)
    if not table:
        return ""
    where = tables.losses(folder, tables.STRONG)
    lost = f"### Where accuracy is lost\n\nAccuracy at the end of each stage ({tables.measured_on(runs(folder))}).\n\n"
    controls = " and its controls" if "control: " in table else ""
    return (
        "## ResNet-56 on CIFAR-10, our recipe\n\n"
        f"`cifar10-resnet56-strong`{controls}, on {_hardware(folder)}; each record has its own command, for the commit"
        f" that it names. {SPREAD}\n\n"
        f"{table}\n{lost + where + chr(10) if where else ''}"
    )


def earlier(results: Path) -> str:
    """The previous version of our recipe: the effect of its changes."""
    table = tables.outcomes(results / "earlier", tables.STRONG)
    return f"### The recipe before that\n\n{table}\n" if table else ""


def choices(results: Path) -> str:
    return _looks(results, "choices", "### Choices for the recipe\n\n", 30)


def levers(results: Path) -> str:
    return _looks(results, "levers", "### Levers of its training, at the high ratio\n\n", 60)


def _looks(results: Path, folder: str, heading: str, epochs: int) -> str:
    table = tables.looks(results / folder)
    text = (
        f"From a dense network trained for 60 epochs on all but a held-out tenth of the training set, {epochs} epochs"
        f" each, one setting changed at a time (`results/{folder}/run.sh`); accuracy on that tenth."
    )
    return f"{heading}{text}\n\n{table}\n" if table else ""


def ramps(results: Path) -> str:
    table = tables.warmups(results / "ramps")
    text = (
        "Dense networks after 15 epochs with and without a ramp of the rate, on a held-out tenth of the training set"
        " (`results/ramps/run.sh`)."
    )
    return f"{text}\n\n{table}\n" if table else ""


def resnet110(results: Path) -> str:
    folder = results / "resnet110"
    table = tables.outcomes(folder)
    return f"## ResNet-110 on CIFAR-10\n\nMade on {_hardware(folder)}. {SPREAD}\n\n{table}\n" if table else ""


SPREAD = (
    "Means over seeds ± the standard deviation of the sample. In the last column stand the paper's accuracy,"
    " parameters removed and FLOPs removed; a scorer in brackets is its better one at that ratio."
)


def quarter(results: Path) -> str:
    """Does it pay: every finished arm, under one protocol."""
    folder = results / "quarter"
    table = tables.outcomes(folder, tables.QUARTER, without=tables.BEGUN_WITH)
    if not table:
        return ""
    dense = tables.begun_with(folder)
    return f"Made on {_hardware(folder)} by `results/quarter/run.sh`; the dense networks have {dense}.\n\n{table}\n"


def ablations(results: Path) -> str:
    found = tables.ablations(results / "ablations")
    if not found:
        return ""
    order = sorted(found, key=lambda group: [*GROUPS, group].index(group))
    parts = [f"### {GROUPS.get(group, group)}\n\n{found[group]}\n" for group in order]
    text = (
        "One setting of `results/ablations/base.toml` (KQ, 36 epochs from a dense network of 95.0 %, no teacher) is"
        " changed at a time; one seed. But for the thresholds all are cut to half of the MACs. Beside them stand the"
        " paper's figures, of Vanilla and 440 epochs: accuracy, parameters and FLOPs removed."
    )
    return f"## Settings, one by one\n\n{text}\n\n{''.join(parts)}"


def unfinished(results: Path) -> str:
    table = tables.unfinished(
        results / name for name in ("strong", "earlier", "resnet110", "paper", "ablations", "short")
    )
    return f"## Runs that did not finish\n\nThey are in none of the tables above.\n\n{table}\n" if table else ""


def figures(results: Path) -> str:
    return (
        f"The budgets that `results/{DRAWN}` discovered, its scores against the threshold, and its training:\n\n"
        "![One bar per layer: its full width, and the filters that stay](../pictures/figures/layers.svg)\n\n"
        "![Histograms of scores and their cumulative curves, first and last cycle](../pictures/figures/scores.svg)\n\n"
        "![Loss and accuracy over the epochs, with the alternating phases shaded](../pictures/figures/curves.svg)\n\n"
    )


def _hardware(folder: Path) -> str:
    return ", ".join(sorted({run.start.hardware for run in runs(folder) if run.start}))


BLOCKS: dict[str, Callable[[Path], str]] = {
    "strong": strong,
    "strong-table": lambda results: tables.outcomes(results / "strong", tables.STRONG),
    "strong-widths": lambda results: discovered(results / "strong", ("medium", "high", "free")),
    "strong-figures": figures,
    "earlier": earlier,
    "choices": choices,
    "levers": levers,
    "ramps": ramps,
    "resnet110": resnet110,
    "quarter": quarter,
    "paper": lambda results: tables.outcomes(results / "paper"),
    "proxies": lambda results: tables.looks(results / "proxies", cuts_of_fixed=False),
    "ablations": ablations,
    "short": lambda results: tables.short(results / "short"),
    "unfinished": unfinished,
    "short-widths": lambda results: tables.widths(results / "short"),
}


def filled(page: Path, results: Path = RESULTS) -> str:
    """The page with every block replaced by the current one from the records."""
    text = page.read_text()
    for name, block in BLOCKS.items():
        before, after = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        if before in text:
            start, _, rest = text.partition(before)
            _, end, rest = rest.partition(after)
            assert end, f"{page} has no {after}"
            text = start + before + block(results) + end + rest
    return text


def drawn() -> dict[str, str]:
    """File name under docs/pictures/figures -> figure."""
    return draw(record_in(RESULTS / DRAWN))


def write() -> None:
    for page in PAGES:
        page.write_text(filled(page))
    FIGURES.mkdir(exist_ok=True)
    for name, picture in drawn().items():
        (FIGURES / name).write_text(picture)
