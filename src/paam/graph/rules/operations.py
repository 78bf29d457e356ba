"""Operations grouped by kind, as they appear in the graph: module classes, functions, names of tensor methods."""

from __future__ import annotations

import operator

import torch
import torch.nn.functional as F
from torch import nn

from paam.graph.rules.functions import copied_into

POINTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh),
    *(nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Threshold, nn.Hardshrink),
    *(nn.Softshrink, nn.Tanhshrink, F.hardshrink, F.softshrink, F.tanhshrink),
    *(F.relu, F.relu6, F.leaky_relu, F.elu, F.selu, F.celu, F.gelu, F.silu, F.mish, F.sigmoid, F.tanh),
    *(F.hardswish, F.hardsigmoid, F.hardtanh, F.softplus, F.softsign, F.logsigmoid, F.threshold),
    *(torch.relu, torch.sigmoid, torch.tanh, torch.abs, torch.exp, torch.sqrt, torch.square, torch.clamp, torch.sin),
    *(operator.gt, operator.ge, operator.lt, operator.le, operator.eq, operator.ne, operator.invert, operator.mod),
    *(torch.asin, torch.acos, torch.sinh, torch.cosh, torch.tan, torch.log2, torch.log10, torch.exp2, torch.erfc),
    *(torch.floor, torch.ceil, torch.round, torch.trunc, torch.frac, torch.sgn, torch.nan_to_num, torch.hardshrink),
    *(torch.ones_like, torch.zeros_like, torch.full_like, torch.clone, torch.detach, torch.positive, torch.logit),
    *(torch.isnan, torch.isinf, torch.isfinite, torch.signbit, torch.absolute, torch.clip, torch.sinc, torch.digamma),
    *("clone", "detach", "floor", "ceil", "round", "trunc", "tan"),
    *("asin", "acos", "atan", "sinh", "cosh", "log2", "log10"),
    *("exp2", "expm1", "erfc", "nan_to_num", "type_as", "bool", "int"),
    *("long", "masked_fill", "type", "clip", "sgn", "logit"),
    *("hardshrink", "isnan", "isinf", "isfinite", "frac", "positive", "absolute", "sinc", "signbit"),
    *(operator.neg, operator.pow, torch.pow, torch.neg, torch.cos, torch.log, torch.log1p, torch.rsqrt, torch.erf),
    *(torch.sign, torch.reciprocal, torch.expm1, torch.atan),
    *("relu", "sigmoid", "tanh", "abs", "exp", "sqrt", "square", "clamp", "neg", "pow", "float", "half", "double"),
    *("sin", "cos", "log", "log1p", "rsqrt", "erf", "sign", "reciprocal", "bfloat16", "clamp_min", "clamp_max", "to"),
)
UNCHANGED = (
    *(nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
    "torchvision.ops.stochastic_depth.stochastic_depth",
)
DROPOUTS = (
    *(torch.dropout, F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
)
OVER_THE_MAP = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, F.max_pool1d, F.max_pool2d, F.max_pool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
    *(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d),
    *(F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d),
    *(nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d, F.interpolate, F.upsample),
    *(nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d),
    *(nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d),
    *(nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d),
)
AVERAGES = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
SOFTMAXES = (
    *(nn.Softmax, F.softmax, torch.softmax, "softmax"),
    *(nn.LogSoftmax, F.log_softmax, torch.log_softmax, "log_softmax"),
)
REDUCTIONS = (
    *(torch.mean, "mean", torch.sum, "sum", torch.amax, "amax", torch.amin, "amin"),
    *(torch.var, "var", torch.std, "std", torch.norm, "norm"),
)
TOGETHER = (
    *(copied_into, "expand_as", torch.maximum, torch.minimum, torch.addcmul),
    *(torch.addcdiv, torch.where, torch.lerp, torch.fmod),
    *("where", "lerp", "maximum", "minimum", "addcmul", "addcdiv", "fmod", "atan2", "hypot", "logaddexp"),
    *(torch.atan2, torch.hypot, torch.copysign, torch.logaddexp, torch.fmax, torch.fmin, torch.xlogy, torch.heaviside),
    *(operator.and_, operator.or_, operator.floordiv, torch.logical_and, torch.logical_or, torch.rsub),
)
PADS = (
    *(F.pad, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d),
    *(nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d),
)
PRODUCTS = (operator.matmul, torch.matmul, "matmul", torch.bmm, "bmm", torch.einsum, F.scaled_dot_product_attention)
MIXING_NORMS = (
    *(nn.RMSNorm, nn.LayerNorm, nn.GroupNorm, nn.LocalResponseNorm),
    *(F.rms_norm, F.layer_norm, F.group_norm, F.local_response_norm),
)
RESHAPES = (
    *("view", "reshape", "flatten", "permute", "transpose", "squeeze", "unsqueeze", "contiguous", "unflatten"),
    *("expand", "repeat", "flip", "roll", "narrow", "select", "movedim", "swapaxes", "swapdims", "unfold", "t", "tile"),
    *("ravel", "repeat_interleave", "index_select", "diagonal", "rot90", "fliplr", "flipud", "moveaxis"),
    *(torch.flip, torch.roll, torch.narrow, torch.select, torch.movedim, torch.swapaxes, torch.swapdims, torch.tile),
    *(torch.t, torch.ravel, torch.repeat_interleave, torch.rot90, torch.moveaxis, torch.unflatten, torch.index_select),
    *(torch.channel_shuffle, nn.ChannelShuffle, nn.Unflatten, torch.broadcast_to, "broadcast_to"),
    *(torch.reshape, torch.flatten, torch.permute, torch.transpose, torch.squeeze, torch.unsqueeze),
)
