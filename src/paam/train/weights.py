"""The dense network's weights as a file: what warm-up leaves behind, and what another run begins with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from paam.errors import ArtifactError, one_line
from paam.files import write_atomically


def save_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    plain = {name: value.contiguous().cpu() for name, value in weights.items()}
    write_atomically(path, safetensors.torch.save(plain))


def load_weights(model: nn.Module, path: Path, key: str) -> None:
    """Take up the weights of a dense network that a ``key`` of the recipe names; what does not fit is refused."""
    try:
        with safe_open(path, framework="pt") as file:
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        _check_fit(model, stored)
        model.load_state_dict(stored)
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise ArtifactError(f"{key} = {path} cannot be taken up: {one_line(error)}.") from error


def _check_fit(model: nn.Module, stored: dict[str, Tensor]) -> None:
    """Names and shapes must be the network's. Precision may differ, but a cast to another kind would lose a part."""
    own = model.state_dict()
    missing, unknown = [name for name in own if name not in stored], [name for name in stored if name not in own]
    if missing or unknown:
        lacks, has = (f"{len(names)} ({names[0]})" if names else "none" for names in (missing, unknown))
        raise ValueError(
            f"it belongs to another network: it lacks {lacks} of the tensors, and {has} of its own fit none"
        )
    for name, value in own.items():
        if stored[name].shape != value.shape:
            shapes = f"{tuple(stored[name].shape)} there and {tuple(value.shape)} in the network"
            raise ValueError(f"it is another network's: {name} is {shapes}")
        given, wanted = stored[name].dtype, value.dtype
        if (given.is_complex, given.is_floating_point) != (wanted.is_complex, wanted.is_floating_point):
            raise ValueError(f"{name} holds {given} where the network has {wanted}")
