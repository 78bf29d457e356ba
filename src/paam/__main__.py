"""``python -m paam`` is the same program as ``paam``."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the current folder, which may contain an untrusted torch.py

from paam.entry import main

main()
