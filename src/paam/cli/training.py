"""Commands that train one network: demo, prune; and recipes."""

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

from paam.cli.app import command, kept_clean
from paam.cli.options import Data, Device, KeepFilters, KeepMacs, KeepParams, RoundTo, Threshold, TrustCode, target_keys
from paam.cli.stopping import Stopping
from paam.config.recipe import Recipe, load_recipe, parse_override, shipped_recipes
from paam.config.trust import check_trusted, is_named
from paam.errors import ArtifactError, DataError, FailedError, PaamError, StoppedError
from paam.events import End, Event, Start, last, of_kind
from paam.loading import loading
from paam.runs.leash import when_orphaned
from paam.runs.record import RECORD_FILE, REPORT_FILE, read_events
from paam.views.choose import Harmless, choose_view
from paam.views.format import result_line
from paam.views.lines import complain, put, show
from paam.views.summary import summary

DEMO_RECIPE = "digits-resnet20-kq"

Seed = Annotated[int, typer.Option(help="Seed of weights, data order and augmentation.")]

Quiet = Annotated[bool, typer.Option("--quiet", help="Print only the result, in one line.")]
Json = Annotated[bool, typer.Option("--json", help="Print only the record's events, as JSON lines.")]
Board = Annotated[bool, typer.Option("--tensorboard", help="Also write RUN/tensorboard.")]


@command("paam demo")
def demo(
    out: Annotated[
        Path, typer.Option(help="Run directory; an earlier demo in it is overwritten, unless --resume is given.")
    ] = Path("runs/demo"),
    seed: Seed = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the demo in --out.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
    tensorboard: Board = False,
) -> None:
    """Train ResNet-20 on the bundled digits and prune it to half of its MACs, in under two minutes."""
    with loading():
        from paam.runs.directory import never_began
    used = out.is_dir() and any(out.iterdir())
    earlier = _demo_in(out)
    if used and not earlier and not never_began(out):
        raise ArtifactError(f"The directory {out} does not hold an earlier demo; choose another --out.")
    if earlier and not resume and last(earlier, End) is None:
        complain(f"The unfinished demo in {out} is overwritten; use --resume to continue a demo instead.")
    _prune(
        load_recipe(DEMO_RECIPE),
        out,
        seed=seed,
        device="cpu",
        shown={"quiet": quiet, "as_json": as_json},
        tensorboard=tensorboard,
        resume=resume,
        overwrite=used and not resume,
    )


@command(
    "paam prune digits-resnet20-kq --keep-macs 0.3",
    "paam prune cifar10-resnet56-kq --data data --keep-macs 0.5",
    "paam prune my.toml --set finetune.lr=0.05 --out runs/mine --resume",
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
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in --out.")] = False,
    accept_changed_data: Annotated[
        bool, typer.Option("--accept-changed-data", help="With --resume: accept that the data have changed.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete the run in --out and start over.")] = False,
    trust_code: TrustCode = False,
    quiet: Quiet = False,
    as_json: Json = False,
    tensorboard: Board = False,
) -> None:
    """Train, prune and fine-tune a network as a recipe says."""
    overrides: dict[str, Any] = dict(parse_override(text) for text in settings or ())
    overrides |= target_keys(keep_macs, keep_params, keep_filters, threshold, round_to)
    if data is not None:
        overrides["data.directory"] = str(data)
    out = out or Path("runs") / f"{Path(recipe).stem}-seed{seed}"
    shown = {"quiet": quiet, "as_json": as_json}
    loaded = load_recipe(recipe, overrides)
    trusted = trust_code or is_named(overrides)
    check_trusted(loaded.model.name, f"The recipe {recipe}", trusted=trusted, or_named=True)
    how: dict[str, Any] = {"device": device, "resume": resume, "overwrite": overwrite}
    how["accept_changed_data"] = accept_changed_data
    _prune(loaded, out, seed=seed, shown=shown, tensorboard=tensorboard, **how)


@command("paam recipes")
def recipes() -> None:
    """List the shipped recipes."""
    table = Table(box=None, padding=(0, 3, 0, 0), show_header=False)
    for name, description in shipped_recipes().items():
        table.add_row(f"[bold]{name}[/]", description)
    Console().print(table)


def _prune(
    recipe: Recipe,
    out: Path,
    *,
    seed: int,
    shown: dict[str, bool],
    tensorboard: bool,
    **options: Any,
) -> None:
    """Run a recipe with a console view."""
    with loading():
        from paam.report.page import write_report
        from paam.runs.checkpoint import checkpoints
        from paam.runs.directory import CHECKPOINTS, TENSORBOARD
        from paam.runs.run import run
        from paam.views.tensorboard import TensorBoardView
    resuming = f"{_command(sys.argv[1:])} --resume"
    # Until the next checkpoint is written, the run still records the old data.
    from_checkpoint = f"{resuming} --accept-changed-data" if options.get("accept_changed_data") else resuming
    try:
        with contextlib.ExitStack() as views:
            wanted = [Harmless(TensorBoardView(out / TENSORBOARD), "TensorBoard", complain)] if tensorboard else []
            boards = [views.enter_context(board) for board in wanted]
            chosen = choose_view("Ctrl-C stops; --resume continues", **shown)
            view = views.enter_context(Harmless(chosen, "The view of the run", complain))
            views.enter_context(kept_clean(any(shown.values())))

            def asked() -> None:
                again = "Ctrl-C once more" if stopping.received == signal.SIGINT else "Ctrl-C or SIGTERM"
                view.warn(f"stopping after this step; {again} stops immediately, without saving")

            def before_exit() -> None:
                view.close()
                saved = True
                with contextlib.suppress(ArtifactError):  # an unreadable folder must not keep the process from ending
                    saved = bool(checkpoints(out / CHECKPOINTS))
                complain(
                    f"Stopped without saving. Resume from the last checkpoint with:  {from_checkpoint}"
                    if saved
                    else "Stopped; nothing is saved yet."
                )

            def watch(event: Event) -> None:
                stopping.training = True
                for tell in (view.event, *(board.event for board in boards)):
                    tell(event)

            stopping = views.enter_context(Stopping(asked, before_exit))
            when_orphaned(lambda: stopping.receive(signal.SIGHUP))  # even if SIGHUP is ignored (nohup)
            options |= {"seed": seed, "command": _command(sys.argv[1:]), "watch": watch, "on_step": view.step}
            events = run(recipe, out, stop=stopping.asked, **options)
    except StoppedError as stopped:
        complain(f"{stopped} Resume with:  {resuming}")
        raise typer.Exit(stopping.exit_code) from None
    except (FailedError, DataError) as error:
        if not stopping.training:
            raise
        change = error.change if isinstance(error, FailedError) and sys.argv[1:2] == ["prune"] else ""
        complain(f"{error} Resume with:  {from_checkpoint}{f' --set {change}' if change else ''}")
        raise typer.Exit(2) from None
    record, page = out / RECORD_FILE, out / REPORT_FILE
    try:
        if not page.exists() or page.stat().st_mtime < record.stat().st_mtime:
            write_report([record], page)
    finally:  # a report that cannot be written must not lose the result, and vice versa
        if not view.heard or not _tell_result(events, out, **shown):
            complain(f"The run in {out} is finished, but standard output could not be written.")


def _tell_result(events: list[Event], out: Path, *, quiet: bool, as_json: bool) -> bool:
    """Print the result of a finished run; False if it cannot be written."""
    if as_json:
        return True
    start, end = last(events, Start), last(events, End)
    assert start is not None
    assert end is not None
    if quiet:
        return put(f"{result_line(start, end)}; {out}")
    from paam.runs.directory import CONTROL_FILE, DENSE_FILE

    dense = "".join(f", {name}" for name in (DENSE_FILE, CONTROL_FILE) if (out / name).exists())
    files = f"artifacts in {out}/: recipe.toml, record.jsonl, plan.json, model.safetensors{dense}"
    return show(Console(), summary(start, end), f"\n{files}\nreport: {out / REPORT_FILE}")


def _command(given: Sequence[str]) -> str:
    """The command that restarts the run, from the given command line."""
    once = ("--resume", "--overwrite", "--accept-changed-data")
    return shlex.join(["paam", *(word for word in given if word not in once)])


def _demo_in(out: Path) -> list[Event]:
    """The record of an earlier demo in a directory, which a new one may overwrite; empty if there is none."""
    try:
        events = read_events(out / RECORD_FILE)
    except PaamError:
        return []
    return events if any(start.command.startswith("paam demo") for start in of_kind(events, Start)) else []
