"""``python -m paam`` is the same program as ``paam``."""

from paam.entry import main

main()
