"""Render README's picture from a record: python tools/render_demo.py runs/demo/record.jsonl docs/pictures/demo.svg"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console

from paam.events import End, Start, last
from paam.runs.record import read_events
from paam.views.summary import summary

record, picture = map(Path, sys.argv[1:])
console = Console(record=True, width=92, force_terminal=True, file=io.StringIO())
events = read_events(record)
console.print(summary(last(events, Start), last(events, End)))
svg = console.export_svg(title="paam demo")
# Rich's template names web fonts; the picture must work offline.
picture.write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.S))
