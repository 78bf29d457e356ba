"""The dense network's weights as a file: what warm-up leaves behind, and what another run begins with."""

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
    """``network``: what the file says that it holds, such as "dense network after warm-up"."""
    write_tensors(path, KIND, weights, {"network": network})


def load_weights(model: nn.Module, path: Path, key: str) -> None:
    """Take up the weights of a dense network that a ``key`` of the recipe names; what does not fit is refused."""
    try:
        stored = _read(path)
        _check_fit(model, stored)
        if name := not_finite(stored):
            raise ValueError(f"{name} holds values that are not finite")
        model.load_state_dict(stored)
    except (OSError, RuntimeError, ValueError, MemoryError) as error:
        why = reason(error) if isinstance(error, OSError) else one_line(error)
        raise ArtifactError(f"{key} = {path} cannot be loaded: {why}.") from error


def not_finite(weights: Mapping[str, Tensor]) -> str:
    """The first tensor with NaN or infinity in it; empty where there is none."""
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
    """Names and shapes must be the network's. Precision may differ, but a cast to another kind would lose a part.

    Older checkpoints do not have the counters of batch norms; torch does without them.
    """
    own = {name: value for name, value in model.state_dict().items() if name in stored or not _is_counter(name)}
    missing, unknown = [name for name in own if name not in stored], [name for name in stored if name not in own]
    lacks = [f"lacks {len(missing)} of the network's tensors ({missing[0]})"] if missing else []
    has = [f"has {len(unknown)} that the network does not ({unknown[0]})"] if unknown else []
    if lacks or has:
        raise ValueError(f"it belongs to another network: it {' and '.join([*lacks, *has])}")
    for name, value in own.items():
        if stored[name].shape != value.shape:
            shapes = f"{tuple(stored[name].shape)} there and {tuple(value.shape)} in the network"
            raise ValueError(f"it is another network's: {name} is {shapes}")
        given, wanted = stored[name].dtype, value.dtype
        if (given.is_complex, given.is_floating_point) != (wanted.is_complex, wanted.is_floating_point):
            raise ValueError(f"{name} holds {given} where the network has {wanted}")


def _is_counter(name: str) -> bool:
    return name.rpartition(".")[2] == "num_batches_tracked"
