"""Metrics of the whole validation set, of a user's own model: F1, AUC, correlations, all that is no mean over samples.

For a batch `metrics` returns `(function, predictions, labels)` by name. Of a torchmetrics object the states of all batches
are merged as it merges those of processes. For any other function what follows it is gathered on rank 0 and joined in the
order of the batches. Neither depends on how batches are shared out.

    found = OwnSetMetrics({"f1": ["f1"]}, max_mib=256)
    found.add(batch.slot, network)                            # what `take_set_figures` of the network returns
    found.compute(world, device)                              # on all ranks: {"val_f1": 0.73}
"""

import copy
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from raystride.pipelines.config import SettingError, ValidationConfig
from raystride.pipelines.system.errors import picklable_error
from raystride.pipelines.train.distributed.collectives import broadcast_object, tree_reduce_object
from raystride.pipelines.train.own_model.definition import call_users, describe_error

SetFigure = tuple[Any, ...]
"""A function of the whole set, and what a batch has for it: `(f1_score, labels, predictions)`."""
State = dict[str, dict[str, Any]]
"""States of a torchmetrics object and of those within it, on the host, by the names of modules."""
MAX_STATE_BYTES = 2**20
"""Above this, sums of fractions in a torchmetrics object are not kept batch by batch."""
NO_MEANS = frozenset(("f1", "auc", "precision", "recall", "map", "ndcg", "r2", "correlation"))
"""Words in the names of figures of which the mean over batches is not that of the set."""


@dataclass(frozen=True)
class TakenState:
    """States that a user's own `update` has left in a torchmetrics object, which is empty again."""

    state: State


def is_set_figure(value: Any) -> bool:
    """Returns whether a figure is one of the whole set, and not a number or (sum, count)."""
    return _is_torchmetric(value) or (isinstance(value, tuple) and len(value) > 1 and callable(value[0]))


def take_set_figures(figures: Mapping[str, Any]) -> dict[str, SetFigure]:
    """Returns the figures of the whole set among a batch's; a torchmetrics object alone was updated with this batch."""
    return {str(name): _take_state(value) for name, value in figures.items() if is_set_figure(value)}


def _take_state(value: Any) -> SetFigure:
    if isinstance(value, tuple):
        return value
    taken = TakenState(_read_state(value))
    value.reset()
    return value, taken


@dataclass(frozen=True)
class ProbedMetrics:
    """What the metrics of two samples say of those of a training."""

    means: list[str]
    """Names of means and of (sum, count)."""
    of_set: dict[str, list[str]]
    """Names of the figures of each metric of the whole set."""
    numbers: list[str]
    """Names of bare numbers, also among the loss's further figures."""
    gathered_bytes: int
    """Bytes that these samples give to metrics of the whole set."""


def probe_metrics(figures: Mapping[str, Any], of_loss: Mapping[str, Any]) -> ProbedMetrics:
    """Returns what `metrics` and the loss's further figures of the first batch are. Raises SettingError."""
    of_set: dict[str, list[str]] = {}
    collected = OwnSetMetrics({}, max_mib=2**20)
    for name, value in take_set_figures(figures).items():
        collected.collect(0, {name: value})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of classes that two samples do not have
            of_set[name] = _probe_names(collected, name)
    means = [str(name) for name, value in figures.items() if not is_set_figure(value)]
    bare = {**of_loss, **{name: figures[name] for name in figures if not is_set_figure(figures[name])}}
    numbers = [str(name) for name, value in bare.items() if not isinstance(value, tuple | list)]
    return ProbedMetrics(means, of_set, numbers, collected.bytes_by_samples())


def _probe_names(collected: "OwnSetMetrics", name: str) -> list[str]:
    try:
        return list(collected.compute_one(name))
    except SettingError:  # two samples may be too few
        return [name]


def check_metrics(description: Mapping[str, Any], settings: ValidationConfig) -> None:
    """Raises SettingError for a number that is named as what is no mean, and for more than `validation.gather_mib`."""
    for name in description.get("numbers", ()):
        words = NO_MEANS.intersection(re.split(r"[^a-z0-9]+", name.lower()))
        if words and name not in settings.means:
            rule = (
                f"must not return a number for {name!r}, as the mean of the batches' {min(words)} is not that of the set: "
                "return (function, labels, predictions), as (sklearn.metrics.f1_score, batch['y'], classes), or with a "
                "torchmetrics object in its place; if it is a mean over samples, name it in validation.means"
            )
            raise SettingError(f"metrics {rule}", setting="metrics", value=name, allowed=rule)
    count = min(description["validation"], settings.samples or description["validation"])
    needed = count * description.get("gathered_bytes", 0.0)
    if needed > settings.gather_mib * 2**20:
        raise _gathers_too_much(needed, settings.gather_mib)


def _gathers_too_much(needed: float, max_mib: int) -> SettingError:
    rule = (
        f"must be at least {-(-int(needed) // 2**20)} for what metrics of the whole set gather on rank 0: set it so, return "
        "less for each sample (classes and not their scores), take a torchmetrics object with states of a fixed size, or "
        "lower validation.samples"
    )
    return SettingError(
        f"validation.gather_mib is {max_mib}: it {rule}", setting="validation.gather_mib", value=max_mib, allowed=rule
    )


@dataclass
class OwnSetMetrics:
    """Collects what this worker's batches give to metrics of the whole set."""

    names: Mapping[str, Sequence[str]]
    """Names of the figures of each metric that the result must have, as far as they are known before."""
    max_mib: int
    gathered_bytes: int = 0
    """Bytes of all that rank 0 will need from this worker."""
    _functions: dict[str, Any] = field(default_factory=dict)
    """The user's functions, and copies of torchmetrics objects."""
    _parts: dict[str, dict[int, Any]] = field(default_factory=dict)
    """What the batches gave, by number."""

    def add(self, batch: int, model: nn.Module) -> None:
        """Takes what the network has measured in a batch of this number. Raises SettingError."""
        self.collect(batch, model.take_set_figures())  # type: ignore[operator]

    def collect(self, batch: int, figures: Mapping[str, SetFigure]) -> None:
        """Takes a batch's figures by name. Raises SettingError for what cannot be gathered."""
        for name, (function, *arguments) in figures.items():
            parts = self._parts.setdefault(name, {})
            if not _is_torchmetric(function):
                self._functions[name] = function
                self._keep(parts, batch, [_column(name, values) for values in arguments])
                continue
            if name not in self._functions:
                device = next((value.device for value in arguments if isinstance(value, torch.Tensor)), "cpu")
                self._functions[name] = _own_copy(function).to(device)
            taken = arguments[0].state if isinstance(arguments[0], TakenState) else None
            number, state = batch, taken or _update(self._functions[name], arguments)
            if parts and _merges_at_once(self._functions[name]):
                number, before = parts.popitem()
                self.gathered_bytes -= _count_bytes(before)
                state = _merge(self._functions[name], [before, state])
            self._keep(parts, number, state)

    def bytes_by_samples(self) -> int:
        """Returns the bytes collected that grow with the samples, which states of a fixed size do not."""
        total = 0
        for name, parts in self._parts.items():
            if not _is_torchmetric(self._functions[name]):
                total += _count_bytes(list(parts.values()))
                continue
            states = [values for part in parts.values() for values in part.values()]
            total += _count_bytes([value for values in states for value in values.values() if type(value) is list])
        return total

    def _keep(self, parts: dict[int, Any], batch: int, part: Any) -> None:
        self.gathered_bytes += _count_bytes(part)
        if self.gathered_bytes <= self.max_mib * 2**20:  # else all ranks refuse it together
            parts[batch] = part

    def compute(self, world: int, device: torch.device) -> dict[str, float]:
        """Returns the figures of the whole set as `val_NAME`, on all ranks. Collective. Raises SettingError on all alike."""
        total = torch.tensor([float(self.gathered_bytes)], dtype=torch.float64, device=device)
        if world > 1:
            dist.all_reduce(total)
        if float(total) > self.max_mib * 2**20:
            raise _gathers_too_much(float(total), self.max_mib)
        if world == 1:
            return self._compute_all()
        group = dist.group.WORLD
        assert group is not None
        parts = tree_reduce_object(self._parts, _join_parts, group)
        outcome: Any = None
        if parts is not None:
            self._parts = parts
            try:
                outcome = self._compute_all()
            except Exception as error:
                outcome = picklable_error(error)
        outcome = broadcast_object(outcome, group)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome  # type: ignore[no-any-return]

    def _compute_all(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for name in self._parts:
            figures = self.compute_one(name)
            missing = set(self.names[name]) - set(figures)
            if missing and list(self.names[name]) != [name]:  # the name alone: two samples may have been too few
                rule = "must return the figures for all samples that it returned for the first two"
                wanted = ", ".join(self.names[name])
                raise SettingError(
                    f"metrics {rule}: {name} has {', '.join(figures)} now, and {wanted} then",
                    setting="metrics",
                    value=sorted(figures),
                    allowed=sorted(self.names[name]),
                )
            found |= {f"val_{figure}": value for figure, value in figures.items()}
        return found

    def compute_one(self, name: str) -> dict[str, float]:
        """Returns the figures of one metric from the batches collected so far. Raises SettingError, by its name."""
        function, parts = self._functions[name], [self._parts[name][batch] for batch in sorted(self._parts[name])]
        try:
            if _is_torchmetric(function):
                return _read_result(name, _compute_torchmetric(function, parts))
            return _read_result(name, function(*(_join(columns) for columns in zip(*parts, strict=True))))
        except Exception as error:
            raise SettingError(
                f"metrics: {name} of all samples raised {describe_error(error)}", setting="metrics"
            ) from error


def _join_parts(one: dict[str, dict[int, Any]], other: dict[str, dict[int, Any]]) -> dict[str, dict[int, Any]]:
    return {name: {**one.get(name, {}), **other.get(name, {})} for name in {**one, **other}}


def _is_torchmetric(function: Any) -> bool:
    """Returns whether a user gave a torchmetrics object; the package is imported only where they have imported it."""
    package = sys.modules.get("torchmetrics")
    return package is not None and isinstance(function, (package.Metric, package.MetricCollection))


def _own_copy(function: Any) -> Any:
    """Returns a copy of a torchmetrics object that does not ask other processes by itself."""
    if hasattr(function, "compute_groups"):  # members that share states would be updated once
        function = type(function)(dict(function.items(keep_base=True)), compute_groups=False)
    own = copy.deepcopy(function)
    for _, metric in _members(own):
        metric.sync_on_compute = metric._to_sync = metric.dist_sync_on_step = False
    return own


def _members(function: Any) -> Iterator[tuple[str, Any]]:
    """Yields the torchmetrics objects within one, itself included, by the names of modules."""
    package = sys.modules["torchmetrics"]
    return ((name, module) for name, module in function.named_modules() if isinstance(module, package.Metric))


def _update(function: Any, arguments: Sequence[Any]) -> State:
    """Returns the states of a torchmetrics object after one batch alone. Raises SettingError."""
    function.reset()
    call_users("metrics", function.update, *arguments)
    return _read_state(function)


def _read_state(function: Any) -> State:
    if hasattr(function, "compute_groups"):
        dict(function.items())  # members of a group get the states of its first
    return {name: {key: _to_host(getattr(metric, key)) for key in metric._reductions} for name, metric in _members(function)}


def _merges_at_once(function: Any) -> bool:
    """Returns whether the states of a worker's batches are merged as they come, and not in the order of all batches.

    So it is of whole numbers that are added, of the largest and the smallest, which any order leaves the same, and of sums
    too large to keep by batch, which rounding then makes differ in their last digits.
    """
    data = sys.modules["torchmetrics"].utilities.data

    def merges(value: Any, reduce: Any) -> bool:
        if not isinstance(value, torch.Tensor):
            return False
        is_whole = not (value.is_floating_point() or value.is_complex())
        is_sum = reduce is data.dim_zero_sum and (is_whole or value.nbytes > MAX_STATE_BYTES)
        return is_sum or reduce in (data.dim_zero_max, data.dim_zero_min)

    states = ((getattr(metric, key), how) for _, metric in _members(function) for key, how in metric._reductions.items())
    return all(merges(value, reduce) for value, reduce in states)


def _merge(function: Any, states: Sequence[State]) -> State:
    """Returns the states of several batches as one, as torchmetrics merges those of several processes."""
    return {
        name: {key: _reduce(reduce, [state[name][key] for state in states]) for key, reduce in metric._reductions.items()}
        for name, metric in _members(function)
    }


def _reduce(reduce: Callable[[Any], Any] | None, values: list[Any]) -> Any:
    joined = torch.stack(values) if isinstance(values[0], torch.Tensor) else list(chain.from_iterable(values))
    return reduce(joined) if reduce is not None and len(joined) else joined


def _compute_torchmetric(function: Any, states: Sequence[State]) -> Any:
    function.cpu()
    merged = _merge(function, states)
    for name, metric in _members(function):
        for key, value in merged[name].items():
            setattr(metric, key, value)
        metric._update_count, metric._computed = len(states), None
    return function.compute()


def _to_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    return type(value)(_to_host(item) for item in value) if isinstance(value, list | tuple) else value


def _column(name: str, values: Any) -> Any:
    """Returns a batch's values on the host. Raises SettingError for what cannot be joined to those of other batches."""
    if isinstance(values, torch.Tensor) and values.dim():
        return values.detach().to("cpu", torch.float32 if values.dtype == torch.bfloat16 else values.dtype, copy=True)
    if isinstance(values, np.ndarray) and values.ndim:
        return values.copy()
    if isinstance(values, list):
        return list(values)
    rule = (
        "must give tensors, arrays or lists, with the samples along the first dimension, after a function of the whole set"
    )
    found = "a tensor without a dimension" if isinstance(values, torch.Tensor) else type(values).__name__
    raise SettingError(f"metrics {rule}: {name} has {found}", setting="metrics", value=found, allowed=rule)


def _join(columns: Sequence[Any]) -> Any:
    if isinstance(columns[0], torch.Tensor):
        return torch.cat(list(columns))
    return np.concatenate(columns) if isinstance(columns[0], np.ndarray) else list(chain.from_iterable(columns))


def _count_bytes(part: Any) -> int:
    if isinstance(part, torch.Tensor | np.ndarray):
        return int(part.nbytes)
    if isinstance(part, Mapping):
        return sum(map(_count_bytes, part.values()))
    if isinstance(part, list | tuple):
        return sum(map(_count_bytes, part))
    return sys.getsizeof(part)


def _read_result(name: str, value: Any) -> dict[str, float]:
    """Returns the figures of a result by name: of a mapping `NAME_KEY`, of several numbers `NAME_0`, ..."""
    if isinstance(value, Mapping):
        return {
            figure: number for key, part in value.items() for figure, number in _read_result(f"{name}_{key}", part).items()
        }
    numbers = np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value, np.float64)
    if numbers.size == 1:
        return {name: float(numbers.reshape(()))}
    return {f"{name}_{index}": float(number) for index, number in enumerate(numbers.reshape(-1))}
