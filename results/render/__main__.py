"""python results/render"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # a folder that is run does not know itself as a package
from render.pages import write

write()
