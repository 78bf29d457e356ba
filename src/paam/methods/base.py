"""What a pruning method is: plain data that says how a network is trained, scored and cut.

A method is one file of this package. It hands out the phases that a recipe's epochs are spent in, and its hooks in them
score, select and tell; the engine provides whatever a phase asks for, and knows no method by its name.
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
    """``name``: as recipes have it (prune.method). ``label``: of a recipe, as tables and reports have it.

    phases  the phases of a recipe, in order; those without an epoch are left out
    scorer  of a recipe: what learns the scores of its groups; None for methods that compute scores otherwise
    check   refuses a recipe that the method cannot follow
    """

    name: str
    label: Callable[[Recipe], str]
    phases: Callable[[Recipe], tuple[Phase, ...]]
    scorer: Callable[[Recipe], MakeScorer | None] = lambda recipe: None
    check: Callable[[Recipe], None] = lambda recipe: None


_KNOWN: dict[str, Method] = {}


def register_method(method: Method) -> Method:
    """Make a method known by its name, to recipes too. A name is given once."""
    if _KNOWN.setdefault(method.name, method) is not method:
        raise RecipeError(f"There is a method '{method.name}' already; give yours another name.")
    return method


def known_methods() -> dict[str, Method]:
    return dict(sorted(_KNOWN.items()))


def phases_of(recipe: Recipe) -> tuple[Phase, ...]:
    """The phases that a recipe's method spends its epochs in."""
    return find_method(recipe.prune.method).phases(recipe)


def find_method(name: str) -> Method:
    """The method of a name, or the error that names the nearest one."""
    if name not in _KNOWN:
        raise RecipeError(f"There is no method '{name}'.{nearest(name, _KNOWN)}")
    return _KNOWN[name]
