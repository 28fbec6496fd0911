"""A node's copies of pieces of remote files, bounded in bytes, shared by all processes of the node that read far shards.

A piece is believed by its hash, appears whole or not at all, and is fetched once a node, whoever asks; what has to go is
what is needed farthest in the future, as the ledger knows it (`feed.ledger`). The folder lies on a disk of the node's own.

    cache = NodeCache(Path("/tmp/raystride-cache"), most_bytes=32 << 30)
    piece = RemotePiece(name, folder, "train/00003.arrow", first=65536, size=65536, believed=check)
    cache.mapped(lambda: piece, piece.name, piece.size)       # its bytes, fetched first where they are not there
    cache.fetch_ahead([piece, ...])                           # in the background, several at a time
"""

import errno
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
from functools import cached_property
from pathlib import Path

import numpy as np

from raystride.pipelines.config import Config
from raystride.pipelines.feed.concurrency import Concurrency
from raystride.pipelines.feed.ledger import DATABASE, Claim, Ledger
from raystride.pipelines.files import Folder
from raystride.pipelines.node_folder import PLACE, node_folder, open_private
from raystride.pipelines.ranged_file import RangedFile

AT_ONCE = 8
"""Pieces that a process fetches ahead at a time at most: over a link with 50 ms to a store, 1 MiB each make more than
1 Gbit/s."""
OTHERS_S = 120.0
"""Seconds that a process waits for another one's fetch of the same piece, and then fetches it itself: it appears whole."""
LOOK_S = 0.02
TRIES = 3
"""Times that a piece is fetched which is not what it has to be."""
MOST_OPEN = 64
"""Remote files that are kept open, which saves asking for their size again."""
GONE_S = 7 * 86400.0
"""Seconds after which a host is not expected any more that has a cache on the same disk: pods have other names each time."""


@dataclass(frozen=True)
class RemotePiece:
    """Some bytes of a remote file."""

    name: bytes
    """What it is called in the ledger, 16 bytes: another name for another content."""
    folder: Folder
    file: str
    first: int
    """The first of its bytes in the file ..."""
    size: int
    """... and how many they are."""
    believed: Callable[[bytes], bool] = lambda content: True
    """Whether some content is what it has to be. Raises OSError where that cannot be found out."""


class NodeCache:
    """Pieces on this node's disk, at most `most_bytes` of them, but always those that are asked for now."""

    def __init__(
        self, root: Path, most_bytes: int, *, clock: str = "", said: Callable[[str], None] = lambda _: None
    ) -> None:
        """`clock` names those whose steps are the same (`Ledger`). `said` is told of pieces that were fetched again."""
        self.root, self.most_bytes = root, most_bytes
        self._clock, self.said = clock, said
        self._lock = threading.Lock()
        self._open: OrderedDict[str, RangedFile] = OrderedDict()
        self._coming: dict[bytes, Future[None]] = {}
        self._concurrency = Concurrency(AT_ONCE)
        self._largest = 0
        self.fetched = 0
        """Bytes that this process has fetched."""

    @cached_property
    def ledger(self) -> Ledger:
        """The node's ledger. Raises OSError, sqlite3.Error; SettingError where the cache's place is another user's."""
        open_private(self.root)
        return Ledger(self.root, self.most_bytes, self._clock)

    def mapped(self, piece: Callable[[], RemotePiece], name: bytes, size: int) -> np.ndarray:
        """A piece's bytes, (size) uint8, which is fetched first where it is not there; no file stays open.

        They stay readable, and on the disk, as long as the array lives. Raises OSError where the piece cannot be fetched or
        is not what it has to be.
        """
        import torch  # the driver opens feeds without it

        place = self.ledger.place(name)
        while True:
            try:
                # Not mmap's, which keeps a file open for each: a process may have a thousand.
                return torch.from_file(place, size=size, dtype=torch.uint8).numpy()  # type: ignore[no-any-return]
            except RuntimeError as error:  # PyTorch has no other
                if os.strerror(errno.ENOENT) not in str(error):
                    raise OSError(f"{place} cannot be read: {error}") from error
            self._bring(piece())

    def fetch_ahead(self, pieces: Sequence[RemotePiece]) -> int:
        """Begins to fetch pieces that nobody waits for yet, as many of them as are free to be and have room.

        How many of them, from the first on, are there or on their way; whoever wants the others asks again.
        """
        free = self._concurrency.now - len(self._under_way())
        if free <= 0 or not pieces:
            return 0
        claims = self.ledger.claim([(piece.name, piece.size) for piece in pieces], most=free)
        for piece, claim in zip(pieces, claims, strict=False):
            if claim == Claim.MINE:
                self._begin(piece)
        return len(claims)

    def wait(self, seconds: float) -> bool:
        """Waits until one of those that are on their way has come, at most so long; False where none is."""
        coming = self._under_way()
        if coming:
            wait(coming, seconds, FIRST_COMPLETED)
        return bool(coming)

    def bring(self, pieces: Sequence[RemotePiece]) -> None:
        """Fetches pieces, several at a time, and returns when they have come or there is no room for more of them.

        Raises nothing: who then reads a piece that did not come meets why.
        """
        left = list(pieces)
        while left:
            taken = self.fetch_ahead(left)
            left = left[taken:]
            if not self.wait(1.0) and not taken:
                return
        while self.wait(1.0):
            pass

    def _under_way(self) -> list["Future[None]"]:
        with self._lock:
            self._coming = {name: each for name, each in self._coming.items() if not each.done()}
            return list(self._coming.values())

    def _begin(self, piece: RemotePiece) -> None:
        future: Future[None] = Future()
        with self._lock:
            self._coming[piece.name] = future
        self._queue.put((piece, future))

    @cached_property
    def _queue(self) -> "_Tasks":
        """What is to be fetched, and threads that do it: not a pool's, for which a process waits at its end."""
        tasks: _Tasks = queue.SimpleQueue()
        for _ in range(AT_ONCE):
            threading.Thread(target=_work, args=(tasks, weakref.ref(self)), name="fetch", daemon=True).start()
        # In a process that opens one run after another they would else be ever more.
        weakref.finalize(self, _end_work, tasks)
        return tasks

    def _bring(self, piece: RemotePiece) -> None:
        """Has a piece there that somebody waits for."""
        until = time.monotonic() + OTHERS_S
        while True:
            with self._lock:
                coming = self._coming.get(piece.name)
            if coming is not None:
                coming.result()
                if os.path.exists(self.ledger.place(piece.name)):
                    return
            (claim,) = self.ledger.claim([(piece.name, piece.size)], urgent=True)
            if claim == Claim.MINE or (claim == Claim.OTHERS and time.monotonic() > until):
                self._fetch(piece)
                return
            if claim == Claim.HERE:
                if os.path.exists(self.ledger.place(piece.name)):
                    return
                self.ledger.gone(piece.name)  # somebody has removed the file
                continue
            if os.path.exists(self.ledger.place(piece.name)):
                return
            time.sleep(LOOK_S)

    def _fetch(self, piece: RemotePiece) -> None:
        """Fetches a piece that is this reader's to fetch. Raises OSError."""
        try:
            began = time.monotonic()
            content = self._right(piece)
            took = time.monotonic() - began
            self._put(piece, content)
        except BaseException:
            self.ledger.gone(piece.name)
            raise
        self.ledger.arrived(piece.name, piece.size)
        with self._lock:
            self.fetched += piece.size
            self._largest = max(self._largest, piece.size)
            if piece.size == self._largest:  # the last of a file takes less
                self._concurrency.took(took)

    def _right(self, piece: RemotePiece) -> bytes:
        """The content of a piece, fetched until it is what it has to be."""
        place = f"bytes {piece.first:,} to {piece.first + piece.size:,} of {piece.folder / piece.file}"
        for number in range(TRIES):
            content = self._opened(piece).read(piece.first, piece.size)
            if len(content) == piece.size and piece.believed(content):
                if number:
                    self.said(f"{place} arrived damaged, and whole when they were fetched again")
                return content
        raise OSError(
            f"{place} are not what was prepared ({len(content):,} bytes came, {TRIES} times): "
            "the file was changed or is damaged where it lies; remove its folder to prepare it again"
        )

    def _opened(self, piece: RemotePiece) -> RangedFile:
        address = (piece.folder / piece.file).uri
        with self._lock:
            found = self._open.setdefault(address, RangedFile(address))
            self._open.move_to_end(address)
            while len(self._open) > MOST_OPEN:
                self._open.popitem(last=False)
        return found

    def _put(self, piece: RemotePiece, content: bytes) -> None:
        """Writes a piece under another name, then gives it its own. Where the disk is full others go, once."""
        path = Path(self.ledger.place(piece.name))
        if not path.parent.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
        for last in (False, True):
            temporary = self.ledger.temporary(path)
            try:
                temporary.write_bytes(content)
                temporary.replace(path)
                return
            except OSError as error:
                temporary.unlink(missing_ok=True)
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                if last or not self.ledger.shrink(8 * piece.size):
                    message = f"no room for {piece.size:,} bytes in {self.root}: free some, set a lower data.cache_gib, or "
                    raise OSError(error.errno, message + "name another place by $RAYSTRIDE_CACHE") from error


_Tasks = queue.SimpleQueue[tuple[RemotePiece, Future[None]] | None]


def _work(tasks: _Tasks, of: weakref.ref[NodeCache]) -> None:
    """Fetches what a cache wants, as long as there is that cache."""
    while (task := tasks.get()) is not None:
        piece, future = task
        with suppress(Exception):  # who needs the piece fetches it again, and meets what is wrong
            if cache := of():
                cache._fetch(piece)
        cache = None
        future.set_result(None)


def _end_work(tasks: _Tasks) -> None:
    for _ in range(AT_ONCE):
        tasks.put(None)


def cache_bytes(config: Config) -> int:
    """Bytes of pieces that a node keeps."""
    return int(config.data.cache_gib * 2**30)


def node_cache(config: Config, clock: str = "", said: Callable[[str], None] = lambda _: None) -> NodeCache:
    """The cache of this node, as large as `data.cache_gib` says."""
    return NodeCache(cache_folder(), cache_bytes(config), clock=clock, said=said)


def cache_folder() -> Path:
    """Returns where this node's cache lies. On a disk that nodes share, what others have not used for long is removed."""
    own = node_folder()
    if os.environ.get(PLACE):
        for database in own.parent.glob(f"*/{DATABASE}"):
            with suppress(OSError):
                newest = max(each.stat().st_mtime for each in database.parent.glob(f"{DATABASE}*"))
                if database.parent != own and time.time() - newest > GONE_S:
                    shutil.rmtree(database.parent, ignore_errors=True)
    return own
