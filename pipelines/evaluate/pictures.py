"""Plots of a classifier's predictions: the confusion matrix, and reliability, its accuracy by confidence.

folder.put("confusion.png", draw_confusion(["ham", "spam"], task.confusion(table)))
folder.put("reliability.png", draw_reliability(confidence, is_right))
"""

import io
from typing import TYPE_CHECKING

import numpy as np

from raystride.pipelines.report.drawing import MAX_NAMED_LABELS, plot_confusion
from raystride.pipelines.tasks.labels import BINS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_confusion(labels: list[str], confusion: np.ndarray) -> bytes:
    """Returns a PNG of the matrix (true, given), coloured by the share of each true label."""
    size = 3 + 0.35 * min(len(labels), MAX_NAMED_LABELS)
    figure = _new_figure(size, size)
    plot_confusion(figure.subplots(), labels, confusion)
    return _render_png(figure)


def draw_reliability(confidence: np.ndarray, right: np.ndarray) -> bytes:
    """Returns a PNG of accuracy by confidence (n), in BINS, with the ideal line."""
    bins = np.ceil(confidence * BINS).astype(int)
    counts = np.bincount(bins, minlength=BINS + 1)
    shown = counts > 0
    accuracy = np.bincount(bins, right, BINS + 1)[shown] / counts[shown]
    mean_confidence = np.bincount(bins, confidence, BINS + 1)[shown] / counts[shown]
    figure = _new_figure(4.5, 4.5)
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8, linestyle="--")
    axes.plot(mean_confidence, accuracy, marker="o")
    for x, y, count in zip(mean_confidence, accuracy, counts[shown], strict=True):
        axes.annotate(f"{count:,}", (x, y), textcoords="offset points", xytext=(4, -10), fontsize=7)
    axes.set(xlabel="how sure it is", ylabel="how often it is right", xlim=(0, 1.02), ylim=(0, 1.02))
    return _render_png(figure)


def _new_figure(width: float, height: float) -> "Figure":
    # The object interface, since pyplot would look for a display and keep every figure.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", dpi=110)


def _render_png(figure: "Figure") -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png")
    return stream.getvalue()
