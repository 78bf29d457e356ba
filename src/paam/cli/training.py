"""Commands that train: demo, prune, and the recipes they take."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from paam.cli.app import app, complain
from paam.errors import ArtifactError, PaamError, RecipeError
from paam.recipe import load_recipe, parse_override, shipped_recipes
from paam.record import Event, read_record
from paam.report.console import Progressing, summary
from paam.report.html import write_report
from paam.report.tables import sweep_table
from paam.train.checkpoint import checkpoints
from paam.train.run import CHECKPOINTS, RECORD_FILE, REPORT_FILE, find_device, run
from paam.train.sweep import jobs_of, results, run_jobs, shared_gpu

DEMO_RECIPE = "digits-resnet20-kq"

Seed = Annotated[int, typer.Option(help="Seed of weights, data order and augmentation.")]


def _share(of: str) -> Any:
    return typer.Option(help=f"Share of the dense network's {of} that may remain, 0 to 1.")


@app.command(epilog="Example:  paam demo")
def demo(
    out: Annotated[Path, typer.Option(help="Run directory; an earlier demo in it is replaced.")] = Path("runs/demo"),
    seed: Seed = 0,
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
) -> None:
    """Train, prune and fine-tune a network by a recipe."""
    overrides: dict[str, Any] = dict(parse_override(text) for text in settings or ())
    targets = {"keep_macs": keep_macs, "keep_params": keep_params, "keep_filters": keep_filters, "threshold": threshold}
    given = {name: value for name, value in targets.items() if value is not None}
    if len(given) > 1 and set(given) != {"keep_macs", "keep_params"}:
        options = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise RecipeError(f"{options} contradict each other; give one target.")
    overrides |= {f"target.{name}": value for name, value in given.items()}
    if round_to is not None:
        overrides["target.round_to"] = round_to
    if data is not None:
        overrides["data.directory"] = str(data)
    out = out or Path("runs") / f"{Path(recipe).stem}-seed{seed}"
    _prune(recipe, overrides, out, seed=seed, device=device, resume=resume, overwrite=overwrite)


@app.command(
    epilog="Examples:  [bold]paam sweep cifar10-resnet56-kq --data data --seeds 0,1,2[/]   "
    "[bold]paam sweep cifar10-resnet56-kq --data data --vary prune.balance=area,side,none[/]"
)
def sweep(
    recipes: Annotated[list[str], typer.Argument(help="Recipes, shipped or paths to .toml files.")],
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0",
    vary: Annotated[
        list[str] | None, typer.Option(metavar="KEY=A,B", help="Try each value of a key; repeatable: all combinations.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one key for all runs; repeatable.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Folder that holds the data set.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the run directories.")] = Path("runs/sweep"),
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...; auto takes a GPU when there is one.")] = "auto",
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at once.  [dim]default: 4 on a GPU, 1 on a CPU[/]")
    ] = None,
) -> None:
    """Run recipes with several seeds or settings, a few at a time on one GPU, and compare. Run again to go on."""
    device = find_device(device)
    on_gpu = device.startswith("cuda")
    options = [part for text in settings or () for part in ("--set", text)]
    options += ["--device", device, *([] if data is None else ["--data", str(data)])]
    planned = jobs_of(recipes, _numbers(seeds), vary or (), options, out)
    for job in planned:
        load_recipe(job.arguments[0], dict(parse_override(text) for text in _after(job.arguments, "--set")))
    console = Console()
    at_once = jobs or (4 if on_gpu else 1)
    with shared_gpu(on_gpu and at_once > 1):
        codes = run_jobs(planned, at_once, lambda line: console.print(line, highlight=False, soft_wrap=True))
    console.print(sweep_table(results(planned)))
    failed = [path.name for path, code in codes.items() if code]
    if failed:
        complain(f"{len(failed)} of {len(codes)} runs failed: {', '.join(failed)}; their .log files say why.")
        raise typer.Exit(1)


def _numbers(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts) or len(set(parts)) < len(parts):
        raise RecipeError(f"--seeds takes different whole numbers such as 0,1,2; '{text}' was given.")
    return [int(part) for part in parts]


def _after(arguments: tuple[str, ...], option: str) -> list[str]:
    return [value for name, value in pairwise(arguments) if name == option]


@app.command(epilog="Example:  paam recipes")
def recipes() -> None:
    """List the shipped recipes."""
    table = Table(box=None, padding=(0, 3, 0, 0), show_header=False)
    for name, description in shipped_recipes().items():
        table.add_row(f"[bold]{name}[/]", description)
    Console().print(table)


def _prune(recipe: str, overrides: dict[str, Any], out: Path, *, seed: int, **options: Any) -> None:
    """Run a recipe in front of the user."""
    console = Console()
    loaded = load_recipe(recipe, overrides)
    try:
        with Progressing(console) as progress:
            events: list[Event] = run(loaded, out, seed=seed, watch=progress.event, on_step=progress.step, **options)
    except KeyboardInterrupt:
        if checkpoints(out / CHECKPOINTS):
            complain(f"stopped; the same options with --resume go on with {out}, from its last checkpoint.")
        else:
            complain("stopped before the first checkpoint; there is nothing to resume yet.")
        raise typer.Exit(130) from None
    console.print(summary(events))
    console.print(f"\nartifacts in {out}/: recipe.toml, record.jsonl, plan.json, model.safetensors", highlight=False)
    record, page = out / RECORD_FILE, out / REPORT_FILE
    if not page.exists() or page.stat().st_mtime < record.stat().st_mtime:
        write_report([record], page)
    console.print(f"report: {page}", highlight=False, markup=False, soft_wrap=True)


def _holds_demo(out: Path) -> bool:
    """Whether a directory holds an earlier demo, which a new one may replace."""
    try:
        return str(read_record(out / RECORD_FILE)[0]["command"]).startswith("paam demo")
    except (PaamError, LookupError, TypeError):
        return False
