"""Distributed save planning: assigns pieces to writers without any rank seeing all ranks' tensors.

PyTorch Distributed Checkpoint sends each rank's holdings and written pieces to the first rank: for a thousand tensors over a
thousand ranks millions of entries, in one process, at each save. Here each rank knows which pieces of a fully sharded tensor
are its own. Possibly replicated pieces are sent along a tree, once for all ranks with exactly the same ones, and assigned.

    failures = save_by_rank(tensors, writer, group)           # {3: OSError(...)}: by rank, equal on all of them
"""

import hashlib
import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.tensor import DTensor

from raystride.pipelines.system.errors import picklable_error
from raystride.pipelines.train.distributed.collectives import broadcast_object, tree_reduce_object

PieceKey = tuple[str, tuple[int, ...]]
"""A tensor's name, and a piece's offset in it."""
Failures = dict[int, BaseException]


class RankWriter(Protocol):
    """The methods of a rank's `CheckpointWriter` that a save uses; see there."""

    rank: int
    fed_digest: int

    def set_up_storage_writer(self, is_coordinator: bool) -> None:
        """Waits for the tensors."""

    def check_fence(self, fed: Mapping[int, int]) -> None:
        """Stores the ranks' digests. Raises an error if this group may not write here."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        """Writes pieces and returns a future of their locations."""

    def commit(self, tensors: Mapping[str, Any], files: dict[str, Any]) -> None:
        """Writes the manifest."""


@dataclass
class Holdings:
    """Tensors and pieces of some ranks, as sent to rank 0."""

    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Type and size, by name."""
    shared: dict[str, tuple[list[tuple[PieceKey, int]], list[int]]] = field(default_factory=dict)
    """By hash: possibly replicated pieces, with their bytes; and the ranks with exactly these pieces."""
    fed: dict[int, int] = field(default_factory=dict)
    """Digest of fed samples, by rank."""
    failures: Failures = field(default_factory=dict)

    def merge(self, other: "Holdings") -> "Holdings":
        """Merges the holdings of other ranks into these."""
        self.tensors |= other.tensors
        for key, (pieces, ranks) in other.shared.items():
            known = self.shared.setdefault(key, (pieces, []))
            known[1].extend(ranks)
        self.fed |= other.fed
        self.failures |= other.failures
        return self


def save_by_rank(tensors: dict[str, torch.Tensor], writer: RankWriter, group: dist.ProcessGroup) -> Failures:
    """Writes a checkpoint; returns failures by rank, on all ranks. Raises the group's error if it has broken."""
    planner, holdings, own, shared = DefaultSavePlanner(), Holdings(), list[WriteItem](), dict[PieceKey, WriteItem]()
    try:
        writer.set_up_storage_writer(writer.rank == 0)
        planner.set_up_planner(tensors, is_coordinator=writer.rank == 0)
        own, shared = split_own_and_shared(tensors, planner.create_local_plan().items, dist.get_world_size(group))
        holdings = holdings_of(tensors, shared, writer.rank)
    except BaseException as error:
        holdings.failures = {writer.rank: picklable_error(error)}
    holdings.fed = {writer.rank: writer.fed_digest}
    all_holdings = tree_reduce_object(holdings, Holdings.merge, group)
    answer: tuple[Failures, dict[PieceKey, int]] | None = None
    if all_holdings:
        if not all_holdings.failures:
            try:
                writer.check_fence(all_holdings.fed)
            except BaseException as error:
                all_holdings.failures = {0: picklable_error(error)}
        answer = all_holdings.failures, {} if all_holdings.failures else assign_writers(all_holdings.shared.values())
    failures, writers = broadcast_object(answer, group)
    if failures:
        return failures
    written: tuple[Failures, dict[str, Any]] = {}, {}
    try:
        items = own + [item for piece_key, item in shared.items() if writers[piece_key] == writer.rank]
        written = {}, file_entries(writer.write_data(planner.finish_plan(SavePlan(items)), planner).value())
    except BaseException as error:
        written = {writer.rank: picklable_error(error)}, {}
    all_written = tree_reduce_object(written, _merge_results, group)
    if all_written and all_holdings:
        failures, files = all_written
        if not failures:
            try:
                writer.commit(all_holdings.tensors, files)
            except BaseException as error:
                failures = {0: picklable_error(error)}
    return broadcast_object(failures, group)


def split_own_and_shared(
    tensors: Mapping[str, torch.Tensor], items: Iterable[WriteItem], world: int
) -> tuple[list[WriteItem], dict[PieceKey, WriteItem]]:
    """Splits a rank's pieces into those that it must write and those that others may hold as well."""
    own, shared = [], {}
    for item in items:
        name = item.index.fqn
        tensor = tensors[name]
        if not isinstance(tensor, DTensor) or tensor.device_mesh.size() != world:
            shared[(name, tuple(item.index.offset or ()))] = item
        elif _is_writer(name, tensor):
            own.append(item)
    return own, shared


def holdings_of(tensors: Mapping[str, torch.Tensor], shared: Mapping[PieceKey, WriteItem], rank: int) -> Holdings:
    """Returns a rank's holdings for rank 0. Raises TypeError for a value that is not a tensor."""
    holdings = Holdings()
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is no tensor: what a checkpoint holds besides tensors belongs into its header")
        holdings.tensors[name] = {"dtype": str(tensor.dtype).removeprefix("torch."), "size": list(tensor.shape)}
    if shared:
        pieces = [(piece_key, item.tensor_storage_size() or 0) for piece_key, item in shared.items()]
        holdings.shared = {hashlib.sha256(repr(pieces).encode()).hexdigest(): (pieces, [rank])}
    return holdings


def assign_writers(shared: Iterable[tuple[list[tuple[PieceKey, int]], list[int]]]) -> dict[PieceKey, int]:
    """Assigns each piece to one of the ranks that hold it, the one with the least bytes so far."""
    loads, holders, sizes = list[list[tuple[int, int]]](), dict[PieceKey, list[int]](), dict[PieceKey, int]()
    for number, (pieces, ranks) in enumerate(shared):
        loads.append([(0, rank) for rank in sorted(ranks)])
        for piece_key, size in pieces:
            holders.setdefault(piece_key, []).append(number)
            sizes[piece_key] = size
    found = {}
    for piece_key in sorted(holders, key=lambda piece_key: (-sizes[piece_key], piece_key)):
        heap = min((loads[number] for number in holders[piece_key]), key=lambda heap: heap[0])
        load, found[piece_key] = heap[0]
        heapq.heapreplace(heap, (load + sizes[piece_key], found[piece_key]))
    return found


def file_entries(results: Iterable[Any]) -> dict[str, Any]:
    """Returns the manifest's entries of the files with these pieces."""
    files: dict[str, Any] = {}
    for piece in (result.storage_data for result in results):
        files[piece.file] = {"bytes": piece.file_bytes, "sha256": piece.sha256, "ends": piece.ends}
        if piece.index:
            files[piece.index["file"]] = {"bytes": piece.index["bytes"], "sha256": piece.index["sha256"]}
    return files


def _is_writer(name: str, tensor: "DTensor") -> bool:
    """Whether this rank writes its shard: one of the ranks that hold the same, a different one for each tensor."""
    digest_number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    mesh = tensor.device_mesh
    coordinate: Any = mesh.get_coordinate()
    for dimension, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            if coordinate[dimension] != digest_number % mesh.size(dimension):
                return False
            digest_number //= mesh.size(dimension)
    return True


def _merge_results(
    one: tuple[Failures, dict[str, Any]], other: tuple[Failures, dict[str, Any]]
) -> tuple[Failures, dict[str, Any]]:
    return one[0] | other[0], one[1] | other[1]
