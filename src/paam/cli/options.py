"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from paam.config.trust import FLAG
from paam.errors import RecipeError

Data = Annotated[Path | None, typer.Option(help="Folder that holds the data set.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...; auto uses a GPU if there is one.")]


TrustCode = Annotated[bool, typer.Option(FLAG, help="Run code that a recipe names as module:function.")]


def _share(of: str) -> Any:
    return typer.Option(help=f"Share of the dense network's {of} to keep, 0 to 1.")


KeepMacs = Annotated[float | None, _share("MACs")]
KeepParams = Annotated[float | None, _share("parameters")]
KeepFilters = Annotated[float | None, _share("filters")]
Threshold = Annotated[float | None, typer.Option(help="Remove filters scored below this.")]
RoundTo = Annotated[int | None, typer.Option(help="Round widths to a multiple of this; 8 suits most hardware.")]


def target_keys(
    keep_macs: float | None,
    keep_params: float | None,
    keep_filters: float | None,
    threshold: float | None,
    round_to: int | None,
) -> dict[str, Any]:
    """The keys of a recipe's target that were given as options."""
    targets = {"keep_macs": keep_macs, "keep_params": keep_params, "keep_filters": keep_filters, "threshold": threshold}
    given = {name: value for name, value in targets.items() if value is not None}
    if len(given) > 1 and set(given) != {"keep_macs", "keep_params"}:
        options = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise RecipeError(f"{options} contradict each other; give one target.")
    shaped = {} if round_to is None else {"round_to": round_to}
    return {f"target.{name}": value for name, value in (given | shaped).items()}
