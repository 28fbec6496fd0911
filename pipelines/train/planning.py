"""Who writes which piece of a checkpoint, where the ranks are so many that nobody can look at all of them.

PyTorch Distributed Checkpoint has every rank tell the first what it holds and what it has written: of a thousand tensors
over a thousand ranks millions of entries, in one process, at each save. Here each knows of a tensor that is cut over all
ranks which pieces are its own. What may lie on several is told along a tree, once for all ranks that hold just the same, and
shared out.

    failures = save_by_rank(tensors, writer, group)           # {3: OSError(...)}: by rank, the same on all of them
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

from raystride.pipelines.train.agreement import portable, tell, told

Place = tuple[str, tuple[int, ...]]
"""A tensor's name, and where in it a piece begins."""
Failures = dict[int, BaseException]


class RankWriter(Protocol):
    """What a save asks of a rank's `CheckpointWriter`; see there."""

    rank: int
    fed_digest: int

    def set_up_storage_writer(self, is_coordinator: bool) -> None:
        """Waits for the tensors."""

    def allow(self, fed: Mapping[int, int]) -> None:
        """Notes what the ranks fed. Raises where this group may not write here."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        """Writes pieces, and gives a future of where they lie."""

    def commit(self, tensors: Mapping[str, Any], files: dict[str, Any]) -> None:
        """Writes the manifest."""


@dataclass
class Held:
    """What some ranks hold, as rank 0 must know it."""

    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By name, type and size."""
    shared: dict[str, tuple[list[tuple[Place, int]], list[int]]] = field(default_factory=dict)
    """By hash, pieces that others may hold as well, with their bytes; and the ranks that hold just these."""
    fed: dict[int, int] = field(default_factory=dict)
    """By rank, the digest of what it fed."""
    failures: Failures = field(default_factory=dict)

    def merge(self, other: "Held") -> "Held":
        """Takes in what others hold."""
        self.tensors |= other.tensors
        for key, (pieces, ranks) in other.shared.items():
            known = self.shared.setdefault(key, (pieces, []))
            known[1].extend(ranks)
        self.fed |= other.fed
        self.failures |= other.failures
        return self


def save_by_rank(tensors: dict[str, torch.Tensor], writer: RankWriter, group: dist.ProcessGroup) -> Failures:
    """Writes a checkpoint; what went wrong, by rank, on all ranks. Raises what the group raises where it has broken."""
    planner, held, own, shared = DefaultSavePlanner(), Held(), list[WriteItem](), dict[Place, WriteItem]()
    try:
        writer.set_up_storage_writer(writer.rank == 0)
        planner.set_up_planner(tensors, is_coordinator=writer.rank == 0)
        own, shared = own_and_shared(tensors, planner.create_local_plan().items, dist.get_world_size(group))
        held = held_by(tensors, shared, writer.rank)
    except BaseException as error:
        held.failures = {writer.rank: portable(error)}
    held.fed = {writer.rank: writer.fed_digest}
    everything = told(held, Held.merge, group)
    answer: tuple[Failures, dict[Place, int]] | None = None
    if everything:
        if not everything.failures:
            try:
                writer.allow(everything.fed)
            except BaseException as error:
                everything.failures = {0: portable(error)}
        answer = everything.failures, {} if everything.failures else share_out(everything.shared.values())
    failures, writers = tell(answer, group)
    if failures:
        return failures
    written: tuple[Failures, dict[str, Any]] = {}, {}
    try:
        items = own + [item for place, item in shared.items() if writers[place] == writer.rank]
        written = {}, files_of(writer.write_data(planner.finish_plan(SavePlan(items)), planner).value())
    except BaseException as error:
        written = {writer.rank: portable(error)}, {}
    whole = told(written, _merge, group)
    if whole and everything:
        failures, files = whole
        if not failures:
            try:
                writer.commit(everything.tensors, files)
            except BaseException as error:
                failures = {0: portable(error)}
    return tell(failures, group)


def own_and_shared(
    tensors: Mapping[str, torch.Tensor], items: Iterable[WriteItem], world: int
) -> tuple[list[WriteItem], dict[Place, WriteItem]]:
    """Of a rank's pieces those that are its to write, and those that others may hold as well."""
    own, shared = [], {}
    for item in items:
        name = item.index.fqn
        tensor = tensors[name]
        if not isinstance(tensor, DTensor) or tensor.device_mesh.size() != world:
            shared[(name, tuple(item.index.offset or ()))] = item
        elif _chosen(name, tensor):
            own.append(item)
    return own, shared


def held_by(tensors: Mapping[str, torch.Tensor], shared: Mapping[Place, WriteItem], rank: int) -> Held:
    """What rank 0 must know of what a rank holds. Raises TypeError for what is no tensor."""
    held = Held()
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is no tensor: what a checkpoint holds besides tensors belongs into its header")
        held.tensors[name] = {"dtype": str(tensor.dtype).removeprefix("torch."), "size": list(tensor.shape)}
    if shared:
        pieces = [(place, item.tensor_storage_size() or 0) for place, item in shared.items()]
        held.shared = {hashlib.sha256(repr(pieces).encode()).hexdigest(): (pieces, [rank])}
    return held


def share_out(shared: Iterable[tuple[list[tuple[Place, int]], list[int]]]) -> dict[Place, int]:
    """By piece the rank that writes it: one of those that hold it, and of these the one with the least so far."""
    loads, holders, sizes = list[list[tuple[int, int]]](), dict[Place, list[int]](), dict[Place, int]()
    for number, (pieces, ranks) in enumerate(shared):
        loads.append([(0, rank) for rank in sorted(ranks)])
        for place, size in pieces:
            holders.setdefault(place, []).append(number)
            sizes[place] = size
    found = {}
    for place in sorted(holders, key=lambda place: (-sizes[place], place)):
        heap = min((loads[number] for number in holders[place]), key=lambda heap: heap[0])
        load, found[place] = heap[0]
        heapq.heapreplace(heap, (load + sizes[place], found[place]))
    return found


def files_of(results: Iterable[Any]) -> dict[str, Any]:
    """What the manifest says of the files that these pieces were written into."""
    files: dict[str, Any] = {}
    for piece in (result.storage_data for result in results):
        files[piece.file] = {"bytes": piece.file_bytes, "sha256": piece.sha256}
        if piece.index:
            files[piece.index["file"]] = {"bytes": piece.index["bytes"], "sha256": piece.index["sha256"]}
    return files


def first_failure(failures: Failures, world: int) -> BaseException:
    """What the first rank raised, which says more than all."""
    rank = min(failures)
    failures[rank].add_note(f"on rank {rank} of {world}, of which {len(failures)} failed")
    return failures[rank]


def _chosen(name: str, tensor: "DTensor") -> bool:
    """Whether this rank writes its shard: of the ranks that hold the same one is taken, for each tensor another."""
    spread = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    mesh = tensor.device_mesh
    at: Any = mesh.get_coordinate()
    for dimension, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            if at[dimension] != spread % mesh.size(dimension):
                return False
            spread //= mesh.size(dimension)
    return True


def _merge(one: tuple[Failures, dict[str, Any]], other: tuple[Failures, dict[str, Any]]) -> tuple[Failures, dict[str, Any]]:
    return one[0] | other[0], one[1] | other[1]
