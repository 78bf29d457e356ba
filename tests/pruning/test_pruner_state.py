"""What a Pruner has learned, saved and put back: training goes on to the same bits."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import paam
from paam.errors import ArtifactError
from paam.models import resnet20, vgg16_bn

IMAGES, LABELS = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0)), torch.arange(4)


def made(**options: Any) -> paam.Pruner:
    torch.manual_seed(1)
    return paam.Pruner(resnet20(), IMAGES[:1], streams="tied", penalty=1e-2, score_lr=0.05, **options)


def cycle(pruner: paam.Pruner) -> None:
    """A score step, a cut, and a weight step by plain SGD, which has no state."""
    if pruner.optimizer is not None:
        with pruner.scoring():
            pruner.optimizer.zero_grad()
            (torch.nn.functional.cross_entropy(pruner.model(IMAGES), LABELS) + pruner.penalty()).backward()
            pruner.optimizer.step()
    with pruner.weighting(keep_macs=0.6):
        torch.nn.functional.cross_entropy(pruner.model(IMAGES), LABELS).backward()
        with torch.no_grad():
            for parameter in pruner.network_parameters():
                parameter -= 0.01 * parameter.grad
                parameter.grad = None


def through_a_file(pruner: paam.Pruner, folder: Path) -> paam.Pruner:
    save_file(pruner.state_dict(), folder / "pruner.safetensors")
    other = made(**({} if pruner.criterion is None else {"criterion": "l1"}))
    other.load_state_dict(load_file(folder / "pruner.safetensors"))
    return other


WAYS = {
    "safetensors": through_a_file,
    "deepcopy": lambda pruner, folder: copy.deepcopy(pruner),
    "pickle": lambda pruner, folder: pickle.loads(pickle.dumps(pruner)),
}


@pytest.mark.parametrize("options", [{}, {"criterion": "l1"}], ids=["kq", "l1"])
@pytest.mark.parametrize("way", WAYS)
def test_training_goes_on_to_the_same_bits(tmp_path, way, options):
    pruner = made(**options)
    cycle(pruner)
    other = WAYS[way](pruner, tmp_path)
    state = torch.get_rng_state()
    for one in (pruner, other):
        cycle(one)
    assert torch.equal(torch.get_rng_state(), state)
    ours, theirs = pruner.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert other.selection == pruner.selection
    small, twin = pruner.compact().eval(), other.compact().eval()
    assert torch.equal(small(IMAGES), twin(IMAGES))
    assert not any(p is q for p in pruner.network_parameters() for q in other.network_parameters())


def test_a_state_is_a_copy_and_changes_nothing(tmp_path):
    pruner = made()
    state = pruner.state_dict()
    before = {name: value.clone() for name, value in state.items()}
    cycle(pruner)
    assert all(torch.equal(state[name], before[name]) for name in state)
    pruner.load_state_dict(state)
    assert pruner.selection is None
    with pytest.raises(paam.PaamError, match="Nothing is selected"):
        pruner.compact()


def facts(state: dict[str, Tensor], **changes: Any) -> Tensor:
    tree = json.loads(bytes(state["facts"].tolist())) | changes
    return torch.tensor(list(json.dumps(tree).encode()), dtype=torch.uint8)


def wrong(state: dict[str, Tensor]) -> list[tuple[dict[str, Tensor], str]]:
    cut = {name: value for name, value in state.items() if name != "model.conv1.weight"}
    return [
        ({}, "not the state of a Pruner"),
        ({**state, "facts": state["facts"][:-9]}, "not the state of a Pruner"),
        (cut, "made with other arguments"),
        ({**state, "optimizer.x.y": state["facts"]}, "unexpected 'optimizer.x.y'"),
        ({**state, "facts": facts(state, mode="shut")}, r"gate mode is invalid \('shut'\)"),
        (paam.Pruner(vgg16_bn(), torch.zeros(1, 3, 32, 32)).state_dict(), "another architecture"),
    ]


def test_what_is_no_state_of_this_pruner_is_refused():
    pruner = made()
    cycle(pruner)
    before = pruner.state_dict()
    for state, message in wrong(made().state_dict()):
        with pytest.raises(ArtifactError, match=message):
            pruner.load_state_dict(state)
        after = pruner.state_dict()
        assert all(torch.equal(after[name], before[name]) for name in before)
    with pytest.raises(paam.PaamError, match=r"gate_mode must be one of open, analog, binary \(got 'shut'\)"):
        pruner.gate_mode = "shut"


def test_a_pruner_and_a_selection_say_what_they_are():
    pruner = made()
    assert repr(pruner) == "Pruner(CifarResNet, scorer kq, 12 groups of 448 filters; nothing selected yet)"
    chosen = pruner.select(keep_filters=0.5)
    assert str(chosen).startswith("224 of 448 filters stay (scores from 1), ")
    assert str(chosen) in repr(pruner)
    assert "criterion l1" in repr(made(criterion="l1"))
