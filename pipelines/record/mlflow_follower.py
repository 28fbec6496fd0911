"""Has MLflow follow a run's journal, at its own pace: a tracking server that is away or hangs holds up nothing else.

The journal is the truth; `mlflow.json` says how far MLflow has it. So going on after a crash, catching up after an outage
and `raystride runs replay` are one and the same: log every segment above that mark. MLflow is imported when the first
measurement is in the journal, since its import (3 s of processor time) would otherwise slow the start of the training.

    follower = Follower(run_folder, log, warn=print)
    follower.add(segment, entries); follower.finish("finished", timeout_s=20.0)
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from shlex import quote

from raystride.pipelines.commands import of_storage, program
from raystride.pipelines.credentials import hidden
from raystride.pipelines.files import Folder
from raystride.pipelines.record.entry import Entry
from raystride.pipelines.record.journal import Segment, read_segment, segments
from raystride.pipelines.record.mlflow_log import MlflowLog
from raystride.pipelines.record.mlflow_process import MlflowFailed, MlflowProcess

SHORTEST_BACKOFF_S, LONGEST_BACKOFF_S = 1.0, 30.0
PACE_S = 3.0
"""Least seconds between two passes: a call to MLflow takes 5 ms of processor time whatever it logs, 0.06 ms a metric."""
SEGMENTS_A_CALL = 32
SIGNS_OF_REFUSAL = ("error code 401", "error code 403", "PERMISSION_DENIED", "UNAUTHENTICATED")
REFUSED = (
    "refuses who asks: look at MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, and at what that user may do there",
    "by `raystride runs replay` with the right ones",
)
AWAY = ("cannot be reached", "when it is back")
MOST_HELD = 64
"""Segments held in memory, to save reading back what was just written; older ones are read from the journal."""


def replay_hint(run_folder: Folder) -> str:
    """The command that brings MLflow up to date with a run's journal."""
    storage, run = run_folder.parent, run_folder.name
    return f"{program()} runs replay {quote(run)} {of_storage(str(storage))}".rstrip()


class Follower:
    """A thread that logs journal segments to MLflow, with growing pauses while that fails. `warn` is told once an outage."""

    def __init__(self, run_folder: Folder, log: MlflowLog | MlflowProcess, warn: Callable[[str], None]) -> None:
        self._folder, self._log, self._warn = run_folder, log, warn
        self._known: list[Segment] | None = None
        self._added: list[Segment] = []
        """Segments that were written since the folder was last listed."""
        self._held: OrderedDict[Segment, list[Entry]] = OrderedDict()
        self._changed = threading.Condition()
        self._wanted = False
        self._status: str | None = None
        self._ended_at = 0.0
        self.cause = ""
        """The error of the last try that failed; empty if none has since the last that succeeded."""
        self._done = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def run_id(self) -> str | None:
        """The MLflow run's id, None before it was made."""
        return self._log.run_id

    @property
    def link(self) -> str | None:
        """The run's page on its server; None before it was made, and for a database."""
        return self._log.link

    def add(self, segment: Segment, entries: list[Entry]) -> None:
        """Says that a segment was written; the first with measurements starts the thread. Returns at once."""
        with self._changed:
            # MLflow has no place for events. What is not held any more is read from the journal again.
            if self._known is not None:
                self._known.append(segment)
            self._added.append(segment)
            self._held[segment] = [entry for entry in entries if entry["kind"] != "event"]
            if len(self._held) > MOST_HELD:
                self._held.popitem(last=False)
            self._wanted = True
            self._changed.notify_all()
        if any(entry["kind"] == "metrics" for entry in entries):
            self._start()

    def finish(self, status: str, timeout_s: float) -> bool:
        """Has the rest logged and the MLflow run ended with `status`; whether that was done within `timeout_s` seconds."""
        with self._changed:
            self._status, self._ended_at = status, time.time()
            self._wanted = True
            self._done.clear()
            self._changed.notify_all()
        self._start()
        return self._done.wait(timeout_s)

    def await_end(self, timeout_s: float) -> bool:
        """Waits on for what `finish` asked; whether that was done within `timeout_s` seconds more."""
        return self._done.wait(timeout_s)

    def close(self) -> None:
        """Tries nothing more: what is missing is for a replay."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def catch_up(self) -> None:
        """Logs every segment above the reference, here and now. Raises what MLflow or the storage raises."""
        try:
            self._log_missing()
        except FileNotFoundError:  # a segment was merged with its neighbours before it was logged
            self._known = None
            self._log_missing()

    def _log_missing(self) -> None:
        self._log.connect()
        logged = self._log.reference["logged"]
        missing = [segment for segment in self._listed() if segment.number > logged.get(segment.attempt, 0)]
        while missing:
            call = missing[:SEGMENTS_A_CALL]
            # One that was merged of a hundred ends a call, so that few are in memory.
            some = next((number for number, segment in enumerate(call, 1) if segment.first < segment.number), len(call))
            self._log_segments(call[:some])
            missing = missing[some:]

    def _listed(self) -> list[Segment]:
        """All segments: listed once, as listing the folder again and again takes long if there are many."""
        with self._changed:
            if self._known is not None:
                return list(self._known)
            self._added = []
        found = segments(self._folder)  # without the lock, for which the recorder's writer would wait
        with self._changed:
            # What was written meanwhile may be in the listing, or in a file that was merged since.
            self._known = found + [segment for segment in self._added if segment not in found]
            return list(self._known)

    def _log_segments(self, missing: list[Segment]) -> None:
        """Logs some segments in one go, and notes it. What is held of them is dropped only then."""
        with self._changed:
            held = {segment: self._held[segment] for segment in missing if segment in self._held}
        entries: list[Entry] = []
        for segment in missing:
            entries += held[segment] if segment in held else read_segment(self._folder, segment)
        for problem in self._log.log(entries):
            self._warn(problem)
        self._log.note(missing)
        with self._changed:
            for segment in held:
                self._held.pop(segment, None)

    def _is_ending(self) -> bool:
        return self._status is not None or self._closed

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._follow, name="mlflow", daemon=True)
            self._thread.start()

    def _follow(self) -> None:
        pause = SHORTEST_BACKOFF_S
        said = False
        while not self._closed:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or self._closed)
                self._wanted = False
                status = self._status
            try:
                self.catch_up()
                if status:
                    self._log.finish(status, self._ended_at)
                    self._done.set()
                pause, said, self.cause = SHORTEST_BACKOFF_S, False, ""
                with self._changed:
                    self._changed.wait_for(self._is_ending, PACE_S)
            except Exception as error:  # MLflow, its database and its server raise whatever they like
                if self._closed:
                    return
                cause = hidden(str(error) if isinstance(error, MlflowFailed) else f"{type(error).__name__}: {error}")
                self.cause = cause[:200]
                self._log.disconnect()
                if not said:
                    said = True
                    what, when = REFUSED if any(sign in cause for sign in SIGNS_OF_REFUSAL) else AWAY
                    self._warn(
                        f"MLflow at {self._log.public_uri} {what}; training goes on, and what it misses is replayed {when} "
                        f"({self.cause})"
                    )
                with self._changed:
                    # An end that waits for us is worth another try at once, and a short pause after that.
                    if status is None and self._status is None:
                        self._changed.wait_for(self._is_ending, pause)
                        pause = min(LONGEST_BACKOFF_S, 2 * pause)
                    else:
                        self._changed.wait(SHORTEST_BACKOFF_S)
                    self._wanted = True
