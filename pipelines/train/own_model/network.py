"""The user's network together with its loss, as the training loop calls a model.

network = OwnNetwork(module, own_model, facts)
loss_sum, counted = network(batch, targets)               # backward of loss_sum
"""

import copy
import random
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn

from raystride.model.linear import has_bf16
from raystride.pipelines.config import SettingError
from raystride.pipelines.train.own_model.definition import OwnModel
from raystride.pipelines.train.own_model.samples import NestedBatch
from raystride.pipelines.train.own_model.set_metrics import SetFigure, take_set_figures

Sums = tuple[torch.Tensor, torch.Tensor]
"""A sum, and the count that it is divided by."""


class OwnNetwork(nn.Module):
    """Calls the user's loss on their network; buffers are saved with the parameters.

    A loss that is a module is trained with the network, as `criterion`: parameters of its own, and buffers.
    """

    saves_buffers = True

    def __init__(self, module: nn.Module, own_model: OwnModel, facts: Mapping[str, Any], precision: str = "fp32") -> None:
        super().__init__()
        self.module, self._own_model = module, own_model
        loss = own_model.loss
        self.criterion = copy.deepcopy(loss) if isinstance(loss, nn.Module) else loss
        description = facts.get("dataset", {})
        self.moving = [f"module.{name}" for name in description.get("moving", [])]
        self._logged_names: list[str] = description.get("logged", [])
        self._measured_names: list[str] = description.get("measured", [])
        self._precision = precision
        self._logged: list[Any] = [0.0, 0.0] * len(self._logged_names)
        self._set_figure_names = list(description.get("of_set", {}))
        self._set_figures: dict[str, SetFigure] = {}

    @property
    def users_module(self) -> nn.Module:
        """The user's network."""
        return self.module

    def loss_parameters(self) -> list[nn.Parameter]:
        """Returns the parameters of a loss that is a module."""
        return list(self.criterion.parameters()) if isinstance(self.criterion, nn.Module) else []

    def compile(self, *arguments: Any, **options: Any) -> None:
        """Compiles the user's network; the loss and what surrounds it stay as they are."""
        self.module.compile(*arguments, **options)

    def forward(self, batch: NestedBatch, targets: torch.Tensor, *, measures: bool = False) -> tuple[torch.Tensor, ...]:
        """Returns the loss sum and its count; with `measures` also sums and counts of all further figures, one vector."""
        if self.training:
            self._seed_other_generators(targets.device)
        with autocast_module(self._precision, targets.device):
            returned = self.criterion(self.module, batch.content)
            (loss_sum, counted), others = read_loss(returned, len(targets))
            figures = dict(others)
            if measures and self._own_model.metrics:
                figures |= {str(name): value for name, value in self._own_model.metrics(self.module, batch.content).items()}
            self._set_figures = take_set_figures(figures) if measures else {}
        if batch.empty:
            loss_sum, counted = loss_sum * 0, counted * 0
        elif self.training and self._logged_names:
            for index, name in enumerate(self._logged_names):
                total, count = as_sums(others[name], len(targets), name, targets.device)
                self._logged[2 * index] += total.detach()
                self._logged[2 * index + 1] += count
        if not measures:
            return loss_sum, counted
        return loss_sum, counted, self._stack_figures(figures, len(targets), targets.device)

    def _stack_figures(self, figures: Mapping[str, Any], num_samples: int, device: torch.device) -> torch.Tensor:
        names = [*self._logged_names, *(name for name in self._measured_names if name not in self._logged_names)]
        if differing := sorted(figures.keys() ^ {*names, *self._set_figure_names}):
            name = differing[0]
            found = f"{name!r} for one batch" if name in figures else f"no {name!r} for a batch"
            raise SettingError(
                f"metrics returned {found}, unlike for the first: return the same names each time",
                setting="metrics",
                value=sorted(figures),
                allowed=names,
            )
        sums = [part for name in names for part in as_sums(figures[name], num_samples, name, device)]
        empty = torch.zeros(0, dtype=torch.float64, device=device)
        return torch.stack([part.detach().to(device, torch.float64) for part in sums]) if sums else empty

    def take_set_figures(self) -> dict[str, SetFigure]:
        """Returns what the newest validation batch gives to metrics of the whole set, by name, and forgets it."""
        taken, self._set_figures = self._set_figures, {}
        return taken

    def take_logged(self) -> torch.Tensor:
        """Returns sums and counts of the further losses since the last call, (2 k) fp64, and forgets them."""
        device = next(self.parameters()).device
        taken = torch.stack([torch.as_tensor(value, dtype=torch.float64, device=device) for value in self._logged])
        self._logged = [0.0, 0.0] * len(self._logged_names)
        return taken

    def _seed_other_generators(self, device: torch.device) -> None:
        """Seeds the generators that the loop does not: it seeds PyTorch's of the device, by step and slot."""
        key = torch.default_generator.initial_seed()
        if device.type == "cuda":
            key = torch.cuda.default_generators[torch.cuda.current_device()].initial_seed()
            torch.default_generator.manual_seed(key)
        random.seed(key)
        np.random.seed(key % 2**32)


def autocast_module(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Returns the context of a user's module by `train.precision`.

    The loop's own leaves bfloat16 on CPUs, and parameters in bfloat16, to our own layers.
    """
    if precision == "pure_bf16" or (precision == "bf16" and (device.type == "cuda" or has_bf16())):
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()


def read_loss(returned: Any, num_samples: int) -> tuple[Sums, dict[str, Any]]:
    """Returns the loss as (sum, count), and further values by name. Raises SettingError for anything else.

    A mean, a scalar, is weighted by the samples of the batch.
    """
    others: dict[str, Any] = {}
    if isinstance(returned, Mapping):
        others = {str(name): value for name, value in returned.items() if name != "loss"}
        returned = returned.get("loss")
    is_tensor = isinstance(returned, torch.Tensor)
    is_pair = isinstance(returned, tuple | list) and len(returned) == 2 and isinstance(returned[0], torch.Tensor)
    if not (is_tensor or is_pair) or (returned if is_tensor else returned[0]).dim():
        rule = "must return a mean loss (a scalar tensor), (sum, count), or a mapping with one of these as 'loss'"
        raise SettingError(
            f"loss {rule}, and returned {_describe_value(returned)}", setting="loss", value=type(returned), allowed=rule
        )
    first = returned if is_tensor else returned[0]
    return as_sums(returned, num_samples, "loss", first.device), others


def as_sums(value: Any, num_samples: int, name: str, device: torch.device) -> Sums:
    """Returns a figure as (sum, count), fp32. Raises SettingError for a value that is no number and no pair of them."""
    pair = value if isinstance(value, tuple | list) and len(value) == 2 else (value, None)
    try:
        total = torch.as_tensor(pair[0], device=device).float()
        count = torch.as_tensor(num_samples if pair[1] is None else pair[1], dtype=torch.float32, device=device)
        if total.dim() or count.dim():
            raise ValueError(f"it has the shape {tuple(total.shape)}")
    except (TypeError, ValueError, RuntimeError) as error:
        rule = "must be a number (the mean over the batch's samples), or (sum, count); of an output of transformers, `loss`"
        raise SettingError(f"{name} {rule}: {error}", setting=name, value=_describe_value(value), allowed=rule) from None
    return (total * num_samples if pair[1] is None else total), count


def _describe_value(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
