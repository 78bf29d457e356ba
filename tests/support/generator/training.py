"""One training step of a network, and the comparison of two such steps."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from generator.comparing import BOUND, Inputs, apart, called, expect, expect_same

LOOSE = 1e-7
"""Tolerance for gradients, which are summed in another order."""


@dataclass(frozen=True)
class Step:
    """The outputs of a step, and its gradients and buffers by name."""

    answers: Any
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


class SameRandomNumbers(TorchDispatchMode):
    """Makes every random draw independent of previous ones: a graph may draw in another order than its model."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            torch.manual_seed(0)
        if func is torch.ops.aten.native_group_norm_backward.default:
            # If nothing before it needs a gradient, torch's implementation crashes the process.
            *others, wanted = args
            found = func(*others, [True, *wanted[1:]])
            return found if wanted[0] else (None, *found[1:])
        return func(*args, **(kwargs or {}))


def train(network: nn.Module, inputs: Inputs, holder: nn.Module | None = None) -> Step:
    """One forward and backward pass, with gradients of the inputs. ``holder``: owner of the network's parameters."""
    holder = holder or network
    network.train()
    holder.zero_grad()
    given = [x.clone().requires_grad_() for x in inputs]
    with torch.random.fork_rng([]), SameRandomNumbers():
        answers = network(*(x.clone() for x in given))
        leaves = tree_leaves(answers)
        loss = sum(torch.where(answer.isfinite(), answer, 0).square().mean() for answer in leaves)
        assert isinstance(loss, Tensor)
        if loss.requires_grad:  # otherwise the network consists only of constants
            loss.backward()
    gradients = {f"input {place}": x.grad for place, x in enumerate(given)}
    gradients |= {name: parameter.grad for name, parameter in holder.named_parameters()}
    return Step(tree_map(Tensor.detach, answers), gradients, dict(holder.named_buffers()))


def in_the_state_of(model: nn.Module, other: nn.Module) -> nn.Module:
    """A copy of a model with the parameters and buffers of another one."""
    twin = copy.deepcopy(model)
    tensors, others = (itertools.chain(x.parameters(), x.buffers()) for x in (twin, other))
    with torch.no_grad():
        for tensor, value in zip(tensors, others, strict=True):
            tensor.copy_(value)
    return twin


def expect_same_step(found: Step, truth: Step, model: nn.Module, inputs: Inputs, what: str) -> None:
    """``model``: the one whose step is the reference."""
    expect_same(found.answers, truth.answers, f"in training, {what}", "a batch")
    for name, buffer in truth.buffers.items():
        same = apart(found.buffers[name], buffer) < BOUND
        expect(same or is_unread(name, model, inputs), f"training {what} leaves something else in '{name}'")
    for name, gradient in truth.gradients.items():
        other = found.gradients[name]
        if gradient is not None or other is not None:
            error = apart(*both(other, gradient))
            expect(error < LOOSE, f"training {what} gives '{name}' another gradient, by {error:.0e}")


def both(found: Tensor | None, truth: Tensor | None) -> tuple[Tensor, Tensor]:
    """Two gradients; a missing one is zero."""
    if found is None:
        assert truth is not None
        found = torch.zeros_like(truth)
    return found, torch.zeros_like(found) if truth is None else truth


def is_unread(buffer: str, model: nn.Module, inputs: Inputs) -> bool:
    """Whether a model's outputs in evaluation mode are independent of a module's buffers."""
    owner = model.get_submodule(buffer.rpartition(".")[0])
    before = called(model.eval(), inputs, "the model")
    with torch.no_grad():
        for tensor in owner.buffers(recurse=False):
            tensor.add_(1)
    after = called(model, inputs, "the model")
    return all(map(torch.equal, tree_leaves(before), tree_leaves(after)))
