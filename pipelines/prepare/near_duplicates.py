"""Near-duplicates: documents most of whose words in a row are those of an earlier one (Broder, 1997).

Each part writes a signature (MinHash) of each of its documents. Then one process goes through all of them in the order of
the source and leaves out a document that is like one that was kept. So the same are left out on any number of hosts, however
the source is cut, and after an interruption.

Signatures are compared if they have a band in common, a stretch of hashes. So bands are grouped first, of more than
MAX_GROUPED_HERE documents by Ray Data where there is Ray, and only documents that share one are looked at in order.

    find_duplicates(job, parts, run_each, group)             # a pass over all parts, those before an interruption left out
    duplicates_of(job.folder, part.number)                   # {3, 17}: which of its documents, counted from 0
"""

from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from raystride.pipelines.files import Folder
from raystride.pipelines.prepare.cleaning import Cleaning
from raystride.pipelines.prepare.parts import part_items
from raystride.pipelines.prepare.progress import Meter, shown
from raystride.pipelines.sources.faults import Fault
from raystride.pipelines.sources.pieces import Part, Piece, Reader

SIGNATURES, FOUND = "signatures", "near_duplicates.json"
"""In a folder that is being prepared: the parts' signatures, and which documents of which part are left out."""
WORDS = 5
"""Words in a row that two documents have in common or not."""
HASHES = 128
"""Of a signature, whose share that is equal estimates how much two documents have in common: within 0.09 mostly."""

MAX_GROUPED_HERE = 1_000_000
"""Documents whose bands one process groups, in 6 s and 1 GB."""
SAID_OF = 100_000
"""Documents above which it is said what comparing them takes."""
MAX_INDEXED = 0.95
"""The index finds pairs that are alike from here on, at most: above 0.99 datasketch has no bands, and raises ValueError."""


class Reads(Protocol):
    """What of a preparation is needed here."""

    @property
    def folder(self) -> Folder:
        """The prepared folder."""
        ...

    @property
    def readers(self) -> dict[str, Reader]:
        """By split."""
        ...

    @property
    def skip(self) -> bool:
        """Whether faults are passed over."""
        ...

    @property
    def cleaning(self) -> Cleaning | None:
        """What is done with documents."""
        ...


RunEach = Callable[..., list[Any]]
"""Runs a function of a job and a part for all parts, here or on a cluster."""
Signed = Sequence[tuple[int, int]]
"""The numbers of parts, in order, and how many documents come before each."""
Collisions = tuple[np.ndarray, np.ndarray]
"""Documents that share a band with another one, by their number in the source, (n) int64, and its key, (n) uint64."""


@dataclass(frozen=True)
class Bands:
    """How signatures are cut into bands: those of two documents that are alike have one in common, nearly always."""

    count: int
    rows: int
    """Hashes of a band."""

    @classmethod
    def of(cls, threshold: float) -> "Bands":
        """The bands that datasketch's index has for a threshold."""
        from datasketch import MinHashLSH

        # Bands that find nearly all at the threshold; whether a pair found is alike, its whole signatures decide.
        index = MinHashLSH(threshold=min(threshold, MAX_INDEXED), num_perm=HASHES, weights=(0.1, 0.9))
        return cls(index.b, index.r)

    def keys(self, signatures: np.ndarray) -> np.ndarray:
        """A number for each band of signatures (n, HASHES) uint32, (n, count) uint64; equal bands have equal ones."""
        keys = np.empty((len(signatures), self.count), np.uint64)
        for band in range(self.count):
            mixed = np.full(len(signatures), band + 1, np.uint64)
            for column in signatures[:, band * self.rows : (band + 1) * self.rows].T:
                mixed = (mixed ^ column.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
                mixed ^= mixed >> np.uint64(29)
            keys[:, band] = mixed * np.uint64(0xBF58476D1CE4E5B9)
        return keys


Group = Callable[[Folder, Signed, Bands], Collisions]
"""Finds what shares a band, here or on a cluster."""


def find_duplicates(
    job: Reads, parts: Sequence[Part], run_each: RunEach, group: "Group | None" = None, log: Callable[[str], None] = print
) -> int:
    """Writes which documents are near-duplicates, unless it was found before; how many. Raises DataError.

    `group` finds what shares a band; in this process, if it is None.
    """
    assert job.cleaning
    try:
        return sum(map(len, job.folder.read_json(FOUND).values()))
    except (FileNotFoundError, ValueError):
        pass
    there = set((job.folder / SIGNATURES).names())
    left = [part for part in parts if _file(part.number) not in there]
    with shown("signing documents", Meter(job.folder / SIGNATURES, {_file(part.number): part.bytes for part in left}), log):
        run_each(sign_part, job, left)
    sizes, first, signed = (job.folder / SIGNATURES).sizes(), 0, []
    for part in parts:
        signed.append((part.number, first))
        first += sizes[_file(part.number)] // (4 * HASHES)
    found = _compare(job.folder, signed, first, job.cleaning.data.near_duplicates, group or group_here, log)
    job.folder.put_json(FOUND, {str(number): sorted(rows) for number, rows in found.items()})
    return sum(map(len, found.values()))


def duplicates_of(folder: Folder, part: int) -> Set[int]:
    """The documents of a part that are left out. Raises FileNotFoundError where they were not looked for."""
    if (size := folder.size(FOUND)) is None:
        raise FileNotFoundError(str(folder / FOUND))
    return set(_read_found(folder, size).get(str(part), ()))


@lru_cache(maxsize=1)
def _read_found(folder: Folder, size: int) -> dict[str, list[int]]:
    """What was found, read once in a process: each of many parts asks, and of ten million documents it has 25 MB."""
    return dict(folder.read_json(FOUND))


def sign_part(job: Reads, part: Part) -> None:
    """Writes the signatures of a part's documents. Raises DataError unless faults are skipped."""
    cleaning, signed = job.cleaning, []
    assert cleaning
    items = cleaning.items(part_items(job.readers[part.split or "train"], part), f"part {part.number}", Counter())
    for item in items:
        if isinstance(item, Fault):
            if not job.skip:
                raise item.error()
            continue
        assert isinstance(item, Piece)
        signed.append(signature(cleaning.text(item.document)))
    content = np.array(signed, "<u4").reshape(-1, HASHES)
    (job.folder / SIGNATURES).put(_file(part.number), content.tobytes())


def signature(text: str) -> np.ndarray:
    """The signature of a text, (HASHES) uint32; case and what is between words make no difference."""
    from datasketch import MinHash

    words = text.lower().split()
    runs = {" ".join(words[at : at + WORDS]) for at in range(max(1, len(words) - WORDS + 1))}
    found = MinHash(num_perm=HASHES, seed=1, scheme="affine32")
    found.update_batch([run.encode("utf-8", "surrogatepass") for run in sorted(runs)])
    return found.hashvalues.astype(np.uint32)  # type: ignore[no-any-return]


class _Compared:
    """How many documents were looked at, for a bar or a line."""

    def __init__(self, total: int) -> None:
        self.total, self.done = max(total, 1), 0

    def read(self) -> str:
        """The documents so far."""
        return f"{self.done:,}/{self.total:,} documents"


def _compare(
    folder: Folder, signed: Signed, documents: int, threshold: float, group: Group, log: Callable[[str], None]
) -> dict[int, list[int]]:
    """By part, the documents that are left out."""
    compared, bands = _Compared(documents), Bands.of(threshold)
    if documents > SAID_OF:
        log(f"data: {describe_need(documents, bands)}")
    collisions = (group if documents > MAX_GROUPED_HERE else group_here)(folder, signed, bands)
    if documents > SAID_OF:
        log(f"data: {len(np.unique(collisions[0])):,} of {documents:,} documents share a band with another one")
    with shown("comparing documents", compared, log):
        return _alike(collisions, folder, signed, threshold, compared)


def describe_need(documents: int, bands: Bands) -> str:
    """What comparing so many documents takes, in a line."""
    rows = documents * bands.count
    most = 40e-9 * rows + 1e-9 * documents * (650 + 130 * bands.count)
    return (
        f"{bands.count} bands of each of {documents:,} documents are grouped, {24e-9 * rows:.1f} GB in all; then this "
        f"process takes up to {most:.1f} GB of memory, if every document shares one with another"
    )


def group_here(folder: Folder, signed: Signed, bands: Bands) -> Collisions:
    """What shares a band, found in this process."""
    rows = [band_rows(folder, number, first, bands) for number, first in signed]
    return colliding(*(np.concatenate([row[column] for row in rows]) for column in (0, 1)))


def band_rows(folder: Folder, part: int, first: int, bands: Bands) -> Collisions:
    """A row for each band of each document of a part, before which come `first` documents."""
    keys = bands.keys(_read(folder, part))
    return np.repeat(np.arange(first, first + len(keys)), bands.count), keys.ravel()


def colliding(documents: np.ndarray, keys: np.ndarray) -> Collisions:
    """Those of some rows whose key another one has, too."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    same = ordered[1:] == ordered[:-1]
    shared = np.zeros(len(keys), bool)
    shared[1:] |= same
    shared[:-1] |= same
    return documents[order[shared]], ordered[shared]


def _alike(
    collisions: Collisions, folder: Folder, signed: Signed, threshold: float, compared: _Compared
) -> dict[int, list[int]]:
    """By part, the documents whose signatures are like that of an earlier one that is kept.

    Documents that share no band are like none.
    """
    order = np.argsort(collisions[0], kind="stable")
    documents, keys = collisions[0][order], collisions[1][order]
    kept: dict[int, list[np.ndarray]] = {}
    """The signatures of documents that are kept, by the keys of their shared bands."""
    found: dict[int, list[int]] = {}
    for (number, first), (_, end) in zip(signed, [*signed[1:], (0, compared.total)], strict=True):
        low, high = np.searchsorted(documents, [first, end])
        if low < high:
            own, edges = np.unique(documents[low:high], return_index=True)
            signatures = _read(folder, number)[own - first]
            for document, values, shared in zip(own.tolist(), signatures, np.split(keys[low:high], edges[1:]), strict=True):
                listed = shared.tolist()
                others = [other for key in listed for other in kept.get(key, ())]
                if others and float((np.stack(others) == values).mean(1).max()) >= threshold:
                    found.setdefault(number, []).append(document - first)
                    continue
                values = values.copy()  # not a view of its part's
                for key in listed:
                    kept.setdefault(key, []).append(values)
        compared.done = end
    return found


def _read(folder: Folder, number: int) -> np.ndarray:
    return np.frombuffer((folder / SIGNATURES).read(_file(number)), "<u4").reshape(-1, HASHES)


def _file(number: int) -> str:
    return f"{number:05d}.u4"
