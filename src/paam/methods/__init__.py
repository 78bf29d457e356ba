"""Pruning methods, one file each. Every module of this package registers its method."""

from __future__ import annotations

import importlib
import pkgutil

from paam.methods.base import Method, find_method, known_methods, phases_of, register_method

__all__ = ["Method", "find_method", "known_methods", "phases_of", "register_method"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
