"""Reads WebDataset's tar shards (Aizman et al., 2019) without unpacking: the members of one key are a document.

A key is a member's name up to the first dot, and its ending is the member's kind: `7.jpg` and `7.cls` are the image and the
label of key 7. A column's name is such an ending (`data.image_column png`), or a key of a `.json` member; else images,
labels and texts have their usual endings. A shard is read sequentially from its beginning, on disks and stores.

    for piece in WebDatasetReader(columns).read(Slice(file, 0, None, file.size)): ...
    piece.place                                               # "/data/train-000.tar, key 7"
"""

import io
import json
import re
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import IO, Any, cast

from raystride.pipelines.data.first_bytes import TAR, has_controls
from raystride.pipelines.data.sources.archives import TAR_ENDINGS
from raystride.pipelines.data.sources.faults import BINARY_REMEDY, ENCODING_REMEDY, REMEDY, Fault, FaultError
from raystride.pipelines.data.sources.fields import Columns, nested_value, read_document
from raystride.pipelines.data.sources.image_files import MAX_BYTES
from raystride.pipelines.data.sources.pieces import PIECE_BYTES, File, Piece, Slice, empty_file_fault
from raystride.pipelines.data.sources.streams import ByteRange, open_range
from raystride.pipelines.data.tasks.task import Column

USUAL_ENDINGS = {
    "image": ("jpg", "jpeg", "png", "webp", "bmp", "gif"), "label": ("cls", "label"), "text": ("txt", "text"),
}  # fmt: skip
"""By kind of column: the endings to search if the column's name is not found."""
_DISTINCTIVE_ENDINGS = {*USUAL_ENDINGS["image"], "cls", "json"}
"""Endings by which members of one key count as a document, and not as files with similar names by chance."""
_MEMBER_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)")
_MAX_PROBED_MEMBERS, _MAX_PROBED_BYTES = 16, 64 << 20
"""Members, and bytes, that are probed to distinguish shards from archives: skipped bytes are read, too."""
_SHARD_ENDINGS = tuple(ending for ending in TAR_ENDINGS if not ending.endswith("xz"))


@dataclass
class _Sample:
    """The required members of a key, by ending."""

    key: str
    members: dict[str, bytes] = field(default_factory=dict)
    endings: list[str] = field(default_factory=list)
    """The endings of all members."""
    fault: str = ""


@dataclass(frozen=True)
class WebDatasetReader:
    """A reader of tar shards. Units are keys."""

    columns: Columns
    keep: bool = False
    """Whether each key yields an item, a fault if it is empty or broken."""

    def slices(self, file: File, target: int) -> list[Slice]:
        """Returns one slice: a shard is read from its beginning."""
        return [Slice(file, 0, None, file.size)]

    def count_units(self, piece: Slice) -> int:
        """Returns the number of keys in the file from the slice's first one on. Raises FaultError."""
        return sum(1 for _ in _read_samples(piece.file, ())) - piece.start

    def next_split(self, file: File, offset: int) -> int:
        """Returns the offset: a shard may be split before any key."""
        return offset

    def read(self, piece: Slice) -> Iterator[Piece | Fault]:
        """Yields the documents of the keys in the slice. Raises FaultError if the file is empty, truncated or no tar."""
        file = piece.file
        endings = {
            ending for column in self.columns for ending in (column.name.lower(), *USUAL_ENDINGS[column.kind], "json")
        }
        endings |= {column.name.lower().partition(".")[0] for column in self.columns}
        sample = None
        for sample in islice(_read_samples(file, endings), piece.start, piece.stop):
            place = f"{file.uri}, key {sample.key}"
            if sample.fault:
                yield Fault(place, sample.fault, row={} if self.keep else None)
                continue
            try:
                values = [self._column_value(column, sample, place, file.encoding) for column in self.columns]
            except FaultError as faulty:
                yield replace(faulty.fault, row={}) if self.keep else faulty.fault
            else:
                yield from read_document(values, place, self.columns, keep=self.keep)
        if sample is None and file.is_whole_source:
            yield empty_file_fault(file, "no members")

    def _column_value(self, column: Column, sample: _Sample, place: str, encoding: str) -> Any:
        """Returns a sample's value for a column. Raises FaultError if there is none."""
        name, (first, _, rest) = column.name.lower(), column.name.partition(".")
        members = sample.members
        if name in members:
            return _decode_member(name, members[name], column, place, encoding)
        if rest and first.lower() in members:
            return nested_value(_parse_json(members[first.lower()], place), rest)
        row = _parse_json(members["json"], place) if "json" in members else {}
        if first in row:
            return nested_value(row, column.name)
        if sum(other.kind == column.kind for other in self.columns) == 1:
            for ending in USUAL_ENDINGS[column.kind]:
                if ending in members:
                    return _decode_member(ending, members[ending], column, place, encoding)
        present_endings = ", ".join(f".{ending}" for ending in sample.endings)
        remedy = f"name what holds it with --{column.setting}: an ending, or a name in the .json; {REMEDY}"
        raise FaultError(Fault(place, f"has no {column.kind} but {present_endings}", remedy, column.name))


def _decode_member(ending: str, content: bytes, column: Column, place: str, encoding: str) -> Any:
    if column.kind == "image":
        return content
    try:
        text = content.decode("utf-8-sig" if encoding == "utf-8" else encoding)
    except UnicodeDecodeError as error:
        reason = f"its .{ending} is not {encoding}: {error.reason}"
        remedy = BINARY_REMEDY if has_controls(content) else ENCODING_REMEDY
        raise FaultError(Fault(place, reason, remedy, column.name)) from error
    return text.strip()


def _parse_json(content: bytes, place: str) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise FaultError(Fault(place, f"its .json is no JSON: {error}")) from error
    if not isinstance(found, dict):
        raise FaultError(Fault(place, f"its .json is no object but a {type(found).__name__}"))
    return found


def is_shard(name: str) -> bool:
    """Returns whether a file of this name can be a shard: a tar, compressed or not."""
    return name.lower().endswith(_SHARD_ENDINGS)


def holds_documents(file: File) -> bool:
    """Returns whether a tar's first members are samples: a key with an image, a label or JSON, and another member."""
    try:
        endings: dict[str, set[str]] = {}
        with _open_tar(file) as tar:
            for info in islice(tar, _MAX_PROBED_MEMBERS):
                key, ending = _split_member_name(info)
                if key:
                    endings.setdefault(key, set()).add(ending)
                if info.offset_data + info.size > _MAX_PROBED_BYTES:
                    break
    except FaultError:
        return False  # unpacking it reports the fault
    return any(len(some) > 1 and some & _DISTINCTIVE_ENDINGS for some in endings.values())


def _read_samples(file: File, wanted: "set[str] | tuple[()]") -> Iterator[_Sample]:
    """Yields the samples in order, with the members of these endings. Raises FaultError, without the last sample, if reading
    fails.
    """
    sample: _Sample | None = None
    with _open_tar(file, lambda: sample) as tar:
        for info in tar:
            key, ending = _split_member_name(info)
            if not key:
                continue
            if sample is None or key != sample.key:
                if sample is not None:
                    yield sample
                sample = _Sample(key)
            if ending in sample.endings:
                sample.fault = f"has more than one .{ending}"
            elif not info.isreg():
                sample.fault = f"its .{ending} is a link or no regular file"
            elif ending in wanted and info.size > MAX_BYTES:
                sample.fault = f"its .{ending} is refused: it is larger than {MAX_BYTES >> 20} MiB"
            elif ending in wanted:
                sample.members[ending] = cast(IO[bytes], tar.extractfile(info)).read()
            sample.endings.append(ending)
    if sample is not None:
        yield sample


def _split_member_name(info: tarfile.TarInfo) -> tuple[str, str]:
    """Returns a member's key and lower-case ending; "" for both of folders, hidden files and other metadata."""
    name = info.name.removeprefix("./")
    found = _MEMBER_NAME.fullmatch(name)
    if info.isdir() or not found or name.rpartition("/")[2].startswith("._") or name.startswith("__"):
        return "", ""
    return found[1], found[2].lower()


@contextmanager
def _open_tar(file: File, last: Callable[[], _Sample | None] = lambda: None) -> Iterator[tarfile.TarFile]:
    """Opens the file as a sequential tar. Raises FaultError, with the last started key, if reading fails."""
    plain = replace(file, encoding="utf-8", name=re.sub(r"\.t(gz|bz2)$", r".tar.\1", file.name.lower()))
    with open_range(plain, expected=TAR) as stream:
        try:
            source = io.BufferedReader(_RawStream(stream), PIECE_BYTES)
            with tarfile.open(fileobj=source, mode="r|", tarinfo=_StrictTarInfo) as tar:  # type: ignore[call-overload]
                yield tar
        except (tarfile.TarError, FaultError) as error:
            reason = error.fault.reason if isinstance(error, FaultError) else f"is torn or no tar: {error}"
            where = f" (at key {sample.key})" if (sample := last()) else ""
            remedy = "fetch or pack it again, or leave out what is missing with --data.on_error skip"
            raise FaultError(Fault(file.uri, f"{reason}{where}", remedy)) from error


class _RawStream(io.RawIOBase):
    """A byte range below a buffer of Python's: `tarfile` copies what is left of its own at each read of 512 bytes."""

    def __init__(self, stream: ByteRange) -> None:
        self._stream = stream

    def readable(self) -> bool:
        """Returns True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Reads into a buffer and returns the bytes read. Raises FaultError."""
        view = memoryview(buffer)
        data = self._stream.read(len(view))
        view[: len(data)] = data
        return len(data)


class _StrictTarInfo(tarfile.TarInfo):
    """A member's header that raises if a tar is truncated, where `tarfile` would silently lose documents."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> "_StrictTarInfo":  # type: ignore[override]
        """Returns the next header. Raises ReadError if it is broken, or the file ends before the final zeros of a tar."""
        try:
            return super().fromtarfile(tar)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"{error} at byte {tar.offset:,}") from error
