"""Remove filters of small l1 norm (Li et al., ICLR 2017): the simplest criterion, and a baseline in every table."""

from __future__ import annotations

from paam.methods.base import Method, register_method
from paam.methods.parts import needs_no_score_epochs, weight_cycles
from paam.pruning.criteria import L1

register_method(
    Method(
        "l1",
        label=lambda recipe: "L1 norm",
        phases=lambda recipe: weight_cycles(recipe, L1),
        check=needs_no_score_epochs,
    )
)
