"""Commands around a network or a finished run: inspect, export, bench."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from paam.cli.app import app, examples, kept_clean
from paam.cli.options import Device
from paam.errors import ArtifactError, DeviceError, RecipeError
from paam.exporting import EXPORTS
from paam.exporting import export as export_model
from paam.inspection import inspect as inspect_network
from paam.models import MODELS, build_model
from paam.network import prepare
from paam.plan import LARGEST_INPUT
from paam.record import environment
from paam.report.plain import put
from paam.report.tables import comparison_table, inspection_table
from paam.speed import compare
from paam.train.device import find_device
from paam.train.directory import OWN_FILES
from paam.train.opened import OpenedRun, open_run


@app.command(
    epilog=examples(
        "paam inspect resnet56",
        "paam inspect torchvision:resnet50 --json",
        "paam inspect my_code:my_model --input 1x128x128 --ignore head",
    )
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
    classes = classes or (10 if small else 1000)
    with kept_clean(as_json):
        built = build_model(model, num_classes=classes, in_channels=sizes[0])
        example = torch.zeros(1, *sizes)
        network = prepare(built, example, placement=placement, streams=streams, ignore=ignore or ())
        found = inspect_network(network)
    if as_json:
        typer.echo(json.dumps({"model": model, "input": [1, *sizes], **found.as_dict()}))
    else:
        console = Console()
        if not console.is_terminal:
            console.width = max(console.width, 160)  # names whole, for grep and for --ignore
        console.print(inspection_table(model, sizes, classes, found))


@app.command(
    epilog=examples("paam export runs/demo --format onnx", "paam export runs/demo --format pt2 --out small.pt2")
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
    out = out or run_directory / EXPORTS.get(format, "")
    inside = os.path.relpath(os.path.realpath(out), os.path.realpath(run_directory))
    if inside.partition(os.sep)[0] in OWN_FILES - {*EXPORTS.values()}:
        raise ArtifactError(f"{out} is a file of the run itself; choose another --out.")
    export_model(opened.small, opened.example(2), out, format)
    put(f"{out}  ({out.stat().st_size / 1e6:.2f} MB)")
    put(_how_to_load(out, format, opened))


@app.command(epilog=examples("paam bench runs/demo", "paam bench runs/demo --batch 64 --device cuda --compile"))
def bench(
    run_directory: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a finished run.")],
    batch: Annotated[int, typer.Option(min=1, help="Images per batch.")] = 128,
    device: Device = "auto",
    repeats: Annotated[int, typer.Option(min=2, help="Timed passes of each network, taking turns.")] = 30,
    compiled: Annotated[bool, typer.Option("--compile", help="Measure torch.compile too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure dense against pruned: latency, throughput and peak memory, with their spread."""
    device = find_device(device)
    try:
        with kept_clean(as_json):
            opened = open_run(run_directory)
            networks = {"dense": opened.dense.to(device), "pruned": opened.small.to(device)}
            rows = compare(networks, opened.example(batch, device), repeats=repeats, compiled=compiled)
    except (RuntimeError, MemoryError) as error:
        if "memory" not in str(error) and not isinstance(error, MemoryError):
            raise
        raise DeviceError(f"A batch of {batch} does not fit into memory; give a smaller --batch.") from error
    hardware, threads = environment(device)["hardware"], torch.get_num_threads()
    if as_json:
        where = {"device": hardware, "batch": batch, "threads": threads}
        typer.echo(json.dumps({**where, "rows": [asdict(row) for row in rows]}))
    else:
        used = f", threads: {threads}" if device == "cpu" else ""
        Console().print(comparison_table(f"{hardware}{used}, batch {batch}", rows))


def _sizes(text: str) -> tuple[int, ...]:
    """ "3x224x224" -> (3, 224, 224)."""
    parts = text.lower().replace(",", "x").split("x")
    sizes = tuple(int(part) for part in parts if part.strip().isdecimal())
    if len(sizes) < len(parts) or not 0 < math.prod(sizes) <= LARGEST_INPUT:
        raise RecipeError(f"--input takes sizes such as 3x224x224; '{text}' was given.")
    return sizes


def _how_to_load(out: Path, format: str, opened: OpenedRun) -> str:
    name, sizes = opened.recipe.model.name, list(opened.plan.inputs[0][1:])
    start = opened.record[0]
    built = f'paam.models.build_model("{name}", num_classes={len(start["classes"])}, in_channels={sizes[0]})'
    how = {
        "onnx": f'onnxruntime.InferenceSession("{out}")',
        "pt2": f'torch.export.load("{out}").module()',
        "safetensors": f'paam.load("{out}", {built})',
    }[format]
    mean, std = (", ".join(f"{value:.4f}" for value in start["normalization"][key]) for key in ("mean", "std"))
    return (
        f"load it with  {how}\ninput: [N, {', '.join(map(str, sizes))}], (pixel / 255 - mean) / std"
        f" with mean {mean} and std {std}"
    )
