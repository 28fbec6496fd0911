"""Who is who among workers over which a model is spread in several ways at once.

Workers = pipeline x replicas x shards x context x tensor, the last of these innermost: neighbours, which mostly share a
machine, are those that exchange most. The workers with the same replica and shard compute a slot together and are a group;
groups share the slots of a step out, as single workers do without a mesh. Order, plan and audit see groups only.

    mesh = Mesh(pipeline=2, replicas=2, tensor=2)
    mesh.workers, mesh.groups, mesh.place(5).tensor           # 8, 2, 1
"""

from collections.abc import Iterator
from dataclasses import dataclass

from raystride.pipelines.config.run import Scaling

NAMES = ("pipeline", "replicas", "shards", "context", "tensor")
"""Of the dimensions of a `torch.distributed.DeviceMesh`."""


@dataclass(frozen=True)
class Coordinates:
    """Where in a mesh a worker stands: a number along each dimension."""

    pipeline: int
    replica: int
    shard: int
    context: int
    tensor: int


@dataclass(frozen=True)
class Mesh:
    """How many workers stand along each dimension."""

    pipeline: int = 1
    replicas: int = 1
    shards: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """In the order of `NAMES`."""
        return (self.pipeline, self.replicas, self.shards, self.context, self.tensor)

    @property
    def group_workers(self) -> int:
        """Workers that compute a slot together."""
        return self.pipeline * self.context * self.tensor

    @property
    def groups(self) -> int:
        """Groups, among which slots are shared out."""
        return self.replicas * self.shards

    @property
    def workers(self) -> int:
        """All of them."""
        return self.group_workers * self.groups

    def place(self, rank: int) -> Coordinates:
        """Where a worker stands."""
        found = []
        for size in reversed(self.sizes):
            rank, at = divmod(rank, size)
            found.append(at)
        return Coordinates(*reversed(found))

    def rank(self, place: Coordinates) -> int:
        """Which worker stands there."""
        found = 0
        numbers = (place.pipeline, place.replica, place.shard, place.context, place.tensor)
        for size, at in zip(self.sizes, numbers, strict=True):
            found = found * size + at
        return found

    def group(self, place: Coordinates) -> int:
        """The number of the group that computes at a place."""
        return place.replica * self.shards + place.shard

    def alike(self, *free: str) -> Iterator[list[int]]:
        """Sets of workers that differ along the dimensions `free` alone, each in their order; every worker is in one."""
        sets: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.workers):
            place = self.place(rank)
            numbers = (place.pipeline, place.replica, place.shard, place.context, place.tensor)
            key = tuple(at for name, at in zip(NAMES, numbers, strict=True) if name not in free)
            sets.setdefault(key, []).append(rank)
        yield from sets.values()

    def __str__(self) -> str:
        parts = [f"{name} {size}" for name, size in zip(NAMES, self.sizes, strict=True) if size > 1]
        return ", ".join(parts) or "one worker"


def mesh_of(scaling: Scaling, workers: int) -> Mesh:
    """The mesh of so many workers. Raises ValueError where they cannot be cut into groups, or groups into shards."""
    alone, rest = divmod(workers, scaling.group)
    if rest or not alone:
        raise ValueError(f"{workers} workers cannot be cut into groups of {scaling.group}: change scaling.workers")
    shards = (scaling.shard_workers or alone) if scaling.strategy == "fsdp" else 1
    if alone % shards:
        raise ValueError(f"{alone} groups of workers cannot be cut into sets of {shards}: change scaling.shard_workers")
    return Mesh(scaling.pipeline, alone // shards, shards, scaling.context, scaling.tensor)
