"""python results/render"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # when a folder is run, it is not on the path as a package
from render.pages import write

write()
