"""Standard output and error as streams that never raise: what is shown cannot end what is done.

A reader may go away (`| head`, a killed `tee`, a closed terminal), a disk may be full, an encoding may lack our characters,
and there may be no stream at all. Characters that the encoding lacks are written as plain ones. After the first error a
stream is quiet, and what it would have shown is kept.

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

MAX_UNSHOWN = 2000
"""Lines that are kept of what could not be shown, the newest."""
PLAIN = str.maketrans({"━": "=", "╌": "-", "─": "-", "…": "...", "→": "->", "×": "x", "·": ".", "•": "*", "±": "+-"})
"""Characters of ours, and how they are written if the encoding lacks them."""
GONE = (EPIPE, EIO)
"""Errors of a stream whose reader has gone away, which is no fault worth a warning; nor is a stream that was closed."""

_unshown: deque[str] = deque(maxlen=MAX_UNSHOWN)


class ProtectedStream(io.TextIOBase):
    """A text stream over another one, or over none, that never raises when it is written to."""

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = stream
        self.error: Exception | None = None if stream is not None else OSError("there is no such stream")
        self._pending: deque[str] = deque(maxlen=MAX_UNSHOWN)
        """Texts since the last flush, which the stream below may still hold."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the stream below."""
        return getattr(self.stream, "encoding", None) or "utf-8"

    def writable(self) -> bool:
        """Returns True: what cannot be shown is kept."""
        return True

    def isatty(self) -> bool:
        """Returns whether a terminal shows it."""
        with suppress(OSError, ValueError):
            return self.error is None and self.stream is not None and self.stream.isatty()
        return False

    def fileno(self) -> int:
        """Returns the descriptor of the stream below. Raises io.UnsupportedOperation if there is none."""
        if self.stream is None:
            raise io.UnsupportedOperation("there is no stream")
        return self.stream.fileno()

    def write(self, text: str) -> int:
        """Writes a text, or keeps it if the stream has failed; returns its length."""
        if self.error is None and self.stream is not None:
            try:
                self.stream.write(_encodable(text, self.encoding))
                self._pending.append(text)
                return len(text)
            except (OSError, ValueError) as error:
                self._fail(error)
        _keep(text)
        return len(text)

    def flush(self) -> None:
        """Hands what was written to the system."""
        if self.error is None and self.stream is not None:
            try:
                self.stream.flush()
                self._pending.clear()
            except (OSError, ValueError) as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.error = error
        _keep("".join(self._pending))
        # What is left in the buffer below would raise once more when Python ends.
        with suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
        if isinstance(error, OSError) and error.errno not in GONE and sys.stderr is not self:
            name = "standard output" if sys.stdout is self else "a stream"
            print(f"warning: {name} cannot be written ({error}); what follows is not shown", file=sys.stderr)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def protected_output() -> Iterator[None]:
    """Keeps standard output and error from raising in the block, also if one of them does not exist."""
    if sys.stdout is None or sys.stderr is None:
        _fill_descriptors()
    before = sys.stdout, sys.stderr
    protected = [stream if isinstance(stream, ProtectedStream) else ProtectedStream(stream) for stream in before]
    sys.stdout, sys.stderr = (cast(TextIO, stream) for stream in protected)
    try:
        yield
    finally:
        for stream in protected:
            stream.flush()
        if [id(sys.stdout), id(sys.stderr)] == [id(stream) for stream in protected]:
            sys.stdout, sys.stderr = before


def take_unshown() -> list[str]:
    """Returns the lines that could not be shown since the last call, the newest 2,000."""
    lines = list(_unshown)
    _unshown.clear()
    return lines


def _fill_descriptors() -> None:
    """Opens the null device for each of the standard descriptors that is closed.

    Otherwise the next file or pipe that is opened gets its number, and children take that for their output.
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


def _keep(text: str) -> None:
    _unshown.extend(line for line in text.splitlines() if line.strip())


def _encodable(text: str, encoding: str) -> str:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(PLAIN).encode(encoding, "replace").decode(encoding)
    except LookupError:  # an encoding that Python does not know writes for itself
        pass
    return text
