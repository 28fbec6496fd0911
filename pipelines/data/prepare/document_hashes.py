"""Hashes of the training documents, kept beside a preparation: which documents of another source are also in training.

A document is known by what assigns it to a split (`Piece.identity`): its first 4,096 characters, or its first field if there
are several. Its hash has 64 bits. Above MAX_HASHES documents those are kept whose hash is a multiple of a power of two.

    merge_hashes(folder, [0, 1, 2])                           # from the parts' files; writes documents.hashes
    read_hashes(folder).count_shared(test_hashes)             # Shared(812, 1_000)
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

import numpy as np

from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import SealBroken, put_bytes_sealed_beside, read_bytes_sealed_beside

FILE, PARTS = "documents.hashes", "hashes"
"""File of all training documents: the step between kept hashes, then these in order. Folder with a file a part."""
MAX_HASHES = 50_000_000
"""Training documents that are kept: 400 MB."""
THREADS = 16
"""Parts whose files are read at a time."""


def hash_document(identity: str) -> int:
    """Returns the hash of a document, below 2^64."""
    return int.from_bytes(blake2b(identity.encode("utf-8", "surrogatepass"), digest_size=8).digest())


@dataclass(frozen=True)
class Shared:
    """Documents of a source that are also in training."""

    shared: int
    documents: int
    """The documents that were compared."""

    def describe(self, source: str) -> str:
        """Returns the line about them."""
        return f"{self.shared:,} of {self.documents:,} documents of {source} are also in training"


@dataclass(frozen=True)
class DocumentHashes:
    """The hashes of the training documents."""

    hashes: np.ndarray
    """Sorted, each once."""
    step: int
    """All hashes are multiples of it."""

    def count_shared(self, others: np.ndarray) -> Shared:
        """Counts documents that are also in training, by their hashes, among those that the sample could have."""
        others = others[others % np.uint64(self.step) == 0]
        return Shared(int(np.isin(others, self.hashes).sum()), len(others))


def part_hashes_name(part: int) -> str:
    """Returns the name of the file with the hashes of a part's documents."""
    return f"{PARTS}/{part:05d}"


def put_hashes(folder: Folder, name: str, train: np.ndarray, validation: np.ndarray) -> None:
    """Writes the hashes of some documents to a file."""
    content = np.concatenate([np.array([len(train)], "<u8"), train, validation])
    folder.put(name, content.astype("<u8").tobytes())


def read_hash_file(folder: Folder, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the hashes of training and of validation documents in a file. Raises FileNotFoundError."""
    content = np.frombuffer(folder.read(name), "<u8")
    return content[1 : 1 + int(content[0])], content[1 + int(content[0]) :]


def merge_hashes(folder: Folder, parts: Sequence[int]) -> tuple[DocumentHashes, np.ndarray] | None:
    """Writes the hashes of all training documents; returns them and those of validation, or None if parts have none."""
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            found_by_part = pool.map(partial(read_hash_file, folder), map(part_hashes_name, parts))
            train, validation = (np.concatenate(some) for some in zip(*found_by_part, strict=True))
    except FileNotFoundError:  # parts from before 0.4
        return None
    step = 1
    while len(train) > MAX_HASHES:
        step *= 2
        train = train[train % np.uint64(step) == 0]
    found = DocumentHashes(np.unique(train), step)
    put_bytes_sealed_beside(folder, FILE, np.concatenate([np.array([step], "<u8"), found.hashes]).tobytes())
    return found, validation


def read_hashes(folder: Folder) -> DocumentHashes | None:
    """Returns the hashes of a preparation's training documents; None if it has none, or they are not as written."""
    try:
        content = np.frombuffer(read_bytes_sealed_beside(folder, FILE, "remove both"), "<u8")
    except (FileNotFoundError, SealBroken):
        return None
    return DocumentHashes(content[1:], int(content[0]))
