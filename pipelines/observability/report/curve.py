"""A run's loss curve: as text in braille dots (2 x 4 per character), and as a PNG.

Points are (step, value), in any order. Non-finite values are left out of the lines and counted in the legend.

    figures = gather_figures(stream_entries(run_folder))
    print(text_curve(*figures.losses, width=72, height=14))
    save_curve_picture(figures, Path("curve.png"))
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from raystride.pipelines.observability.report.figures import Figures, Point, Points

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Bit of each dot of a braille character, by column and then row (Unicode 2800 and up).
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
VALIDATION_MARK = "o"
TRAINING_COLOUR, VALIDATION_COLOUR, RATE_COLOUR = "#4c72b0", "#dd8452", "#55a868"


def text_curve(points: Sequence[Point], validation: Sequence[Point] = (), width: int = 72, height: int = 14) -> str:
    """Returns the curve in at most `width` x `height` characters, axes included: training loss in dots, validation as `o`.

    Returns a sentence if there is nothing to draw. Raises ValueError for a size too small for the axes.
    """
    if width < 24 or height < 5:
        raise ValueError(f"a curve needs at least 24 x 5 characters, not {width} x {height}")
    lines = [[(x, y) for x, y in part if math.isfinite(y)] for part in (points, validation)]
    finite = lines[0] + lines[1]
    if not finite:
        return "no loss was measured" if not (points or validation) else "every measured loss was not finite"
    low, high = min(y for _, y in finite), max(y for _, y in finite)
    first, last = min(x for x, _ in finite), max(x for x, _ in finite)
    labels = _axis_labels(low, high)
    margin = max(len(label) for label in labels) + 2
    columns, rows = width - margin, height - 3
    grid = _draw_braille(sorted(lines[0]), columns, rows, (first, last), (low, high))
    for x, y in lines[1]:
        column, row = _grid_cell(x, y, columns, rows, (first, last), (low, high))
        grid[row][column] = VALIDATION_MARK
    text = _add_axes(grid, labels, margin)
    text += [_steps_line(first, last, margin, columns), _legend_line(points, validation, lines, margin, width)]
    return "\n".join(line.rstrip() for line in text)


def save_curve_picture(figures: Figures, path: Path, unit: str = "tokens") -> None:
    """Writes a PNG of training and validation loss over steps, and of `unit` a second below. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draw_curve_picture(figures, unit).savefig(path)


def draw_curve_picture(figures: Figures, unit: str = "tokens") -> "Figure":
    """Returns a Matplotlib figure of training and validation loss over steps, and of throughput below."""
    # Matplotlib's object interface, since pyplot would look for a display and keep every figure.
    from matplotlib import figure as matplotlib_figure
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    training, validation = figures.losses
    figure = matplotlib_figure.Figure(figsize=(8, 5.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    loss, rate = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    _plot_line(loss, training, TRAINING_COLOUR, "training")
    _plot_line(loss, validation, VALIDATION_COLOUR, "validation", marker="o")
    loss.set_ylabel("loss")
    if training or validation:
        loss.legend(frameon=False)
    _plot_line(rate, figures.points("tokens_per_second"), RATE_COLOUR, f"{unit}/s")
    rate.set_ylabel(f"{unit}/s")
    rate.set_ylim(bottom=0)
    rate.set_xlabel("step")
    for axes in (loss, rate):
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _plot_line(axes: "Axes", points: Points, colour: str, label: str, marker: str = "") -> None:
    if not points:
        return
    steps, values = zip(*points, strict=True)
    finite_values = [value if math.isfinite(value) else math.nan for value in values]
    axes.plot(
        steps, finite_values, color=colour, label=label, linewidth=1.5, marker=marker or ("." if len(points) == 1 else "")
    )


def _draw_braille(
    line: Points, columns: int, rows: int, steps: tuple[int, int], values: tuple[float, float]
) -> list[list[str]]:
    """Draws the training line in braille on a grid of `rows` x `columns` characters."""
    bits = [[0] * columns for _ in range(rows)]
    cells = [_grid_cell(x, y, columns * 2, rows * 4, steps, values) for x, y in line]
    for start, end in zip(cells, cells[1:] or cells, strict=False):
        for x, y in _points_between(start, end):
            bits[y // 4][x // 2] |= DOTS[x % 2][y % 4]
    return [[chr(0x2800 + mask) if mask else " " for mask in row] for row in bits]


def _grid_cell(
    x: int, y: float, columns: int, rows: int, steps: tuple[int, int], values: tuple[float, float]
) -> tuple[int, int]:
    """Returns column and row of a point; the highest value is in row 0."""
    across = (x - steps[0]) / (steps[1] - steps[0]) if steps[1] > steps[0] else 0.0
    # Halved first, since the difference of two very large values overflows a float.
    spread = values[1] / 2 - values[0] / 2
    down = (values[1] / 2 - y / 2) / spread if spread > 0 else 0.5
    return round(across * (columns - 1)), round(down * (rows - 1))


def _points_between(start: tuple[int, int], end: tuple[int, int]) -> Iterable[tuple[int, int]]:
    """Yields the dots of the straight line from `start` to `end`."""
    length = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    for i in range(length + 1):
        yield (
            start[0] + round((end[0] - start[0]) * i / length),
            start[1] + round((end[1] - start[1]) * i / length),
        )


def _axis_labels(low: float, high: float) -> tuple[str, str, str]:
    """Returns the values at the top, the middle and the bottom, with enough digits to differ."""
    if low == high:
        return "", f"{low:.4g}", ""
    values = (high, high / 2 + low / 2, low)
    for digits in (3, 4, 5, 6, 8):
        texts = [f"{value:.{digits}g}" for value in values]
        if len(set(texts)) == 3:
            break
    return texts[0], texts[1], texts[2]


def _add_axes(grid: list[list[str]], labels: tuple[str, str, str], margin: int) -> list[str]:
    """Returns the grid's lines with the value axis on the left and the step axis below."""
    rows = len(grid)
    label_by_row = {row: label for row, label in zip((0, rows // 2, rows - 1), labels, strict=True) if label}
    lines = [
        f"{label_by_row.get(row, ''):>{margin - 2}} {'┤' if row in label_by_row else '│'}{''.join(characters)}"
        for row, characters in enumerate(grid)
    ]
    return [*lines, f"{'':>{margin - 1}}└{'─' * len(grid[0])}"]


def _steps_line(first: int, last: int, margin: int, columns: int) -> str:
    left, right = str(first), str(last)
    if len(left) + len(right) >= columns:  # no room for both: show the later step
        return right.rjust(margin + columns)
    return " " * margin + left + (right.rjust(columns - len(left)) if last > first else "")


def _legend_line(points: Sequence[Point], validation: Sequence[Point], lines: list[Points], margin: int, width: int) -> str:
    parts = ["step"]
    if lines[0]:
        parts.append(f"⠤⠤ loss {lines[0][-1][1]:.4g}")
    if lines[1]:
        parts.append(f"{VALIDATION_MARK} validation {lines[1][-1][1]:.4g}")
    num_non_finite = len(points) + len(validation) - len(lines[0]) - len(lines[1])
    if num_non_finite:
        parts.append(f"{num_non_finite} not finite")
    return (" " * margin + "   ".join(parts))[:width]
