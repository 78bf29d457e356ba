"""Gates in a model that runs its own code, such as a detector, of which only a part can be recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn

from paam.errors import GraphError
from paam.graph.gating import apply_gate
from paam.graph.record.call import run_seen
from paam.graph.trace import Traced


def run_gated(
    traced: Traced,
    model: nn.Module,
    gates: Mapping[str, tuple[Tensor | None, int]],
    inputs: Sequence[Any],
    keywords: Mapping[str, Any] | None = None,
) -> Any:
    """Call the model's own forward() and multiply the outputs of the graph's nodes.

    ``gates``: node name -> the gate, [channels], that multiplies its value, and the channel axis.
    """
    known = {node.name: node for node in traced.graph.nodes if node.name in gates}

    def multiply(node: fx.Node, value: Tensor) -> Tensor:
        twin = known[node.name]
        if (node.op, node.target) != (twin.op, twin.target):
            raise GraphError(
                f"{type(model).__name__} computes {node.target} for this input where it computed {twin.target} for the"
                " example, so that gates have no place; use an example like the inputs."
            )
        return apply_gate(value, *gates[node.name])

    result, missing = run_seen(model, inputs, keywords or {}, traced.leaves, dict.fromkeys(gates, multiply))
    if missing:
        raise GraphError(
            f"{type(model).__name__} did not reach '{min(missing)}' for this input, as it did for the example; use an"
            " example like the inputs."
        )
    return result
