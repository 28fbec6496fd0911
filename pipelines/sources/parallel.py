"""Two text files whose lines belong together, as corpora of translations come: line 7 of one is line 7 of the other.

reader = ParallelReader(columns, {"/data/train.en": File("/data/train.de", ...)})
reader.slices(file, 32 << 20)                             # ranges of lines; DataError where one file has more
for piece in reader.read(Slice(file, 0, 1000, 90_000)): ...
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, pairwise

from pipelines.prepare.faults import DataError, Fault, not_utf8
from pipelines.prepare.fields import Columns, document
from pipelines.prepare.pieces import File, Piece, Slice
from pipelines.prepare.streams import count_lines, lines, open_range


@dataclass(frozen=True)
class ParallelReader:
    """Pairs of lines. Units are lines; those before a slice are passed over, since where they end is not known."""

    columns: Columns
    targets: Mapping[str, File]
    """The other file of each, by its URI."""

    def slices(self, file: File, target: int) -> list[Slice]:
        """Ranges of lines, all taken to be equally long; streamed files are one slice. Raises DataError."""
        other = self.targets[file.uri]
        count, others = count_lines(file), count_lines(other)
        if count != others:
            raise DataError(
                f"lines of data.source and data.target_source belong together, but {file.uri} has {count:,} lines and "
                f"{other.uri} has {others:,}: name files with equally many"
            )
        size = file.size + other.size
        ranges = 1 if file.streamed or other.streamed else max(1, min(count, round(size / target)))
        return [Slice(file, a, b, size // ranges) for a, b in pairwise([count * i // ranges for i in range(ranges + 1)])]

    def measure(self, piece: Slice) -> int:
        """Lines in the file."""
        return count_lines(piece.file)

    def seam(self, file: File, offset: int) -> int:
        """Any line."""
        return offset

    def read(self, piece: Slice) -> Iterator[Piece | Fault]:
        """The documents of the lines in the slice."""
        file, other = piece.file, self.targets[piece.file.uri]
        if piece.stop == 0:
            yield Fault(file.uri, "is empty")
        with open_range(file) as first, open_range(other) as second:
            pairs = islice(zip(lines(first), lines(second), strict=True), piece.start, piece.stop)
            for number, ((_, left), (_, right)) in enumerate(pairs, piece.start + 1):
                place, uri = f"{file.uri}, line {number}", file.uri
                try:
                    source = left.decode("utf-8-sig").strip()
                    uri = other.uri
                    target = right.decode("utf-8-sig").strip()
                except UnicodeDecodeError as error:
                    yield not_utf8(f"{uri}, line {number}", error)
                else:
                    yield from document([source, target], place, self.columns)
