"""A pruning method: plain data that says how a network is trained, scored and pruned.

A method is one file of this package. It returns the phases for a recipe's epochs; their hooks score, select and emit
events. The engine provides whatever a phase asks for, and knows no method by its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paam.config.recipe import Recipe
from paam.errors import RecipeError, nearest
from paam.pruning.scorers import MakeScorer
from paam.train.phase import Phase


@dataclass(frozen=True)
class Method:
    """``name``: for recipes (prune.method). ``label``: for tables and reports, from a recipe.

    phases  the phases for a recipe, in order; those without epochs are skipped
    scorer  what learns the scores, for a recipe; None for methods that compute scores otherwise
    check   raises an error for a recipe that the method does not support
    """

    name: str
    label: Callable[[Recipe], str]
    phases: Callable[[Recipe], tuple[Phase, ...]]
    scorer: Callable[[Recipe], MakeScorer | None] = lambda recipe: None
    check: Callable[[Recipe], None] = lambda recipe: None


_KNOWN: dict[str, Method] = {}


def register_method(method: Method) -> Method:
    """Register a method under its name, also for recipes. Names are unique."""
    if _KNOWN.setdefault(method.name, method) is not method:
        raise RecipeError(f"The method '{method.name}' is already registered; choose another name.")
    return method


def known_methods() -> dict[str, Method]:
    return dict(sorted(_KNOWN.items()))


def phases_of(recipe: Recipe) -> tuple[Phase, ...]:
    """The phases of a recipe's method."""
    return find_method(recipe.prune.method).phases(recipe)


def find_method(name: str) -> Method:
    """The method with this name; an unknown name raises an error with the nearest one."""
    if name not in _KNOWN:
        raise RecipeError(f"There is no method '{name}'.{nearest(name, _KNOWN)}")
    return _KNOWN[name]
