"""Which rank wrote which piece of which tensor: in the manifest, or of many ranks in a file each, read as far as needed.

A thousand parameters, sharded over a thousand ranks, are millions of pieces: half a gigabyte of JSON that each rank would
read whole. Above `MOST_LISTED` ranks each writes where its own pieces lie, and the manifest has sizes and types alone. A
rank that goes on with as many ranks as before finds what it needs in its own file.

    step-00000500/<data>/rank-7.json          {"model.head.weight": [{"offsets": [0, 0], "sizes": [8, 64], "offset": ...}]}
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor

from raystride.pipelines.files import Folder

MOST_LISTED = 256
"""Ranks up to which the manifest itself says where pieces lie."""
READERS = 16

Pieces = Mapping[str, Iterable[Mapping[str, Any]]]
"""By tensor, its pieces: `offsets` and `sizes` in the tensor, `file`, and `offset` and `bytes` in that file."""


def index_name(data: str, rank: int) -> str:
    """The file in which a rank says where its pieces lie."""
    return f"{data}/rank-{rank}.json"


def index_of(placed: Iterable[tuple[WriteItem, int, int]]) -> bytes:
    """What a rank's file holds, of what it wrote: each item with the byte at which it begins, and its bytes."""
    pieces: dict[str, list[dict[str, Any]]] = {}
    for item, offset, size in placed:
        assert item.tensor_data is not None
        chunk = item.tensor_data.chunk
        place = {"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), "offset": offset, "bytes": size}
        pieces.setdefault(item.index.fqn, []).append(place)
    return json.dumps(pieces, separators=(",", ":")).encode()


def pieces_of(
    folder: Folder, manifest: Mapping[str, Any], data: str, rank: int, wanted: Mapping[str, torch.Tensor]
) -> dict[str, list[Mapping[str, Any]]]:
    """The pieces of a checkpoint as far as they are needed to fill the tensors of this rank.

    Raises OSError, and ValueError where a file is none of ours.
    """
    tensors: Mapping[str, Any] = manifest["tensors"]
    found: dict[str, list[Mapping[str, Any]]] = {name: list(entry.get("chunks", ())) for name, entry in tensors.items()}
    names = [name for name in manifest["files"] if name.startswith(f"{data}/rank-") and name.endswith(".json")]
    own = index_name(data, rank)
    if own in names:
        names.remove(own)
        _add(found, _read(folder, own))
        if _fills(tensors, found, wanted):
            return found
    with ThreadPoolExecutor(READERS) as pool:
        for pieces in pool.map(lambda name: _read(folder, name), names):
            _add(found, pieces)
    return found


def as_metadata(tensors: Mapping[str, Any], pieces: Pieces) -> Metadata:
    """The same as PyTorch Distributed Checkpoint knows it, from a manifest's tensors and their pieces."""
    metadata = Metadata(state_dict_metadata={})
    for name, entry in tensors.items():
        chunks = [ChunkStorageMetadata(torch.Size(each["offsets"]), torch.Size(each["sizes"])) for each in pieces[name]]
        properties = TensorProperties(dtype=getattr(torch, entry["dtype"]))
        metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, torch.Size(entry["size"]), chunks)
    return metadata


def _read(folder: Folder, name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    file = name.removesuffix(".json") + ".bin"
    content = folder.read_json(name)
    return ((tensor, {**piece, "file": file}) for tensor, pieces in content.items() for piece in pieces)


def _add(found: dict[str, list[Mapping[str, Any]]], pieces: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    for tensor, piece in pieces:
        found[tensor].append(piece)


def _fills(tensors: Mapping[str, Any], found: Pieces, wanted: Mapping[str, torch.Tensor]) -> bool:
    """Whether these pieces hold every number of the tensors, or of this rank's shards of them; pieces never overlap."""
    plan = create_default_local_load_plan(dict(wanted), as_metadata(tensors, found))
    held = sum(math.prod(item.lengths) for item in plan.items)
    own = ((tensor.to_local() if isinstance(tensor, DTensor) else tensor) for tensor in wanted.values())
    return held == sum(tensor.numel() for tensor in own)
