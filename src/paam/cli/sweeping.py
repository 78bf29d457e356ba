"""The command that runs many recipes, seeds and settings, and compares them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from paam.cli.app import app, complain, examples
from paam.cli.options import Data, Device, KeepFilters, KeepMacs, KeepParams, RoundTo, Threshold, target_keys
from paam.cli.stopping import Stopping
from paam.errors import RecipeError, StoppedError
from paam.recipe import Recipe, load_recipe, parse_override
from paam.report.plain import put
from paam.report.tables import sweep_table
from paam.train.device import find_device, usual_device
from paam.train.directory import check_directory
from paam.train.setup import check_seed
from paam.train.sweep import (
    Job,
    Running,
    check_variants,
    is_begun,
    jobs_of,
    results,
    run_jobs,
    shared_gpu,
    tell_to_stop,
)

ON_A_GPU = 3
"""Runs at once: together they go 1.3 times as fast as one after the other, and a fourth one gains nothing for sure."""


@app.command(
    epilog=examples(
        "paam sweep cifar10-resnet56-kq --data data --seeds 0,1,2",
        "paam sweep cifar10-resnet56-kq --data data --vary prune.balance=area,side,none",
    )
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
    data: Data = None,
    keep_macs: KeepMacs = None,
    keep_params: KeepParams = None,
    keep_filters: KeepFilters = None,
    threshold: Threshold = None,
    round_to: RoundTo = None,
    out: Annotated[Path, typer.Option(help="Folder for the run directories.")] = Path("runs/sweep"),
    device: Device = "auto",
    jobs: Annotated[
        int | None, typer.Option(min=1, help=f"Runs at once.  [dim]default: {ON_A_GPU} on a GPU, 1 on a CPU[/]")
    ] = None,
) -> None:
    """Run recipes with several seeds or settings, a few at a time on one GPU, and compare. Run again to go on."""
    device = usual_device(device)
    on_gpu = device.startswith("cuda") and torch.cuda.is_available()
    if not on_gpu:  # a GPU is left to the runs: it may serve one process at a time
        find_device(device)
    target = target_keys(keep_macs, keep_params, keep_filters, threshold, round_to)
    settings = [*(settings or ()), *(f"{key}={value}" for key, value in target.items())]
    options = [part for text in settings for part in ("--set", text)]
    options += ["--device", device, *([] if data is None else ["--data", str(data)])]
    planned = jobs_of(recipes, _numbers(seeds), vary or (), options, out)
    _check(planned)
    at_once = jobs or (ON_A_GPU if on_gpu else 1)
    running: Running = {}

    def leave() -> None:
        tell_to_stop(running)  # the first signal may not have been passed on yet
        complain("Stopped at once; the runs still save.")

    stopping = Stopping(lambda: put("stopping; the runs save what they have"), leave)
    stopping.training = True
    try:
        with stopping, shared_gpu(on_gpu and at_once > 1):
            codes = run_jobs(planned, at_once, put, stopping.asked, running)
    except StoppedError as stopped:
        complain(str(stopped))
        raise typer.Exit(stopping.exit_code) from None
    done = [job for job in planned if not codes[job.out]]  # a run that failed may hold the results of an earlier one
    ends = results(done)
    console = Console()
    if not console.is_terminal:
        console.width = 10_000  # one line per variant, for grep
    console.print(sweep_table({job.variant: ends.get(job.variant, []) for job in planned}))
    if done:
        put(f"a page of them:  paam report {shlex.quote(str(out))}/*/ -o report.html")
    failed = [path.name for path, code in codes.items() if code]
    if failed:
        complain(f"{len(failed)} of {len(codes)} runs failed: {', '.join(failed)}; their .log files say why.")
        raise typer.Exit(1)


def _numbers(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    numbers = [int(part) for part in parts if part.isascii() and part.isdigit() and len(part) < 20]
    if len(set(numbers)) < len(parts):
        raise RecipeError(f"--seeds takes different whole numbers such as 0,1,2; '{text}' was given.")
    return numbers


def _recipe_of(job: Job) -> Recipe:
    """What `paam prune` makes of a job's arguments."""
    given = list(pairwise(job.arguments))
    overrides = [parse_override(value) for option, value in given if option == "--set"]
    folders = [("data.directory", value) for option, value in given if option == "--data"]
    return load_recipe(job.arguments[0], dict([*overrides, *folders]))


def _check(planned: Sequence[Job]) -> None:
    """Refuse before the first run what would be refused at any. A single variant is tried by its own first run."""
    first = {job.variant: job for job in reversed(planned)}
    recipes = {variant: _recipe_of(job) for variant, job in reversed(first.items())}
    for job in planned:
        check_seed(job.seed)
        check_directory(job.out, resume=is_begun(job), overwrite=False)
    to_try = {variant: recipe for variant, recipe in recipes.items() if not is_begun(first[variant])}
    if len(recipes) > 1 and to_try:
        put(f"{'checking':9} variants: {len(to_try)}")
        check_variants(to_try)
