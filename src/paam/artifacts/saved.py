"""Save and load pruned networks: weights and plan in one safetensors file. No pickle, no code.

One file, so that a single rename replaces the old network atomically. The ``plan.json`` next to it is a readable copy,
which ``target.widths`` of another run can use.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paam.errors import ArtifactError, GraphError
from paam.files.durable import make_directory, remove_left, write_atomically
from paam.files.tensors import read_tensors, write_tensors
from paam.graph.network import prepare
from paam.graph.plan import Plan, is_typed, recall_plan

PLAN_FILE = "plan.json"
WEIGHTS_FILE = "model.safetensors"
KIND = "weights"


def save(small: nn.Module, directory: str | Path) -> None:
    """Save a pruned network into a directory: ``model.safetensors``, and a copy of its plan as ``plan.json``.

    Atomic: if it is interrupted, the directory has either the earlier network or this one.
    """
    plan, directory = _plan_of(small), Path(directory)
    make_directory(directory)
    with contextlib.suppress(OSError):  # leftovers of a killed process; harmless
        remove_left(directory, (WEIGHTS_FILE, PLAN_FILE).__contains__)
    write_network(small, directory / WEIGHTS_FILE)
    write_atomically(directory / PLAN_FILE, plan.to_json().encode())


def write_network(small: nn.Module, path: Path) -> None:
    """Write one file for :func:`load`."""
    write_tensors(path, KIND, small.state_dict(), {"plan": _plan_of(small).to_json()})


def _plan_of(small: nn.Module) -> Plan:
    plan = recall_plan(small)
    if plan is None:
        raise ArtifactError("Only networks from Pruner.compact(), paam.prune or paam.load can be saved.")
    return plan


def read_network(path: Path) -> tuple[Plan, dict[str, Tensor]]:
    """Read plan and weights from a file of :func:`write_network`."""
    state, header = read_tensors(path, KIND)
    plan = header.get("plan")
    if not isinstance(plan, str) or not plan.startswith("{"):
        raise ArtifactError(f"{path} has no plan for its weights; save the network again with this version of paam.")
    return Plan.from_json(plan, f"The plan in {path}"), state


def load(path: str | Path, model: nn.Module, *, check: bool = True) -> nn.Module:
    """Load the pruned network from a directory or an exported file, in evaluation mode.

    ``model``: an instance of the original architecture; its weights do not matter. ``check``: compare the network with
    the gated one, as in pruning; a network that was pruned with check=False may need check=False here too.
    """
    path = Path(path)
    path = path if path.is_file() else path / WEIGHTS_FILE
    return assemble(model, *read_network(path), path, check=check)


def assemble(model: nn.Module, plan: Plan, state: dict[str, Tensor], path: Path, *, check: bool = True) -> nn.Module:
    """Build the network of a plan with the weights of ``path``, in evaluation mode."""
    try:
        small = rebuild(model, plan, check=check)
    except GraphError as error:
        raise ArtifactError(f"The model does not match the one that {path} was made from: {error}") from error
    expected = small.state_dict()
    wrong = [name for name in expected if name not in state or state[name].shape != expected[name].shape]
    if wrong or len(state) != len(expected):
        name = wrong[0] if wrong else next(name for name in state if name not in expected)
        raise ArtifactError(f"{path} does not fit the model at '{name}'; is it the right one?")
    small.load_state_dict(state)
    return small.eval()


def rebuild(model: nn.Module, plan: Plan, *, check: bool = True) -> nn.Module:
    """Apply a plan, and all earlier plans in it, to a model; weights are the model's."""
    if plan.base is not None:
        model = rebuild(model, plan.base, check=check)
    parameter = next(model.parameters(), torch.empty(0))

    def example(described: Any) -> Any:
        if isinstance(described, list):
            return [example(part) for part in described]
        if isinstance(described, dict) and not is_typed(described):
            return {name: example(part) for name, part in described.items()}
        if isinstance(described, dict):
            dtype = getattr(torch, described["dtype"], None)
            if not isinstance(dtype, torch.dtype):
                raise ArtifactError(f"The plan has an input of the unknown dtype '{described['dtype']}'.")
            return torch.zeros(described["shape"], dtype=dtype, device=parameter.device)
        return torch.zeros(described, dtype=parameter.dtype, device=parameter.device)

    network = prepare(
        model,
        tuple(map(example, plan.inputs)),
        placement=plan.placement,
        streams=plan.streams,
        ignore=plan.ignore,
        keep_class=plan.keep_class,
        on_decision=plan.on_decision,
        check=check,
    )
    return network.compact(plan, check=check)
