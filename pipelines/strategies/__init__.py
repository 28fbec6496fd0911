"""How a model is spread over workers: a small protocol and a file each for what can stand behind it.

strategy   the protocol, and `Single` for one worker
ddp        every worker holds the whole model; gradients are summed over all
reduction  the buckets in which they are summed
sharded_base  adapters over a frozen base in shards
sharded    what the next two have in common
fsdp       parameters, gradients and optimiser state in shards (FSDP2)
deepspeed  the same by DeepSpeed's ZeRO, stage by stage
partitions what DeepSpeed's optimisers hold, in the form of ours
meshed     a slot by several workers: tensor, pipeline and context parallelism; see `mesh`
exact      buckets whose sums have the same bits for any number of workers, along a `tree` over the slots
recompute  what is computed again in backward, or compiled
"""

from functools import partial
from typing import TYPE_CHECKING

from raystride.pipelines.strategies.measured import LOSS, OUT_OF_TIME, STOP, SUMMED, TARGETS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch
    from torch import nn

    from raystride.pipelines.config import Config
    from raystride.pipelines.strategies.reduction import Buckets
    from raystride.pipelines.strategies.strategy import Strategy

__all__ = ["LOSS", "OUT_OF_TIME", "STOP", "SUMMED", "TARGETS", "build_strategy"]


def build_strategy(config: "Config", *, device: "torch.device", rank: int, world: int) -> "Strategy":
    """The strategy that `scaling.strategy` names; `auto` is `single` for one worker and `ddp` for several."""
    scaling, train = config.scaling, config.train
    if scaling.group > 1:
        from raystride.pipelines.strategies.meshed import Meshed

        return Meshed(scaling, train, device, rank, world)
    if scaling.strategy == "fsdp" and config.lora.rank:
        from raystride.pipelines.strategies.sharded_base import ShardedBase

        return ShardedBase(
            device,
            rank,
            world,
            _buckets(config, rank, world),
            shard_workers=scaling.shard_workers,
            reshard=scaling.reshard,
            offload=scaling.offload,
        )
    if scaling.strategy == "fsdp":
        import torch

        from raystride.pipelines.strategies.fsdp import FullySharded

        return FullySharded(
            device,
            rank,
            world,
            shard_workers=scaling.shard_workers,
            reshard=scaling.reshard,
            offload=scaling.offload,
            compute=torch.bfloat16 if train.precision == "pure_bf16" else torch.float32,
        )
    if scaling.strategy == "deepspeed":
        from raystride.pipelines.strategies.deepspeed import ZeRO

        return ZeRO(
            device,
            rank,
            world,
            stage=scaling.zero,
            bucket_bytes=int(scaling.bucket_mib * 2**20),
            offload=scaling.offload,
            precision=train.precision,
        )
    if train.exact or world > 1:
        from raystride.pipelines.strategies.ddp import DataParallel

        return DataParallel(device, rank, world, _buckets(config, rank, world))
    from raystride.pipelines.strategies.strategy import Single

    return Single(device)


def _buckets(config: "Config", rank: int, world: int) -> "Callable[[Iterable[nn.Parameter]], Buckets]":
    """What makes the buckets in which gradients are summed: with train.exact along the one tree."""
    bytes_each = int(config.scaling.bucket_mib * 2**20)
    if not config.train.exact:
        from raystride.pipelines.strategies.reduction import Buckets

        return partial(Buckets, bucket_bytes=bytes_each, extra=len(SUMMED))
    from raystride.pipelines.feed.plan import share
    from raystride.pipelines.strategies.exact import ExactBuckets

    shares = [share(config.train.slots, each, world) for each in range(world)]
    return partial(ExactBuckets, bucket_bytes=bytes_each, extra=len(SUMMED), shares=shares, rank=rank)
