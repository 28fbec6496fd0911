"""Any `torch.optim.Optimizer` as the loop's and the checkpoints' optimiser.

updater = TorchOptimizer(torch.optim.AdamW(module.parameters(), lr=3e-4), learning_rate=3e-4)
updater.update(1e-4)                                      # each group at a third of its own rate
"""

from typing import Any

import torch
from torch import nn

from raystride.pipelines.config import OptimizerConfig, SettingError
from raystride.pipelines.train.own_model.definition import OwnModel, call_users


class TorchOptimizer:
    """An optimiser with the rates of its groups by the schedule. A step that changes nothing costs a read of the device."""

    has_masters = False

    def __init__(self, optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
        """`learning_rate`: that of the settings, by which the groups' rates are multiples."""
        self._optimizer, self._learning_rate = optimizer, learning_rate
        self._factors = [group["lr"] / learning_rate for group in optimizer.param_groups]
        self._group_of = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}

    def update(self, learning_rate: float, skip: torch.Tensor | None = None) -> None:
        """Updates the parameters that have a gradient, at this learning rate; does nothing if `skip` (fp32 scalar) is 1."""
        if skip is not None and float(skip):
            return
        for group, factor in zip(self._optimizer.param_groups, self._factors, strict=True):
            rate = learning_rate * factor
            group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], torch.Tensor) else rate
        self._optimizer.step()

    def state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Returns the tensors and numbers of a parameter's state, by name; empty before its first update."""
        found: dict[str, Any] = self._optimizer.state.get(parameter, {})
        numbers = bool | int | float
        return {
            key: value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)
            for key, value in found.items()
            if isinstance(value, torch.Tensor | numbers)
        }

    def empty_state(self, parameter: nn.Parameter, like_parameter: bool, dtype: torch.dtype) -> torch.Tensor:
        """Returns zeros as the target of a checkpoint's load: with a parameter's size and sharding, or a scalar."""
        if like_parameter:
            return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        return torch.zeros((), dtype=dtype, device=parameter.device)

    def load_state(self, parameter: nn.Parameter, stored: dict[str, torch.Tensor]) -> None:
        """Restores a parameter's state."""
        if not stored:
            return
        group = self._group_of[parameter]
        on_device = group.get("capturable") or group.get("fused")
        self._optimizer.state[parameter] = {
            key: value.cpu() if key == "step" and not on_device else value for key, value in stored.items()
        }


def build_own_optimizer(own_model: OwnModel, settings: OptimizerConfig, model: nn.Module) -> TorchOptimizer:
    """Builds the optimiser that the user's callable returns for a network. Raises SettingError for another result."""
    assert own_model.optimizer is not None
    rate, module = settings.learning_rate, getattr(model, "users_module", model)
    made = call_users("optimizer", own_model.optimizer, module, rate)
    if not isinstance(made, torch.optim.Optimizer):
        rule = "must return a torch.optim.Optimizer"
        name = type(made).__name__
        raise SettingError(f"optimizer {rule}, and returned {name}", setting="optimizer", value=name, allowed=rule)
    if not {id(each) for group in made.param_groups for each in group["params"]} & {
        id(each) for each in module.parameters()
    }:
        rule = "must hold parameters of the model that it is called with"
        raise SettingError(f"optimizer {rule}, and holds none of the model's", setting="optimizer", allowed=rule)
    return TorchOptimizer(made, rate)
