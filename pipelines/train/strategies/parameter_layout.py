"""Maps a worker's local parameters to those of the full network: names, shapes and local slices.

Code that saves, loads or hashes parameters uses this; an undistributed model has no layout.

    layout = layout_of(model)                                    # None: every parameter is local
    for name, value in full_parameters(model, optimizer): ...    # all of them, one by one, on every worker
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from raystride.model.cut import Cut


class StatefulOptimizer(Protocol):
    """An optimiser that may hold master copies of parameters; see `train.optimizer`."""

    def state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]: ...


@dataclass
class ParameterLayout:
    """Layout of a network distributed over several workers, as seen by one of them."""

    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of all parameters of the full network, in its order, tied ones once."""
    modules: list[str]
    """Names of all its modules, in its order."""
    cuts: Mapping[str, Cut]
    """Local slices of the partial parameters; a parameter without a cut is complete."""
    owned: set[str] = field(default_factory=set)
    """Parameters that this worker contributes to a gather; of several workers with the same part, one does."""

    @property
    def num_parameters(self) -> int:
        """Number of elements of all parameters."""
        return sum(map(math.prod, self.shapes.values()))


def layout_of(model: nn.Module) -> ParameterLayout | None:
    """Returns the layout of a distributed model; None if it is complete, or sharded as DTensors."""
    return getattr(model, "layout", None)


def count_parameters(model: nn.Module) -> int:
    """Returns the number of elements of all parameters of the full network."""
    if layout := layout_of(model):
        return layout.num_parameters
    # Parameters partitioned by DeepSpeed's stage 3 have their full shape only in `ds_shape`.
    return sum(math.prod(getattr(parameter, "ds_shape", parameter.shape)) for parameter in model.parameters())


def saved_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields the parameters that a run saves, by name: all of a network, also frozen ones, but not the base under adapters.

    Of a network with adapters these are the trained ones, and those marked to be kept with them (`kept`).
    """
    has_base = getattr(model, "has_frozen_base", False)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or not has_base or getattr(parameter, "kept", False):
            yield name, parameter


def saved_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the persistent buffers by name, of a model that `saves_buffers`: a user's own, for instance with BatchNorm."""
    if getattr(model, "saves_buffers", False):
        kept = model.state_dict(keep_vars=True)
        for name, buffer in model.named_buffers():
            if name in kept:
                yield name, buffer


def replicated_state(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yields what forwards may change on each worker by itself: saved buffers, and frozen parameters that are `moving`."""
    for _, buffer in saved_buffers(model):
        yield buffer
    for name in getattr(model, "moving", ()):
        parameter = model.get_parameter(name)
        if not parameter.requires_grad:
            yield parameter.detach()


def full_parameters(model: nn.Module, optimizer: StatefulOptimizer | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields name and full value of each saved parameter, sorted by name, master copies if there are any. Collective."""

    def value(parameter: nn.Parameter) -> torch.Tensor:
        local = parameter.detach()
        return local if optimizer is None else optimizer.state(parameter).get("master", local)

    return gather_tensors(model, value)


def full_base_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields name and full value of each frozen parameter, sorted by name. Collective."""
    return gather_tensors(model, lambda parameter: parameter.detach(), saved=False)


def gather_tensors(
    model: nn.Module, local_value: Callable[[nn.Parameter], torch.Tensor], *, saved: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Gathers a tensor per parameter, by name and in full; `local_value` returns this worker's part of it. Collective.

    `saved`: for the run's saved parameters, else for all others.
    """
    layout = layout_of(model)
    local_parameters = dict(model.named_parameters())
    left_out = (
        local_parameters.keys() - dict(saved_parameters(model)).keys() if saved else dict(saved_parameters(model)).keys()
    )
    for name in sorted((local_parameters if layout is None else layout.shapes).keys() - left_out):
        local = local_value(local_parameters[name]) if name in local_parameters else None
        local = local.full_tensor() if hasattr(local, "full_tensor") else local  # type: ignore[union-attr]
        yield name, local if layout is None else _assemble_parameter(layout, name, local)  # type: ignore[misc]


def _assemble_parameter(layout: ParameterLayout, name: str, local: torch.Tensor | None) -> torch.Tensor:
    """Assembles a full parameter from the workers' parts."""
    element_size = torch.tensor([0 if local is None else local.element_size()], dtype=torch.int64)
    device = None if local is None else local.device
    dist.all_reduce(element_size := element_size.to(_collective_device(device)), dist.ReduceOp.MAX)
    dtype = torch.bfloat16 if int(element_size) == 2 else torch.float32
    whole = torch.zeros(layout.shapes[name], dtype=dtype, device=element_size.device)
    if local is not None and name in layout.owned:
        cut = layout.cuts.get(name, Cut(tuple(whole.shape), 0, (range(whole.shape[0]),)))
        done = 0
        for rows in cut.ranges:
            whole.narrow(cut.dimension, rows.start, len(rows)).copy_(local.narrow(cut.dimension, done, len(rows)))
            done += len(rows)
    # Summed as integers: adding zeros keeps every bit; a float sum would lose the sign of -0.
    bits = whole.view(torch.int32 if dtype == torch.float32 else torch.int16)
    total = bits if bits.dtype == torch.int32 else bits.int()
    dist.all_reduce(total)
    return total.to(bits.dtype).view(dtype)


def _collective_device(device: torch.device | None) -> torch.device:
    if device is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")
