"""Screen output of a training: for people on a terminal, or for programs only warnings.

screen = Screen()                                         # or SilentScreen()
screen.log("run lm_python-1f3a90c2 in /home/me/runs")
with screen.start_progress() as progress: progress.update(recorder.state())
"""

import logging
import sys
import warnings

from raystride.pipelines.launch.console.notebook import NotebookProgress, in_notebook
from raystride.pipelines.launch.console.progress import LiveLine, Progress
from raystride.pipelines.system.credentials import redact


class Screen:
    """Output for people: lines on standard output, warnings and failures on standard error."""

    is_visible = True
    """Whether the output is shown."""

    def log(self, text: str) -> None:
        """Prints lines on standard output."""
        print(redact(text), flush=True)

    def notice(self, text: str) -> None:
        """Prints lines that a program must not miss either."""
        self.log(text)

    def warn(self, text: str) -> None:
        """Prints a warning on standard error."""
        print(f"warning: {redact(text)}", file=sys.stderr)

    def show_failure(self, text: str) -> None:
        """Prints a failure screen on standard error."""
        print(redact(text), file=sys.stderr)

    def start_progress(self) -> LiveLine:
        """Starts the live line of a training, in a notebook as a display below the cell."""
        return NotebookProgress() if in_notebook() else Progress()


class SilentScreen(Screen):
    """Screen for programs: warnings go to the logger `raystride`, failures are raised, all else is in returned values."""

    is_visible = False

    def log(self, text: str) -> None:
        """Prints nothing: the returned values hold all that a program needs."""

    def notice(self, text: str) -> None:
        """Warns by Python's `warnings`, of the caller's line, each time: a cell of a notebook runs again and again."""
        frame = sys._getframe(1)
        while frame.f_back and str(frame.f_globals.get("__name__")).partition(".")[0] == "raystride":
            frame = frame.f_back
        warnings.warn_explicit(redact(text), UserWarning, frame.f_code.co_filename, frame.f_lineno)

    def warn(self, text: str) -> None:
        """Logs the warning to the logger `raystride`."""
        logging.getLogger("raystride").warning(redact(text))

    def show_failure(self, text: str) -> None:
        """Prints nothing: the failure is raised."""

    def start_progress(self) -> LiveLine:
        """Returns a live line without output."""
        return LiveLine()
