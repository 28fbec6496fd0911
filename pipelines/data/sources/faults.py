"""Errors in data: the fault of one document or file, and the exception that ends a preparation.

A reader yields a Fault in place of a document. With `data.on_error skip` it is counted; else it is raised:

    Fault("books/7.txt", "is not UTF-8: byte 0xff at 1203")
    raise DataError("books/7.txt: is not UTF-8: byte 0xff at 1203; mend it, or ... --data.on_error skip")
"""

import codecs
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from raystride.pipelines.data.first_bytes import has_controls
from raystride.pipelines.system.credentials import redact

REMEDY = "mend or remove it, or leave out what cannot be read with --data.on_error skip"

BINARY_REMEDY = f"save it as text, CSV, JSON lines or Parquet, {REMEDY}"

ENCODING_REMEDY = f"name its encoding (--data.encoding latin-1, for instance), {REMEDY}"


_PLACE = re.compile(r"(?:(?P<file>.*), |^)(?P<unit>line|row) (?P<number>\d+)", re.DOTALL)
_KEY = re.compile(r"(?P<file>.*), key (?P<member>.*)", re.DOTALL)
_NOT_READ = re.compile(r"encrypt|[Cc]odec .*not (supported|built)|Expected all lists to be of size")
"""pyarrow's messages for files that it does not support: for instance a null among lists of fixed size."""
_FLAG = re.compile(r"--([a-z_]+(?:\.[a-z_]+)+)")


class DataError(ValueError):
    """The data cannot be prepared. The message names the file or setting, the reason and the remedy.

    `file`, `line` and `row` (from 1), `column` and `member` (of an archive; a WebDataset's key) give the location, as far as
    it is known; `settings` are those in the remedy.
    """

    def __init__(
        self,
        message: str = "",
        *,
        file: str = "",
        line: int | None = None,
        row: int | None = None,
        column: str = "",
        member: str = "",
        settings: Sequence[str] = (),
    ) -> None:
        super().__init__(escape_surrogates(redact(message)))
        self.file, self.line, self.row, self.column, self.member = escape_surrogates(redact(file)), line, row, column, member
        self.settings = (*settings, *_FLAG.findall(str(self)))


def parse_place(place: str) -> dict[str, Any]:
    """Parses a Fault's place into the fields of a DataError: `FILE, line 3`, `FILE, row 3`, `FILE, key 3`."""
    if found := _PLACE.fullmatch(place):
        return {"file": found["file"] or "", found["unit"]: int(found["number"])}
    if found := _KEY.fullmatch(place):
        return found.groupdict()
    return {"file": place.partition(", the line at byte ")[0]}


def escape_surrogates(name: str) -> str:
    """Escapes lone surrogates, which stand for bytes that are not UTF-8, as `ascii` and JSON do, so that any stream accepts
    the text.
    """
    return name.encode("utf-8", "backslashreplace").decode()


class NoFiles(DataError):
    """The source has no files."""


@dataclass(frozen=True)
class Fault:
    """The fault of one file or document that cannot be read."""

    place: str
    """The file and the position in it: `FILE, line 3`, `FILE, row 3`."""
    reason: str
    """The error, as the predicate of a sentence about the file."""
    remedy: str = REMEDY
    """The action for the user."""
    column: str = ""
    """The missing or wrong column."""
    empty: bool = False
    """Whether the only fault is that all columns of the row are empty."""
    row: Mapping[str, Any] | None = None
    """The complete row, if there is one and the reader keeps rows; empty if it cannot be read."""

    def __post_init__(self) -> None:
        for name in ("place", "reason", "remedy"):  # faults are listed in the prepared folder
            object.__setattr__(self, name, escape_surrogates(redact(getattr(self, name))))

    def error(self) -> DataError:
        """Returns the exception for this fault, for when it may not be skipped."""
        message = f"{self.place}: {self.reason}; {self.remedy}"
        return DataError(message, column=self.column, **parse_place(self.place))


class FaultError(Exception):
    """Carries a Fault out of a reader's call stack."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault)
        self.fault = fault


@contextmanager
def raise_as_faults(place: str) -> Iterator[None]:
    """Turns errors of file systems and parsers in the block into FaultErrors about `place`.

    A file counts as broken only if a parser rejects its bytes, not for an unsupported format or exhausted resources.
    """
    from pyarrow import ArrowException, ArrowMemoryError, ArrowNotImplementedError

    try:
        yield
    except FileNotFoundError as error:
        raise FaultError(Fault(place, "is gone")) from error
    except PermissionError as error:
        raise FaultError(Fault(place, "may not be read (permission denied)")) from error
    except (OSError, EOFError, ArrowException) as error:
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if isinstance(error, ArrowMemoryError):
            raise
        if isinstance(error, ArrowNotImplementedError):
            raise FaultError(
                Fault(place, f"is in a form that pyarrow does not read: {text}", f"write it anew, {REMEDY}")
            ) from error
        if (isinstance(error, OSError) and error.errno) or _NOT_READ.search(text):
            raise FaultError(Fault(place, f"cannot be read: {text}")) from error
        raise FaultError(Fault(place, f"is truncated or broken: {text}")) from error


def not_utf8_fault(place: str, error: UnicodeDecodeError, offset: int = 0, head: bytes | None = None) -> Fault:
    """Returns the fault of a text that is not UTF-8 and begins at `offset` of its file.

    It names an encoding only if the file may be text in one: `head` are bytes to tell by, else those that were decoded.
    """
    reason = f"is not UTF-8: byte 0x{error.object[error.start]:02x} at {offset + error.start}"
    return Fault(place, *explain_not_utf8(reason, error.object if head is None else head))


def explain_not_utf8(reason: str, head: bytes) -> tuple[str, str]:
    """Returns reason and remedy of bytes that are not UTF-8, by some of the file's bytes."""
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "is UTF-16", "say so with --data.encoding utf-16"
    if has_controls(head):
        return f"is no text: it {reason}, and it has NUL or control characters", BINARY_REMEDY
    return reason, ENCODING_REMEDY
