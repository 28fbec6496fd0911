"""Shared style of the SVG pictures in HTML pages: size, axes, and colours of a step's parts.

figure = new_figure(2.6)                                  # inches high
figure.subplots().plot([1, 2], [3, 4])
text = to_svg(figure)
"""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from raystride.pipelines.observability.pages import svg_figure

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
MAX_NAMED_LABELS, MAX_COUNTED_LABELS = 60, 25
"""Maximum of labels with names at a confusion matrix, and with counts in its fields."""
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


def plot_confusion(axes: "Axes", labels: Sequence[str], confusion: np.ndarray) -> None:
    """Draws a confusion matrix (true, predicted), coloured by the share of each true label."""
    shares = confusion / np.maximum(confusion.sum(1, keepdims=True), 1)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axes.set(xlabel="predicted", ylabel="true")
    if len(labels) <= MAX_NAMED_LABELS:
        # Labels are arbitrary text: two `$` in one would be parsed as TeX, and invalid TeX raises.
        axes.set_xticks(range(len(labels)), labels, rotation=90, parse_math=False)
        axes.set_yticks(range(len(labels)), labels, parse_math=False)
    if len(labels) <= MAX_COUNTED_LABELS:
        for (true, given), count in np.ndenumerate(confusion):
            colour = "white" if shares[true, given] > 0.5 else "black"
            axes.text(given, true, f"{count:,}", ha="center", va="center", color=colour, fontsize=8)


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
