"""The command that runs and compares many recipes, seeds and settings."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from paam.cli.app import command
from paam.cli.options import Data, Device, KeepFilters, KeepMacs, KeepParams, RoundTo, Threshold, TrustCode, target_keys
from paam.cli.stopping import Stopping
from paam.config.recipe import load_recipe
from paam.config.trust import check_trusted, is_named
from paam.errors import RecipeError, StoppedError
from paam.loading import loading
from paam.runs.liveness import lock_held
from paam.runs.planned import Common, Planned, plan_sweep
from paam.runs.record import LOCK_FILE
from paam.views.lines import complain, put, show
from paam.views.tables import sweep_table

if TYPE_CHECKING:
    from paam.runs.sweep import Running

ON_A_GPU = 3
"""Concurrent runs: 1.3 times the throughput of sequential ones; a fourth has no measurable gain."""


@command(
    "paam sweep cifar10-resnet56-kq --data data --seeds 0,1,2",
    "paam sweep cifar10-resnet56-kq --data data --vary prune.balance=area,side,none",
)
def sweep(
    recipes: Annotated[list[str], typer.Argument(help="Recipes, shipped or paths to .toml files.")],
    seeds: Annotated[str, typer.Option(help="Comma-separated seeds.")] = "0",
    vary: Annotated[
        list[str] | None, typer.Option(metavar="KEY=A,B", help="Values to try for a key; repeatable: all combinations.")
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
        int | None, typer.Option(min=1, help=f"Concurrent runs.  [dim]default: {ON_A_GPU} on a GPU, 1 on a CPU[/]")
    ] = None,
    trust_code: TrustCode = False,
) -> None:
    """Run recipes with several seeds or settings, a few at a time on one GPU, and compare. Rerun to resume."""
    with loading():
        import torch

        from paam.runs.sweep import request_stop, results, run_jobs, shared_gpu
        from paam.train.device import find_device, usual_device
    device = usual_device(device)
    on_gpu = device.startswith("cuda") and torch.cuda.is_available()
    if not on_gpu:  # leave the GPU to the runs: it may be in exclusive mode
        find_device(device)
    target = target_keys(keep_macs, keep_params, keep_filters, threshold, round_to)
    settings = [*(settings or ()), *(f"{key}={value}" for key, value in target.items())]
    common = Common(tuple(settings), None if data is None else str(data), device, trust_code)
    planned = plan_sweep(recipes, _numbers(seeds), vary or (), common, out)
    _check(planned)
    concurrent = jobs or (ON_A_GPU if on_gpu else 1)
    running: Running = {}

    def leave() -> None:
        request_stop(running)  # the first signal may not have been forwarded yet
        complain("Stopped without waiting; the runs still save their state.")

    stopping = Stopping(lambda: put("stopping; the runs save their state"), leave)
    stopping.training = True
    try:
        with stopping, shared_gpu(on_gpu and concurrent > 1):
            codes = run_jobs(planned, concurrent, put, stopping.asked, running, _is_held)
    except StoppedError as stopped:
        complain(str(stopped))
        raise typer.Exit(stopping.exit_code) from None
    done = [job for job in planned if not codes[job.out]]  # a failed run may have old results
    ends = results(done)
    console = Console()
    if not console.is_terminal:
        console.width = 10_000  # one line per variant, for grep
    show(console, sweep_table({job.variant: ends.get(job.variant, []) for job in planned}))
    if done:
        put(f"HTML report:  paam report {shlex.quote(str(out))}/*/ -o report.html")
    failed = [path.name for path, code in codes.items() if code]
    if failed:
        complain(f"{len(failed)} of {len(codes)} runs failed: {', '.join(failed)}; their .log files say why.")
        raise typer.Exit(1)


def _is_held(out: Path) -> bool:
    return bool(lock_held(out / LOCK_FILE))


def _numbers(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    numbers = [int(part) for part in parts if part.isascii() and part.isdigit() and len(part) < 20]
    if len(set(numbers)) < len(parts):
        raise RecipeError(f"--seeds takes distinct integers such as 0,1,2 (got '{text}').")
    return numbers


def _check(planned: Sequence[Planned]) -> None:
    """Check all variants before the first run. A single variant is checked by its own first run."""
    from paam.runs.directory import check_directory
    from paam.runs.setup import check_recipe, check_seed
    from paam.runs.sweep import check_variants, is_started

    first = {job.variant: job for job in reversed(planned)}
    recipes = {variant: load_recipe(job.recipe, job.overrides) for variant, job in reversed(first.items())}
    for variant, recipe in recipes.items():
        check_recipe(recipe)
        job = first[variant]
        trusted = job.common.trust_code or is_named(job.overrides)
        check_trusted(recipe.model.name, f"The recipe {job.recipe}", trusted=trusted, or_named=True)
    for job in planned:
        check_seed(job.seed)
        check_directory(job.out, resume=is_started(job), overwrite=False)
    to_try = {variant: recipe for variant, recipe in recipes.items() if not is_started(first[variant])}
    if len(recipes) > 1 and to_try:
        put(f"{'checking':9} variants: {len(to_try)}")
        check_variants(to_try)
