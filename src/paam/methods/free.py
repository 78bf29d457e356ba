"""One learnable logit per filter instead of the attention network: the control for reading the weights."""

from __future__ import annotations

from paam.methods.base import Method, register_method
from paam.methods.paam import phases
from paam.methods.parts import needs_score_epochs
from paam.pruning.scorers import scorer_of

register_method(
    Method(
        "free",
        label=lambda recipe: "Free logits",
        phases=phases,
        scorer=lambda recipe: scorer_of("free"),
        check=needs_score_epochs,
    )
)
