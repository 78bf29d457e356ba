"""Commands on a network or a finished run: inspect, export, bench."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from paam.cli.app import command, kept_clean
from paam.cli.options import Device, TrustCode
from paam.errors import ArtifactError, DeviceError, RecipeError
from paam.loading import loading
from paam.views.lines import put
from paam.views.tables import comparison_table, inspection_table

if TYPE_CHECKING:
    from paam.runs.finished import FinishedRun


@command(
    "paam inspect resnet56",
    "paam inspect torchvision:resnet50 --json",
    "paam inspect my_code:my_model --input 1x128x128 --ignore head",
)
def inspect(
    model: Annotated[
        str, typer.Argument(help="resnet56, torchvision:resnet50, timm:efficientnet_b0 or module:function.")
    ],
    shape: Annotated[
        str | None, typer.Option("--input", metavar="CxHxW", help="Shape of one input.  [dim]default: the model's[/]")
    ] = None,
    classes: Annotated[int | None, typer.Option(min=1, help="Number of classes.  [dim]default: 10 or 1000[/]")] = None,
    placement: Annotated[str, typer.Option(help="Position of a residual block's last gate: sum, branch.")] = "sum",
    streams: Annotated[str, typer.Option(help="Layers in one residual stream: independent, tied.")] = "independent",
    ignore: Annotated[list[str] | None, typer.Option(help="A module to leave alone; repeatable.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what can be pruned in a network: layers, groups, streams, what is left alone and why."""
    with loading():
        import torch

        from paam.graph.network import prepare
        from paam.models import MODELS, build_model
        from paam.pruning.inspection import inspect as inspect_network
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
            console.width = max(console.width, 160)  # full names, for grep and for --ignore
        console.print(inspection_table(model, sizes, classes, found))


@command("paam export runs/demo --format onnx", "paam export runs/demo --format pt2 --out small.pt2")
def export(
    run_directory: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a finished run.")],
    format: Annotated[str, typer.Option(help="onnx, pt2 or safetensors.")] = "onnx",
    out: Annotated[
        Path | None, typer.Option(help="File to write.  [dim]default: RUN/model.FORMAT, or pruned.safetensors[/]")
    ] = None,
    trust_code: TrustCode = False,
) -> None:
    """Export the pruned network of a run to one file for other programs, with a dynamic batch size."""
    with loading():
        from paam.artifacts.export import EXPORTS, check_format
        from paam.artifacts.export import export as export_model
        from paam.runs.directory import OWN_FILES
        from paam.runs.finished import open_run, run_record
    run_record(run_directory)  # report a mistyped path before missing packages
    check_format(format)
    finished = open_run(run_directory, trust_code=trust_code)
    out = out or run_directory / EXPORTS.get(format, "")
    inside = os.path.relpath(os.path.realpath(out), os.path.realpath(run_directory))
    if inside.partition(os.sep)[0] in OWN_FILES - {*EXPORTS.values()}:
        raise ArtifactError(f"{out} is one of the run's own files; choose another --out.")
    export_model(finished.small, finished.example(2), out, format)
    put(f"{out}  ({out.stat().st_size / 1e6:.2f} MB)")
    for line in _how_to_load(out, format, finished):
        put(line)


@command("paam bench runs/demo", "paam bench runs/demo --batch 64 --device cuda --compile")
def bench(
    run_directory: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a finished run.")],
    batch: Annotated[int, typer.Option(min=1, help="Images per batch.")] = 128,
    device: Device = "auto",
    repeats: Annotated[int, typer.Option(min=2, help="Timed passes of each network, interleaved.")] = 30,
    compiled: Annotated[bool, typer.Option("--compile", help="Also measure with torch.compile.")] = False,
    trust_code: TrustCode = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Benchmark dense against pruned: latency, throughput and peak memory, with their spread."""
    with loading():
        import torch

        from paam.artifacts.latency import compare
        from paam.runs.environment import environment
        from paam.runs.finished import open_run
        from paam.train.device import find_device
    device = find_device(device)
    try:
        with kept_clean(as_json):
            finished = open_run(run_directory, trust_code=trust_code)
            networks = {"dense": finished.dense.to(device), "pruned": finished.small.to(device)}
            rows = compare(networks, finished.example(batch, device), repeats=repeats, compiled=compiled)
    except (RuntimeError, MemoryError) as error:
        if "memory" not in str(error) and not isinstance(error, MemoryError):
            raise
        raise DeviceError(f"A batch of {batch} does not fit into memory; use a smaller --batch.") from error
    hardware, threads = environment(device)["hardware"], torch.get_num_threads()
    if as_json:
        where = {"device": hardware, "batch": batch, "threads": threads}
        typer.echo(json.dumps({**where, "rows": [asdict(row) for row in rows]}))
    else:
        used = f", threads: {threads}" if device == "cpu" else ""
        Console().print(comparison_table(f"{hardware}{used}, batch {batch}", rows))


def _sizes(text: str) -> tuple[int, ...]:
    """ "3x224x224" -> (3, 224, 224)."""
    from paam.graph.plan import LARGEST_INPUT

    parts = text.lower().replace(",", "x").split("x")
    sizes = tuple(int(part) for part in parts if part.strip().isdecimal())
    if len(sizes) < len(parts) or not 0 < math.prod(sizes) <= LARGEST_INPUT:
        raise RecipeError(f"--input takes a shape such as 3x224x224 (got '{text}').")
    return sizes


def _how_to_load(out: Path, format: str, run: FinishedRun) -> list[str]:
    name, sizes = run.recipe.model.name, list(run.plan.inputs[0][1:])
    built = f'paam.models.build_model("{name}", num_classes={len(run.start.classes)}, in_channels={sizes[0]})'
    how = {
        "onnx": f'onnxruntime.InferenceSession("{out}")',
        "pt2": f'torch.export.load("{out}").module()',
        "safetensors": f'paam.load("{out}", {built})',
    }[format]
    shape = f"[N, {', '.join(map(str, sizes))}]"
    known = {name: ", ".join(f"{value:.4f}" for value in values) for name, values in run.start.normalization.items()}
    scaled = ""
    if {"mean", "std"} <= known.keys():
        scaled = f", (pixel / 255 - mean) / std with mean {known['mean']} and std {known['std']}"
    return [f"load it with  {how}", f"input: {shape}{scaled}"]
