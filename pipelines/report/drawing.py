"""How pictures are drawn for pages: one size and look, the colours of a step's parts, and SVG that stands in the page.

figure = empty_figure(2.6)                                # inches high
figure.subplots().plot([1, 2], [3, 4])
text = svg(figure)
"""

import io
from typing import TYPE_CHECKING

from raystride.pipelines.pages import picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_INCHES = 8.6
COLOURS = {
    "data": "#ddcc77",
    "forward": "#88ccee",
    "backward": "#332288",
    "reduce": "#cc6677",
    "update": "#117733",
    "validation": "#aa4499",
    "checkpoint": "#44aa99",
    "rest": "#dddddd",
}
"""Of the parts of a step: Paul Tol's muted scheme, which colour-blind readers tell apart."""
WORDS = {"reduce": "communication", "update": "optimiser"}


def spoken(part: str) -> str:
    """What a part of a step is called where people read it."""
    return WORDS.get(part, part)


def empty_figure(height: float) -> "Figure":
    """A figure as wide as the page and so many inches high."""
    # The object interface, since pyplot would look for a display and keep every figure.
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
    FigureCanvasSVG(figure)
    return figure


def bare(axes: "Axes") -> None:
    """A faint grid behind, and no frame."""
    axes.set_axisbelow(True)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def svg(figure: "Figure") -> str:
    """The figure without the XML head, which has no place inside a page; text stays text, in the reader's font.

    The same figure gives the same text.
    """
    import matplotlib

    stream = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "page"}):
        figure.savefig(stream, format="svg", metadata={"Date": None})
    text = stream.getvalue()
    return picture(text[text.index("<svg") :])
