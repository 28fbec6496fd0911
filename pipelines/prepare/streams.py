"""Bytes of a file between two offsets, from any file system, decompressed where the file's name says that it is compressed.

with open_range(file, 0, None) as stream:
    for at, line in lines(stream): ...                    # offset of the line's first byte, line without its newline
compressed("notes.txt.gz")                                # True
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pipelines.files import filesystem
from pipelines.prepare.faults import faults_of
from pipelines.prepare.pieces import PIECE, File

COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
"""Endings of compressed files, and what pyarrow calls them."""


def compressed(name: str) -> bool:
    """Whether a file's name ends like that of a compressed one."""
    return name.endswith(tuple(COMPRESSIONS))


class ByteRange:
    """A stream that ends at an offset. Raises Faulty where the file ends or breaks before."""

    def __init__(self, stream: Any, place: str, start: int, stop: int | None) -> None:
        self._stream, self._place, self._left = stream, place, None if stop is None else stop - start
        self.start = start

    def read(self, size: int) -> bytes:
        """The next bytes, `size` unless the range ends."""
        wanted = size if self._left is None else min(size, self._left)
        with faults_of(self._place):
            data: bytes = self._stream.read(wanted)
            if self._left is not None:
                self._left -= len(data)
                if len(data) < wanted:
                    raise EOFError("it has become shorter since it was listed")
        return data


@contextmanager
def open_range(file: File, start: int = 0, stop: int | None = None) -> Iterator[ByteRange]:
    """The file's (decompressed) bytes [start, stop). Raises Faulty."""
    with faults_of(file.uri):
        system, path = filesystem(file.uri)
        packed = next((name for end, name in COMPRESSIONS.items() if file.name.endswith(end)), None)
        stream = system.open_input_stream(path, compression=packed) if packed else system.open_input_file(path)
    with stream:
        with faults_of(file.uri):
            if packed:
                _skip(stream, start)
            else:
                stream.seek(start)
        yield ByteRange(stream, file.uri, start, stop)


def _skip(stream: Any, size: int) -> None:
    while size and (data := stream.read(min(size, PIECE))):
        size -= len(data)


def length(file: File) -> int:
    """Bytes in the decompressed file, found by reading it. Raises Faulty."""
    total = 0
    with open_range(file) as stream:
        while data := stream.read(PIECE):
            total += len(data)
    return total


def lines(stream: ByteRange) -> Iterator[tuple[int, bytes]]:
    """Lines without their newline, each with the offset in the file at which it begins."""
    at, rest = stream.start, b""
    # A line longer than what was read so far doubles the next reading, so that its cost stays linear.
    while data := stream.read(max(PIECE, len(rest))):
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            yield at, line
            at += len(line) + 1
    if rest:
        yield at, rest
