"""The recorder, the only writer of a run's record: receives entries, writes journal, TensorBoard, MLflow and summary.

A plain class with a thread. `launch` makes it an actor on the driver's node, with enough threads that `state` answers while
`finish` works; an inline run uses it directly. Only entries in the journal on disk are acknowledged, so killing the recorder
loses nothing: its successor reads the journal, and the senders repeat the rest.

    recorder = Recorder(folder, "my-run", "a1", RecordConfig(), storage, parameters={}, tags={}, total_steps=1000)
    sender = Sender(recorder.receive, "rank0")
    ...; sender.flush(10.0); summary = recorder.finish("finished")
"""

import json
import re
import secrets
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from raystride.pipelines.config.run import RecordConfig
from raystride.pipelines.observability.record.entry import (
    Entry,
    EventText,
    check_entry,
    new_entry,
    redact_entry,
    warning_entry,
)
from raystride.pipelines.observability.record.group import Aggregator
from raystride.pipelines.observability.record.journal import Journal, join_segments, to_json_value
from raystride.pipelines.observability.record.mlflow.follower import Follower, replay_command
from raystride.pipelines.observability.record.mlflow.log import MlflowLog
from raystride.pipelines.observability.record.mlflow.process import MlflowProcess
from raystride.pipelines.observability.record.sender import Receipt
from raystride.pipelines.observability.record.state import StateTracker, TrainingState, run_figures
from raystride.pipelines.observability.record.summary import RunSummary, build_summary, put_summary, read_summary
from raystride.pipelines.observability.record.tensorboard_log import TensorboardLog
from raystride.pipelines.observability.record.usage import Usage, UsageMeter, charged_seconds, with_earlier_attempts
from raystride.pipelines.system.permit import Permit
from raystride.pipelines.system.storage.folder import Folder

MIN_PAUSE_S, MAX_PAUSE_S = 1.0, 10.0
ELAPSED_S_PER_PAUSE_S = 300
"""Elapsed seconds per second of pause between segments: they come every second at first and then ever less often, so that a
run of a day has thousands of segments."""
URGENT_KINDS = frozenset({"checkpoint", "error", "summary", "artifact"})
MAX_WAITING = 500_000
"""Entries held while the storage accepts none; beyond that, senders keep theirs."""
INTERVAL_FIGURES = (
    "tokens_per_second",
    "mfu",
    "step_seconds_p50",
    "step_seconds_p95",
    "data_wait_share",
    "peak_memory_bytes",
)
"""Figures that are measured per interval; those of the whole run are logged at its end as `run_<name>`."""
MLFLOW_END_S = 20.0
"""Seconds that the end of a run waits for a tracking server that is slow or unreachable."""
SUMS_SUFFIX = ".sums.json"
"""Suffix of the file in `journal/`, after the attempt's name, that holds the state of the aggregator."""
MAX_SUMS_BYTES_PER_S = 100_000
"""Average bytes of that file written per second, at most."""
POLL_S = 0.5
BUSY_END_S = 60.0
"""Seconds that the end waits longer if the delay is on this machine: a client not loaded yet, or a database beside the runs.
Not if the run was asked to stop: Ray, Slurm and Kubernetes kill a job about a minute after the request."""


class Recorder:
    """Recorder of one attempt of a run. `total_steps` is the step at which the run ends, None if unknown.

    Raises OSError if the run's folder cannot be read; later errors become warnings in `state()`.
    """

    def __init__(
        self,
        run_folder: Folder,
        run: str,
        attempt: str,
        settings: RecordConfig,
        storage: Folder,
        parameters: dict[str, Any],
        tags: dict[str, str],
        total_steps: int | None = None,
        permit: Permit | None = None,
    ) -> None:
        self._folder, self._run, self._attempt, self._permit = run_folder, run, attempt, permit or Permit()
        self._journal = Journal(run_folder, attempt, self._permit)
        self._name = secrets.token_hex(8)
        self._state, self._group = StateTracker(total_steps), Aggregator()
        self._usage = UsageMeter(attempt, int(parameters.get("workers") or 1), str(parameters.get("device")))
        self._earlier_usage: dict[str, Usage] | None = None
        """That of former attempts, read once: of one that was killed, its whole journal."""
        self._owner = tags.get("raystride.owner")
        self._recorded: dict[str, int] = {}
        """By sender, the newest entry in the journal when this recorder began."""
        bins = 0
        for entry in self._journal.entries():  # written by a recorder of this attempt that died
            self._recorded[entry["sender"]] = max(entry["sequence"], self._recorded.get(entry["sender"], 0))
            self._state.ingest(entry)
            self._usage.note(entry["sender"], float(entry["time"]))
            self._state.groups += _is_first_of_group(entry["sender"], entry["sequence"])
            bins += entry["kind"] == "ranks"
        self._sums_file = f"journal/{attempt}{SUMS_SUFFIX}"
        self._summed: dict[str, int] = {}
        """By sender, the newest entry in the aggregator."""
        self._unsaved: dict[str, int] = {}
        """By sender, the oldest entry in the aggregator but not yet in its file."""
        self._sums_due = 0.0
        if self._recorded:
            self._restore_sums(bins)
        # Entries missing from the restored aggregator must be sent again, although later entries are in the journal.
        self._received = {name: min(number, self._summed.get(name, number)) for name, number in self._recorded.items()}
        self._durable = dict(self._received)
        self._waiting: list[Entry] = []
        self._lock = threading.Lock()  # guards the four above; never held during I/O
        self._writing = threading.Lock()
        self._started = time.monotonic()
        self._wake = threading.Event()
        self._ended = False
        log = MlflowLog.for_run(run_folder, run, settings, storage)
        self._mlflow = MlflowProcess(log) if log else None
        self._follower = Follower(run_folder, self._mlflow, self._warn, self._permit) if self._mlflow else None
        self._tensorboard = TensorboardLog(run_folder, attempt) if settings.tensorboard else None
        if "recorder" not in self._recorded:  # its own first entries, unless it replaces a recorder that died
            self._put_own_entry(new_entry("event", {"name": "attempt", "text": f"attempt {attempt} of {run} begins"}))
            self._put_own_entry(new_entry("parameters", parameters))
            self._put_own_entry(new_entry("tags", tags | {"raystride.attempt": attempt}))
        if settings.mlflow and log is None:
            self._warn(
                f"record.mlflow_uri is not set and {storage} is remote, where no database can lie: the run is not logged to "
                "MLflow. Give a tracking server with --record.mlflow_uri, or --record.mlflow false"
            )
        self._thread = threading.Thread(target=self._write_loop, name="recorder", daemon=True)
        self._thread.start()

    def receive(self, sender: str, entries: list[Entry], recorder: str = "", urgent: bool = False) -> Receipt:
        """Accepts a sender's entries, in order, unless the sender means another `recorder`; see `Post`. Never raises."""
        with self._lock:
            for entry in entries if recorder in ("", self._name) else ():
                try:
                    urgent |= self._enqueue(sender, int(entry["sequence"]), entry)
                except (KeyError, TypeError, ValueError) as error:
                    self._state.add_warning(f"{sender} sent an entry without a sequence number ({error!r})")
            received = self._received.get(sender, 0)
            # Nobody records for a run that was lost, and nobody is to wait for it.
            durable = received if self._permit.is_revoked else self._durable.get(sender, 0)
            receipt = Receipt(self._name, received, durable)
            aggregated = self._group.drain()
        for entry in aggregated:
            self._put_own_entry(entry)
        if urgent and receipt.durable < receipt.received:
            self._wake.set()
        return receipt

    def state(self) -> TrainingState:
        """Returns the newest figures for the progress line: those of `StateTracker`, `mlflow` and `mlflow_backlog`."""
        with self._lock:
            state = self._state.snapshot()
        if self._follower is None:
            return state | {"mlflow": None}
        return state | {"mlflow": self._follower.link, "mlflow_backlog": self._follower.backlog}

    def finish(self, status: str, summary: RunSummary | None = None, artifacts: list[str] | None = None) -> RunSummary:
        """Ends the record: joins the journal, lets MLflow catch up (in bounded time), writes and returns `summary.json`.

        `status` is one of `STATUSES`; `summary` overrides the senders' figures; `artifacts` names files in the run's folder
        to log besides the usual ones. Raises ValueError for another status, and the error of a lost permit with nothing
        written. A second call changes only the summary.
        """
        self._permit.check()
        result, figures = self.preview_summary(status, summary), self._run_figures()
        numbers = {name: value for name, value in figures.items() if isinstance(value, float)}
        numbers |= {f"run_{name}": value for name in INTERVAL_FIGURES if isinstance(value := result.get(name), int | float)}
        for entry in self._group.flush() if not self._ended else ():
            self._put_own_entry(entry)
        if numbers and not self._ended:
            self._put_own_entry(new_entry("system", numbers, result["steps"]))
        for name in artifacts or ():
            self._put_own_entry(new_entry("artifact", {"name": name}))
        if not self._ended:
            end: EventText = {"name": "end", "text": f"attempt {self._attempt} ends: {status}"}
            self._put_own_entry(new_entry("event", end, result["steps"]))
        self.end_writing()
        self._try_or_warn(lambda: self._folder.remove(self._sums_file), "the end of the group's sums")
        self._try_or_warn(lambda: join_segments(self._folder), "the joined journal")
        result["mlflow_run_id"] = self._follower.run_id if self._follower else None
        self._try_or_warn(lambda: put_summary(self._folder, result), "summary.json")
        self._finish_mlflow(status)
        # The MLflow run may have been created only while its end was logged.
        if self._follower and self._follower.run_id != result["mlflow_run_id"]:
            result["mlflow_run_id"] = self._follower.run_id
            self._try_or_warn(lambda: put_summary(self._folder, result), "summary.json")
        with self._lock:
            self._state.status = status
        return result

    def abandon(self) -> None:
        """Ends the threads and MLflow's client, and writes nothing: another driver owns the run."""
        self._ended = True
        self._wake.set()
        if self._follower and self._mlflow:
            self._follower.close()
            self._mlflow.close()
            self._mlflow = None

    def _finish_mlflow(self, status: str) -> None:
        """Logs the rest and the end to MLflow, in bounded time, and ends the client's process; once."""
        if not (self._follower and self._mlflow):
            return
        self._mlflow.raise_priority()
        finished, busy_until = self._follower.finish(status, MLFLOW_END_S), time.monotonic() + BUSY_END_S
        if (
            not finished
            and not self._follower.is_lasting
            and status != "stopped"
            and self._mlflow.is_waiting_for_local_machine
        ):
            while not finished and self._mlflow.is_waiting_for_local_machine and time.monotonic() < busy_until:
                finished = self._follower.wait_for_end(POLL_S)
            finished = finished or self._follower.wait_for_end(MLFLOW_END_S)  # now the server's time
        if not finished:
            cause = self._follower.cause or "it has not answered yet"
            hint = replay_command(self._folder)
            self._warn(f"MLflow lacks the end of this run, which is safe in its journal: {hint} ({cause})")
        self._follower.close()
        self._mlflow.close()
        self._mlflow = None

    def preview_summary(self, status: str, summary: RunSummary | None = None) -> RunSummary:
        """Returns the summary as it would be if the run ended now, for the page that is written before the end."""
        figures = self._run_figures()
        with self._lock:
            compared = self._group.figures()
            newest, given = dict(self._state.newest), figures | compared | self._state.summary | (summary or {})
            given.setdefault("steps", self._state.step)
        given |= cast(RunSummary, charged_seconds(self._attempts_usage()))
        if self._owner:
            given["owner"] = self._owner
        return build_summary(self._run, status, newest, given)

    def _attempts_usage(self) -> dict[str, Usage]:
        """Returns what the attempts of the run have held; without the former ones if the storage cannot be read now."""
        own = self._usage.usage()
        if self._earlier_usage is None:
            try:
                before = read_summary(self._folder).get("usage") or {}
                self._earlier_usage = with_earlier_attempts(self._folder, before | own)
            except (OSError, ValueError):
                return own
        return self._earlier_usage | own

    def _run_figures(self) -> RunSummary:
        """Returns energy, throttling and idling of all nodes from their newest totals."""
        with self._lock:
            return run_figures(self._state.totals.values())

    def _enqueue(self, sender: str, sequence: int, entry: Entry) -> bool:
        """Queues an entry unless it is known; returns whether to write it at once. The lock must be held."""
        if sequence <= self._received.get(sender, 0) or len(self._waiting) >= MAX_WAITING:
            return False
        try:
            check_entry(entry)
            entry = redact_entry(entry)
            self._state.ingest(entry)
        except (KeyError, TypeError, ValueError) as error:
            # A warning replaces it under its number, so that the sender does not repeat it for ever.
            entry = warning_entry(f"{sender} sent an entry that cannot be read ({error!r})")
            self._state.ingest(entry)
        self._usage.note(sender, float(entry["time"]))
        self._state.groups += _is_first_of_group(sender, sequence)
        entry = entry.copy()  # an inline sender holds the same dict, and may send it again
        entry |= {"attempt": self._attempt, "sender": sender, "sequence": sequence}
        self._received[sender] = sequence
        if self._group.ingest(entry):
            self._summed[sender] = sequence
            self._unsaved.setdefault(sender, sequence)
        elif sequence > self._recorded.get(sender, 0):
            self._waiting.append(entry)
        return entry["kind"] in URGENT_KINDS

    def _restore_sums(self, bins: int) -> None:
        """Restores the aggregator of a recorder of this attempt that died; the journal has `bins` bins by now."""
        try:
            content = self._folder.read_json(self._sums_file)
            self._group, self._summed = Aggregator.from_json(content["group"], bins), dict(content["summed"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):  # an earlier version saved none
            return

    def _put_own_entry(self, entry: Entry) -> None:
        with self._lock:
            self._enqueue("recorder", self._received.get("recorder", 0) + 1, entry)

    def _write_loop(self) -> None:
        while not (self._ended or self._permit.is_revoked):
            pace = (time.monotonic() - self._started) / ELAPSED_S_PER_PAUSE_S
            self._wake.wait(min(MAX_PAUSE_S, max(MIN_PAUSE_S, pace)))
            self._wake.clear()
            self._try_or_warn(self._write_segment, "the journal")

    def _write_segment(self) -> None:
        """Writes the waiting entries as one segment, then the aggregator, and only then marks the entries as durable."""
        # The thread and the end may both write, but no entry twice. Senders wait for `_lock`, so it is not held during I/O.
        with self._writing:
            with self._lock:
                batch, received = list(self._waiting), dict(self._received)
                sums, unsaved = self._snapshot_sums()
            saved = False
            try:
                segment = self._journal.append(batch) if batch else None
                saved = bool(sums) and self._try_or_warn(partial(self._save_sums, sums), "the sums of workers' times")
            finally:
                with self._lock:
                    self._unsaved |= {} if saved else unsaved
            with self._lock:
                del self._waiting[: len(batch)]
                self._durable = {
                    name: min(number, self._unsaved.get(name, number + 1) - 1) for name, number in received.items()
                }
            if self._tensorboard and batch:
                self._permit.raise_if_revoked()
                self._try_or_warn(partial(self._tensorboard.add, batch), "TensorBoard's file")
        if self._follower and segment:
            self._follower.add(segment, batch)

    def _snapshot_sums(self) -> tuple[dict[str, Any], dict[str, int]]:
        """Returns the aggregator's state, if it is due to be saved, and the entries in it that were not saved before.

        The lock must be held. A large state is saved less often; its entries are then acknowledged later.
        """
        if not self._unsaved or (time.monotonic() < self._sums_due and not self._ended):
            return {}, {}
        unsaved, self._unsaved = self._unsaved, {}
        return {"group": self._group.to_json(), "summed": dict(self._summed)}, unsaved

    def _save_sums(self, sums: dict[str, Any]) -> None:
        text = json.dumps(to_json_value(sums))
        self._folder.put(self._sums_file, text)
        self._sums_due = time.monotonic() + min(MAX_PAUSE_S, len(text) / MAX_SUMS_BYTES_PER_S)

    def end_writing(self) -> None:
        """Writes the waiting entries and ends the thread; later ones are not written. Enough if nobody can call `finish`."""
        self._ended = True
        self._wake.set()
        self._thread.join(timeout=30.0)
        self._try_or_warn(self._write_segment, "the journal")
        if self._tensorboard:
            self._try_or_warn(self._tensorboard.close, "TensorBoard's file")

    def _try_or_warn(self, action: Callable[[], object], description: str) -> bool:
        """Runs an action; if it fails, records a warning and returns False."""
        try:
            action()
            return True
        except Exception as error:
            # A full disk or an unreachable object store must not end a training: senders keep the unwritten entries.
            self._warn(f"{description} could not be written to {self._folder} ({type(error).__name__}: {error})")
            return False

    def _warn(self, text: str) -> None:
        with self._lock:
            fresh = self._state.add_warning(text)
        if fresh:
            self._put_own_entry(warning_entry(text))


def _is_first_of_group(sender: str, sequence: int) -> bool:
    """Returns whether an entry is the first one of a new group of workers: its rank 0 has a sender of its own."""
    return sequence == 1 and re.match(r"rank0\b", sender) is not None
