"""Distributed strategies: the protocol, and one module per way to distribute a model over workers.

strategy          the protocol, and `Single` for one worker
ddp               replicated model; gradients are all-reduced in the buckets of `reduction`
fsdp              sharded parameters, gradients and optimiser state (FSDP2)
deepspeed         the same with DeepSpeed's ZeRO;  `partitions`: its optimiser state in our format
sharded           common base of the two;  `sharded_base`: adapters over a sharded frozen base
mesh              one slot on several workers: tensor, pipeline and context parallelism
exact             sums with the same bits on any number of workers, along a `reduction_tree` over the slots
parameter_layout  maps local to global parameters
recompute         activation checkpointing and torch.compile
"""

from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from raystride.pipelines.config import Config, ScalingConfig, TrainConfig
    from raystride.pipelines.train.strategies.reduction import Buckets
    from raystride.pipelines.train.strategies.strategy import Strategy

LOSS, TARGETS, STOP, OUT_OF_TIME = SUMMED = range(4)
"""Indices into `measured` (fp32), the vector that is all-reduced with a step's gradients: the sum of losses, the number of
targets, and the numbers of workers that request to end.
"""
SAVE_REQUEST = 0.5
"""What rank 0 adds to OUT_OF_TIME to ask for a checkpoint. With a place of its own the vector would be longer, the
all-reduce would cut the gradients elsewhere, and runs of 0.3 on three or more workers would go on with other bits.
"""

__all__ = ["LOSS", "OUT_OF_TIME", "SAVE_REQUEST", "STOP", "SUMMED", "TARGETS", "build_strategy"]


def build_strategy(config: "Config", *, device: "torch.device", rank: int, world: int) -> "Strategy":
    """Builds the strategy that `scaling.strategy` names; `auto` is `single` for one worker and `ddp` for several."""
    scaling, train = config.scaling, config.train
    if scaling.group > 1:
        from raystride.pipelines.train.strategies.mesh.mesh_strategy import MeshStrategy

        return MeshStrategy(scaling, train, device, rank, world)
    if scaling.strategy == "fsdp" and config.lora.rank:
        from raystride.pipelines.train.strategies.sharded_base import ShardedBase

        return ShardedBase(
            device,
            rank,
            world,
            _bucket_factory(config.train, config.scaling, rank, world),
            shard_workers=scaling.shard_workers,
            reshard=scaling.reshard,
            offload=scaling.offload,
        )
    if scaling.strategy == "fsdp":
        import torch

        from raystride.pipelines.train.strategies.fsdp import FullySharded

        return FullySharded(
            device,
            rank,
            world,
            shard_workers=scaling.shard_workers,
            reshard=scaling.reshard,
            offload=scaling.offload,
            compute_dtype=torch.bfloat16 if train.precision == "pure_bf16" else torch.float32,
        )
    if scaling.strategy == "deepspeed":
        from raystride.pipelines.train.strategies.deepspeed import ZeRO

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
        from raystride.pipelines.train.strategies.ddp import DataParallel

        return DataParallel(device, rank, world, _bucket_factory(config.train, config.scaling, rank, world))
    from raystride.pipelines.train.strategies.strategy import Single

    return Single(device)


def _bucket_factory(train: "TrainConfig", scaling: "ScalingConfig", rank: int, world: int) -> "Callable[..., Buckets]":
    """Returns a factory of gradient buckets; with train.exact they sum along the reduction tree."""
    bucket_bytes = int(scaling.bucket_mib * 2**20)
    if not train.exact:
        from raystride.pipelines.train.strategies.reduction import Buckets

        return partial(Buckets, bucket_bytes=bucket_bytes, extra=len(SUMMED))
    from raystride.pipelines.data.feed.plan import worker_slots
    from raystride.pipelines.train.strategies.exact import ExactBuckets

    slot_ranges = [worker_slots(train.slots, worker, world) for worker in range(world)]
    return partial(ExactBuckets, bucket_bytes=bucket_bytes, extra=len(SUMMED), slot_ranges=slot_ranges, rank=rank)
