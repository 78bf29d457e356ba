"""Typed events of a run: the record has one per line, as a JSON object.

The run emits them, and views use nothing else. A record may be corrupt or untrusted: :func:`read_event` refuses
anything that is not a valid event.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar, get_args

from paam.config.schema import InvalidError, OneOf, Range, read

VERSION = 2
"""Version of the record's format."""

LARGEST = 2.0**63
"""Larger numbers are invalid; sums of smaller ones stay finite."""
COUNT = Range(0, LARGEST)
SHARE = Range(0, 1)
PERCENT = Range(0, 100)
POSITIVE = Range(0, LARGEST, above=True)
ANY = Range(-LARGEST, LARGEST)

LONGEST = 10**6
"""Maximum epochs of a run; more are invalid."""

Role = Literal["warmup", "score", "weight", "finetune", "control"]
ROLES: tuple[Role, ...] = get_args(Role)
"""What a phase does, whatever its name: it makes the dense network; trains scorers; trains the network that is pruned;
trains the small network; trains the dense control, which is another network."""

Widths = dict[str, tuple[int, int]]
"""Group -> filters kept, total filters."""


def _check_widths(widths: Widths, name: str) -> None:
    for group, (kept, width) in widths.items():
        if not 0 <= kept <= width or not width:
            raise InvalidError(f"{name}.{group} must be [filters kept, total filters] (got {kept} of {width}).")


@dataclass(frozen=True)
class Cost:
    """Cost of the dense network."""

    params: Annotated[int, POSITIVE]
    macs: Annotated[int, POSITIVE]


@dataclass(frozen=True)
class GroupFacts:
    """``stream``: whether its layers write into a residual stream."""

    width: Annotated[int, COUNT]
    stream: bool = False


@dataclass(frozen=True)
class PhaseFacts:
    """A phase of consecutive epochs; cycles count from 1, with 0 for phases outside of cycles.

    ``role``: one of ROLES. ``label``: what the phase does, in words, if its role does not say enough.
    """

    name: str
    epochs: Annotated[int, COUNT]
    cycle: Annotated[int, COUNT] = 0
    role: Annotated[str, OneOf("", *ROLES)] = ""
    label: str = ""

    @property
    def does(self) -> str:
        return _role(self.role, self.name)


@dataclass(frozen=True)
class Start:
    """The first event of a record. ``monitor``: the images that accuracy is measured on after each epoch.

    ``recipe``: every key with its value. ``method``: its label for tables. ``data``: a hash of the data set, and what
    it covers. ``samples``: images of each split. ``epochs``: total of all ``phases``. ``normalization``: "mean" and
    "std" per channel.
    """

    version: int
    seed: int
    monitor: Annotated[str, OneOf("holdout", "test")]
    hardware: str
    recipe: dict[str, Any]
    method: str
    epochs: Annotated[int, COUNT]
    phases: list[PhaseFacts]
    dense: Cost
    groups: dict[str, GroupFacts]
    paam: str = ""
    python: str = ""
    torch: str = ""
    commit: str = ""
    device: str = ""
    command: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    samples: dict[str, int] = field(default_factory=dict)
    classes: list[str] = field(default_factory=list)
    normalization: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.epochs != sum(phase.epochs for phase in self.phases):
            raise InvalidError(f"start.epochs must be the total of all phases (got {self.epochs}).")
        if self.epochs > LONGEST:
            raise InvalidError(f"start.epochs must be at most {LONGEST:,} (got {self.epochs}).")

    def setting(self, key: str) -> Any:
        """A value of the recipe by a key such as "model.name"; None if there is none."""
        return setting(self.recipe, key)


@dataclass(frozen=True)
class Resumed:
    """A run is resumed; not part of records. The ``told`` events that follow it are old ones, repeated."""

    told: Annotated[int, COUNT]
    epoch: Annotated[int, COUNT]
    step: Annotated[int, COUNT] = 0
    skipped: list[str] = field(default_factory=list)
    """Skipped checkpoints, which could not be read."""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Changed:
    """Settings and environment facts that changed when a run was resumed: key -> before, now."""

    epoch: Annotated[int, COUNT]
    changes: dict[str, tuple[Any, Any]]
    step: Annotated[int, COUNT] = 0
    command: str = ""


@dataclass(frozen=True)
class Epoch:
    """A finished epoch, counted from 0. ``accuracy``: in percent, None if there are no images to measure on.

    ``phase``: name of its phase; ``role`` and ``label`` are those of the phase.
    """

    epoch: Annotated[int, COUNT]
    phase: str
    cycle: Annotated[int, COUNT]
    loss: Annotated[float, ANY]
    lr: Annotated[float, COUNT]
    accuracy: Annotated[float | None, PERCENT]
    kept_params: Annotated[float, SHARE]
    kept_macs: Annotated[float, SHARE]
    seconds: Annotated[float, COUNT]
    role: Annotated[str, OneOf("", *ROLES)] = ""
    label: str = ""

    @property
    def does(self) -> str:
        return _role(self.role, self.phase)


@dataclass(frozen=True)
class Scores:
    """The score of every filter, by group, after the last score epoch of a cycle."""

    epoch: Annotated[int, COUNT]
    cycle: Annotated[int, COUNT]
    scores: dict[str, list[Annotated[float, ANY]]]


@dataclass(frozen=True)
class Selected:
    """A selection. ``threshold``: None if scores do not decide between groups. ``accuracy``: before weights adapt."""

    epoch: Annotated[int, COUNT]
    cycle: Annotated[int, COUNT]
    threshold: Annotated[float | None, Range(infinite=True)]
    kept_params: Annotated[float, SHARE]
    kept_macs: Annotated[float, SHARE]
    kept_filters: Widths
    accuracy: Annotated[float | None, PERCENT] = None

    def __post_init__(self) -> None:
        _check_widths(self.kept_filters, "selection.kept_filters")


@dataclass(frozen=True)
class Vanished:
    """Dead batch-norm channels of a dense network: scales near 0; ``layers``: those with dead channels only."""

    epoch: Annotated[int, COUNT]
    scales: Annotated[int, COUNT]
    of: Annotated[int, POSITIVE]
    layers: str


@dataclass(frozen=True)
class Failed:
    """Why a run ended early."""

    epoch: Annotated[int, COUNT]
    reason: str


@dataclass(frozen=True)
class Milliseconds:
    """Median and quartiles."""

    median: Annotated[float, POSITIVE]
    low: Annotated[float, COUNT]
    high: Annotated[float, COUNT]


@dataclass(frozen=True)
class Outcome:
    """Final measurements of a network. ``uncounted``: operations that MACs and parameters do not count.

    ``layers``: MACs of each layer that has any.

    ``trained``, for the dense network: as many epochs as the pruned one, in warm-up only, or not at all.
    """

    accuracy: Annotated[float, PERCENT]
    params: Annotated[int, COUNT]
    macs: Annotated[int, COUNT]
    latency_ms: Milliseconds
    uncounted: dict[str, int] = field(default_factory=dict)
    trained: Annotated[str, OneOf("", "as long", "warm-up", "as given")] = ""
    layers: dict[str, Annotated[int, COUNT]] = field(default_factory=dict)


@dataclass(frozen=True)
class End:
    """The last event of a finished run."""

    latency_batch: Annotated[int, COUNT]
    kept_filters: Widths
    dense: Outcome
    pruned: Outcome

    def __post_init__(self) -> None:
        _check_widths(self.kept_filters, "end.kept_filters")
        for name in ("params", "macs"):
            if not getattr(self.dense, name):
                raise InvalidError(f"end.dense.{name} must be > 0 (got 0).")


Event = Start | Resumed | Changed | Epoch | Scores | Selected | Vanished | Failed | End

NAMES: dict[type, str] = {
    Start: "start",
    Resumed: "resumed",
    Changed: "changed",
    Epoch: "epoch",
    Scores: "scores",
    Selected: "selection",
    Vanished: "vanished",
    Failed: "failed",
    End: "end",
}
"""The name of each kind in the record."""
KINDS = {name: kind for kind, name in NAMES.items()}


def _role(role: str, name: str) -> str:
    """Records that do not say the role of a phase name it by its role; empty where it is not known."""
    return role or (name if name in ROLES else "")


def setting(recipe: Mapping[str, Any], key: str) -> Any:
    """A value of a recorded recipe by a key such as "model.name"; None if there is none."""
    section, _, name = key.partition(".")
    values = recipe.get(section)
    return values.get(name) if isinstance(values, dict) else None


E = TypeVar("E")


def read_event(line: Any) -> Event | None:
    """Parse one line of a record; None if it is of a kind of a later version."""
    if not isinstance(line, Mapping) or not isinstance(line.get("event"), str):
        raise InvalidError("it is not an event.")
    kind = KINDS.get(line["event"])
    if kind is None:
        return None
    event: Event = read(kind, line, line["event"], extra=True)
    return event


def as_line(event: Event) -> dict[str, Any]:
    """An event as the plain data of its line in the record."""
    # Not by asdict(), which copies a million scores one by one.
    plain = {item.name: getattr(event, item.name) for item in dataclasses.fields(event)}
    return {"event": NAMES[type(event)], **{key: _plain(value) for key, value in plain.items()}}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, list) and value and dataclasses.is_dataclass(value[0]):
        return [_plain(item) for item in value]
    if isinstance(value, dict) and dataclasses.is_dataclass(next(iter(value.values()), None)):
        return {key: _plain(item) for key, item in value.items()}
    return value


def of_kind(events: Iterable[Event], kind: type[E]) -> list[E]:
    return [event for event in events if isinstance(event, kind)]


def last(events: Iterable[Event], kind: type[E]) -> E | None:
    return next(reversed(of_kind(events, kind)), None)
