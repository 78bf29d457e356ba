"""A stop inside an epoch: the extra state, beyond that at an epoch's boundary, to resume bit-identically.

The order and the augmentation of an epoch's images are pure functions of seed and epoch, so the number of steps
gives the position in the data. Torch's generators are reseeded in every epoch and matter only inside one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class MidEpochState:
    """``losses``: of the steps so far. ``random``: the generators' states by device type, uint8.

    ``moved``: training values that leaving the phase has reset (closed filters). ``seconds``: time spent.
    """

    losses: list[Tensor]
    random: Mapping[str, Tensor]
    moved: Mapping[str, Tensor]
    seconds: float

    def tensors(self) -> dict[str, Tensor]:
        parts = {"losses": torch.stack(self.losses)}
        parts |= {f"random/{name}": value for name, value in self.random.items()}
        return parts | {f"moved/{name}": value for name, value in self.moved.items()}

    @staticmethod
    def from_tensors(tensors: Mapping[str, Tensor], seconds: float, device: torch.device) -> MidEpochState:
        def part(name: str) -> dict[str, Tensor]:
            return {key.removeprefix(name): value for key, value in tensors.items() if key.startswith(name)}

        return MidEpochState(list(tensors["losses"].to(device)), part("random/"), part("moved/"), seconds)

    def rescaled(self, before: int, now: int) -> MidEpochState:
        """The same fraction of an epoch of ``now`` steps instead of ``before``."""
        done = max(1, len(self.losses) * now // before)
        return replace(self, losses=[self.losses[place * len(self.losses) // done] for place in range(done)])

    def restore(self, model: nn.Module) -> None:
        """Restore the generators and the phase's network, whose gates are already set."""
        model.load_state_dict(self.moved, strict=False)
        torch.set_rng_state(self.random["cpu"])
        device = next(model.parameters()).device
        if device.type == "cuda" and "cuda" in self.random:
            torch.cuda.set_rng_state(self.random["cuda"], device)


def random_state(model: nn.Module) -> dict[str, Tensor]:
    """The states of the generators that a step of this network may use."""
    device = next(model.parameters()).device
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def differing(values: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Those of ``values`` that differ from the network's current ones."""
    now = model.state_dict()
    return {name: value for name, value in values.items() if not torch.equal(value, now[name])}
