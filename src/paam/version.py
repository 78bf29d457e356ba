"""The version of paam."""

__version__ = "0.1.0"
