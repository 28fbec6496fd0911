"""HTML pages that people open in a browser: one file each, without a script, font or picture from elsewhere.

    text = page("Where the time goes", paragraph("Forward takes half."), table(["phase", "ms"], [["forward", "5.1"]]))

The parts take plain text and escape it; pictures are SVG.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}svg{width:100%;min-width:34rem;height:auto}pre{overflow-x:auto}
.none{color:#777}.scroll{overflow-x:auto;margin:.7rem 0}table{border-collapse:collapse;font-size:.93em}
td,th{padding:.15rem .6rem;border-bottom:1px solid #ddd;text-align:right}th{font-weight:600;vertical-align:bottom}
td{vertical-align:top;white-space:nowrap;font-variant-numeric:tabular-nums}.text{text-align:left;white-space:normal}
.text:first-child{overflow-wrap:anywhere;min-width:min(10rem,40vw)}
@media print{body{max-width:none;margin:0;font-size:11px}svg{min-width:0}.scroll{overflow:visible}td,th{padding:.1rem .3rem}
td{white-space:normal}.text:first-child{min-width:8rem}tr,svg{break-inside:avoid}h2{break-after:avoid}}"""


@dataclass(frozen=True)
class Link:
    """A table's cell that leads to another page."""

    text: str
    address: str


def page(title: str, *parts: str) -> str:
    """A whole HTML document of parts made by the functions below."""
    view = '<meta name="viewport" content="width=device-width">'
    head = f'<meta charset="utf-8">{view}<title>{escape(title)}</title><style>{STYLE}</style>'
    body = "\n".join([f"<h1>{escape(title)}</h1>", *parts])
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def heading(text: str) -> str:
    """A heading within the page."""
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str) -> str:
    """Text as a paragraph."""
    return f"<p>{escape(text)}</p>"


def preformatted(text: str) -> str:
    """Text whose lines stay as they are."""
    return f'<div class="scroll"><pre>{escape(text)}</pre></div>'


def missing(text: str) -> str:
    """A paragraph that says why there is nothing to see here."""
    return f'<p class="none">{escape(text)}</p>'


def items(texts: Iterable[str]) -> str:
    """A list with a bullet for each text."""
    return "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>"


def picture(svg: str) -> str:
    """A picture, which small screens scroll rather than make unreadable."""
    return f'<div class="scroll">{svg}</div>'


def table(head: Sequence[str], rows: Iterable[Sequence[str | Link]], texts: int = 1) -> str:
    """A table whose first `texts` columns are text and whose others are figures; `head` may be empty."""

    def line(cells: Sequence[str | Link], kind: str) -> str:
        opened = [f'<{kind} class="text">'] * texts + [f"<{kind}>"] * (len(cells) - texts)
        return "<tr>" + "".join(f"{tag}{_inside(cell)}</{kind}>" for tag, cell in zip(opened, cells, strict=True)) + "</tr>"

    lines = [line(head, "th")] if head else []
    return "\n".join(['<div class="scroll"><table>', *lines, *(line(row, "td") for row in rows), "</table></div>"])


def _inside(cell: str | Link) -> str:
    if isinstance(cell, str):
        return escape(cell)
    return f'<a href="{escape(cell.address)}">{escape(cell.text)}</a>'
