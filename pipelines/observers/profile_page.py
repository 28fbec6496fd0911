"""A profile's page: one HTML file without anything from elsewhere, in plain words, for people who open it in a browser.

text = page("Where the time goes", paragraph("Forward takes half."), table(["phase", "ms"], [["forward", "5.1"]]))
"""

from collections.abc import Iterable, Sequence
from html import escape

from pipelines.phases import PARTS, PHASES

STYLE = """body{font:15px/1.5 sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse}td,th{padding:.2rem .8rem;border-bottom:1px solid #ddd;text-align:right}
td:first-child,th:first-child{text-align:left;font-family:monospace;overflow-wrap:anywhere}pre{overflow-x:auto}"""


def page(title: str, *parts: str) -> str:
    """A whole HTML document of parts made by the functions below."""
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    body = "\n".join([f"<h1>{escape(title)}</h1>", *parts])
    return f"<!doctype html><html><head>{head}</head><body>{body}</body></html>\n"


def paragraph(text: str) -> str:
    """Text as a paragraph."""
    return f"<p>{escape(text)}</p>"


def heading(text: str) -> str:
    """A heading within the page."""
    return f"<h2>{escape(text)}</h2>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column is text and whose others are figures."""

    def line(cells: Sequence[str], kind: str) -> str:
        return "<tr>" + "".join(f"<{kind}>{escape(cell)}</{kind}>" for cell in cells) + "</tr>"

    return "\n".join(["<table>", line(head, "th"), *(line(row, "td") for row in rows), "</table>"])


def phase_part(seconds: dict[str, float], elapsed: float, steps: int, on_gpu: bool) -> str:
    """Where the host's time went, by phase: a sentence and a table. `elapsed` is that of all steps of the window."""
    longest = max(PARTS, key=lambda name: seconds.get(name, 0.0))
    text = (
        f"A step took {elapsed / steps * 1e3:.2f} ms by the host's clock, while being watched, which slows it down. "
        f"Most of it went into {longest}: {seconds.get(longest, 0.0) / elapsed:.0%}."
    )
    if on_gpu:
        text += " On a GPU the host's time of forward and backward is that of launching: the device works behind."
    rows = [
        [name, f"{seconds[name] / steps * 1e3:.3f}", f"{seconds[name] / elapsed:.1%}"]
        for name in PHASES
        if seconds.get(name, 0.0) > 0
    ]
    note = "step contains slot, reduce and update; slot contains forward and backward."
    return paragraph(text) + table(["phase", "ms a step", "share"], rows) + paragraph(note)
