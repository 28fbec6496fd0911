"""Bytes of a file between two offsets, from any file system: decompressed where its name says so, and as UTF-8.

with open_range(file, 0, None) as stream:
    for at, line in lines(stream): ...                    # offset of the line's first byte, line without its newline
"""

import codecs
import gzip
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from raystride.pipelines.files import filesystem
from raystride.pipelines.retries import retried
from raystride.pipelines.sources.archives import at_hand, foreign
from raystride.pipelines.sources.faults import REMEDY, Fault, Faulty, faults_of
from raystride.pipelines.sources.pieces import COMPRESSIONS, PIECE, File

_HEAD = 1 << 16
"""Bytes by which one tells that a file has no LF."""


class ByteRange:
    """A stream that ends at an offset. Raises Faulty where the file ends or breaks before."""

    def __init__(self, stream: Any, place: str, start: int, stop: int | None) -> None:
        self._stream, self._place, self._left = stream, place, None if stop is None else stop - start
        self.start = start

    def read(self, size: int) -> bytes:
        """The next bytes, `size` unless the range ends.

        Raises Faulty where the file breaks, or is gone, or ends before the range does (its own EOFError, turned into one).
        """
        wanted = size if self._left is None else min(size, self._left)
        with faults_of(self._place):
            data: bytes = retried(lambda: self._stream.read(wanted))  # a read that failed has not moved the stream on
            if self._left is not None:
                self._left -= len(data)
                if len(data) < wanted:
                    raise EOFError("it has become shorter since it was listed")
        return data


@contextmanager
def open_range(file: File, start: int = 0, stop: int | None = None) -> Iterator[ByteRange]:
    """The file's (decompressed, recoded) bytes [start, stop). Raises Faulty."""
    at_hand(file)
    if fault := foreign(file):
        raise Faulty(fault)
    with faults_of(file.uri):
        system, path = filesystem(file.uri)
        packed = next((name for end, name in COMPRESSIONS.items() if file.name.lower().endswith(end)), None)
        opened = (
            partial(system.open_input_stream, path, compression=packed) if packed else partial(system.open_input_file, path)
        )
        stream = retried(opened)
    with stream:
        with faults_of(file.uri):
            source: Any = (
                _Gzip(stream, partial(system.open_input_stream, path, compression=None)) if packed == "gzip" else stream
            )
            source = source if file.encoding == "utf-8" else _Recoded(source, file)
            if file.streamed:
                # What is decompressed or recoded cannot be entered in the middle.
                _skip(source, start)
            else:
                stream.seek(start)
        yield ByteRange(source, file.uri, start, stop)


class _Gzip:
    """A gzip file as Arrow reads it. What Arrow refuses Python reads, which takes zeros behind the end for padding."""

    def __init__(self, stream: Any, reopen: Callable[[], Any]) -> None:
        self._stream, self._reopen, self._at, self._by_python = stream, reopen, 0, False

    def read(self, size: int) -> bytes:
        """The next bytes, `size` unless the file ends. Raises OSError or EOFError where it is broken."""
        try:
            data: bytes = self._stream.read(size)
        except OSError as error:
            if self._by_python or error.errno:
                raise
            self._stream, self._by_python = gzip.GzipFile(fileobj=self._reopen()), True
            _skip(self._stream, self._at)
            data = self._stream.read(size)
        self._at += len(data)
        return data


class _Recoded:
    """A stream of text in another encoding, as UTF-8. Raises Faulty where it is not of that encoding."""

    def __init__(self, stream: Any, file: File) -> None:
        self._stream, self._file = stream, file
        self._decoder = codecs.getincrementaldecoder(file.encoding)()
        self._ready, self._ended, self._begun = b"", False, False

    def read(self, size: int) -> bytes:
        """The next bytes, `size` unless the text ends."""
        while len(self._ready) < size and not self._ended:
            data = self._stream.read(size)
            # In many an encoding any bytes are text.
            if not self._begun and (fault := foreign(self._file, data)):
                raise Faulty(fault)
            self._begun, self._ended = True, not data
            try:
                self._ready += self._decoder.decode(data, self._ended).encode("utf-8", "surrogatepass")
            except UnicodeDecodeError as error:
                reason = f"is not {self._file.encoding}: {error.reason}"
                raise Faulty(Fault(self._file.uri, reason, "name its encoding with --data.encoding")) from error
        given, self._ready = self._ready[:size], self._ready[size:]
        return given


def _skip(stream: Any, size: int) -> None:
    while size and (data := stream.read(min(size, PIECE))):
        size -= len(data)


def length(file: File) -> int:
    """Bytes in the decompressed text, found by reading it. Raises Faulty."""
    total = 0
    with open_range(file) as stream:
        while data := stream.read(PIECE):
            total += len(data)
    return total


def count_lines(file: File) -> int:
    """Lines of the decompressed text, found by reading it. Raises Faulty."""
    found, last = 0, b"\n"
    with open_range(file) as stream:
        while data := stream.read(PIECE):
            found, last = found + data.count(b"\n"), data[-1:]
    return found + (last != b"\n")


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


def refuse_cr(file: File, line: bytes) -> None:
    """Raises Faulty if the first line of a file shows that its lines end with CR alone: all of it would be one line."""
    if b"\r" not in line.rstrip(b"\r"):
        return
    with open_range(file) as stream:
        head = stream.read(min(_HEAD, file.size) if not file.streamed else _HEAD)
    if b"\n" not in head:
        remedy = f"write them with LF, with `tr '\\r' '\\n'` for instance, or {REMEDY}"
        raise Faulty(Fault(file.uri, "has lines that end with CR alone", remedy))


def lines_of_any_end(stream: ByteRange) -> Iterator[tuple[int, bytes]]:
    """Yields lines that end with LF, CR LF or CR, with their ends, each with the offset in the file at which it begins."""
    at, rest = stream.start, b""
    while data := stream.read(max(PIECE, len(rest))):
        found = (rest + data).splitlines(keepends=True)
        # What follows may belong to the last one: the rest of a line, or the LF after a CR.
        rest = found.pop()
        for line in found:
            yield at, line
            at += len(line)
    if rest:
        yield at, rest
