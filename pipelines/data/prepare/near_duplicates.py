"""Near-duplicates: documents that share most of their word sequences with an earlier document (Broder, 1997).

Each part writes a signature (MinHash) of each of its documents. Then one process goes through all of them in the order of
the source and drops a document that is similar to one that was kept. So the result is the same on any number of hosts, for
any division of the source, and after an interruption.

Signatures are compared if they share a band, a range of hashes. Therefore bands are grouped first (by Ray Data above
MAX_GROUPED_LOCALLY documents, if there is Ray), and only documents that share a band are visited in order.

    find_duplicates(job, parts, run_each, group)             # a pass over all parts except those done before an interruption
    read_duplicates(job.folder, part.number)                 # {3, 17}: positions of its duplicates, counted from 0
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from raystride.pipelines.data.prepare.cleaning import Cleaning
from raystride.pipelines.data.prepare.passes import RunEach, put_part_seconds, put_pass_seconds, run_pass
from raystride.pipelines.data.prepare.progress import CountMeter, read_items_with_mark, show_progress
from raystride.pipelines.data.sources.faults import Fault
from raystride.pipelines.data.sources.pieces import Part, Piece, Reader
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import (
    put_bytes_sealed_beside,
    put_sealed_beside,
    read_bytes_sealed_beside,
    read_sealed_beside,
)

SIGNATURES_FOLDER, DUPLICATES_FILE = "signatures", "near_duplicates.json"
"""In a folder that is being prepared: the parts' signatures, and the documents of each part that are left out."""
SEARCH_AGAIN = "remove both to search again"
SHINGLE_WORDS = 5
"""Words of a shingle, the unit of comparison."""
NUM_HASHES = 128
"""Hashes of a signature. The fraction of equal ones estimates the similarity of two documents, mostly within 0.09."""

MAX_GROUPED_LOCALLY = 1_000_000
"""Documents whose bands one process groups, in 6 s and 1 GB."""
REPORT_ABOVE = 100_000
"""Number of documents above which the cost of comparing them is logged."""
MAX_INDEXED = 0.95
"""Maximum similarity threshold of the index: above 0.99 datasketch has no bands, and raises ValueError."""


class DuplicatesJob(Protocol):
    """The part of a `Preparation` that this module needs."""

    @property
    def folder(self) -> Folder:
        """The prepared folder."""
        ...

    @property
    def readers(self) -> dict[str, Reader]:
        """Readers by split."""
        ...

    @property
    def skip(self) -> bool:
        """Whether faults are skipped."""
        ...

    @property
    def cleaning(self) -> Cleaning | None:
        """The cleaning of documents."""
        ...


SignedParts = Sequence[tuple[int, int]]
"""The numbers of parts, in order, each with the number of documents before it."""
Collisions = tuple[np.ndarray, np.ndarray]
"""Documents that share a band with another one, by their number in the source, (n) int64, and its key, (n) uint64."""


@dataclass(frozen=True)
class Bands:
    """Division of signatures into bands: two similar documents nearly always share one."""

    count: int
    rows: int
    """Hashes of a band."""

    @classmethod
    def for_threshold(cls, threshold: float) -> "Bands":
        """Returns the bands of datasketch's index for a threshold."""
        from datasketch import MinHashLSH

        # These bands find nearly all pairs at the threshold; the whole signatures decide whether a pair is similar.
        index = MinHashLSH(threshold=min(threshold, MAX_INDEXED), num_perm=NUM_HASHES, weights=(0.1, 0.9))
        return cls(index.b, index.r)

    def keys(self, signatures: np.ndarray) -> np.ndarray:
        """Returns a key for each band of signatures (n, NUM_HASHES) uint32, (n, count) uint64; equal for equal bands."""
        keys = np.empty((len(signatures), self.count), np.uint64)
        for band in range(self.count):
            mixed = np.full(len(signatures), band + 1, np.uint64)
            for column in signatures[:, band * self.rows : (band + 1) * self.rows].T:
                mixed = (mixed ^ column.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
                mixed ^= mixed >> np.uint64(29)
            keys[:, band] = mixed * np.uint64(0xBF58476D1CE4E5B9)
        return keys


GroupBands = Callable[[Folder, SignedParts, Bands], Collisions]
"""Finds documents that share a band, in this process or on a cluster."""


def find_duplicates(
    job: DuplicatesJob,
    parts: Sequence[Part],
    run_each: RunEach,
    group: "GroupBands | None" = None,
    log: Callable[[str], None] = print,
) -> int:
    """Finds near-duplicates and writes them, unless an earlier run did; returns their number. Raises DataError.

    `group` finds documents that share a band; None: in this process.
    """
    assert job.cleaning
    try:
        return sum(map(len, read_sealed_beside(job.folder, DUPLICATES_FILE, SEARCH_AGAIN).values()))
    except (FileNotFoundError, ValueError):
        pass
    signatures = job.folder / SIGNATURES_FOLDER
    signing = run_pass("signing documents", sign_part, job, parts, signatures, _signature_file, _is_whole, run_each, log)
    began = time.perf_counter()
    sizes, first, signed = signatures.sizes(), 0, []
    for part in parts:
        signed.append((part.number, first))
        first += sizes[_signature_file(part.number)] // (4 * NUM_HASHES)
    found = _find_similar(job.folder, signed, first, job.cleaning.data.near_duplicates, group or group_bands_locally, log)
    put_pass_seconds(job.folder, {"sign": signing, "compare": time.perf_counter() - began})
    put_sealed_beside(job.folder, DUPLICATES_FILE, {str(number): sorted(rows) for number, rows in found.items()})
    return sum(map(len, found.values()))


def read_duplicates(folder: Folder, part: int) -> Set[int]:
    """Returns the near-duplicates among a part's documents. Raises FileNotFoundError if they were not searched for."""
    if (size := folder.size(DUPLICATES_FILE)) is None:
        raise FileNotFoundError(str(folder / DUPLICATES_FILE))
    return set(_load_duplicates(folder, size).get(str(part), ()))


@lru_cache(maxsize=1)
def _load_duplicates(folder: Folder, size: int) -> dict[str, list[int]]:
    """Reads all duplicates, once a process: every part asks, and for ten million documents they have 25 MB."""
    return dict(read_sealed_beside(folder, DUPLICATES_FILE, SEARCH_AGAIN))


def sign_part(job: DuplicatesJob, part: Part) -> float:
    """Writes the signatures of a part's documents and returns the seconds. Raises DataError unless faults are skipped."""
    began, cleaning, signed = time.perf_counter(), job.cleaning, []
    assert cleaning
    items = cleaning.items(
        read_items_with_mark(job.folder, job.readers[part.split or "train"], part), f"part {part.number}", Counter()
    )
    for item in items:
        if isinstance(item, Fault):
            if not job.skip:
                raise item.error()
            continue
        assert isinstance(item, Piece)
        signed.append(minhash_signature(cleaning.text(item.document)))
    content = np.array(signed, "<u4").reshape(-1, NUM_HASHES)
    folder, name, seconds = job.folder / SIGNATURES_FOLDER, _signature_file(part.number), time.perf_counter() - began
    put_part_seconds(folder, name, seconds)
    put_bytes_sealed_beside(folder, name, content.tobytes())
    return seconds


def minhash_signature(text: str) -> np.ndarray:
    """Returns the MinHash signature of a text, (NUM_HASHES) uint32; case and white space make no difference."""
    from datasketch import MinHash

    words = text.lower().split()
    runs = {" ".join(words[start : start + SHINGLE_WORDS]) for start in range(max(1, len(words) - SHINGLE_WORDS + 1))}
    found = MinHash(num_perm=NUM_HASHES, seed=1, scheme="affine32")
    found.update_batch([run.encode("utf-8", "surrogatepass") for run in sorted(runs)])
    return found.hashvalues.astype(np.uint32)  # type: ignore[no-any-return]


def _find_similar(
    folder: Folder, signed: SignedParts, documents: int, threshold: float, group: GroupBands, log: Callable[[str], None]
) -> dict[int, list[int]]:
    """Returns the documents that are left out, by part."""
    compared, bands = CountMeter(documents, "documents"), Bands.for_threshold(threshold)
    if documents > REPORT_ABOVE:
        log(f"data: {describe_memory_need(documents, bands)}")
    collisions = (group if documents > MAX_GROUPED_LOCALLY else group_bands_locally)(folder, signed, bands)
    if documents > REPORT_ABOVE:
        log(f"data: {len(np.unique(collisions[0])):,} of {documents:,} documents share a band with another one")
    with show_progress("comparing documents", compared, log):
        return _select_duplicates(collisions, folder, signed, threshold, compared)


def describe_memory_need(documents: int, bands: Bands) -> str:
    """Returns a line about the memory that the comparison needs."""
    rows = documents * bands.count
    max_gigabytes = 40e-9 * rows + 1e-9 * documents * (650 + 130 * bands.count)
    return (
        f"{bands.count} bands of each of {documents:,} documents are grouped, {24e-9 * rows:.1f} GB in all; then this "
        f"process takes up to {max_gigabytes:.1f} GB of memory, if every document shares one with another"
    )


def group_bands_locally(folder: Folder, signed: SignedParts, bands: Bands) -> Collisions:
    """Finds documents that share a band, in this process."""
    rows = [compute_band_rows(folder, number, first, bands) for number, first in signed]
    return find_collisions(*(np.concatenate([row[column] for row in rows]) for column in (0, 1)))


def compute_band_rows(folder: Folder, part: int, first: int, bands: Bands) -> Collisions:
    """Returns a row for each band of each document of a part; `first` documents come before the part."""
    keys = bands.keys(_read_signatures(folder, part))
    return np.repeat(np.arange(first, first + len(keys)), bands.count), keys.ravel()


def find_collisions(documents: np.ndarray, keys: np.ndarray) -> Collisions:
    """Returns the rows with a key that occurs more than once."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    same = ordered[1:] == ordered[:-1]
    shared = np.zeros(len(keys), bool)
    shared[1:] |= same
    shared[:-1] |= same
    return documents[order[shared]], ordered[shared]


def _select_duplicates(
    collisions: Collisions, folder: Folder, signed: SignedParts, threshold: float, compared: CountMeter
) -> dict[int, list[int]]:
    """Returns, by part, the documents with a signature similar to that of an earlier kept one.

    Documents that share no band are never similar.
    """
    order = np.argsort(collisions[0], kind="stable")
    documents, keys = collisions[0][order], collisions[1][order]
    kept: dict[int, list[np.ndarray]] = {}
    """Signatures of kept documents, by the keys of their shared bands."""
    found: dict[int, list[int]] = {}
    for (number, first), (_, end) in zip(signed, [*signed[1:], (0, compared.total)], strict=True):
        low, high = np.searchsorted(documents, [first, end])
        if low < high:
            own, edges = np.unique(documents[low:high], return_index=True)
            signatures = _read_signatures(folder, number)[own - first]
            for document, values, shared in zip(own.tolist(), signatures, np.split(keys[low:high], edges[1:]), strict=True):
                listed = shared.tolist()
                others = [other for key in listed for other in kept.get(key, ())]
                if others and float((np.stack(others) == values).mean(1).max()) >= threshold:
                    found.setdefault(number, []).append(document - first)
                    continue
                values = values.copy()  # not a view of the part's signatures
                for key in listed:
                    kept.setdefault(key, []).append(values)
        compared.done = end
    return found


def _read_signatures(folder: Folder, number: int) -> np.ndarray:
    content = read_bytes_sealed_beside(folder / SIGNATURES_FOLDER, _signature_file(number), "the next start makes it again")
    return np.frombuffer(content, "<u4").reshape(-1, NUM_HASHES)


def _is_whole(folder: Folder, number: int) -> bool:
    """Returns whether the signatures of a part, of an earlier start, are as they were written. Raises OSError."""
    try:
        read_bytes_sealed_beside(folder, _signature_file(number), "the next start makes it again")
    except ValueError:  # and SealBroken is one
        return False
    return True


def _signature_file(number: int) -> str:
    return f"{number:05d}.u4"
