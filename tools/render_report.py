"""Render the README's pictures of the report from committed records, light and dark: python tools/render_report.py

Needs Chromium or Chrome on PATH.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from PIL import Image

from paam.report.page import write_report

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests" / "support"))
from browser import browser  # noqa: E402 - the tests' own way to a browser

OURS = ("medium-seed1", "medium-seed[02]", "high-seed?", "[!mh]*", "high-l1*")
FINISHED = (*(f"strong/{name}" for name in OURS), "paper/*")
"""Twelve table rows, the maximum for which the plot shows names: high-400 is left out."""
RECORDS = [path for name in FINISHED for path in sorted(ROOT.glob(f"results/{name}/record.jsonl.gz"))]
PICTURES = {"layers": ("#run-1 .budget", 1100), "plane": ("#plane", 860)}
"""Name -> selector of the element on the page, and window width."""

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
                out = ROOT / "docs" / "pictures" / f"report-{name}-{scheme}.png"
                picture.convert("RGB").quantize(48).save(out, optimize=True)
