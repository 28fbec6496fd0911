"""Builds self-contained HTML pages: one file each, without external scripts, fonts or pictures.

    text = html_page("Time per phase", paragraph("Forward takes half."), table(["phase", "ms"], [["forward", "5.1"]]))

The parts escape their plain text; pictures are SVG.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

STYLE = """:root{color-scheme:light dark;--ink:#222;--line:#ddd;--faint:#666}
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:var(--ink)}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}pre{overflow-x:auto}
svg{width:100%;min-width:34rem;height:auto;background:#fff}
.none{color:var(--faint)}.scroll{overflow-x:auto;margin:.7rem 0}table{border-collapse:collapse;font-size:.93em}
td,th{padding:.15rem .5rem;border-bottom:1px solid var(--line);text-align:right}th{font-weight:600;vertical-align:bottom}
td{vertical-align:top;font-variant-numeric:tabular-nums}.text{text-align:left;overflow-wrap:anywhere}
.text:first-child{min-width:min(9rem,30vw)}.text:not(:first-child){min-width:min(5rem,20vw)}
@media (max-width:60rem){table{font-size:.8em}td,th{padding:.15rem .25rem}}
@media (prefers-color-scheme:dark){:root{--ink:#ddd;--line:#444;--faint:#999}body{background:#161616}a{color:#8ab4f8}}
@media print{body{max-width:none;margin:0;font-size:11px}svg{min-width:0}.scroll{overflow:visible}td,th{padding:.1rem .3rem}
.text:first-child{min-width:8rem}tr,svg{break-inside:avoid}h2{break-after:avoid}}"""


@dataclass(frozen=True)
class Link:
    """A table cell with a link to another page."""

    text: str
    address: str


def html_page(title: str, *parts: str) -> str:
    """Returns an HTML document of parts from the functions below."""
    view = '<meta name="viewport" content="width=device-width">'
    head = f'<meta charset="utf-8">{view}<title>{escape(title)}</title><style>{STYLE}</style>'
    body = "\n".join([f"<h1>{escape(title)}</h1>", *parts])
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def heading(text: str) -> str:
    """Returns a second-level heading."""
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str) -> str:
    """Returns a paragraph."""
    return f"<p>{escape(text)}</p>"


def preformatted_text(text: str) -> str:
    """Returns preformatted text, with its line breaks."""
    return f'<div class="scroll"><pre>{escape(text)}</pre></div>'


def empty_note(text: str) -> str:
    """Returns a paragraph that explains why a section is empty."""
    return f'<p class="none">{escape(text)}</p>'


def bullet_list(texts: Iterable[str]) -> str:
    """Returns a bullet list."""
    return "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>"


def svg_figure(svg: str) -> str:
    """Returns an SVG picture that scrolls on small screens instead of shrinking."""
    return f'<div class="scroll">{svg}</div>'


def html_table(head: Sequence[str], rows: Iterable[Sequence[str | Link]], texts: int = 1) -> str:
    """Returns a table: the first `texts` columns are text, the others figures; `head` may be empty.

    Columns of figures that have none are left out.
    """
    rows = [list(row) for row in rows]
    shown = [n for n in range(len(head)) if n < texts or not rows or any(row[n] for row in rows)]
    if head and len(shown) < len(head):
        head, rows = [head[n] for n in shown], [[row[n] for n in shown] for row in rows]

    def render_row(cells: Sequence[str | Link], kind: str) -> str:
        opened = [f'<{kind} class="text">'] * texts + [f"<{kind}>"] * (len(cells) - texts)
        return (
            "<tr>"
            + "".join(f"{tag}{_render_cell(cell)}</{kind}>" for tag, cell in zip(opened, cells, strict=True))
            + "</tr>"
        )

    # Long names may break in the head, at their underscores.
    lines = [render_row(head, "th").replace("_", "_<wbr>")] if head else []
    return "\n".join(['<div class="scroll"><table>', *lines, *(render_row(row, "td") for row in rows), "</table></div>"])


def _render_cell(cell: str | Link) -> str:
    if isinstance(cell, str):
        return escape(cell)
    return f'<a href="{escape(cell.address)}">{escape(cell.text)}</a>'
