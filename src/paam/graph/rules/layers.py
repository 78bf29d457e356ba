"""Channel rules of layers with weights: convolutions, linear layers, norms."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from paam.graph.checks.norm_trials import is_by_channel
from paam.graph.checks.trials import flow_by_trying
from paam.graph.flows import CONST, Mix, Pass, Whole
from paam.graph.rules.site import Op, Site

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def convolution(site: Site) -> Op:
    conv: Any = site.module
    if (along := _along_channels(site)) is not None:
        return along
    if kind_of(conv) not in CONVOLUTIONS:
        return _tried(
            site, Mix(conv.in_channels, conv.out_channels, conv.groups, conv.bias is not None, False, own=True)
        )
    flow = Mix(conv.in_channels, conv.out_channels, conv.groups, conv.bias is not None, _padding(conv))
    return site.op(flow, axis=1)


def kind_of(layer: nn.Module) -> type:
    """The class of a layer, without the subclass that torch's parametrizations insert."""
    return type(layer).__mro__[1] if is_parametrized(layer) else type(layer)


def _padding(conv: Any) -> bool:
    """Whether zero padding makes constants spatially uneven."""
    if conv.padding == "same":
        padded = any((k - 1) * d > 0 for k, d in zip(conv.kernel_size, conv.dilation, strict=True))
    else:
        padded = conv.padding != "valid" and any(conv.padding)
    # All other padding modes repeat values of the channel itself, so a constant channel stays constant.
    return bool(padded and conv.padding_mode == "zeros")


def transposed_convolution(site: Site) -> Op:
    conv: Any = site.module
    if (along := _along_channels(site)) is not None:
        return along
    own = kind_of(conv) not in TRANSPOSED
    # Adjacent outputs sum over different numbers of inputs: constants become uneven, as with padding.
    flow = Mix(conv.in_channels, conv.out_channels, conv.groups, conv.bias is not None, True, True, own=own)
    return _tried(site, flow) if own else site.op(flow, axis=1)


def _along_channels(site: Site) -> Op | None:
    """A layer that uses our channels as positions, such as a 1-d convolution along the channels: it reads them all.

    None for the normal case, in which the layer's channels are ours.
    """
    layer: Any = site.module
    # This order matters: reading a parametrized weight updates a spectral norm's vectors in training.
    if not is_parametrized(layer, "weight") and not isinstance(getattr(layer, "weight", None), nn.Parameter):
        raise site.refusal("its weight is computed from other tensors; remove the reparametrisation first")
    own = len(site.shape(site.x)) - 1 if isinstance(layer, nn.Linear) else 1
    if len(site.node.args) != 1 or site.node.kwargs:
        raise site.refusal("it is called with more than one tensor")
    return None if site.axis(site.x) == own else site.whole()


def linear(site: Site) -> Op:
    layer: Any = site.module
    if (along := _along_channels(site)) is not None:
        return along
    own = kind_of(layer) is not nn.Linear
    flow = Mix(layer.in_features, layer.out_features, 1, layer.bias is not None, False, own=own)
    return _tried(site, flow) if own else site.op(flow, axis=len(site.shape(site.x)) - 1)


def batch_norm(site: Site) -> Op:
    norm = site.module
    assert isinstance(norm, nn.modules.batchnorm._BatchNorm)
    if site.axis(site.x) != 1:
        return site.whole()
    if not norm.track_running_stats:
        raise site.refusal("without running statistics its output depends on the batch")
    if type(norm) not in BATCH_NORMS:
        width, dims = site.width(site.x), len(site.shape(site.x))
        if not is_by_channel(norm, width, dims, site.tried):
            return site.whole()
    return site.op(Pass(zero=CONST))


def instance_norm(site: Site) -> Op:
    return site.op(Pass(zero=CONST)) if site.axis(site.x) == 1 else site.whole()


def channel_offset(site: Site) -> Op:
    """A layer added by an earlier pruning: one number added to each channel."""
    return site.op(Pass(zero=CONST))


def mixing_norm(site: Site) -> Op:
    """Norms over all channels, or over groups of them: their input must be complete."""
    own = [node for node in site.node.all_input_nodes if node is not site.x and node.name in site.axes]
    return site.op(Whole(site.width(site.x)), site.x, *own)


def _tried(site: Site, flow: Mix) -> Op:
    """The flow of a custom convolution or linear layer, found by trials. One that cannot be cut reads all channels."""
    layer: Any = site.module
    found = flow_by_trying(layer, flow, _trial_shape(site, flow), site.tried)
    axis = len(site.shape(site.x)) - 1 if isinstance(layer, nn.Linear) else 1
    return site.whole() if found is None else site.op(found, axis=axis)


def _trial_shape(site: Site, flow: Mix) -> tuple[int, ...]:
    """The smallest shape that the layer accepts."""
    layer: Any = site.module
    shape = site.shape(site.x)
    if isinstance(layer, nn.Linear):
        return (*(min(size, 3) for size in shape[:-1]), shape[-1])
    reach = [(k - 1) * d + 1 + s for k, d, s in zip(layer.kernel_size, layer.dilation, layer.stride, strict=True)]
    return (2, flow.inputs, *map(min, reach, shape[2:]))
