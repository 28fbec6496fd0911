"""Node-local disk cache for pieces of remote files, bounded in bytes, shared by all processes of the node.

A piece is verified by its hash, written atomically, and fetched once per node. Evicted is the piece with the furthest next
use, according to the ledger (`feed.ledger`). The folder is on a local disk of the node.

As many pieces are fetched at once as the link carries, since more only queue, and unevenly: sixteen concurrent pieces over
200 Mbit/s took 0.5 s each, but one in a hundred 4 s, which may stall the training; eight took 0.9 s at most, and used the
link fully too.

    cache = NodeCache(Path("/tmp/raystride-cache"), max_bytes=32 << 30)
    piece = RemotePiece(name, folder, "train/00003.arrow", first=65536, size=65536, verify=check)
    cache.map_piece(lambda: piece, piece.name, piece.size)    # its bytes, fetched first if missing
    cache.fetch_ahead([piece, ...])                           # in the background, several at a time
"""

import errno
import math
import os
import queue
import shutil
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from raystride.pipelines.config import DataConfig
from raystride.pipelines.data.feed.ledger import DATABASE, Ledger, PieceStatus
from raystride.pipelines.system.node_folder import CACHE_VARIABLE, ensure_private, node_folder
from raystride.pipelines.system.service_thread import format_error
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.ranged_file import RangedFile

INITIAL = 1
"""Initial limit: a single fetch measures the latency of an idle link."""
MIN_QUEUED, MAX_QUEUED = 2.0, 4.0
"""Bounds on a process's fetches queued in the link: below, the limit grows by one; above, it shrinks by one."""


class ConcurrencyLimit:
    """Concurrency limit adapted to fetch latencies, as TCP Vegas' window (Brakmo and Peterson, 1995) in whole fetches.

    Of `limit` fetches with latency t, and t0 on an idle link, limit x (1 - t0 / t) are queued in the link. If t0 is outdated
    because the store has become slower, `MAX_QUEUED` fetches continue.
    """

    def __init__(self, max_fetches: int) -> None:
        self.limit, self._max_fetches = min(INITIAL, max_fetches), max_fetches
        self._min_latency_s = math.inf
        self._latencies: list[float] = []

    def record_latency(self, seconds: float) -> None:
        """Records the latency of a fetch; the limit is updated once per window of `limit` fetches."""
        self._min_latency_s = min(seconds, self._min_latency_s)
        self._latencies.append(seconds)
        if len(self._latencies) < self.limit:
            return
        queued = self.limit * (1 - self._min_latency_s * len(self._latencies) / sum(self._latencies))
        self._latencies.clear()
        if queued < MIN_QUEUED:
            self.limit = min(self._max_fetches, self.limit + 1)
        elif queued > MAX_QUEUED:
            self.limit -= 1


MAX_CONCURRENT_FETCHES = 8
"""Maximum concurrent fetches of a process: with 50 ms latency to a store, pieces of 1 MiB reach more than 1 Gbit/s."""
OTHER_FETCH_TIMEOUT_S = 120.0
"""Seconds to wait for another process's fetch of the same piece before fetching it too: writes are atomic."""
POLL_S = 0.02
MAX_TRIES = 3
"""Attempts to fetch a piece that fails verification."""
MAX_OPEN_FILES = 64
"""Remote files kept open, which saves querying their size again."""
STALE_HOST_S = 7 * 86400.0
"""Seconds after which the cache of another host on the same disk is removed: pods get new names each time."""


@dataclass(frozen=True)
class RemotePiece:
    """A byte range of a remote file."""

    name: bytes
    """Its name in the ledger, 16 bytes, unique to its content."""
    folder: Folder
    file: str
    first: int
    """Offset of its first byte in the file."""
    size: int
    """Number of bytes."""
    verify: Callable[[bytes], bool] = lambda content: True
    """Returns whether the content is correct. Raises OSError if that cannot be determined."""


class NodeCache:
    """Cache of pieces on this node's disk, at most `max_bytes` except for pieces that are being read."""

    def __init__(self, root: Path, max_bytes: int, *, clock: str = "", log: Callable[[str], None] = lambda _: None) -> None:
        """`clock` names the group of readers with the same steps (`Ledger`). `log` is called for each refetched piece."""
        self.root, self.max_bytes = root, max_bytes
        self._clock, self.log = clock, log
        self._lock = threading.Lock()
        self._creation_lock = threading.Lock()
        self._ledger: Ledger | None = None
        self._fetch_queue: _FetchQueue | None = None
        self._open_files: OrderedDict[str, RangedFile] = OrderedDict()
        self._pending: dict[bytes, Future[None]] = {}
        self._concurrency = ConcurrencyLimit(MAX_CONCURRENT_FETCHES)
        self._largest_piece = 0
        self.fetched_bytes = 0
        """Bytes fetched by this process."""

    @property
    def ledger(self) -> Ledger:
        """The node's ledger. Raises OSError, sqlite3.Error; SettingError if the cache folder belongs to another user."""
        # No cached_property, which has no lock since Python 3.12: loader and read-ahead ask at the same time, and of two
        # ledgers the one that is dropped would count as a dead reader's, whose pieces are removed.
        with self._creation_lock:
            if self._ledger is None:
                ensure_private(self.root)
                self._ledger = Ledger(self.root, self.max_bytes, self._clock)
            return self._ledger

    def map_piece(self, piece: Callable[[], RemotePiece], name: bytes, size: int) -> np.ndarray:
        """Memory-maps a piece, (size) uint8, fetching it first if it is missing; no file stays open.

        The bytes stay readable, and on the disk, as long as the array lives. Raises OSError if the piece cannot be fetched
        or fails verification.
        """
        import torch  # the driver opens feeds without it

        path = self.ledger.piece_path(name)
        while True:
            try:
                # mmap would keep a file open for each piece: a process may have a thousand.
                return torch.from_file(path, size=size, dtype=torch.uint8).numpy()  # type: ignore[no-any-return]
            except RuntimeError as error:  # PyTorch raises no other
                if os.strerror(errno.ENOENT) not in str(error):
                    raise OSError(f"{path} cannot be read: {error}") from error
            self._fetch_or_wait(piece())

    def fetch_ahead(self, pieces: Sequence[RemotePiece]) -> int:
        """Starts background fetches of pieces, as many as the concurrency limit and the cache's size allow.

        Returns how many pieces, counted from the first, are present or being fetched; call again for the others.
        """
        num_free = self._concurrency.limit - len(self._pending_fetches())
        if num_free <= 0 or not pieces:
            return 0
        statuses = self.ledger.request([(piece.name, piece.size) for piece in pieces], max_fetches=num_free)
        for piece, status in zip(pieces, statuses, strict=False):
            if status == PieceStatus.TO_FETCH:
                self._enqueue_fetch(piece)
        return len(statuses)

    def wait_any(self, seconds: float) -> bool:
        """Waits until one pending fetch has finished, at most `seconds`; returns False if none is pending."""
        pending = self._pending_fetches()
        if pending:
            wait(pending, seconds, FIRST_COMPLETED)
        return bool(pending)

    def fetch(self, pieces: Sequence[RemotePiece]) -> None:
        """Fetches pieces, several at a time; returns when all are fetched or the cache has no room for more.

        Raises nothing: reading a piece that was not fetched raises the error.
        """
        remaining = list(pieces)
        while remaining:
            num_claimed = self.fetch_ahead(remaining)
            remaining = remaining[num_claimed:]
            if not self.wait_any(1.0) and not num_claimed:
                return
        while self.wait_any(1.0):
            pass

    def _pending_fetches(self) -> list["Future[None]"]:
        with self._lock:
            self._pending = {name: pending for name, pending in self._pending.items() if not pending.done()}
            return list(self._pending.values())

    def _enqueue_fetch(self, piece: RemotePiece) -> None:
        future: Future[None] = Future()
        with self._lock:
            self._pending[piece.name] = future
        self._queue.put((piece, future))

    @property
    def _queue(self) -> "_FetchQueue":
        """Queue of fetches and its daemon threads; an executor would block the exit of the process."""
        with self._creation_lock:
            if self._fetch_queue is None:
                self._fetch_queue = queue.SimpleQueue()
                arguments = (self._fetch_queue, weakref.ref(self))
                for _ in range(MAX_CONCURRENT_FETCHES):
                    threading.Thread(target=_run_fetch_thread, args=arguments, name="fetch", daemon=True).start()
                # Otherwise a process that opens one run after another would accumulate threads.
                weakref.finalize(self, _stop_fetch_threads, self._fetch_queue)
            return self._fetch_queue

    def _fetch_or_wait(self, piece: RemotePiece) -> None:
        """Fetches a piece that is needed now, or waits for its pending fetch."""
        deadline = time.monotonic() + OTHER_FETCH_TIMEOUT_S
        while True:
            with self._lock:
                pending = self._pending.get(piece.name)
            if pending is not None:
                pending.result()
                if os.path.exists(self.ledger.piece_path(piece.name)):
                    return
            (status,) = self.ledger.request([(piece.name, piece.size)], urgent=True)
            if status == PieceStatus.TO_FETCH or (status == PieceStatus.IN_FLIGHT and time.monotonic() > deadline):
                self._fetch_and_store(piece)
                return
            if status == PieceStatus.PRESENT:
                if os.path.exists(self.ledger.piece_path(piece.name)):
                    return
                self.ledger.mark_missing(piece.name)  # the file was removed
                continue
            if os.path.exists(self.ledger.piece_path(piece.name)):
                return
            time.sleep(POLL_S)

    def _fetch_or_log(self, piece: RemotePiece) -> None:
        """Fetches a piece ahead; logs an error, since its reader fetches it again and raises what remains."""
        try:
            self._fetch_and_store(piece)
        except Exception as error:
            self.log(f"{piece.folder / piece.file} is fetched again when it is read: {format_error(error)}")

    def _fetch_and_store(self, piece: RemotePiece) -> None:
        """Fetches a piece that the ledger has assigned to this reader. Raises OSError."""
        try:
            began = time.monotonic()
            content = self._fetch_verified(piece)
            took = time.monotonic() - began
            self._write_piece(piece, content)
        except BaseException:
            self.ledger.mark_missing(piece.name)
            raise
        self.ledger.mark_present(piece.name, piece.size)
        with self._lock:
            self.fetched_bytes += piece.size
            self._largest_piece = max(self._largest_piece, piece.size)
            if piece.size == self._largest_piece:  # the last piece of a file is smaller
                self._concurrency.record_latency(took)

    def _fetch_verified(self, piece: RemotePiece) -> bytes:
        """Fetches a piece until its content passes verification, at most `MAX_TRIES` times. Raises OSError then."""
        piece_range = f"bytes {piece.first:,} to {piece.first + piece.size:,} of {piece.folder / piece.file}"
        for attempt in range(MAX_TRIES):
            data = self._open_file(piece).read(piece.first, piece.size)
            if len(data) == piece.size and piece.verify(data):
                if attempt:
                    self.log(f"{piece_range} arrived damaged, and whole when they were fetched again")
                return data
        raise OSError(
            f"{piece_range} are not what was prepared ({len(data):,} bytes came, {MAX_TRIES} times): "
            "the file was changed or is damaged where it lies; remove its folder to prepare it again"
        )

    def _open_file(self, piece: RemotePiece) -> RangedFile:
        address = (piece.folder / piece.file).uri
        with self._lock:
            found = self._open_files.setdefault(address, RangedFile(address))
            self._open_files.move_to_end(address)
            while len(self._open_files) > MAX_OPEN_FILES:
                self._open_files.popitem(last=False)
        return found

    def _write_piece(self, piece: RemotePiece, content: bytes) -> None:
        """Writes a piece atomically by a rename. If the disk is full, evicts other pieces and retries once."""
        path = Path(self.ledger.piece_path(piece.name))
        if not path.parent.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
        for last in (False, True):
            temporary = self.ledger.temporary_path(path)
            try:
                temporary.write_bytes(content)
                temporary.replace(path)
                return
            except OSError as error:
                temporary.unlink(missing_ok=True)
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                if last or not self.ledger.evict_bytes(8 * piece.size):
                    message = f"no room for {piece.size:,} bytes in {self.root}: free some, set a lower data.cache_gib, or "
                    raise OSError(error.errno, message + "name another place by $RAYSTRIDE_CACHE") from error


_FetchQueue = queue.SimpleQueue[tuple[RemotePiece, Future[None]] | None]


def _run_fetch_thread(fetch_queue: _FetchQueue, cache_ref: weakref.ref[NodeCache]) -> None:
    """Fetches the queued pieces until the cache is garbage-collected."""
    while (task := fetch_queue.get()) is not None:
        piece, future = task
        if cache := cache_ref():
            cache._fetch_or_log(piece)
        cache = None
        future.set_result(None)


def _stop_fetch_threads(fetch_queue: _FetchQueue) -> None:
    for _ in range(MAX_CONCURRENT_FETCHES):
        fetch_queue.put(None)


def cache_bytes(data: DataConfig) -> int:
    """Returns the cache size of a node in bytes."""
    return int(data.cache_gib * 2**30)


def node_cache(data: DataConfig, clock: str = "", log: Callable[[str], None] = lambda _: None) -> NodeCache:
    """Opens the cache of this node, of `data.cache_gib`."""
    return NodeCache(cache_folder(), cache_bytes(data), clock=clock, log=log)


def cache_folder() -> Path:
    """Returns this node's cache folder. On a disk shared by nodes, removes the unused caches of other hosts."""
    folder = node_folder()
    if os.environ.get(CACHE_VARIABLE):
        for database in folder.parent.glob(f"*/{DATABASE}"):
            with suppress(OSError):
                newest = max(database_file.stat().st_mtime for database_file in database.parent.glob(f"{DATABASE}*"))
                if database.parent != folder and time.time() - newest > STALE_HOST_S:
                    shutil.rmtree(database.parent, ignore_errors=True)
    return folder
