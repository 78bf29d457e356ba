"""paam: pruning by active attention manipulation. The public API on one page.

Names are imported lazily: importing torch takes a second, and the command line must respond before.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from paam.version import __version__

if TYPE_CHECKING:
    from paam import models
    from paam.artifacts.export import export
    from paam.artifacts.latency import Latency, measure_latency
    from paam.artifacts.saved import load, save
    from paam.config.recipe import Recipe, load_recipe
    from paam.config.schedule import Schedule
    from paam.config.target import Target
    from paam.data import register_dataset
    from paam.errors import PaamError
    from paam.graph.cost import Counted, count
    from paam.graph.network import Network, prepare
    from paam.graph.plan import Plan
    from paam.graph.rules.table import register_rule
    from paam.methods.base import Method, register_method
    from paam.pruning.criterion import Criterion, register_criterion
    from paam.pruning.pruner import Pruner
    from paam.pruning.scorers import Scorer
    from paam.pruning.select import Selection, select
    from paam.runs.in_memory import Pruned, prune
    from paam.train.phase import Phase
else:
    _HOMES = {
        "export": "paam.artifacts.export",
        "Latency": "paam.artifacts.latency",
        "measure_latency": "paam.artifacts.latency",
        "load": "paam.artifacts.saved",
        "save": "paam.artifacts.saved",
        "Recipe": "paam.config.recipe",
        "load_recipe": "paam.config.recipe",
        "Schedule": "paam.config.schedule",
        "Target": "paam.config.target",
        "register_dataset": "paam.data",
        "PaamError": "paam.errors",
        "Counted": "paam.graph.cost",
        "count": "paam.graph.cost",
        "Network": "paam.graph.network",
        "prepare": "paam.graph.network",
        "Plan": "paam.graph.plan",
        "register_rule": "paam.graph.rules.table",
        "Method": "paam.methods.base",
        "register_method": "paam.methods.base",
        "Criterion": "paam.pruning.criterion",
        "register_criterion": "paam.pruning.criterion",
        "Pruner": "paam.pruning.pruner",
        "Scorer": "paam.pruning.scorers",
        "Selection": "paam.pruning.select",
        "select": "paam.pruning.select",
        "Pruned": "paam.runs.in_memory",
        "prune": "paam.runs.in_memory",
        "Phase": "paam.train.phase",
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
    "Criterion",
    "Latency",
    "Method",
    "Network",
    "PaamError",
    "Phase",
    "Plan",
    "Pruned",
    "Pruner",
    "Recipe",
    "Schedule",
    "Scorer",
    "Selection",
    "Target",
    "__version__",
    "count",
    "export",
    "load",
    "load_recipe",
    "measure_latency",
    "models",
    "prepare",
    "prune",
    "register_criterion",
    "register_dataset",
    "register_method",
    "register_rule",
    "save",
    "select",
]
