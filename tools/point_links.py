"""Update the line numbers of the docs' links into the code: python tools/point_links.py

A link is `[name](path#L12)`; tests/project/test_docs.py fails if line 12 does not define `name`.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def pointed(page: Path) -> str:
    """The page with updated line numbers in all such links."""

    def point(link: re.Match[str]) -> str:
        name, target = re.escape(link[1].strip("`")), link[2]
        lines = (page.parent / target).read_text().splitlines()
        defines = re.compile(rf"^\s*(def|class) {name}\b|^{name}\b.*=")
        number = next(number for number, line in enumerate(lines, 1) if defines.search(line))
        return f"[{link[1]}]({target}#L{number})"

    return re.sub(r"\[([^\]]+)\]\(([^)#:]+?)#L\d+\)", point, page.read_text())


if __name__ == "__main__":
    for page in (*ROOT.glob("docs/*/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        page.write_text(pointed(page))
