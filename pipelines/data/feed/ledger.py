"""Shared ledger of a node's cache: present pieces, fetches in flight, and the next use of each piece by each reader.

It is a SQLite database in the cache folder, shared by all processes of a node that read remote shards. A process announces
the next step at which it needs each piece, and its seconds per step. From these the ledger computes the time of each piece's
next use and evicts the piece with the furthest one (L. Belady, "A study of replacement algorithms for a virtual-storage
computer", IBM Systems Journal 5, 1966). Transactions are short: none is open during a fetch.

    ledger = Ledger(root, max_bytes=1 << 30, clock="my-run")
    ledger.announce_uses([(name, step)])                      # the next step that needs each piece
    statuses = ledger.request([(name, size)])                 # [TO_FETCH]: fetch it, then `mark_present`; []: no room
    ledger.advance([(name, later_step)], step=now, pace=0.2)  # None: no later step is known
"""

import enum
import fcntl
import math
import shutil
import sqlite3
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO

from raystride.pipelines.data.feed.eviction import EvictionCandidate, EvictionQueue
from raystride.pipelines.system.storage.locks import file_lock

DATABASE, PIECES, READERS = "ledger-1.sqlite", "pieces", "readers"
MARKER = "raystride-cache"
"""A file that marks the folder as a cache."""
LOCK_TIMEOUT_S = 60.0
"""Seconds that a transaction waits for another process's transaction."""
MIN_FREE_BYTES = 512 << 20
"""Bytes of the disk left free for others."""
OTHER_RUN_MARGIN = 1.5
"""Factor by which another run's next use must be further in the future before a prefetch may evict its piece: two runs know
each other's pace only roughly, and would otherwise evict each other's pieces in turns."""
REAP_INTERVAL_S = 2.0
"""Seconds between two checks for dead readers."""

_TABLES = """
CREATE TABLE boot (id TEXT);
CREATE TABLE clocks (name TEXT PRIMARY KEY, step REAL, time REAL, pace REAL) WITHOUT ROWID;
CREATE TABLE readers (id INTEGER PRIMARY KEY AUTOINCREMENT, clock TEXT);
CREATE TABLE files (name BLOB PRIMARY KEY, bytes INTEGER, fetcher INTEGER, used REAL) WITHOUT ROWID;
CREATE TABLE uses (name BLOB, reader INTEGER, step INTEGER, PRIMARY KEY (name, reader)) WITHOUT ROWID;
CREATE INDEX uses_of_readers ON uses (reader);
"""
# A file's `fetcher` is the reader that is fetching it, and NULL once it is present.


class PieceStatus(enum.Enum):
    """Status of a requested piece."""

    PRESENT = enum.auto()
    """It is in the cache."""
    TO_FETCH = enum.auto()
    """The requesting reader must fetch it."""
    IN_FLIGHT = enum.auto()
    """Another reader is fetching it."""


class Ledger:
    """One reader's handle of the ledger. Thread-safe; a forked process needs its own."""

    def __init__(self, root: Path, max_bytes: int, clock: str = "") -> None:
        """`clock` names the readers with the same steps, as the workers of a run. Raises OSError, sqlite3.Error."""
        self._root, self._max_bytes, self._lock = root, max_bytes, threading.Lock()
        self._pieces = str(root / PIECES)
        self._arrivals: deque[tuple[bytes, int, float]] = deque()
        _mark_cache_folder(root)
        (root / READERS).mkdir(parents=True, exist_ok=True)
        # SQLite does not wait for a database that is being created; this lock does.
        with file_lock(root / f"{DATABASE}.lock", LOCK_TIMEOUT_S):
            self._db = self._open_database()
            self.reader, self._lock_file = self._register_reader(clock)
        self._clock = clock or f"reader {self.reader}"
        self._eviction_queue = EvictionQueue(self._clock)
        self._last_reap = 0.0

    def piece_path(self, name: bytes) -> str:
        """Returns the path of a piece by its name."""
        digits = name.hex()
        return f"{self._pieces}/{digits[:2]}/{digits[2:]}"

    def temporary_path(self, path: Path) -> Path:
        """Returns a temporary path next to a piece's, for writing; it is removed if this reader dies."""
        return path.with_name(f"{path.name}.tmp-{self.reader}-{uuid.uuid4().hex[:8]}")

    def request(
        self, pieces: Sequence[tuple[bytes, int]], *, urgent: bool = False, max_fetches: float = math.inf
    ) -> list[PieceStatus]:
        """Requests pieces by name and size in bytes, in this order, and evicts others for those to be fetched.

        A request that is not `urgent` evicts only pieces with a later next use. The scan stops at the first piece without
        room and after `max_fetches` pieces to be fetched: fewer statuses are returned. Urgent requests always get room.
        """
        self._reap_dead_readers()
        statuses: list[PieceStatus] = []
        if self._eviction_queue.is_expired:
            with self._lock:  # outside the transaction, which would block other readers
                self._eviction_queue.refresh(self._db)
        with self._transaction() as db:
            evictor: _Evictor | None = None
            for name, size in pieces:
                row = db.execute("SELECT fetcher FROM files WHERE name = ?", (name,)).fetchone()
                if row is not None:
                    statuses.append(PieceStatus.PRESENT if row[0] is None else PieceStatus.IN_FLIGHT)
                    continue
                evictor = evictor or self._make_evictor(db)
                if statuses.count(PieceStatus.TO_FETCH) >= max_fetches or evictor.evict_until_fits(name, size, urgent) < 0:
                    break
                db.execute("INSERT INTO files VALUES (?, ?, ?, ?)", (name, size, self.reader, time.monotonic()))
                statuses.append(PieceStatus.TO_FETCH)
        return statuses

    def mark_present(self, name: bytes, size: int) -> None:
        """Marks a piece as completely written; other readers see it after this reader's next transaction."""
        self._arrivals.append((name, size, time.monotonic()))
        self._eviction_queue.invalidate([name])

    def mark_missing(self, name: bytes) -> None:
        """Marks a piece as missing: the fetch failed or the file was removed."""
        with self._transaction() as db:
            db.execute("DELETE FROM files WHERE name = ? AND (fetcher IS NULL OR fetcher = ?)", (name, self.reader))

    def status_of(self, name: bytes) -> PieceStatus | None:
        """Returns PRESENT or IN_FLIGHT (possibly by this reader), or None for a piece that is neither."""
        self._reap_dead_readers()
        with self._transaction() as db:
            row = db.execute("SELECT fetcher FROM files WHERE name = ?", (name,)).fetchone()
        return None if row is None else PieceStatus.PRESENT if row[0] is None else PieceStatus.IN_FLIGHT

    def announce_uses(self, uses: Iterable[tuple[bytes, int]]) -> None:
        """Announces the next step at which this reader needs pieces; an earlier announcement of a piece is kept."""
        with self._transaction() as db:
            db.executemany("INSERT OR IGNORE INTO uses VALUES (?, ?, ?)", ((name, self.reader, step) for name, step in uses))

    def pin(self, names: Sequence[bytes]) -> None:
        """Pins pieces that this reader needs now; see `unpin`."""
        now = time.monotonic()
        with self._transaction() as db:
            db.execute("INSERT OR IGNORE INTO clocks VALUES (?, 0, ?, 1.0)", (self._clock, now))
            (step,) = db.execute("SELECT step FROM clocks WHERE name = ?", (self._clock,)).fetchone()
            # One row per reader and piece: a later use is announced again when the reader advances.
            db.executemany("INSERT OR REPLACE INTO uses VALUES (?, ?, ?)", [(name, self.reader, step) for name in names])

    def unpin(self, names: Sequence[bytes]) -> None:
        """Unpins pieces that are no longer needed now."""
        with self._transaction() as db:
            db.executemany("DELETE FROM uses WHERE name = ? AND reader = ?", [(name, self.reader) for name in names])
        self._eviction_queue.invalidate(names)

    def advance(self, uses: Iterable[tuple[bytes, int | None]], *, step: int, pace: float) -> None:
        """Advances this reader to `step`, with `pace` seconds per step, and updates the next step that needs each piece."""
        uses, now = list(uses), time.monotonic()
        self._eviction_queue.invalidate(name for name, _ in uses)
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO clocks VALUES (?, ?, ?, ?)", (self._clock, step, now, pace))
            db.executemany("UPDATE files SET used = ? WHERE name = ?", ((now, name) for name, _ in uses))
            known = ((name, self.reader, next_step) for name, next_step in uses if next_step is not None)
            db.executemany("INSERT OR REPLACE INTO uses VALUES (?, ?, ?)", known)
            unknown = ((name, self.reader) for name, next_step in uses if next_step is None)
            db.executemany("DELETE FROM uses WHERE name = ? AND reader = ?", unknown)

    def evict_bytes(self, size: int) -> bool:
        """Evicts `size` bytes of the pieces with the furthest next use (disk full); returns False if nothing was evicted."""
        with self._transaction() as db:
            total_bytes = _total_bytes(db)
            evictor = _Evictor(db, self._eviction_queue, total_bytes, total_bytes, self._remove_file)
            return evictor.evict_until_fits(b"", size, urgent=True) > 0

    def total_bytes(self) -> int:
        """Returns the bytes of all pieces that are present or in flight."""
        with self._transaction() as db:
            return _total_bytes(db)

    def withdraw(self) -> None:
        """Withdraws all announced uses of this reader; it may continue to fetch."""
        with self._transaction() as db:
            db.execute("DELETE FROM uses WHERE reader = ?", (self.reader,))
            self._eviction_queue.invalidate_all()

    def close(self) -> None:
        """Removes this reader from the ledger, as other readers do when its process dies."""
        with suppress(sqlite3.Error), self._transaction() as db:
            _delete_reader(db, self.reader)
        with self._lock:
            self._db.close()
        (self._root / READERS / str(self.reader)).unlink(missing_ok=True)
        self._lock_file.close()

    def _open_database(self) -> sqlite3.Connection:
        """Opens the database; recreates it and removes all pieces if it is damaged or from before the machine's last boot.

        After a power failure, a piece that was not yet on disk may have the right name and size.
        """
        for _ in range(2):
            db = sqlite3.connect(
                self._root / DATABASE, timeout=LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            with suppress(sqlite3.DatabaseError):
                db.execute("PRAGMA journal_mode = WAL")
                db.execute("PRAGMA synchronous = OFF")
                if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'boot'").fetchone():
                    self._clear_folder()
                    db.executescript(_TABLES)
                    db.execute("INSERT INTO boot VALUES (?)", (_read_boot_id(),))
                if db.execute("SELECT id FROM boot").fetchone() == (_read_boot_id(),):
                    return db
            db.close()
            for path in self._root.glob(f"{DATABASE}*"):
                if path.suffix != ".lock":
                    path.unlink(missing_ok=True)
        raise OSError(f"{self._root / DATABASE} can neither be read nor made anew: name another place by $RAYSTRIDE_CACHE")

    def _clear_folder(self) -> None:
        """Removes pieces without a ledger entry, and files of earlier versions."""
        shutil.rmtree(self._root / PIECES, ignore_errors=True)
        shutil.rmtree(self._root / "locks", ignore_errors=True)
        for path in self._root.iterdir():
            if path.is_file() and all(digit in "0123456789abcdef" for digit in path.name.partition(".tmp-")[0]):
                path.unlink(missing_ok=True)

    def _register_reader(self, clock: str) -> tuple[int, IO[str]]:
        """Registers this reader; returns its number and a lock file that is released when its process ends."""
        with self._transaction() as db:
            number = int(db.execute("INSERT INTO readers (clock) VALUES (?)", (clock,)).lastrowid or 0)
            db.execute("UPDATE readers SET clock = ? WHERE id = ? AND clock = ''", (f"reader {number}", number))
            lock_file = (self._root / READERS / str(number)).open("w")  # before others can see the number
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return number, lock_file

    def _reap_dead_readers(self) -> None:
        """Removes dead readers and their unfinished fetches."""
        if time.monotonic() - self._last_reap < REAP_INTERVAL_S:
            return
        self._last_reap = time.monotonic()
        with self._lock:
            other_readers = [row[0] for row in self._db.execute("SELECT id FROM readers WHERE id <> ?", (self.reader,))]
        for number in other_readers:
            path = self._root / READERS / str(number)
            if _is_unlocked(path):
                with self._transaction() as db:
                    for (name,) in db.execute("SELECT name FROM files WHERE fetcher = ?", (number,)).fetchall():
                        self._remove_file(name)
                    _delete_reader(db, number)
                    self._eviction_queue.invalidate_all()
                for temporary in (self._root / PIECES).glob(f"*/*.tmp-{number}-*"):
                    temporary.unlink(missing_ok=True)
                path.unlink(missing_ok=True)

    def _make_evictor(self, db: sqlite3.Connection) -> "_Evictor":
        """Creates an evictor under the cache's bound, or a lower one if the disk is short."""
        total_bytes = _total_bytes(db)
        limit = min(self._max_bytes, total_bytes + shutil.disk_usage(self._root).free - MIN_FREE_BYTES)
        return _Evictor(db, self._eviction_queue, total_bytes, limit, self._remove_file)

    def _remove_file(self, name: bytes) -> None:
        Path(self.piece_path(name)).unlink(missing_ok=True)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            arrivals = [self._arrivals.popleft() for _ in range(len(self._arrivals))]
            try:
                self._db.executemany("INSERT OR REPLACE INTO files VALUES (?, ?, NULL, ?)", arrivals)
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                self._arrivals.extendleft(reversed(arrivals))  # the files exist all the same
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise


class _Evictor:
    """Evicts pieces for new ones within one transaction."""

    def __init__(
        self,
        db: sqlite3.Connection,
        eviction_queue: EvictionQueue,
        total_bytes: int,
        limit: int,
        remove_file: Callable[[bytes], None],
    ) -> None:
        self._db, self._eviction_queue, self._remove_file = db, eviction_queue, remove_file
        self._total_bytes, self._limit = total_bytes, limit
        self._is_refreshed = False
        self._now = time.monotonic()

    def evict_until_fits(self, name: bytes, size: int, urgent: bool) -> int:
        """Evicts pieces until one more fits and returns how many; -1 if the others have an earlier next use."""
        evicted: list[EvictionCandidate] = []
        free = self._limit - self._total_bytes
        needed_at = None if urgent else self._next_use(name)
        while free < size:
            candidate = self._eviction_queue.pop(self._db, evicted)
            if candidate is None:
                if self._is_refreshed:
                    break
                self._eviction_queue.refresh(self._db)
                self._is_refreshed = True
            elif urgent or self._may_evict(candidate, needed_at):
                evicted.append(candidate)
                free += candidate.size
            else:
                self._eviction_queue.put_back([candidate])
                break
        if free < size and not urgent:
            self._eviction_queue.put_back(evicted)
            return -1
        for evicted_piece in evicted:
            self._db.execute("DELETE FROM files WHERE name = ?", (evicted_piece.name,))
            # Within the transaction: otherwise it might delete a piece refetched by another reader.
            self._remove_file(evicted_piece.name)
        self._total_bytes = self._limit - free + size
        return len(evicted)

    def _next_use(self, name: bytes) -> float | None:
        row = self._db.execute(
            "SELECT MIN(clocks.time + (uses.step - clocks.step) * clocks.pace) FROM uses "
            "JOIN readers ON readers.id = uses.reader JOIN clocks ON clocks.name = readers.clock WHERE uses.name = ?",
            (name,),
        ).fetchone()
        return None if row is None else row[0]

    def _may_evict(self, candidate: EvictionCandidate, needed_at: float | None) -> bool:
        """Returns whether a prefetched piece with its next use at `needed_at` may evict another one."""
        if candidate.next_use_at is None or needed_at is None:
            return candidate.next_use_at is None and needed_at is not None
        margin = OTHER_RUN_MARGIN if candidate.needed_by_others else 1.0
        return candidate.next_use_at - self._now > margin * max(0.0, needed_at - self._now)


def _total_bytes(db: sqlite3.Connection) -> int:
    return int(db.execute("SELECT COALESCE(SUM(bytes), 0) FROM files").fetchone()[0])


def _delete_reader(db: sqlite3.Connection, reader: int) -> None:
    db.execute("DELETE FROM uses WHERE reader = ?", (reader,))
    db.execute("DELETE FROM files WHERE fetcher = ?", (reader,))
    db.execute("DELETE FROM readers WHERE id = ?", (reader,))
    db.execute("DELETE FROM clocks WHERE name NOT IN (SELECT clock FROM readers)")


def has_reader(root: Path) -> bool:
    """Returns whether a living process reads a cache."""
    return any(not _is_unlocked(path) for path in (root / READERS).glob("*"))


def remove_unread_cache(root: Path) -> bool:
    """Empties a cache that no living process reads; returns whether it did. A reader that starts meanwhile begins anew."""
    if not (root / MARKER).exists():
        return False
    with file_lock(root / f"{DATABASE}.lock", LOCK_TIMEOUT_S):
        if has_reader(root):
            return False
        for path in root.glob(f"{DATABASE}*"):
            if path.suffix != ".lock":
                path.unlink(missing_ok=True)
        for name in (PIECES, READERS):
            shutil.rmtree(root / name, ignore_errors=True)
            (root / name).mkdir()
    return True


def _mark_cache_folder(root: Path) -> None:
    """Marks a folder as a cache, so that its files may be removed. Raises OSError if it has other files."""
    marker = root / MARKER
    if marker.exists():
        return
    if root.exists() and not (root / DATABASE).exists() and any(path.name != MARKER for path in root.iterdir()):
        raise OSError(f"{root} holds files that are no cache's: name another place by $RAYSTRIDE_CACHE")
    root.mkdir(parents=True, exist_ok=True)
    marker.touch()


def _is_unlocked(path: Path) -> bool:
    """Returns whether a lock file is unlocked or missing."""
    try:
        with closing(path.open("r+")) as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _read_boot_id() -> str:
    """Returns the id of this boot of the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"
