"""State of a run that checkpoints keep: its position and best result so far, and the interface of its optimiser.

state = TrainState(); state.advance(step)
state.to_json()                                           # into the checkpoint's manifest
updater.state(parameter)                                  # {"exp_avg": tensor, ...}: an Updater's state in a checkpoint
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

from raystride.pipelines.data.feed.loader import Step

State = dict[nn.Parameter, dict[str, torch.Tensor]]


class Updater(Protocol):
    """The optimiser interface used by the loop and the checkpoints."""

    has_masters: bool
    """Whether its state has the full-precision value of each parameter, as `master`."""

    def update(self, learning_rate: float, skip: torch.Tensor | None = None) -> None:
        """Updates the parameters that have a gradient, at this learning rate; does nothing if `skip` (fp32 scalar) is 1."""
        ...

    def state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Returns the state of a parameter, by name; empty before the first update. Sharded if the parameter is."""
        ...

    def empty_state(self, parameter: nn.Parameter, size: list[int] | None, dtype: torch.dtype) -> torch.Tensor:
        """Returns zeros as the target of a checkpoint's load, of a size, or as the parameter is and sharded like it."""
        ...

    def load_state(self, parameter: nn.Parameter, stored: dict[str, torch.Tensor]) -> None:
        """Restores a parameter's state; a `master` also becomes the parameter's value."""
        ...


@runtime_checkable
class EvaluatesOthers(Protocol):
    """An optimiser that may evaluate other weights than it trains, averages for instance."""

    evaluates_other_weights: bool
    """Whether it does."""

    def evaluated_weights(self) -> AbstractContextManager[None]:
        """Puts the weights to evaluate into the parameters, and takes them out again bit for bit."""
        ...


@runtime_checkable
class UsersOptimizer(Updater, EvaluatesOthers, Protocol):
    """An optimiser of a user's own, which keeps more than tensors by parameter."""

    def plain_state(self, names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
        """Returns what it keeps besides tensors by parameter."""
        ...

    def attributes(self) -> dict[str, Any]:
        """Returns what lies on the optimiser itself, which no checkpoint holds."""
        ...

    def load_plain_state(self, stored: Mapping[str, Any], names: Mapping[nn.Parameter, str]) -> None:
        """Restores what `plain_state` returned."""
        ...


TRAINED = "trained"
"""The trained weights in a checkpoint, where the evaluated ones are others."""
AVERAGE = "ema"
"""The exponential moving average of a parameter in its state, in fp32."""


def evaluated_weights(optimizer: Updater | None) -> AbstractContextManager[None]:
    """Puts the weights to evaluate into the parameters, where an optimiser trains others."""
    return optimizer.evaluated_weights() if isinstance(optimizer, EvaluatesOthers) else nullcontext()


def empty_state(parameter: nn.Parameter, size: list[int] | None, dtype: torch.dtype) -> torch.Tensor:
    """Returns zeros of a size on a parameter's device, or as the parameter is and sharded like it."""
    if size is None:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return torch.zeros(size, dtype=dtype, device=parameter.device)


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this worker's shard of a DTensor, else the tensor itself; call it without gradients."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()


LINK = ("parent_step", "parent_position", "fed_digest", "saved")
"""Fields that link a checkpoint to its parent; stored in the manifest itself, the digest per rank."""


class SkippedSlot(NamedTuple):
    """A slot skipped by the guard: its samples were not fed."""

    step: int
    slot: int
    position: int
    """Position of its first sample."""
    samples: int


@dataclass
class TrainState:
    """The loop's state. `step` and `position` are those to come next, so a fresh state starts at the beginning."""

    step: int = 0
    """Number of optimiser updates done."""
    position: int = 0
    """Number of samples fed, over all epochs; the next step begins here."""
    tokens_seen: int = 0
    """Number of targets that counted in the loss, over all workers."""
    train_loss: float | None = None
    """Mean loss of the newest logging interval, in nats."""
    interval: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Sum of the losses since a log was due, and number of their targets."""
    val_loss: float | None = None
    """Loss of the newest validation, in nats."""
    best: float | None = None
    """Best value so far of `validation.metric`."""
    best_loss: float | None = None
    """Validation loss there, by which ties are decided; None in checkpoints of 0.3."""
    best_step: int = 0
    """Number of steps done at the best value."""
    worse_validations: int = 0
    """Number of validations since then, for early stopping."""
    seconds: float = 0.0
    """Time spent in training, over all attempts."""
    dropped: list[int] = field(default_factory=list)
    """Numbers of the steps with fed samples but without an update; see `train.guard`."""
    left_out: list[SkippedSlot] = field(default_factory=list)
    """Slots that were not fed."""
    rewinds: int = 0
    """Number of rewinds."""
    loss_scale: tuple[float, int] | None = None
    """Under fp16, the loss scale and the good steps since it changed."""
    loss_seen: list[float] | None = None
    """Running statistics of the loss; see `StepCheck.read_state`."""
    parent_step: int = 0
    """Step of the parent of the next checkpoint ..."""
    parent_position: int = 0
    """... and the position there."""
    fed_digest: int = 0
    """Digest of the samples fed on this rank since the parent; see `feed.order.digest`."""
    saved: bool = False
    """Whether a checkpoint of this very step exists. Another one, after a validation, has the same parent."""

    def advance(self, step: Step) -> None:
        """Counts a finished step: its number, its samples, and the digest of this rank's samples."""
        if self.saved:
            self.parent_step, self.parent_position, self.fed_digest, self.saved = self.step, self.position, 0, False
        self.step = step.number + 1
        self.position = step.position + step.samples
        self.fed_digest = (self.fed_digest + step.digest) % 2**64

    def forget_best(self) -> None:
        """Begins anew with the best result, whose checkpoint a branch does not have."""
        self.best, self.best_loss, self.best_step, self.worse_validations = None, None, 0, 0

    def to_json(self) -> dict[str, Any]:
        """Returns the fields that are equal on every rank, for a checkpoint's manifest."""
        return {key: value for key, value in asdict(self).items() if key not in LINK}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "TrainState":
        """Returns the state from the result of `to_json`, also of another version: unknown fields are ignored."""
        known = {item.name for item in fields(cls)}
        state = cls(**{key: value for key, value in content.items() if key in known})
        state.left_out = [SkippedSlot(*values) for values in state.left_out]
        return state
