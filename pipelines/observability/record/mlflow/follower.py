"""Logs a run's journal to MLflow at its own pace, so that an unreachable or hanging tracking server delays nothing else.

The journal is the source of truth; `mlflow.json` records up to which segment MLflow has it. So resuming after a crash,
catching up after an outage and `raystride runs replay` are the same operation: log every segment above that mark. MLflow is
imported when the first measurement is in the journal, since its import (3 s of CPU time) would slow the start of training.

    follower = Follower(run_folder, log, warn=print)
    follower.add(segment, entries); follower.finish("finished", timeout_s=20.0)
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from shlex import quote
from typing import NamedTuple

from raystride.pipelines.observability.record.entry import Entry
from raystride.pipelines.observability.record.journal import Segment, join_segments, list_segments, read_segment
from raystride.pipelines.observability.record.mlflow.log import MlflowLog
from raystride.pipelines.observability.record.mlflow.process import MlflowFailed, MlflowProcess
from raystride.pipelines.system.commands import launch_command, storage_flag
from raystride.pipelines.system.credentials import redact
from raystride.pipelines.system.permit import Permit
from raystride.pipelines.system.storage.folder import Folder

MIN_BACKOFF_S, MAX_BACKOFF_S = 1.0, 30.0
MIN_PASS_INTERVAL_S = 3.0
"""Minimum seconds between two passes: a call to MLflow takes 5 ms of CPU time, and 0.06 ms per metric."""
SEGMENTS_PER_CALL = 32


class Outage(NamedTuple):
    """Kind of error after which nothing is logged, as its warning says it."""

    problem: str
    replay: str
    """When, or by what, the missing entries are logged."""
    marks: tuple[str, ...] = ()
    """Parts of its errors."""
    is_lasting: bool = False
    """Whether it is there until somebody changes something, so that the end of a run does not wait for it."""


OUTAGES = (
    Outage(
        "refuses who asks: look at MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, and at what that user may do "
        "there",
        "by `raystride runs replay` with the right ones",
        ("error code 401", "error code 403", "PERMISSION_DENIED", "UNAUTHENTICATED"),
    ),
    Outage(
        "may not be written by this user: have its folder writable for a group that both are in, or give "
        "--record.mlflow_uri another database or a server",
        "by `raystride runs replay` when it may",
        ("PermissionError", "readonly database"),
        is_lasting=True,
    ),
    Outage(
        "gets nothing, as the package mlflow cannot be imported here: install it, or set --record.mlflow false",
        "by `raystride runs replay` when it can",
        ("ImportError", "ModuleNotFoundError"),
        is_lasting=True,
    ),
)
AWAY = Outage("cannot be reached", "when it is back")
MAX_CACHED = 64
"""Segments cached in memory, so that new ones need not be read back; older ones are read from the journal."""


def replay_command(run_folder: Folder) -> str:
    """Returns the command that brings MLflow up to date with a run's journal."""
    storage, run = run_folder.parent, run_folder.name
    return f"{launch_command()} runs replay {quote(run)} {storage_flag(str(storage))}".rstrip()


def replay(run_folder: Folder, log: MlflowLog, status: str, warn: Callable[[str], None], permit: Permit) -> bool:
    """Logs what MLflow lacks of a run that has ended, and its end, as of its last entry; returns whether it has a journal.

    Raises errors of MLflow and of the storage.
    """
    last = join_segments(run_folder)
    if last is None:
        return False
    Follower(run_folder, log, warn, permit).catch_up()
    log.end_run(status, float(last["time"]))
    return True


class Follower:
    """Thread that logs journal segments to MLflow, with growing pauses after errors. Calls `warn` once per outage."""

    def __init__(
        self,
        run_folder: Folder,
        log: MlflowLog | MlflowProcess,
        warn: Callable[[str], None],
        permit: Permit | None = None,
    ) -> None:
        self._folder, self._log, self._warn, self._permit = run_folder, log, warn, permit or Permit()
        self._known_segments: list[Segment] | None = None
        self._added: list[Segment] = []
        """Segments written since the folder was last listed."""
        self._cached: OrderedDict[Segment, list[Entry]] = OrderedDict()
        self._lacking: dict[Segment, int] = {}
        """Entries of this attempt's segments that MLflow lacks, but for events, which it does not get."""
        self._changed = threading.Condition()
        self._has_work = False
        self._status: str | None = None
        self._ended_at = 0.0
        self.cause = ""
        """Error of the last failed attempt; empty after a successful one."""
        self.is_lasting = False
        """Whether that error is there until somebody changes something."""
        self._is_end_logged = False
        self._tried_end = threading.Event()
        """Set when the end is logged, or waiting for it is of no use."""
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def run_id(self) -> str | None:
        """The MLflow run's id, None before it is created."""
        return self._log.run_id

    @property
    def link(self) -> str | None:
        """Link of the run's page on its server; None before the run is created, and for a database."""
        return self._log.link

    @property
    def backlog(self) -> int:
        """Entries of this attempt that MLflow lacks."""
        with self._changed:
            return sum(self._lacking.values())

    def add(self, segment: Segment, entries: list[Entry]) -> None:
        """Queues a written segment; the first one with measurements starts the thread. Returns at once."""
        with self._changed:
            # MLflow does not store events. Segments dropped from the cache are read from the journal again.
            if self._known_segments is not None:
                self._known_segments.append(segment)
            self._added.append(segment)
            self._lacking[segment] = sum(entry["kind"] != "event" for entry in entries)
            self._cached[segment] = [entry for entry in entries if entry["kind"] != "event"]
            if len(self._cached) > MAX_CACHED:
                self._cached.popitem(last=False)
            self._has_work = True
            self._changed.notify_all()
        if any(entry["kind"] == "metrics" for entry in entries):
            self._start_thread()

    def finish(self, status: str, timeout_s: float) -> bool:
        """Requests the end of the MLflow run with `status`; returns whether all was logged within `timeout_s` seconds."""
        with self._changed:
            self._status, self._ended_at = status, time.time()
            self._has_work = True
            self._is_end_logged = False
            self._tried_end.clear()
            self._changed.notify_all()
        self._start_thread()
        return self.wait_for_end(timeout_s)

    def wait_for_end(self, timeout_s: float) -> bool:
        """Waits longer for the end that `finish` requested; returns whether it came within `timeout_s` seconds more."""
        return self._tried_end.wait(timeout_s) and self._is_end_logged

    def close(self) -> None:
        """Stops the thread; a replay can log the rest."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def catch_up(self) -> None:
        """Logs every segment above the mark in `mlflow.json`, in this thread. Raises errors of MLflow and of the storage."""
        try:
            self._log_pending()
        except FileNotFoundError:  # a segment was merged with its neighbours before it was logged
            self._known_segments = None
            self._log_pending()

    def _log_pending(self) -> None:
        self._log.connect()
        logged = self._log.reference["logged"]
        pending = [segment for segment in self._list_all_segments() if segment.number > logged.get(segment.attempt, 0)]
        while pending:
            batch = pending[:SEGMENTS_PER_CALL]
            # A merged segment ends a call, so that few entries are in memory.
            num_segments = next(
                (number for number, segment in enumerate(batch, 1) if segment.first < segment.number), len(batch)
            )
            self._log_segments(batch[:num_segments])
            pending = pending[num_segments:]

    def _list_all_segments(self) -> list[Segment]:
        """Returns all segments; the folder is listed only once, since listing many files takes long."""
        with self._changed:
            if self._known_segments is not None:
                return list(self._known_segments)
            self._added = []
        listed = list_segments(self._folder)  # without the lock, for which the recorder's writer would wait
        with self._changed:
            # Segments written meanwhile may be in the listing, or in a file that was merged since.
            self._known_segments = listed + [segment for segment in self._added if segment not in listed]
            return list(self._known_segments)

    def _log_segments(self, pending: list[Segment]) -> None:
        """Logs segments in one call, records that in `mlflow.json`, and only then drops them from the cache."""
        with self._changed:
            cached = {segment: self._cached[segment] for segment in pending if segment in self._cached}
        self._permit.check()
        entries: list[Entry] = []
        for segment in pending:
            entries += cached[segment] if segment in cached else read_segment(self._folder, segment)
        for problem in self._log.log(entries):
            self._warn(problem)
        self._log.save_mark(pending)
        with self._changed:
            for segment in cached:
                self._cached.pop(segment, None)
            marks = {segment.attempt: segment.number for segment in pending}  # a merged one stands for those before it
            self._lacking = {
                segment: count for segment, count in self._lacking.items() if segment.number > marks.get(segment.attempt, 0)
            }

    def _is_ending(self) -> bool:
        return self._status is not None or self._closed

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._follow_journal, name="mlflow", daemon=True)
            self._thread.start()

    def _follow_journal(self) -> None:
        pause = MIN_BACKOFF_S
        warned = False
        while not self._closed:
            with self._changed:
                self._changed.wait_for(lambda: self._has_work or self._closed)
                self._has_work = False
                status = self._status
            try:
                self.catch_up()
                if status:
                    self._permit.check()
                    self._log.end_run(status, self._ended_at)
                    self._is_end_logged = True
                    self._tried_end.set()
                pause, warned, self.cause, self.is_lasting = MIN_BACKOFF_S, False, "", False
                with self._changed:
                    self._changed.wait_for(self._is_ending, MIN_PASS_INTERVAL_S)
            except Exception as error:  # MLflow, its database and its server raise errors of any type
                if self._closed or self._permit.is_revoked:
                    return
                cause = redact(str(error) if isinstance(error, MlflowFailed) else f"{type(error).__name__}: {error}")
                self.cause = cause[:200]
                self._log.disconnect()
                outage = next((known for known in OUTAGES if any(mark in cause for mark in known.marks)), AWAY)
                self.is_lasting = outage.is_lasting
                if not warned:
                    warned = True
                    self._warn(
                        f"MLflow at {self._log.public_uri} {outage.problem}; training goes on, and what it misses is "
                        f"replayed {outage.replay} ({self.cause})"
                    )
                if status and self.is_lasting:
                    self._tried_end.set()
                    return
                with self._changed:
                    # If the end of the run waits for this thread, retry at once, and then after a short pause.
                    if status is None and self._status is None:
                        self._changed.wait_for(self._is_ending, pause)
                        pause = min(MAX_BACKOFF_S, 2 * pause)
                    else:
                        self._changed.wait(MIN_BACKOFF_S)
                    self._has_work = True
