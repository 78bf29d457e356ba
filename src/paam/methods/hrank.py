"""HRank: remove filters whose feature maps have low rank (Lin et al., CVPR 2020), in all layers at once."""

from __future__ import annotations

from paam.methods.base import Method, register_method
from paam.methods.parts import needs_no_score_epochs, weight_cycles
from paam.pruning.criteria import HRANK

register_method(
    Method(
        "hrank",
        label=lambda recipe: "HRank",
        phases=lambda recipe: weight_cycles(recipe, HRANK),
        check=needs_no_score_epochs,
    )
)
