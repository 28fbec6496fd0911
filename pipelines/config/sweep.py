"""Settings of a sweep, and all settings of a training under one.

`sweep.constraints` are conditions as a user writes them: comparisons and sums over settings' full names, nothing else.

    config = SweepJobConfig(sweep=SweepConfig(space={"scaling.workers": [1, 2], "train.precision": ["fp32", "bf16"]}))
    config.training()                                         # the Config that every trial starts from
    Condition("scaling.workers * train.slot_size <= 64", known).holds({"scaling.workers": 2, "train.slot_size": 8})    # True
"""

import ast
import math
import operator
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, ClassVar, Literal

from raystride.pipelines.config.config import Config, name_fault
from raystride.pipelines.config.lora import is_shared, refuse_sharing
from raystride.pipelines.config.renamed import with_current_names, with_current_names_in
from raystride.pipelines.config.run import is_argument
from raystride.pipelines.config.section import Section, names_with, nearest, setting
from raystride.pipelines.system.credentials import redact_all_uris
from raystride.pipelines.system.errors import SettingError

OPERATORS: dict[type[ast.AST], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda value, several: value in several,
    ast.NotIn: lambda value, several: value not in several,
    ast.Not: operator.not_,
    ast.USub: operator.neg,
}


class Condition:
    """An expression over `known` settings. Raises SettingError for an invalid one."""

    def __init__(self, text: str, known: Collection[str]) -> None:
        self.text = text
        try:
            self._body = ast.parse(text, mode="eval").body
        except (SyntaxError, ValueError) as error:
            raise self._error(f", which is no condition: {getattr(error, 'msg', error)}") from None
        self._check(self._body, known)

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Returns whether the condition is true for settings by full name. Raises SettingError if it cannot be evaluated."""
        try:
            return bool(_value(self._body, values))
        except (TypeError, ZeroDivisionError) as error:
            raise self._error(f", which cannot be told: {error}") from None

    def _error(self, what: str) -> SettingError:
        return SettingError(f"sweep.constraints has {self.text!r}{what}", setting="sweep.constraints", value=self.text)

    def _check(self, node: ast.AST, known: Collection[str]) -> None:
        if isinstance(node, ast.Attribute | ast.Name):
            if (name := ast.unparse(node)) not in known:
                raise self._error(f": there is no setting {name}{nearest(name, known)}")
            return
        whole = (ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Constant, ast.Tuple, ast.List)
        if not isinstance(node, (*whole, ast.And, ast.Or, ast.Load, *OPERATORS)):
            raise self._error(": it may only compare settings, and join that by and, or")
        for child in ast.iter_child_nodes(node):
            self._check(child, known)


def _value(node: ast.AST, values: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.Attribute() | ast.Name():
            return values[ast.unparse(node)]
        case ast.Tuple() | ast.List():
            return [_value(each, values) for each in node.elts]
        case ast.BoolOp():
            parts = (_value(each, values) for each in node.values)
            return all(parts) if isinstance(node.op, ast.And) else any(parts)
        case ast.UnaryOp():
            return OPERATORS[type(node.op)](_value(node.operand, values))
        case ast.BinOp():
            return OPERATORS[type(node.op)](_value(node.left, values), _value(node.right, values))
        case ast.Compare():
            terms = [_value(each, values) for each in (node.left, *node.comparators)]
            return all(OPERATORS[type(op)](*pair) for op, pair in zip(node.ops, pairwise(terms), strict=True))
    raise TypeError(ast.unparse(node))


RANGES = ("uniform", "log_uniform", "integers")
"""Kinds of ranges that random search and Optuna draw from; each takes [lowest, highest]."""

SearchName = Literal["grid", "random", "optuna"]


@dataclass(frozen=True)
class Search:
    """A search method. A further one is a row of SEARCHES and a name in `SearchName`; if adaptive, its class in `tuning`."""

    sentence: str
    """Its rule and source, for people."""
    lists_all: bool = False
    """Whether it tries every combination, known before the first trial."""
    takes_ranges: bool = True
    """Whether it draws from ranges."""
    is_adaptive: bool = False
    """Whether it chooses each trial by earlier results."""


SEARCHES: dict[SearchName, Search] = {
    "grid": Search("every combination of the lists", lists_all=True, takes_ranges=False),
    "random": Search("`trials` random combinations, also of ranges"),
    "optuna": Search("each trial is chosen by earlier results (TPE, Bergstra et al., 2011)", is_adaptive=True),
}
"""By the name in `sweep.search`."""


OF_TRIALS = (
    "run",
    "storage",
    "train.log_every",
    "validation.every",
    "validation.every_epochs",
    "validation.samples",
    "checkpoint.every",
    "checkpoint.every_epochs",
    "checkpoint.minutes",
    "sample.tokens",
    "launch.mode",
    "launch.max_restarts",
    "record.mlflow",
)
"""Settings that cannot be tried: a trial is a short training that measures nothing but its steps."""


SAME_WORK = ("optimizer.", "objective.", "model.dropout", "train.clip_norm", "seed", "data.shuffle")
"""Settings that do not change the work of a step, or prefixes of their names: their trials differ in the loss only."""


def same_work(key: str) -> bool:
    """Returns whether the work of a step is independent of this setting."""
    return key.startswith(SAME_WORK)


_TIMEOUT_S = 900.0


@dataclass(frozen=True, kw_only=True)
class SweepConfig(Section):
    """Search space, measurement of each trial, and objective."""

    name: ClassVar[str] = "sweep"

    space: dict[str, Any] = field(default_factory=dict)
    """Search space: setting names, each with a list of values or a range. Ranges are `{uniform: [0, 1]}`, `{log_uniform:
    [1e-4, 1e-2]}` and `{integers: [1, 8]}`."""
    constraints: tuple[str, ...] = setting((), was="sweep.where", renamed="0.3")
    """Conditions that each combination must satisfy. For example `scaling.workers * train.slot_size <= 64`; combinations
    that violate one are not tried."""
    scaling: Literal["none", "weak", "strong"] = setting("none")
    """Scaling of the batch with the number of workers. `weak`: constant work per worker, as with `train.slots`; slots are
    multiplied by the number of workers. `strong`: constant batch, divided among the workers. `none`: slots as in the space
    and the configuration, which amounts to strong scaling."""
    search: SearchName = setting("grid", table=SEARCHES)
    """Search method."""
    trials: int = setting(20, at_least=1, also="num_samples n_trials num_trials")
    """Number of trials of `random` and `optuna`."""
    early_stopping: Literal["auto", "none", "asha"] = setting("auto", was="sweep.stop_bad", renamed="0.3")
    """Early stopping of poor trials. `asha`: asynchronous successive halving by the objective at the same step (Li et al.,
    2020), with `metric` by the training loss. `auto`: `asha` with the objective `loss` or `metric` and at least
    `reduction_factor`^2 combinations, otherwise `none`."""
    reduction_factor: float = setting(3.0, above=1, was="sweep.keep", renamed="0.3")
    """Reduction factor of `asha`: one in this many trials continues at each rung."""
    objective: Literal["auto", "throughput", "cost", "energy", "time_to_loss", "loss", "metric"] = setting(
        "auto", also="optimize_for"
    )
    """Objective of the sweep. `throughput`: tokens per second. `cost` and `energy`: lowest price or energy per token.
    `time_to_loss`: least time to `target_loss`. `loss`: lowest validation loss after the trial's steps. `metric`: best
    `validation.metric` after them, by `validation.direction`. `auto`: `loss` if only settings vary that do not change the
    work of a step (those of the optimizer and the objective, dropout, clipping, the seed), otherwise `throughput`. With
    `loss` and `metric`, a trial is a training in small: its warm-up and decay are as much shorter as its steps."""
    target_loss: float = setting(0.0, at_least=0)
    """Training loss (mean of a window) that ends a trial of `time_to_loss`. 0: not given."""
    target_tokens: float = setting(0.0, at_least=0)
    """Number of tokens for which the report states time, price and energy. 0: that of the configuration for predictions, a
    million for trade-offs."""
    price_per_hour: float = setting(0.0, at_least=0)
    """Price per worker and hour, in any currency. 0: unknown, unless `cluster` states it."""
    cluster: str | None = setting(None)
    """YAML file of the cluster to predict for: devices per node, links and price. See `docs/scaling.md`."""
    warmup_steps: int = setting(10, at_least=1)
    """Steps at the start of a trial that are not measured. They compile, connect and fill caches."""
    window_steps: int = setting(10, at_least=1)
    """Steps per measurement window. Each window is one measurement of the throughput."""
    windows: int = setting(8, at_least=1)
    """Maximum number of measurement windows per trial."""
    min_windows: int = setting(3, at_least=1, was="sweep.least_windows", renamed="0.3")
    """Minimum number of windows before a trial may end as precise enough."""
    target_precision: float = setting(0.02, at_least=0, was="sweep.precision", renamed="0.3")
    """Relative precision at which a trial ends. Half the 95 % confidence interval of the mean throughput, as a share of the
    mean. 0: never before `windows`."""
    repeats: int = setting(1, at_least=1)
    """Number of rounds through all combinations. Rounds run one after another, so that a slow hour of a machine does not
    affect a single combination only. With the objective `loss` or `metric`, each round has another seed."""
    seeds: int = setting(3, at_least=1)
    """Maximum number of seeds of a setting. The best three get a second one, those of them that seeds do not tell apart
    further ones, and the best of these the last, which does not choose it and gives the loss that is stated. Used with the
    objectives `loss` and `metric`. 1: a single seed decides, and is stated."""
    isolated: bool = setting(True)
    """Run one trial at a time. Trials that share a node would disturb each other's measurements."""
    max_concurrent: int = setting(
        2,
        at_least=1,
        was=("sweep.at_once", "sweep.concurrent"),
        renamed="0.3",
        also="max_concurrent_trials concurrent n_jobs",
    )
    """Maximum number of concurrent trials if they are not isolated. Limited by the number of CPUs; see scaling.threads.
    Further resources of a cluster are left to others."""
    retry: bool = setting(False)
    """Repeat failed, hung and out-of-memory trials when a sweep is started again."""
    shard: str = setting("", since="0.3", was="sweep.share", renamed="0.3")
    """Shard of a grid, `k/n`, that this job measures. It is every n-th combination from the k-th on, counted from 0. n jobs
    of one name share a sweep, such as those of a Slurm array; the last to end writes the result. Empty: all combinations."""
    share_base: bool = setting(False, since="0.3")
    """Train all trials concurrently in one process on one frozen base. For the objectives `loss` and `metric`, and settings
    of `lora`, `optimizer` and `data`. It needs no Ray, and does not measure throughput, as trials would disturb each other.
    Every trial trains to its end, without early stopping or time limit."""
    timeout_s: float = setting(_TIMEOUT_S, above=0)
    """Seconds after which a trial is asked to end with its windows so far. A trial that does not end, or has no windows,
    counts as hung."""

    def __post_init__(self) -> None:
        """Raises SettingError if a field is out of range, `space` has no choices, or the objective lacks its figure."""
        super().__post_init__()
        if self.objective == "auto" and self.space:
            # Everyone who reads it wants to know which. Not without a space, as defaults are that others are put over.
            object.__setattr__(self, "objective", "loss" if all(map(same_work, self.space)) else "throughput")
        if self.early_stopping == "auto" and self.space:
            many = self.by_quality and not self.share_base and self._combinations() >= self.reduction_factor**2
            object.__setattr__(self, "early_stopping", "asha" if many else "none")
        for key, choices in self.space.items():
            self._check_choices(key, choices)
        self._check_share()
        if self.share_base:
            self._check_share_base()
        if self.min_windows > self.windows:
            raise self.error("min_windows", f"must be at most sweep.windows, {self.windows}")
        if self.objective == "time_to_loss" and not self.target_loss:
            raise self.error("target_loss", "must be given with sweep.objective time_to_loss")
        if self.objective == "cost" and not self.price_per_hour and not self.cluster:
            raise self.error("price_per_hour", "must be given, or sweep.cluster, with sweep.objective cost")

    @property
    def by_quality(self) -> bool:
        """True if trials are compared by how well they learn."""
        return self.objective in ("loss", "metric")

    @property
    def trial_steps(self) -> int:
        """Number of steps of a trial, unless the objective is `time_to_loss`."""
        return self.warmup_steps + self.windows * self.window_steps

    @property
    def part(self) -> tuple[int, int]:
        """Number of this shard, from 0, and of all shards; (0, 1) for a whole grid."""
        number, _, count = (self.shard or "0/1").partition("/")
        return int(number), int(count)

    def _check_share(self) -> None:
        form = re.fullmatch(r"(\d+)/(\d+)", self.shard or "0/1")
        if form is None or not 0 <= int(form[1]) < int(form[2]):
            raise self.error("shard", "must be k/n with k from 0 to n - 1, such as 0/4")
        if self.shard and not SEARCHES[self.search].lists_all:
            names = names_with(SEARCHES, "lists_all")
            raise self.error("shard", f"needs sweep.search {names}, whose combinations are known; it is {self.search}")

    def _check_share_base(self) -> None:
        if SEARCHES[self.search].is_adaptive:
            raise self.error("share_base", f"must be false with sweep.search {self.search}, which tries one after another")
        if self.shard:
            raise self.error("share_base", "must be false with sweep.shard, whose trials are those of several jobs")
        if self.early_stopping == "asha":
            raise self.error(
                "early_stopping", "must be `auto` or `none` with sweep.share_base: all trials train to their end"
            )
        if self.timeout_s != _TIMEOUT_S:
            raise self.error("timeout_s", "must be left out with sweep.share_base: all trials train to their end")
        if self.objective == "auto":  # without a space: defaults, that others are put over
            return
        if not self.by_quality:
            raise self.error("share_base", f"must be false with sweep.objective `{self.objective}`: give `loss` or `metric`")

    def _combinations(self) -> int:
        """Returns the maximum number of combinations."""
        every = math.prod(len(choices) for choices in self.space.values() if isinstance(choices, list | tuple))
        return every if SEARCHES[self.search].lists_all else self.trials

    def _check_choices(self, key: str, choices: Any) -> None:
        if redact_all_uris(choices) != choices:
            raise self.error("space", f"must give {key} no passwords or keys, as what trials differ in is written down")
        if isinstance(choices, list | tuple) and choices:
            return
        if isinstance(choices, Mapping) and len(choices) == 1:
            ((kind, ends),) = choices.items()
            if kind in RANGES and self._is_range(kind, ends):
                if not SEARCHES[self.search].takes_ranges:
                    names = names_with(SEARCHES, "takes_ranges")
                    raise self.error("search", f"must be {names}, as sweep.space has a range for {key}")
                return
        raise self.error(
            "space", f"must give {key} a list of values or one range of {', '.join(RANGES)}, as {{uniform: [0, 1]}}"
        )

    @staticmethod
    def _is_range(kind: str, ends: Any) -> bool:
        if not isinstance(ends, list | tuple) or len(ends) != 2:
            return False
        numbers = int if kind == "integers" else int | float
        low, high = ends
        return isinstance(low, numbers) and isinstance(high, numbers) and low < high and (kind != "log_uniform" or low > 0)


@dataclass(frozen=True, kw_only=True)
class SweepJobConfig(Config):
    """All settings of a training, and of a sweep over some of them."""

    sweep: SweepConfig = SweepConfig()
    """Search space, objective and measurement of a sweep."""

    def __post_init__(self) -> None:
        """Raises SettingError if `sweep.space` or `sweep.constraints` names no setting of a training, or a trial's own."""
        super().__post_init__()
        space = with_current_names(self.sweep.space, Config)
        constraints = tuple(with_current_names_in(text, Config) for text in self.sweep.constraints)
        object.__setattr__(self, "sweep", replace(self.sweep, space=space, constraints=constraints))
        if self.run is not None and (fault := name_fault(self.run, "-" + 8 * "0")):  # as a trial's name ends
            raise self.error("run", fault)
        known = self.training().flat()
        for key in self.sweep.space:
            if key not in known and not is_argument(key):
                raise self.sweep.error("space", f"names {key}, which is no setting of a training; --help lists them")
            if key in OF_TRIALS:
                raise self.sweep.error("space", f"names {key}, which each trial sets by itself")
        for text in self.sweep.constraints:
            Condition(text, known)
        if self.sweep.share_base:
            self._check_sharing()
        if self.scaling.mesh == "auto" or "scaling.mesh" in self.sweep.space:
            raise self.scaling.error("mesh", "must be `given` in a sweep: vary scaling.tensor, pipeline or context")
        if self.scaling.expert > 1 or "scaling.expert" in self.sweep.space:
            raise self.scaling.error("expert", "must be 1 in a sweep: the scaling model has no term for its exchanges")

    def _check_sharing(self) -> None:
        if not self.lora.rank:
            raise self.sweep.error("share_base", "needs lora.rank above 0: only the base of adapters can be shared")
        for key in self.sweep.space:
            if is_shared(key):
                raise self.sweep.error(
                    "share_base", f"must be false as sweep.space has {key}: it is the base's, or how all are computed"
                )
        refuse_sharing(self.task, self.train)

    @property
    def quality_name(self) -> str:
        """Name of the figure of how well a trial learned: `loss`, or the metric of the objective `metric`."""
        return self.validation.metric if self.sweep.objective == "metric" else "loss"

    def training(self) -> Config:
        """The settings of a training alone."""
        return Config(**{item.name: getattr(self, item.name) for item in fields(Config)})
