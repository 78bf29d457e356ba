"""Commands that train: demo, prune, and the recipes they take."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from paam.cli.app import app, complain
from paam.errors import ArtifactError, PaamError, RecipeError
from paam.recipe import load_recipe, parse_override, shipped_recipes
from paam.record import RECORD_FILE, Event, of_kind, read_record
from paam.report.phrases import result_line
from paam.report.plain import put
from paam.report.summary import summary
from paam.report.tensorboard import TensorBoardView
from paam.report.views import choose_view
from paam.train.checkpoint import checkpoints
from paam.train.run import CHECKPOINTS, TENSORBOARD, run

DEMO_RECIPE = "digits-resnet20-kq"

Seed = Annotated[int, typer.Option(help="Seed of weights, data order and augmentation.")]

Quiet = Annotated[bool, typer.Option("--quiet", help="Print the result, in one line, and nothing else.")]
Json = Annotated[bool, typer.Option("--json", help="Print the record's events as JSON lines, and nothing else.")]
Board = Annotated[bool, typer.Option("--tensorboard", help="Write RUN/tensorboard too.")]


def _share(of: str) -> Any:
    return typer.Option(help=f"Share of the dense network's {of} that may remain, 0 to 1.")


@app.command(epilog="Example:  paam demo")
def demo(
    out: Annotated[Path, typer.Option(help="Run directory; an earlier demo in it is replaced.")] = Path("runs/demo"),
    seed: Seed = 0,
    quiet: Quiet = False,
    as_json: Json = False,
    tensorboard: Board = False,
) -> None:
    """Prune ResNet-20 to half of its MACs on the embedded digits, from random init, in under two minutes."""
    if out.is_dir() and any(out.iterdir()) and not _holds_demo(out):
        raise ArtifactError(f"The directory {out} holds something else than an earlier demo; choose another --out.")
    _prune(
        DEMO_RECIPE,
        {},
        out,
        seed=seed,
        device="cpu",
        shown={"quiet": quiet, "as_json": as_json},
        tensorboard=tensorboard,
        resume=False,
        overwrite=_holds_demo(out),
    )


@app.command(
    epilog="Examples:  [bold]paam prune digits-resnet20-kq --keep-macs 0.3[/]   "
    "[bold]paam prune cifar10-resnet56-kq --data data --keep-macs 0.5[/]   "
    "[bold]paam prune my.toml --set finetune.lr=0.05 --out runs/mine --resume[/]"
)
def prune(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe (see [bold]paam recipes[/]) or a path to a .toml.")],
    data: Annotated[Path | None, typer.Option(help="Folder that holds the data set.")] = None,
    keep_macs: Annotated[float | None, _share("MACs")] = None,
    keep_params: Annotated[float | None, _share("parameters")] = None,
    keep_filters: Annotated[float | None, _share("filters")] = None,
    threshold: Annotated[float | None, typer.Option(help="Filters scored below this fall.")] = None,
    round_to: Annotated[
        int | None, typer.Option(help="Keep multiples of so many filters per group: 8 suits most hardware.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one key of the recipe; repeatable.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run directory.  [dim]default: runs/RECIPE-seedN[/]")] = None,
    seed: Seed = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...; auto takes a GPU when there is one.")] = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start the run in --out anew.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
    tensorboard: Board = False,
) -> None:
    """Train, prune and fine-tune a network by a recipe."""
    overrides: dict[str, Any] = dict(parse_override(text) for text in settings or ())
    targets = {"keep_macs": keep_macs, "keep_params": keep_params, "keep_filters": keep_filters, "threshold": threshold}
    given = {name: value for name, value in targets.items() if value is not None}
    if len(given) > 1:
        options = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise RecipeError(f"{options} contradict each other; give one target.")
    overrides |= {f"target.{name}": value for name, value in given.items()}
    if round_to is not None:
        overrides["target.round_to"] = round_to
    if data is not None:
        overrides["data.directory"] = str(data)
    out = out or Path("runs") / f"{Path(recipe).stem}-seed{seed}"
    shown = {"quiet": quiet, "as_json": as_json}
    how: dict[str, Any] = {"device": device, "resume": resume, "overwrite": overwrite}
    _prune(recipe, overrides, out, seed=seed, shown=shown, tensorboard=tensorboard, **how)


@app.command(epilog="Example:  paam recipes")
def recipes() -> None:
    """List the shipped recipes."""
    table = Table(box=None, padding=(0, 3, 0, 0), show_header=False)
    for name, description in shipped_recipes().items():
        table.add_row(f"[bold]{name}[/]", description)
    Console().print(table)


def _prune(
    recipe: str,
    overrides: dict[str, Any],
    out: Path,
    *,
    seed: int,
    shown: dict[str, bool],
    tensorboard: bool,
    **options: Any,
) -> None:
    """Run a recipe in front of the user."""
    loaded = load_recipe(recipe, overrides)
    try:
        with contextlib.ExitStack() as views:
            boards = [views.enter_context(TensorBoardView(out / TENSORBOARD))] if tensorboard else []
            view = views.enter_context(choose_view("Ctrl-C stops; --resume goes on", **shown))
            told = [view.event, *(board.event for board in boards)]
            events = run(loaded, out, seed=seed, watch=_each(told), on_step=view.step, **options)
    except KeyboardInterrupt:
        if checkpoints(out / CHECKPOINTS):
            complain(f"stopped; the same options with --resume go on with {out}, from its last checkpoint.")
        else:
            complain("stopped before the first checkpoint; there is nothing to resume yet.")
        raise typer.Exit(130) from None
    if shown["as_json"]:
        return
    if shown["quiet"]:
        put(f"{result_line(of_kind(events, 'start')[0], of_kind(events, 'end')[0])}; {out}")
        return
    console = Console()
    console.print(summary(events))
    console.print(f"\nartifacts in {out}/: recipe.toml, record.jsonl, plan.json, model.safetensors", highlight=False)


def _each(told: Sequence[Callable[[Event], None]]) -> Callable[[Event], None]:
    def watch(event: Event) -> None:
        for tell in told:
            tell(event)

    return watch


def _holds_demo(out: Path) -> bool:
    """Whether a directory holds an earlier demo, which a new one may replace."""
    try:
        return str(read_record(out / RECORD_FILE)[0]["command"]).startswith("paam demo")
    except (PaamError, LookupError, TypeError):
        return False
