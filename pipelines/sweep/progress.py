"""A sweep on the terminal: a line for each trial that ended, and below them how many are left.

with Board(total=16) as board:
    board.ended(result)
"""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pipelines.sweep.result import Result

WIDTH = 46
"""Of the column with the settings."""


class Board:
    """Writes to standard output; without a terminal, lines only."""

    def __init__(self, total: int) -> None:
        self._total, self._ended, self._began = total, 0, time.monotonic()
        self._console = Console(highlight=False, soft_wrap=True)
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
            self._console.print(f"{'settings':<{WIDTH}}  {'tokens/s':>9}  {'±':>6}  {'seconds':>7}")
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()

    def ended(self, result: Result) -> None:
        """A line for a trial."""
        self._ended += 1
        left = (time.monotonic() - self._began) / self._ended * (self._total - self._ended)
        self._progress.update(
            self._task, completed=self._ended, description=f"about {left / 60:.0f} min left" if left > 0 else ""
        )
        self._console.print(line_of(result), markup=False)

    def warn(self, text: str) -> None:
        """A line that is no trial's."""
        self._console.print(f"warning: {text}", markup=False)


def line_of(result: Result) -> str:
    """A trial in a line: its speed, how well that is known, and how long the trial took; or why it has none."""
    label = result.label if len(result.label) <= WIDTH else result.label[: WIDTH - 1] + "…"
    if not result.measured:
        return f"{label:<{WIDTH}}  {result.status.replace('_', ' ')}: {result.cause[:120]}"
    spread = f"{result.spread:.1%}" if len(result.speeds) > 1 else "-"
    end = "  stopped early" if result.status == "stopped_early" else ""
    return f"{label:<{WIDTH}}  {result.speed:>9,.0f}  {spread:>6}  {result.seconds:>7.1f}{end}"
