"""FPGM: remove filters near the geometric median of their layer (He et al., CVPR 2019), without its soft loop."""

from __future__ import annotations

from paam.methods.base import Method, register_method
from paam.methods.parts import needs_no_score_epochs, weight_cycles
from paam.pruning.criteria import FPGM

register_method(
    Method(
        "fpgm",
        label=lambda recipe: "FPGM",
        phases=lambda recipe: weight_cycles(recipe, FPGM),
        check=needs_no_score_epochs,
    )
)
