"""A user's model, data and loss for `raystride.fit`.

own_model = OwnModel(model=make_model, data=dataset, loss=loss)
own_model.open_split("train", config.fit), own_model.make_network(config.fit)
"""

import copy
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raystride.pipelines.config import FitConfig, SettingError
from raystride.pipelines.train.own_model.dataset import IndexedDataset, open_dataset

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True, eq=False)
class OwnModel:
    """A user's model, data, loss and validation, as given to `raystride.fit`."""

    model: "Callable[..., nn.Module] | nn.Module"
    """Makes the network, or the network, of which each worker trains a copy."""
    data: Any
    """A dataset (see `own_model.dataset`), or a callable that returns one on each worker."""
    loss: "Callable[[nn.Module, Any], Any]"
    """Called as loss(model, batch); returns a mean (scalar), (sum, count), or a mapping whose `loss` is one of these."""
    validation: Any = None
    """Held-out samples, as `data`; None: `data.validation_fraction` of data."""
    metrics: "Callable[[nn.Module, Any], Mapping[str, Any]] | None" = None
    """Called as metrics(model, batch) in validation; returns by name a mean over the batch's samples, (sum, count), or a
    function of the whole set with what this batch gives to it."""
    collate: Callable[[list[Any]], Any] | None = None
    """Makes a batch of a list of samples; None: PyTorch's `default_collate`."""
    optimizer: "Callable[[nn.Module, float], torch.optim.Optimizer] | None" = None
    """Called as optimizer(model, learning_rate), makes the optimiser; None: the settings of `optimizer`."""
    schedule: Callable[[int, int], float] | None = None
    """Called as schedule(step, total steps); the learning rate's factor. None: the settings of `optimizer`."""
    observers: Sequence[Any] = ()
    """Observers of the training, or callables that make them, on each worker."""
    opened: dict[str, Any] = field(default_factory=dict, repr=False)
    """Datasets and descriptions that this process has made of it."""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"opened": {}}

    def open_split(self, split: str, fit: FitConfig) -> "IndexedDataset | None":
        """Returns the dataset of a split, once a process; None for a validation that is cut off data. Raises DataError."""
        given = self.data if split == "train" else self.validation
        if given is None:
            return None
        arguments = fit.data_args
        key = f"{split} {arguments}"
        if key not in self.opened:
            if split == "validation" and callable(given):
                known = inspect.signature(given).parameters
                arguments = {name: value for name, value in arguments.items() if name in known}
            self.opened[key] = open_dataset(given, arguments)
        return self.opened[key]  # type: ignore[no-any-return]

    def make_network(self, fit: FitConfig) -> "nn.Module":
        """Returns a fresh network. Raises SettingError for arguments that its callable does not take, or another result."""
        from torch import nn

        from raystride.pipelines.train.own_model.structure import refuse_lazy

        if isinstance(self.model, nn.Module):
            if fit.model_args:
                raise fit.error("model_args", "must be empty where `model` is a module: give the callable that makes it")
            refuse_lazy(self.model)
            try:
                return copy.deepcopy(self.model)
            except Exception as error:
                rule = "must be a module that can be copied, or the callable that makes it"
                raise SettingError(f"model {rule}: {describe_error(error)}", setting="model", allowed=rule) from error
        try:
            inspect.signature(self.model).bind(**fit.model_args)
        except (TypeError, ValueError) as error:
            if fit.model_args:
                raise fit.error("model_args", f"must be arguments that `model` takes: {error}") from None
        made = call_users("model", self.model, **fit.model_args)
        if not isinstance(made, nn.Module):
            rule = f"must return a torch.nn.Module, and returned {type(made).__name__}"
            raise SettingError(f"model {rule}", setting="model", value=type(made).__name__, allowed=rule)
        refuse_lazy(made)
        return made


def call_users(name: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Returns what a function of the user returns. Raises SettingError, with the line of its code, if it fails."""
    try:
        return function(*arguments, **named)
    except SettingError:
        raise
    except Exception as error:
        raise SettingError(f"{name} raised {describe_error(error)}", setting=name) from error


def describe_error(error: BaseException) -> str:
    """Returns an error with the line that raised it: the last one that is in no installed package, if any is."""
    frames = traceback.extract_tb(error.__traceback__)
    of_user = [frame for frame in frames[1:] if "site-packages" not in frame.filename] or frames[-1:]
    place = f" in {of_user[-1].filename}, line {of_user[-1].lineno}" if of_user else ""
    return f"{type(error).__name__}: {error}{place}"
