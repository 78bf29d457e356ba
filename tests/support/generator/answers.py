"""Output types of networks with named fields."""

from __future__ import annotations

from collections import namedtuple

Named1 = namedtuple("Named1", "first")
Named2 = namedtuple("Named2", "first second")
Named3 = namedtuple("Named3", "first second third")
Named4 = namedtuple("Named4", "first second third fourth")
