"""Pruned networks on disk: the plan as JSON, the weights as safetensors. No pickle, nothing that runs code."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from paam.errors import ArtifactError
from paam.files import write_atomically
from paam.network import prepare
from paam.plan import Plan

PLAN_FILE = "plan.json"
WEIGHTS_FILE = "model.safetensors"
FORMAT = "paam-weights"


def save(small: nn.Module, directory: str | Path) -> None:
    """Write a pruned network into a directory: ``plan.json`` and ``model.safetensors``."""
    plan = getattr(small, "paam_plan", None)
    if not isinstance(plan, Plan):
        raise ArtifactError("Only networks made by Pruner.compact(), paam.prune or paam.load can be saved here.")
    directory = Path(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArtifactError(f"The directory {directory} cannot be made: {error.strerror}.") from error
    write_weights(directory / WEIGHTS_FILE, small.state_dict(), plan.fingerprint)
    write_atomically(directory / PLAN_FILE, plan.to_json().encode())


def load(directory: str | Path, model: nn.Module) -> nn.Module:
    """The pruned network of a directory. ``model``: a fresh one of the original architecture, which is not changed."""
    directory = Path(directory)
    plan = Plan.read(directory / PLAN_FILE)
    parameter = next(model.parameters(), torch.empty(0))
    examples = tuple(torch.zeros(shape, dtype=parameter.dtype, device=parameter.device) for shape in plan.inputs)
    network = prepare(model, examples, placement=plan.placement, streams=plan.streams)
    small = network.compact(plan)
    state = read_weights(directory / WEIGHTS_FILE, plan.fingerprint)
    expected = small.state_dict()
    wrong = [name for name in expected if name not in state or state[name].shape != expected[name].shape]
    if wrong or len(state) != len(expected):
        name = wrong[0] if wrong else next(name for name in state if name not in expected)
        raise ArtifactError(f"{directory / WEIGHTS_FILE} does not fit its plan at '{name}'; the two were mixed up.")
    small.load_state_dict(state)
    return small


def write_weights(path: Path, state: dict[str, Tensor], fingerprint: str) -> None:
    plain = {name: value.detach().contiguous().cpu() for name, value in state.items()}
    metadata = {"format": FORMAT, "version": "1", "fingerprint": fingerprint}
    write_atomically(path, safetensors.torch.save(plain, metadata))


def read_weights(path: Path, fingerprint: str) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"The weights {path} cannot be read: {error}.") from error
    if metadata.get("format") != FORMAT or metadata.get("fingerprint") != fingerprint:
        raise ArtifactError(f"The weights {path} belong to another network than the plan beside them.")
    return state
