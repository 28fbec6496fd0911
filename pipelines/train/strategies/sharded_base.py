"""Adapters over a sharded base: the frozen base as under fsdp, its adapters as under ddp.

The base has no gradient, so only its values are communicated, and no sum rounds them. Adapters are small: every worker holds
them in full, and their gradients are summed in buckets, with train.exact along the reduction tree. So adapters have the same
bits as with one worker, which summed shards cannot guarantee.

    strategy = ShardedBase(device, rank=0, world=4, buckets=partial(Buckets, bucket_bytes=25 << 20, extra=4))
    model, optimizer = strategy.prepare_model(model, build_optimizer)
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from raystride.pipelines.observability.phases import phase
from raystride.pipelines.train.strategies.ddp import DataParallel
from raystride.pipelines.train.strategies.fsdp import FullySharded
from raystride.pipelines.train.strategies.parameter_layout import saved_parameters
from raystride.pipelines.train.strategies.reduction import Buckets
from raystride.pipelines.train.strategies.strategy import Forward, MicroBatchLike, Optimizer, broadcast_parameters


class ShardedBase(DataParallel):
    """Sharded frozen parameters, replicated trained ones; needs an initialised process group."""

    needs_equal_micro_batches = sharded = is_collective = True

    def __init__(
        self,
        device: torch.device,
        rank: int,
        world: int,
        buckets: Callable[..., Buckets],
        *,
        shard_workers: int = 0,
        reshard: bool = True,
        offload: bool = False,
    ) -> None:
        """Raises ValueError if the workers cannot be cut into groups of `shard_workers`."""
        super().__init__(device, rank, world, buckets)
        shards = shard_workers or world
        if world % shards:
            raise ValueError(f"{world} workers cannot be cut into groups of {shards}: change scaling.shard_workers")
        # A separate group: buckets are reduced during a backward that gathers the base.
        if shards == world:
            mesh = DeviceMesh.from_group(dist.new_group(), device.type, mesh_dim_names=("shards",))
        else:
            mesh = init_device_mesh(device.type, (world // shards, shards), mesh_dim_names=("replicas", "shards"))
        # Each matrix is gathered in its storage dtype: half the bytes for a base in bf16, widened for the product.
        rules: dict[str, Any] = {"shard_workers": shards, "reshard": reshard, "offload": offload, "compute_dtype": None}
        self._base = FullySharded(device, rank, world, mesh=mesh, **rules)

    def prepare_model(
        self, model: nn.Module, make_optimizer: Callable[[nn.Module], Optimizer]
    ) -> tuple[nn.Module, Optimizer]:
        """Broadcasts rank 0's parameters and keeps this worker's shards of the base."""
        broadcast_parameters(model := model.to(self.device), self.world)
        trained = {parameter for _, parameter in saved_parameters(model)}
        self._base.prepare_model(model, lambda _: None, unsharded=trained)
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._buckets = self._make_buckets(self._trained)
        return model, make_optimizer(model)

    def run_micro_batches(self, model: nn.Module, batches: Sequence[MicroBatchLike], forward: Forward) -> None:
        """Runs forward and backward of a step's micro-batches; empty ones, run only for lock-step, leave no gradient."""
        real = [batch for batch in batches if not getattr(batch, "empty", False)]
        super().run_micro_batches(model, real, forward)
        for batch in batches[len(real) :]:
            with phase("slot"), forward.micro_batch_context(batch):
                loss_sum, _ = model(*batch.inputs, batch.targets)
            torch.autograd.grad(loss_sum, self._trained, allow_unused=True)

    def reset_after_eval(self) -> None:
        """Drops parameters that forwards without a backward have left gathered."""
        self._base.reset_after_eval()
