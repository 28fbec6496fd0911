"""Asynchronous, reliable delivery of a process's entries to the recorder.

`put` takes microseconds. A thread posts new entries about every 0.5 s, and retries after errors with a growing pause. An
entry is kept until it is on the recorder's disk, so that a restarted recorder gets it again. The recorder drops entries that
it knows, so each is recorded exactly once.

    sender = Sender(recorder.receive, "rank0")                       # under Ray: a function that calls the actor
    sender.put("metrics", {"train_loss": 2.31}, step=10)
    sender.flush(10.0)
"""

import itertools
import secrets
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from raystride.pipelines.observability.record.entry import Entry, new_entry, redact_entry, warning_entry
from raystride.pipelines.system.output import print_warning
from raystride.pipelines.system.service_thread import format_error


class Receipt(NamedTuple):
    """A recorder's acknowledgement: the highest sequence number of the sender that it has received, and has made durable."""

    recorder: str
    """Name of the recorder; a restarted one has another name, and has lost the entries that were not durable."""
    received: int
    durable: int


Post = Callable[[str, list[Entry], str, bool], Receipt]
"""Takes a sender's name, entries in order, the name of the recorder with the earlier ones ("" at first), and whether to make
them and the earlier ones durable at once. May raise.

A recorder of another name accepts none of them, since some would be missing; its receipt gives the number of its last one.
"""

MEASUREMENT_KINDS = frozenset({"metrics", "system", "totals", "rank"})
"""The kinds that may be downsampled."""
NOTE_KINDS = frozenset({"event"})
"""The kind, including warnings, of which the oldest are dropped if there are far too many entries."""
HARD_LIMIT_FACTOR = 2
"""Maximum of waiting entries as a multiple of `MAX_WAITING`; checkpoints and errors may exceed it."""
FIRST_DELAY_S = 0.05
INTERVAL_S = 0.5
MAX_BACKOFF_INTERVALS = 20
"""Maximum pause after errors, in intervals."""
MAX_POST_ENTRIES = 5_000
MAX_WAITING = 200_000
"""Entries kept for a recorder that does not answer, about 100 MB; beyond that the older metrics are downsampled."""


class Sender:
    """Sender of entries through `post`. Thread-safe; `close` (or the process's end) stops it.

    Random digits are added to `name`, since a restarted process counts from 1 again and must not be taken for the old one.
    """

    def __init__(self, post: Post, name: str, max_waiting: int = MAX_WAITING, interval_s: float = INTERVAL_S) -> None:
        self.name = f"{name}.{secrets.token_hex(4)}"
        self._post = post
        self._max_waiting = max_waiting
        self._interval_s = interval_s
        self._waiting: deque[Entry] = deque()
        self._recorder, self._posted = "", 0  # the recorder that holds entries, and up to which number
        self._sequence = itertools.count(1)
        self._changed = threading.Condition()  # never held while posting
        self._downsample_at = max_waiting
        """Number of entries that starts the next downsampling: more than are left, or every new one would scan all."""
        self._downsampled_event: Any = None
        """The event of this outage that gives the number of dropped entries."""
        self._left_out = 0
        self._has_entries = False
        self._num_flushing = 0  # number of callers in `flush`
        self._closed = False
        self._error: Exception | None = None
        """The last post's error; None if it succeeded."""
        self._thread = threading.Thread(target=self._deliver_loop, name=f"sender-{name}", daemon=True)
        self._thread.start()

    def put(self, entry: Entry) -> None:
        """Queues an entry under this sender's next sequence number, and returns at once."""
        entry = redact_entry(entry)
        with self._changed:
            self._enqueue(entry)
            if len(self._waiting) > self._downsample_at:
                self._downsample()
            if not self._has_entries:  # the thread sleeps until the first entry, and polls after that
                self._has_entries = True
                self._changed.notify_all()

    def warn(self, text: str) -> None:
        """Queues a warning for people."""
        self.put(warning_entry(text))

    def flush(self, timeout_s: float) -> bool:
        """Has all entries written at once and waits up to `timeout_s` seconds for that; returns whether they are."""
        with self._changed:
            self._num_flushing += 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self._closed or not self._waiting, timeout_s)
                return not self._waiting
            finally:
                self._num_flushing -= 1

    def close(self, timeout_s: float = 5.0) -> bool:
        """Flushes and ends the thread; returns whether all entries were acknowledged, and prints a warning if not."""
        delivered = self.flush(timeout_s)
        if not delivered:
            reason = format_error(self._error) if self._error else "no answer"
            print_warning(f"{len(self._waiting)} entries of {self.name} may be missing in the record ({reason})")
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout=1.0)
        return delivered

    def _enqueue(self, entry: Entry) -> None:
        entry["sequence"] = next(self._sequence)
        self._waiting.append(entry)

    def _downsample(self) -> None:
        """Drops every second measurement of the older half; beyond `HARD_LIMIT_FACTOR` times the bound the oldest notes.

        Checkpoints and errors are all kept. One event per outage gives the number of dropped entries.
        """
        older = [self._waiting.popleft() for _ in range(len(self._waiting) // 2)]
        kept, drop = deque[Entry](), False
        for entry in older:
            if entry["kind"] in MEASUREMENT_KINDS:
                drop = not drop
                if drop:
                    continue
            kept.append(entry)
        too_many = len(kept) + len(self._waiting) - HARD_LIMIT_FACTOR * self._max_waiting
        if too_many > 0:
            notes = [entry for entry in kept if entry["kind"] in NOTE_KINDS and entry is not self._downsampled_event][
                :too_many
            ]
            gone = {id(entry) for entry in notes}
            kept = deque(entry for entry in kept if id(entry) not in gone)
        self._waiting.extendleft(reversed(kept))
        if left_out := len(older) - len(kept):
            self._left_out += left_out
            text = f"{self.name}: the recorder did not answer, so {self._left_out} older entries were left out"
            if self._downsampled_event is None:
                self._downsampled_event = new_entry("event", {"name": "thinned", "text": text})
                self._enqueue(self._downsampled_event)
            else:
                self._downsampled_event["values"] = {"name": "thinned", "text": text}
        self._downsample_at = max(self._max_waiting, len(self._waiting) * 5 // 4)

    def _deliver_loop(self) -> None:
        pause = min(FIRST_DELAY_S, self._interval_s)
        while self._wait(pause):
            with self._changed:
                new = itertools.dropwhile(lambda entry: entry["sequence"] <= self._posted, self._waiting)
                batch, urgent = list(itertools.islice(new, MAX_POST_ENTRIES)), self._num_flushing > 0
            if not batch and not self._waiting:
                pause = self._interval_s
                continue
            try:
                receipt = self._post(self.name, batch, self._recorder, urgent)
            except Exception as error:
                # Whatever fails on the way to the recorder (a dead actor, a timeout), the training goes on; retry later.
                self._error = error
                pause = min(MAX_BACKOFF_INTERVALS * self._interval_s, 2 * max(pause, self._interval_s))
                continue
            self._error, pause = None, self._interval_s
            with self._changed:
                self._recorder, self._posted = receipt.recorder, receipt.received
                while self._waiting and self._waiting[0]["sequence"] <= receipt.durable:
                    self._waiting.popleft()
                if not self._waiting:
                    self._downsampled_event, self._left_out, self._downsample_at = None, 0, self._max_waiting
                    self._changed.notify_all()

    def _wait(self, pause: float) -> bool:
        """Waits for the first entry if there was none yet, then for `pause` seconds, less in a flush; False when closed."""
        with self._changed:
            if not self._has_entries:
                self._changed.wait_for(lambda: self._has_entries or self._closed)
            self._changed.wait_for(lambda: self._num_flushing or self._closed, pause)
            # Entries are acknowledged only when they are on disk, so a flush asks again after a pause.
            if self._num_flushing and not self._closed:
                self._changed.wait_for(lambda: self._closed, min(FIRST_DELAY_S, self._interval_s))
            return not self._closed
