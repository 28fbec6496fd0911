"""How a model is spread over workers: a small protocol and a file each for what can stand behind it.

strategy   the protocol, and `Single` for one worker
ddp        every worker holds the whole model; gradients are summed over all
reduction  the buckets in which they are summed
memory     bytes a worker will need, told beforehand; needs no PyTorch, which the driver does without
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from pipelines.strategies.strategy import Strategy


def build_strategy(kind: str, *, device: "torch.device", rank: int, world: int, bucket_mib: float) -> "Strategy":
    """The strategy that `scaling.strategy` names; `auto` is `single` for one worker and `ddp` for several."""
    if kind == "ddp" or (kind == "auto" and world > 1):
        from pipelines.strategies.ddp import DataParallel

        return DataParallel(device, rank, world, bucket_mib)
    from pipelines.strategies.strategy import Single

    return Single(device)
