"""Remove random filters, the same ones in every cycle: the control for any criterion."""

from __future__ import annotations

from paam.methods.base import Method, register_method
from paam.methods.parts import needs_no_score_epochs, weight_cycles
from paam.pruning.criteria import RANDOM

register_method(
    Method(
        "random",
        label=lambda recipe: "Random",
        phases=lambda recipe: weight_cycles(recipe, RANDOM),
        check=needs_no_score_epochs,
    )
)
