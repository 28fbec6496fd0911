"""Thread-safe reads of byte ranges of a local or remote file.

The file is opened once (one request for its size in a remote store), and again after a failure. Calls go through `retries`.

    with RangedFile("s3://bucket/prepared/train/00003.arrow") as file:
        file.read(offset=65536, num_bytes=4096)               # fewer bytes at the file's end
"""

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

from raystride.pipelines.system.storage.object_stores import cached_filesystem
from raystride.pipelines.system.storage.retries import Result, retry


class RangedFile:
    """A file, given by its absolute path or address, with reads of byte ranges."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._stream: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file; another read opens it again."""
        stream, self._stream = self._stream, None
        if stream is not None:
            with suppress(Exception):
                stream.close()

    def size(self) -> int:
        """Returns the file's size in bytes. Raises FileNotFoundError."""
        return retry(lambda: self._with_stream(_stream_size))

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Returns `num_bytes` bytes from `offset` on, fewer at the file's end. Raises FileNotFoundError."""
        return retry(lambda: self._with_stream(lambda stream: _read_range(stream, offset, num_bytes)))

    def _with_stream(self, work: Callable[[Any], Result]) -> Result:
        stream = self._stream
        if stream is None:
            if "://" in self._address:
                system, path = cached_filesystem(self._address)
                stream = system.open_input_file(path)
            else:
                stream = open(self._address, "rb")  # noqa: SIM115  (stays open; closed by `close`)
            self._stream = stream
        try:
            return work(stream)
        except BaseException:
            # Another thread may be reading from it: it is dropped, and closed with its last reference.
            if self._stream is stream:
                self._stream = None
            raise


def _stream_size(stream: Any) -> int:
    if hasattr(stream, "read_at"):
        return int(stream.size())
    return os.fstat(stream.fileno()).st_size


def _read_range(stream: Any, offset: int, num_bytes: int) -> bytes:
    if hasattr(stream, "read_at"):
        return bytes(stream.read_at(num_bytes, offset))
    found = bytearray()
    while len(found) < num_bytes and (piece := os.pread(stream.fileno(), num_bytes - len(found), offset + len(found))):
        found += piece
    return bytes(found)
