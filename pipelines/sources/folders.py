"""A file a document, and the folder that holds it names its class: `<root>/<label>/*.txt`, or images likewise.

reader = FolderReader(columns)
for piece in reader.read(Slice(File("/digits/seven/1.png", "seven/1.png", 312), 0, 1, 312)): ...
piece.document                                            # ("data:image/png;base64,iVBOR...", "seven")
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pipelines.prepare.faults import Fault
from pipelines.prepare.fields import Columns, document
from pipelines.prepare.pieces import File, Piece, Slice
from pipelines.prepare.text import TextReader

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
"""Endings of image files."""


@dataclass(frozen=True)
class FolderReader:
    """Whole files of text or images, labelled by the first folder of their names. Units are files."""

    columns: Columns

    def slices(self, file: File, target: int) -> list[Slice]:
        """The file."""
        return [Slice(file, 0, 1, file.size)]

    def measure(self, piece: Slice) -> int:
        """One file."""
        return 1

    def seam(self, file: File, offset: int) -> int:
        """Before it or after it."""
        return offset

    def read(self, piece: Slice) -> Iterator[Piece | Fault]:
        """The file's document."""
        file = piece.file
        values: dict[str, Any] = {"label": file.name.partition("/")[0], "image": file.uri}
        if any(column.kind == "text" for column in self.columns):
            for item in TextReader(whole=True).read(Slice(file, 0, None, file.size)):
                if isinstance(item, Fault):
                    yield item
                    return
                values["text"] = item.document[0]
        yield from document([values[column.kind] for column in self.columns], file.uri, self.columns)
