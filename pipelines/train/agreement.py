"""What all workers tell one, and what one tells all, along a tree: no process hears of more than `BRANCHES` others.

A gather has rank 0 connected with every other, and an exchange of all with all gives each of them everything. Here a worker
puts together what those below it have told with its own and passes that on, so what is told by many must put together well.
Values are pickled: they come from the run's own workers.

    put_together({rank: problem}, merge, group)               # on all ranks: what `merge` made of everybody's
"""

import copy
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")
BRANCHES = 16
"""Workers directly below one: four levels hold 4,369 ranks, five 69,905."""


def told(value: T, merge: Callable[[T, T], T], group: dist.ProcessGroup) -> T | None:
    """On rank 0 what `merge` made of everybody's value, in no certain order; None elsewhere. All ranks of the group call it.

    Raises what the group raises where it has broken.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    for below in range(BRANCHES * rank + 1, min(BRANCHES * (rank + 1) + 1, world)):
        box: list[Any] = [None]
        dist.recv_object_list(box, dist.get_global_rank(group, below), group)
        value = merge(value, box[0])
    if rank:
        dist.send_object_list([value], dist.get_global_rank(group, (rank - 1) // BRANCHES), group)
        return None
    return value


def tell(value: T | None, group: dist.ProcessGroup) -> T:
    """Rank 0's value, on all ranks."""
    box: list[Any] = [value]
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    return box[0]  # type: ignore[no-any-return]


def put_together(value: T, merge: Callable[[T, T], T], group: dist.ProcessGroup) -> T:
    """What `merge` made of everybody's value, on all ranks."""
    return tell(told(value, merge, group), group)


def portable(error: BaseException) -> BaseException:
    """An error as it can be told: itself, or its text where it does not survive being pickled."""
    try:
        pickle.dumps(error)
        copy.copy(error)  # is made from the same parts as one that was pickled
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
