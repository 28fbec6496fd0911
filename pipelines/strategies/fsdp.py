"""Fully sharded data parallelism (FSDP2): parameters, gradients and optimiser state are spread over the workers.

Each item of a `ModuleList`, a block for instance, is gathered when it computes and dropped afterwards; what lies outside of
them (embeddings, the last norm, the head) is gathered once a step. In a hybrid mesh, groups of neighbouring workers hold one
copy each (Zhao et al., 2023, 3.2.2; FSDP2's `fully_shard`).

Gradients are sums over the workers, as everywhere here, not means. All workers must run equally many micro-batches: each
gathers parameters.

    strategy = FullySharded(torch.device("cpu"), rank=0, world=4, shard_workers=2)
    model, optimizer = strategy.prepare(model, build_optimizer)
"""

from collections.abc import Callable, Collection, Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from raystride.pipelines.strategies.recompute import blocks
from raystride.pipelines.strategies.sharded import METHODS, Sharded
from raystride.pipelines.strategies.strategy import Optimizer, give_first_workers_values


class FullySharded(Sharded):
    """Parameters in shards; several processes need an initialised process group, and so does one."""

    def __init__(
        self,
        device: torch.device,
        rank: int,
        world: int,
        *,
        shard_workers: int = 0,
        reshard: bool = True,
        offload: bool = False,
        compute: torch.dtype | None = torch.float32,
        mesh: DeviceMesh | None = None,
    ) -> None:
        """`compute`: what parameters are gathered as, bfloat16 for pure_bf16, None for each as it is held; shards, gradients
        and sums are fp32.

        `mesh` has the dimensions `replicas` and `shards` over which the model here is spread; None: all workers.
        Raises ValueError where the workers cannot be cut into groups of `shard_workers`.
        """
        super().__init__(device, rank, world)
        self._shards = shard_workers or world
        if world % self._shards:
            raise ValueError(f"{world} workers cannot be cut into groups of {self._shards}: change scaling.shard_workers")
        self._reshard = reshard
        self._offload: OffloadPolicy = CPUOffloadPolicy() if offload else OffloadPolicy()
        self._precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
        self._parameters: list[nn.Parameter] = []
        self._models: list[nn.Module] = []
        self._mesh = mesh

    def prepare(
        self,
        model: nn.Module,
        make_optimizer: Callable[[nn.Module], Optimizer],
        whole: Collection[nn.Parameter] = (),
    ) -> tuple[nn.Module, Optimizer]:
        """Gives every worker rank 0's parameters and keeps this worker's shards of them, but for those that stay `whole`."""
        model = model.to(self.device)
        if self._mesh is None:
            give_first_workers_values(model, self.world)
            copies = self.world // self._shards
            shape, names = ((copies, self._shards), ("replicas", "shards")) if copies > 1 else ((self.world,), ("shards",))
            self._mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        for block in blocks(model):
            self._shard(block, whole, reshard=self._reshard)
        # Embeddings and head are needed at both ends of a step, so they stay gathered in between.
        self._shard(model, whole, reshard=False)
        for module in _sharded(model):
            # FSDP2 would take the mean over the workers, and by operations that gloo does not have.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        # Generation and translation compute by these methods, which must gather parameters as `forward` does.
        for name in METHODS:
            if hasattr(model, name):
                register_fsdp_forward_method(model, name)
        self._models.append(model)
        # Sharding has put other parameters in the place of those before, so the optimiser is made last.
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        return model, make_optimizer(model)

    def _shard(self, module: nn.Module, whole: Collection[nn.Parameter], *, reshard: bool) -> None:
        fully_shard(
            module,
            mesh=self._mesh,
            reshard_after_forward=reshard,
            mp_policy=self._precision,
            offload_policy=self._offload,
            ignored_params=set(whole),
        )

    def begin(self) -> None:
        """Drops the gradients of the step before."""
        for parameter in self._parameters:
            parameter.grad = None

    def backward(self, loss: torch.Tensor, measured: torch.Tensor, *, slot: int, last: bool) -> None:
        """Adds gradients; those of whole parameters stay here until the last micro-batch, when they are summed in shards."""
        self.accumulate(last=last)
        if last:
            self._send_measured(measured)
        loss.backward()

    def accumulate(self, *, last: bool) -> None:
        """Says whether the backward that follows is the step's last, when gradients are summed in shards."""
        for model in self._models:
            model.set_requires_gradient_sync(last)  # type: ignore[operator]

    def gradients(self) -> list[torch.Tensor]:
        """This worker's shards of the gradients, fp32; summed over the workers after the last micro-batch."""
        return [p.grad.to_local() for p in self._parameters if p.grad is not None]  # type: ignore[attr-defined]

    def norm(self) -> torch.Tensor:
        """Norm over all shards; every worker gets the same."""
        assert self._mesh is not None
        return self._norm(self._shards, self._mesh.get_group("shards"))

    def settle(self) -> None:
        """Drops what forwards without a backward have left gathered."""
        for model in self._models:
            for module in _sharded(model):
                module.reshard()


def _sharded(model: nn.Module) -> Iterator[FSDPModule]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield module
