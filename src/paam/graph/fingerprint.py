"""Fingerprint of an architecture: the graph, its layers, the name and shape of every tensor; not the weights."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from typing import Any

from torch import fx, nn

from paam.graph.plan import recall_plan

SETTINGS = (
    *("align_corners", "alpha", "approximate", "beta", "ceil_mode", "count_include_pad", "dilation", "dim"),
    *("divisor_override", "downscale_factor", "end_dim", "eps", "groups", "k", "kernel_size", "lambd", "max_val"),
    *("min_val", "mode", "negative_slope", "norm_type", "normalized_shape", "num_groups", "num_heads"),
    *("output_padding", "output_size", "p", "padding", "padding_mode", "scale_factor", "size", "start_dim", "stride"),
    *("threshold", "transposed", "unflattened_size", "upscale_factor", "value"),
)
"""Attributes of torch's layers that tensor shapes do not reveal: stride, padding, an activation's parameters."""


def settings_of(layer: nn.Module) -> str:
    """What a layer computes: the class and settings of it and all of its submodules."""
    parts = []
    for name, part in layer.named_modules():
        own, of_kind = vars(part), _settings_of(type(part))  # type: ignore[arg-type]
        # hasattr(part, key) would search all submodules and tensors, slowly
        values = {key: getattr(part, key) for key in SETTINGS if key in own or key in of_kind}
        plain = {key: value for key, value in values.items() if isinstance(value, str | int | float | tuple | list)}
        parts.append(f"{name} {type(part).__name__} {_said(plain)}")
    return "; ".join(parts)


@functools.lru_cache(256)
def _settings_of(kind: type) -> frozenset[str]:
    return frozenset(key for key in SETTINGS if hasattr(kind, key))


def _said(values: Mapping[str, Any]) -> dict[str, Any]:
    """Sorted, without None and False: one version of torch stores these where another omits the attribute."""
    return {key: value for key, value in sorted(values.items()) if value is not None and value is not False}


def function_name(target: Any) -> str:
    """A function, or the name of a tensor method, as users write it."""
    if isinstance(target, str):
        return f"Tensor.{target}"
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}".lstrip(".")


def fingerprint(model: nn.Module, graph: fx.Graph) -> str:
    """Identifies what a model computes by its graph, independent of its weights.

    Stable across torch versions: contains no text that torch may change, such as a layer's repr.
    """
    number = {node: place for place, node in enumerate(graph.nodes)}
    lines = []
    for node, place in number.items():
        args, kwargs = fx.map_arg((node.args, _said(node.kwargs)), lambda other: f"%{number[other]}")
        layer = node.op == "call_module"
        what = settings_of(model.get_submodule(str(node.target))) if layer else function_name(node.target)
        lines.append(f"{place} {node.op} {node.target if layer else ''} {what} {args} {kwargs}")
    lines += [f"{name} {tuple(value.shape)}" for name, value in model.state_dict().items()]
    if (earlier := recall_plan(model)) is not None:  # determines which channels its index maps connect
        lines.append(earlier.digest)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
