"""A training under way, as the driver sees it: progress, signals, and the end with its record and last screen.

summary = conduct(job, recorder, partial(train_on_ray, job, share, recorder, fast_start=True), Screen())
"""

import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from raystride.pipelines.files import Folder
from raystride.pipelines.launch.failure import TrainingFailed
from raystride.pipelines.launch.screen import Screen
from raystride.pipelines.record.journal import stream_entries
from raystride.pipelines.record.state import TrainingState
from raystride.pipelines.record.summary import RunSummary
from raystride.pipelines.report import closing_screen, curve_picture, gather_figures, text_curve, write_page
from raystride.pipelines.report.figures import Figures, Points
from raystride.pipelines.worker.job import Job

POLL_S = 0.5

Train = Callable[[], RunSummary]
"""Trains to the end; returns the summary, raises what the training raises."""


class Recording(Protocol):
    """The recorder, in this process or another; see `recorder_handle.RecorderHandle`, `inline.InlineRecorder`."""

    def state(self) -> TrainingState:
        """The newest figures, for the progress line."""
        ...

    def request_stop(self) -> None:
        """Asks the training to save and end."""
        ...

    def outline(self, status: str, summary: RunSummary | None) -> RunSummary:
        """The summary as it would be if the run ended now."""
        ...

    def finish(self, status: str, summary: RunSummary | None) -> RunSummary:
        """Ends the record and returns the summary as written."""
        ...


class Watcher:
    """Who else follows a training from the driver; a sweep does. By itself it does nothing."""

    def on_state(self, state: TrainingState, request_stop: Callable[[], None]) -> None:
        """Is told the newest figures twice a second. What it raises ends the training like an error of the training's."""

    def on_failure(self, error: BaseException) -> None:
        """Is told what ended the training."""


def conduct(job: Job, recorder: Recording, train: Train, screen: Screen, watcher: Watcher | None = None) -> RunSummary:
    """Trains beside the progress line, closes the record, shows the last screen; returns the summary as written.

    Raises TrainingFailed where the training raised.
    """
    watcher = watcher or Watcher()
    outcome = _watch(train, recorder, screen, f"starting on {job.device} ...", watcher)
    if isinstance(outcome, BaseException):
        watcher.on_failure(outcome)
    return _end(job, recorder, screen, outcome)


def _watch(train: Train, recorder: Recording, screen: Screen, phase: str, watcher: Watcher) -> RunSummary | BaseException:
    """Trains in a thread while this one draws progress and listens to signals; the summary, or what was raised."""
    outcome: list[RunSummary | BaseException] = []

    def body() -> None:
        try:
            outcome.append(train())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=body, name="training", daemon=True)
    with _stop_signals(recorder.request_stop) as told, screen.progress() as progress:
        progress.update({"phase": phase})
        thread.start()
        said, linked = False, ""
        while thread.is_alive():
            try:
                thread.join(POLL_S)
            except KeyboardInterrupt as error:
                return error
            try:
                state = recorder.state()
            except Exception:  # the recorder may be starting again; the training does not depend on it
                continue
            progress.update(state | {"phase": state.get("phase") or (phase if not state.get("step") else None)})
            if not linked and (linked := state.get("mlflow") or ""):
                progress.note(f"mlflow   {linked}")
            if told and not said:
                said = True
                progress.note("stopping: all workers save and end at the same step (once more to end at once)")
            try:
                watcher.on_state(state, recorder.request_stop)
            except Exception as error:
                return error
        progress.close()
    return outcome[0]


@contextmanager
def _stop_signals(request_stop: Callable[[], None]) -> Iterator[list[str]]:
    """Turns Ctrl-C and SIGTERM into a stop request; a second one ends the process as usual. Yields what was received.

    Set after ray.init, which puts its own handlers in place.
    """
    told: list[str] = []

    def handle(number: int, frame: object) -> None:
        if told:
            raise KeyboardInterrupt(f"asked twice to end ({signal.Signals(number).name})")
        told.append(signal.Signals(number).name)
        # From a thread, as the request goes to an actor and may have to wait, which a handler must not.
        threading.Thread(target=request_stop, daemon=True).start()

    # Python lets the main thread alone set handlers, and who uses the library may be in another one.
    if threading.current_thread() is not threading.main_thread():
        yield told
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield told
    finally:
        for number, handler in before.items():
            # None: set by another language, which Python cannot do again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _end(job: Job, recorder: Recording, screen: Screen, outcome: RunSummary | BaseException) -> RunSummary:
    """Draws the curve and the page, closes the record, shows the last screen; the summary, or raises TrainingFailed.

    The record is for people: whatever closing it meets is said, and never hides how the training ended.
    """
    error = outcome if isinstance(outcome, BaseException) else None
    given = None if isinstance(outcome, BaseException) else outcome
    status = "failed" if given is None else "stopped" if given.get("ending") == "stopped" else "finished"
    losses: tuple[Points, Points] = [], []
    try:
        outline = recorder.outline(status, given)  # the recorder answers, so what it acknowledged is on disk
        figures = gather_figures(stream_entries(job.folder))
        losses = figures.losses
        _put_picture(job.folder, figures)
        write_page(job.folder, figures, outline)
    except Exception as problem:
        screen.warning(f"the curve or the page could not be drawn ({problem})")
    try:
        summary = recorder.finish(status, given)
    except Exception as problem:
        screen.warning(f"the record could not be closed ({problem}); `raystride runs replay {job.run}` does it")
        summary = {"status": status} | (given or {})
    state: TrainingState = {}
    with suppress(Exception):
        state = recorder.state()
    for warning in state.get("warnings", []):
        if not (error and str(error) in warning):  # it is on the screen below
            screen.warning(warning)
    failed = TrainingFailed(error, step=state.get("step"), folder=job.folder) if error else None
    if failed:
        screen.failure(str(failed))
    curve = text_curve(*losses) if any(losses) else ""
    sample = job.folder.read("sample.txt").decode() if given and job.folder.exists("sample.txt") else ""
    screen.line(closing_screen(summary, job.folder, curve, sample, state.get("mlflow")))
    if failed:
        raise failed from error
    return summary


def _put_picture(folder: Folder, figures: Figures) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        picture = Path(scratch) / "curve.png"
        curve_picture(figures, picture)
        folder.upload(picture, "curve.png")
