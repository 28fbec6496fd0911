"""Any `torch.optim.Optimizer` as the loop's and the checkpoints' optimiser.

updater = TorchOptimizer(torch.optim.AdamW(module.parameters(), lr=3e-4), learning_rate=3e-4)
updater.update(1e-4)                                      # each group at a third of its own rate
"""

import inspect
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from raystride.pipelines.config import OptimizerConfig, SettingError
from raystride.pipelines.train.checkpoint.contents import join_tensors, split_tensors
from raystride.pipelines.train.checkpoint.train_state import TRAINED, empty_state
from raystride.pipelines.train.own_model.definition import OwnModel, call_users

SCHEDULED = ("params", "lr")
"""Keys of a group that the model and the schedule set."""
_OF_EVERY_OPTIMIZER = frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=1.0)))


class TorchOptimizer:
    """An optimiser with the rates of its groups by the schedule. A step that changes nothing costs a read of the device.

    One that trains other weights than it evaluates, as Schedule-Free (Defazio et al., 2024), says so by methods `train` and
    `eval`: checkpoints have the evaluated weights as the model's, and the trained ones beside them.
    """

    has_masters = False

    def __init__(self, optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
        """`learning_rate`: that of the settings, by which the groups' rates are multiples."""
        self._optimizer, self._learning_rate = optimizer, learning_rate
        self._factors = [float(group["lr"]) / learning_rate for group in optimizer.param_groups]
        self._group_of = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
        self.evaluates_other_weights = callable(getattr(optimizer, "train", None)) and callable(
            getattr(optimizer, "eval", None)
        )
        if self.evaluates_other_weights:
            optimizer.train()  # type: ignore[attr-defined]

    @property
    def parameters(self) -> Collection[nn.Parameter]:
        """The parameters that it updates."""
        return self._group_of.keys()

    def update(self, learning_rate: float, skip: torch.Tensor | None = None) -> None:
        """Updates the parameters that have a gradient, at this learning rate; does nothing if `skip` (fp32 scalar) is 1."""
        if skip is not None and float(skip):
            return
        for group, factor in zip(self._optimizer.param_groups, self._factors, strict=True):
            rate = learning_rate * factor
            group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], torch.Tensor) else rate
        self._optimizer.step()

    @contextmanager
    def evaluated_weights(self) -> Iterator[None]:
        """Puts the weights to evaluate into the parameters, and takes them out again bit for bit."""
        if not self.evaluates_other_weights:
            yield
            return
        optimizer: Any = self._optimizer
        trained = {parameter: parameter.detach().clone() for parameter in self._group_of}
        optimizer.eval()
        try:
            yield
        finally:
            optimizer.train()
            with torch.no_grad():
                for parameter, value in trained.items():
                    parameter.copy_(value)

    def state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Returns the tensors of a parameter's state, by name, and its numbers, which 0.3 reads as tensors; empty before its
        first update. Raises SettingError for a tensor that cannot be put together from the workers' shards.
        """
        found: dict[str, Any] = self._optimizer.state.get(parameter, {})
        _, tensors = split_tensors(found)
        numbers = {key: value for key, value in found.items() if isinstance(value, bool | int | float)}
        if hasattr(parameter, "to_local"):
            for key, value in tensors.items():
                if value.dim() and value.shape != parameter.shape:
                    rule = "must keep states of a parameter's shape under fsdp; use scaling.strategy `ddp`"
                    raise SettingError(
                        f"optimizer {rule}: its {key} is {tuple(value.shape)} for a parameter of {tuple(parameter.shape)}",
                        setting="optimizer",
                        value=key,
                        allowed=rule,
                    )
        return tensors | {key: torch.tensor(value, dtype=torch.float64) for key, value in numbers.items()}

    empty_state = staticmethod(empty_state)

    @torch.no_grad()
    def load_state(self, parameter: nn.Parameter, stored: dict[str, torch.Tensor]) -> None:
        """Restores the tensors of a parameter's state."""
        if not stored:
            return
        if TRAINED in stored:
            parameter.copy_(stored.pop(TRAINED))
        group = self._group_of[parameter]
        on_device = group.get("capturable") or group.get("fused")
        self._optimizer.state[parameter] = {
            key: value.cpu() if key == "step" and not on_device else value for key, value in stored.items()
        }

    def plain_state(self, names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
        """Returns what the optimiser keeps besides tensors by parameter: values of its groups, and numbers and lists.

        Raises TypeError, with its place, for a value that is neither a number, a text, a tensor, nor made of these.
        """
        optimizer = self._optimizer
        own = {name: optimizer.state[parameter] for parameter, name in names.items() if parameter in optimizer.state}
        groups = [{key: value for key, value in group.items() if key not in SCHEDULED} for group in optimizer.param_groups]
        return {
            "groups": groups,
            "parameters": {
                name: split_tensors(state, name)[0]
                for name, state in own.items()
                if not all(isinstance(value, torch.Tensor) for value in state.values())
            },
            "shared": {key: value for key, value in optimizer.state.items() if isinstance(key, str)},
        }

    def attributes(self) -> dict[str, Any]:
        """Returns what lies on the optimiser itself, which no checkpoint holds."""
        return {key: value for key, value in vars(self._optimizer).items() if key not in _OF_EVERY_OPTIMIZER}

    def load_plain_state(self, stored: Mapping[str, Any], names: Mapping[nn.Parameter, str]) -> None:
        """Restores what `plain_state` returned, after the tensors. Raises SettingError for another number of groups."""
        optimizer = self._optimizer
        if len(stored["groups"]) != len(optimizer.param_groups):
            rule = f"must have as many groups of parameters as the run's, {len(stored['groups'])}"
            count = len(optimizer.param_groups)
            raise SettingError(f"optimizer {rule}, and has {count}", setting="optimizer", value=count, allowed=rule)
        for group, values in zip(optimizer.param_groups, stored["groups"], strict=True):
            group.update(values)
        for parameter, name in names.items():
            if name in stored["parameters"]:
                tensors = {f"{name}.{key}": value for key, value in optimizer.state[parameter].items()}
                optimizer.state[parameter] = join_tensors(stored["parameters"][name], tensors)
        optimizer.state.update(stored["shared"])


def build_own_optimizer(own_model: OwnModel, settings: OptimizerConfig, model: nn.Module) -> TorchOptimizer:
    """Builds the optimiser that the user's callable returns for a network. Raises SettingError for another result."""
    assert own_model.optimizer is not None
    rate, module = settings.learning_rate, getattr(model, "users_module", model)
    made = call_users("optimizer", own_model.optimizer, module, rate)
    if not isinstance(made, torch.optim.Optimizer):
        rule = "must return a torch.optim.Optimizer"
        name = type(made).__name__
        raise SettingError(f"optimizer {rule}, and returned {name}", setting="optimizer", value=name, allowed=rule)
    if any(
        each.default is each.empty and each.name == "closure" for each in inspect.signature(made.step).parameters.values()
    ):
        rule = "must return one whose step needs no closure"
        name = type(made).__name__
        raise SettingError(f"optimizer {rule}, as that of {name} does", setting="optimizer", value=name, allowed=rule)
    if not {id(each) for group in made.param_groups for each in group["params"]} & {
        id(each) for each in module.parameters()
    }:
        rule = "must hold parameters of the model that it is called with"
        raise SettingError(f"optimizer {rule}, and holds none of the model's", setting="optimizer", allowed=rule)
    of_loss: list[nn.Parameter] = model.loss_parameters() if hasattr(model, "loss_parameters") else []  # type: ignore[operator]
    held = {id(each) for group in made.param_groups for each in group["params"]}
    if missing := [parameter for parameter in of_loss if parameter.requires_grad and id(parameter) not in held]:
        made.add_param_group({"params": missing})
    return TorchOptimizer(made, rate)
