"""Index of tensor pieces: in the manifest, or for many ranks in a file each, read only if needed.

A thousand parameters, sharded over a thousand ranks, are millions of pieces: half a gigabyte of JSON that each rank would
read completely. Above `MAX_LISTED_RANKS` ranks each writes the locations of its own pieces, one row of numbers per piece,
and the manifest has only sizes and types. A rank reads the files of the ranks that have its rows if they are cut evenly:
with as many ranks as before its own, with half as many two. If that was not all, it reads further files, neighbouring ranks
first.

    step-00000500/<data>/rank-7.npy           (pieces, 3 + 2 dimensions) int64: hash of the name, byte offset and bytes in
                                              the file, offsets in the tensor, and sizes
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

from raystride.pipelines.system.storage.folder import Folder

MAX_LISTED_RANKS = 256
"""Number of ranks up to which the manifest itself lists all pieces."""
NUM_READERS = 16
FIRST_BATCH = 64
"""Number of files in the first batch that is read before checking for completeness; then twice as many, and so on."""
NUM_KEY_COLUMNS = 3
"""Columns of a row before those of its dimensions."""

Pieces = Mapping[str, Iterable[Mapping[str, Any]]]
"""Pieces by tensor: `offsets` and `sizes` in the tensor, `file`, and `offset` and `bytes` in that file."""


def index_file_name(data: str, rank: int) -> str:
    """Returns the name of a rank's index file."""
    return f"{data}/rank-{rank}.npy"


def encode_index(written_items: Iterable[tuple[WriteItem, int, int]]) -> bytes:
    """Encodes a rank's index file from its written items, each with its byte offset and size."""
    rows: list[tuple[list[int], Sequence[int], Sequence[int]]] = []
    for item, offset, size in written_items:
        assert item.tensor_data is not None
        chunk = item.tensor_data.chunk
        rows.append(([hash_name(item.index.fqn), offset, size], chunk.offsets, chunk.sizes))
    return encode_table(rows)


def encode_table(rows: Sequence[tuple[list[int], Sequence[int], Sequence[int]]]) -> bytes:
    """Encodes rows of (hash, byte offset, bytes), tensor offsets, and sizes as an index file."""
    max_dimensions = max((len(sizes) for _, _, sizes in rows), default=0)
    table = np.array(
        [
            [*head, *_pad_list(offsets, max_dimensions, 0), *_pad_list(sizes, max_dimensions, 1)]
            for head, offsets, sizes in rows
        ],
        np.int64,
    )
    stream = io.BytesIO()
    np.save(stream, table.reshape(len(rows), NUM_KEY_COLUMNS + 2 * max_dimensions), allow_pickle=False)
    return stream.getvalue()


def hash_name(name: str) -> int:
    """Returns a 64-bit hash of a tensor's name: among ten thousand names, two collide in one of 10^12 checkpoints."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


def find_pieces(
    folder: Folder, manifest: Mapping[str, Any], data: str, rank: int, targets: Mapping[str, torch.Tensor]
) -> dict[str, list[Mapping[str, Any]]]:
    """Finds the pieces of a checkpoint that are needed to fill this rank's tensors.

    Raises OSError, and ValueError if a file is not an index.
    """
    tensors: Mapping[str, Any] = manifest["tensors"]
    found: dict[str, list[Mapping[str, Any]]] = {name: list(entry.get("chunks", ())) for name, entry in tensors.items()}
    ranks = {_parse_rank(name): name for name in manifest["files"] if name.startswith(f"{data}/rank-") and _is_index(name)}
    if not ranks:
        return found
    regions = ReadRegions(tensors, targets)
    num_missing = regions.num_elements
    with _without_gc(), ThreadPoolExecutor(NUM_READERS) as pool:
        for batch in _rank_batches(regions.likely_ranks(manifest.get("world", len(ranks)), rank), rank, sorted(ranks)):
            names = [ranks[rank] for rank in batch]
            for name, table in zip(names, pool.map(lambda name: _read_table(folder, name), names), strict=True):
                num_missing -= regions.add_matching_pieces(table, name.rpartition(".")[0] + ".bin", found)
            if num_missing <= 0:
                break
    return found


class ReadRegions:
    """The regions that a rank needs, per tensor."""

    def __init__(self, tensors: Mapping[str, Any], targets: Mapping[str, torch.Tensor]) -> None:
        whole = {
            name: [{"offsets": [0] * len(tensors[name]["size"]), "sizes": tensors[name]["size"]}]
            for name in targets
            if name in tensors
        }
        # PyTorch knows the ranges of any kind of tensor: a load plan from one piece, the full tensor, lists the regions.
        plan = create_default_local_load_plan(
            {name: targets[name] for name in whole}, to_dcp_metadata({name: tensors[name] for name in whole}, whole)
        )
        listed = sorted(((hash_name(item.storage_index.fqn), item) for item in plan.items), key=lambda item: item[0])
        self.names = [item.storage_index.fqn for _, item in listed]
        self.dimensions = {name: len(tensors[name]["size"]) for name in whole}
        max_dimensions = max(self.dimensions.values(), default=0)
        self.keys = np.array([key for key, _ in listed], np.int64)
        self.begins = np.array([_pad_list(item.storage_offsets, max_dimensions, 0) for _, item in listed], np.int64)
        sizes = np.array([_pad_list(item.lengths, max_dimensions, 1) for _, item in listed], np.int64)
        self.begins, sizes = self.begins.reshape(len(listed), max_dimensions), sizes.reshape(len(listed), max_dimensions)
        self.ends = self.begins + sizes
        self.rows = [(tensors[name]["size"] or [1])[0] for name in self.names]
        self.num_elements = int(sizes.prod(1).sum())
        """Number of elements in the regions."""

    def likely_ranks(self, world: int, rank: int) -> set[int]:
        """Returns the ranks that hold the regions if `world` ranks hold each tensor's rows evenly; and this rank."""
        if not self.keys.size or not self.begins.shape[1]:
            return {rank}
        part = np.maximum(1, -(-np.array(self.rows) // world))
        first, last = self.begins[:, 0] // part, (self.ends[:, 0] - 1) // part
        spans = {(int(a), int(b)) for a, b in zip(first, last, strict=True)}
        return {rank}.union(*(range(a, b + 1) for a, b in spans))

    def add_matching_pieces(self, table: np.ndarray, file: str, found: dict[str, list[Mapping[str, Any]]]) -> int:
        """Adds a file's pieces that overlap the regions to `found`; returns the number of overlapping elements."""
        max_dimensions, num_found = self.begins.shape[1], 0
        num_dimensions = (table.shape[1] - NUM_KEY_COLUMNS) // 2
        offsets, sizes = (
            table[:, NUM_KEY_COLUMNS : NUM_KEY_COLUMNS + num_dimensions],
            table[:, NUM_KEY_COLUMNS + num_dimensions :],
        )
        begins = np.zeros((len(table), max(max_dimensions, num_dimensions)), np.int64)
        ends = np.ones_like(begins)
        begins[:, :num_dimensions], ends[:, :num_dimensions] = offsets, offsets + sizes
        first_region = np.searchsorted(self.keys, table[:, 0], "left")
        last_region = np.searchsorted(self.keys, table[:, 0], "right")
        region_of_row = np.full(len(table), -1)
        for step in range(int((last_region - first_region).max(initial=0))):
            rows = np.flatnonzero(first_region + step < last_region)
            box = first_region[rows] + step
            low = np.maximum(begins[rows, :max_dimensions], self.begins[box])
            high = np.minimum(ends[rows, :max_dimensions], self.ends[box])
            shared = np.clip(high - low, 0, None).prod(1)
            num_found += int(shared.sum())
            region_of_row[rows[shared > 0]] = box[shared > 0]
        rows = np.flatnonzero(region_of_row >= 0)
        places = zip(
            region_of_row[rows].tolist(),
            table[rows, 1:NUM_KEY_COLUMNS].tolist(),
            offsets[rows].tolist(),
            sizes[rows].tolist(),
            strict=True,
        )
        for region, (offset, size), begin, extent in places:
            name = self.names[region]
            count = self.dimensions[name]
            location = {"offsets": begin[:count], "sizes": extent[:count]}
            found[name].append({**location, "file": file, "offset": offset, "bytes": size})
        return num_found


def to_dcp_metadata(tensors: Mapping[str, Any], pieces: Pieces) -> Metadata:
    """Converts a manifest's tensors and their pieces to metadata of PyTorch Distributed Checkpoint."""
    metadata = Metadata(state_dict_metadata={})
    for name, entry in tensors.items():
        chunks = [ChunkStorageMetadata(torch.Size(piece["offsets"]), torch.Size(piece["sizes"])) for piece in pieces[name]]
        properties = TensorProperties(dtype=getattr(torch, entry["dtype"]))
        metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, torch.Size(entry["size"]), chunks)
    return metadata


@contextmanager
def _without_gc() -> Iterator[None]:
    """Disables the garbage collector. It would scan all pieces repeatedly: 16 s for three million, 6 s without it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _rank_batches(likely_ranks: set[int], rank: int, ranks: list[int]) -> Iterator[list[int]]:
    """Yields the ranks with index files to read together: the likely ones, then all others, nearest to this one first."""
    yield [other_rank for other_rank in ranks if other_rank in likely_ranks]
    others = sorted(
        (other_rank for other_rank in ranks if other_rank not in likely_ranks), key=lambda other_rank: abs(other_rank - rank)
    )
    first, batch_size = 0, FIRST_BATCH
    while first < len(others):
        yield others[first : first + batch_size]
        first, batch_size = first + batch_size, 2 * batch_size


def _read_table(folder: Folder, name: str) -> np.ndarray:
    """Returns the rows of a rank's index; those of 0.3 and before are JSON. Raises ValueError if it is neither."""
    if name.endswith(".npy"):
        return np.asarray(np.load(io.BytesIO(folder.read(name)), allow_pickle=False))
    pieces = folder.read_json(name)
    rows = [
        ([hash_name(tensor), piece["offset"], piece["bytes"]], piece["offsets"], piece["sizes"])
        for tensor, listed in pieces.items()
        for piece in listed
    ]
    return np.asarray(np.load(io.BytesIO(encode_table(rows)), allow_pickle=False))


def _is_index(name: str) -> bool:
    return name.endswith((".npy", ".json"))


def _parse_rank(name: str) -> int:
    return int(name.rpartition("rank-")[2].partition(".")[0])


def _pad_list(numbers: Sequence[int], count: int, fill: int) -> list[int]:
    return [*numbers, *[fill] * (count - len(numbers))]
