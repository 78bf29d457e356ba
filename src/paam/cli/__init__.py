"""The command line: parses, calls, prints. Importing it registers every command, in the order of --help."""

from paam.cli import training  # isort: skip
from paam.cli import sweeping  # isort: skip
from paam.cli import views  # isort: skip
from paam.cli import reporting, tools
from paam.cli.app import app, main

__all__ = ["app", "main", "reporting", "sweeping", "tools", "training", "views"]
