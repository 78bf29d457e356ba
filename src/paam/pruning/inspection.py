"""Report how paam would prune a network: its layers, groups of filters, what is skipped and why. Plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from paam.graph.flows import Mix, Whole
from paam.graph.network import Network
from paam.graph.record.recording import LAYERS
from paam.graph.solve import layer_costs, solve
from paam.graph.trace import MAP


@dataclass(frozen=True)
class LayerReport:
    """One convolution or linear layer.

    ``macs`` of one sample; None inside a part that is left alone. ``group``: of its filters, or None. ``note``: why it
    is not gated, or other remarks.
    """

    name: str
    kind: str
    filters: int
    params: int
    macs: int | None
    group: str | None
    note: str


@dataclass(frozen=True)
class Inspection:
    """``groups``: name -> width, layers, the residual stream they write into. ``whole``: where removed channels are
    filled in again, because an operation needs all of them. ``limits``: restrictions on inputs."""

    params: int
    macs: int
    layers: tuple[LayerReport, ...]
    groups: dict[str, dict[str, Any]]
    whole: tuple[str, ...]
    ignored: tuple[str, ...]
    limits: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def inspect(network: Network) -> Inspection:
    """Describe a prepared network. Nothing is changed or trained."""
    traced = network.traced
    costs = layer_costs(traced, solve(network.ops, {}))
    group_of = {layer: group for group in network.groups for layer in group.layers}
    called = {str(op.node.target): op for op in network.ops if op.node.op == "call_module"}
    layers = []
    for name, module in traced.model.named_modules():
        if not isinstance(module, LAYERS) or isinstance(module, nn.modules.batchnorm._BatchNorm):
            continue
        group = group_of.get(name)
        cost = costs.get(name)
        op = called.get(name)
        note = ""
        if any(name == part or name.startswith(f"{part}.") for part in traced.ignore):
            note = "left alone: it is in ignore"
        elif op is None:
            note = "left alone: forward() never calls it"
        elif isinstance(op.flow, Whole):
            note = "left alone: it needs all channels"
        elif group is None:
            note = "left alone: its channels are outputs of the network"
        elif group.layers[0] != name:
            depthwise = isinstance(op.flow, Mix) and op.flow.depthwise
            note = f"{'depthwise, goes with' if depthwise else 'tied to'} {group.layers[0]}"
        elif op.shared:
            note = "called more than once, shares its filters"
        params = cost.params if cost else sum(p.numel() for p in module.parameters())
        filters = int(getattr(module, "out_channels", None) or module.out_features)  # type: ignore[arg-type]
        macs = None if note.endswith("ignore") else cost.macs if cost else 0
        where = group.name if group else None
        layers.append(LayerReport(name, _kind(module), filters, params, macs, where, note))
    groups = {g.name: {"width": g.width, "layers": list(g.layers), "stream": g.stream} for g in network.groups}
    whole = tuple(_where(op.node) for op in network.ops if isinstance(op.flow, Whole) and not op.flow.opaque)
    dense = network.dense
    return Inspection(dense.params, dense.macs, tuple(layers), groups, whole, traced.ignore, _limits(network))


def _limits(network: Network) -> tuple[str, ...]:
    """Restrictions on inputs for which the recording is valid."""
    traced = network.traced
    limits = [f"kept as decided for the example: {decision}" for decision in traced.fixed]
    if traced.one_batch_size:
        limits.append(f"valid at the example's batch size only ({traced.batch}): it takes another way at others")
    if MAP in traced.held:
        limits.append("valid at the example's image size only: it computes numbers of sizes in ways that were not seen")
    if traced.no_training:
        limits.append(f"for evaluation only: {traced.no_training}")
    if traced.decision:
        limits.append(f"what follows {traced.decision} is the model's own code")
    return tuple(limits)


def _kind(module: Any) -> str:
    if isinstance(module, nn.Linear):
        return type(module).__name__
    size = "x".join(map(str, module.kernel_size))
    grouped = f", {module.groups} groups" if module.groups > 1 else ""
    return f"{type(module).__name__} {size}{grouped}"


def _where(node: Any) -> str:
    return str(node.target) if node.op == "call_module" else str(node.name)
