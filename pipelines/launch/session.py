"""A training under way, as the driver sees it: progress, signals, and the end with its record and last screen.

train = partial(train_on_ray, job, share, recorder, fast_start=True)
summary = conduct(job, recorder, train, Beside(Screen(), Watcher()))
"""

import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from raystride.pipelines.cluster.cluster import CannotRun
from raystride.pipelines.files import Folder
from raystride.pipelines.launch.failure import TrainingFailed
from raystride.pipelines.launch.owner import Owned
from raystride.pipelines.launch.screen import Screen
from raystride.pipelines.output import take_unshown
from raystride.pipelines.record.journal import READABLE, stream_entries
from raystride.pipelines.record.state import TrainingState
from raystride.pipelines.record.summary import RunSummary
from raystride.pipelines.report import closing_screen, curve_picture, gather_figures, text_curve, write_page
from raystride.pipelines.report.figures import Figures, Points
from raystride.pipelines.service_thread import ServiceThread
from raystride.pipelines.signals import interruption, signals_to_heed
from raystride.pipelines.worker.job import Job

POLL_S = 0.5
SAME_REQUEST_S = 1.0
"""Seconds after a signal in which another one asks for nothing more."""
ASK_AGAIN_S = 1.0
"""Seconds after which a request to stop that could not be passed on is repeated."""
LOOK_S = 5.0
"""Seconds of a start after which it is said what it waits for, and between two looks at that."""

_ending = threading.Lock()  # what draws pictures has settings of the process, and several trainings may end in it

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


@dataclass(frozen=True)
class Beside:
    """What there is beside a training, in the driver."""

    screen: Screen
    watcher: Watcher
    check: Callable[[], None] = lambda: None
    """Raises Owned if another driver has taken the run over, and Isolated after `give_up`."""
    give_up: Callable[[str], None] = lambda reason: None
    """Gives the run up for a reason, so that another driver may go on with it."""
    waits_for: Callable[[], str | None] = lambda: None
    """What a training that has not begun waits for, if it is known. Raises CannotRun where it has waited long enough."""


def conduct(job: Job, recorder: Recording, train: Train, beside: Beside) -> RunSummary:
    """Trains beside the progress line, closes the record, shows the last screen; returns the summary as written.

    Raises TrainingFailed where the training raised; Owned where another driver has taken the run over, and CannotRun where
    the workers find no places, both without touching the run's files.
    """
    with stop_signals(recorder.request_stop) as told:
        outcome = _watch(train, recorder, beside, f"starting on {job.device} ...", told)
        if isinstance(outcome, Owned | CannotRun):
            raise outcome
        if isinstance(outcome, BaseException):
            beside.watcher.on_failure(outcome)
        elif told and outcome.get("ending") == "stopped":
            outcome["interrupted_by"] = told[0]
        with _ending:
            return _end(job, recorder, beside.screen, outcome)


def _watch(train: Train, recorder: Recording, beside: Beside, phase: str, told: Sequence[str]) -> RunSummary | BaseException:
    """Trains in a thread while this one draws progress; the summary, or what was raised."""
    outcome: list[RunSummary | BaseException] = []

    def body() -> None:
        try:
            outcome.append(train())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=body, name="training", daemon=True)
    with beside.screen.progress() as progress:
        progress.update({"phase": phase})
        thread.start()
        began, looked_at, said, linked = time.monotonic(), 0.0, False, ""
        while thread.is_alive():
            try:
                thread.join(POLL_S)
                beside.check()
                if (state := _state(recorder)) is None:
                    continue
                if not state.get("step") and time.monotonic() - max(began, looked_at) > LOOK_S:
                    looked_at = time.monotonic()
                    phase = beside.waits_for() or phase
                waiting = state.get("phase") or (phase if not state.get("step") else None)
                progress.update(state | {"phase": waiting})
                if not linked and (linked := state.get("mlflow") or ""):
                    progress.note(f"mlflow   {linked}")
                if told:
                    with suppress(Exception):  # once more with each look: the recorder that heard of it may have died since
                        recorder.request_stop()
                if told and not said:
                    said = True
                    progress.note("stopping: all workers save and end at the same step (once more to end at once)")
                beside.watcher.on_state(state, recorder.request_stop)
            except (Exception, KeyboardInterrupt) as error:
                return error
        progress.close()
    return outcome[0]


def _state(recorder: Recording) -> TrainingState | None:
    try:
        return recorder.state()
    except Exception:  # the recorder may be starting again; the training does not depend on it
        return None


@dataclass(frozen=True)
class _Listener:
    """Who is told of a signal."""

    request_stop: Callable[[], None]
    told: list[str]


_listeners: list[_Listener] = []  # of the process, as handlers are
_first_at = 0.0


def _handle(number: int, frame: object) -> None:
    global _first_at
    name = signal.Signals(number).name
    if any(each.told for each in _listeners):
        if time.monotonic() - _first_at < SAME_REQUEST_S:
            return
        raise interruption(number, f"asked twice to end ({name})")
    _first_at = time.monotonic()
    for each in _listeners:
        each.told.append(name)
        # From a thread, as the request goes to an actor and may have to wait, which a handler must not.
        ServiceThread("stop-request", partial(_request, each), every_s=0.0, max_pause_s=ASK_AGAIN_S).start()


def _request(listener: _Listener) -> bool:
    """Passes the request on, unless nobody listens any more; one that fails is repeated."""
    if any(each is listener for each in _listeners):
        listener.request_stop()
    return True


@contextmanager
def stop_signals(request_stop: Callable[[], None]) -> Iterator[list[str]]:
    """Turns Ctrl-C, SIGTERM and SIGHUP into a stop request, while the record is closed too; a second one ends the process.

    One that comes within a second of the first is the same request: batch systems and `timeout` send several.

    Yields what was received. Set after ray.init, which puts its own handlers in place. Python lets the main thread alone set
    handlers: one that is inside tells those of all threads, and without it another thread is told nothing. A signal that the
    process was started to ignore stays ignored.
    """
    listener = _Listener(request_stop, [])
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, _handle) for number in signals_to_heed()} if main else {}
    _listeners.append(listener)
    try:
        yield listener.told
    finally:
        _listeners.remove(listener)
        for number, handler in before.items():
            signal.signal(number, handler)


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
    _log_unshown(job.folder)
    if failed:
        raise failed from error
    return summary


def _log_unshown(folder: Folder) -> None:
    """Adds to `log.txt` what nobody could see, since standard output or error had failed."""
    if lines := take_unshown():
        with suppress(OSError):
            before = folder.read(READABLE).decode() if folder.exists(READABLE) else ""
            folder.put(READABLE, before + "not shown on the screen, whose stream had failed:\n" + "\n".join(lines) + "\n")


def _put_picture(folder: Folder, figures: Figures) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        picture = Path(scratch) / "curve.png"
        curve_picture(figures, picture)
        folder.upload(picture, "curve.png")
