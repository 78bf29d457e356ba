"""The run directory: whose it is, who works in it, and with which changes to its recipe a run may go on."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import Any

from paam.artifacts import PLAN_FILE, WEIGHTS_FILE
from paam.errors import ArtifactError, PaamError
from paam.exporting import EXPORTS
from paam.files import check_name, temporary_name, write_atomically
from paam.plan import Plan
from paam.progress import PROGRESS_FILE
from paam.recipe import Recipe, load_recipe, recipe_to_toml
from paam.record import LOCK_FILE, RECIPE_FILE, RECORD_FILE, Event, of_kind, read_record
from paam.settings import OptimizerSettings
from paam.train.checkpoint import checkpoints

try:
    import fcntl
except ImportError:  # not a Unix: runs are not kept apart there
    fcntl = None  # type: ignore[assignment]

DENSE_FILE = "dense.safetensors"
CHECKPOINTS = "checkpoints"
TENSORBOARD = "tensorboard"
REPORT_FILE = "report.html"
WRITTEN = (RECORD_FILE, RECIPE_FILE, DENSE_FILE, PLAN_FILE, WEIGHTS_FILE, REPORT_FILE, PROGRESS_FILE)
OWN_FILES = {*WRITTEN, *EXPORTS.values(), CHECKPOINTS, TENSORBOARD, LOCK_FILE}

FILES = ("data.directory", "model.weights", "distill.teacher", "target.widths")
"""Keys of a recipe that name files; those may lie elsewhere when a run goes on."""
ENVIRONMENT = "environment."
Changes = dict[str, list[Any]]
"""Key of the recipe, or "environment." and what a run depends on -> [before, now]."""


class RunLock:
    """One process at a time in a run directory. The system frees the lock when its process ends, however it ends."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self._descriptor: int | None = None

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None

    def take(self) -> None:
        """Make the directory, if need be, and claim it; again is harmless."""
        if self._descriptor is not None:
            return
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.out / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise ArtifactError(f"The run directory {self.out} cannot be written: {error.strerror}.") from error
        try:
            _lock(self._descriptor)
        except BlockingIOError as error:
            holder = os.pread(self._descriptor, 20, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._descriptor)
            self._descriptor = None
            raise ArtifactError(
                f"Another process (number {holder}) is at work on the run in {self.out}; wait for it or stop it."
            ) from error
        with contextlib.suppress(OSError):  # a full disk: the number is only for messages
            os.ftruncate(self._descriptor, 0)
            os.write(self._descriptor, str(os.getpid()).encode())


def _lock(descriptor: int, attempts: int = 5) -> None:
    """Lock a file or raise BlockingIOError; where files cannot be locked, nothing happens."""
    if fcntl is None:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if attempts == 1:
            raise
        time.sleep(0.05)  # somebody may only be looking whether the lock is held
        _lock(descriptor, attempts - 1)
    except OSError:
        return


def check_directory(out: Path, *, resume: bool, overwrite: bool) -> None:
    """Refuse a directory that a run may not begin, go on or start over in."""
    if resume and overwrite:
        raise ArtifactError("--resume and --overwrite contradict each other; give one of them.")
    check_name(out)
    try:
        if out.exists() and not out.is_dir():
            raise ArtifactError(f"{out} is a file; give a directory with --out.")
        names = {path.name for path in out.iterdir()} if out.is_dir() else set()
    except OSError as error:
        raise ArtifactError(f"{out} cannot be a run directory: {error.strerror}; choose another --out.") from error
    locked = LOCK_FILE in names  # a run that was killed before it wrote anything else
    names -= {LOCK_FILE, *(path.name for path in _half_written(out))}
    if names and not (resume or overwrite):
        raise ArtifactError(
            f"The directory {out} is not empty; go on with --resume, start over with --overwrite,"
            " or choose another --out."
        )
    if resume and not locked and RECORD_FILE not in names:
        raise ArtifactError(f"There is no run in {out} to resume; start it without --resume.")
    if not names <= OWN_FILES and not (out / RECORD_FILE).is_file():
        raise ArtifactError(f"The directory {out} holds something else than a run; choose another --out.")


def never_began(out: Path) -> bool:
    """Whether a directory holds no more than a run leaves that was killed before its first event."""
    names = {path.name for path in out.iterdir()} - {LOCK_FILE, RECIPE_FILE, *(p.name for p in _half_written(out))}
    return names <= {RECORD_FILE} and not begun(out)


def begun(out: Path) -> list[Event]:
    """The record of a run that has started here; empty when there is none, or it was killed before its first event."""
    events = read_record(out / RECORD_FILE) if (out / RECORD_FILE).is_file() else []
    if events and not _is_start(events[0]):
        raise ArtifactError(f"The record {out / RECORD_FILE} is damaged: it does not begin with the start of a run.")
    return events


def _is_start(event: Event) -> bool:
    """Whether an event says what a run must know to go on, and a view to show it."""
    needed = {"recipe": dict, "seed": int, "epochs": int, "hardware": str, "dense": dict, "groups": dict}
    whole = event["event"] == "start" and all(type(event.get(key)) is kind for key, kind in needed.items())
    return whole and all(type(event["dense"].get(key)) is int for key in ("params", "macs"))


def clear(out: Path, recipe: Recipe) -> None:
    """An empty run directory but for the recipe; what is not paam's stays."""
    try:
        old = [out / name for name in WRITTEN]
        boards = (out / TENSORBOARD).glob("events.out.tfevents.*")
        exported = [out / name for name in EXPORTS.values()]  # of the network that is being replaced
        unreadable = (out / CHECKPOINTS).glob("epoch-*.unreadable")
        # Killed on the way, it must not leave checkpoints without a record, nor a finished record without its network.
        for path in (*checkpoints(out / CHECKPOINTS), *unreadable, *old, *boards, *exported):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise ArtifactError(f"The run directory {out} cannot be made: {error.strerror}.") from error
    tidy(out)
    write_recipe(out, recipe)


def tidy(out: Path) -> None:
    """Remove what a killed process left half written; only the holder of the lock may."""
    try:
        for path in (*_half_written(out), *(out / CHECKPOINTS).glob(temporary_name(Path("epoch-*")).name)):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise ArtifactError(f"The run directory {out} cannot be written: {error.strerror}.") from error


def _half_written(out: Path) -> list[Path]:
    return [temporary_name(out / name) for name in sorted(OWN_FILES)]


def write_recipe(out: Path, recipe: Recipe) -> None:
    write_atomically(out / RECIPE_FILE, recipe_to_toml(recipe).encode())


def portable(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain data, without where files lie: a begun run has what was in them, or finds them elsewhere.

    Of weights and a teacher of one's own it has that there are some; of widths, a name for what they say.
    """
    tree: dict[str, Any] = json.loads(json.dumps(asdict(recipe)))
    del tree["data"]["directory"], tree["data"]["workers"]
    tree["model"]["weights"] = None if recipe.model.weights is None else "of one's own"
    tree["distill"]["teacher"] = None if recipe.distill.teacher is None else "of one's own"
    if recipe.target.widths is not None:
        plan = Plan.read(Path(recipe.target.widths))
        digest = hashlib.sha256(json.dumps(plan.counts, sort_keys=True).encode()).hexdigest()[:12]
        tree["target"]["widths"] = f"{plan.kept_filters} of {plan.all_filters} filters ({digest})"
    return tree


def find_moved_files(out: Path, recipe: Recipe) -> Changes:
    """Files that a run was given and now finds elsewhere, by the recipe that lies in its directory."""
    try:
        before = load_recipe(str(out / RECIPE_FILE))
    except PaamError:  # somebody's own edit of it is nothing that a run depends on
        return {}
    paths = {key: [attrgetter(key)(one) for one in (before, recipe)] for key in FILES}
    return {f"{ENVIRONMENT}{key}": pair for key, pair in paths.items() if pair[0] != pair[1]}


def find_changes(out: Path, events: list[Event], recipe: Recipe, seed: int) -> Changes:
    """How a recipe differs from the one that the run in ``out`` has followed so far; what may not change is refused."""
    try:
        start = of_kind(events, "start")[0]
        later = [pair for event in of_kind(events, "changed") for pair in event["changes"].items()]
        recipe_keys = {key: now for key, (_, now) in later if not key.startswith(ENVIRONMENT)}
        followed = _flat(start["recipe"]) | recipe_keys
        began_with = start["seed"]
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ArtifactError(
            f"The record {out / RECORD_FILE} is damaged: it lacks its start, recipe or seed."
        ) from error
    given = _flat(portable(recipe))
    keys = [*given, *(key for key in followed if key not in given)]
    changes = {key: [followed.get(key), given.get(key)] for key in keys if followed.get(key) != given.get(key)}
    refused = [f"{key} = {before!r}" for key, (before, _) in changes.items() if not may_change(key)]
    if began_with != seed:
        refused.insert(0, f"seed = {began_with!r}")
    if refused:
        raise ArtifactError(
            f"The run in {out} was started with another recipe or seed ({', '.join(refused)}); go on with those,"
            " or give another --out. Only the optimisers' settings, prune.penalty, [train] and where"
            " files lie may change on the way."
        )
    if changes and of_kind(events, "end"):
        raise ArtifactError(f"The run in {out} is finished; {', '.join(changes)} cannot change any more.")
    return changes


def find_moves(events: list[Event], now: dict[str, str]) -> Changes:
    """How the machine and the versions differ from those that the run has had so far."""
    had = {key: of_kind(events, "start")[0].get(key) for key in now}
    for event in of_kind(events, "changed"):
        moved = {key.removeprefix(ENVIRONMENT): pair[1] for key, pair in event["changes"].items()}
        had |= {key: value for key, value in moved.items() if key in had}
    return {f"{ENVIRONMENT}{key}": [had[key], value] for key, value in now.items() if had[key] != value}


def may_change(key: str) -> bool:
    """Whether a key of the recipe may change on the way: how the network is trained, not what it is or becomes."""
    section, _, name = key.partition(".")
    if isinstance(getattr(Recipe(), section, None), OptimizerSettings):
        return name != "optimizer"  # the state of one is of no use to another
    return section in ("description", "train") or key == "prune.penalty"


def _flat(tree: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for section, values in tree.items():
        flat |= {f"{section}.{key}": v for key, v in values.items()} if isinstance(values, dict) else {section: values}
    return flat
