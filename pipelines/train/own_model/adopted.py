"""What people bring from PyTorch, as the parts that `fit` takes: loaders, optimisers, schedulers and losses.

data, validation, collate, settings = adopt_loaders(DataLoader(dataset, batch_size=32), None, None)
optimizer, settings = adopt_optimizer(torch.optim.AdamW(model.parameters()), model)
schedule = adopt_schedule(OneCycleLR(optimizer, max_lr=0.1, total_steps=1000, cycle_momentum=False))
loss = adopt_loss(nn.CrossEntropyLoss())                  # loss(model, (inputs, labels))

`settings` are what was said by these objects, for a start that does not say otherwise.
"""

import copy
import functools
import hashlib
import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.loss import _Loss
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, default_collate

from raystride.pipelines.data.prepare.code_hash import qualified_name
from raystride.pipelines.system.errors import SettingError
from raystride.pipelines.train.own_model.definition import OwnModel

REPLAYED = 100
"""Steps over which two copies of a scheduler must agree."""
_UNORDERED = frozenset({"lr", "initial_lr", "params"})
"""Keys of a group that a schedule sets, or the model."""


def adopt(own: OwnModel, settings: Mapping[str, Any]) -> tuple[OwnModel, dict[str, Any]]:
    """Returns a user's parts with objects of PyTorch adopted, and settings with what these say.

    Raises SettingError for objects that cannot be adopted.
    """
    data, validation, collate, said = adopt_loaders(own.data, own.validation, own.collate)
    optimizer, of_optimizer = adopt_optimizer(own.optimizer, own.model)
    loss, schedule = adopt_loss(own.loss), adopt_schedule(own.schedule)
    parts = {"data": data, "validation": validation, "collate": collate, "optimizer": optimizer}
    if isinstance(schedule, ReplayedSchedule):
        said["optimizer.learning_rate"] = schedule.learning_rate
    return replace(own, **parts, loss=loss, schedule=schedule), _with_defaults(settings, said | of_optimizer)


def _with_defaults(settings: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings, by full names or nested, with others where they do not say it; a batch also by its slots."""
    found = dict(settings)
    for name, value in said.items():
        section, _, key = name.partition(".")
        nested = found.get(section)
        keys = {key, "slots", "slot_size"} if key == "batch" else {key}
        if any(f"{section}.{each}" in found or (isinstance(nested, Mapping) and each in nested) for each in keys):
            continue
        if isinstance(nested, Mapping):
            found[section] = {**nested, key: value}
        else:
            found[name] = value
    return found


def adopt_loaders(data: Any, validation: Any, collate: Any) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Returns the datasets and the collate of loaders, and their settings; anything else as it is.

    The order is computed by Raystride, so a loader's shuffling needs nothing. Raises SettingError for a sampler of another
    kind, and for two loaders that collate differently.
    """
    if isinstance(validation, DataLoader):
        if not isinstance(data, DataLoader) and collate is None:
            collate = _collate_of(validation)
        elif isinstance(data, DataLoader) and collate is None and _collate_of(data) != _collate_of(validation):
            rule = "must collate as the loader of data does: give `collate` for both"
            raise SettingError(f"validation {rule}", setting="validation", allowed=rule)
        _check_sampler("validation", validation)
        validation = validation.dataset
    if not isinstance(data, DataLoader):
        return data, validation, collate, {}
    _check_sampler("data", data)
    settings = {"train.batch": data.batch_size} | ({"data.read_processes": data.num_workers} if data.num_workers else {})
    return data.dataset, validation, collate or _collate_of(data), settings


def _collate_of(loader: DataLoader[Any]) -> Callable[[list[Any]], Any] | None:
    return None if loader.collate_fn is default_collate else loader.collate_fn


def _check_sampler(name: str, loader: DataLoader[Any]) -> None:
    """Raises SettingError for a loader whose samples are not each of the dataset once an epoch."""
    sampler = loader.sampler if loader.batch_size else loader.batch_sampler
    known = type(loader.batch_sampler) is BatchSampler or isinstance(loader.dataset, torch.utils.data.IterableDataset)
    if known and type(sampler) is SequentialSampler:
        return
    if known and type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(loader.dataset):  # type: ignore[arg-type]
        return
    if known and type(sampler).__name__ == "_InfiniteConstantSampler":  # of a stream
        return
    found = type(sampler).__name__ if sampler is not None else "batch_size=None"
    remedy = {
        "DistributedSampler": "leave it out, workers share the samples by themselves",
        "SubsetRandomSampler": "give torch.utils.data.Subset(dataset, indices)",
        "batch_size=None": "give the dataset of samples, and train.batch",
    }.get(
        found,
        "weigh classes in the loss (nn.CrossEntropyLoss(weight=...)), or make a mixture: a dataset that has rare samples "
        "several times (torch.utils.data.ConcatDataset)",
    )
    rule = f"must be a loader of each sample once an epoch, in any order: {remedy}"
    raise SettingError(f"{name} {rule}; its sampler is {found}", setting=name, value=found, allowed=rule)


class Adopted:
    """A part that stands for an object of PyTorch."""

    code: Any
    """The class or function that may be a user's."""
    identity: str
    """Tells it from another with the same code."""


class OptimizerOfClass(Adopted):
    """Makes an optimiser of a class, or of a `functools.partial` of one, for all parameters that are trained."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer]) -> None:
        self.code = make
        self.identity = f"{qualified_name(make)} {sorted(getattr(make, 'keywords', {}).items())}"

    def __call__(self, model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        made: torch.optim.Optimizer = self.code(trained, lr=learning_rate)
        return made


class RebuiltOptimizer(Adopted):
    """Makes an optimiser like a given one, without a state yet, for the parameters of the same names of another model."""

    def __init__(self, given: torch.optim.Optimizer, model: Any) -> None:
        """Raises SettingError for an optimiser that has begun, or parameters that are not the model's."""
        if given.state:
            rule = "must be an optimizer that has made no step: its state would be lost"
            raise SettingError(f"optimizer {rule}", setting="optimizer", value=type(given).__name__, allowed=rule)
        names = {id(parameter): name for name, parameter in model.named_parameters()} if isinstance(model, nn.Module) else {}
        held = [parameter for group in given.param_groups for parameter in group["params"]]
        if any(id(parameter) not in names for parameter in held):
            rule = "must hold parameters of `model`, given as the module itself, or be a class or a function(model, rate)"
            raise SettingError(f"optimizer {rule}", setting="optimizer", value=type(given).__name__, allowed=rule)
        rates = [_base_rate(group) for group in given.param_groups]
        self.learning_rate = rates[0]
        """That of the first group."""
        self.code = type(given)
        self._groups = [[names[id(parameter)] for parameter in group["params"]] for group in given.param_groups]
        memo: dict[int, Any] = {id(parameter): names[id(parameter)] for parameter in held} | {id(given): None}
        # `step` is on the optimiser itself only where a scheduler has wrapped it.
        self._content = copy.deepcopy({key: value for key, value in vars(given).items() if key != "step"}, memo)
        for group, rate in zip(self._content["param_groups"], rates, strict=True):
            group["lr"] = rate  # a scheduler may have set another for its first step
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self._content["param_groups"]]
        self.identity = f"{qualified_name(self.code)} {groups}"

    def __call__(self, model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
        parameters = dict(model.named_parameters())
        made: torch.optim.Optimizer = self.code.__new__(self.code)
        vars(made).update(copy.deepcopy(self._content))
        torch.optim.Optimizer.__setstate__(made, {})  # as an unpickled one: hooks on the class of this process
        for group, names in zip(made.param_groups, self._groups, strict=True):
            group["params"] = [parameters[name] for name in names]
            group["lr"] = group["lr"] * (learning_rate / self.learning_rate)
        return made


def adopt_optimizer(given: Any, model: Any) -> tuple[Any, dict[str, Any]]:
    """Returns a callable (model, learning rate) for an optimiser's class or instance, and its settings.

    Raises SettingError for an instance that has begun, or is of another model.
    """
    made = given.func if isinstance(given, functools.partial) else given
    # One that is made of (model, learning rate), as a class that wraps two optimisers, is such a callable itself.
    if isinstance(made, type) and issubclass(made, torch.optim.Optimizer) and "lr" in inspect.signature(given).parameters:
        return OptimizerOfClass(given), {}
    if isinstance(given, torch.optim.Optimizer):
        rebuilt = RebuiltOptimizer(given, model)
        return rebuilt, {"optimizer.learning_rate": rebuilt.learning_rate}
    return given, {}


class ReplayedSchedule(Adopted):
    """The factors of the learning rate by a scheduler that is a function of the step, replayed on a copy of it.

    One call of the scheduler's `step` is one step of the training.
    """

    def __init__(self, given: LRScheduler) -> None:
        """Raises SettingError for a scheduler that is no function of the step alone."""
        self.code, self._name = type(given), type(given).__name__
        if isinstance(given, ReduceLROnPlateau):
            self._refuse("must be a function of the step, and ReduceLROnPlateau follows a metric: use validation.patience")
        if given.last_epoch > 0:
            self._refuse("must be a scheduler that has made no step")
        parameters = [parameter for group in given.optimizer.param_groups for parameter in group["params"]]
        memo: dict[int, Any] = {id(parameter): nn.Parameter(torch.zeros(1)) for parameter in parameters}
        self._template = copy.deepcopy(given, memo)
        self._bases = [_base_rate(group) for group in given.optimizer.param_groups]
        self.learning_rate = self._bases[0]
        """That of the first group, of which it gives factors."""
        self._reset()
        once = [self._factor(step) for step in range(REPLAYED) if self._reaches(step)]
        self._reset()
        if once != [self._factor(step) for step in range(len(once))]:
            self._refuse("must be a function of the step: a second replay gives other rates")
        self.identity = f"{self._name} {hashlib.sha256(repr(once).encode()).hexdigest()[:16]}"

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_replayed": None, "_factors": []}

    def __call__(self, step: int, total_steps: int) -> float:
        if not self._reaches(step):
            self._refuse(f"must go on to the end: it has rates for {len(self._factors)} steps, and step {step} is asked for")
        return self._factors[step]

    def _reset(self) -> None:
        self._replayed: LRScheduler | None = None
        self._factors: list[float] = []

    def _factor(self, step: int) -> float:
        return self(step, 0)

    def _reaches(self, step: int) -> bool:
        """Replays up to a step; returns whether the scheduler has one for it."""
        if self._replayed is None:
            self._replayed, self._factors = copy.deepcopy(self._template), []
            self._note()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the optimiser's own steps are left out
            while len(self._factors) <= step:
                try:
                    self._replayed.step()
                except ValueError:  # OneCycleLR knows its number of steps
                    return False
                self._note()
        return True

    def _note(self) -> None:
        assert self._replayed is not None
        groups = self._replayed.optimizer.param_groups
        factors = [float(group["lr"]) / base if base else 0.0 for group, base in zip(groups, self._bases, strict=True)]
        if any(abs(factor - factors[0]) > 1e-9 * abs(factors[0]) for factor in factors):
            self._refuse("must have the same factor for each group of parameters; give each group a rate of its own instead")
        for group, first in zip(groups, self._template.optimizer.param_groups, strict=True):
            if moved := [key for key in group if key not in _UNORDERED and group[key] != first.get(key)]:
                remedy = "OneCycleLR takes cycle_momentum=False"
                self._refuse(f"must change the learning rate alone, and changes {moved[0]}; {remedy}")
        self._factors.append(factors[0])

    def _refuse(self, rule: str) -> None:
        raise SettingError(f"schedule {rule}", setting="schedule", value=self._name, allowed=rule)


def adopt_schedule(given: Any) -> Any:
    """Returns a callable (step, total steps) for a scheduler of PyTorch; anything else as it is. Raises SettingError."""
    if isinstance(given, LRScheduler):
        return ReplayedSchedule(given)
    rule = "must be a scheduler that is made, or a function (step, total_steps) of the rate's factor"
    if isinstance(given, type) and issubclass(given, LRScheduler):
        raise SettingError(f"schedule {rule}, and is the class {given.__name__}", setting="schedule", allowed=rule)
    if given is not None:
        try:
            inspect.signature(given).bind(0, 1)
        except ValueError:  # of a built-in function
            return given
        except TypeError as error:
            raise SettingError(f"schedule {rule}: {error}", setting="schedule", value=given, allowed=rule) from None
    return given


class PairLoss(nn.Module, Adopted):
    """A loss of PyTorch for batches that are pairs: criterion(model(inputs), labels)."""

    def __init__(self, criterion: nn.Module) -> None:
        """Raises SettingError for a criterion that returns no mean."""
        super().__init__()
        if getattr(criterion, "reduction", "mean") != "mean":
            rule = "must have reduction 'mean': parts of a batch are put together by Raystride"
            raise SettingError(f"loss {rule}", setting="loss", value=criterion.reduction, allowed=rule)
        self.criterion, self.code = copy.deepcopy(criterion), type(criterion)
        plain = {key: value for key, value in vars(criterion).items() if isinstance(value, bool | int | float | str)}
        self.identity = f"{plain} {[(name, value.tolist()) for name, value in criterion.named_buffers()]}"
        self._counts = type(criterion).forward in (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)
        if self._counts:
            vars(self.criterion)["reduction"] = "sum"

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """Returns the mean, or (sum, count) of classes, which weights and ignored labels make count differently."""
        if not (isinstance(batch, list | tuple) and len(batch) == 2):
            kind = type(self.criterion).__name__
            found = f"a mapping of {', '.join(batch)}" if isinstance(batch, Mapping) else type(batch).__name__
            raise TypeError(
                f"{kind} is for samples that are pairs (input, label), and the batch is {found}: give a function, "
                "loss(model, batch)"
            )
        outputs, labels = model(batch[0]), batch[1]
        value = self.criterion(outputs, labels)
        if not self._counts:
            return value
        if labels.is_floating_point():  # shares of each class
            return value, outputs.numel() // outputs.shape[min(1, outputs.dim() - 1)]
        criterion: Any = self.criterion
        kept, weight = labels != criterion.ignore_index, criterion.weight
        return value, kept.sum() if weight is None else weight[labels[kept]].sum()


def adopt_loss(given: Any) -> Any:
    """Returns a loss of PyTorch (`nn.CrossEntropyLoss()`) as loss(model, batch) of pairs; anything else as it is."""
    is_pytorchs = isinstance(given, _Loss) and type(given).forward.__module__.startswith("torch.")
    return PairLoss(given) if is_pytorchs else given


def _base_rate(group: Mapping[str, Any]) -> float:
    """Returns the rate of a group of which schedulers set multiples."""
    return float(group.get("initial_lr", group["lr"]))
