"""The run directory: check it, create or overwrite it, and decide which recipe changes a resumed run may have."""

from __future__ import annotations

import contextlib
import hashlib
import json
from operator import attrgetter
from pathlib import Path
from typing import Any

from paam.artifacts.export import EXPORTS
from paam.artifacts.saved import PLAN_FILE, WEIGHTS_FILE
from paam.config.recipe import Recipe, load_recipe, recipe_to_toml, recipe_to_tree
from paam.config.settings import OptimizerSettings
from paam.data.manifest import is_manifest, manifests
from paam.errors import ArtifactError, PaamError, reason
from paam.events import VERSION, Changed, End, Event, Start, of_kind
from paam.files.durable import left_half_written, remove_left, sync_directory, write_atomically
from paam.files.reading import check_name
from paam.graph.plan import Plan
from paam.runs.checkpoint import checkpoints, is_checkpoint
from paam.runs.failures import LOG_FILE
from paam.runs.progress import PROGRESS_FILE
from paam.runs.record import (
    COMPRESSED_FILE,
    LOCK_FILE,
    RECIPE_FILE,
    RECORD_FILE,
    REPORT_FILE,
    Entry,
    check_start,
    events_of,
    read_until_damage,
)

DENSE_FILE = "dense.safetensors"
"""The network after warm-up."""
CONTROL_FILE = "control.safetensors"
"""The dense control, trained for as long as the pruned network."""
CHECKPOINTS = "checkpoints"
TENSORBOARD = "tensorboard"
WRITTEN = (RECORD_FILE, RECIPE_FILE, DENSE_FILE, CONTROL_FILE, PLAN_FILE, WEIGHTS_FILE, REPORT_FILE, PROGRESS_FILE)
GIVEN = "given"
"""Stands in a record's recipe for a file whose location does not matter."""
OWN_FILES = {LOG_FILE, *WRITTEN, *EXPORTS.values(), CHECKPOINTS, TENSORBOARD, LOCK_FILE}
REPLACED = "replaced"
"""The one event of a record whose run is being overwritten."""

FILES = ("data.directory", "model.weights", "distill.teacher", "target.widths")
"""Recipe keys that name files; the files may have moved when a run is resumed."""
ENVIRONMENT = "environment."
Changes = dict[str, tuple[Any, Any]]
"""Recipe key, or "environment." plus a fact about the machine -> before, now."""


def check_directory(out: Path, *, resume: bool, overwrite: bool) -> None:
    """Refuse a directory in which a run may not be started, resumed or overwritten."""
    if resume and overwrite:
        raise ArtifactError("--resume and --overwrite contradict each other; give one of them.")
    check_name(out)
    try:
        if out.exists() and not out.is_dir():
            raise ArtifactError(f"{out} is a file; give a directory with --out.")
        names = _names(out) if out.is_dir() else set()
    except OSError as error:
        raise ArtifactError(f"{out} cannot be a run directory: {error.strerror}; choose another --out.") from error
    locked = LOCK_FILE in names  # a run killed before it wrote anything else
    names -= {LOCK_FILE}
    if names and not (resume or overwrite):
        raise ArtifactError(
            f"The directory {out} is not empty; continue with --resume, start over with --overwrite,"
            " or choose another --out."
        )
    if COMPRESSED_FILE in names and RECORD_FILE not in names:
        raise ArtifactError(f"The record in {out} is compressed; run 'gunzip {COMPRESSED_FILE}' there first.")
    if resume and not locked and RECORD_FILE not in names:
        raise ArtifactError(f"There is no run in {out} to resume; start it without --resume.")
    if not names <= OWN_FILES and not (out / RECORD_FILE).is_file():
        raise ArtifactError(f"The directory {out} is not a run directory (no {RECORD_FILE}); choose another --out.")
    for folder in (out / CHECKPOINTS, out / TENSORBOARD):
        if folder.is_symlink():
            raise ArtifactError(
                f"{folder} is a link, and paam does not write or delete through links; replace it with a folder."
            )


def never_began(out: Path) -> bool:
    """Whether a directory holds only what a run killed before its first event leaves."""
    return _names(out) <= {LOCK_FILE, RECIPE_FILE, RECORD_FILE} and not started_events(out)


def _names(out: Path) -> set[str]:
    """Names in a directory, without partial files of killed processes."""
    return {path.name for path in out.iterdir()} - {path.name for path in half_written(out)}


def half_written(out: Path) -> list[Path]:
    """Temporary files in a run directory, of a live or killed process; without those of checkpoints."""
    return left_half_written(out, OWN_FILES.__contains__)


def started_events(out: Path) -> list[Event]:
    """The events of the run in a directory, up to the first corrupt line of its record.

    Empty if there is no run, or if it was killed before its first event or while it was overwriting another run.
    """
    if not (out / RECORD_FILE).is_file():
        return []
    entries, damage = read_until_damage(out / RECORD_FILE)
    if damage is not None and not entries:
        raise damage
    if not entries or _is_replaced(entries):
        return []
    check_start(entries[0], out / RECORD_FILE)
    return events_of(entries)


def has_checkpoints(out: Path) -> bool:
    """Whether there are checkpoints to resume from; those of a run that was being overwritten do not count."""
    record = out / RECORD_FILE
    replaced = record.is_file() and _is_replaced(read_until_damage(record)[0])
    return bool(checkpoints(out / CHECKPOINTS)) and not replaced


def _is_replaced(entries: list[Entry]) -> bool:
    return any(entry.line["event"] == REPLACED for entry in entries[:1])


def clear(out: Path, recipe: Recipe) -> None:
    """Reset a run directory to the recipe and a placeholder record; files that are not paam's stay.

    The record identifies a run directory, so there always is one: first it says that this run is being overwritten,
    then the new run's first event replaces it. The old run's checkpoints are deleted from the disk before that, or
    a power failure could bring them back into the new run.
    """
    record, folder = out / RECORD_FILE, out / CHECKPOINTS
    command = None
    if record.exists():
        with contextlib.suppress(ArtifactError):  # unreadable: overwrite it anyway
            command = next((entry.line.get("command") for entry in read_until_damage(record)[0]), None)
        marker = {"event": REPLACED, "version": VERSION, "command": command}
        write_atomically(record, f"{json.dumps(marker)}\n".encode())
    try:
        boards = (out / TENSORBOARD).glob("events.out.tfevents.*")
        exported = [out / name for name in EXPORTS.values()]  # of the network that is being overwritten
        unreadable = folder.glob("epoch-*.unreadable")
        replaced = [out / name for name in WRITTEN if name != RECORD_FILE]
        for path in (*checkpoints(folder), *unreadable, *replaced, *boards, *exported, *manifests(folder)):
            path.unlink(missing_ok=True)
        if folder.is_dir():
            sync_directory(folder)
    except OSError as error:
        raise ArtifactError(f"The run directory {out} cannot be created: {reason(error)}.") from error
    tidy(out)
    write_recipe(out, recipe)


def tidy(out: Path) -> None:
    """Remove partial files of killed processes and the log of a failure. Call only while holding the lock."""
    try:
        (out / LOG_FILE).unlink(missing_ok=True)
        remove_left(out, OWN_FILES.__contains__)
        if (out / CHECKPOINTS).is_dir():
            remove_left(out / CHECKPOINTS, lambda name: is_checkpoint(name) or is_manifest(name))
    except OSError as error:
        raise ArtifactError(f"The run directory {out} cannot be written: {reason(error)}.") from error


def write_recipe(out: Path, recipe: Recipe) -> None:
    write_atomically(out / RECIPE_FILE, recipe_to_toml(recipe).encode())


def portable(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain data without file locations, which may change: a started run has the content already.

    For the user's weights and teacher it only says whether they are set; for widths it has a hash of the plan.
    """
    tree: dict[str, Any] = json.loads(json.dumps(recipe_to_tree(recipe)))
    del tree["data"]["directory"], tree["data"]["workers"]
    tree["model"]["weights"] = None if recipe.model.weights is None else GIVEN
    tree["distill"]["teacher"] = None if recipe.distill.teacher is None else GIVEN
    if recipe.target.widths is not None:
        plan = Plan.read(Path(recipe.target.widths))
        digest = hashlib.sha256(json.dumps(plan.counts, sort_keys=True).encode()).hexdigest()[:12]
        tree["target"]["widths"] = f"{plan.kept_filters} of {plan.all_filters} filters ({digest})"
    return tree


def find_moved_files(out: Path, recipe: Recipe) -> Changes:
    """Files that have moved since the run was started, compared with the recipe in its directory."""
    try:
        before = load_recipe(str(out / RECIPE_FILE))
    except PaamError:  # edited by the user; a run does not depend on this copy
        return {}
    paths = {key: (attrgetter(key)(before), attrgetter(key)(recipe)) for key in FILES}
    return {f"{ENVIRONMENT}{key}": pair for key, pair in paths.items() if pair[0] != pair[1]}


def find_changes(out: Path, events: list[Event], recipe: Recipe, seed: int) -> Changes:
    """Differences between a recipe and the one that the run in ``out`` used so far; forbidden changes raise."""
    start = of_kind(events, Start)[0]
    later = [pair for event in of_kind(events, Changed) for pair in event.changes.items()]
    recipe_keys = {key: now for key, (_, now) in later if not key.startswith(ENVIRONMENT)}
    followed = _flat(start.recipe) | recipe_keys
    given = _flat(portable(recipe))
    keys = [*given, *(key for key in followed if key not in given)]
    changes = {key: (followed.get(key), given.get(key)) for key in keys if followed.get(key) != given.get(key)}
    refused = [f"{key} = {before!r}" for key, (before, _) in changes.items() if not may_change(key)]
    if start.seed != seed:
        refused.insert(0, f"seed = {start.seed!r}")
    if refused:
        raise ArtifactError(
            f"The run in {out} was started with another recipe or seed ({', '.join(refused)}); resume with those,"
            " or give another --out. Only the optimisers' settings, prune.penalty, data.batch_size,"
            " [train] and file locations may change on resume."
        )
    if changes and of_kind(events, End):
        raise ArtifactError(f"The run in {out} is finished; {', '.join(changes)} can no longer change.")
    return changes


def find_moves(events: list[Event], now: dict[str, str]) -> Changes:
    """Differences in machine and versions from those that the run used so far."""
    had = {key: getattr(of_kind(events, Start)[0], key) for key in now}
    for event in of_kind(events, Changed):
        moved = {key.removeprefix(ENVIRONMENT): pair[1] for key, pair in event.changes.items()}
        had |= {key: value for key, value in moved.items() if key in had}
    return {f"{ENVIRONMENT}{key}": (had[key], value) for key, value in now.items() if had[key] != value}


def may_change(key: str) -> bool:
    """Whether a recipe key may change on resume: how the network is trained, not what it is or is pruned to."""
    section, _, name = key.partition(".")
    if isinstance(getattr(Recipe(), section, None), OptimizerSettings):
        return name != "optimizer"  # its state does not fit another optimiser
    return section in ("description", "train") or key in ("prune.penalty", "data.batch_size")


def _flat(tree: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for section, values in tree.items():
        flat |= {f"{section}.{key}": v for key, v in values.items()} if isinstance(values, dict) else {section: values}
    return flat
