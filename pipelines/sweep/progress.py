"""A sweep on the terminal: one table, a line for each trial that ended, and below it how many are left.

with Board({"scaling.workers": [1, 2]}, total=16) as board:
    board.ended(result)
"""

import math
import time
from collections.abc import Mapping
from textwrap import shorten
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from raystride.pipelines.sweep.result import Result
from raystride.pipelines.sweep.space import short, shown_value

CAUSE = 100
"""Characters of a cause at most."""
NUMBER = 10
"""Width of a column whose values are drawn from a range."""


class Board:
    """Writes to standard output; without a terminal, lines only. `space` tells the columns."""

    def __init__(self, space: Mapping[str, Any], total: int, quiet: bool = False) -> None:
        self._total, self._ended, self._began = total, 0, time.monotonic()
        self._widths = {key: _width(key, choices) for key, choices in space.items()}
        self._console = Console(highlight=False, soft_wrap=True, quiet=quiet)
        columns = (
            TextColumn("trials"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )
        self._progress = Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal)
        self._task = self._progress.add_task("", total=total)

    def __enter__(self) -> "Board":
        if self._total:
            names = (f"{short(key):<{width}}" for key, width in self._widths.items())
            self._console.print("  ".join([*names, f"{'tokens/s':>9}  {'±':>6}  {'loss':>8}  {'seconds':>7}"]))
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()

    def more(self, trials: int, why: str) -> None:
        """So many trials are added, and why."""
        self._total += trials
        self._progress.update(self._task, total=self._total)
        self._console.print(why, markup=False)

    def ended(self, result: Result) -> None:
        """A line for a trial: its speed, how well that is known, and how long it took; or why it has none."""
        self._ended += 1
        left = (time.monotonic() - self._began) / self._ended * (self._total - self._ended)
        self._progress.update(
            self._task, completed=self._ended, description=f"about {left / 60:.0f} min left" if left > 0 else ""
        )
        values = (f"{shown_value(result.settings.get(key)):<{width}}" for key, width in self._widths.items())
        self._console.print("  ".join([*values, figures_of(result)]), markup=False)


def figures_of(result: Result) -> str:
    """Tokens a second, half the 95 % interval, loss, seconds of the trial; or the status and its cause."""
    if not result.measured:
        return f"{result.status.replace('_', ' ')}: {shorten(result.cause, CAUSE, placeholder=' ...')}"
    spread = f"{result.spread:.1%}" if len(result.speeds) > 1 else "-"
    loss = f"{result.final_loss:.4g}" if math.isfinite(result.final_loss) else "-"
    end = "  stopped early" if result.status == "stopped_early" else ""
    return f"{result.speed:>9,.0f}  {spread:>6}  {loss:>8}  {result.seconds:>7.1f}{end}"


def _width(key: str, choices: Any) -> int:
    values = [NUMBER * " "] if isinstance(choices, Mapping) else map(shown_value, choices)
    return max(len(short(key)), *map(len, values))
