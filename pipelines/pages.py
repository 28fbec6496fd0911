"""HTML pages that people open in a browser: one file each, without a script, font or picture from elsewhere.

    text = page("Where the time goes", paragraph("Forward takes half."), table(["phase", "ms"], [["forward", "5.1"]]))

The parts take plain text and escape it; pictures are SVG and stand between them as they are.
"""

from collections.abc import Iterable, Sequence
from html import escape

STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}svg{width:100%;height:auto}pre{overflow-x:auto}.none{color:#777}
table{border-collapse:collapse}td,th{padding:.15rem .8rem;border-bottom:1px solid #ddd;text-align:right}
th{font-weight:600}td{font-variant-numeric:tabular-nums}td:first-child,th:first-child{text-align:left;overflow-wrap:anywhere}
.scroll{overflow-x:auto}"""


def page(title: str, *parts: str) -> str:
    """A whole HTML document of parts made by the functions below."""
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    body = "\n".join([f"<h1>{escape(title)}</h1>", *parts])
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def heading(text: str) -> str:
    """A heading within the page."""
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str) -> str:
    """Text as a paragraph."""
    return f"<p>{escape(text)}</p>"


def missing(text: str) -> str:
    """A paragraph that says why there is nothing to see here."""
    return f'<p class="none">{escape(text)}</p>'


def items(texts: Iterable[str]) -> str:
    """A list with a bullet for each text."""
    return "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column is text and whose others are figures; `head` may be empty."""

    def line(cells: Sequence[str], kind: str) -> str:
        return "<tr>" + "".join(f"<{kind}>{escape(cell)}</{kind}>" for cell in cells) + "</tr>"

    lines = [line(head, "th")] if head else []
    return "\n".join(['<div class="scroll"><table>', *lines, *(line(row, "td") for row in rows), "</table></div>"])
