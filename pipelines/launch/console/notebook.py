"""Live display of a training below a notebook's cell: a bar, the figures, the losses so far and the lines of the run.

    if in_notebook():
        with NotebookProgress() as progress:
            progress.update(recorder.state())                 # redraws the display in place

HTML and SVG alone: it needs no widgets' extension, and stays in the saved notebook as it ended.
"""

import sys
from html import escape
from time import monotonic
from typing import Any

from raystride.pipelines.launch.console.progress import LiveLine, progress_figures
from raystride.pipelines.observability.record.state import TrainingState

REDRAW_S = 1.0
"""Least seconds between two redraws: each one is a message to the browser, and is kept while the kernel runs."""
MAX_POINTS = 200
"""Points of a curve; of longer trainings every second one is dropped, again and again."""
WIDTH, HEIGHT, MARGIN = 360, 90, 4
"""Size of the curves in pixels, and the space around them."""
COLORS = {"loss": "#1f77b4", "val_loss": "#d62728"}
Point = tuple[int, float]


def in_notebook() -> bool:
    """Returns whether this process is the kernel of a notebook, which shows HTML; a terminal's IPython does not."""
    return getattr(ipython_shell(), "kernel", None) is not None


def ipython_shell() -> Any:
    """Returns the shell of IPython, in a terminal or a notebook; None outside it."""
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get_shell() if get_shell else None


class NotebookProgress(LiveLine):
    """Live display of a training's state; its end draws the last state."""

    def __init__(self) -> None:
        from IPython.display import display

        self._state: TrainingState = {}
        self._lines: list[str] = []
        self._curves: dict[str, list[Point]] = {name: [] for name in COLORS}
        self._drawn_at = float("-inf")
        self._handle: Any = display(self, display_id=True)  # type: ignore[no-untyped-call]  # draws, so it comes last

    def update(self, state: TrainingState) -> None:
        """Shows `state`, and every new warning in it on a line of its own."""
        is_new_phase = state.get("phase") != self._state.get("phase")
        self._state = state
        for warning in state.get("warnings") or ():
            if (line := f"warning: {warning}") not in self._lines:
                self._lines.append(line)
        step = state.get("step")
        for name, points in self._curves.items():
            value: Any = state.get(name)
            if step and value is not None and (not points or (points[-1][0] < step and points[-1][1] != value)):
                points.append((step, value))
                if len(points) > MAX_POINTS:
                    del points[1:-1:2]
        if is_new_phase or monotonic() - self._drawn_at >= REDRAW_S:
            self._redraw()

    def log(self, text: str) -> None:
        """Adds a line below the figures."""
        self._lines.append(text)
        self._redraw()

    def close(self) -> None:
        """Draws the last state. May be called twice."""
        self._redraw()

    def _redraw(self) -> None:
        self._drawn_at = monotonic()
        self._handle.update(self)

    def __repr__(self) -> str:
        return "\n".join(
            [" ".join(f"{label} {text}".strip() for label, text in progress_figures(self._state)), *self._lines]
        )

    def _repr_html_(self) -> str:
        """Returns the display as HTML; a notebook calls it."""
        step, steps = self._state.get("step") or 0, self._state.get("steps")
        bar = f'<progress value="{min(step, steps)}" max="{steps}" style="width:{WIDTH}px"></progress>' if steps else ""
        figures = progress_figures(self._state)
        head = "".join(f'<th style="text-align:right">{escape(label)}</th>' for label, _ in figures)
        cells = "".join(f'<td style="text-align:right">{escape(text)}</td>' for _, text in figures)
        lines = "".join(f"<div>{escape(line)}</div>" for line in self._lines)
        return f"<div>{bar}<table><tr>{head}</tr><tr>{cells}</tr></table>{draw_curves(self._curves)}{lines}</div>"


def draw_curves(curves: dict[str, list[Point]]) -> str:
    """Returns the curves over steps as SVG with their names; "" before a curve has two points."""
    drawn = {name: points for name, points in curves.items() if len(points) > 1}
    if not drawn:
        return ""
    steps = [step for points in drawn.values() for step, _ in points]
    values = [value for points in drawn.values() for _, value in points]
    first, low = min(steps), min(values)
    x_scale = (WIDTH - 2 * MARGIN) / max(1, max(steps) - first)
    y_scale = (HEIGHT - 2 * MARGIN) / (max(values) - low or 1.0)
    shapes = []
    for name, points in drawn.items():
        places = " ".join(
            f"{MARGIN + (step - first) * x_scale:.1f},{HEIGHT - MARGIN - (value - low) * y_scale:.1f}"
            for step, value in points
        )
        shapes.append(f'<polyline points="{places}" fill="none" stroke="{COLORS[name]}" stroke-width="1.5"/>')
    names = " ".join(
        f'<span style="color:{COLORS[name]}">{name} {points[-1][1]:.4f}</span>' for name, points in drawn.items()
    )
    return f'<div><svg width="{WIDTH}" height="{HEIGHT}">{"".join(shapes)}</svg><br/>{names}</div>'
