"""Commands that train one network: demo, prune, and the recipes they take."""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from paam.cli.app import app, complain, examples, kept_clean
from paam.cli.options import Data, Device, KeepFilters, KeepMacs, KeepParams, RoundTo, Threshold, target_keys
from paam.cli.stopping import Stopping
from paam.errors import ArtifactError, PaamError, StoppedError
from paam.recipe import load_recipe, parse_override, shipped_recipes
from paam.record import RECORD_FILE, Event, of_kind, read_record
from paam.report.html import write_report
from paam.report.phrases import result_line
from paam.report.plain import put, show
from paam.report.summary import summary
from paam.report.tensorboard import TensorBoardView
from paam.report.views import choose_view
from paam.train.checkpoint import checkpoints
from paam.train.directory import CHECKPOINTS, DENSE_FILE, REPORT_FILE, TENSORBOARD, never_began
from paam.train.run import run

DEMO_RECIPE = "digits-resnet20-kq"

Seed = Annotated[int, typer.Option(help="Seed of weights, data order and augmentation.")]

Quiet = Annotated[bool, typer.Option("--quiet", help="Print the result, in one line, and nothing else.")]
Json = Annotated[bool, typer.Option("--json", help="Print the record's events as JSON lines, and nothing else.")]
Board = Annotated[bool, typer.Option("--tensorboard", help="Write RUN/tensorboard too.")]


@app.command(epilog=examples("paam demo"))
def demo(
    out: Annotated[
        Path, typer.Option(help="Run directory; an earlier demo in it is replaced, unless --resume is given.")
    ] = Path("runs/demo"),
    seed: Seed = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the demo in --out.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
    tensorboard: Board = False,
) -> None:
    """Prune ResNet-20 to half of its MACs on the embedded digits, from random init, in under two minutes."""
    used = out.is_dir() and any(out.iterdir())
    earlier = _demo_in(out)
    if used and not earlier and not never_began(out):
        raise ArtifactError(f"The directory {out} holds something else than an earlier demo; choose another --out.")
    if earlier and not resume and not of_kind(earlier, "end"):
        complain(f"The demo in {out} was not finished and is begun anew; --resume would go on with it.")
    _prune(
        DEMO_RECIPE,
        {},
        out,
        seed=seed,
        device="cpu",
        shown={"quiet": quiet, "as_json": as_json},
        tensorboard=tensorboard,
        resume=resume,
        overwrite=used and not resume,
    )


@app.command(
    epilog=examples(
        "paam prune digits-resnet20-kq --keep-macs 0.3",
        "paam prune cifar10-resnet56-kq --data data --keep-macs 0.5",
        "paam prune my.toml --set finetune.lr=0.05 --out runs/mine --resume",
    )
)
def prune(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe (see [bold]paam recipes[/]) or a path to a .toml.")],
    data: Data = None,
    keep_macs: KeepMacs = None,
    keep_params: KeepParams = None,
    keep_filters: KeepFilters = None,
    threshold: Threshold = None,
    round_to: RoundTo = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one key of the recipe; repeatable.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run directory.  [dim]default: runs/RECIPE-seedN[/]")] = None,
    seed: Seed = 0,
    device: Device = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start the run in --out anew.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
    tensorboard: Board = False,
) -> None:
    """Train, prune and fine-tune a network by a recipe."""
    overrides: dict[str, Any] = dict(parse_override(text) for text in settings or ())
    overrides |= target_keys(keep_macs, keep_params, keep_filters, threshold, round_to)
    if data is not None:
        overrides["data.directory"] = str(data)
    out = out or Path("runs") / f"{Path(recipe).stem}-seed{seed}"
    shown = {"quiet": quiet, "as_json": as_json}
    how: dict[str, Any] = {"device": device, "resume": resume, "overwrite": overwrite}
    _prune(recipe, overrides, out, seed=seed, shown=shown, tensorboard=tensorboard, **how)


@app.command(epilog=examples("paam recipes"))
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
    resuming = f"{_command(sys.argv[1:])} --resume"
    try:
        with contextlib.ExitStack() as views:
            boards = [views.enter_context(TensorBoardView(out / TENSORBOARD))] if tensorboard else []
            view = views.enter_context(choose_view("Ctrl-C stops; --resume goes on", **shown))
            views.enter_context(kept_clean(any(shown.values())))

            def asked() -> None:
                again = "Ctrl-C once more" if stopping.received == signal.SIGINT else "Ctrl-C or SIGTERM"
                view.warn(f"stopping after this step; {again} stops at once, without saving")

            def at_once() -> None:
                view.close()
                saved = bool(checkpoints(out / CHECKPOINTS))
                complain(
                    f"Stopped at once. From the last checkpoint:  {resuming}"
                    if saved
                    else "Stopped; nothing is saved yet."
                )

            def watch(event: Event) -> None:
                stopping.training = True
                for tell in (view.event, *(board.event for board in boards)):
                    tell(event)

            stopping = views.enter_context(Stopping(asked, at_once))
            options |= {"seed": seed, "command": _command(sys.argv[1:]), "watch": watch, "on_step": view.step}
            events = run(loaded, out, stop=stopping.asked, **options)
    except StoppedError as stopped:
        complain(f"{stopped} Go on with:  {resuming}")
        raise typer.Exit(stopping.exit_code) from None
    record, page = out / RECORD_FILE, out / REPORT_FILE
    try:
        if not page.exists() or page.stat().st_mtime < record.stat().st_mtime:
            write_report([record], page)
    finally:  # a page that cannot be written must not cost the result, nor the other way round
        if not view.heard or not _tell_result(events, out, **shown):
            complain(f"The run in {out} is finished, but standard output could not be written.")


def _tell_result(events: list[Event], out: Path, *, quiet: bool, as_json: bool) -> bool:
    """The end of what a finished run prints; False when nobody reads it."""
    if as_json:
        return True
    if quiet:
        return put(f"{result_line(of_kind(events, 'start')[0], of_kind(events, 'end')[0])}; {out}")
    dense = ", dense.safetensors" if (out / DENSE_FILE).exists() else ""
    files = f"artifacts in {out}/: recipe.toml, record.jsonl, plan.json, model.safetensors{dense}"
    return show(Console(), summary(events), f"\n{files}\nreport: {out / REPORT_FILE}")


def _command(given: Sequence[str]) -> str:
    """What starts the run again, from the command line that was given."""
    return shlex.join(["paam", *(word for word in given if word not in ("--resume", "--overwrite"))])


def _demo_in(out: Path) -> list[Event]:
    """The record of an earlier demo in a directory, which a new one may replace; empty where there is none."""
    try:
        events = read_record(out / RECORD_FILE)
        return events if str(events[0]["command"]).startswith("paam demo") else []
    except (PaamError, LookupError, TypeError):
        return []
