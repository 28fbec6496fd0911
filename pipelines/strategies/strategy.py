"""What the loop asks of a strategy, and the simplest one.

A step is: begin, then backward for every micro-batch, then reduce. After `reduce`, gradients are summed over all workers,
and so is `measured`, a small fp32 vector (loss sum, targets, stop flags) that travels with the gradients at no cost.

    model, optimizer = strategy.prepare(model, build_optimizer)
    strategy.begin()
    strategy.backward(loss, measured, slot=0, last=True)
    measured = strategy.reduce(measured)
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import nn

Optimizer = TypeVar("Optimizer")
"""Whatever updates the parameters; a strategy only makes it, at the right moment."""


class Strategy(Protocol):
    """How a model is spread over the workers of a run."""

    device: torch.device
    rank: int
    world: int

    def prepare(self, model: nn.Module, make_optimizer: Callable[[nn.Module], Optimizer]) -> tuple[nn.Module, Optimizer]:
        """The model on its device, spread out, with its optimiser."""
        ...

    def begin(self) -> None:
        """Clears the gradients of the step before."""
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
        """The tensors in which all gradients lie, for the norm and for scaling in place."""
        ...

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the workers, in place; all of them must call it."""
        ...


class Single:
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
        """Adds the gradients of a micro-batch."""
        loss.backward()

    def reduce(self, measured: torch.Tensor) -> torch.Tensor:
        """Nothing to sum."""
        return measured

    def gradients(self) -> list[torch.Tensor]:
        """The gradients there are."""
        return [p.grad for p in self._parameters if p.grad is not None]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The values themselves."""
        return values
