"""Save and load the weights of dense networks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor, nn

from paam.errors import ArtifactError, one_line, reason
from paam.files.reading import LARGEST_TENSORS, check_regular
from paam.files.tensors import write_tensors

KIND = "weights"


def save_weights(path: Path, weights: Mapping[str, Tensor], network: str) -> None:
    """``network``: a description stored in the file, such as "dense network after warm-up"."""
    write_tensors(path, KIND, weights, {"network": network})


def load_weights(model: nn.Module, path: Path, key: str) -> None:
    """Load dense weights from the file that a ``key`` of the recipe names; refuse a mismatch."""
    try:
        stored = _read(path)
        _check_fit(model, stored)
        if name := not_finite(stored):
            raise ValueError(f"{name} has values that are not finite")
        model.load_state_dict(stored)
    except (OSError, RuntimeError, ValueError, MemoryError) as error:
        why = reason(error) if isinstance(error, OSError) else one_line(error)
        raise ArtifactError(f"{key} = {path} cannot be loaded: {why}.") from error


def not_finite(weights: Mapping[str, Tensor]) -> str:
    """The name of the first tensor with NaN or infinity; empty if there is none."""
    return next((name for name, value in weights.items() if not value.isfinite().all()), "")


def _read(path: Path) -> dict[str, Tensor]:
    check_regular(path, LARGEST_TENSORS)
    try:
        return safetensors.torch.load_file(path)
    except SafetensorError as error:
        raise ValueError(
            "it is not a valid safetensors file; convert a state_dict with"
            " safetensors.torch.save_file(state_dict, path)"
        ) from error


def _check_fit(model: nn.Module, stored: dict[str, Tensor]) -> None:
    """Check names and shapes. Precision may differ, but not the kind of number, since the cast would lose information.

    Older checkpoints lack the batch counters of batch norms, which are optional.
    """
    own = {name: value for name, value in model.state_dict().items() if name in stored or not _is_counter(name)}
    missing, unknown = [name for name in own if name not in stored], [name for name in stored if name not in own]
    lacks = [f"lacks {len(missing)} of the network's tensors ({missing[0]})"] if missing else []
    has = [f"has {len(unknown)} that the network does not ({unknown[0]})"] if unknown else []
    if lacks or has:
        raise ValueError(f"it is for another network: it {' and '.join([*lacks, *has])}")
    for name, value in own.items():
        if stored[name].shape != value.shape:
            shapes = f"{tuple(stored[name].shape)} there and {tuple(value.shape)} in the network"
            raise ValueError(f"it is for another network: {name} is {shapes}")
        given, wanted = stored[name].dtype, value.dtype
        if (given.is_complex, given.is_floating_point) != (wanted.is_complex, wanted.is_floating_point):
            raise ValueError(f"{name} is {given}, but {wanted} in the network")


def _is_counter(name: str) -> bool:
    return name.rpartition(".")[2] == "num_batches_tracked"
