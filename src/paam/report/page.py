"""Records -> one self-contained HTML page: template, style, script and data in a single file that works offline."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from paam.errors import ArtifactError, PaamError
from paam.files.durable import write_atomically
from paam.report import budget, comparison, figures, headline, stages
from paam.report.control import control_of
from paam.report.facts import Facts
from paam.report.gathering import gather
from paam.runs.record import salvage_events
from paam.version import __version__
from paam.views.format import NOTHING, setting_text, signed


def write_report(records: Sequence[Path], out: Path) -> list[str]:
    """Write the report of one or more runs, given their record files; returns what could not be shown, with the reason.

    A run that cannot be read is listed on the page and the others are shown; if none can be read, nothing is written.
    """
    if out.suffix != ".html":
        raise ArtifactError(f"A report is written to a file that ends in .html; '{out}' was given with -o.")
    runs, refused = _read(records)
    if not runs:
        raise ArtifactError(f"There is no run to report on: {' '.join(refused)}")
    # JSON may contain a lone surrogate, which UTF-8 cannot encode.
    write_atomically(out, page(runs, refused).encode("utf-8", "replace"))
    return refused


def _read(records: Sequence[Path]) -> tuple[list[Facts], list[str]]:
    records = list(dict.fromkeys(records))
    names = [Path(os.path.realpath(record.parent)).name for record in records]
    runs, refused = [], []
    for record, name in zip(records, names, strict=True):
        if names.count(name) > 1:
            name = str(record.parent)
        try:
            if not record.is_file():
                raise ArtifactError(f"{record.parent} is not a run directory (no {record.name}).")
            runs.append(gather(name, *salvage_events(record)))
        except PaamError as error:
            refused.append(str(error))
        except OSError as error:  # a folder without permission, or a name that is too long
            refused.append(f"{record.parent} cannot be read: {error.strerror}.")
    return runs, refused


def page(runs: Sequence[Facts], refused: Sequence[str] = ()) -> str:
    """The complete page as text."""
    environment = _environment()
    assert environment.loader is not None
    style, script = (Markup(environment.loader.get_source(environment, name)[0]) for name in ("page.css", "page.js"))
    found = comparison.families(runs) if len(runs) > 1 else []
    return environment.get_template("page.html").render(
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
        style=style,
        script=script,
        version=__version__,
        nothing=NOTHING,
        runs=[_sections(run, control_of(run, runs)) for run in runs],
        refused=refused,
        families=[
            (family, look, comparison.row(family, runs))
            for family, look in zip(found, comparison.looks(found), strict=True)
        ],
        columns=comparison.COLUMNS,
        plane=comparison.plane(found),
        published=bool(comparison.published(runs)),
    )


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("paam.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"data": embedded, "signed": signed}
    return environment


def embedded(value: Any) -> Markup:
    """JSON for a script element, escaped so that no text in it can close the element."""
    body = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Markup(body.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _sections(run: Facts, control: Facts | None) -> dict[str, Any]:
    """Everything the template of one run shows."""
    scores = figures.score_data(run)
    accuracies = stages.stages(run)
    return {
        "facts": run,
        "description": str(run.recipe.get("description") or ""),
        "command": "" if run.start is None else run.start.command,
        "changes": [(c.epoch, c.key, setting_text(c.before), setting_text(c.now)) for c in run.changes],
        "cards": headline.cards(run, control),
        "budget": budget.budget(run),
        "macs": budget.macs(run),
        **{name: draw(run) for name, draw in figures.FIGURES.items()},
        "learns_scores": any(epoch.does == "score" for epoch in run.epochs),
        "monitor": figures.monitor(run),
        "scores": scores,
        "score_plots": figures.score_plots(scores) if scores else None,
        "score_line": figures.score_line(scores["cycles"][-1]) if scores else "",
        "stages": accuracies,
        "stage_plot": stages.stage_plot(run, accuracies),
        "cuts_unmeasured": stages.cuts_unmeasured(run),
        "origins": headline.origins(run),
        "recipe": headline.recipe_rows(run.recipe),
    }
