"""Which rank wrote which piece of which tensor: in the manifest, or of many ranks in a file each, read as far as needed.

A thousand parameters, sharded over a thousand ranks, are millions of pieces: half a gigabyte of JSON that each rank would
read whole. Above `MOST_LISTED` ranks each writes where its own pieces lie, a row of numbers a piece, and the manifest has
sizes and types alone. A rank reads the files of those that, cut evenly, have what it needs: with as many ranks as before
its own, with half as many two. Where that was not all, it reads on, those of neighbouring ranks first.

    step-00000500/<data>/rank-7.npy           (pieces, 3 + 2 dimensions) int64: key of the name, byte and bytes in the file,
                                              where in the tensor it begins, and its size
"""

import gc
import hashlib
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem

from raystride.pipelines.files import Folder

MOST_LISTED = 256
"""Ranks up to which the manifest itself says where pieces lie."""
READERS = 16
AT_ONCE = 64
"""Files that are read before it is looked whether they were enough; then twice as many, and so on."""
HEAD = 3
"""Numbers of a row before those of its dimensions."""

Pieces = Mapping[str, Iterable[Mapping[str, Any]]]
"""By tensor, its pieces: `offsets` and `sizes` in the tensor, `file`, and `offset` and `bytes` in that file."""


def index_name(data: str, rank: int) -> str:
    """The file in which a rank says where its pieces lie."""
    return f"{data}/rank-{rank}.npy"


def index_of(placed: Iterable[tuple[WriteItem, int, int]]) -> bytes:
    """What a rank's file holds, of what it wrote: each item with the byte at which it begins, and its bytes."""
    rows: list[tuple[list[int], Sequence[int], Sequence[int]]] = []
    for item, offset, size in placed:
        assert item.tensor_data is not None
        chunk = item.tensor_data.chunk
        rows.append(([key_of(item.index.fqn), offset, size], chunk.offsets, chunk.sizes))
    return table_of(rows)


def table_of(rows: Sequence[tuple[list[int], Sequence[int], Sequence[int]]]) -> bytes:
    """The file of some rows: key, byte and bytes; where each begins; its size."""
    most = max((len(sizes) for _, _, sizes in rows), default=0)
    table = np.array(
        [[*head, *_filled(offsets, most, 0), *_filled(sizes, most, 1)] for head, offsets, sizes in rows], np.int64
    )
    stream = io.BytesIO()
    np.save(stream, table.reshape(len(rows), HEAD + 2 * most), allow_pickle=False)
    return stream.getvalue()


def key_of(name: str) -> int:
    """The number that stands for a tensor's name: of ten thousand names two have the same one in 10^12 checkpoints."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


def pieces_of(
    folder: Folder, manifest: Mapping[str, Any], data: str, rank: int, wanted: Mapping[str, torch.Tensor]
) -> dict[str, list[Mapping[str, Any]]]:
    """The pieces of a checkpoint as far as they are needed to fill the tensors of this rank.

    Raises OSError, and ValueError where a file is none of ours.
    """
    tensors: Mapping[str, Any] = manifest["tensors"]
    found: dict[str, list[Mapping[str, Any]]] = {name: list(entry.get("chunks", ())) for name, entry in tensors.items()}
    ranks = {_rank_of(name): name for name in manifest["files"] if name.startswith(f"{data}/rank-") and _is_index(name)}
    if not ranks:
        return found
    boxes = Boxes(tensors, wanted)
    left = boxes.numbers
    with _uncollected(), ThreadPoolExecutor(READERS) as pool:
        for wave in _waves(boxes.likely(manifest.get("world", len(ranks)), rank), rank, sorted(ranks)):
            names = [ranks[each] for each in wave]
            for name, table in zip(names, pool.map(lambda name: _read(folder, name), names), strict=True):
                left -= boxes.take(table, name.rpartition(".")[0] + ".bin", found)
            if left <= 0:
                break
    return found


class Boxes:
    """What a rank needs: of each tensor the ranges that it holds."""

    def __init__(self, tensors: Mapping[str, Any], wanted: Mapping[str, torch.Tensor]) -> None:
        whole = {
            name: [{"offsets": [0] * len(tensors[name]["size"]), "sizes": tensors[name]["size"]}]
            for name in wanted
            if name in tensors
        }
        # PyTorch knows which ranges any kind of tensor has: read from one piece that is the whole, they are the boxes.
        plan = create_default_local_load_plan(
            {name: wanted[name] for name in whole}, as_metadata({name: tensors[name] for name in whole}, whole)
        )
        listed = sorted(((key_of(each.storage_index.fqn), each) for each in plan.items), key=lambda each: each[0])
        self.names = [item.storage_index.fqn for _, item in listed]
        self.dimensions = {name: len(tensors[name]["size"]) for name in whole}
        most = max(self.dimensions.values(), default=0)
        self.keys = np.array([key for key, _ in listed], np.int64)
        self.begins = np.array([_filled(item.storage_offsets, most, 0) for _, item in listed], np.int64)
        sizes = np.array([_filled(item.lengths, most, 1) for _, item in listed], np.int64)
        self.begins, sizes = self.begins.reshape(len(listed), most), sizes.reshape(len(listed), most)
        self.ends = self.begins + sizes
        self.rows = [(tensors[name]["size"] or [1])[0] for name in self.names]
        self.numbers = int(sizes.prod(1).sum())
        """How many numbers they hold."""

    def likely(self, world: int, rank: int) -> set[int]:
        """The ranks that have them where `world` ranks hold each tensor's rows in even parts; and this one."""
        if not self.keys.size or not self.begins.shape[1]:
            return {rank}
        part = np.maximum(1, -(-np.array(self.rows) // world))
        first, last = self.begins[:, 0] // part, (self.ends[:, 0] - 1) // part
        spans = {(int(a), int(b)) for a, b in zip(first, last, strict=True)}
        return {rank}.union(*(range(a, b + 1) for a, b in spans))

    def take(self, table: np.ndarray, file: str, found: dict[str, list[Mapping[str, Any]]]) -> int:
        """Adds to `found` the pieces of a file that reach into the boxes; how many of the numbers they hold."""
        most, taken = self.begins.shape[1], 0
        here = (table.shape[1] - HEAD) // 2
        offsets, sizes = table[:, HEAD : HEAD + here], table[:, HEAD + here :]
        begins = np.zeros((len(table), max(most, here)), np.int64)
        ends = np.ones_like(begins)
        begins[:, :here], ends[:, :here] = offsets, offsets + sizes
        at = np.searchsorted(self.keys, table[:, 0], "left")
        until = np.searchsorted(self.keys, table[:, 0], "right")
        kept = np.full(len(table), -1)
        for step in range(int((until - at).max(initial=0))):
            rows = np.flatnonzero(at + step < until)
            box = at[rows] + step
            low = np.maximum(begins[rows, :most], self.begins[box])
            high = np.minimum(ends[rows, :most], self.ends[box])
            shared = np.clip(high - low, 0, None).prod(1)
            taken += int(shared.sum())
            kept[rows[shared > 0]] = box[shared > 0]
        rows = np.flatnonzero(kept >= 0)
        places = zip(
            kept[rows].tolist(), table[rows, 1:HEAD].tolist(), offsets[rows].tolist(), sizes[rows].tolist(), strict=True
        )
        for box_of, (offset, size), begin, extent in places:
            name = self.names[box_of]
            count = self.dimensions[name]
            where = {"offsets": begin[:count], "sizes": extent[:count]}
            found[name].append({**where, "file": file, "offset": offset, "bytes": size})
        return taken


def as_metadata(tensors: Mapping[str, Any], pieces: Pieces) -> Metadata:
    """The same as PyTorch Distributed Checkpoint knows it, from a manifest's tensors and their pieces."""
    metadata = Metadata(state_dict_metadata={})
    for name, entry in tensors.items():
        chunks = [ChunkStorageMetadata(torch.Size(each["offsets"]), torch.Size(each["sizes"])) for each in pieces[name]]
        properties = TensorProperties(dtype=getattr(torch, entry["dtype"]))
        metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, torch.Size(entry["size"]), chunks)
    return metadata


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the garbage collector, which looks at all pieces again and again: 16 s of three million, and 6 s without."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _waves(likely: set[int], rank: int, ranks: list[int]) -> Iterator[list[int]]:
    """The ranks whose files are read together: the likely ones, and then all others, the nearest to this one first."""
    yield [each for each in ranks if each in likely]
    others = sorted((each for each in ranks if each not in likely), key=lambda each: abs(each - rank))
    at, count = 0, AT_ONCE
    while at < len(others):
        yield others[at : at + count]
        at, count = at + count, 2 * count


def _read(folder: Folder, name: str) -> np.ndarray:
    """The rows of a rank's file; those of 0.3 and before are JSON. Raises ValueError where it is neither."""
    if name.endswith(".npy"):
        return np.asarray(np.load(io.BytesIO(folder.read(name)), allow_pickle=False))
    pieces = folder.read_json(name)
    rows = [
        ([key_of(tensor), each["offset"], each["bytes"]], each["offsets"], each["sizes"])
        for tensor, listed in pieces.items()
        for each in listed
    ]
    return np.asarray(np.load(io.BytesIO(table_of(rows)), allow_pickle=False))


def _is_index(name: str) -> bool:
    return name.endswith((".npy", ".json"))


def _rank_of(name: str) -> int:
    return int(name.rpartition("rank-")[2].partition(".")[0])


def _filled(numbers: Sequence[int], count: int, by: int) -> list[int]:
    return [*numbers, *[by] * (count - len(numbers))]
