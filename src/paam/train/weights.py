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
        _check_kinds(model, stored)
        model.load_state_dict(stored)
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise ArtifactError(f"{key} = {path} cannot be taken up: {one_line(error)}.") from error


def _check_kinds(model: nn.Module, stored: dict[str, Tensor]) -> None:
    """Precision may differ; a cast to numbers of another kind would lose a part of them."""
    for name, value in model.state_dict().items():
        given, wanted = stored.get(name, value).dtype, value.dtype
        if (given.is_complex, given.is_floating_point) != (wanted.is_complex, wanted.is_floating_point):
            raise ValueError(f"{name} holds {given} where the network has {wanted}")
