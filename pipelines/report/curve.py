"""A run's loss curve: as text in braille dots (2 x 4 a character), and as a PNG.

Points are (step, value), in any order. Values that are not finite are left out of the lines and counted below them.

    figures = gather_figures(stream_entries(run_folder))
    print(text_curve(*figures.losses, width=72, height=14))
    curve_picture(figures, Path("curve.png"))
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from raystride.pipelines.report.figures import Figures, Point, Points

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Bit of each dot of a braille character, by column and then row (Unicode 2800 and up).
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
VALIDATION_MARK = "o"
TRAINING_COLOUR, VALIDATION_COLOUR, RATE_COLOUR = "#4c72b0", "#dd8452", "#55a868"


def text_curve(points: Sequence[Point], validation: Sequence[Point] = (), width: int = 72, height: int = 14) -> str:
    """The curve in at most `width` x `height` characters, axes included: training loss in dots, validation as `o`.

    Returns a sentence where there is nothing to draw. Raises ValueError for a picture too small for its axes.
    """
    if width < 24 or height < 5:
        raise ValueError(f"a curve needs at least 24 x 5 characters, not {width} x {height}")
    lines = [[(x, y) for x, y in part if math.isfinite(y)] for part in (points, validation)]
    drawn = lines[0] + lines[1]
    if not drawn:
        return "no loss was measured" if not (points or validation) else "every measured loss was not finite"
    low, high = min(y for _, y in drawn), max(y for _, y in drawn)
    first, last = min(x for x, _ in drawn), max(x for x, _ in drawn)
    labels = _labels(low, high)
    margin = max(len(label) for label in labels) + 2
    columns, rows = width - margin, height - 3
    grid = _dots(sorted(lines[0]), columns, rows, (first, last), (low, high))
    for x, y in lines[1]:
        column, row = _place(x, y, columns, rows, (first, last), (low, high))
        grid[row][column] = VALIDATION_MARK
    text = _framed(grid, labels, margin)
    text += [_steps_line(first, last, margin, columns), _legend(points, validation, lines, margin, width)]
    return "\n".join(line.rstrip() for line in text)


def curve_picture(figures: Figures, path: Path) -> None:
    """Draws training and validation loss over steps, and tokens a second below, as a PNG. Raises OSError."""
    # The object interface, since pyplot would look for a display and keep every figure.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    training, validation = figures.losses
    figure = Figure(figsize=(8, 5.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    loss, rate = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    _draw(loss, training, TRAINING_COLOUR, "training")
    _draw(loss, validation, VALIDATION_COLOUR, "validation", marker="o")
    loss.set_ylabel("loss")
    if training or validation:
        loss.legend(frameon=False)
    _draw(rate, figures.points("tokens_per_second"), RATE_COLOUR, "tokens/s")
    rate.set_ylabel("tokens/s")
    rate.set_ylim(bottom=0)
    rate.set_xlabel("step")
    for axes in (loss, rate):
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw(axes: "Axes", points: Points, colour: str, label: str, marker: str = "") -> None:
    if not points:
        return
    steps, values = zip(*points, strict=True)
    shown = [value if math.isfinite(value) else math.nan for value in values]
    axes.plot(steps, shown, color=colour, label=label, linewidth=1.5, marker=marker or ("." if len(points) == 1 else ""))


def _dots(line: Points, columns: int, rows: int, steps: tuple[int, int], values: tuple[float, float]) -> list[list[str]]:
    """The training line in braille, on a grid of `rows` x `columns` characters."""
    bits = [[0] * columns for _ in range(rows)]
    places = [_place(x, y, columns * 2, rows * 4, steps, values) for x, y in line]
    for start, end in zip(places, places[1:] or places, strict=False):
        for x, y in _between(start, end):
            bits[y // 4][x // 2] |= DOTS[x % 2][y % 4]
    return [[chr(0x2800 + mask) if mask else " " for mask in row] for row in bits]


def _place(
    x: int, y: float, columns: int, rows: int, steps: tuple[int, int], values: tuple[float, float]
) -> tuple[int, int]:
    """Column and row of a point; the highest value is row 0."""
    across = (x - steps[0]) / (steps[1] - steps[0]) if steps[1] > steps[0] else 0.0
    # Halved first, since the difference of two very large values is no float any more.
    spread = values[1] / 2 - values[0] / 2
    down = (values[1] / 2 - y / 2) / spread if spread > 0 else 0.5
    return round(across * (columns - 1)), round(down * (rows - 1))


def _between(start: tuple[int, int], end: tuple[int, int]) -> Iterable[tuple[int, int]]:
    """The dots of the straight line from `start` to `end`."""
    length = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    for i in range(length + 1):
        yield (
            start[0] + round((end[0] - start[0]) * i / length),
            start[1] + round((end[1] - start[1]) * i / length),
        )


def _labels(low: float, high: float) -> tuple[str, str, str]:
    """The values at the top, the middle and the bottom, with as many digits as tell them apart."""
    if low == high:
        return "", f"{low:.4g}", ""
    values = (high, high / 2 + low / 2, low)
    for digits in (3, 4, 5, 6, 8):
        texts = [f"{value:.{digits}g}" for value in values]
        if len(set(texts)) == 3:
            break
    return texts[0], texts[1], texts[2]


def _framed(grid: list[list[str]], labels: tuple[str, str, str], margin: int) -> list[str]:
    """The grid's lines with the value axis to their left and the step axis below."""
    rows = len(grid)
    at = {row: label for row, label in zip((0, rows // 2, rows - 1), labels, strict=True) if label}
    lines = [
        f"{at.get(row, ''):>{margin - 2}} {'┤' if row in at else '│'}{''.join(characters)}"
        for row, characters in enumerate(grid)
    ]
    return [*lines, f"{'':>{margin - 1}}└{'─' * len(grid[0])}"]


def _steps_line(first: int, last: int, margin: int, columns: int) -> str:
    left, right = str(first), str(last)
    if len(left) + len(right) >= columns:  # no room for both: the later step says more
        return right.rjust(margin + columns)
    return " " * margin + left + (right.rjust(columns - len(left)) if last > first else "")


def _legend(points: Sequence[Point], validation: Sequence[Point], lines: list[Points], margin: int, width: int) -> str:
    parts = ["step"]
    if lines[0]:
        parts.append(f"⠤⠤ loss {lines[0][-1][1]:.4g}")
    if lines[1]:
        parts.append(f"{VALIDATION_MARK} validation {lines[1][-1][1]:.4g}")
    lost = len(points) + len(validation) - len(lines[0]) - len(lines[1])
    if lost:
        parts.append(f"{lost} not finite")
    return (" " * margin + "   ".join(parts))[:width]
