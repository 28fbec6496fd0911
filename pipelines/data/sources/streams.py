"""Reads byte ranges and lines of files from any file system, decompressed according to the name, and recoded to UTF-8.

with open_range(file, 0, None) as stream:
    for offset, line in read_lines(stream): ...           # offset of the line's first byte, line without its newline
"""

import codecs
import gzip
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from raystride.pipelines.data.first_bytes import HEAD_BYTES, has_controls
from raystride.pipelines.data.sources.archives import ensure_unpacked, foreign_format_fault, unsupported_format_fault
from raystride.pipelines.data.sources.faults import BINARY_REMEDY, REMEDY, Fault, FaultError, raise_as_faults
from raystride.pipelines.data.sources.pieces import COMPRESSIONS, PIECE_BYTES, File
from raystride.pipelines.system.storage.folder import resolve_filesystem
from raystride.pipelines.system.storage.retries import retry

_HEAD_BYTES = 1 << 16
"""Bytes at a file's beginning that are searched for an LF."""
_OPEN: dict[str, Any] = {}
"""By URI: the streams of files as they are stored, that this process reads."""


def position_in_file(file: File) -> int | None:
    """Returns how many of a file's stored bytes this process has read; None if it does not read the file now."""
    stream = _OPEN.get(file.uri)
    return None if stream is None or stream.closed else stream.tell()


class _StoredBytes:
    """A stream of a file's stored bytes that knows its position, as Arrow's input streams do not."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._position = stream, 0

    def read(self, size: int = -1) -> bytes:
        """Returns the next bytes, `size` unless the file ends."""
        data: bytes = self._stream.read(size)
        self._position += len(data)
        return data

    def tell(self) -> int:
        """Returns the bytes that have been read."""
        return self._position

    def close(self) -> None:
        """Closes the stream."""
        self._stream.close()

    @property
    def closed(self) -> bool:
        """Whether it is closed."""
        return bool(self._stream.closed)


class ByteRange:
    """A stream that ends at an offset. Raises FaultError if the file ends earlier, or reading fails."""

    def __init__(self, stream: Any, file: File, start: int, stop: int | None, expected: str = "") -> None:
        """`expected`: the format by `first_bytes` that the file has; by default it is text."""
        self._stream, self._file, self._left = stream, file, None if stop is None else stop - start
        self._expected, self._is_seen = expected, start > 0
        self.start = start

    def read(self, size: int) -> bytes:
        """Returns the next bytes, `size` unless the range ends.

        Raises FaultError if reading fails, the file is missing, or it ends before the range does; also if its first bytes
        show another format.
        """
        wanted = size if self._left is None else min(size, self._left)
        if self._is_seen:
            return self._read(wanted)
        try:
            data = self._read(wanted)
        except FaultError as faulty:
            if fault := foreign_format_fault(self._file, expected=_packing(self._file)):
                raise FaultError(fault) from faulty
            raise
        self._is_seen = True
        if fault := foreign_format_fault(self._file, data[:HEAD_BYTES], expected=self._expected):
            raise FaultError(fault)
        return data

    def _read(self, wanted: int) -> bytes:
        with raise_as_faults(self._file.uri):
            data: bytes = retry(lambda: self._stream.read(wanted))  # a failed read has not moved the stream
            if self._left is not None:
                self._left -= len(data)
                if len(data) < wanted:
                    raise EOFError("it has become shorter since it was listed")
        return data


@contextmanager
def open_range(file: File, start: int = 0, stop: int | None = None, *, expected: str = "") -> Iterator[ByteRange]:
    """Opens the file's (decompressed, recoded) bytes [start, stop). Raises FaultError.

    `expected`: its format by `first_bytes`; by default it is text.
    """
    ensure_unpacked(file)
    if fault := unsupported_format_fault(file):
        raise FaultError(fault)
    with raise_as_faults(file.uri):
        system, path = resolve_filesystem(file.uri)
        packed = next((name for end, name in COMPRESSIONS.items() if file.name.lower().endswith(end)), None)
        opened = (
            partial(system.open_input_stream, path, compression=None) if packed else partial(system.open_input_file, path)
        )
        stored = stream = retry(opened)
        if packed:
            from pyarrow import CompressedInputStream

            stored = _StoredBytes(stored)
            stream = CompressedInputStream(stored, packed)
    with stream, _registered(file.uri, stored):
        with raise_as_faults(file.uri):
            source: Any = _GzipStream(stream, opened) if packed == "gzip" else stream
            source = source if file.encoding == "utf-8" else _RecodedStream(source, file)
            if file.is_streamed:
                # A decompressed or recoded stream cannot seek.
                _skip_bytes(source, start)
            else:
                stream.seek(start)
        yield ByteRange(source, file, start, stop, expected)


@contextmanager
def _registered(uri: str, stored: Any) -> Iterator[None]:
    """Makes a stream the one whose position is known, unless another of the same file is."""
    is_first = _OPEN.setdefault(uri, stored) is stored
    try:
        yield
    finally:
        if is_first:
            _OPEN.pop(uri, None)


def _packing(file: File) -> str:
    """Returns the format by `first_bytes` that a compressed file has; "" if it is not compressed."""
    return next((f"a {kind} file" for ending, kind in COMPRESSIONS.items() if file.name.lower().endswith(ending)), "")


class _GzipStream:
    """A gzip stream read by Arrow, and by Python if Arrow refuses it: Python accepts zero padding after the end."""

    def __init__(self, stream: Any, reopen: Callable[[], Any]) -> None:
        self._stream, self._reopen, self._at, self._by_python = stream, reopen, 0, False

    def read(self, size: int) -> bytes:
        """Returns the next bytes, `size` unless the file ends. Raises OSError or EOFError if it is broken."""
        try:
            data: bytes = self._stream.read(size)
        except OSError as error:
            if self._by_python or error.errno:
                raise
            self._stream, self._by_python = gzip.GzipFile(fileobj=self._reopen()), True
            _skip_bytes(self._stream, self._at)
            data = self._stream.read(size)
        self._at += len(data)
        return data


class _RecodedStream:
    """A stream of text, recoded to UTF-8. Raises FaultError if the text is not in the file's encoding."""

    def __init__(self, stream: Any, file: File) -> None:
        self._stream, self._file = stream, file
        self._decoder = codecs.getincrementaldecoder(file.encoding)()
        self._ready, self._ended, self._begun = b"", False, False

    def read(self, size: int) -> bytes:
        """Returns the next bytes, `size` unless the text ends."""
        while len(self._ready) < size and not self._ended:
            data = self._stream.read(size)
            # In many encodings all bytes are valid text.
            if not self._begun and (fault := foreign_format_fault(self._file, data[:HEAD_BYTES])):
                raise FaultError(fault)
            self._ended = not data
            try:
                self._ready += self._decoder.decode(data, self._ended).encode("utf-8", "surrogatepass")
            except UnicodeDecodeError as error:
                reason = f"is not {self._file.encoding}: {error.reason}"
                remedy = BINARY_REMEDY if has_controls(data) else "name its encoding with --data.encoding"
                raise FaultError(Fault(self._file.uri, reason, remedy)) from error
            if not self._begun and has_controls(self._ready):
                reason = f"is no text in {self._file.encoding}: it has NUL or control characters"
                raise FaultError(Fault(self._file.uri, reason, BINARY_REMEDY))
            self._begun = True
        given, self._ready = self._ready[:size], self._ready[size:]
        return given


def _skip_bytes(stream: Any, size: int) -> None:
    while size and (data := stream.read(min(size, PIECE_BYTES))):
        size -= len(data)


def read_head(file: File) -> bytes:
    """Returns the first bytes of a file's text; b"" if they cannot be read."""
    try:
        with open_range(file) as stream:
            return stream.read(_HEAD_BYTES if file.is_streamed else min(_HEAD_BYTES, file.size))
    except FaultError:
        return b""


def text_length(file: File) -> int:
    """Returns the bytes of the decompressed text, by reading it. Raises FaultError."""
    total = 0
    with open_range(file) as stream:
        while data := stream.read(PIECE_BYTES):
            total += len(data)
    return total


def count_lines(file: File) -> int:
    """Returns the number of lines of the decompressed text, by reading it. Raises FaultError."""
    found, last = 0, b"\n"
    with open_range(file) as stream:
        while data := stream.read(PIECE_BYTES):
            found, last = found + data.count(b"\n"), data[-1:]
    return found + (last != b"\n")


def read_lines(stream: ByteRange) -> Iterator[tuple[int, bytes]]:
    """Yields lines without their newline, each with its offset in the file."""
    offset, rest = stream.start, b""
    # A line longer than the bytes read so far doubles the next read, so that the cost stays linear.
    while data := stream.read(max(PIECE_BYTES, len(rest))):
        lines = data.split(b"\n")
        lines[0] = rest + lines[0]  # not the whole of it, which would be copied once more
        rest = lines.pop()
        for line in lines:
            yield offset, line
            offset += len(line) + 1
    if rest:
        yield offset, rest


def check_line_endings(file: File, line: bytes) -> None:
    """Raises FaultError if a file's first line shows that its lines end with CR alone: it would be read as one line."""
    if b"\r" not in line.rstrip(b"\r"):
        return
    with open_range(file) as stream:
        head = stream.read(min(_HEAD_BYTES, file.size) if not file.is_streamed else _HEAD_BYTES)
    if b"\n" not in head:
        remedy = f"write them with LF, with `tr '\\r' '\\n'` for instance, or {REMEDY}"
        raise FaultError(Fault(file.uri, "has lines that end with CR alone", remedy))


def read_lines_any_ending(stream: ByteRange) -> Iterator[tuple[int, bytes]]:
    """Yields lines that end with LF, CR LF or CR, including their ends, each with its offset in the file."""
    offset, rest = stream.start, b""
    while data := stream.read(max(PIECE_BYTES, len(rest))):
        found = (rest + data).splitlines(keepends=True)
        # The last one may be incomplete: the rest of the line, or the LF after a CR, may follow.
        rest = found.pop()
        for line in found:
            yield offset, line
            offset += len(line)
    if rest:
        yield offset, rest
