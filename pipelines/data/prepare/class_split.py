"""The validation documents of a classifier: the same share of each class, those whose hashes are smallest.

    hashes = SmallestHashes(0.1)                              # one a part, while it is surveyed
    documents = hashes.watch(pieces)                          # passes the documents on
    bounds = find_bounds([hashes.found()], 0.1)               # {"spam": 2106...}
    validates(piece, {CLASS_BOUNDS: bounds}, 0.1)             # whether this document is one of them

Equal inputs of one class are in the same split. Without bounds (another task, a mixture, data that grows, a preparation
before 0.4) a document validates if its own hash is below the share.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from raystride.pipelines.config import DataConfig
from raystride.pipelines.data.prepare.document_hashes import hash_document
from raystride.pipelines.data.sources.pieces import Piece
from raystride.pipelines.data.tasks.labels import LabelTask
from raystride.pipelines.data.tasks.task import Document, Facts, Task

CLASS_BOUNDS = "validation_below"
"""Fact of a task: by label, the hash below which its documents validate."""
CLASS_HASHES = "smallest_hashes"
"""In a part's survey: what the bounds are found from."""

Hashes = dict[str, Any]
"""By label: the number of documents, and the smallest hashes in order."""


class SmallestHashes:
    """The smallest hashes of a part's documents by label, some more than a share of them."""

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction
        self._hashes: dict[str, list[int]] = defaultdict(list)

    def watch(self, pieces: Iterable[Piece]) -> Iterator[Document]:
        """Yields the documents of pieces, and keeps their hashes."""
        for piece in pieces:
            self._hashes[piece.document[-1]].append(hash_document(piece.identity))
            yield piece.document

    def found(self) -> Hashes:
        """Returns the hashes as JSON: the share of each label and six standard deviations more."""
        return {
            label: [len(hashes), sorted(hashes)[: self._count_kept(len(hashes))]] for label, hashes in self._hashes.items()
        }

    def _count_kept(self, count: int) -> int:
        share = self._fraction * count
        return math.ceil(share + 6 * math.sqrt(share) + 6)


def divides_by_class(task: Task, data: DataConfig) -> bool:
    """Returns whether a source's documents, where it has no splits of its own, are divided class by class."""
    return isinstance(task, LabelTask) and data.validation == "hash" and not data.follow


def find_bounds(parts: Iterable[Hashes], fraction: float) -> dict[str, int]:
    """Returns by label the hash below which its documents validate, from the hashes of all parts.

    As many validate as the share of all documents, divided over the classes by largest remainders (the smaller class first);
    no class validates whole.
    """
    counts, smallest, limits = defaultdict[str, int](int), defaultdict[str, list[int]](list), dict[str, int]()
    for part in parts:
        for label, (count, hashes) in part.items():
            counts[label] += count
            smallest[label] += hashes
            if len(hashes) < count:  # others may be like the last, or come after it
                limits[label] = min(limits.get(label, 2**64), hashes[-1])
    wanted = {label: math.floor(fraction * count) for label, count in counts.items()}
    by_remainder = sorted(counts, key=lambda label: (wanted[label] - fraction * counts[label], counts[label], label))
    for label in by_remainder[: round(fraction * sum(counts.values())) - sum(wanted.values())]:
        wanted[label] += 1
    bounds = {}
    for label, count in wanted.items():
        hashes, most = sorted(smallest[label]), min(count, counts[label] - 1)
        bound = min(hashes[most - 1] + 1, limits.get(label, 2**64)) if most else 0
        bounds[label] = bound if 0 < sum(found < bound for found in hashes) < counts[label] else 0
    return bounds


def validates(piece: Piece, facts: Facts, fraction: float) -> bool:
    """Returns whether a document of data without splits is a validation document, by the task's facts."""
    return hash_validates(hash_document(piece.identity), piece.document, facts, fraction)


def hash_validates(key: int, document: Document, facts: Facts, fraction: float) -> bool:
    """Returns the same for a document whose hash is known."""
    bounds = facts.get(CLASS_BOUNDS)
    return key < (fraction * 2**64 if bounds is None else bounds.get(document[-1], 0))
