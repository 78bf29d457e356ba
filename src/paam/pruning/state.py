"""The whole state of a Pruner as a flat dict of tensors, for safetensors or torch.save."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from paam.errors import ArtifactError
from paam.files.reading import parse_json
from paam.graph.plan import Plan
from paam.pruning.gates import Mode
from paam.pruning.select import Selection

if TYPE_CHECKING:
    from paam.pruning.pruner import Pruner

MODEL, OPTIMIZER, FACTS = "model.", "optimizer.", "facts"


def pruner_state(pruner: Pruner) -> dict[str, Tensor]:
    """Copies: "model.*", the network with its scorers and masks; "optimizer.*", of the scorers; "facts", JSON as bytes.

    The facts are the architecture's fingerprint, the mode of the gates, the scorers' learning rates, and the selection.
    """
    state = {f"{MODEL}{name}": value.detach().clone() for name, value in pruner.model.state_dict().items()}
    if pruner.optimizer is not None:
        for number, values in pruner.optimizer.state_dict()["state"].items():
            state |= {f"{OPTIMIZER}{number}.{name}": value.detach().clone() for name, value in values.items()}
    chosen = pruner.selection
    facts = {
        "fingerprint": pruner.network.traced.fingerprint,
        "mode": pruner.gate_mode,
        "lr": None if pruner.optimizer is None else [group["lr"] for group in pruner.optimizer.param_groups],
        "selection": None if chosen is None else {**vars(chosen), "plan": chosen.plan.to_json()},
    }
    state[FACTS] = torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8).clone()
    return state


def restore_pruner(pruner: Pruner, state: Mapping[str, Tensor]) -> None:
    """Load a :func:`pruner_state` into a Pruner that was made with the same arguments."""
    facts = _facts(state)
    if facts["fingerprint"] != pruner.network.traced.fingerprint:
        raise ArtifactError(
            f"The state belongs to another architecture (fingerprint {facts['fingerprint']}, this model has"
            f" {pruner.network.traced.fingerprint}); create the Pruner from the same model as when it was saved."
        )
    weights, own = _part(state, MODEL), pruner.model.state_dict()
    differing = sorted(weights.keys() ^ own.keys())
    differing += [name for name in own if name in weights and own[name].shape != weights[name].shape]
    if differing or (pruner.optimizer is not None and len(pruner.optimizer.param_groups) != len(facts["lr"] or ())):
        raise ArtifactError(
            "The state does not match this Pruner, which was made with other arguments or has another optimiser"
            f" ({', '.join(differing[:3]) or 'optimizer'})."
        )
    remembered = _optimizer_values(state)  # all checks come before any change
    pruner.model.load_state_dict(weights)
    if pruner.optimizer is not None:
        groups = [
            {**group, "lr": lr}
            for group, lr in zip(pruner.optimizer.state_dict()["param_groups"], facts["lr"], strict=True)
        ]
        pruner.optimizer.load_state_dict({"state": remembered, "param_groups": groups})
    if facts["selection"] is None:
        pruner.selection = None
    else:
        pruner.use(facts["selection"])
    pruner.gate_mode = facts["mode"]


def _optimizer_values(state: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    values: dict[int, dict[str, Tensor]] = {}
    for name, value in _part(state, OPTIMIZER).items():
        number, _, key = name.partition(".")
        if not number.isdecimal():
            raise ArtifactError(f"This is not the state of a Pruner: it has an unexpected '{OPTIMIZER}{name}'.")
        values.setdefault(int(number), {})[key] = value.clone()
    return values


def _facts(state: Mapping[str, Tensor]) -> dict[str, Any]:
    try:
        facts: dict[str, Any] = parse_json(bytes(state[FACTS].tolist()).decode())
        facts = {name: facts[name] for name in ("fingerprint", "mode", "lr", "selection")}
        if (chosen := facts["selection"]) is not None:
            facts["selection"] = Selection(**{**chosen, "plan": Plan.from_json(chosen["plan"], "the state's plan")})
    except (LookupError, ValueError, TypeError) as error:
        raise ArtifactError("This is not the state of a Pruner: pass what its state_dict() returned.") from error
    if facts["mode"] not in get_args(Mode):
        raise ArtifactError(f"This is not the state of a Pruner: its gate mode is invalid ('{facts['mode']}').")
    return facts


def _part(state: Mapping[str, Tensor], start: str) -> dict[str, Tensor]:
    return {name.removeprefix(start): value for name, value in state.items() if name.startswith(start)}
