"""paam: pruning by active attention manipulation. The public API on one page."""

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
from paam.version import __version__

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
    "prune",
    "save",
]
