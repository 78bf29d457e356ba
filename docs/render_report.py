"""Draw the README's pictures of the report from the committed records, light and dark: python docs/render_report.py

Needs Chromium or Chrome on PATH.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from PIL import Image

from paam.report.html import write_report

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests"))
from browser import browser  # noqa: E402 - the tests' own way to a browser

FINISHED = ("strong/medium-seed1", "strong/medium-seed[02]", "strong/high-seed?", "strong/[!m]*-seed0", "paper/*")
FOUND = [path for name in FINISHED for path in sorted(ROOT.glob(f"results/{name}/record.jsonl"))]
RECORDS = list(dict.fromkeys(path for path in FOUND if "high-400" not in str(path)))  # twelve rows still have names
PICTURES = {"layers": ("#run-1 .budget", 1100), "plane": ("#plane", 860)}
"""Name -> which element of the page, in a window of which width."""

with tempfile.TemporaryDirectory() as folder, browser() as page:
    report = Path(folder) / "report.html"
    write_report(RECORDS, report)
    for name, (selector, width) in PICTURES.items():
        for scheme in ("light", "dark"):
            page.open(report, width=width, scheme=scheme)
            page.evaluate("document.getElementById('run-1').open = true")
            page.evaluate("document.querySelectorAll('h2, .choice').forEach(e => { e.style.visibility = 'hidden'; })")
            shot = Path(folder) / "shot.png"
            page.screenshot(shot, selector, scale=2, margin=16)
            with Image.open(shot) as picture:
                picture.convert("RGB").quantize(48).save(ROOT / "docs" / f"report-{name}-{scheme}.png", optimize=True)
