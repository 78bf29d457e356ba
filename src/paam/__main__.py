"""``python -m paam`` is the same program as ``paam``."""

from paam.cli import main

main()
