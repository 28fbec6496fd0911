"""The driver's one live line: step, losses, tokens a second, time left, or what is being waited for.

It is fed with the dict that `Recorder.state()` returns, about twice a second. On a terminal the line is redrawn in place;
elsewhere (a file, a job's log) a plain line is written about every ten seconds, and whenever the phase changes.

    with Progress() as progress:
        progress.update(recorder.state())
"""

import sys
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO, cast

from raystride.pipelines.record.state import TrainingState

if TYPE_CHECKING:
    from rich.live import Live

BAR_WIDTH = 24
TELLING = 10
"""Steps after which it is known how long all of them will take."""
WORTH_TELLING_S = 30.0
SHORT_S, LONG_S = 600.0, 3600.0
"""A training that takes longer than the first and no longer than the second may be of somebody who only wants to see one,
and is told how to shorten it."""


class Progress:
    """A line that shows a training's state on `stream` (standard output). Also a context manager that ends the line."""

    def __init__(self, stream: TextIO | None = None, plain_every_s: float = 10.0) -> None:
        self._stream = stream or sys.stdout
        self._plain_every_s = plain_every_s
        self._live: Live | None = None
        self._written = ""
        self._written_at = float("-inf")
        self._phase: str | None = None
        self._warnings: set[str] = set()
        self._told = False
        if self._stream.isatty():
            self._live = _live_line(self._stream)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def update(self, state: TrainingState) -> None:
        """Shows `state`, and every warning in it once, on a line of its own."""
        for warning in state.get("warnings") or ():
            if warning not in self._warnings:
                self._warnings.add(warning)
                self.note(f"warning: {warning}")
        if not self._told and (state.get("step") or 0) >= TELLING and (left := state.get("eta") or 0.0) >= WORTH_TELLING_S:
            self._told = True
            self.note(time_to_go(left, (state.get("steps") or 0) - (state.get("step") or 0), state.get("steps") or 0))
        line = progress_line(state)
        if self._live is not None:
            self._live.update(_text(line), refresh=True)
            return
        phase_changed = state.get("phase") != self._phase
        self._phase = state.get("phase")
        if phase_changed or monotonic() - self._written_at >= self._plain_every_s:
            self._write(line)

    def note(self, text: str) -> None:
        """Writes a line that stays, above the live one."""
        if self._live is not None:
            self._live.console.print(_text(text))
        else:
            print(text, file=self._stream, flush=True)

    def close(self, state: TrainingState | None = None) -> None:
        """Ends the line, with a last `state` if given. Safe to call twice."""
        if state is not None and self._live is None:
            self._write(progress_line(state))
        if self._live is not None:
            if state is not None:
                self._live.update(_text(progress_line(state)), refresh=True)
            self._live.stop()
            self._live = None

    def _write(self, line: str) -> None:
        self._written_at = monotonic()
        if line != self._written:
            self._written = line
            print(line, file=self._stream, flush=True)


def progress_line(state: TrainingState) -> str:
    """The state as one line: a bar and figures after the first step, the phase before it."""
    step, steps = state.get("step"), state.get("steps")
    if not step:
        return str(state.get("phase") or "starting ...")
    parts = []
    if steps:
        done = min(1.0, step / steps)
        parts.append("━" * round(done * BAR_WIDTH) + "╌" * (BAR_WIDTH - round(done * BAR_WIDTH)))
    parts.append(f"step {step:,}" + (f"/{steps:,}" if steps else ""))
    parts += [
        f"{label} {form(value)}".strip()
        for key, label, form in (
            ("loss", "loss", _loss),
            ("val_loss", "val_loss", _loss),
            ("scores", "", _scores),
            ("tokens_per_second", "tokens/s", _rate),
            ("eta", "left", duration),
        )
        if (value := cast(Any, state.get(key))) not in (None, {})
    ]
    if state.get("phase"):
        parts.append(str(state["phase"]))
    return "  ".join(parts)


def time_to_go(seconds: float, left: int, steps: int) -> str:
    """How long the steps that are left will take, and of a training of some length the flag that shortens it."""
    text = f"some {duration(seconds)} to go"
    if not SHORT_S < seconds <= LONG_S:
        return text
    fewer = steps - left + int(left * SHORT_S / seconds)
    digits = 10 ** max(0, len(str(fewer)) - 2)
    return f"{text}; --train.steps {max(1, fewer // digits * digits)} would take ten minutes"


def duration(seconds: float) -> str:
    """Seconds as a person says them: `42 s`, `3:07 min`, `5:02 h`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02} h"


def _loss(value: float) -> str:
    return f"{value:.4f}"


def _scores(values: dict[str, float]) -> str:
    """Those of all data; a mixture has as many again for each source, which its record holds."""
    return "  ".join(f"{name} {value:.4g}" for name, value in values.items() if "/" not in name)


def _rate(value: float) -> str:
    return f"{value:,.0f}"


def _live_line(stream: TextIO) -> "Live":
    from rich.console import Console
    from rich.live import Live

    # Refreshed by hand: a refreshing thread of its own would wake up ten times a second beside the training.
    live = Live(console=Console(file=stream), auto_refresh=False)
    live.start()
    return live


def _text(line: str) -> Any:
    from rich.text import Text

    return Text(line, no_wrap=True, overflow="ellipsis")
