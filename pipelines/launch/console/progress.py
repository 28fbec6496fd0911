"""The driver's live progress line: step, losses, tokens per second, time left, or the current phase.

It is updated about twice a second with the dict that `Recorder.state()` returns. On a terminal the line is redrawn in place;
elsewhere (a file, a job's log) a plain line is written about every ten seconds, and whenever the phase changes.

    with Progress() as progress:
        progress.update(recorder.state())
"""

import sys
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO, cast

from raystride.pipelines.observability.record.state import TrainingState

if TYPE_CHECKING:
    from rich.live import Live

BAR_WIDTH = 24
ETA_MIN_STEPS = 10
"""Number of steps after which the time left is logged."""
ETA_MIN_S = 30.0
SUGGESTED_S, MAX_SUGGESTION_S = 600.0, 3600.0
"""For a training longer than the first and at most the second, the flag that shortens it to the first is suggested: its user
may only want to see one."""


class LiveLine:
    """A training's live line, here one that is not shown. Also a context manager that closes it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def update(self, state: TrainingState) -> None:
        """Shows the figures of `Recorder.state()`."""

    def log(self, text: str) -> None:
        """Prints a permanent line above the live one."""

    def close(self) -> None:
        """Ends the line."""


class Progress(LiveLine):
    """Live line with a training's state on `stream` (standard output)."""

    def __init__(self, stream: TextIO | None = None, plain_every_s: float = 10.0) -> None:
        self._stream = stream or sys.stdout
        self._plain_every_s = plain_every_s
        self._live: Live | None = None
        self._written = ""
        self._written_at = float("-inf")
        self._phase: str | None = None
        self._warnings: set[str] = set()
        self._eta_logged = False
        if self._stream.isatty():
            self._live = _start_live_line(self._stream)

    def update(self, state: TrainingState) -> None:
        """Shows `state`, and every new warning in it on a line of its own."""
        for warning in state.get("warnings") or ():
            if warning not in self._warnings:
                self._warnings.add(warning)
                self.log(f"warning: {warning}")
        if (
            not self._eta_logged
            and (state.get("step") or 0) >= ETA_MIN_STEPS
            and (seconds_left := state.get("eta") or 0.0) >= ETA_MIN_S
        ):
            self._eta_logged = True
            self.log(
                format_time_left(seconds_left, (state.get("steps") or 0) - (state.get("step") or 0), state.get("steps") or 0)
            )
        line = progress_line(state)
        if self._live is not None:
            self._live.update(_to_rich_text(line), refresh=True)
            return
        phase_changed = state.get("phase") != self._phase
        self._phase = state.get("phase")
        if phase_changed or monotonic() - self._written_at >= self._plain_every_s:
            self._write(line)

    def log(self, text: str) -> None:
        """Prints a permanent line above the live one."""
        if self._live is not None:
            self._live.console.print(_to_rich_text(text))
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Ends the line. May be called twice."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _write(self, line: str) -> None:
        self._written_at = monotonic()
        if line != self._written:
            self._written = line
            print(line, file=self._stream, flush=True)


def progress_line(state: TrainingState) -> str:
    """Returns the state as one line: a bar and figures after the first step, the phase before it."""
    step, steps = state.get("step"), state.get("steps")
    parts = [f"{label} {text}".strip() for label, text in progress_figures(state)]
    if step and steps:
        done = min(1.0, step / steps)
        parts.insert(0, "━" * round(done * BAR_WIDTH) + "╌" * (BAR_WIDTH - round(done * BAR_WIDTH)))
    return "  ".join(parts)


def progress_figures(state: TrainingState) -> list[tuple[str, str]]:
    """Returns the labels and texts of a state's figures; before the first step its phase alone, which has no label."""
    step, steps = state.get("step"), state.get("steps")
    if not step:
        return [("", str(state.get("phase") or "starting ..."))]
    figures = [("step", f"{step:,}" + (f"/{steps:,}" if steps else ""))]
    figures += [
        (label, format_value(value))
        for key, label, format_value in (
            ("loss", "loss", _format_loss),
            ("val_loss", "val_loss", _format_loss),
            ("scores", "", _format_scores),
            ("tokens_per_second", f"{state.get('rate_unit', 'tokens')}/s", _format_rate),
            ("eta", "eta", format_duration),
        )
        if (value := cast(Any, state.get(key))) not in (None, {})
    ]
    return [*figures, ("", str(state["phase"]))] if state.get("phase") else figures


def format_time_left(seconds: float, steps_left: int, steps: int) -> str:
    """Returns the time that the steps left will take, and for a training of some length the flag that shortens it."""
    text = f"about {format_duration(seconds)} remaining"
    if not SUGGESTED_S < seconds <= MAX_SUGGESTION_S:
        return text
    fewer = steps - steps_left + int(steps_left * SUGGESTED_S / seconds)
    digits = 10 ** max(0, len(str(fewer)) - 2)
    return f"{text}; --train.steps {max(1, fewer // digits * digits)} would take ten minutes"


def format_duration(seconds: float) -> str:
    """Formats seconds for people: `42 s`, `3:07 min`, `5:02 h`."""
    total_s = max(0, round(seconds))
    if total_s < 60:
        return f"{total_s} s"
    if total_s < 3600:
        return f"{total_s // 60}:{total_s % 60:02} min"
    return f"{total_s // 3600}:{total_s % 3600 // 60:02} h"


def _format_loss(value: float) -> str:
    return f"{value:.4f}"


def _format_scores(values: dict[str, float]) -> str:
    """Formats the scores over all data; those of a mixture's single sources are only in the record."""
    return "  ".join(f"{name} {value:.4g}" for name, value in values.items() if "/" not in name)


def _format_rate(value: float) -> str:
    return f"{value:,.0f}"


def _start_live_line(stream: TextIO) -> "Live":
    from rich.console import Console
    from rich.live import Live

    # Refreshed explicitly: rich's own thread would wake up ten times a second during the training.
    live = Live(console=Console(file=stream), auto_refresh=False)
    live.start()
    return live


def _to_rich_text(line: str) -> Any:
    from rich.text import Text

    return Text(line, no_wrap=True, overflow="ellipsis")
