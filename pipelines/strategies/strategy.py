"""What the loop asks of a strategy, and the simplest one.

A step is: begin, then backward for every micro-batch, then reduce. After `reduce`, gradients are summed over all workers,
and so is `measured`, a small fp32 vector (loss sum, targets, stop flags) that travels with the gradients at no cost.

    model, optimizer = strategy.prepare(model, build_optimizer)
    strategy.begin()
    strategy.run(model, step.micro_batches, forward)          # calls strategy.backward for each
    measured = strategy.reduce(forward.measured)
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

import torch
from torch import nn

from raystride.pipelines.phases import phase

Optimizer = TypeVar("Optimizer")
"""Whatever updates the parameters; a strategy only makes it, at the right moment."""


class Slotted(Protocol):
    """What one forward and backward takes; see `feed.loader`."""

    @property
    def slot(self) -> int: ...
    @property
    def inputs(self) -> tuple[torch.Tensor, ...]: ...
    @property
    def targets(self) -> torch.Tensor: ...


class Forward(Protocol):
    """What surrounds the forward of a micro-batch, and takes its loss; see `train.step.StepForward`."""

    measured: torch.Tensor

    def inside(self, batch: Slotted, /) -> AbstractContextManager[None]: ...
    def loss(self, loss_sum: torch.Tensor, counted: torch.Tensor, /) -> torch.Tensor: ...


class Strategy(Protocol):
    """How a model is spread over the workers of a run."""

    device: torch.device
    rank: int
    world: int
    """Of how many that share slots out this is which: workers, or in a mesh groups of workers."""
    equal_micro_batches: bool
    """Whether a micro-batch exchanges something, so that all workers must run equally many, in training and validation."""
    every_slot: bool
    """Whether each slot is a micro-batch of its own, an empty one where it has no samples."""
    sharded: bool
    """Whether parameters are shards in fp32, which are gathered to compute."""
    together: bool
    """Whether a forward takes several workers, so that all call the model equally often, and what it returns of a sum may be
    a part of it."""
    counts: bool
    """Whether what this worker's model returns is to be counted: one of several that computed the same does."""
    leads: bool
    """Whether this worker is the first of those that compute the same slots together."""

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        """A fresh network, or this worker's part of it, with its first values."""
        ...

    def prepare(self, model: nn.Module, make_optimizer: Callable[[nn.Module], Optimizer]) -> tuple[nn.Module, Optimizer]:
        """The model on its device, spread out, with its optimiser."""
        ...

    def begin(self) -> None:
        """Clears the gradients of the step before."""
        ...

    def run(self, model: nn.Module, batches: Sequence[Slotted], forward: Forward) -> None:
        """Forward and backward of a step's micro-batches."""
        ...

    def backward(self, loss: torch.Tensor, measured: torch.Tensor, *, slot: int, last: bool) -> None:
        """Adds the gradients of a micro-batch that begins with `slot`; `last`: no other follows here in this step.

        `measured` is what the caller has added up so far. A strategy that sums slot by slot takes it and leaves zeros.
        """
        ...

    def reduce(self, measured: torch.Tensor) -> torch.Tensor:
        """Finishes summing gradients over the workers; returns the sum of every worker's `measured`."""
        ...

    def gradients(self) -> list[torch.Tensor]:
        """The tensors in which this worker's gradients lie, for scaling in place."""
        ...

    def norm(self) -> torch.Tensor:
        """Euclidean norm of the whole gradient, a scalar, the same on every worker; after `reduce`."""
        ...

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the workers, in place; all of them must call it."""
        ...

    def settle(self) -> None:
        """After forwards that no backward follows: brings the model back to what lies between two steps."""
        ...


class OneByOne:
    """What strategies have in common whose workers each compute whole micro-batches, one after another."""

    equal_micro_batches = every_slot = sharded = together = False
    counts = leads = True

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        """A fresh network, as it is made."""
        return make()

    def run(self, model: nn.Module, batches: Sequence[Slotted], forward: Forward) -> None:
        """Forward and backward of a step's micro-batches."""
        for number, batch in enumerate(batches):
            with phase("slot"):
                with forward.inside(batch):
                    result = model(*batch.inputs, batch.targets)
                loss = forward.loss(*result)
                with phase("backward"):
                    self.backward(loss, forward.measured, slot=batch.slot, last=number == len(batches) - 1)

    def backward(self, loss: torch.Tensor, measured: torch.Tensor, *, slot: int, last: bool) -> None:
        """Adds the gradients of a micro-batch. Raises NotImplementedError: each strategy says how."""
        raise NotImplementedError


class Single(OneByOne):
    """One worker: nothing is exchanged."""

    rank = 0
    world = 1

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._parameters: list[nn.Parameter] = []

    def prepare(self, model: nn.Module, make_optimizer: Callable[[nn.Module], Optimizer]) -> tuple[nn.Module, Optimizer]:
        """Moves the model to the device."""
        model = model.to(self.device)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        return model, make_optimizer(model)

    def begin(self) -> None:
        """Drops the gradients: the first backward then hands its own over instead of adding them to zeros."""
        for parameter in self._parameters:
            parameter.grad = None

    def backward(self, loss: torch.Tensor, measured: torch.Tensor, *, slot: int, last: bool) -> None:
        """Adds the gradients of a micro-batch to those of the step."""
        loss.backward()

    def reduce(self, measured: torch.Tensor) -> torch.Tensor:
        """Returns `measured` as it is: there is no other worker whose numbers could be added."""
        return measured

    def gradients(self) -> list[torch.Tensor]:
        """The gradients of the parameters that have one, for scaling in place."""
        return [p.grad for p in self._parameters if p.grad is not None]

    def norm(self) -> torch.Tensor:
        """Euclidean norm of the whole gradient, a scalar."""
        return norm_of(self.gradients(), self.device)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Returns `values` as they are: there is no other worker whose values could be added."""
        return values

    def settle(self) -> None:
        """Nothing to do: a forward leaves nothing behind."""


def norm_of(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Euclidean norm of all tensors together, a scalar; stays on the device."""
    if not tensors:
        return torch.zeros((), device=device)
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))  # type: ignore[no-any-return]


def give_first_workers_values(model: nn.Module, world: int) -> None:
    """Gives every worker the parameters of rank 0, in place; all workers call it together."""
    if world > 1:
        for parameter in model.parameters():
            torch.distributed.broadcast(parameter.detach(), src=0)


def whole_shape(parameter: nn.Parameter) -> torch.Size:
    """A parameter's whole shape, of which `shape` shows nothing once DeepSpeed's stage 3 has partitioned it."""
    return getattr(parameter, "ds_shape", parameter.shape)
