"""Compare a data set with the one that a run was trained on so far, and restore the earlier split."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paam.data.dataset import Dataset, Split
from paam.data.manifest import Manifest, splits
from paam.data.stream import ImageFiles
from paam.errors import DataError


class _Image(NamedTuple):
    """``number``: index among all images of its data set, part by part. ``label``: the current name of the class."""

    part: str
    number: int
    label: str
    name: str
    mark: bytes


Pair = tuple[_Image, _Image]
"""One image, before and now."""


@dataclass(frozen=True)
class Differences:
    """``words``: descriptions of the differences; empty if only the split differs. ``classes``: in the earlier order.

    ``order``: by part, the indices of its images among all current ones. ``other_classes``: some are added or removed.
    """

    words: list[str]
    classes: tuple[str, ...]
    order: dict[str, list[int]]
    other_classes: bool


def compare(before: Manifest, now: Manifest) -> Differences:
    """Match images by name and content, else by content, else by name; file sizes can stand for contents.

    A known image stays in its part, so that no training image is used for testing.
    """
    comparable = before.covers == now.covers
    renamed = _renamed_classes(before, now) if comparable else {}
    old = _images(before, renamed, marked=comparable)
    new = _images(now, {}, marked=comparable)
    by_content = (lambda image: image.mark) if comparable and now.covers == "contents" else _name_and_mark
    same, old, new = _matched(old, new, lambda image: (image.label, image.name, image.mark))
    moved, old, new = _matched(old, new, by_content)
    edited, removed, added = _matched(old, new, lambda image: (image.label, image.name))
    relabelled = [pair for pair in moved if pair[0].label != pair[1].label]
    other_names = [pair for pair in moved if pair[0].label == pair[1].label]

    classes = tuple(renamed.get(name, name) for name in before.classes)
    gone, unknown = (
        [c for c in one if c not in other] for one, other in ((classes, now.classes), (now.classes, classes))
    )
    words = [
        *(f"class {name!r} renamed to {renamed[name]!r}" for name in before.classes if name in renamed),
        *(f"class {name!r} removed" for name in gone),
        *(f"class {name!r} added" for name in unknown),
        *_counted("image", "added", added, _path),
        *_counted("image", "removed", removed, _path),
        *_counted("label", "changed", relabelled, _other_label),
        *_counted("image", "changed", edited, lambda pair: _path(pair[1])),
        *_counted("image", "renamed", other_names, lambda pair: f"{_path(pair[0])} is {_path(pair[1])}"),
    ]
    if not comparable:
        words.append(f"images identified by their {now.covers}, by their {before.covers} before")
    kept = sorted((pair[0].number, pair[0].part, pair[1].number) for pair in (*same, *moved, *edited))
    order: dict[str, list[int]] = {name: [] for name in before.parts}
    for _, part, index in kept:
        order[part].append(index)
    for image in added:
        order.setdefault(image.part, []).append(image.number)
    return Differences(words, classes, order, bool(gone or unknown))


def as_before(data: Dataset, differences: Differences) -> Dataset:
    """The compared data set, with the earlier split and order of classes."""
    everything = _pooled(list(splits(data).values()))
    now_at = torch.tensor([differences.classes.index(name) for name in data.classes])
    everything = replace(everything, labels=now_at[everything.labels])
    parts = {name: everything.take(torch.tensor(indices).long()) for name, indices in differences.order.items()}
    if empty := [name for name, split in parts.items() if not len(split)]:
        raise DataError(
            f"None of the images in this run's {empty[0]} set is left; restore the data, or start over with"
            " --overwrite."
        )
    holdout = parts.get("holdout")
    return replace(data, train=parts["train"], holdout=holdout, test=parts["test"], classes=differences.classes)


def _images(manifest: Manifest, renamed: dict[str, str], *, marked: bool) -> list[_Image]:
    names = [renamed.get(name, name) for name in manifest.classes]
    found: list[_Image] = []
    for part, listed in manifest.parts.items():
        marks = listed.marks.numpy()
        for name, label, mark in zip(listed.names, listed.labels.tolist(), marks, strict=True):
            found.append(_Image(part, len(found), names[label], name, mark.tobytes() if marked else b""))
    return found


def _matched(
    before: Iterable[_Image], now: Iterable[_Image], key: Callable[[_Image], Any]
) -> tuple[list[Pair], list[_Image], list[_Image]]:
    """Pairs with the same key, each image in at most one; and the unmatched rest of both."""
    waiting: dict[Any, deque[_Image]] = defaultdict(deque)
    for image in before:
        waiting[key(image)].append(image)
    pairs, new = [], []
    for image in now:
        if alike := waiting.get(key(image)):
            pairs.append((alike.popleft(), image))
        else:
            new.append(image)
    left = sorted((image for images in waiting.values() for image in images), key=lambda image: image.number)
    return pairs, left, new


def _renamed_classes(before: Manifest, now: Manifest) -> dict[str, str]:
    """Renamed classes: removed ones, with the new one that has more than half of their images."""
    had, have = _by_class(before), _by_class(now)
    renamed: dict[str, str] = {}
    for name in before.classes:
        if name in now.classes:
            continue
        shared = {
            other: (had[name] & have[other]).total()
            for other in now.classes
            if other not in before.classes and other not in renamed.values()
        }
        if shared and 2 * max(shared.values()) > had[name].total():
            renamed[name] = max(shared, key=lambda other: shared[other])
    return renamed


def _by_class(manifest: Manifest) -> dict[str, Counter[Any]]:
    counts: dict[str, Counter[Any]] = {name: Counter() for name in manifest.classes}
    for image in _images(manifest, {}, marked=True):
        counts[image.label][image.mark if manifest.covers == "contents" else _name_and_mark(image)] += 1
    return counts


def _name_and_mark(image: _Image) -> tuple[str, bytes]:
    """The image's name without its half (train or test)."""
    return image.name.rpartition("/")[2], image.mark


def _path(image: _Image) -> str:
    half, slash, name = image.name.rpartition("/")
    return f"{half}{slash}{image.label}/{name}"


def _other_label(pair: Pair) -> str:
    before, now = pair
    return f"{now.name} was {before.label!r}, is {now.label!r}"


def _counted(what: str, happened: str, several: Sequence[Any], named: Callable[[Any], str]) -> list[str]:
    """ "3 images added (train/cat/9.png, ...)": the number and the first one."""
    if not several:
        return []
    more = ", ..." if len(several) > 1 else ""
    return [f"{len(several):,} {what}{'s'[: len(several) > 1]} {happened} ({named(several[0])}{more})"]


def _pooled(parts: Sequence[Split]) -> Split:
    """The images of several splits, concatenated."""
    first = parts[0].images
    images: Tensor | ImageFiles
    if isinstance(first, ImageFiles):
        files = [file for part in parts if isinstance(part.images, ImageFiles) for file in part.images.files]
        images = ImageFiles(files, first.side, first.decode, first.workers)
    else:
        images = torch.cat([part.images for part in parts if isinstance(part.images, Tensor)])
    names = tuple(name for part in parts for name in part.names)
    return Split(images, torch.cat([p.labels for p in parts]), names, torch.cat([p.marks for p in parts]))
