"""Our optimiser interface over a ZeRO optimiser of DeepSpeed: state per parameter, in shards that any strategy can read.

DeepSpeed concatenates the parameters of a group and cuts them into one partition per worker (stages 1 and 2), or cuts every
parameter (stage 3). A `Partition` says which elements of a parameter are in this worker's partition. Values are converted to
and from the rows of a DTensor by all-reducing full tensors with each worker's part filled in, one parameter at a time.

    optimizer = Partitions(engine.optimizer, rule, rank, world, device, update)
    optimizer.state(parameter)["master"]                       # a DTensor of the parameter's full shape
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, zeros

from raystride.pipelines.train.strategies.strategy import Group, full_shape


class UpdateRule(Protocol):
    """The interface of an update rule that DeepSpeed can drive."""

    groups: list[Group]
    """Parameters with their rates and decays."""

    def update(self, learning_rate: float, skip: torch.Tensor | None = None) -> None:
        """Updates the groups' parameters by their gradients; does nothing if `skip` is 1."""
        ...

    def state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Returns the rule's state of a parameter, tensors by name."""
        ...

    def load_state(self, parameter: nn.Parameter, stored: dict[str, torch.Tensor]) -> None:
        """Restores a parameter's state, tensors by name."""
        ...


@dataclass(frozen=True, eq=False)
class Partition:
    """The location of this worker's part of a parameter."""

    flat: nn.Parameter
    """The fp32 partition that contains it."""
    start: int
    """First element in the partition."""
    first: int
    """First element in the parameter."""
    count: int
    """Number of elements; 0: this worker has no part of it."""


class Partitions:
    """An Updater (see `checkpoint.train_state`) over DeepSpeed's partitions."""

    has_masters = True

    def __init__(
        self,
        zero: Any,
        rule: UpdateRule,
        rank: int,
        world: int,
        device: torch.device,
        update: Callable[[float, torch.Tensor | None], None],
    ) -> None:
        self._zero, self._rule, self._device, self._update = zero, rule, device, update
        self._rank, self._world = rank, world
        self._partitions_of = dict(_partitions_of(zero, rank))
        # In main memory: a checkpoint's tensors go there anyway, and a GPU may have no room for them.
        self._mesh = init_device_mesh("cpu", (world,))

    def local_gradients(self) -> list[torch.Tensor]:
        """Returns this worker's gradient partitions, flat vectors: those that are summed and not yet used."""
        # DeepSpeed's optimisers store them differently: stage 1 in bfloat16, offloaded ones, all others.
        if hasattr(self._zero, "fp32_groups_gradient_flat_partition"):
            return list(self._zero.fp32_groups_gradient_flat_partition)
        if getattr(self._zero, "cpu_offload", False) or getattr(self._zero, "offload_optimizer", False):
            return [flat.grad for flat in _flat_partitions(self._zero) if flat.grad is not None]
        return [part for parts in self._zero.averaged_gradients.values() if parts is not None for part in parts]

    def update(self, learning_rate: float, skip: torch.Tensor | None = None) -> None:
        """Lets DeepSpeed's engine update its partitions at this learning rate; does nothing if `skip` (fp32 scalar) is 1."""
        self._update(learning_rate, skip)

    def state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Returns the state of a parameter with its fp32 master, by name and in rows. All workers call it together."""
        partition = self._partitions_of[parameter]
        stored: dict[str, torch.Tensor] = {"master": self._gather_rows(parameter, partition, partition.flat.detach())}
        for key, value in self._rule.state(partition.flat).items():
            stored[key] = self._gather_rows(parameter, partition, value) if value.dim() else value
        return stored

    def empty_state(self, parameter: nn.Parameter, size: list[int] | None, dtype: torch.dtype) -> torch.Tensor:
        """Returns zeros as the target of a checkpoint's load, in main memory: of a size, or rows of a parameter's full
        shape."""
        if size is None:
            return zeros(tuple(full_shape(parameter)), dtype=dtype, device_mesh=self._mesh, placements=[Shard(0)])
        return torch.zeros(size, dtype=dtype)

    @torch.no_grad()
    def load_state(self, parameter: nn.Parameter, stored: dict[str, torch.Tensor]) -> None:
        """Restores a parameter's state; a `master` also becomes its value. All workers call it together."""
        partition = self._partitions_of[parameter]
        state: dict[str, torch.Tensor] = {}
        for key, value in stored.items():
            if key == "master":
                self._set_parameter(parameter, partition, value)
            elif value.dim():
                state[key] = self._rule.state(partition.flat).get(key, torch.zeros_like(partition.flat, requires_grad=False))
                _slice_partition(state[key], partition).copy_(
                    _full_tensor(value).reshape(-1)[partition.first :][: partition.count]
                )
            else:
                state[key] = value.to(partition.flat.device)
        self._rule.load_state(partition.flat, state)

    def _set_parameter(self, parameter: nn.Parameter, partition: Partition, value: torch.Tensor) -> None:
        """Sets a parameter's fp32 value and the copy that the model computes with."""
        full = _full_tensor(value)
        part = full.reshape(-1)[partition.first :][: partition.count]
        _slice_partition(partition.flat.detach(), partition).copy_(part)
        if not hasattr(parameter, "ds_tensor"):
            parameter.copy_(full)
            return
        parameter.ds_tensor.detach().reshape(-1)[: partition.count].copy_(part)
        if parameter.numel():  # a small one, which DeepSpeed does not partition
            parameter.copy_(full)

    def _gather_rows(self, parameter: nn.Parameter, partition: Partition, flat: torch.Tensor) -> DTensor:
        """Gathers a parameter from the workers' partitions; returns this worker's rows as a DTensor."""
        full = torch.zeros(full_shape(parameter), dtype=flat.dtype, device=self._device)
        full.view(-1)[partition.first :][: partition.count].copy_(_slice_partition(flat, partition))
        if self._world > 1:
            # Summed as integers: no rounding, and a zero keeps its sign.
            dist.all_reduce(full.view(torch.int32))
        rows = full.chunk(self._world)
        own = rows[self._rank] if self._rank < len(rows) else full[:0]
        return DTensor.from_local(
            own.to("cpu", copy=True), self._mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride()
        )


def _full_tensor(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _slice_partition(flat: torch.Tensor, partition: Partition) -> torch.Tensor:
    return flat[partition.start : partition.start + partition.count]


def _flat_partitions(zero: Any) -> list[nn.Parameter]:
    """Returns this worker's fp32 partitions: of stage 3, of stages 1 and 2, or of stage 1 in bfloat16."""
    names = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
    return next(list(getattr(zero, name)) for name in names if hasattr(zero, name))


def _partitions_of(zero: Any, rank: int) -> Iterator[tuple[nn.Parameter, Partition]]:
    """Yields each parameter with its location in this worker's partitions."""
    flats = _flat_partitions(zero)
    if hasattr(zero, "fp16_groups"):
        for parameter in (parameter for group in zero.fp16_groups for parameter in group):
            number, start, count = zero.grad_position[zero.get_param_id(parameter)]
            first = count * rank
            yield parameter, Partition(flats[number], start, first, max(0, min(count, parameter.ds_numel - first)))
        return
    groups = zero.bit16_groups if hasattr(zero, "bit16_groups") else zero.bf16_groups
    for flat, group in zip(flats, groups, strict=True):
        for parameter in group:
            mapping = parameter._hp_mapping
            if mapping is None:
                yield parameter, Partition(flat, 0, 0, 0)
            else:
                address = mapping.hp_fragment_address
                yield parameter, Partition(flat, address.start, mapping.lp_fragment_address.start, address.numel)
