"""WebDataset's tar shards (Aizman et al., 2019): members with one key are a document, and are read without unpacking.

A key is a member's name up to the first dot, and what follows says what the member is: `7.jpg` and `7.cls` are the image
and the label of key 7. A column's name is such an ending (`data.image_column png`), or a key of a `.json` member; else
images, labels and texts have their usual endings. A shard is read from its beginning, from disks and stores alike.

    for piece in WebDatasetReader(columns).read(Slice(file, 0, None, file.size)): ...
    piece.place                                               # "/data/train-000.tar, key 7"
"""

import json
import re
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import IO, Any, cast

from raystride.pipelines.sources.archives import TARS
from raystride.pipelines.sources.faults import OTHER_ENCODING, REMEDY, Fault, Faulty
from raystride.pipelines.sources.fields import Columns, document, inner
from raystride.pipelines.sources.image_files import MOST_BYTES
from raystride.pipelines.sources.pieces import PIECE, File, Piece, Slice, holds_nothing
from raystride.pipelines.sources.streams import open_range
from raystride.pipelines.tasks.task import Column

USUAL = {
    "image": ("jpg", "jpeg", "png", "webp", "bmp", "gif"), "label": ("cls", "label"), "text": ("txt", "text"),
}  # fmt: skip
"""Endings under which a column is found whose name is none, by kinds of columns."""
_TELLING = {*USUAL["image"], "cls", "json"}
"""Endings that make members of one key a document, not files that happen to be called alike."""
_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)")
_LOOKED_AT, _FAR = 16, 64 << 20
"""Members, and bytes, that are looked at to tell shards from archives: what is passed over is read."""
_FORMS = tuple(ending for ending in TARS if not ending.endswith("xz"))


@dataclass
class _Sample:
    """The members of a key that are wanted, by their endings."""

    key: str
    members: dict[str, bytes] = field(default_factory=dict)
    endings: list[str] = field(default_factory=list)
    """Of all members."""
    fault: str = ""


@dataclass(frozen=True)
class WebDatasetReader:
    """Members of tar files by their keys. Units are keys."""

    columns: Columns
    keep: bool = False
    """Whether each key gives something, an empty or broken one its fault."""

    def slices(self, file: File, target: int) -> list[Slice]:
        """One slice: a shard is read from its beginning."""
        return [Slice(file, 0, None, file.size)]

    def measure(self, piece: Slice) -> int:
        """Keys in the file from the slice's first one on. Raises Faulty."""
        return sum(1 for _ in _samples(piece.file, ())) - piece.start

    def seam(self, file: File, offset: int) -> int:
        """The offset itself: a shard may be cut before any key."""
        return offset

    def read(self, piece: Slice) -> Iterator[Piece | Fault]:
        """The documents of the keys in the slice. Raises Faulty where the file is empty, torn or no tar."""
        file = piece.file
        endings = {ending for column in self.columns for ending in (column.name.lower(), *USUAL[column.kind], "json")}
        endings |= {column.name.lower().partition(".")[0] for column in self.columns}
        sample = None
        for sample in islice(_samples(file, endings), piece.start, piece.stop):
            place = f"{file.uri}, key {sample.key}"
            if sample.fault:
                yield Fault(place, sample.fault, row={} if self.keep else None)
                continue
            try:
                values = [self._value(column, sample, place, file.encoding) for column in self.columns]
            except Faulty as faulty:
                yield replace(faulty.fault, row={}) if self.keep else faulty.fault
            else:
                yield from document(values, place, self.columns, keep=self.keep)
        if sample is None and file.alone:
            yield holds_nothing(file, "no members")

    def _value(self, column: Column, sample: _Sample, place: str, encoding: str) -> Any:
        """What the key has for a column. Raises Faulty where that is nothing."""
        name, (first, _, rest) = column.name.lower(), column.name.partition(".")
        members = sample.members
        if name in members:
            return _decoded(name, members[name], column, place, encoding)
        if rest and first.lower() in members:
            return inner(_json(members[first.lower()], place), rest)
        row = _json(members["json"], place) if "json" in members else {}
        if first in row:
            return inner(row, column.name)
        if sum(each.kind == column.kind for each in self.columns) == 1:
            for ending in USUAL[column.kind]:
                if ending in members:
                    return _decoded(ending, members[ending], column, place, encoding)
        there = ", ".join(f".{ending}" for ending in sample.endings)
        remedy = f"name what holds it with --{column.setting}: an ending, or a name in the .json; {REMEDY}"
        raise Faulty(Fault(place, f"has no {column.kind} but {there}", remedy, column.name))


def _decoded(ending: str, content: bytes, column: Column, place: str, encoding: str) -> Any:
    if column.kind == "image":
        return content
    try:
        text = content.decode("utf-8-sig" if encoding == "utf-8" else encoding)
    except UnicodeDecodeError as error:
        reason = f"its .{ending} is not {encoding}: {error.reason}"
        raise Faulty(Fault(place, reason, OTHER_ENCODING, column.name)) from error
    return text.strip()


def _json(content: bytes, place: str) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Faulty(Fault(place, f"its .json is no JSON: {error}")) from error
    if not isinstance(found, dict):
        raise Faulty(Fault(place, f"its .json is no object but a {type(found).__name__}"))
    return found


def is_shard(name: str) -> bool:
    """Whether a file of this name can be a shard: a tar, compressed or not."""
    return name.lower().endswith(_FORMS)


def holds_documents(file: File) -> bool:
    """Whether the first members of a tar are those of a key: an image, a label or JSON, and something else beside it."""
    try:
        endings: dict[str, set[str]] = {}
        with _opened(file) as tar:
            for info in islice(tar, _LOOKED_AT):
                key, ending = _divided(info)
                if key:
                    endings.setdefault(key, set()).add(ending)
                if info.offset_data + info.size > _FAR:
                    break
    except Faulty:
        return False  # whoever unpacks it says what is wrong
    return any(len(some) > 1 and some & _TELLING for some in endings.values())


def _samples(file: File, wanted: "set[str] | tuple[()]") -> Iterator[_Sample]:
    """The keys in order, with the members of these endings. Raises Faulty where the file breaks, without that key."""
    sample: _Sample | None = None
    with _opened(file, lambda: sample) as tar:
        for info in tar:
            key, ending = _divided(info)
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
            elif ending in wanted and info.size > MOST_BYTES:
                sample.fault = f"its .{ending} is refused: it is larger than {MOST_BYTES >> 20} MiB"
            elif ending in wanted:
                sample.members[ending] = cast(IO[bytes], tar.extractfile(info)).read()
            sample.endings.append(ending)
    if sample is not None:
        yield sample


def _divided(info: tarfile.TarInfo) -> tuple[str, str]:
    """A member's key and ending, in lower case; empty ones of what is no document's: folders, hidden files, remarks."""
    name = info.name.removeprefix("./")
    found = _NAME.fullmatch(name)
    if info.isdir() or not found or name.rpartition("/")[2].startswith("._") or name.startswith("__"):
        return "", ""
    return found[1], found[2].lower()


@contextmanager
def _opened(file: File, last: Callable[[], _Sample | None] = lambda: None) -> Iterator[tarfile.TarFile]:
    """The file as a tar that is read once, from its beginning. Raises Faulty where it breaks, with the last key begun."""
    plain = replace(file, encoding="utf-8", name=re.sub(r"\.t(gz|bz2)$", r".tar.\1", file.name.lower()))
    with open_range(plain) as stream:
        try:
            with tarfile.open(fileobj=stream, mode="r|", bufsize=PIECE, tarinfo=_Member) as tar:  # type: ignore[call-overload]
                yield tar
        except (tarfile.TarError, Faulty) as error:
            reason = error.fault.reason if isinstance(error, Faulty) else f"is torn or no tar: {error}"
            where = f" (at key {sample.key})" if (sample := last()) else ""
            remedy = "fetch or pack it again, or leave out what is missing with --data.on_error skip"
            raise Faulty(Fault(file.uri, f"{reason}{where}", remedy)) from error


class _Member(tarfile.TarInfo):
    """A header. Where there is none and the tar has not ended, `tarfile` would say nothing and let documents go."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> "_Member":  # type: ignore[override]
        """The next header. Raises ReadError where it is broken, or the file ends before the zeros that end a tar."""
        try:
            return super().fromtarfile(tar)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"{error} at byte {tar.offset:,}") from error
