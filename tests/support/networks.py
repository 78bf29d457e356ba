"""Networks with realistic statistics, random choices of their filters, and the difference of two outputs."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from paam import Pruner
from paam.graph.network import Choice, Network
from paam.pruning.select import Selection


def lively(model: nn.Module, seed: int = 0, example: torch.Tensor | None = None) -> nn.Module:
    """float64, in evaluation mode, with every parameter and floating buffer away from special values.

    Initial values hide mistakes: a fresh batch norm maps zero to zero, a scale of 1e-6 or a gain of zero makes its
    branch vanish, a lost bias of zero goes unnoticed. Scales are of order one. ``example``: an input, to which the
    statistics of batch norms are then fitted roughly: otherwise activations of a deep network would vanish or explode.
    """
    generator = torch.Generator().manual_seed(seed)
    model = model.double().eval()
    done: set[int] = set()  # shared tensors are drawn once
    with torch.no_grad():
        for module in model.modules():
            for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                if tensor.is_floating_point() and id(tensor) not in done:
                    tensor.copy_(_drawn(module, name, tensor, generator))
                    done.add(id(tensor))
        if example is not None:
            _settle_norms(model, example, generator)
    return model


def _settle_norms(model: nn.Module, example: torch.Tensor, generator: torch.Generator) -> None:
    """Set running statistics of batch norms close to those of their inputs for the example."""

    def settle(norm: nn.modules.batchnorm._BatchNorm, args: tuple[torch.Tensor, ...]) -> None:
        if norm.running_mean is None or norm.running_var is None:
            return
        variance, mean = torch.var_mean(args[0].movedim(1, 0).flatten(1), 1, correction=0)
        variance = variance + 0.1 * variance.mean() + 1e-6  # a channel may be constant
        shift = torch.empty_like(mean).uniform_(-0.5, 0.5, generator=generator)
        norm.running_mean.copy_(mean + shift * variance.sqrt())
        norm.running_var.copy_(variance * torch.empty_like(mean).uniform_(0.5, 2.0, generator=generator))

    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    hooks = [norm.register_forward_pre_hook(settle) for norm in norms]
    model(example)
    for hook in hooks:
        hook.remove()


def _drawn(module: nn.Module, name: str, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random values for one tensor of a module, depending on its role."""

    def uniform(low: float, high: float) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype).uniform_(low, high, generator=generator)

    if name == "running_var":
        return uniform(0.5, 2.0)
    if name == "running_mean":
        return uniform(-0.5, 0.5)
    if not isinstance(tensor, nn.Parameter):  # a filter, a table, a mask: close to its initial value
        finite = tensor[tensor.isfinite()]
        around = 0.0 if not len(finite) or finite.min() > 0 else 0.1 * (float(finite.abs().max()) or 1.0)
        return torch.where(tensor.isfinite(), tensor * uniform(0.5, 1.5) + around * uniform(-1.0, 1.0), tensor)
    if sum(size > 1 for size in tensor.shape) > 1:
        return _normal(tensor, generator)
    if "bias" in name or "beta" in name:
        return uniform(-0.5, 0.5)
    scale = uniform(0.5, 1.5)  # of a norm, a branch, a temperature, an exponent
    if name == "weight" and "norm" in type(module).__name__.lower():
        scale[uniform(0.0, 1.0) < 0.25] *= -1
    return scale


def _normal(weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Weights with the original standard deviation, or larger, so that sums over inputs do not vanish."""
    inputs = weight.numel() // weight.shape[0] if weight.shape[0] > 1 else 1
    width = max(float(weight.std()), 0.5 / inputs**0.5)
    return width * torch.randn(weight.shape, dtype=weight.dtype, generator=generator)


def random_choice(network: Network, seed: int, *, whole: float = 0.1, empty: float = 0.15) -> Choice:
    """Random kept filters: some groups complete, some emptied, the others at any share."""
    rng = np.random.default_rng(seed)
    choice = {}
    for group in network.groups:
        draw = rng.random()
        share = 1.0 if draw < whole else 0.0 if draw < whole + empty else rng.uniform(0.1, 0.9)
        mask = rng.random(group.width) < share
        choice[group.name] = mask
    return choice


def compacted(pruner: Pruner, choice: Choice) -> nn.Module:
    """The small network of a choice, in evaluation mode; the gated one keeps its binary gates."""
    pruner.use(Selection(pruner.network.plan(choice), 0.5, 1.0, 1.0))
    with pruner.weighting():
        pass
    return pruner.compact().eval()


def relative_error(value: torch.Tensor, truth: torch.Tensor) -> float:
    return float((value - truth).abs().max() / truth.abs().max().clamp(min=1e-12))
