"""What of a whole network a worker's model is: which parameters there are in all, and which part of each lies here.

Whoever saves, loads or hashes parameters asks this of a model; one that is whole has nothing to say.

    spread = spread_of(model)                                 # None: every parameter is here
    for name, value in whole_values(model, optimizer): ...    # all of them, one by one, on every worker
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from raystride.model.cut import Cut


class Holds(Protocol):
    """An optimiser that may hold parameters in full itself; see `train.optimizer`."""

    def state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]: ...


@dataclass
class Spread:
    """A network over several workers, as one of them sees it."""

    shapes: Mapping[str, tuple[int, ...]]
    """Of all parameters of the whole network, in its order, tied ones once."""
    modules: list[str]
    """Names of all its modules, in its order."""
    cuts: Mapping[str, Cut]
    """Of the parameters of which a part is here; one that has no cut is whole."""
    gives: set[str] = field(default_factory=set)
    """The parameters whose part here is told to the others; of several workers with the same part, one tells it."""

    @property
    def count(self) -> int:
        """Numbers in all parameters."""
        return sum(map(math.prod, self.shapes.values()))


def spread_of(model: nn.Module) -> Spread | None:
    """What of a whole network a model is; None: all of it, or shards that know it themselves."""
    return getattr(model, "spread", None)


def parameters_in(model: nn.Module) -> int:
    """Numbers in all parameters of the whole network of which this is a part."""
    if spread := spread_of(model):
        return spread.count
    # What DeepSpeed's stage 3 has partitioned shows its whole shape there alone.
    return sum(math.prod(getattr(each, "ds_shape", each.shape)) for each in model.parameters())


def own_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """What is a run's own, by name: parameters that it trains, and those that are to be kept with them (`kept`).

    All of a network but the frozen base of adapters.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or getattr(parameter, "kept", False):
            yield name, parameter


def whole_values(model: nn.Module, optimizer: Holds | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Each own parameter's name and whole value by name, master copies where there are any; all workers go through it."""

    def value(parameter: nn.Parameter) -> torch.Tensor:
        held = parameter.detach()
        return held if optimizer is None else optimizer.state(parameter).get("master", held)

    return gathered(model, value)


def whole_gradients(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter's name and whole gradient by name, after it was reduced; all workers go through it."""
    return gathered(model, lambda each: torch.zeros_like(each) if each.grad is None else each.grad)


def whole_base(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Each frozen parameter's name and whole value by name; all workers go through it."""
    return gathered(model, lambda each: each.detach(), own=False)


def gathered(
    model: nn.Module, of: Callable[[nn.Parameter], torch.Tensor], *, own: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Something of each parameter's shape, by name and whole; `of` says what this worker's part of it is.

    `own`: of the run's own parameters, else of all others.
    """
    spread = spread_of(model)
    here = dict(model.named_parameters())
    left_out = here.keys() - dict(own_parameters(model)).keys() if own else dict(own_parameters(model)).keys()
    for name in sorted((here if spread is None else spread.shapes).keys() - left_out):
        held = of(here[name]) if name in here else None
        held = held.full_tensor() if hasattr(held, "full_tensor") else held  # type: ignore[union-attr]
        yield name, held if spread is None else _whole(spread, name, held)  # type: ignore[misc]


def _whole(spread: Spread, name: str, held: torch.Tensor | None) -> torch.Tensor:
    """A whole parameter out of the workers' parts."""
    kinds = torch.tensor([0 if held is None else held.element_size()], dtype=torch.int64)
    device = None if held is None else held.device
    dist.all_reduce(kinds := kinds.to(_device(device)), dist.ReduceOp.MAX)
    dtype = torch.bfloat16 if int(kinds) == 2 else torch.float32
    whole = torch.zeros(spread.shapes[name], dtype=dtype, device=kinds.device)
    if held is not None and name in spread.gives:
        cut = spread.cuts.get(name, Cut(tuple(whole.shape), 0, (range(whole.shape[0]),)))
        done = 0
        for each in cut.ranges:
            whole.narrow(cut.dimension, each.start, len(each)).copy_(held.narrow(cut.dimension, done, len(each)))
            done += len(each)
    # As whole numbers, whose sum with zeros keeps every bit; a sum of numbers would lose the sign of -0.
    bits = whole.view(torch.int32 if dtype == torch.float32 else torch.int16)
    total = bits if bits.dtype == torch.int32 else bits.int()
    dist.all_reduce(total)
    return total.to(bits.dtype).view(dtype)


def _device(known: torch.device | None) -> torch.device:
    if known is not None:
        return known
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")
