"""The ledger of a node's cache: which pieces are there, who is fetching which, and who needs which when.

All processes of a node that read far shards share it, a SQLite database in the cache's folder. A process says at which of
its steps it needs which piece next, and how long its steps take. So the ledger knows of each piece when somebody needs it
next, and what has to make room is what is needed farthest in the future (L. Belady, "A study of replacement algorithms for a
virtual-storage computer", IBM Systems Journal 5, 1966). A transaction is short: none is open while anything is fetched.

    ledger = Ledger(root, most_bytes=1 << 30, clock="my-run")
    ledger.announce([(name, step)])                           # of the names that are needed from now on, the next steps
    claims = ledger.claim([(name, size)])                     # [Claim.MINE]: fetch it, then `arrived`; []: there is no room
    ledger.pass_on([(name, later_step)], step=now, pace=0.2)  # None: no later step is known
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

from raystride.pipelines.feed.victims import Victim, Victims
from raystride.pipelines.locks import locked

DATABASE, PIECES, READERS = "ledger-1.sqlite", "pieces", "readers"
MARKER = "raystride-cache"
"""A file that says whose folder this is."""
BUSY_S = 60.0
"""Seconds that a transaction waits for another process's."""
RESERVE = 512 << 20
"""Bytes of the disk that are left to others."""
CLEARLY = 1.5
"""How many times as far in the future another run's next use has to be for a fetch that nobody waits for to take its room:
two runs know each other's pace only roughly, and would else take it from each other in turns."""
BURY_S = 2.0
"""Seconds between two looks at whether other readers have died."""

_TABLES = """
CREATE TABLE boot (id TEXT);
CREATE TABLE clocks (name TEXT PRIMARY KEY, step REAL, time REAL, pace REAL) WITHOUT ROWID;
CREATE TABLE readers (id INTEGER PRIMARY KEY AUTOINCREMENT, clock TEXT);
CREATE TABLE files (name BLOB PRIMARY KEY, bytes INTEGER, fetcher INTEGER, used REAL) WITHOUT ROWID;
CREATE TABLE uses (name BLOB, reader INTEGER, step INTEGER, PRIMARY KEY (name, reader)) WITHOUT ROWID;
CREATE INDEX uses_of_readers ON uses (reader);
"""
# A file's `fetcher` is the reader that is fetching it, and NULL once it is there.


class Claim(enum.Enum):
    """What becomes of a piece that somebody wants."""

    HERE = enum.auto()
    """It is there."""
    MINE = enum.auto()
    """Whoever asked is to fetch it."""
    OTHERS = enum.auto()
    """Another one is fetching it."""


class Ledger:
    """One reader's way to the ledger. Its threads may use it at once; a process that is forked needs one of its own."""

    def __init__(self, root: Path, most_bytes: int, clock: str = "") -> None:
        """`clock` names those whose steps are the same, as the workers of a run. Raises OSError, sqlite3.Error."""
        self._root, self._most, self._lock = root, most_bytes, threading.Lock()
        self._pieces = str(root / PIECES)
        self._came: deque[tuple[bytes, int, float]] = deque()
        _vouch_for(root)
        (root / READERS).mkdir(parents=True, exist_ok=True)
        # SQLite waits for nobody while a database is made, and this does.
        with locked(root / f"{DATABASE}.lock", BUSY_S):
            self._db = self._opened()
            self.reader, self._alive = self._enlisted(clock)
        self._clock = clock or f"reader {self.reader}"
        self._victims = Victims(self._clock)
        self._buried = 0.0

    def place(self, name: bytes) -> str:
        """The path at which a piece of this name lies once it is there."""
        digits = name.hex()
        return f"{self._pieces}/{digits[:2]}/{digits[2:]}"

    def temporary(self, path: Path) -> Path:
        """Another name beside a piece's, for what this reader is writing; it goes when this reader dies."""
        return path.with_name(f"{path.name}.tmp-{self.reader}-{uuid.uuid4().hex[:8]}")

    def claim(self, wanted: Sequence[tuple[bytes, int]], *, urgent: bool = False, most: float = math.inf) -> list[Claim]:
        """Asks for pieces of these names and sizes in bytes, in this order, and makes room for what is to be fetched.

        What is not `urgent` gets no room of what is needed sooner, and what follows such a piece is not looked at, nor what
        follows `most` pieces that are to be fetched: fewer answers come back. What is urgent gets room always.
        """
        self._bury()
        found: list[Claim] = []
        if self._victims.stale:
            with self._lock:  # not within the transaction, for which others wait
                self._victims.look(self._db)
        with self._transaction() as db:
            room: _Room | None = None
            for name, size in wanted:
                row = db.execute("SELECT fetcher FROM files WHERE name = ?", (name,)).fetchone()
                if row is not None:
                    found.append(Claim.HERE if row[0] is None else Claim.OTHERS)
                    continue
                room = room or self._room(db)
                if found.count(Claim.MINE) >= most or room.make(name, size, urgent) < 0:
                    break
                db.execute("INSERT INTO files VALUES (?, ?, ?, ?)", (name, size, self.reader, time.monotonic()))
                found.append(Claim.MINE)
        return found

    def arrived(self, name: bytes, size: int) -> None:
        """Says that a piece lies at its place, whole; the others hear of it with what this reader says or asks next."""
        self._came.append((name, size, time.monotonic()))
        self._victims.changed([name])

    def gone(self, name: bytes) -> None:
        """Says that a piece is not there after all: it could not be fetched, or somebody has removed it."""
        with self._transaction() as db:
            db.execute("DELETE FROM files WHERE name = ? AND (fetcher IS NULL OR fetcher = ?)", (name, self.reader))

    def state(self, name: bytes) -> Claim | None:
        """HERE or OTHERS (who may be this reader), or None for a piece that is neither there nor on its way."""
        self._bury()
        with self._transaction() as db:
            row = db.execute("SELECT fetcher FROM files WHERE name = ?", (name,)).fetchone()
        return None if row is None else Claim.HERE if row[0] is None else Claim.OTHERS

    def announce(self, uses: Iterable[tuple[bytes, int]]) -> None:
        """Says at which step this reader needs pieces next; of a piece that was named before, that step stays."""
        with self._transaction() as db:
            db.executemany("INSERT OR IGNORE INTO uses VALUES (?, ?, ?)", ((name, self.reader, at) for name, at in uses))

    def want(self, names: Sequence[bytes]) -> None:
        """Says that this reader needs pieces now; see `unwant`."""
        now = time.monotonic()
        with self._transaction() as db:
            db.execute("INSERT OR IGNORE INTO clocks VALUES (?, 0, ?, 1.0)", (self._clock, now))
            (step,) = db.execute("SELECT step FROM clocks WHERE name = ?", (self._clock,)).fetchone()
            # One row a reader and piece: where it needs a piece later, too, it says so again when it has passed on.
            db.executemany("INSERT OR REPLACE INTO uses VALUES (?, ?, ?)", [(name, self.reader, step) for name in names])

    def unwant(self, names: Sequence[bytes]) -> None:
        """Says that what was wanted now is not needed any more."""
        with self._transaction() as db:
            db.executemany("DELETE FROM uses WHERE name = ? AND reader = ?", [(name, self.reader) for name in names])
        self._victims.changed(names)

    def pass_on(self, uses: Iterable[tuple[bytes, int | None]], *, step: int, pace: float) -> None:
        """Says that this reader is at `step` now, with `pace` seconds a step, and at which step it needs pieces next."""
        uses, now = list(uses), time.monotonic()
        self._victims.changed(name for name, _ in uses)
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO clocks VALUES (?, ?, ?, ?)", (self._clock, step, now, pace))
            db.executemany("UPDATE files SET used = ? WHERE name = ?", ((now, name) for name, _ in uses))
            known = ((name, self.reader, at) for name, at in uses if at is not None)
            db.executemany("INSERT OR REPLACE INTO uses VALUES (?, ?, ?)", known)
            unknown = ((name, self.reader) for name, at in uses if at is None)
            db.executemany("DELETE FROM uses WHERE name = ? AND reader = ?", unknown)

    def shrink(self, size: int) -> bool:
        """Lets go of so many bytes of what is needed last, where the disk is full; False where nothing can go."""
        with self._transaction() as db:
            held = _held(db)
            return _Room(db, self._victims, held, held, self._unlink).make(b"", size, urgent=True) > 0

    def held(self) -> int:
        """Bytes of all pieces that are there or on their way."""
        with self._transaction() as db:
            return _held(db)

    def retire(self) -> None:
        """Takes back all that this reader has said of its needs; it may go on fetching."""
        with self._transaction() as db:
            db.execute("DELETE FROM uses WHERE reader = ?", (self.reader,))
            self._victims.forget()

    def close(self) -> None:
        """Has the others forget this reader, as they do when its process ends."""
        with suppress(sqlite3.Error), self._transaction() as db:
            _forget(db, self.reader)
        with self._lock:
            self._db.close()
        (self._root / READERS / str(self.reader)).unlink(missing_ok=True)
        self._alive.close()

    def _opened(self) -> sqlite3.Connection:
        """The database, made anew, and the pieces removed, where it is damaged or from before the machine's last start.

        What a process had not yet on disk when the power went may have the right name and size.
        """
        for _ in range(2):
            db = sqlite3.connect(self._root / DATABASE, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
            with suppress(sqlite3.DatabaseError):
                db.execute("PRAGMA journal_mode = WAL")
                db.execute("PRAGMA synchronous = OFF")
                if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'boot'").fetchone():
                    self._clear()
                    db.executescript(_TABLES)
                    db.execute("INSERT INTO boot VALUES (?)", (_boot(),))
                if db.execute("SELECT id FROM boot").fetchone() == (_boot(),):
                    return db
            db.close()
            for path in self._root.glob(f"{DATABASE}*"):
                if path.suffix != ".lock":
                    path.unlink(missing_ok=True)
        raise OSError(f"{self._root / DATABASE} can neither be read nor made anew: name another place by $RAYSTRIDE_CACHE")

    def _clear(self) -> None:
        """Removes pieces that no ledger knows, and what an earlier version kept here."""
        shutil.rmtree(self._root / PIECES, ignore_errors=True)
        shutil.rmtree(self._root / "locks", ignore_errors=True)
        for path in self._root.iterdir():
            if path.is_file() and all(digit in "0123456789abcdef" for digit in path.name.partition(".tmp-")[0]):
                path.unlink(missing_ok=True)

    def _enlisted(self, clock: str) -> tuple[int, IO[str]]:
        """A number for this reader, and a file whose lock goes with its process."""
        with self._transaction() as db:
            number = int(db.execute("INSERT INTO readers (clock) VALUES (?)", (clock,)).lastrowid or 0)
            db.execute("UPDATE readers SET clock = ? WHERE id = ? AND clock = ''", (f"reader {number}", number))
            alive = (self._root / READERS / str(number)).open("w")  # before the others can see the number
            fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return number, alive

    def _bury(self) -> None:
        """Forgets readers that have died, and what they were fetching."""
        if time.monotonic() - self._buried < BURY_S:
            return
        self._buried = time.monotonic()
        with self._lock:
            others = [row[0] for row in self._db.execute("SELECT id FROM readers WHERE id <> ?", (self.reader,))]
        for number in others:
            place = self._root / READERS / str(number)
            if _free(place):
                with self._transaction() as db:
                    for (name,) in db.execute("SELECT name FROM files WHERE fetcher = ?", (number,)).fetchall():
                        self._unlink(name)
                    _forget(db, number)
                    self._victims.forget()
                for left in (self._root / PIECES).glob(f"*/*.tmp-{number}-*"):
                    left.unlink(missing_ok=True)
                place.unlink(missing_ok=True)

    def _room(self, db: sqlite3.Connection) -> "_Room":
        """Room under the bound, or under less where the disk is short."""
        held = _held(db)
        limit = min(self._most, held + shutil.disk_usage(self._root).free - RESERVE)
        return _Room(db, self._victims, held, limit, self._unlink)

    def _unlink(self, name: bytes) -> None:
        Path(self.place(name)).unlink(missing_ok=True)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            came = [self._came.popleft() for _ in range(len(self._came))]
            try:
                self._db.executemany("INSERT OR REPLACE INTO files VALUES (?, ?, NULL, ?)", came)
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                self._came.extendleft(reversed(came))  # they lie there all the same
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise


class _Room:
    """Makes room for some pieces in one transaction."""

    def __init__(
        self, db: sqlite3.Connection, victims: Victims, held: int, limit: int, unlink: Callable[[bytes], None]
    ) -> None:
        self._db, self._victims, self._held, self._limit, self._unlink = db, victims, held, limit, unlink
        self._looked = False
        self._now = time.monotonic()

    def make(self, name: bytes, size: int, urgent: bool) -> int:
        """Lets go of pieces until one more has room, and tells how many; -1 where they are needed sooner than it."""
        going: list[Victim] = []
        free = self._limit - self._held
        wanted = None if urgent else self._next_use(name)
        while free < size:
            victim = self._victims.take(self._db, going)
            if victim is None:
                if self._looked:
                    break
                self._victims.look(self._db)
                self._looked = True
            elif urgent or self._may(victim, wanted):
                going.append(victim)
                free += victim.size
            else:
                self._victims.put_back([victim])
                break
        if free < size and not urgent:
            self._victims.put_back(going)
            return -1
        for gone in going:
            self._db.execute("DELETE FROM files WHERE name = ?", (gone.name,))
            # Within the transaction, or it might be another one's that was fetched since.
            self._unlink(gone.name)
        self._held = self._limit - free + size
        return len(going)

    def _next_use(self, name: bytes) -> float | None:
        found = self._db.execute(
            "SELECT MIN(clocks.time + (uses.step - clocks.step) * clocks.pace) FROM uses "
            "JOIN readers ON readers.id = uses.reader JOIN clocks ON clocks.name = readers.clock WHERE uses.name = ?",
            (name,),
        ).fetchone()
        return None if found is None else found[0]

    def _may(self, victim: Victim, wanted: float | None) -> bool:
        """Whether a piece that nobody waits for, needed at a time, may have the room of another one."""
        if victim.at is None or wanted is None:
            return victim.at is None and wanted is not None
        clearly = CLEARLY if victim.others else 1.0
        return victim.at - self._now > clearly * max(0.0, wanted - self._now)


def _held(db: sqlite3.Connection) -> int:
    return int(db.execute("SELECT COALESCE(SUM(bytes), 0) FROM files").fetchone()[0])


def _forget(db: sqlite3.Connection, reader: int) -> None:
    db.execute("DELETE FROM uses WHERE reader = ?", (reader,))
    db.execute("DELETE FROM files WHERE fetcher = ?", (reader,))
    db.execute("DELETE FROM readers WHERE id = ?", (reader,))
    db.execute("DELETE FROM clocks WHERE name NOT IN (SELECT clock FROM readers)")


def _vouch_for(root: Path) -> None:
    """Marks a folder as a cache's, whose files may be removed. Raises OSError if it holds somebody's files."""
    marker = root / MARKER
    if marker.exists():
        return
    if root.exists() and not (root / DATABASE).exists() and any(path.name != MARKER for path in root.iterdir()):
        raise OSError(f"{root} holds files that are no cache's: name another place by $RAYSTRIDE_CACHE")
    root.mkdir(parents=True, exist_ok=True)
    marker.touch()


def _free(place: Path) -> bool:
    """Whether nobody holds the lock of a file, or there is none."""
    try:
        with closing(place.open("r+")) as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _boot() -> str:
    """This start of the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"
