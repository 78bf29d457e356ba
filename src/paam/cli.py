"""The command line: parses, calls, prints."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from paam.errors import ArtifactError, DeviceError, PaamError, RecipeError
from paam.exporting import export as export_model
from paam.inspection import inspect as inspect_network
from paam.models import MODELS, build_model
from paam.network import prepare
from paam.plan import LARGEST_INPUT
from paam.recipe import load_recipe, parse_override, shipped_recipes
from paam.record import Event, environment, read_record
from paam.report.console import Progressing, summary
from paam.report.tables import comparison_table, inspection_table
from paam.speed import compare
from paam.train.checkpoint import checkpoints
from paam.train.opened import OpenedRun, open_run
from paam.train.run import CHECKPOINTS, RECORD_FILE, find_device, run
from paam.version import __version__

app = typer.Typer(
    name="paam",
    help="Prune CNNs by active attention manipulation: smaller dense networks, exact by construction.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

DEMO_RECIPE = "digits-resnet20-kq"

Seed = Annotated[int, typer.Option(help="Seed of weights, data order and augmentation.")]


def _share(of: str) -> Any:
    return typer.Option(help=f"Share of the dense network's {of} that may remain, 0 to 1.")


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if version:
        typer.echo(f"paam {__version__}")
        raise typer.Exit


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
    if len(given) > 1:
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
    epilog="Examples:  [bold]paam inspect resnet56[/]   [bold]paam inspect torchvision:resnet50 --json[/]   "
    "[bold]paam inspect my_code:my_model --input 1x128x128 --ignore head[/]"
)
def inspect(
    model: Annotated[
        str, typer.Argument(help="resnet56, torchvision:resnet50, timm:efficientnet_b0 or module:function.")
    ],
    shape: Annotated[
        str | None, typer.Option("--input", metavar="CxHxW", help="Shape of one input.  [dim]default: the model's[/]")
    ] = None,
    classes: Annotated[int | None, typer.Option(min=1, help="Number of classes.  [dim]default: 10 or 1000[/]")] = None,
    placement: Annotated[str, typer.Option(help="Where a residual block's last gate stands: sum, branch.")] = "sum",
    streams: Annotated[str, typer.Option(help="Layers of one residual stream: independent, tied.")] = "independent",
    ignore: Annotated[list[str] | None, typer.Option(help="A module to leave alone; repeatable.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what would be gated in a network: layers, groups, streams, what is left alone and why."""
    small = model in MODELS
    sizes = _sizes(shape or ("3x32x32" if small else "3x224x224"))
    built = build_model(model, num_classes=classes or (10 if small else 1000), in_channels=sizes[0])
    example = torch.zeros(1, *sizes)
    network = prepare(built, example, placement=placement, streams=streams, ignore=ignore or ())
    found = inspect_network(network)
    if as_json:
        typer.echo(json.dumps({"model": model, "input": [1, *sizes], **found.as_dict()}))
    else:
        console = Console()
        if not console.is_terminal:
            console.width = max(console.width, 160)  # names whole, for grep and for --ignore
        console.print(inspection_table(model, sizes, found))


@app.command(
    epilog="Examples:  [bold]paam export runs/demo --format onnx[/]   "
    "[bold]paam export runs/demo --format pt2 --out small.pt2[/]"
)
def export(
    run_directory: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a finished run.")],
    format: Annotated[str, typer.Option(help="onnx, pt2 or safetensors.")] = "onnx",
    out: Annotated[
        Path | None, typer.Option(help="File to write.  [dim]default: RUN/model.FORMAT, or pruned.safetensors[/]")
    ] = None,
) -> None:
    """Write the pruned network of a run as one file for other programs; its batch size stays free."""
    opened = open_run(run_directory)
    default = "pruned.safetensors" if format == "safetensors" else f"model.{format}"
    out = out or run_directory / default
    export_model(opened.small, opened.example(2), out, format)
    console = Console()
    console.print(f"{out}  ({out.stat().st_size / 1e6:.2f} MB)", highlight=False)
    console.print(_how_to_load(out, format, opened), highlight=False, markup=False, soft_wrap=True)


@app.command(
    epilog="Examples:  [bold]paam bench runs/demo[/]   [bold]paam bench runs/demo --batch 64 --device cuda --compile[/]"
)
def bench(
    run_directory: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a finished run.")],
    batch: Annotated[int, typer.Option(min=1, help="Images per batch.")] = 128,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...; auto takes a GPU when there is one.")] = "auto",
    repeats: Annotated[int, typer.Option(min=2, help="Timed passes of each network, taking turns.")] = 30,
    compiled: Annotated[bool, typer.Option("--compile", help="Measure torch.compile too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure dense against pruned: latency, throughput and peak memory, with their spread."""
    device = find_device(device)
    opened = open_run(run_directory)
    networks = {"dense": opened.dense.to(device), "pruned": opened.small.to(device)}
    try:
        rows = compare(networks, opened.example(batch, device), repeats=repeats, compiled=compiled)
    except (RuntimeError, MemoryError) as error:
        if "memory" not in str(error) and not isinstance(error, MemoryError):
            raise
        raise DeviceError(f"A batch of {batch} does not fit into memory; give a smaller --batch.") from error
    if as_json:
        where = {"device": environment(device)["hardware"], "batch": batch, "threads": torch.get_num_threads()}
        typer.echo(json.dumps({**where, "rows": [asdict(row) for row in rows]}))
    else:
        Console().print(comparison_table(environment(device)["hardware"], batch, rows))


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
            _complain(f"stopped; the same options with --resume go on with {out}, from its last checkpoint.")
        else:
            _complain("stopped before the first checkpoint; there is nothing to resume yet.")
        raise typer.Exit(130) from None
    console.print(summary(events))
    console.print(f"\nartifacts in {out}/: recipe.toml, record.jsonl, plan.json, model.safetensors", highlight=False)


def main() -> None:
    """Entry point: every error paam raises on purpose becomes one sentence and exit code 2."""
    try:
        app()
    except PaamError as error:
        _complain(str(error))
        sys.exit(2)


def _complain(sentence: str) -> None:
    Console(stderr=True).print(f"paam: {sentence}", style="red", highlight=False, markup=False, soft_wrap=True)


def _sizes(text: str) -> tuple[int, ...]:
    """ "3x224x224" -> (3, 224, 224)."""
    parts = text.lower().replace(",", "x").split("x")
    sizes = tuple(int(part) for part in parts if part.strip().isdecimal())
    if len(sizes) < len(parts) or not 0 < math.prod(sizes) <= LARGEST_INPUT:
        raise RecipeError(f"--input takes sizes such as 3x224x224; '{text}' was given.")
    return sizes


def _how_to_load(out: Path, format: str, opened: OpenedRun) -> str:
    name, sizes = opened.recipe.model.name, list(opened.plan.inputs[0][1:])
    classes = len(opened.record[0]["classes"])
    how = {
        "onnx": f'onnxruntime.InferenceSession("{out}")',
        "pt2": f'torch.export.load("{out}").module()',
        "safetensors": f'paam.load("{out}", model)  # model: {name} as the run built it, {classes} classes',
    }[format]
    return f"load it with  {how}\ninput: [N, {', '.join(map(str, sizes))}], normalised as in the run's record.jsonl"


def _holds_demo(out: Path) -> bool:
    """Whether a directory holds an earlier demo, which a new one may replace."""
    try:
        return str(read_record(out / RECORD_FILE)[0]["command"]).startswith("paam demo")
    except (PaamError, LookupError, TypeError):
        return False
