"""Tree reduce and broadcast of Python objects across ranks: no process communicates with more than `BRANCHES` others below
it.

A plain gather connects rank 0 with every other rank, and an all-to-all sends everything to each of them. Here a worker
merges the values from below with its own and passes the result on, so merged values should stay small. Values are pickled:
they come from the run's own workers.

    all_reduce_object({rank: problem}, merge, group)          # on all ranks: the merged values of all ranks
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")
BRANCHES = 16
"""Number of workers directly below one: four levels hold 4,369 ranks, five 69,905."""


def tree_reduce_object(value: T, merge: Callable[[T, T], T], group: dist.ProcessGroup) -> T | None:
    """Returns the merged values of all ranks on rank 0, merged in no fixed order; None elsewhere. All ranks of the group
    call it.

    Raises the group's error if it has broken.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    for child in range(BRANCHES * rank + 1, min(BRANCHES * (rank + 1) + 1, world)):
        box: list[Any] = [None]
        dist.recv_object_list(box, dist.get_global_rank(group, child), group)
        value = merge(value, box[0])
    if rank:
        dist.send_object_list([value], dist.get_global_rank(group, (rank - 1) // BRANCHES), group)
        return None
    return value


def broadcast_object(value: T | None, group: dist.ProcessGroup) -> T:
    """Returns rank 0's value on all ranks."""
    box: list[Any] = [value]
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    return box[0]  # type: ignore[no-any-return]


def all_reduce_object(value: T, merge: Callable[[T, T], T], group: dist.ProcessGroup) -> T:
    """Returns the merged values of all ranks, on all ranks."""
    return broadcast_object(tree_reduce_object(value, merge, group), group)


def first_failure(failures: dict[int, BaseException], world: int) -> BaseException:
    """Returns the first rank's error, with a note of how many ranks failed."""
    rank = min(failures)
    failures[rank].add_note(f"on rank {rank} of {world}, of which {len(failures)} failed")
    return failures[rank]
