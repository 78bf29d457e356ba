"""paam: pruning by active attention manipulation. The public API on one page.

Each name is loaded when it is first asked for: torch takes a second, in which the command line must already listen.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from paam.version import __version__

if TYPE_CHECKING:
    from paam import models
    from paam.api import Pruned, prune
    from paam.artifacts import load, save
    from paam.cost import Counted, count
    from paam.errors import PaamError
    from paam.exporting import export
    from paam.plan import Plan
    from paam.pruner import Pruner
    from paam.recipe import Recipe, load_recipe
    from paam.schedule import Schedule
    from paam.select import Selection, Target
    from paam.speed import Latency, measure_latency
else:
    _HOMES = {
        "Pruned": "paam.api",
        "prune": "paam.api",
        "load": "paam.artifacts",
        "save": "paam.artifacts",
        "Counted": "paam.cost",
        "count": "paam.cost",
        "PaamError": "paam.errors",
        "export": "paam.exporting",
        "Plan": "paam.plan",
        "Pruner": "paam.pruner",
        "Recipe": "paam.recipe",
        "load_recipe": "paam.recipe",
        "Schedule": "paam.schedule",
        "Selection": "paam.select",
        "Target": "paam.select",
        "Latency": "paam.speed",
        "measure_latency": "paam.speed",
    }

    def __getattr__(name: str) -> object:
        if name == "models":
            return import_module("paam.models")
        if name not in _HOMES:
            raise AttributeError(f"module 'paam' has no attribute '{name}'")
        value = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = [
    "Counted",
    "Latency",
    "PaamError",
    "Plan",
    "Pruned",
    "Pruner",
    "Recipe",
    "Schedule",
    "Selection",
    "Target",
    "__version__",
    "count",
    "export",
    "load",
    "load_recipe",
    "measure_latency",
    "models",
    "prune",
    "save",
]
