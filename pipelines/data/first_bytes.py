"""Recognises files that are not what their name says, by their first bytes: one table for data, tokenizers and weights.

find_foreign_format(b"version https://git-lfs.github.com/spec/v1 ...")   # Foreign("a Git LFS pointer", "fetch ...")
is_binary(b"\\x00\\x8a\\x01...")                            # True: no encoding makes text of it
"""

import codecs
import re
from dataclasses import dataclass

HEAD_BYTES = 1 << 10
"""Bytes at a file's beginning that show its format."""
_MAX_CONTROLS = 0.01
_CONTROLS = bytes({*range(32), 127} - {*b"\t\n\r\f\b\x1b"})
"""Characters that no text has: the rule of `file`, while git looks for NUL alone."""
UNPACK = "unpack it, or save it as text, CSV, JSON lines or Parquet under a name that says so, or leave it out"
_SAVE = "save it as Parquet, CSV or JSON lines, or leave it out"
_NAME_IMAGE = "name it by its ending for task `images`, or leave it out"
_FETCH = "fetch the file itself, and look at the address and its permissions"
PARQUET, TAR, IMAGE, SAFETENSORS = "a Parquet file", "a tar archive", "an image", "a safetensors file"
_SUBSTITUTES: tuple[tuple[bytes, str, str], ...] = (
    (rb"version https://git-lfs\.github\.com/spec/", "a Git LFS pointer", "fetch the file itself with `git lfs pull`"),
    (rb"\s*<\?xml[^>]*>\s*<Error>", "an error message of a server", _FETCH),
    (rb"\x00{64}", "a file that begins with zeros, as one that was not written whole", "write or fetch it again"),
)
_PAGE = re.compile(rb"(\xef\xbb\xbf)?\s*(<!doctype html|<html|<\?xml)", re.IGNORECASE)
_FORMATS: tuple[tuple[bytes, str, str], ...] = (
    (rb"PAR1[^ -~]", PARQUET, "name it .parquet, or say --data.kind parquet, or leave it out"),
    (rb".{257}ustar", TAR, UNPACK),
    (rb"PK\x03\x04", "a zip archive (or xlsx, docx, a PyTorch checkpoint)", UNPACK),
    (rb"\x1f\x8b", "a gzip file", f"name it .gz, {UNPACK}"),
    (rb"BZh[1-9]1AY&SY", "a bzip2 file", f"name it .bz2, {UNPACK}"),
    (rb"\(\xb5/\xfd", "a zstd file", f"name it .zst, {UNPACK}"),
    (rb"\xfd7zXZ", "an xz file", UNPACK),
    (rb"7z\xbc\xaf", "a 7z archive", UNPACK),
    (rb"Rar!\x1a", "a rar archive", UNPACK),
    (rb"%PDF-", "a PDF", "save its text, or leave it out"),
    (rb"\xd0\xcf\x11\xe0", "an Office document", _SAVE),
    (rb"ARROW1\x00\x00|\xff\xff\xff\xff[^\xff]{3}\x00", "an Arrow file", _SAVE),
    (rb"\x93NUMPY", "a NumPy array", _SAVE),
    (rb"\x80[\x02-\x05]", "a pickle", _SAVE),
    (rb"\x89HDF", "an HDF5 file", _SAVE),
    (rb"SQLite format 3\x00", "an SQLite database", _SAVE),
    (rb"Obj\x01", "an Avro file", _SAVE),
    (rb".{2}[^\xff]{4}\x00\x00\{\"", SAFETENSORS, "name a file of data instead"),
    (rb"GGUF[\x01-\x09]\x00\x00\x00", "a GGUF file", "name a file of data instead"),
    (rb"\x7fELF", "a program", "leave it out"),
    (rb"\x89PNG|\xff\xd8\xff|GIF8[79]a.{0,6}[\x00-\x08]|RIFF....WEBP|II\*\x00|MM\x00\*", IMAGE, _NAME_IMAGE),
)


@dataclass(frozen=True)
class Foreign:
    """Another format than that of a file's name."""

    format: str
    """Its name with an article: "a gzip file"."""
    remedy: str
    """The action for the user."""


def find_substitute(head: bytes, *, may_be_page: bool = False) -> Foreign | None:
    """Returns what stands in a file's place, by its first bytes: a pointer or an error message; None if nothing does.

    `may_be_page`: HTML and XML are documents as well; otherwise they are taken for the error message of a server.
    """
    for pattern, name, remedy in _SUBSTITUTES:
        if re.match(pattern, head):
            return Foreign(name, remedy)
    is_page = not may_be_page and _PAGE.match(head)
    return Foreign("an HTML or XML page, such as the error message of a server", _FETCH) if is_page else None


def find_foreign_format(head: bytes, *, expected: str = "", may_be_page: bool = False) -> Foreign | None:
    """Returns the format that a file's first bytes show, or its substitute; None if it is `expected`, or unknown."""
    if expected == TAR and not head.strip(b"\0"):
        return None  # an empty one
    if found := find_substitute(head, may_be_page=may_be_page):
        return found
    for pattern, name, remedy in _FORMATS:
        if re.match(pattern, head, re.DOTALL):
            return None if name == expected else Foreign(name, remedy)
    return None


def is_binary(head: bytes) -> bool:
    """Returns whether bytes are text in no encoding: no UTF-8, and with NUL or many control characters."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return has_controls(head)
    return False


def has_controls(data: bytes) -> bool:
    """Returns whether bytes in UTF-8, or another encoding that extends ASCII, begin with NUL or many control characters."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return False
    data = data[:8000]  # as git does
    controls = len(data) - len(data.translate(None, _CONTROLS))
    return b"\0" in data or controls > _MAX_CONTROLS * len(data)


def describe_foreign_format(head: bytes) -> str:
    """Returns as a predicate what the first bytes of a tokenizer, a description or weights show; "" if that is unknown."""
    if found := find_substitute(head):
        return f"is {found.format}: {found.remedy}"
    found = find_foreign_format(head, expected=SAFETENSORS)
    return f"is {found.format}" if found else ""
