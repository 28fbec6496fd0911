"""What a ZeRO optimiser of DeepSpeed holds, as an optimiser of ours: by parameter, in shards that any strategy can read.

DeepSpeed lays the parameters of a group end to end and cuts the row into one partition a worker (stages 1 and 2), or cuts
every parameter (stage 3). A parameter's place says which part of it lies where in this worker's partition. Between these
and the rows of a DTensor values go by a sum of whole tensors, to which each worker brings its part; one parameter at a time.

    optimizer = Partitions(engine.optimizer, rule, rank, world, device, update)
    optimizer.state(parameter)["master"]                       # a DTensor of the parameter's whole shape
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, zeros

from raystride.pipelines.strategies.strategy import whole_shape


class Rule(Protocol):
    """What an update rule must be able to do so that DeepSpeed can use it."""

    groups: list[tuple[list[nn.Parameter], float]]
    """Parameters and their decay."""

    def update(self, learning_rate: float, skip: torch.Tensor | None = None) -> None:
        """Updates the groups' parameters by their gradients; where `skip` is 1, nothing."""
        ...

    def state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """What the rule remembers of a parameter, tensors by name."""
        ...

    def load_state(self, parameter: nn.Parameter, held: dict[str, torch.Tensor]) -> None:
        """Goes on with what such a rule held of a parameter, tensors by name."""
        ...


@dataclass(frozen=True)
class Partition:
    """Where this worker's part of a parameter lies."""

    flat: nn.Parameter
    """The fp32 partition with it."""
    start: int
    """First element in the partition."""
    first: int
    """Which element of the parameter that is."""
    count: int
    """Elements; 0: this worker has no part of it."""


class Partitions:
    """An Updater (see `train.optimizer`) over DeepSpeed's partitions."""

    masters = True

    def __init__(
        self,
        zero: Any,
        rule: Rule,
        rank: int,
        world: int,
        device: torch.device,
        update: Callable[[float, torch.Tensor | None], None],
    ) -> None:
        self._zero, self._rule, self._device, self._update = zero, rule, device, update
        self._rank, self._world = rank, world
        self._places = dict(_places(zero, rank))
        # In main memory: what a checkpoint writes goes there anyway, and there need be no room for it on a GPU.
        self._mesh = init_device_mesh("cpu", (world,))

    def gradients(self) -> list[torch.Tensor]:
        """This worker's partitions of the gradients, flat vectors: those that are summed and not yet used."""
        # Each of DeepSpeed's optimisers has another place for them: stage 1 in bfloat16, offloaded ones, all others.
        if hasattr(self._zero, "fp32_groups_gradient_flat_partition"):
            return list(self._zero.fp32_groups_gradient_flat_partition)
        if getattr(self._zero, "cpu_offload", False) or getattr(self._zero, "offload_optimizer", False):
            return [flat.grad for flat in _flats(self._zero) if flat.grad is not None]
        return [part for parts in self._zero.averaged_gradients.values() if parts is not None for part in parts]

    def update(self, learning_rate: float, skip: torch.Tensor | None = None) -> None:
        """Has DeepSpeed's engine update its partitions at this learning rate; where `skip` (fp32 scalar) is 1, nothing."""
        self._update(learning_rate, skip)

    def state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """All that is remembered of a parameter, its fp32 master too, by name and in rows. All workers call it together."""
        place = self._places[parameter]
        held: dict[str, torch.Tensor] = {"master": self._rows(parameter, place, place.flat.detach())}
        for key, value in self._rule.state(place.flat).items():
            held[key] = self._rows(parameter, place, value) if value.dim() else value
        return held

    def empty_state(self, parameter: nn.Parameter, of_its_size: bool, dtype: torch.dtype) -> torch.Tensor:
        """Zeros into which a checkpoint can be read: rows of a parameter's whole shape, in main memory, or a scalar."""
        if of_its_size:
            return zeros(tuple(whole_shape(parameter)), dtype=dtype, device_mesh=self._mesh, placements=[Shard(0)])
        return torch.zeros((), dtype=dtype)

    @torch.no_grad()
    def load_state(self, parameter: nn.Parameter, held: dict[str, torch.Tensor]) -> None:
        """Goes on with what an optimiser held of a parameter; a `master` becomes its value. All workers call it together."""
        place = self._places[parameter]
        state: dict[str, torch.Tensor] = {}
        for key, value in held.items():
            if key == "master":
                self._put(parameter, place, value)
            elif value.dim():
                state[key] = self._rule.state(place.flat).get(key, torch.zeros_like(place.flat, requires_grad=False))
                _part(state[key], place).copy_(_whole(value).reshape(-1)[place.first :][: place.count])
            else:
                state[key] = value.to(place.flat.device)
        self._rule.load_state(place.flat, state)

    def _put(self, parameter: nn.Parameter, place: Partition, value: torch.Tensor) -> None:
        """Sets a parameter: in fp32, and where the model computes with it."""
        whole = _whole(value)
        part = whole.reshape(-1)[place.first :][: place.count]
        _part(place.flat.detach(), place).copy_(part)
        if not hasattr(parameter, "ds_tensor"):
            parameter.copy_(whole)
            return
        parameter.ds_tensor.detach().reshape(-1)[: place.count].copy_(part)
        if parameter.numel():  # a small one, which DeepSpeed keeps whole
            parameter.copy_(whole)

    def _rows(self, parameter: nn.Parameter, place: Partition, flat: torch.Tensor) -> DTensor:
        """This worker's rows, as a DTensor, of a parameter that the workers' partitions hold piece by piece."""
        whole = torch.zeros(whole_shape(parameter), dtype=flat.dtype, device=self._device)
        whole.view(-1)[place.first :][: place.count].copy_(_part(flat, place))
        if self._world > 1:
            # As integers: no rounding, and a zero keeps its sign.
            dist.all_reduce(whole.view(torch.int32))
        rows = whole.chunk(self._world)
        own = rows[self._rank] if self._rank < len(rows) else whole[:0]
        return DTensor.from_local(
            own.to("cpu", copy=True), self._mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _part(flat: torch.Tensor, place: Partition) -> torch.Tensor:
    return flat[place.start : place.start + place.count]


def _flats(zero: Any) -> list[nn.Parameter]:
    """This worker's fp32 partitions: of stage 3, of stages 1 and 2, of stage 1 in bfloat16."""
    names = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
    return next(list(getattr(zero, name)) for name in names if hasattr(zero, name))


def _places(zero: Any, rank: int) -> Iterator[tuple[nn.Parameter, Partition]]:
    flats = _flats(zero)
    if hasattr(zero, "fp16_groups"):
        for parameter in (parameter for group in zero.fp16_groups for parameter in group):
            number, start, count = zero.grad_position[zero.get_param_id(parameter)]
            first = count * rank
            yield parameter, Partition(flats[number], start, first, max(0, min(count, parameter.ds_numel - first)))
        return
    groups = zero.bit16_groups if hasattr(zero, "bit16_groups") else zero.bf16_groups
    for flat, group in zip(flats, groups, strict=True):
        for parameter in group:
            there = parameter._hp_mapping
            if there is None:
                yield parameter, Partition(flat, 0, 0, 0)
            else:
                address = there.hp_fragment_address
                yield parameter, Partition(flat, address.start, there.lp_fragment_address.start, address.numel)
