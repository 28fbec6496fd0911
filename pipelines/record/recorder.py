"""The one writer of a run's record: takes entries from all senders, keeps the journal, has MLflow follow it, sums up.

A plain class with a thread. `launch` makes it an actor on the driver's node, with threads enough for `state` to answer while
`finish` works; inline it is used as it is. Only what lies in the journal on disk is acknowledged, so killing the recorder
loses nothing: its successor reads the journal, and the senders send the rest again.

    recorder = Recorder(folder, "my-run", "a1", Record(), storage, parameters={}, tags={}, total_steps=1000)
    sender = Sender(recorder.receive, "rank0")
    ...; sender.flush(10.0); summary = recorder.finish("finished")
"""

import json
import secrets
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from raystride.pipelines.config.run import Record
from raystride.pipelines.files import Folder
from raystride.pipelines.record.entry import Entry, EventText, check_entry, new_entry, warning, without_secrets
from raystride.pipelines.record.group import Group
from raystride.pipelines.record.journal import Journal, join, plain
from raystride.pipelines.record.mlflow_follower import Follower, replay_hint
from raystride.pipelines.record.mlflow_log import MlflowLog
from raystride.pipelines.record.mlflow_process import MlflowProcess
from raystride.pipelines.record.sender import Receipt
from raystride.pipelines.record.state import State, TrainingState, run_figures
from raystride.pipelines.record.summary import RunSummary, build_summary
from raystride.pipelines.record.tensorboard_log import TensorboardLog

SHORTEST_S, LONGEST_S = 1.0, 10.0
SEGMENTS_AT_FULL_PACE = 300
"""Segments come each second at first and then ever less often, so that a run of a day has thousands and not a hundred."""
URGENT = frozenset({"checkpoint", "error", "summary", "artifact"})
MOST_WAITING = 500_000
"""Entries held for a storage that does not take them; beyond that senders keep theirs."""
OF_INTERVALS = ("tokens_per_second", "mfu", "step_seconds_p50", "step_seconds_p95", "data_wait_share", "peak_memory_bytes")
"""Figures of which the newest is that of the last interval; the whole run's are logged at its end as `run_<name>`."""
MLFLOW_END_S = 20.0
"""Seconds that the end of a run waits for a tracking server that is slow or away."""
SUMS = ".sums.json"
"""The end of a file's name beside the segments, after the attempt's: it keeps the group's sums."""
SUMS_BYTES_A_SECOND = 100_000
"""How much of that file is written at most, on average."""
LOOK_S = 0.5
BUSY_END_S = 60.0
"""Seconds that it waits on where the delay is this machine's: a client not loaded yet, a database beside the runs."""


class Recorder:
    """The record of one attempt of one run. `total_steps` is where the run ends, None if that is not known.

    Raises OSError where the run's folder cannot be read; later errors are warnings in `state()`.
    """

    def __init__(
        self,
        run_folder: Folder,
        run: str,
        attempt: str,
        settings: Record,
        storage: Folder,
        parameters: dict[str, Any],
        tags: dict[str, str],
        total_steps: int | None = None,
    ) -> None:
        self._folder, self._run, self._attempt = run_folder, run, attempt
        self._journal = Journal(run_folder, attempt)
        self._name = secrets.token_hex(8)
        self._state, self._group = State(total_steps), Group()
        self._recorded: dict[str, int] = {}
        """By sender, the newest entry that the journal had when this recorder began."""
        bins = 0
        for entry in self._journal.entries():  # of a recorder of this attempt that died
            self._recorded[entry["sender"]] = max(entry["sequence"], self._recorded.get(entry["sender"], 0))
            self._state.see(entry)
            bins += entry["kind"] == "ranks"
        self._sums_file = f"journal/{attempt}{SUMS}"
        self._summed: dict[str, int] = {}
        """By sender, the newest entry that is in the sums of the group."""
        self._unkept: dict[str, int] = {}
        """By sender, the oldest entry that is in the sums, and not in the file that keeps them."""
        self._sums_due = 0.0
        if self._recorded:
            self._restore_sums(bins)
        # What a sender has sent that is in no sums yet is wanted once more, although later entries are in the journal.
        self._received = {name: min(number, self._summed.get(name, number)) for name, number in self._recorded.items()}
        self._durable = dict(self._received)
        self._waiting: list[Entry] = []
        self._lock = threading.Lock()  # guards the four above; never held over I/O
        self._writing = threading.Lock()
        self._started = time.monotonic()
        self._wake = threading.Event()
        self._ended = False
        log = MlflowLog.at(run_folder, run, settings, storage)
        self._mlflow = MlflowProcess(log) if log else None
        self._follower = Follower(run_folder, self._mlflow, self._warn) if self._mlflow else None
        self._tensorboard = TensorboardLog(run_folder, attempt) if settings.tensorboard else None
        if "recorder" not in self._recorded:  # its own entries: not again where it took over from one that died
            self._put_own(new_entry("event", {"name": "attempt", "text": f"attempt {attempt} of {run} begins"}))
            self._put_own(new_entry("parameters", parameters))
            self._put_own(new_entry("tags", tags | {"raystride.attempt": attempt}))
        if settings.mlflow and log is None:
            self._warn(
                f"record.mlflow_uri is not set and {storage} is remote, where no database can lie: the run is not logged to "
                "MLflow. Give a tracking server with --record.mlflow_uri, or --record.mlflow false"
            )
        self._thread = threading.Thread(target=self._keep_writing, name="recorder", daemon=True)
        self._thread.start()

    def receive(self, sender: str, entries: list[Entry], recorder: str = "") -> Receipt:
        """Takes a sender's entries, in order, unless it takes this for another `recorder`; see `Post`. Never raises."""
        urgent = False
        with self._lock:
            for entry in entries if recorder in ("", self._name) else ():
                try:
                    urgent |= self._take(sender, int(entry["sequence"]), entry)
                except (KeyError, TypeError, ValueError) as error:
                    self._state.warn(f"{sender} sent an entry without a sequence number ({error!r})")
            receipt = Receipt(self._name, self._received.get(sender, 0), self._durable.get(sender, 0))
            made = self._group.made()
        for entry in made:
            self._put_own(entry)
        if urgent:
            self._wake.set()
        return receipt

    def state(self) -> TrainingState:
        """The newest figures, for the progress line: those of `State.shown`, and `mlflow`, the run's link (or None)."""
        with self._lock:
            shown = self._state.shown()
        return shown | {"mlflow": self._follower.link if self._follower else None}

    def finish(self, status: str, summary: RunSummary | None = None, artifacts: list[str] | None = None) -> RunSummary:
        """Ends the record: journal joined, MLflow caught up (in bounded time), `summary.json` written. The summary.

        `status` is one of `STATUSES`; `summary` overrides what the senders gave; `artifacts` names files in
        the run's folder to log besides the usual ones. Raises ValueError for another status. A second call changes nothing
        but the summary.
        """
        result, figures = self.outline(status, summary), self._figures()
        numbers = {name: value for name, value in figures.items() if isinstance(value, float)}
        numbers |= {f"run_{name}": value for name in OF_INTERVALS if isinstance(value := result.get(name), int | float)}
        for entry in self._group.rest() if not self._ended else ():
            self._put_own(entry)
        if numbers and not self._ended:
            self._put_own(new_entry("system", numbers, result["steps"]))
        for name in artifacts or ():
            self._put_own(new_entry("artifact", {"name": name}))
        if not self._ended:
            end: EventText = {"name": "end", "text": f"attempt {self._attempt} ends: {status}"}
            self._put_own(new_entry("event", end, result["steps"]))
        self.end_writing()
        self._try(lambda: self._folder.remove(self._sums_file), "the end of the group's sums")
        self._try(lambda: join(self._folder), "the joined journal")
        result["mlflow_run_id"] = self._follower.run_id if self._follower else None
        self._try(lambda: self._folder.put_json("summary.json", result), "summary.json")
        self._end_mlflow(status)
        # The run may have been made only while its end was told.
        if self._follower and self._follower.run_id != result["mlflow_run_id"]:
            result["mlflow_run_id"] = self._follower.run_id
            self._try(lambda: self._folder.put_json("summary.json", result), "summary.json")
        with self._lock:
            self._state.status = status
        return result

    def _end_mlflow(self, status: str) -> None:
        """Has MLflow told the rest and the end, in bounded time, and ends its process; once."""
        if not (self._follower and self._mlflow):
            return
        self._mlflow.come_forward()
        told, busy_until = self._follower.finish(status, MLFLOW_END_S), time.monotonic() + BUSY_END_S
        if not told and self._mlflow.waits_for_this_machine:
            while not told and self._mlflow.waits_for_this_machine and time.monotonic() < busy_until:
                told = self._follower.await_end(LOOK_S)
            told = told or self._follower.await_end(MLFLOW_END_S)  # of the server, which was not asked before
        if not told:
            cause = self._follower.cause or "it has not answered yet"
            hint = replay_hint(self._folder)
            self._warn(f"MLflow lacks the end of this run, which is safe in its journal: {hint} ({cause})")
        self._follower.close()
        self._mlflow.close()
        self._mlflow = None

    def outline(self, status: str, summary: RunSummary | None = None) -> RunSummary:
        """The summary as it would be if the run ended now, for what is made of it before it does."""
        figures = self._figures()
        with self._lock:
            compared = self._group.figures()
            newest, given = dict(self._state.newest), figures | compared | self._state.summary | (summary or {})
            given.setdefault("steps", self._state.step)
        return build_summary(self._run, status, newest, given)

    def _figures(self) -> RunSummary:
        """Energy, throttling and idling of all nodes, as far as their newest totals tell it."""
        with self._lock:
            return run_figures(self._state.totals.values())

    def _take(self, sender: str, sequence: int, entry: Entry) -> bool:
        """Queues an entry unless it is known; whether it should be written at once. The lock is held."""
        if sequence <= self._received.get(sender, 0) or len(self._waiting) >= MOST_WAITING:
            return False
        try:
            check_entry(entry)
            entry = without_secrets(entry)
            self._state.see(entry)
        except (KeyError, TypeError, ValueError) as error:
            # A warning takes its place under its number, so that the sender does not offer it for ever.
            entry = warning(f"{sender} sent an entry that cannot be read ({error!r})")
            self._state.see(entry)
        entry = entry.copy()  # inline the sender holds the same dict, and may send it again
        entry |= {"attempt": self._attempt, "sender": sender, "sequence": sequence}
        self._received[sender] = sequence
        if self._group.takes(entry):
            self._summed[sender] = sequence
            self._unkept.setdefault(sender, sequence)
        elif sequence > self._recorded.get(sender, 0):
            self._waiting.append(entry)
        return entry["kind"] in URGENT

    def _restore_sums(self, bins: int) -> None:
        """Goes on with the group's sums of a recorder of this attempt that died, after which so many bins were recorded."""
        try:
            content = self._folder.read_json(self._sums_file)
            self._group, self._summed = Group.restored(content["group"], bins), dict(content["summed"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):  # of an earlier version, which kept none
            return

    def _put_own(self, entry: Entry) -> None:
        with self._lock:
            self._take("recorder", self._received.get("recorder", 0) + 1, entry)

    def _keep_writing(self) -> None:
        while not self._ended:
            pace = (time.monotonic() - self._started) / SEGMENTS_AT_FULL_PACE
            self._wake.wait(min(LONGEST_S, max(SHORTEST_S, pace)))
            self._wake.clear()
            self._try(self._write, "the journal")

    def _write(self) -> None:
        """Writes what waits as one segment, and the sums of the group, and only then counts what came as recorded."""
        # The thread and the end may both write, but no entry twice; senders wait for `_lock`, so it is not held meanwhile.
        with self._writing:
            with self._lock:
                batch, received = list(self._waiting), dict(self._received)
                sums, unkept = self._take_sums()
            kept = False
            try:
                segment = self._journal.append(batch) if batch else None
                kept = bool(sums) and self._try(partial(self._keep_sums, sums), "the sums of workers' times")
            finally:
                with self._lock:
                    self._unkept |= {} if kept else unkept
            with self._lock:
                del self._waiting[: len(batch)]
                self._durable = {
                    name: min(number, self._unkept.get(name, number + 1) - 1) for name, number in received.items()
                }
            if self._tensorboard and batch:
                self._try(partial(self._tensorboard.add, batch), "TensorBoard's file")
        if self._follower and segment:
            self._follower.add(segment, batch)

    def _take_sums(self) -> tuple[dict[str, Any], dict[str, int]]:
        """The sums of the group, if they are to be kept now, and which entries in them were not kept before.

        The lock is held. Sums of a large group are kept less often: what is in them is acknowledged later.
        """
        if not self._unkept or (time.monotonic() < self._sums_due and not self._ended):
            return {}, {}
        unkept, self._unkept = self._unkept, {}
        return {"group": self._group.to_json(), "summed": dict(self._summed)}, unkept

    def _keep_sums(self, sums: dict[str, Any]) -> None:
        text = json.dumps(plain(sums))
        self._folder.put(self._sums_file, text)
        self._sums_due = time.monotonic() + min(LONGEST_S, len(text) / SUMS_BYTES_A_SECOND)

    def end_writing(self) -> None:
        """Writes what waits; what comes later is not written. All that is left to do where nobody is there to `finish`."""
        self._ended = True
        self._wake.set()
        self._thread.join(timeout=30.0)
        self._try(self._write, "the journal")
        if self._tensorboard:
            self._try(self._tensorboard.close, "TensorBoard's file")

    def _try(self, action: Callable[[], object], what: str) -> bool:
        """Whether it went well; else a warning says that it did not."""
        try:
            action()
            return True
        except Exception as error:
            # A full disk or an object store that is away must not end a training: senders keep what is not written.
            self._warn(f"{what} could not be written to {self._folder} ({type(error).__name__}: {error})")
            return False

    def _warn(self, text: str) -> None:
        with self._lock:
            fresh = self._state.warn(text)
        if fresh:
            self._put_own(warning(text))
