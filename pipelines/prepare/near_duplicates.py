"""Near-duplicates: documents most of whose words in a row are those of an earlier one (Broder, 1997).

Each part writes a signature (MinHash) of each of its documents. Then one process goes through all of them in the order of
the source and leaves out a document that is like one that was kept. So the same are left out on any number of hosts, however
the source is cut, and after an interruption.

    find_duplicates(job, parts, run_each)                    # a pass over all parts, those before an interruption left out
    duplicates_of(job.folder, part.number)                   # {3, 17}: which of its documents, counted from 0
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, Protocol

import numpy as np

from raystride.pipelines.files import Folder
from raystride.pipelines.prepare.cleaning import Cleaning
from raystride.pipelines.prepare.parts import part_items
from raystride.pipelines.sources.faults import Fault
from raystride.pipelines.sources.pieces import Part, Piece, Reader

SIGNATURES, FOUND = "signatures", "near_duplicates.json"
"""In a folder that is being prepared: the parts' signatures, and which documents of which part are left out."""
WORDS = 5
"""Words in a row that two documents have in common or not."""
HASHES = 128
"""Of a signature, whose share that is equal estimates how much two documents have in common: within 0.09 mostly."""

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


def find_duplicates(job: Reads, parts: Sequence[Part], run_each: RunEach) -> int:
    """Writes which documents are near-duplicates, unless it was found before; how many. Raises DataError."""
    assert job.cleaning
    try:
        return sum(map(len, job.folder.read_json(FOUND).values()))
    except (FileNotFoundError, ValueError):
        pass
    there = set((job.folder / SIGNATURES).names())
    run_each(sign_part, job, [part for part in parts if _file(part.number) not in there])
    signed = ((part.number, _read(job.folder, part.number)) for part in parts)
    found = _alike(signed, job.cleaning.data.near_duplicates)
    job.folder.put_json(FOUND, {str(number): sorted(rows) for number, rows in found.items()})
    return sum(map(len, found.values()))


def duplicates_of(folder: Folder, part: int) -> Set[int]:
    """The documents of a part that are left out. Raises FileNotFoundError where they were not looked for."""
    return set(folder.read_json(FOUND).get(str(part), ()))


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


def _alike(parts: Iterator[tuple[int, np.ndarray]], threshold: float) -> dict[int, list[int]]:
    """By part, the documents whose signatures are like that of an earlier one that is kept."""
    from datasketch import MinHash, MinHashLSH

    # Bands that find nearly all at the threshold; whether a pair found is alike, its whole signatures decide.
    index = MinHashLSH(threshold=min(threshold, MAX_INDEXED), num_perm=HASHES, weights=(0.1, 0.9))
    kept: list[np.ndarray] = []
    found: dict[int, list[int]] = {}
    for number, signatures in parts:
        for row, values in enumerate(signatures):
            own = MinHash(num_perm=HASHES, seed=1, scheme="affine32", hashvalues=values)
            if any(float((kept[other] == values).mean()) >= threshold for other in index.query(own)):
                found.setdefault(number, []).append(row)
            else:
                index.insert(len(kept), own, check_duplication=False)
                kept.append(values)
    return found


def _read(folder: Folder, number: int) -> np.ndarray:
    return np.frombuffer((folder / SIGNATURES).read(_file(number)), "<u4").reshape(-1, HASHES)


def _file(number: int) -> str:
    return f"{number:05d}.u4"
