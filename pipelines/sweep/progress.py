"""A sweep on the terminal: one table, a line for each trial that ended, and below it the number left.

with ProgressBoard({"scaling.workers": [1, 2]}, total=16) as board:
    board.add_result(result)
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
from raystride.pipelines.sweep.space import format_value, setting_name

MAX_CAUSE_CHARACTERS = 100
"""Maximum of characters of a cause."""
RANGE_WIDTH = 10
"""Width of a column for values drawn from a range."""


class ProgressBoard:
    """The table on standard output, without a terminal as lines only. `space` gives the columns.

    `quality` is the name of the figure of how well a trial learned, `unit` what throughput counts.
    """

    def __init__(
        self, space: Mapping[str, Any], total: int, quality: str = "loss", unit: str = "tokens", *, quiet: bool = False
    ) -> None:
        self._unit = unit
        self._quality = quality.removeprefix("val_")
        self._total, self._num_ended, self._began = total, 0, time.monotonic()
        self._widths = {key: _column_width(key, choices) for key, choices in space.items()}
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

    def __enter__(self) -> "ProgressBoard":
        if self._total:
            names = (f"{setting_name(key):<{width}}" for key, width in self._widths.items())
            self._console.print("  ".join([*names, f"{f'{self._unit}/s':>9}  {'±':>6}  {self._quality:>8}  {'seconds':>7}"]))
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()

    def add_trials(self, trials: int, reason: str) -> None:
        """Adds `trials` to the total, and prints the reason."""
        self._total += trials
        self._progress.update(self._task, total=self._total)
        self._console.print(reason, markup=False)

    def add_result(self, result: Result) -> None:
        """Prints a line for a trial: its speed with its precision, and its duration; or the reason why it has none."""
        self._num_ended += 1
        seconds_left = (time.monotonic() - self._began) / self._num_ended * (self._total - self._num_ended)
        self._progress.update(
            self._task,
            completed=self._num_ended,
            description=f"about {seconds_left / 60:.0f} min left" if seconds_left > 0 else "",
        )
        values = (f"{format_value(result.settings.get(key)):<{width}}" for key, width in self._widths.items())
        self._console.print("  ".join([*values, format_figures(result)]), markup=False)


def format_figures(result: Result) -> str:
    """Returns tokens a second, half the 95 % interval, loss or metric, and seconds; or the status and its cause."""
    if not result.is_measured:
        return f"{result.status.replace('_', ' ')}: {shorten(result.cause, MAX_CAUSE_CHARACTERS, placeholder=' ...')}"
    spread = f"{result.spread:.1%}" if len(result.speeds) > 1 else "-"
    loss = f"{result.quality:.4g}" if math.isfinite(result.quality) else "-"
    end = "  stopped early" if result.status == "stopped_early" else ""
    width = max(8, len(result.quality_name.removeprefix("val_")))
    return f"{result.speed:>9,.0f}  {spread:>6}  {loss:>{width}}  {result.seconds:>7.1f}{end}"


def _column_width(key: str, choices: Any) -> int:
    values = [RANGE_WIDTH * " "] if isinstance(choices, Mapping) else map(format_value, choices)
    return max(len(setting_name(key)), *map(len, values))
