"""Resume with the run's data and split, or with changed data if the user accepts that."""

from __future__ import annotations

from pathlib import Path

from paam.data import Dataset
from paam.data.differences import as_before, compare
from paam.data.manifest import Manifest, manifest_of, read_manifest
from paam.errors import ArtifactError


def find_same_data(
    data: Dataset, out: Path, folder: Path, digest: str, *, accept: bool
) -> tuple[Dataset, tuple[str, str] | None]:
    """The data with the split of the run in ``out``, whose manifest with this ``digest`` is in a folder.

    Changed data raise an error; with ``accept`` they are used, and known images keep their split. The two strings then
    describe the data before and now; None if nothing differs.
    """
    now = manifest_of(data)
    if now.digest == digest:
        return data, None
    try:
        before = read_manifest(folder, digest)
    except ArtifactError as error:
        raise ArtifactError(
            f"The data differ from those that the run in {out} was trained on, and cannot be compared: {error}"
            " Restore the data or that file, or start over with --overwrite."
        ) from error
    differences = compare(before, now)
    told = "; ".join(differences.words)
    if differences.other_classes:
        raise ArtifactError(
            f"The data differ from those that the run in {out} was trained on: {told}. The classes cannot change,"
            " since the network has one output for each: restore the data, or give another --out."
        )
    if differences.words and not accept:
        raise ArtifactError(
            f"The data differ from those that the run in {out} was trained on: {told}. Restore them, or"
            " accept the change with `paam prune ... --resume --accept-changed-data`, which is then recorded."
        )
    data = as_before(data, differences)
    if not differences.words:
        return data, None
    return data, (_described(before), f"{_described(manifest_of(data))}: {told}")


def _described(manifest: Manifest) -> str:
    parts = ", ".join(f"{name} {len(part.names):,}" for name, part in manifest.parts.items())
    return f"{parts} ({manifest.digest})"
