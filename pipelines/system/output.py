"""Wraps standard output and error in streams that never raise, so that output errors cannot end a job.

A reader may go away (`| head`, a killed `tee`, a closed terminal), a disk may be full, an encoding may lack our characters,
and there may be no stream at all. Characters that the encoding lacks are written as ASCII. After its first error a stream is
silent, and its later lines are kept.

    with protected_output():
        print("━━ step 3")                                    # never raises
    take_unshown()                                            # ["━━ step 3"] if nobody could see it
"""

import io
import os
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EIO, EPIPE
from typing import Any, TextIO, cast

MAX_UNSHOWN_LINES = 2000
"""The number of newest unshown lines that are kept."""
PLAIN = str.maketrans({"━": "=", "╌": "-", "─": "-", "…": "...", "→": "->", "×": "x", "·": ".", "•": "*", "±": "+-"})
"""Our characters, and their replacements if the encoding lacks them."""
READER_GONE = (EPIPE, EIO)
"""Errors of a stream after its reader has gone away; no warning is printed for these, nor for a closed stream."""

_unshown: deque[str] = deque(maxlen=MAX_UNSHOWN_LINES)


def print_warning(text: str) -> None:
    """Prints a warning on standard error."""
    print(f"warning: {text}", file=sys.stderr)


class ProtectedStream(io.TextIOBase):
    """A text stream around another one, or around None; its writes never raise."""

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = stream
        self.error: Exception | None = None if stream is not None else OSError("there is no such stream")
        self._pending: deque[str] = deque(maxlen=MAX_UNSHOWN_LINES)
        """Texts since the last flush, which the wrapped stream may still buffer."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the wrapped stream."""
        return getattr(self.stream, "encoding", None) or "utf-8"

    def writable(self) -> bool:
        """Returns True: unshown text is kept."""
        return True

    def isatty(self) -> bool:
        """Returns whether the wrapped stream is a terminal."""
        with suppress(OSError, ValueError):
            return self.error is None and self.stream is not None and self.stream.isatty()
        return False

    def fileno(self) -> int:
        """Returns the descriptor of the wrapped stream. Raises io.UnsupportedOperation if there is none."""
        if self.stream is None:
            raise io.UnsupportedOperation("there is no stream")
        return self.stream.fileno()

    def write(self, text: str) -> int:
        """Writes a text, or keeps it if the stream has failed; returns its length."""
        if self.error is None and self.stream is not None:
            try:
                self.stream.write(_make_encodable(text, self.encoding))
                self._pending.append(text)
                return len(text)
            except (OSError, ValueError) as error:
                self._handle_failure(error)
        _keep_unshown(text)
        return len(text)

    def flush(self) -> None:
        """Flushes the wrapped stream."""
        if self.error is None and self.stream is not None:
            try:
                self.stream.flush()
                self._pending.clear()
            except (OSError, ValueError) as error:
                self._handle_failure(error)

    def _handle_failure(self, error: Exception) -> None:
        self.error = error
        _keep_unshown("".join(self._pending))
        # The rest of the wrapped stream's buffer would raise once more when Python exits.
        with suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
        if isinstance(error, OSError) and error.errno not in READER_GONE and sys.stderr is not self:
            name = "standard output" if sys.stdout is self else "a stream"
            print(f"warning: {name} cannot be written ({error}); what follows is not shown", file=sys.stderr)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def protected_output() -> Iterator[None]:
    """Protects standard output and error in the block, also if one of them does not exist."""
    if sys.stdout is None or sys.stderr is None:
        _fill_descriptors()
    previous_streams = sys.stdout, sys.stderr
    protected = [stream if isinstance(stream, ProtectedStream) else ProtectedStream(stream) for stream in previous_streams]
    sys.stdout, sys.stderr = (cast(TextIO, stream) for stream in protected)
    try:
        yield
    finally:
        for stream in protected:
            stream.flush()
        if [id(sys.stdout), id(sys.stderr)] == [id(stream) for stream in protected]:
            sys.stdout, sys.stderr = previous_streams


def take_unshown() -> list[str]:
    """Returns and clears the lines that could not be shown since the last call, the newest 2,000."""
    lines = list(_unshown)
    _unshown.clear()
    return lines


def _fill_descriptors() -> None:
    """Opens the null device for each of the standard descriptors that is closed.

    Otherwise the next file or pipe that is opened gets its number, and children would use that as their output.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != descriptor:
                os.dup2(null, descriptor)
                os.close(null)
            os.set_inheritable(descriptor, True)


def _keep_unshown(text: str) -> None:
    _unshown.extend(line for line in text.splitlines() if line.strip())


def _make_encodable(text: str, encoding: str) -> str:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(PLAIN).encode(encoding, "replace").decode(encoding)
    except LookupError:  # an encoding that Python does not know: the stream handles it
        pass
    return text
