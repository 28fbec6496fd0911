"""Shared style of the SVG pictures in HTML pages: size, axes, and colours of a step's parts.

figure = new_figure(2.6)                                  # inches high
figure.subplots().plot([1, 2], [3, 4])
text = to_svg(figure)
"""

import io
from typing import TYPE_CHECKING

from raystride.pipelines.pages import svg_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_INCHES = 8.6
PART_COLOURS = {
    "data": "#ddcc77",
    "forward": "#88ccee",
    "backward": "#332288",
    "reduce": "#cc6677",
    "update": "#117733",
    "validation": "#aa4499",
    "checkpoint": "#44aa99",
    "rest": "#dddddd",
}
"""Colours of the parts of a step: Paul Tol's muted scheme, distinguishable for colour-blind readers."""
PART_LABELS = {"reduce": "communication", "update": "optimiser"}


def part_label(part: str) -> str:
    """Returns the label of a part of a step."""
    return PART_LABELS.get(part, part)


def new_figure(height: float) -> "Figure":
    """Returns an empty figure of the page's width; `height` is in inches."""
    # Matplotlib's object interface, since pyplot would look for a display and keep every figure.
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
    FigureCanvasSVG(figure)
    return figure


def style_axes(axes: "Axes") -> None:
    """Gives axes a faint grid in the background, and no frame at the top and right."""
    axes.set_axisbelow(True)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def to_svg(figure: "Figure") -> str:
    """Returns the figure as SVG for embedding in HTML, without the XML header; text stays text, in the reader's font.

    The result is deterministic.
    """
    import matplotlib

    stream = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "page"}):
        figure.savefig(stream, format="svg", metadata={"Date": None})
    text = stream.getvalue()
    return svg_figure(text[text.index("<svg") :])
