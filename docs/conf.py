"""The site of the documentation, from the Markdown files that the repository shows: `make docs`, then build/site/index.html.

Its navigation is the table of `docs/README.md`: a caption for each heading, and a page below the one that leads to it first.
"""

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from raystride.locations import __version__  # noqa: E402

project = "Raystride"
version = release = __version__
extensions = ["myst_nb", "sphinx_copybutton"]
html_theme = "furo"
html_title = f"Raystride {__version__}"
html_theme_options = {"top_of_page_buttons": []}
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = html_show_copyright = False
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "docs/*/*.md", "docs/tutorials/*.ipynb", "deploy/*.md", "deploy/*/*.md"]
include_patterns += ["tests/README.md"]
nb_execution_mode = "off"
myst_heading_anchors = 6

LINK = re.compile(r"\]\(([^)\s#:]+\.(?:md|ipynb))(?:#[^)]*)?\)")


def _links(page: str) -> list[str]:
    """Returns the pages to which a page leads, as names of documents, in order."""
    path = ROOT / page
    found = [(path.parent / link).resolve().relative_to(ROOT).as_posix() for link in LINK.findall(path.read_text())]
    return [link for link in dict.fromkeys(found) if link != page]


def _navigation() -> dict[str, list[tuple[str, list[str]]]]:
    """Returns for each page the pages below it, in groups with a caption."""
    first, index = "README.md", "docs/README.md"
    below: dict[str, list[tuple[str, list[str]]]] = {first: [("", [index])]}
    known = {first, index}
    for part in (ROOT / index).read_text().split("\n## ")[1:]:
        title, _, text = part.partition("\n")
        found = [(ROOT / "docs" / link).resolve().relative_to(ROOT).as_posix() for link in LINK.findall(text)]
        below[first].append((title.partition(":")[0], [page for page in dict.fromkeys(found) if page not in known]))
        known |= set(found)
    new = [page for _, pages in below[first] for page in pages]
    while new:
        found_below = []
        for page in new:
            pages = [link for link in _links(page) if link not in known] if page.endswith(".md") else []
            if pages:
                below[page] = [("", pages)]
                known |= set(pages)
                found_below += pages
        new = found_below
    return below


NAVIGATION = _navigation()


def _add_navigation(app: Any, document: str, source: list[str]) -> None:
    for caption, pages in NAVIGATION.get(f"{document}.md", ()):
        options = ":hidden:\n" + (f":caption: {caption}\n" if caption else "")
        source[0] += (
            f"\n\n```{{toctree}}\n{options}\n" + "".join(f"/{page.rpartition('.')[0]}\n" for page in pages) + "```\n"
        )


def setup(app: Any) -> None:
    """Adds the navigation to the pages as Sphinx reads them."""
    app.connect("source-read", _add_navigation)
