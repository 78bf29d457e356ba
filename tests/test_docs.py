"""Links from the docs into the code: each names a definition and must point at its line."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("docs/*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


def links(page: Path) -> list[tuple[str, str, str]]:
    """(text, target, line) of every relative link; line is empty for a link to a whole file."""
    found = re.findall(r"\[([^\]]+)\]\(([^)#:]+?)(?:#L(\d+))?\)", page.read_text())
    return [(text, target, line) for text, target, line in found if not target.startswith("#")]


def test_links_are_found_at_all() -> None:
    assert sum(bool(line) for page in PAGES for _, _, line in links(page)) > 20


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_point_at_what_they_name(page: Path) -> None:
    for text, target, line in links(page):
        path = (page.parent / target).resolve()
        assert path.exists(), f"{page.name}: {target}"
        if line:
            code = path.read_text().splitlines()[int(line) - 1]
            name = re.escape(text.strip("`"))
            assert re.search(rf"^\s*(def|class) {name}\b|^{name}\b.*=", code), (
                f"{page.name}: {text} is not at {target}:{line}"
            )


def test_results_are_what_the_records_say() -> None:
    spec = importlib.util.spec_from_file_location("render", ROOT / "results" / "render.py")
    render = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(render)
    for page in render.PAGES:
        assert "| KQ |" in page.read_text()
        assert page.read_text() == render.filled(page)
