"""Mesh coordinates of ranks, for models that are distributed in several ways at once.

Workers = pipeline x replicas x shards x expert x context x tensor, the last of these innermost: neighbours, which mostly
share a machine, communicate most. The workers with the same replica and shard compute a slot together and are a group;
groups share out the slots of a step, as single workers do without a mesh. Order, plan and audit see groups only.

    mesh = Mesh(pipeline=2, replicas=2, tensor=2)
    mesh.workers, mesh.groups, mesh.coordinates(5).tensor     # 8, 2, 1
"""

from collections.abc import Iterator
from dataclasses import dataclass

from raystride.pipelines.config.run import ScalingConfig

NAMES = ("pipeline", "replicas", "shards", "expert", "context", "tensor")
"""Dimension names of the `torch.distributed.DeviceMesh`."""


@dataclass(frozen=True)
class Coordinates:
    """A worker's index along each dimension of a mesh."""

    pipeline: int
    replica: int
    shard: int
    expert: int
    context: int
    tensor: int

    @property
    def numbers(self) -> tuple[int, ...]:
        """Indices in the order of `NAMES`."""
        return (self.pipeline, self.replica, self.shard, self.expert, self.context, self.tensor)


@dataclass(frozen=True)
class Mesh:
    """The size of a mesh along each dimension."""

    pipeline: int = 1
    replicas: int = 1
    shards: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes in the order of `NAMES`."""
        return (self.pipeline, self.replicas, self.shards, self.expert, self.context, self.tensor)

    @property
    def group_workers(self) -> int:
        """Number of workers that compute a slot together."""
        return self.pipeline * self.expert * self.context * self.tensor

    @property
    def groups(self) -> int:
        """Number of groups, which share out the slots."""
        return self.replicas * self.shards

    @property
    def workers(self) -> int:
        """Number of all workers."""
        return self.group_workers * self.groups

    def coordinates(self, rank: int) -> Coordinates:
        """Returns the coordinates of a rank."""
        numbers = []
        for size in reversed(self.sizes):
            rank, index = divmod(rank, size)
            numbers.append(index)
        return Coordinates(*reversed(numbers))

    def rank(self, coordinates: Coordinates) -> int:
        """Returns the rank at some coordinates."""
        rank_of_coordinates = 0
        for size, index in zip(self.sizes, coordinates.numbers, strict=True):
            rank_of_coordinates = rank_of_coordinates * size + index
        return rank_of_coordinates

    def group(self, coordinates: Coordinates) -> int:
        """Returns the index of the group at some coordinates."""
        return coordinates.replica * self.shards + coordinates.shard

    def groups_along(self, *dimensions: str) -> Iterator[list[int]]:
        """Yields sets of ranks that differ along the given dimensions only, each in order; every rank is in one set."""
        sets: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.workers):
            numbers = self.coordinates(rank).numbers
            key = tuple(index for name, index in zip(NAMES, numbers, strict=True) if name not in dimensions)
            sets.setdefault(key, []).append(rank)
        yield from sets.values()

    def __str__(self) -> str:
        parts = [f"{name} {size}" for name, size in zip(NAMES, self.sizes, strict=True) if size > 1]
        return ", ".join(parts) or "one worker"


def build_mesh(scaling: ScalingConfig, workers: int) -> Mesh:
    """Builds the mesh of `workers`. Raises ValueError if they cannot be cut into groups, or groups into shards."""
    num_groups, remainder = divmod(workers, scaling.group)
    if remainder or not num_groups:
        raise ValueError(f"{workers} workers cannot be cut into groups of {scaling.group}: change scaling.workers")
    shards = (scaling.shard_workers or num_groups) if scaling.strategy == "fsdp" else 1
    if num_groups % shards:
        raise ValueError(f"{num_groups} groups of workers cannot be cut into sets of {shards}: change scaling.shard_workers")
    return Mesh(scaling.pipeline, num_groups // shards, shards, scaling.expert, scaling.context, scaling.tensor)
