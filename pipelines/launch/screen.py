"""What a training shows while it runs and when it ends: to people on a terminal, or to a program nothing but warnings.

screen = Screen()                                         # or Quiet()
screen.line("run lm_python-1f3a90c2 in /home/me/runs")
with screen.progress() as progress: progress.update(recorder.state())
"""

import logging
import sys
from types import TracebackType
from typing import Protocol, Self

from raystride.pipelines.credentials import hidden
from raystride.pipelines.launch.progress import Progress
from raystride.pipelines.record.state import TrainingState


class LiveLine(Protocol):
    """A live line, as `Progress` draws it."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def update(self, state: TrainingState) -> None:
        """Shows the figures that `Recorder.state()` tells."""
        ...

    def note(self, text: str) -> None:
        """Writes a line that stays, above the live one."""
        ...

    def close(self) -> None:
        """Ends the line."""
        ...


class Screen:
    """Lines on standard output, warnings and failures on standard error."""

    seen = True
    """Whether anybody sees it."""

    def line(self, text: str) -> None:
        """Prints lines on standard output."""
        print(hidden(text), flush=True)

    def warning(self, text: str) -> None:
        """Says on standard error that something is not as it should be."""
        print(f"warning: {hidden(text)}", file=sys.stderr)

    def failure(self, text: str) -> None:
        """Shows on standard error why a training failed."""
        print(hidden(text), file=sys.stderr)

    def progress(self) -> LiveLine:
        """The live line of a training."""
        return Progress()


class Quiet(Screen):
    """For programs: warnings go to the logger `raystride`, failures are raised, all else is in what a call returns."""

    seen = False

    def line(self, text: str) -> None:
        """Says nothing: what a program needs is in what the call returns."""

    def warning(self, text: str) -> None:
        """Hands the warning to the logger `raystride`."""
        logging.getLogger("raystride").warning(hidden(text))

    def failure(self, text: str) -> None:
        """Says nothing: the failure is raised."""

    def progress(self) -> LiveLine:
        """A line that nobody sees."""
        return _Unseen()


class _Unseen:
    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass

    def update(self, state: TrainingState) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass
