"""Channel rules of layers with weights: convolutions, linear layers, norms."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import torch
from torch import nn

from paam.errors import one_line
from paam.graph.flows import CONST, Layout, Mix, Pass, Whole
from paam.graph.shrink import shrink_mix
from paam.graph.site import Op, Site

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def convolution(site: Site) -> Op:
    conv = site.module
    if (along := _along_channels(site)) is not None:
        return along
    assert isinstance(conv, CONVOLUTIONS)
    # Somebody's own convolution may pad in its own way: then constants are never folded.
    padded = _padding(conv) if type(conv) in CONVOLUTIONS else True
    flow = Mix(conv.in_channels, conv.out_channels, conv.groups, conv.bias is not None, padded)
    return site.op(_tried(site, flow), axis=1)


def _padding(conv: Any) -> bool:
    """Whether zero padding makes constants uneven."""
    if conv.padding == "same":
        padded = any((k - 1) * d > 0 for k, d in zip(conv.kernel_size, conv.dilation, strict=True))
    else:
        padded = conv.padding != "valid" and any(conv.padding)
    # Every other padding mode repeats values of the channel itself, and so leaves a constant channel constant.
    return bool(padded and conv.padding_mode == "zeros")


def transposed_convolution(site: Site) -> Op:
    conv = site.module
    if (along := _along_channels(site)) is not None:
        return along
    assert isinstance(conv, TRANSPOSED)
    # Neighbouring outputs receive from different numbers of inputs: a constant does not stay one, as if it were padded.
    flow = Mix(conv.in_channels, conv.out_channels, conv.groups, conv.bias is not None, True, transposed=True)
    return site.op(flow, axis=1)


def _along_channels(site: Site) -> Op | None:
    """A layer for which our channels are positions, as a 1-d convolution over neighbouring channels: it reads them all.

    None for the ordinary layer, which reads our channels as its own.
    """
    if not isinstance(getattr(site.module, "weight", None), nn.Parameter):
        raise site.refusal("its weight is computed from other tensors; remove the reparametrisation first")
    own = len(site.shape(site.x)) - 1 if isinstance(site.module, nn.Linear) else 1
    return None if site.axis(site.x) == own else site.whole()


def linear(site: Site) -> Op:
    layer = site.module
    if (along := _along_channels(site)) is not None:
        return along
    assert isinstance(layer, nn.Linear)
    dims = len(site.shape(site.x))
    flow = Mix(layer.in_features, layer.out_features, 1, layer.bias is not None, False)
    return site.op(_tried(site, flow), axis=dims - 1)


def batch_norm(site: Site) -> Op:
    norm = site.module
    assert isinstance(norm, nn.modules.batchnorm._BatchNorm)
    if site.axis(site.x) != 1:
        return site.whole()
    if not norm.track_running_stats:
        raise site.refusal("without running statistics its output depends on the batch")
    if type(norm) not in BATCH_NORMS:
        _try_channels(site)
    return site.op(Pass(zero=CONST))


def instance_norm(site: Site) -> Op:
    return site.op(Pass(zero=CONST)) if site.axis(site.x) == 1 else site.whole()


def channel_offset(site: Site) -> Op:
    """What an earlier pruning has left behind: one number added to each channel."""
    return site.op(Pass(zero=CONST))


def mixing_norm(site: Site) -> Op:
    """Norms that read all channels, or groups of them: what they read is made whole again."""
    own = [node for node in site.node.all_input_nodes if node is not site.x and node.name in site.axes]
    return site.op(Whole(site.width(site.x)), site.x, *own)


def _try_channels(site: Site) -> None:
    """Somebody's own norm, one with an activation in it, say: each channel must depend on itself alone."""
    norm = copy.deepcopy(site.module).cpu().double().eval()  # type: ignore[union-attr]
    if any(True for child in norm.children() for _ in child.parameters()):
        raise site.refusal("it holds further layers with parameters")
    shape = site.shape(site.x)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    x[:, 0] = 0.25
    other = x.clone()
    other[:, 1:] = torch.randn(other[:, 1:].shape, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        first, second = norm(x.clone())[:, 0], norm(other)[:, 0]
    if not (torch.equal(first, second) and torch.equal(first, first.flatten()[0].expand_as(first))):
        raise site.refusal("built upon a batch norm, it does more than treat channels one by one")


def _tried(site: Site, flow: Mix) -> Mix:
    """The flow of somebody's own convolution or linear layer, found by trying.

    Cut to half of its channels it must compute half of what it did. One that does so only with all of its inputs, as
    with weights that are standardised over them, keeps them all.
    """
    if type(site.module) in (*CONVOLUTIONS, nn.Linear):
        return flow
    problem = _shrinks(site, flow)
    if not problem:
        return flow
    whole = dataclasses.replace(flow, whole=True)
    if flow.depthwise or _shrinks(site, whole):
        raise site.refusal(problem)
    return whole


def _shrinks(site: Site, flow: Mix) -> str:
    """What goes wrong when a layer is cut to half of its channels; nothing, if it computes half of what it did."""
    layer: Any = copy.deepcopy(site.module).cpu().double().eval()  # type: ignore[union-attr]
    rows = _first_halves(flow.outputs, flow.groups)
    columns = np.arange(flow.inputs) if flow.whole else _first_halves(flow.inputs, flow.groups)
    if flow.depthwise:
        columns = rows = np.arange(max(flow.inputs // 2, 1))
    axis = site.axis(site.x)
    x = torch.randn(site.shape(site.x), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    absent = np.setdiff1d(np.arange(flow.inputs), columns)
    x.index_fill_(axis, torch.from_numpy(absent), 0)
    with torch.no_grad():
        truth = layer(x.clone())
        shrink_mix(layer, flow, rows, columns)
        try:
            cut = layer(x.index_select(axis, torch.from_numpy(columns)))
        except Exception as error:  # whatever the layer makes of fewer channels
            return f"it does not run with fewer channels ({one_line(error)})"
    truth = truth.index_select(truth.dim() - 1 if isinstance(layer, nn.Linear) else 1, torch.from_numpy(rows))
    if cut.shape == truth.shape and torch.allclose(cut, truth, rtol=1e-9, atol=1e-12):
        return ""
    return "with fewer channels it computes something else: its weights depend on each other"


def _first_halves(total: int, groups: int) -> Layout:
    """The first half of each group, at least one."""
    size = total // groups
    return (np.arange(groups)[:, None] * size + np.arange(max(size // 2, 1))).ravel()
