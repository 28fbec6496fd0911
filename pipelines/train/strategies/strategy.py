"""The strategy protocol of the training loop, and its simplest implementation.

A step is: zero_gradients, then backward for every micro-batch, then reduce_gradients. Afterwards gradients are summed over
all workers, and so is `measured`, a small fp32 vector (loss sum, targets, stop flags) that travels with them at no extra
cost.

    model, optimizer = strategy.prepare_model(model, build_optimizer)
    strategy.zero_gradients()
    strategy.run_micro_batches(model, step.micro_batches, forward)    # calls strategy.backward for each
    measured = strategy.reduce_gradients(forward.measured)
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import nn

from raystride.pipelines.observability.phases import phase
from raystride.pipelines.train.strategies.parameter_layout import replicated_state

Optimizer = TypeVar("Optimizer")
"""The type of the optimiser; a strategy only decides when it is built."""


class Group(NamedTuple):
    """Parameters with one rate and decay."""

    parameters: list[nn.Parameter]
    decay: float
    lr_ratio: float = 1.0
    """Their learning rate, as a fraction of the schedule's."""


class MicroBatchLike(Protocol):
    """The inputs of one forward and backward; see `feed.loader`."""

    @property
    def slot(self) -> int: ...
    @property
    def slots(self) -> Sequence[tuple[int, int]]: ...
    @property
    def inputs(self) -> tuple[torch.Tensor, ...]: ...
    @property
    def targets(self) -> torch.Tensor: ...


class Forward(Protocol):
    """Context and loss accounting of a micro-batch's forward; see `train.step.StepForward`."""

    measured: torch.Tensor

    def micro_batch_context(self, batch: MicroBatchLike, /) -> AbstractContextManager[None]: ...
    def loss(self, loss_sum: torch.Tensor, counted: torch.Tensor, /) -> torch.Tensor: ...


class Strategy(Protocol):
    """Distributes a model over the workers of a run."""

    device: torch.device
    rank: int
    world: int
    """Rank and number of the units that share out slots: workers, or groups of workers in a mesh."""
    needs_equal_micro_batches: bool
    """Whether micro-batches communicate, so that all workers must run equally many in training and validation."""
    is_slot_per_micro_batch: bool
    """Whether each slot is a micro-batch of its own, an empty one if it has no samples."""
    sharded: bool
    """Whether parameters are fp32 shards that are gathered for computation."""
    is_collective: bool
    """Whether a forward is a collective operation: all workers call the model equally often, and a returned sum may be
    partial."""
    reports_loss: bool
    """Whether this worker's model outputs are counted; of several that computed the same, one reports."""
    is_group_leader: bool
    """Whether this worker is the first of those that compute the same slots together."""
    skips_absent: bool
    """Whether a parameter that no worker's step has used keeps its value, also where gradients are summed in buckets."""

    def build_network(self, make_model: Callable[[], nn.Module]) -> nn.Module:
        """Builds a fresh network, or this worker's part of it, with initial values."""
        ...

    def prepare_model(
        self, model: nn.Module, make_optimizer: Callable[[nn.Module], Optimizer]
    ) -> tuple[nn.Module, Optimizer]:
        """Moves the model to its device, distributes it and builds its optimiser."""
        ...

    def zero_gradients(self) -> None:
        """Clears the gradients of the previous step."""
        ...

    def run_micro_batches(self, model: nn.Module, batches: Sequence[MicroBatchLike], forward: Forward) -> None:
        """Runs forward and backward of a step's micro-batches."""
        ...

    def backward(self, loss: torch.Tensor, measured: torch.Tensor, *, slot: int, last: bool) -> None:
        """Adds the gradients of a micro-batch that begins with `slot`; `last`: it is this worker's last one in the step.

        `measured` is the caller's running sum. A strategy that sums per slot takes it and leaves zeros.
        """
        ...

    def reduce_gradients(self, measured: torch.Tensor) -> torch.Tensor:
        """Finishes summing gradients over the workers; returns the sum of all workers' `measured`."""
        ...

    def local_gradients(self) -> list[torch.Tensor]:
        """Returns the tensors that hold this worker's gradients, for scaling in place."""
        ...

    def gradient_norm(self) -> torch.Tensor:
        """Returns the Euclidean norm of the full gradient, a scalar, equal on every worker; call after
        `reduce_gradients`."""
        ...

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sums `values` over the workers in place; all of them must call it."""
        ...

    def reset_after_eval(self) -> None:
        """Restores the model's state between steps, after forwards without a backward."""
        ...


class LocalStrategy:
    """Base of strategies that run whole micro-batches on each worker, one after another."""

    device: torch.device
    world: int
    needs_equal_micro_batches = is_slot_per_micro_batch = sharded = is_collective = False
    reports_loss = is_group_leader = True
    skips_absent = False
    _parameters: Sequence[nn.Parameter] = ()
    """Those whose gradients a step drops."""

    def build_network(self, make_model: Callable[[], nn.Module]) -> nn.Module:
        """Builds a fresh network without changes."""
        return make_model()

    def zero_gradients(self) -> None:
        """Drops the gradients: the first backward then stores its own instead of adding them to zeros."""
        for parameter in self._parameters:
            parameter.grad = None

    def run_micro_batches(self, model: nn.Module, batches: Sequence[MicroBatchLike], forward: Forward) -> None:
        """Runs forward and backward of a step's micro-batches."""
        for number, batch in enumerate(batches):
            with phase("slot"):
                with forward.micro_batch_context(batch):
                    result = model(*batch.inputs, batch.targets)
                loss = forward.loss(*result)
                with phase("backward"):
                    self.backward(loss, forward.measured, slot=batch.slot, last=number == len(batches) - 1)

    def backward(self, loss: torch.Tensor, measured: torch.Tensor, *, slot: int, last: bool) -> None:
        """Adds the gradients of a micro-batch. Raises NotImplementedError: each strategy implements it."""
        raise NotImplementedError

    def local_gradients(self) -> list[torch.Tensor]:
        """Returns the tensors that hold this worker's gradients. Raises NotImplementedError: each strategy implements it."""
        raise NotImplementedError

    def gradient_norm(self) -> torch.Tensor:
        """Returns the Euclidean norm of the full gradient where each worker holds all of it, a scalar."""
        return global_norm(self.local_gradients(), self.device)

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sums `values` over the workers in place; all of them must call it."""
        if self.world > 1:
            torch.distributed.all_reduce(values)
        return values

    def reset_after_eval(self) -> None:
        """Does nothing: a forward leaves no state that affects the next step."""


class Single(LocalStrategy):
    """Strategy of one worker, without communication."""

    rank = 0
    world = 1

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def prepare_model(
        self, model: nn.Module, make_optimizer: Callable[[nn.Module], Optimizer]
    ) -> tuple[nn.Module, Optimizer]:
        """Moves the model to the device and builds its optimiser."""
        model = model.to(self.device)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        return model, make_optimizer(model)

    def backward(self, loss: torch.Tensor, measured: torch.Tensor, *, slot: int, last: bool) -> None:
        """Adds the gradients of a micro-batch to those of the step."""
        loss.backward()

    def reduce_gradients(self, measured: torch.Tensor) -> torch.Tensor:
        """Returns `measured` unchanged: there is no other worker."""
        return measured

    def local_gradients(self) -> list[torch.Tensor]:
        """Returns the existing gradients, for scaling in place."""
        return [p.grad for p in self._parameters if p.grad is not None]


def global_norm(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Returns the Euclidean norm of all tensors together, a scalar on the device."""
    if not tensors:
        return torch.zeros((), device=device)
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))  # type: ignore[no-any-return]


def broadcast_parameters(model: nn.Module, world: int) -> None:
    """Broadcasts the parameters of rank 0 in place; all workers call it together."""
    if world > 1:
        for parameter in model.parameters():
            torch.distributed.broadcast(parameter.detach(), src=0)


@torch.no_grad()
def average_buffers(model: nn.Module, strategy: Strategy) -> None:
    """Makes equal on all workers, in place, what forwards have changed by the samples of each. Collective.

    Constants keep their bits; of others floating-point and complex ones become the mean, all else rank 0's value.
    """
    buffers = list(replicated_state(model)) if strategy.world > 1 else []
    if not buffers:
        return
    firsts = [buffer.clone(memory_format=torch.contiguous_format) for buffer in buffers]
    for first in firsts:
        torch.distributed.broadcast(_bytes(first), src=0)  # a backend need not know the type
    differs = torch.stack([(_bytes(first) != _bytes(buffer)).any() for first, buffer in zip(firsts, buffers, strict=True)])
    num_different = strategy.all_reduce_sum(differs.float()).tolist()
    for buffer, first, is_different in zip(buffers, firsts, num_different, strict=True):
        if is_different and buffer.is_complex():
            parts = strategy.all_reduce_sum(torch.view_as_real(buffer.to(torch.complex128)).contiguous())
            buffer.copy_(torch.view_as_complex(parts / strategy.world))
        elif is_different and buffer.is_floating_point():
            buffer.copy_(strategy.all_reduce_sum(buffer.to(torch.float64)) / strategy.world)
        else:
            buffer.copy_(first)


def equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two tensors have the same shape and bits, NaN included."""
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def full_shape(parameter: nn.Parameter) -> torch.Size:
    """Returns a parameter's full shape; `shape` is empty after DeepSpeed's stage 3 has partitioned it."""
    return getattr(parameter, "ds_shape", parameter.shape)
