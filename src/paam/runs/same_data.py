"""A run goes on with the data that it was trained on, split as they were; or with others, if that was asked for."""

from __future__ import annotations

from pathlib import Path

from paam.data import Dataset
from paam.data.differences import as_before, compare
from paam.data.manifest import Manifest, manifest_of, read_manifest
from paam.errors import ArtifactError


def find_same_data(
    data: Dataset, out: Path, folder: Path, digest: str, *, accept: bool
) -> tuple[Dataset, tuple[str, str] | None]:
    """The data as the run in ``out`` had them, whose manifest of this ``digest`` lies in a folder.

    Where they are others: refused, or with ``accept`` taken, split as before as far as they are known. The two texts
    then say what the run had and what it has now; None where nothing differs.
    """
    now = manifest_of(data)
    if now.digest == digest:
        return data, None
    try:
        before = read_manifest(folder, digest)
    except ArtifactError as error:
        raise ArtifactError(
            f"The data differ from those that the run in {out} was trained on, and how cannot be determined: {error}"
            " Restore data or file, or start over with --overwrite."
        ) from error
    differences = compare(before, now)
    told = "; ".join(differences.words)
    if differences.other_classes:
        raise ArtifactError(
            f"The data differ from those that the run in {out} was trained on: {told}. Its network has an output for"
            " each class that it began with: restore the data, or give another --out."
        )
    if differences.words and not accept:
        raise ArtifactError(
            f"The data differ from those that the run in {out} was trained on: {told}. Restore them, or continue"
            " with these by `paam prune ... --resume --accept-changed-data`, which the record then says."
        )
    data = as_before(data, differences)
    if not differences.words:
        return data, None
    return data, (_described(before), f"{_described(manifest_of(data))}: {told}")


def _described(manifest: Manifest) -> str:
    parts = ", ".join(f"{name} {len(part.names):,}" for name, part in manifest.parts.items())
    return f"{parts} ({manifest.digest})"
