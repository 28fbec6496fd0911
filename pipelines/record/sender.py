"""A process's way to the recorder: takes entries in microseconds, delivers each until it is acknowledged.

A thread posts what is new about every half second, and after errors again with a growing pause. An entry is kept until it is
on the recorder's disk, so that a recorder that died gets it once more from here; what it knows it drops, so each is recorded
exactly once.

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

from raystride.pipelines.record.entry import Entry, new_entry, warning, without_secrets


class Receipt(NamedTuple):
    """What a recorder says to a sender: up to which sequence number it holds its entries, and has recorded them for good."""

    recorder: str
    """Who says so; another name after a restart, which has forgotten what it only held."""
    received: int
    durable: int


Post = Callable[[str, list[Entry], str], Receipt]
"""Takes a sender's name, entries in order, and which recorder holds those before them ("" with the first). May raise.

A recorder of another name takes none of them, as some would be missing between; its receipt says from where it needs them.
"""

MEASUREMENTS = frozenset({"metrics", "system", "totals", "rank"})
"""The kinds that may be thinned."""
NOTES = frozenset({"event"})
"""The kind, warnings among it, of which the oldest go if there are far too many."""
HARD = 2
"""How many times `MOST_WAITING` entries wait at most, but for checkpoints and errors."""
FIRST_DELAY_S = 0.05
INTERVAL_S = 0.5
BACKOFF = 20
"""Longest pause after errors, in intervals."""
MOST_IN_A_POST = 5_000
MOST_WAITING = 200_000
"""Entries kept for a recorder that does not answer, some 100 MB; beyond that the older metrics are thinned."""


class Sender:
    """Delivers entries through `post`. Safe to use from several threads; `close` (or the process's end) stops it.

    To `name` it adds random digits, so that a restarted process is not mistaken for the one before, whose numbers it reuses.
    """

    def __init__(self, post: Post, name: str, most_waiting: int = MOST_WAITING, interval_s: float = INTERVAL_S) -> None:
        self.name = f"{name}.{secrets.token_hex(4)}"
        self._post = post
        self._most_waiting = most_waiting
        self._interval_s = interval_s
        self._waiting: deque[Entry] = deque()
        self._recorder, self._posted = "", 0  # who holds which of them, as far as it has said so
        self._sequence = itertools.count(1)
        self._changed = threading.Condition()  # never held while posting
        self._thin_at = most_waiting
        """Entries at which some are left out next: more than are left, or each new one would have all of them looked at."""
        self._thinned: Any = None
        """The event that says of this outage how much was left out."""
        self._left_out = 0
        self._put_any = False
        self._hurry = 0  # callers of flush
        self._closed = False
        self._thread = threading.Thread(target=self._deliver, name=f"sender-{name}", daemon=True)
        self._thread.start()

    def put(self, entry: Entry) -> None:
        """Queues an entry, under this sender's next number, and returns at once."""
        entry = without_secrets(entry)
        with self._changed:
            self._append(entry)
            if len(self._waiting) > self._thin_at:
                self._thin()
            if not self._put_any:  # the thread sleeps until the first entry, then looks by itself
                self._put_any = True
                self._changed.notify_all()

    def warn(self, text: str) -> None:
        """Queues a warning for people."""
        self.put(warning(text))

    def flush(self, timeout_s: float) -> bool:
        """Waits until all that was put is acknowledged, at most `timeout_s` seconds; whether it is."""
        with self._changed:
            self._hurry += 1
            self._changed.notify_all()
            try:
                return self._changed.wait_for(lambda: not self._waiting, timeout_s)
            finally:
                self._hurry -= 1

    def close(self, timeout_s: float = 5.0) -> bool:
        """Flushes and ends the thread; whether everything was acknowledged."""
        delivered = self.flush(timeout_s)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout=1.0)
        return delivered

    def _append(self, entry: Entry) -> None:
        entry["sequence"] = next(self._sequence)
        self._waiting.append(entry)

    def _thin(self) -> None:
        """Drops every second of the older half's measurements; beyond `HARD` times the bound also the oldest notes.

        Checkpoints and errors all stay, and one event an outage says how much was left out.
        """
        older = [self._waiting.popleft() for _ in range(len(self._waiting) // 2)]
        kept, drop = deque[Entry](), False
        for entry in older:
            if entry["kind"] in MEASUREMENTS:
                drop = not drop
                if drop:
                    continue
            kept.append(entry)
        too_many = len(kept) + len(self._waiting) - HARD * self._most_waiting
        if too_many > 0:
            notes = [entry for entry in kept if entry["kind"] in NOTES and entry is not self._thinned][:too_many]
            gone = {id(entry) for entry in notes}
            kept = deque(entry for entry in kept if id(entry) not in gone)
        self._waiting.extendleft(reversed(kept))
        if left_out := len(older) - len(kept):
            self._left_out += left_out
            text = f"{self.name}: the recorder did not answer, so {self._left_out} older entries were left out"
            if self._thinned is None:
                self._thinned = new_entry("event", {"name": "thinned", "text": text})
                self._append(self._thinned)
            else:
                self._thinned["values"] = {"name": "thinned", "text": text}
        self._thin_at = max(self._most_waiting, len(self._waiting) * 5 // 4)

    def _deliver(self) -> None:
        pause = min(FIRST_DELAY_S, self._interval_s)
        while self._sleep(pause):
            with self._changed:
                new = itertools.dropwhile(lambda entry: entry["sequence"] <= self._posted, self._waiting)
                batch = list(itertools.islice(new, MOST_IN_A_POST))
            if not batch and not self._waiting:
                pause = self._interval_s
                continue
            try:
                receipt = self._post(self.name, batch, self._recorder)
            except Exception:
                # Whatever the way to the recorder does (a dead actor, a timeout), the training goes on and we try again.
                pause = min(BACKOFF * self._interval_s, 2 * max(pause, self._interval_s))
                continue
            pause = self._interval_s
            with self._changed:
                self._recorder, self._posted = receipt.recorder, receipt.received
                while self._waiting and self._waiting[0]["sequence"] <= receipt.durable:
                    self._waiting.popleft()
                if not self._waiting:
                    self._thinned, self._left_out, self._thin_at = None, 0, self._most_waiting
                    self._changed.notify_all()

    def _sleep(self, pause: float) -> bool:
        """Waits for the first entry if there was none yet, then for `pause`; shortly during a flush. False when closed."""
        with self._changed:
            if not self._put_any:
                self._changed.wait_for(lambda: self._put_any or self._closed)
            self._changed.wait_for(lambda: self._hurry or self._closed, pause)
            # What was taken is acknowledged when it is on disk, so a flush asks again after a pause.
            if self._hurry and not self._closed:
                self._changed.wait_for(lambda: self._closed, min(FIRST_DELAY_S, self._interval_s))
            return not self._closed
