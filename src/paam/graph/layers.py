"""Channel rules of layers with weights: convolutions, linear layers, norms."""

from __future__ import annotations

from torch import nn

from paam.graph.flows import CONST, Mix, Pass, Whole
from paam.graph.site import Op, Site

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def convolution(site: Site) -> Op:
    conv = site.module
    _check_weight(site)
    assert isinstance(conv, CONVOLUTIONS)
    if conv.padding == "same":
        padded = any((k - 1) * d > 0 for k, d in zip(conv.kernel_size, conv.dilation, strict=True))
    else:
        padded = conv.padding != "valid" and any(conv.padding)
    # Every other padding mode repeats values of the channel itself, and so leaves a constant channel constant.
    padded &= conv.padding_mode == "zeros"
    return site.op(Mix(conv.in_channels, conv.out_channels, conv.groups, conv.bias is not None, padded), axis=1)


def transposed_convolution(site: Site) -> Op:
    conv = site.module
    _check_weight(site)
    assert isinstance(conv, TRANSPOSED)
    # Neighbouring outputs receive from different numbers of inputs: a constant does not stay one, as if it were padded.
    flow = Mix(conv.in_channels, conv.out_channels, conv.groups, conv.bias is not None, True, transposed=True)
    return site.op(flow, axis=1)


def _check_weight(site: Site) -> None:
    if not isinstance(getattr(site.module, "weight", None), nn.Parameter):
        raise site.refusal("its weight is computed from other tensors; remove the reparametrisation first")


def linear(site: Site) -> Op:
    layer = site.module
    _check_weight(site)
    assert isinstance(layer, nn.Linear)
    dims = len(site.shape(site.x))
    if site.axis(site.x) != dims - 1:
        raise site.refusal("it reads another axis than the channels'")
    return site.op(Mix(layer.in_features, layer.out_features, 1, layer.bias is not None, False), axis=dims - 1)


def batch_norm(site: Site) -> Op:
    norm = site.module
    assert isinstance(norm, nn.modules.batchnorm._BatchNorm)
    if not norm.track_running_stats:
        raise site.refusal("without running statistics its output depends on the batch")
    return site.op(Pass(zero=CONST))


def instance_norm(site: Site) -> Op:
    return site.op(Pass(zero=CONST))


def mixing_norm(site: Site) -> Op:
    """Norms that read all channels, or groups of them: what they read is made whole again."""
    own = [node for node in site.node.all_input_nodes if node is not site.x and node.name in site.axes]
    return site.op(Whole(site.width(site.x)), site.x, *own)
