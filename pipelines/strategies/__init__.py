"""How a model is spread over workers: a small protocol and a file each for what can stand behind it.

strategy   the protocol, and `Single` for one worker
ddp        every worker holds the whole model; gradients are summed over all
reduction  the buckets in which they are summed
exact      buckets whose sums have the same bits for any number of workers, along a `tree` over the slots
memory     bytes a worker will need, told beforehand; needs no PyTorch, which the driver does without
"""

from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from pipelines.strategies.strategy import Strategy

EXTRA = 4
"""Numbers that travel with the gradients; see `train.step`."""


def build_strategy(
    kind: str, *, device: "torch.device", rank: int, world: int, bucket_mib: float, exact_slots: int = 0
) -> "Strategy":
    """The strategy that `scaling.strategy` names; `auto` is `single` for one worker and `ddp` for several.

    `exact_slots`: the slots of a step where `train.exact` asks for one order of addition, else 0.
    """
    bucket_bytes = int(bucket_mib * 2**20)
    if exact_slots:
        from pipelines.feed.plan import share
        from pipelines.strategies.ddp import DataParallel
        from pipelines.strategies.exact import ExactBuckets

        shares = [share(exact_slots, each, world) for each in range(world)]
        buckets = partial(ExactBuckets, bucket_bytes=bucket_bytes, extra=EXTRA, shares=shares, rank=rank)
        return DataParallel(device, rank, world, buckets)
    if world > 1 and kind in ("auto", "ddp"):
        from pipelines.strategies.ddp import DataParallel
        from pipelines.strategies.reduction import Buckets

        return DataParallel(device, rank, world, partial(Buckets, bucket_bytes=bucket_bytes, extra=EXTRA))
    from pipelines.strategies.strategy import Single

    return Single(device)
