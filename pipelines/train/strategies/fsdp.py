"""Fully sharded data parallelism (FSDP2): parameters, gradients and optimiser state are sharded over the workers.

Each item of a `ModuleList`, a block for instance, is gathered for its computation and dropped afterwards; parameters outside
of blocks (embeddings, the last norm, the head) are gathered once a step. In a hybrid mesh, groups of neighbouring workers
hold one replica each (Zhao et al., 2023, 3.2.2; FSDP2's `fully_shard`).

Gradients are sums over the workers, not means, as in all strategies. All workers must run equally many micro-batches: each
gathers parameters.

    strategy = FullySharded(torch.device("cpu"), rank=0, world=4, shard_workers=2)
    model, optimizer = strategy.prepare_model(model, build_optimizer)
"""

from collections import Counter
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

from raystride.pipelines.train.strategies.recompute import model_blocks
from raystride.pipelines.train.strategies.sharded import FORWARD_METHODS, Sharded
from raystride.pipelines.train.strategies.strategy import Optimizer, broadcast_parameters


class FullySharded(Sharded):
    """FSDP2 strategy; it needs an initialised process group, even for one process."""

    def __init__(
        self,
        device: torch.device,
        rank: int,
        world: int,
        *,
        shard_workers: int = 0,
        reshard: bool = True,
        offload: bool = False,
        compute_dtype: torch.dtype | None = torch.float32,
        mesh: DeviceMesh | None = None,
    ) -> None:
        """`compute_dtype`: dtype of gathered parameters, bfloat16 for pure_bf16, None for the dtype of each; shards,
        gradients and sums are fp32.

        `mesh` has the dimensions `replicas` and `shards` over which the model is distributed; None: all workers.
        Raises ValueError if the workers cannot be cut into groups of `shard_workers`.
        """
        super().__init__(device, rank, world)
        self._shards = shard_workers or world
        if world % self._shards:
            raise ValueError(f"{world} workers cannot be cut into groups of {self._shards}: change scaling.shard_workers")
        self._reshard = reshard
        self._offload: OffloadPolicy = CPUOffloadPolicy() if offload else OffloadPolicy()
        self._precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
        self._models: list[nn.Module] = []
        self._mesh = mesh

    def prepare_model(
        self,
        model: nn.Module,
        make_optimizer: Callable[[nn.Module], Optimizer],
        unsharded: Collection[nn.Parameter] = (),
    ) -> tuple[nn.Module, Optimizer]:
        """Broadcasts rank 0's parameters and keeps this worker's shards, except for the `unsharded` parameters."""
        model = model.to(self.device)
        unsharded = {*unsharded, *(parameter for parameter in model.parameters() if hasattr(parameter, "keeps_fp32"))}
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()  # in channels-last order, for instance, which FSDP2 does not shard
        if self._mesh is None:
            broadcast_parameters(model, self.world)
            num_replicas = self.world // self._shards
            shape, names = (
                ((num_replicas, self._shards), ("replicas", "shards")) if num_replicas > 1 else ((self.world,), ("shards",))
            )
            self._mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        places = _count_places(model)
        for block in reversed(model_blocks(model)):  # inner ones first
            # FSDP2 takes no parameter of two groups: one that stands outside of the block, too, goes with the model's.
            if all(places[parameter] == count for parameter, count in _count_places(block).items()):
                self._shard_module(block, unsharded, reshard=self._reshard)
        # Embeddings and head are needed at both ends of a step, so they stay gathered.
        self._shard_module(model, unsharded, reshard=False)
        for module in _fsdp_modules(model):
            # FSDP2 would compute the mean over the workers, with operations that gloo lacks.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        # Generation and translation call these methods, which must gather parameters like `forward`.
        for name in FORWARD_METHODS:
            if hasattr(model, name):
                register_fsdp_forward_method(model, name)
        self._models.append(model)
        # Sharding has replaced the parameters, so the optimiser is built last.
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        return model, make_optimizer(model)

    def _shard_module(self, module: nn.Module, unsharded: Collection[nn.Parameter], *, reshard: bool) -> None:
        fully_shard(
            module,
            mesh=self._mesh,
            reshard_after_forward=reshard,
            mp_policy=self._precision,
            offload_policy=self._offload,
            ignored_params=set(unsharded),
        )

    def backward(self, loss: torch.Tensor, measured: torch.Tensor, *, slot: int, last: bool) -> None:
        """Adds gradients; unsharded gradients stay local until the last micro-batch reduce-scatters them."""
        self.set_last_micro_batch(last=last)
        if last:
            self._start_measured_sum(measured)
        loss.backward()

    def set_last_micro_batch(self, *, last: bool) -> None:
        """Sets whether the next backward is the step's last, which reduce-scatters the gradients."""
        for model in self._models:
            model.set_requires_gradient_sync(last)  # type: ignore[operator]

    def local_gradients(self) -> list[torch.Tensor]:
        """Returns this worker's gradient shards, fp32; summed over the workers after the last micro-batch."""
        return [p.grad.to_local() for p in self._parameters if p.grad is not None]  # type: ignore[attr-defined]

    def gradient_norm(self) -> torch.Tensor:
        """Returns the norm over all shards, equal on every worker."""
        assert self._mesh is not None
        return self._sharded_norm(self._shards, self._mesh.get_group("shards"))

    def reset_after_eval(self) -> None:
        """Drops parameters that forwards without a backward have left gathered."""
        for model in self._models:
            for module in _fsdp_modules(model):
                module.reshard()


def _count_places(model: nn.Module) -> Counter[nn.Parameter]:
    """Counts the modules that have a parameter."""
    return Counter(each for module in model.modules() for each in module._parameters.values() if each is not None)


def _fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield module
