"""A source divided into parts of about equal text, which of them validate, and a sample spread over them.

The division depends on the source and the settings alone, never on the number of workers: so an interrupted preparation
goes on where it was, on whatever cluster, and gives the same shards.

    parts = divide(source, None, config.data)                 # (Part(number=0, slices=..., split=None), ...)
    for document in sample(reader, sampled_slices(slices, 64 << 20), 64 << 20): ...
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from raystride.pipelines.config import Data
from raystride.pipelines.sources.faults import Fault, Faulty
from raystride.pipelines.sources.pieces import Part, Piece, Reader, Slice
from raystride.pipelines.sources.source import Source
from raystride.pipelines.tasks.task import Document

SMALLEST = 256 << 10
"""Bytes of text that a part has at least, where the source has as many."""

WORKERS = 16
"""Parts that a source gives at least, unless they would be smaller than SMALLEST; beyond, parts have data.shard_mib."""

_SAMPLED_SLICES = 256


def divide(source: Source, validation: Source | None, data: Data) -> tuple[Part, ...]:
    """All parts, in the order of the stream; numbers count from 0. Raises DataError where a tail cannot be found."""
    slices = _slices(source, data)
    if validation is not None:
        chosen = [("train", slices), ("validation", _slices(validation, data))]
    elif data.validation == "tail":
        front, tail = _split_tail(source.reader, slices, data)
        chosen = [("train", front), ("validation", tail)]
    else:
        chosen = [("", slices)]
    size = part_bytes(sum(piece.bytes for _, some in chosen for piece in some), data)
    parts: list[Part] = []
    for split, some in chosen:
        for group in _groups(some, size):
            parts.append(Part(len(parts), tuple(group), split or None))
    return tuple(parts)


def parts_of(source: Source, data: Data) -> tuple[Part, ...]:
    """All parts of a source of which nothing validates. Raises DataError."""
    slices = _slices(source, data)
    groups = _groups(slices, part_bytes(sum(piece.bytes for piece in slices), data))
    return tuple(Part(number, tuple(group), None) for number, group in enumerate(groups))


def part_items(reader: Reader, part: Part) -> Iterator[Piece | Fault]:
    """What a part gives, in order."""
    for piece in part.slices:
        try:
            yield from reader.read(piece)
        except Faulty as faulty:
            yield faulty.fault


def part_bytes(total: int, data: Data) -> int:
    """Bytes of text that a part should have, for a source of `total` bytes."""
    return int(min(max(total / WORKERS, SMALLEST), data.shard_mib * 2**20)) or 1


def _slices(source: Source, data: Data) -> list[Slice]:
    target = part_bytes(sum(file.size for file in source.files), data)

    def of_file(number: int) -> list[Slice]:
        file = source.files[number]
        try:
            return source.reader.slices(file, target)
        except Faulty:
            # Reading it in its part gives the same fault, where data.on_error decides what becomes of it.
            return [Slice(file, 0, file.size, file.size)]

    with ThreadPoolExecutor(WORKERS) as pool:  # remote files answer slowly, and a large one is asked once a cut
        return [piece for some in pool.map(of_file, range(len(source.files))) for piece in some]


def _groups(slices: list[Slice], size: int) -> Iterator[list[Slice]]:
    group: list[Slice] = []
    filled = 0
    for piece in slices:
        # Half of it: a part ends where its size is nearer to what is wanted.
        if group and filled + piece.bytes / 2 > size:
            yield group
            group, filled = [], 0
        group.append(piece)
        filled += piece.bytes
    if group:
        yield group


def _split_tail(reader: Reader, slices: list[Slice], data: Data) -> tuple[list[Slice], list[Slice]]:
    """The slices before and after the place where the last `validation_fraction` of all units begins."""
    try:
        sizes = [(reader.measure(piece) if piece.stop is None else piece.stop - piece.start) for piece in slices]
        left = int(sum(sizes) * (1 - data.validation_fraction))
        for number, (piece, size) in enumerate(zip(slices, sizes, strict=True)):
            if left < size:
                seam = reader.seam(piece.file, piece.start + left)
                share = piece.bytes * (seam - piece.start) // max(size, 1)
                first = Slice(piece.file, piece.start, seam, share)
                second = Slice(piece.file, seam, piece.stop, piece.bytes - share)
                front = [first] if seam > piece.start else []
                back = [second] if seam < piece.start + size else []
                return slices[:number] + front, back + slices[number + 1 :]
            left -= size
    except Faulty as faulty:
        # Without knowing how long the whole is there is no tail, whatever data.on_error says.
        raise faulty.fault.error() from faulty
    return slices, []


def sampled_slices(slices: list[Slice], size: int) -> list[Slice]:
    """The slices of which a sample of `size` bytes is taken: all where they have no more, else at most 256,
    evenly spread.
    """
    if sum(piece.bytes for piece in slices) <= size or len(slices) <= _SAMPLED_SLICES:
        return slices
    return [slices[len(slices) * i // _SAMPLED_SLICES] for i in range(_SAMPLED_SLICES)]


def sample(reader: Reader, slices: list[Slice], size: int) -> Iterator[Document]:
    """Documents from the beginning of each slice, about `size` bytes together; faults pass unseen."""
    total = sum(piece.bytes for piece in slices)
    share = size / max(total, 1)
    left = 0.0
    for piece in slices:
        left += max(piece.bytes * share, 1)
        if left <= 0:  # earlier slices gave more than their share, since a piece is taken whole
            continue
        for document in _documents(reader, piece):
            left -= sum(map(len, document))
            yield document
            if left <= 0 and total > size:
                break


def _documents(reader: Reader, piece: Slice) -> Iterator[Document]:
    try:
        for item in reader.read(piece):
            if isinstance(item, Piece):
                yield item.document
    except Faulty:
        return
