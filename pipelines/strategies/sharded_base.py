"""Adapters over a base in shards: the frozen base as under fsdp, its adapters as under ddp.

The base has no gradient, so that all it exchanges are its own values, which no sum can round. Adapters are small: every
worker has them whole, and their gradients are summed in buckets, with train.exact along the one tree. So adapters have the
same bits as those of one worker, which shards that are summed cannot promise.

    strategy = ShardedBase(device, rank=0, world=4, buckets=partial(Buckets, bucket_bytes=25 << 20, extra=4))
    model, optimizer = strategy.prepare(model, build_optimizer)
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from raystride.pipelines.phases import phase
from raystride.pipelines.strategies.ddp import DataParallel
from raystride.pipelines.strategies.fsdp import FullySharded
from raystride.pipelines.strategies.reduction import Buckets
from raystride.pipelines.strategies.spread import own_parameters
from raystride.pipelines.strategies.strategy import Forward, Optimizer, Slotted, give_first_workers_values


class ShardedBase(DataParallel):
    """Frozen parameters in shards, trained ones on every worker; needs an initialised process group."""

    equal_micro_batches = sharded = together = True

    def __init__(
        self,
        device: torch.device,
        rank: int,
        world: int,
        buckets: Callable[[Iterable[nn.Parameter]], Buckets],
        *,
        shard_workers: int = 0,
        reshard: bool = True,
        offload: bool = False,
    ) -> None:
        """Raises ValueError where the workers cannot be cut into groups of `shard_workers`."""
        super().__init__(device, rank, world, buckets)
        shards = shard_workers or world
        if world % shards:
            raise ValueError(f"{world} workers cannot be cut into groups of {shards}: change scaling.shard_workers")
        # A group of their own: buckets leave during a backward that gathers the base.
        if shards == world:
            mesh = DeviceMesh.from_group(dist.new_group(), device.type, mesh_dim_names=("shards",))
        else:
            mesh = init_device_mesh(device.type, (world // shards, shards), mesh_dim_names=("replicas", "shards"))
        # Each matrix is gathered as it is held: of a base in bf16 half the bytes, which are widened for the product.
        rules: dict[str, Any] = {"shard_workers": shards, "reshard": reshard, "offload": offload, "compute": None}
        self._base = FullySharded(device, rank, world, mesh=mesh, **rules)

    def prepare(self, model: nn.Module, make_optimizer: Callable[[nn.Module], Optimizer]) -> tuple[nn.Module, Optimizer]:
        """Gives every worker rank 0's parameters, and keeps this worker's shards of the base."""
        give_first_workers_values(model := model.to(self.device), self.world)
        own = {parameter for _, parameter in own_parameters(model)}
        self._base.prepare(model, lambda _: None, whole=own)
        self._trained = [each for each in model.parameters() if each.requires_grad]
        self._buckets = self._make_buckets(self._trained)
        return model, make_optimizer(model)

    def run(self, model: nn.Module, batches: Sequence[Slotted], forward: Forward) -> None:
        """Forward and backward of a step's micro-batches; those that only keep step with others leave no gradient."""
        real = [batch for batch in batches if not getattr(batch, "empty", False)]
        super().run(model, real, forward)
        for batch in batches[len(real) :]:
            with phase("slot"), forward.inside(batch):
                loss_sum, _ = model(*batch.inputs, batch.targets)
            torch.autograd.grad(loss_sum, self._trained, allow_unused=True)

    def settle(self) -> None:
        """Drops what forwards without a backward have left gathered."""
        self._base.settle()
