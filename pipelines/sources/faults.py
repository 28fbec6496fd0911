"""What can be wrong with data: one document or file (a Fault), and the error that ends a preparation.

A reader yields a Fault where a document should have been. Under `data.on_error skip` it is counted; else it is raised:

    Fault("books/7.txt", "is not UTF-8: byte 0xff at 1203")
    raise DataError("books/7.txt: is not UTF-8: byte 0xff at 1203; mend it, or ... --data.on_error skip")
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from raystride.pipelines.credentials import hidden

REMEDY = "mend or remove it, or leave out what cannot be read with --data.on_error skip"

OTHER_ENCODING = f"name its encoding (--data.encoding latin-1, for instance), {REMEDY}"


_PLACE = re.compile(r"(?:(?P<file>.*), |^)(?P<unit>line|row) (?P<number>\d+)", re.DOTALL)
_KEY = re.compile(r"(?P<file>.*), key (?P<member>.*)", re.DOTALL)
_NOT_READ = re.compile(r"encrypt|[Cc]odec .*not (supported|built)|Expected all lists to be of size")
"""What pyarrow says of whole files that it does not read: a null among lists of fixed size, for instance."""
_FLAG = re.compile(r"--([a-z_]+(?:\.[a-z_]+)+)")


class DataError(ValueError):
    """The data cannot be prepared. The message names the file or setting, the reason and the remedy.

    `file`, `line` and `row` (from 1), `column` and `member` (of an archive; the key of WebDataset's) say where, as far as it
    is known; `settings` are those that the remedy names.
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
        super().__init__(printable(hidden(message)))
        self.file, self.line, self.row, self.column, self.member = printable(hidden(file)), line, row, column, member
        self.settings = (*settings, *_FLAG.findall(str(self)))


def place_fields(place: str) -> dict[str, Any]:
    """Returns the fields of a DataError that a Fault's place says: `FILE, line 3`, `FILE, row 3`, `FILE, key 3`."""
    if found := _PLACE.fullmatch(place):
        return {"file": found["file"] or "", found["unit"]: int(found["number"])}
    if found := _KEY.fullmatch(place):
        return found.groupdict()
    return {"file": place.partition(", the line at byte ")[0]}


def printable(name: str) -> str:
    """Returns a text that any stream takes: halves of surrogate pairs, as which bytes that are no UTF-8 come, are escaped as
    `ascii` and JSON do.
    """
    return name.encode("utf-8", "backslashreplace").decode()


class NoFiles(DataError):
    """There is no file where a source is looked for."""


@dataclass(frozen=True)
class Fault:
    """One file or document that cannot be read."""

    place: str
    """The file, and where in it: `FILE, line 3`, `FILE, row 3`."""
    reason: str
    """What is wrong, as the rest of a sentence about the file."""
    remedy: str = REMEDY
    """What the user can do."""
    column: str = ""
    """The column that is missing or wrong."""
    empty: bool = False
    """Whether nothing is wrong but that all columns of the row are empty."""
    row: Mapping[str, Any] | None = None
    """The whole row, if there is one and the reader was told to keep rows; empty if it cannot be read."""

    def __post_init__(self) -> None:
        for name in ("place", "reason", "remedy"):  # they are listed in the prepared folder
            object.__setattr__(self, name, printable(hidden(getattr(self, name))))

    def error(self) -> DataError:
        """The error that the fault becomes where nothing may be skipped."""
        message = f"{self.place}: {self.reason}; {self.remedy}"
        return DataError(message, column=self.column, **place_fields(self.place))


class Faulty(Exception):
    """Carries a Fault out of the depth of a reader."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault)
        self.fault = fault


@contextmanager
def faults_of(place: str) -> Iterator[None]:
    """Turns what file systems and parsers raise about `place` into Faulty.

    Only what a parser says of the bytes makes a file broken, not a form that it does not know or a system that is out of
    something.
    """
    from pyarrow import ArrowException, ArrowMemoryError, ArrowNotImplementedError

    try:
        yield
    except FileNotFoundError as error:
        raise Faulty(Fault(place, "is gone")) from error
    except PermissionError as error:
        raise Faulty(Fault(place, "may not be read (permission denied)")) from error
    except (OSError, EOFError, ArrowException) as error:
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if isinstance(error, ArrowMemoryError):
            raise
        if isinstance(error, ArrowNotImplementedError):
            raise Faulty(
                Fault(place, f"is in a form that pyarrow does not read: {text}", f"write it anew, {REMEDY}")
            ) from error
        if (isinstance(error, OSError) and error.errno) or _NOT_READ.search(text):
            raise Faulty(Fault(place, f"cannot be read: {text}")) from error
        raise Faulty(Fault(place, f"is truncated or broken: {text}")) from error


def not_utf8(place: str, error: UnicodeDecodeError, offset: int = 0) -> Fault:
    """The fault of a text whose bytes, which begin at `offset` of their file, are not UTF-8."""
    at = offset + error.start
    return Fault(place, f"is not UTF-8: byte 0x{error.object[error.start]:02x} at {at}", OTHER_ENCODING)
