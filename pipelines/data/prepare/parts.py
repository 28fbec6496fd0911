"""Division of a source into parts of about equal text, assignment of validation parts, and sampling over all parts.

The division depends on the source and the settings alone, never on the number of workers: so an interrupted preparation
continues on any cluster, and gives the same shards.

    parts = divide_into_parts(source, None, config.data)      # (Part(number=0, slices=..., split=None), ...)
    for document in sample_documents(reader, sample_slices(slices, 64 << 20), 64 << 20): ...
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from raystride.pipelines.config import DataConfig
from raystride.pipelines.data.sources.faults import Fault, FaultError, escape_surrogates
from raystride.pipelines.data.sources.pieces import COMPRESSIONS, File, Part, Piece, Reader, Slice
from raystride.pipelines.data.sources.source import Source
from raystride.pipelines.data.tasks.task import Document
from raystride.pipelines.system.threads import map_in_threads

MIN_PART_BYTES = 256 << 10
"""Minimum bytes of text of a part, if the source has as many."""

WORKERS = 16
"""Minimum number of parts, unless they would be below MIN_PART_BYTES; larger sources have parts of data.shard_mib."""

_SAMPLED_SLICES = 256


def divide_into_parts(
    source: Source, validation: Source | None, data: DataConfig, count_file: Callable[[], object] = lambda: None
) -> tuple[Part, ...]:
    """Returns all parts, in the order of the stream; numbers count from 0. Raises DataError if a tail cannot be found.

    `count_file` is called for each file.
    """
    slices = _slice_files(source, data, count_file)
    if validation is not None:
        chosen = [("train", slices), ("validation", _slice_files(validation, data, count_file))]
    elif data.validation == "tail":
        front, tail = _split_tail(source.reader, slices, data)
        chosen = [("train", front), ("validation", tail)]
    else:
        chosen = [("", slices)]
    size = target_part_bytes(sum(piece.bytes for _, some in chosen for piece in some), data)
    parts: list[Part] = []
    for split, some in chosen:
        for group in _group_slices(some, size):
            parts.append(Part(len(parts), tuple(group), split or None))
    return tuple(parts)


def packed_notes(parts: Sequence[Part], data: DataConfig) -> list[str]:
    """Returns a note about large packed files, each of which one task reads, if there are fewer of them than tasks."""
    size = data.shard_mib * 2**20
    pieces = (piece for part in parts for piece in part.slices if piece.bytes > size)
    packed = [piece for piece in pieces if piece.file.name.lower().endswith(tuple(COMPRESSIONS))]
    if not packed or len(packed) >= WORKERS:
        return []
    largest = max(packed, key=lambda piece: piece.bytes)
    name, megabytes = escape_surrogates(largest.file.name), largest.bytes / 1e6
    count = min(WORKERS, max(2, round(largest.bytes / size)))
    return [
        f"{name} is packed ({megabytes:,.0f} MB) and so read by one process: unpack it, or split it into files of some 100 "
        f"MB, and up to {count} processes read it at once"
    ]


def divide_without_validation(source: Source, data: DataConfig) -> tuple[Part, ...]:
    """Returns all parts of a source without validation data. Raises DataError."""
    slices = _slice_files(source, data)
    groups = _group_slices(slices, target_part_bytes(sum(piece.bytes for piece in slices), data))
    return tuple(Part(number, tuple(group), None) for number, group in enumerate(groups))


def read_part_items(reader: Reader, part: Part) -> Iterator[Piece | Fault]:
    """Yields the pieces and faults of a part, in order."""
    for piece in part.slices:
        try:
            yield from reader.read(piece)
        except FaultError as faulty:
            yield faulty.fault


def read_first_rows(source: Source, max_files: int, max_rows: int) -> Iterator[Piece | Fault]:
    """Yields the pieces and faults of the first rows of the first files."""
    for file in source.files[:max_files]:
        try:
            for beginning in source.reader.slices(file, MIN_PART_BYTES)[:1]:
                yield from islice(source.reader.read(beginning), max_rows)
        except FaultError as faulty:
            yield faulty.fault


def target_part_bytes(total: int, data: DataConfig) -> int:
    """Returns the target size of a part, in bytes of text, for a source of `total` bytes."""
    return int(min(max(total / WORKERS, MIN_PART_BYTES), data.shard_mib * 2**20)) or 1


def _slice_files(source: Source, data: DataConfig, count_file: Callable[[], object] = lambda: None) -> list[Slice]:
    target = target_part_bytes(sum(file.size for file in source.files), data)

    def slice_file(file: File) -> list[Slice]:
        try:
            return source.reader.slices(file, target)
        except FaultError:
            # Reading it in its part gives the same fault, and there data.on_error applies.
            return [Slice(file, 0, file.size, file.size)]

    slices: list[Slice] = []
    # Remote files answer slowly, and a large one takes a request a cut.
    for some in map_in_threads(slice_file, source.files, WORKERS):
        slices += some
        count_file()
    return slices


def _group_slices(slices: list[Slice], size: int) -> Iterator[list[Slice]]:
    group: list[Slice] = []
    filled = 0
    for piece in slices:
        # Half of it: a part ends at the size nearest to the target.
        if group and filled + piece.bytes / 2 > size:
            yield group
            group, filled = [], 0
        group.append(piece)
        filled += piece.bytes
    if group:
        yield group


def _split_tail(reader: Reader, slices: list[Slice], data: DataConfig) -> tuple[list[Slice], list[Slice]]:
    """Returns the slices before and after the point at which the last `validation_fraction` of all units begins."""
    try:
        sizes = [(reader.count_units(piece) if piece.stop is None else piece.stop - piece.start) for piece in slices]
        left = int(sum(sizes) * (1 - data.validation_fraction))
        for number, (piece, size) in enumerate(zip(slices, sizes, strict=True)):
            if left < size:
                next_split = reader.next_split(piece.file, piece.start + left)
                share = piece.bytes * (next_split - piece.start) // max(size, 1)
                first = Slice(piece.file, piece.start, next_split, share)
                second = Slice(piece.file, next_split, piece.stop, piece.bytes - share)
                front = [first] if next_split > piece.start else []
                back = [second] if next_split < piece.start + size else []
                return slices[:number] + front, back + slices[number + 1 :]
            left -= size
    except FaultError as faulty:
        # Without the total length there is no tail, under any data.on_error.
        raise faulty.fault.error() from faulty
    return slices, []


def sample_slices(slices: list[Slice], size: int) -> list[Slice]:
    """Returns the slices for a sample of `size` bytes: all if they have no more, else at most 256, evenly spread."""
    if sum(piece.bytes for piece in slices) <= size or len(slices) <= _SAMPLED_SLICES:
        return slices
    return [slices[len(slices) * i // _SAMPLED_SLICES] for i in range(_SAMPLED_SLICES)]


def sample_documents(reader: Reader, slices: list[Slice], size: int) -> Iterator[Document]:
    """Yields documents from the beginning of each slice, about `size` bytes together; faults are ignored."""
    total = sum(piece.bytes for piece in slices)
    share = size / max(total, 1)
    left = 0.0
    for piece in slices:
        left += max(piece.bytes * share, 1)
        if left <= 0:  # earlier slices gave more than their quota, since pieces are not divided
            continue
        for document in _read_documents(reader, piece):
            left -= sum(map(len, document))
            yield document
            if left <= 0 and total > size:
                break


def _read_documents(reader: Reader, piece: Slice) -> Iterator[Document]:
    try:
        for item in reader.read(piece):
            if isinstance(item, Piece):
                yield item.document
    except FaultError:
        return
