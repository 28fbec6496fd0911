"""Verification of local files by their hashes, once a node: what was found whole is remembered until a file changes.

A file of prepared data is verified leaf by leaf where it is read (`feed.shard_files`). One without a list, or which is
read from end to end, is verified by its SHA-256 beside the training, by a thread that computes while nobody else does.

    marks = NodeMarks("/runs/.prepared/a1b2/train")           # of all processes of the node, of all runs
    marks.read(512, 8) == key                                 # which of the leaves 512 to 519 are whole
    beside = BesideTraining().start()
    beside.add(WholeFile(path, sha256, damaged=lambda: DataError(...)))
    beside.finish()                                           # before a checkpoint is committed: raises DataError
"""

import hashlib
import os
import queue
import tempfile
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

import numpy as np

from raystride.pipelines.data.sources.faults import DataError
from raystride.pipelines.system.errors import SettingError
from raystride.pipelines.system.node_folder import ensure_private, node_folder

CHUNK_BYTES = 4 << 20
"""Bytes hashed at once. The thread holds Python's lock in between, where waiting for a processor would hold up the training:
a thousandth of its time."""
MARK = np.dtype("<u8")
UNUSED_S = 90 * 86400.0
"""Seconds without a use after which the marks of other data are removed."""


def file_key(path: Path | str, status: os.stat_result, content_hash: str) -> int:
    """Returns the key of a file's present content, 64 bits and not 0: of path, size, time of change, inode and hash.

    `path` is absolute.
    """
    text = f"{path}\n{status.st_size} {status.st_mtime_ns} {status.st_ino} {content_hash}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") or 1


class NodeMarks:
    """Marks of the leaves that this node has verified, by number: the key of the file that each was found whole in.

    Without a private folder, or room in it, only this object remembers, and the next process verifies again.
    """

    def __init__(self, name: str) -> None:
        """`name` is that of a list of files whose leaves are numbered through."""
        self._name, self._file = f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.marks", -1

    def read(self, first: int, count: int) -> np.ndarray:
        """Returns the marks of leaves, (count) uint64; 0 where there is none."""
        content = os.pread(self._open(), count * MARK.itemsize, first * MARK.itemsize)
        return np.frombuffer(content.ljust(count * MARK.itemsize, b"\0"), MARK)

    def write(self, first: int, count: int, key: int) -> None:
        """Marks leaves as whole in the file of this key."""
        marks, offset = key.to_bytes(MARK.itemsize, "little") * count, first * MARK.itemsize
        try:
            os.pwrite(self._open(), marks, offset)
        except OSError:  # the disk is full
            self._file = self._own(_open_nameless())
            os.pwrite(self._file, marks, offset)

    def _open(self) -> int:
        # No mapping: writing to one ends the process where the disk is full.
        if self._file < 0:
            try:
                self._file = self._own(_open_shared(self._name))
            except (OSError, SettingError):
                self._file = self._own(_open_nameless())
        return self._file

    def _own(self, file: int) -> int:
        weakref.finalize(self, os.close, file)
        return file


def _open_shared(name: str) -> int:
    """Opens a file of the node's folder. Raises OSError, SettingError if the folder is not private."""
    folder = node_folder("-verified")
    ensure_private(folder)  # before anything in it is trusted
    if not (folder / name).exists():
        _remove_unused(folder)
    file = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.utime(file)
    return file


def _open_nameless() -> int:
    """Opens a file of this process alone."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("marks")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _remove_unused(folder: Path) -> None:
    for path in folder.glob("*.marks"):
        with suppress(OSError):
            if path.stat().st_mtime < time.time() - UNUSED_S:
                path.unlink()


@dataclass(frozen=True)
class WholeFile:
    """A file to verify from end to end."""

    path: Path
    sha256: str
    """The SHA-256 of its content, or the beginning of it, in hexadecimal digits."""
    damaged: Callable[[], DataError]
    """Returns the error of a file of other content."""
    whole: Callable[[], None] = lambda: None
    """Called when the file has been found whole."""


class _Reading:
    """A file that is being hashed."""

    def __init__(self, file: WholeFile) -> None:
        self.file, self.digest = file, hashlib.sha256()
        self.stream: IO[bytes] = file.path.open("rb", buffering=0)


class BesideTraining:
    """Verifies whole files in a thread that computes while nobody else does; `finish` does so in the calling thread."""

    def __init__(self) -> None:
        self._files: OrderedDict[Path, WholeFile] = OrderedDict()
        self._reading: _Reading | None = None
        self._buffer = bytearray()
        self._lock = threading.Lock()
        """Held while a chunk is hashed."""
        self._is_finishing = False
        self._error: DataError | None = None
        self._wakes: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.hashed_bytes = 0
        """Bytes hashed so far."""

    def start(self) -> Self:
        """Starts the thread, which ends when this object is garbage-collected; returns self. Until then files only wait."""
        arguments = (self._wakes, weakref.ref(self))
        threading.Thread(target=_run_thread, args=arguments, name="verification", daemon=True).start()
        weakref.finalize(self, self._wakes.put, False)
        self._wakes.put(True)
        return self

    def add(self, file: WholeFile) -> None:
        """Adds a file, unless it waits already."""
        self._files.setdefault(file.path, file)
        self._wakes.put(True)

    def raise_error(self) -> None:
        """Raises DataError if a damaged file has been found."""
        if self._error:
            raise self._error

    def finish(self) -> None:
        """Verifies all files that wait, at this thread's priority. Raises DataError for a damaged one, OSError."""
        self._is_finishing = True  # else every second chunk could wait for a processor that nobody else wants
        try:
            while self._hash_next():
                pass
        finally:
            self._is_finishing = False
            self._wakes.put(True)
        self.raise_error()

    def hash_beside(self) -> bool:
        """Hashes the next chunk of a file, unless `finish` does; returns whether there may be more. Raises OSError."""
        return not self._is_finishing and self._hash_next()

    def _hash_next(self) -> bool:
        """Hashes the next chunk of a file; returns False if none waits, or one was damaged.

        Raises OSError; the file then waits for another try.
        """
        with self._lock:
            try:
                return self._error is None and self._hash_chunk()
            except OSError:
                self._close()
                raise

    def _hash_chunk(self) -> bool:
        if self._reading is None:
            if not self._files:
                self._buffer = bytearray()
                return False
            self._reading = _Reading(next(iter(self._files.values())))
        self._buffer = self._buffer or bytearray(CHUNK_BYTES)
        reading = self._reading
        if count := reading.stream.readinto(self._buffer):  # type: ignore[attr-defined]
            reading.digest.update(memoryview(self._buffer)[:count])
            self.hashed_bytes += count
            return True
        self._close()
        if reading.digest.hexdigest().startswith(reading.file.sha256):
            reading.file.whole()
        else:
            self._error = self._error or reading.file.damaged()
        del self._files[reading.file.path]
        return True

    def _close(self) -> None:
        if self._reading:
            self._reading.stream.close()
            self._reading = None


def _run_thread(wakes: "queue.SimpleQueue[bool]", verifier: weakref.ref[BesideTraining]) -> None:
    """Hashes the files that wait until the verifier is garbage-collected."""
    if hasattr(os, "SCHED_IDLE"):
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # of this thread, and so of its reads
    while wakes.get():
        with suppress(OSError):  # `finish` tries again, and raises it
            while _hash_chunk(verifier):
                pass


def _hash_chunk(verifier: weakref.ref[BesideTraining]) -> bool:
    alive = verifier()
    return alive is not None and alive.hash_beside()
