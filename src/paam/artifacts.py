"""Pruned networks on disk: the plan as JSON, the weights as safetensors. No pickle, nothing that runs code."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

from paam.errors import ArtifactError, GraphError
from paam.files import read_tensors, write_atomically, write_tensors
from paam.network import prepare
from paam.plan import Plan, recall_plan

PLAN_FILE = "plan.json"
WEIGHTS_FILE = "model.safetensors"
KIND = "weights"


def save(small: nn.Module, directory: str | Path) -> None:
    """Write a pruned network into a directory: ``plan.json`` and ``model.safetensors``."""
    plan = recall_plan(small)
    if plan is None:
        raise ArtifactError("Only networks made by Pruner.compact(), paam.prune or paam.load can be saved here.")
    directory = Path(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArtifactError(f"The directory {directory} cannot be made: {error.strerror}.") from error
    write_tensors(directory / WEIGHTS_FILE, KIND, small.state_dict(), {"plan": plan.digest})
    write_atomically(directory / PLAN_FILE, plan.to_json().encode())


def load(path: str | Path, model: nn.Module) -> nn.Module:
    """The pruned network of a directory, or of one exported file, in evaluation mode.

    ``model``: any of the original architecture; its weights do not matter.
    """
    path = Path(path)
    if path.is_file():
        weights = path
        state, header = read_tensors(weights, KIND)
        plan = Plan.from_json(json.dumps(header.get("content")), str(weights))
    else:
        weights = path / WEIGHTS_FILE
        plan = Plan.read(path / PLAN_FILE)
        state, header = read_tensors(weights, KIND)
    if header.get("plan") != plan.digest:
        raise ArtifactError(f"{weights} was written for another plan than the one beside it.")
    try:
        small = rebuild(model, plan)
    except GraphError as error:
        raise ArtifactError(f"The model is not the one that {path} was made from: {error}") from error
    expected = small.state_dict()
    wrong = [name for name in expected if name not in state or state[name].shape != expected[name].shape]
    if wrong or len(state) != len(expected):
        name = wrong[0] if wrong else next(name for name in state if name not in expected)
        raise ArtifactError(f"{weights} does not fit the model at '{name}'; is it the right one?")
    small.load_state_dict(state)
    return small.eval()


def rebuild(model: nn.Module, plan: Plan) -> nn.Module:
    """The structure that a plan makes of a model, through all the prunings before it; weights are the model's."""
    if plan.base is not None:
        model = rebuild(model, plan.base)
    parameter = next(model.parameters(), torch.empty(0))
    examples = tuple(torch.zeros(shape, dtype=parameter.dtype, device=parameter.device) for shape in plan.inputs)
    network = prepare(model, examples, placement=plan.placement, streams=plan.streams, ignore=plan.ignore)
    return network.compact(plan)
