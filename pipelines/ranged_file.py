"""A file, near or far, of which ranges of bytes are read, by several threads at once.

It is opened once, which asks a remote store for its size, and anew after a failure; each call goes through `retries`.

    with RangedFile("s3://bucket/prepared/train/00003.arrow") as file:
        file.read(at=65536, count=4096)                       # fewer bytes where the file ends before
"""

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

from raystride.pipelines.retries import Result, retried
from raystride.pipelines.stores import client


class RangedFile:
    """A file by its absolute path or address."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._stream: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives back what is open; another read opens it again."""
        stream, self._stream = self._stream, None
        if stream is not None:
            with suppress(Exception):
                stream.close()

    def size(self) -> int:
        """Bytes in the file. Raises FileNotFoundError."""
        return retried(lambda: self._with(_size))

    def read(self, at: int, count: int) -> bytes:
        """The bytes from `at` on, `count` of them or as many as there are. Raises FileNotFoundError."""
        return retried(lambda: self._with(lambda stream: _read(stream, at, count)))

    def _with(self, work: Callable[[Any], Result]) -> Result:
        stream = self._stream
        if stream is None:
            if "://" in self._address:
                system, path = client(self._address)
                stream = system.open_input_file(path)
            else:
                stream = open(self._address, "rb")  # noqa: SIM115  (kept; closed by `close`)
            self._stream = stream
        try:
            return work(stream)
        except BaseException:
            # Another thread may be reading from it: it is dropped, and closed by whoever lets go of it last.
            if self._stream is stream:
                self._stream = None
            raise


def _size(stream: Any) -> int:
    if hasattr(stream, "read_at"):
        return int(stream.size())
    return os.fstat(stream.fileno()).st_size


def _read(stream: Any, at: int, count: int) -> bytes:
    if hasattr(stream, "read_at"):
        return bytes(stream.read_at(count, at))
    found = bytearray()
    while len(found) < count and (piece := os.pread(stream.fileno(), count - len(found), at + len(found))):
        found += piece
    return bytes(found)
