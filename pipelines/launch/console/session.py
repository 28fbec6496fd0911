"""Driver session of a training: progress line, signals, and its end with record and closing screen.

train = partial(train_on_ray, job, share, recorder, fast_start=True)
summary = run_session(job, recorder, train, SessionHooks(Screen(), Watcher()))
"""

import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.launch.cluster.cluster import CannotRun
from raystride.pipelines.launch.console.failure import TrainingFailed
from raystride.pipelines.launch.console.screen import Screen
from raystride.pipelines.launch.run_store.lease import RunLocked
from raystride.pipelines.observability.record.journal import TEXT_LOG_FILE, join_segments, stream_entries
from raystride.pipelines.observability.record.state import TrainingState, summarize_journal
from raystride.pipelines.observability.record.summary import RunSummary, put_summary
from raystride.pipelines.observability.report import (
    closing_screen,
    gather_figures,
    save_curve_picture,
    text_curve,
    write_page,
)
from raystride.pipelines.observability.report.figures import Figures, Points
from raystride.pipelines.observability.report.run_figures import rate_unit
from raystride.pipelines.system.output import take_unshown
from raystride.pipelines.system.permit import Permit
from raystride.pipelines.system.service_thread import ServiceThread, format_error
from raystride.pipelines.system.signals import signal_exception, termination_signals
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.worker.job import Job

POLL_S = 0.5
SAME_SIGNAL_S = 1.0
"""Seconds after a signal in which another one counts as the same request."""
STOP_RETRY_S = 1.0
"""Seconds after which a failed stop request is repeated."""
MAX_STOP_S = 20.0
"""Seconds that an error of the driver waits for the end of the training; what goes on longer has lost its permit by then."""
START_LOOK_S = 5.0
"""Seconds after which a start shows the reason for its wait, and between two updates of it."""

_end_lock = threading.Lock()  # the plotting library has process-wide settings, and several trainings may end in this process

Train = Callable[[], RunSummary]
"""Trains to the end and returns the summary; raises the training's errors."""


class RunRecorder(Protocol):
    """Interface of the recorder, in any process; see `recorder_handle.RecorderHandle` and `inline.InlineRecorder`."""

    def state(self) -> TrainingState:
        """Returns the newest figures, for the progress line."""
        ...

    def request_stop(self) -> None:
        """Requests that the training save and end."""
        ...

    def preview_summary(self, status: str, summary: RunSummary | None) -> RunSummary:
        """Returns the summary as it would be if the run ended now."""
        ...

    def finish(self, status: str, summary: RunSummary | None) -> RunSummary:
        """Ends the record and returns the summary as written."""
        ...

    def abandon(self) -> None:
        """Ends without writing anything more."""
        ...


class Watcher:
    """Callbacks of a training in the driver, such as those of a sweep. The base class does nothing."""

    def on_state(self, state: TrainingState, request_stop: Callable[[], None]) -> None:
        """Receives the newest figures twice a second. An exception ends the training like one of its own errors."""

    def on_failure(self, error: BaseException) -> None:
        """Receives the error that ended the training."""


@dataclass(frozen=True)
class SessionHooks:
    """Screen, watcher and callbacks of a training in the driver."""

    screen: Screen
    watcher: Watcher
    permit: Permit = field(default_factory=Permit)
    """The right to write the run's files: raises RunLocked once another driver has taken the run over, and DriverIsolated
    after `give_up`.
    """
    give_up: Callable[[str], None] = lambda reason: None
    """Releases the run's lease for a reason, so that another driver may resume the run."""
    check_cluster: Callable[[], None] = lambda: None
    """Raises an error if the cluster has ended."""
    pending_reason: Callable[[], str | None] = lambda: None
    """Returns the reason why a training has not begun, if known. Raises CannotRun if it has waited too long."""


def run_session(job: Job, recorder: RunRecorder, train: Train, hooks: SessionHooks) -> RunSummary:
    """Trains with a progress line, closes the record, shows the closing screen; returns the summary as written.

    Raises TrainingFailed if the training raised; RunLocked if another driver has taken the run over, and CannotRun if
    workers cannot be placed, both without touching the run's files.
    """
    with stop_signals(recorder.request_stop) as received_signals:
        counted = rate_unit(build_task(job.config).unit)
        outcome = _train_and_watch(train, recorder, hooks, f"starting on {job.device} ...", received_signals, counted)
        try:
            if isinstance(outcome, RunLocked | CannotRun):
                raise outcome
            with suppress(OSError):  # a storage that cannot be read takes no run away
                hooks.permit.check()
        except (RunLocked, CannotRun):
            with suppress(Exception):  # the recorder may be out of reach
                recorder.abandon()
            raise
        if isinstance(outcome, BaseException):
            hooks.watcher.on_failure(outcome)
        elif received_signals and outcome.get("ending") == "stopped":
            outcome["interrupted_by"] = received_signals[0]
        with _end_lock:
            return _finish_session(job, recorder, hooks.screen, outcome)


def _train_and_watch(
    train: Train,
    recorder: RunRecorder,
    hooks: SessionHooks,
    phase: str,
    received_signals: Sequence[str],
    counted: str = "tokens",
) -> RunSummary | BaseException:
    """Trains in a thread while this one draws the progress line; returns the summary, or the error raised.

    `counted` is what throughput counts.
    """
    outcome: list[RunSummary | BaseException] = []

    def run_training() -> None:
        try:
            outcome.append(train())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run_training, name="training", daemon=True)
    with hooks.screen.start_progress() as progress:
        progress.update({"phase": phase})
        thread.start()
        began_at, looked_at, stop_logged, outage_logged, link = time.monotonic(), 0.0, False, False, ""
        while thread.is_alive():
            try:
                thread.join(POLL_S)
                hooks.permit.raise_if_revoked()
                hooks.check_cluster()
                try:
                    state = recorder.state()
                    if received_signals:  # with each poll: the recorder that received it may have died since
                        recorder.request_stop()
                except Exception as error:
                    if not outage_logged:
                        outage_logged = True
                        hooks.screen.warn(f"the recorder does not answer, and training goes on: {format_error(error)}")
                    continue
                outage_logged = False
                if not state.get("step") and time.monotonic() - max(began_at, looked_at) > START_LOOK_S:
                    looked_at = time.monotonic()
                    phase = hooks.pending_reason() or phase
                state["rate_unit"] = counted
                waiting = state.get("phase") or (phase if not state.get("step") else None)
                progress.update(state | {"phase": waiting})
                if not link and (link := state.get("mlflow") or ""):
                    progress.log(f"mlflow   {link}")
                if received_signals and not stop_logged:
                    stop_logged = True
                    progress.log("stopping: all workers save and end at the same step (once more to end at once)")
                hooks.watcher.on_state(state | {"phase": waiting}, recorder.request_stop)
            except (Exception, KeyboardInterrupt) as error:
                if not isinstance(error, CannotRun | KeyboardInterrupt):
                    _stop_training(thread, recorder)
                return error
        progress.close()
    return outcome[0]


def _stop_training(thread: threading.Thread, recorder: RunRecorder) -> None:
    """Asks a training to save and end behind an error of the driver, and waits for that."""
    with suppress(Exception):  # the recorder may have died
        recorder.request_stop()
    thread.join(MAX_STOP_S)


@dataclass(frozen=True)
class _Listener:
    """Receiver of signals: one per training."""

    request_stop: Callable[[], None]
    received_signals: list[str]


_listeners: list[_Listener] = []  # process-wide, like signal handlers
_first_signal_at = 0.0


def _handle_signal(number: int, frame: object) -> None:
    global _first_signal_at
    name = signal.Signals(number).name
    if any(listener.received_signals for listener in _listeners):
        if time.monotonic() - _first_signal_at < SAME_SIGNAL_S:
            return
        raise signal_exception(number, f"asked twice to end ({name})")
    _first_signal_at = time.monotonic()
    for listener in _listeners:
        listener.received_signals.append(name)
        # In a thread, since the request goes to an actor and may have to wait; a signal handler must not.
        ServiceThread("stop-request", partial(_pass_on_stop, listener), every_s=0.0, max_pause_s=STOP_RETRY_S).start()


def _pass_on_stop(listener: _Listener) -> bool:
    """Passes a stop request on while its listener is registered; the service repeats a failed one."""
    if any(other is listener for other in _listeners):
        listener.request_stop()
    return True


@contextmanager
def stop_signals(request_stop: Callable[[], None]) -> Iterator[list[str]]:
    """Turns Ctrl-C, SIGTERM and SIGHUP into a stop request, also while the record is closed; a second ends the process.

    A signal within a second of the first is the same request: batch systems and `timeout` send several.

    Yields the list of received signals. Enter it after ray.init, which installs its own handlers. Only the main thread may
    set handlers in Python: if it is inside, it notifies the listeners of all threads; otherwise no thread is notified. A
    signal that the process was started to ignore stays ignored.
    """
    listener = _Listener(request_stop, [])
    main = threading.current_thread() is threading.main_thread()
    previous_handlers = {number: signal.signal(number, _handle_signal) for number in termination_signals()} if main else {}
    _listeners.append(listener)
    try:
        yield listener.received_signals
    finally:
        _listeners.remove(listener)
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def _finish_session(job: Job, recorder: RunRecorder, screen: Screen, outcome: RunSummary | BaseException) -> RunSummary:
    """Draws curve and page, closes the record, shows the closing screen; returns the summary, or raises TrainingFailed.

    Errors while the record is closed become warnings and never hide the outcome of the training.
    """
    error = outcome if isinstance(outcome, BaseException) else None
    final_summary = None if isinstance(outcome, BaseException) else outcome
    status = "failed" if final_summary is None else "stopped" if final_summary.get("ending") == "stopped" else "finished"
    losses: tuple[Points, Points] = [], []
    try:
        try:
            # The recorder answers, so its acknowledged entries are on disk.
            preview = recorder.preview_summary(status, final_summary)
        except Exception:  # it has died, as with Ray's node
            preview = summarize_journal(job.folder, status)
        figures = gather_figures(stream_entries(job.folder))
        losses = figures.losses
        for damage in figures.damages:
            screen.warn(f"the journal is damaged: {damage}")
        _upload_curve(job.folder, figures, rate_unit(preview.get("unit")))
        write_page(job.folder, figures, preview)
    except Exception as problem:
        screen.warn(f"the curve or the page could not be drawn ({problem})")
    try:
        summary = recorder.finish(status, final_summary)
    except Exception as problem:
        screen.warn(f"the recorder could not close the record ({problem}); `raystride runs replay {job.run}` tells MLflow")
        summary = _close_record(job, status) | (final_summary or {})
    state: TrainingState = {}
    with suppress(Exception):
        state = recorder.state()
    for warning in state.get("warnings", []):
        if not (error and str(error) in warning):  # it is on the screen below
            screen.warn(warning)
    training_failed = TrainingFailed(error, step=state.get("step"), folder=job.folder) if error else None
    if training_failed:
        screen.show_failure(str(training_failed))
    curve = text_curve(*losses) if any(losses) else ""
    sample = (
        job.folder.read("sample.txt").decode(errors="replace") if final_summary and job.folder.exists("sample.txt") else ""
    )
    tested = bool(job.config.data.test_source)
    screen.log(closing_screen(summary, job.folder, curve, sample, state.get("mlflow"), has_test_data=tested))
    _log_unshown(job.folder)
    if training_failed:
        raise training_failed from error
    return summary


def _close_record(job: Job, status: str) -> RunSummary:
    """Writes the joined journal and the summary in place of a recorder that has died, as far as the storage lets it."""
    summary: RunSummary = {"status": status}
    with suppress(Exception):
        join_segments(job.folder)
        summary = summary | summarize_journal(job.folder, status)
        put_summary(job.folder, summary)
    return summary


def _log_unshown(folder: Folder) -> None:
    """Adds to `log.txt` the lines that could not be shown because standard output or error had failed."""
    if lines := take_unshown():
        with suppress(OSError):
            log_text = folder.read(TEXT_LOG_FILE).decode() if folder.exists(TEXT_LOG_FILE) else ""
            folder.put(
                TEXT_LOG_FILE, log_text + "not shown on the screen, whose stream had failed:\n" + "\n".join(lines) + "\n"
            )


def _upload_curve(folder: Folder, figures: Figures, unit: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        picture = Path(scratch) / "curve.png"
        save_curve_picture(figures, picture, unit)
        folder.upload(picture, "curve.png")
