"""Settings of a sweep, and all settings of a training under one.

config = SweepConfig(sweep=Sweep(space={"scaling.workers": [1, 2], "train.precision": ["fp32", "bf16"]}))
config.training()                                         # the Config that every trial starts from
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

from raystride.pipelines.config.condition import Condition
from raystride.pipelines.config.config import Config, name_fault
from raystride.pipelines.config.lora import is_shared, refuse_sharing
from raystride.pipelines.config.section import Section, setting
from raystride.pipelines.credentials import masked_all

RANGES = ("uniform", "log_uniform", "integers")
"""Kinds of ranges that random search and Optuna draw from; each takes [lowest, highest]."""

OF_TRIALS = (
    "run",
    "storage",
    "train.log_every",
    "validation.every",
    "validation.samples",
    "checkpoint.every",
    "sample.tokens",
    "launch.mode",
    "launch.restarts",
    "record.mlflow",
)
"""Settings that cannot be tried: a trial is a short training that measures nothing but its steps."""


SAME_WORK = ("optimizer.", "objective.", "model.dropout", "train.clip_norm", "seed", "data.shuffle")
"""Settings that leave the work of a step as it is, or what their names begin with: only the loss tells them apart."""


def same_work(key: str) -> bool:
    """Whether a step takes the same work whatever this setting is."""
    return key.startswith(SAME_WORK)


_TIMEOUT_S = 900.0


@dataclass(frozen=True, kw_only=True)
class Sweep(Section):
    """What is tried, how each trial is measured, and what counts as best."""

    name: ClassVar[str] = "sweep"

    space: dict[str, Any] = field(default_factory=dict)
    """Settings by their full names, each with a list of values, or with a range to draw from: `{uniform: [0, 1]}`,
    `{log_uniform: [1e-4, 1e-2]}`, `{integers: [1, 8]}`."""
    where: tuple[str, ...] = setting(())
    """Conditions between settings, such as `scaling.workers * train.slot_size <= 64`; what breaks one is not tried."""
    scaling: Literal["none", "weak", "strong"] = setting("none")
    """`weak`: the work a worker stays that of `train.slots`, so slots are multiplied by the workers; `strong`: the batch
    stays, workers share it out; `none`: slots are as the space and the configuration say, which is strong as well."""
    search: Literal["grid", "random", "optuna"] = setting("grid")
    """`grid`: every combination of the lists; `random`: `trials` of them, or of the ranges; `optuna`: chosen one after
    another by what was measured before (TPE, Bergstra et al., 2011)."""
    trials: int = setting(20, at_least=1)
    """How many trials `random` and `optuna` make."""
    stop_bad: Literal["auto", "none", "asha"] = setting("auto")
    """`asha`: stop trials early whose objective is among the worse at the same step, by successive halving without waiting
    (Li et al., 2020). `auto`: `asha` with the objective `loss` and at least `keep`^2 combinations, else `none`."""
    keep: float = setting(3.0, above=1)
    """With `asha`, one trial in so many goes on at each rung."""
    objective: Literal["auto", "throughput", "cost", "energy", "time_to_loss", "loss"] = setting("auto")
    """What is best: the most tokens a second, the lowest price or energy a token, the least time to `target_loss`, or the
    lowest validation loss after the trial's steps. `auto`: `loss` where nothing varies but settings that leave the work of a
    step as it is (those of the optimizer and the objective, dropout, clipping, the seed), else `throughput`."""
    target_loss: float = setting(0.0, at_least=0)
    """With `time_to_loss`, the training loss (mean of a window) at which a trial has arrived; 0: not given."""
    target_tokens: float = setting(0.0, at_least=0)
    """Tokens for which the report tells time, price and energy; 0: those of the configuration itself."""
    price_per_hour: float = setting(0.0, at_least=0)
    """Price of one worker's hour, in any currency; 0: unknown, unless `cluster` tells."""
    cluster: str | None = setting(None)
    """YAML file that describes the cluster to predict for: devices a node, links, price; see `docs/scaling.md`."""
    warmup_steps: int = setting(10, at_least=1)
    """Steps at the start of a trial that are not measured: they compile, connect and fill caches."""
    window_steps: int = setting(10, at_least=1)
    """Steps of one window; each window is one measurement of the speed."""
    windows: int = setting(8, at_least=1)
    """Windows of a trial at most."""
    least_windows: int = setting(3, at_least=1)
    """Windows of a trial before it may end for being precise enough."""
    precision: float = setting(0.02, at_least=0)
    """A trial ends when half the 95 % interval of its mean speed is at most this share of it; 0: never before `windows`."""
    repeats: int = setting(1, at_least=1)
    """Rounds through all combinations, one after another, so that a machine's slow hour does not hit one of them alone. With
    the objective `loss` each round has another seed."""
    seeds: int = setting(3, at_least=1)
    """With `loss`, how many seeds at most decide among trials whose loss does not differ by more than another seed might
    make it; 1: one decides alone."""
    isolated: bool = setting(True)
    """One trial at a time: two that shared a node would measure each other."""
    at_once: int = setting(2, at_least=1, was="sweep.concurrent", renamed="0.3")
    """Trials at a time when they are not isolated, as far as there are processors for: see scaling.threads. What
    a cluster has beyond their places is left to others."""
    retry: bool = setting(False)
    """When a sweep is started again, measure again what failed, hung or ran out of memory."""
    share: str = setting("", since="0.3")
    """`k/n`: measure only every n-th combination of a grid, from the k-th on, counted from 0. So many jobs of one name share
    a sweep, as a Slurm array's do; the last to end writes the answer. Empty: all of them."""
    share_base: bool = setting(False, since="0.3")
    """Train all trials beside each other in this process, over one frozen base: for the objective `loss`, of settings of
    `lora`, `optimizer` and `data`. Without Ray, and without windows of speed, which trials would take from each other. Each
    trains to its end: none is stopped for being bad, or late."""
    timeout_s: float = setting(_TIMEOUT_S, above=0)
    """Seconds after which a trial is asked to end, with the windows that it has, and is given up as hung where it does not
    or has none."""

    def __post_init__(self) -> None:
        """Raises SettingError where a field is out of range, `space` has no choices, or the objective lacks its figure."""
        super().__post_init__()
        if self.objective == "auto" and self.space:
            # Everyone who reads it wants to know which. Not without a space, as defaults are that others are put over.
            object.__setattr__(self, "objective", "loss" if all(map(same_work, self.space)) else "throughput")
        if self.stop_bad == "auto" and self.space:
            many = self.objective == "loss" and not self.share_base and self._combinations() >= self.keep**2
            object.__setattr__(self, "stop_bad", "asha" if many else "none")
        for key, choices in self.space.items():
            self._check_choices(key, choices)
        self._check_share()
        if self.share_base:
            self._check_share_base()
        if self.least_windows > self.windows:
            raise self.error("least_windows", f"must be at most sweep.windows, {self.windows}")
        if self.objective == "time_to_loss" and not self.target_loss:
            raise self.error("target_loss", "must be given with sweep.objective time_to_loss")
        if self.objective == "cost" and not self.price_per_hour and not self.cluster:
            raise self.error("price_per_hour", "must be given, or sweep.cluster, with sweep.objective cost")

    @property
    def part(self) -> tuple[int, int]:
        """Which of how many shares, (0, 1) for all."""
        number, _, count = (self.share or "0/1").partition("/")
        return int(number), int(count)

    def _check_share(self) -> None:
        form = re.fullmatch(r"(\d+)/(\d+)", self.share or "0/1")
        if form is None or not 0 <= int(form[1]) < int(form[2]):
            raise self.error("share", "must be k/n with k from 0 to n - 1, such as 0/4")
        if self.share and self.search != "grid":
            raise self.error("share", f"needs sweep.search grid, whose combinations are known before; it is {self.search}")

    def _check_share_base(self) -> None:
        if self.search == "optuna":
            raise self.error("share_base", "must be false with sweep.search optuna, which tries one after another")
        if self.share:
            raise self.error("share_base", "must be false with sweep.share, whose trials are those of several jobs")
        if self.stop_bad == "asha":
            raise self.error("stop_bad", "must be `auto` or `none` with sweep.share_base: all trials train to their end")
        if self.timeout_s != _TIMEOUT_S:
            raise self.error("timeout_s", "must be left out with sweep.share_base: all trials train to their end")
        if self.objective == "auto":  # without a space: defaults, that others are put over
            return
        if self.objective != "loss":
            raise self.error("share_base", f"must be false with sweep.objective `{self.objective}`: give `loss`")

    def _combinations(self) -> int:
        """How many are tried at most."""
        every = math.prod(len(choices) for choices in self.space.values() if isinstance(choices, list | tuple))
        return every if self.search == "grid" else self.trials

    def _check_choices(self, key: str, choices: Any) -> None:
        if masked_all(choices) != choices:
            raise self.error("space", f"must give {key} no passwords or keys, as what trials differ in is written down")
        if isinstance(choices, list | tuple) and choices:
            return
        if isinstance(choices, Mapping) and len(choices) == 1:
            ((kind, ends),) = choices.items()
            if kind in RANGES and self._is_range(kind, ends):
                if self.search == "grid":
                    raise self.error("search", f"must be `random` or `optuna`, as sweep.space has a range for {key}")
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
class SweepConfig(Config):
    """The settings of a training, and of the sweep over some of them."""

    sweep: Sweep = Sweep()
    """What is tried, and how."""

    def __post_init__(self) -> None:
        """Raises SettingError where `sweep.space` or `sweep.where` names no setting of a training, or a trial's own."""
        super().__post_init__()
        if self.run is not None and (fault := name_fault(self.run, "-" + 8 * "0")):  # as a trial's name ends
            raise self.error("run", fault)
        known = self.training().flat()
        for key in self.sweep.space:
            if key not in known:
                raise self.sweep.error("space", f"names {key}, which is no setting of a training; --help lists them")
            if key in OF_TRIALS:
                raise self.sweep.error("space", f"names {key}, which each trial sets by itself")
        for text in self.sweep.where:
            Condition(text, known)
        if self.sweep.share_base:
            self._check_sharing()
        if self.scaling.mesh == "auto" or "scaling.mesh" in self.sweep.space:
            raise self.scaling.error("mesh", "must be `given` in a sweep: vary scaling.tensor, pipeline or context")

    def _check_sharing(self) -> None:
        if not self.lora.rank:
            raise self.sweep.error("share_base", "needs lora.rank above 0: only the base of adapters can be shared")
        for key in self.sweep.space:
            if is_shared(key):
                raise self.sweep.error(
                    "share_base", f"must be false as sweep.space has {key}: it is the base's, or how all are computed"
                )
        refuse_sharing(self.task, self.train)

    def training(self) -> Config:
        """The settings of a training alone."""
        return Config(**{item.name: getattr(self, item.name) for item in fields(Config)})
