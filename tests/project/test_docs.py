"""The docs: links into the code point at what they name; tables and figures are what the records say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from render import pages

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("docs/*/*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


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
    for page in pages.PAGES:
        assert "| kq-medium | 92.28 % |" in page.read_text()
        assert page.read_text() == pages.filled(page)


def test_figures_are_what_the_records_say() -> None:
    drawn = pages.drawn()
    assert sorted(drawn) == sorted(path.name for path in pages.FIGURES.iterdir())
    for name, picture in drawn.items():
        assert (pages.FIGURES / name).read_bytes() == picture.encode(), f"{name}: run python results/render"


def test_every_block_stands_somewhere_and_nowhere_twice() -> None:
    texts = [page.read_text() for page in pages.PAGES]
    for name in pages.BLOCKS:
        counts = [text.count(f"<!-- {name} -->\n") for text in texts]
        assert counts == [text.count(f"<!-- /{name} -->\n") for text in texts]
        assert max(counts) == 1, name
