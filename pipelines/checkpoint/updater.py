"""The interface of an optimiser to checkpoints and the training loop.

updater.update(learning_rate)                             # one step, in place
updater.state(parameter)                                  # {"exp_avg": tensor, ...}: its state in a checkpoint
"""

from typing import Protocol

import torch
from torch import nn

State = dict[nn.Parameter, dict[str, torch.Tensor]]
Group = tuple[list[nn.Parameter], float]
"""Parameters and their weight decay."""


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

    def empty_state(self, parameter: nn.Parameter, like_parameter: bool, dtype: torch.dtype) -> torch.Tensor:
        """Returns zeros as the target of a checkpoint's load: with a parameter's size and sharding, or a scalar."""
        ...

    def load_state(self, parameter: nn.Parameter, stored: dict[str, torch.Tensor]) -> None:
        """Restores a parameter's state; a `master` also becomes the parameter's value."""
        ...


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this worker's shard of a DTensor, else the tensor itself; call it without gradients."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()
