"""Learning-rate schedules: one table, which the settings, their checks and the training read.

    SCHEDULES["wsd"].falls                                    # True: it needs a run whose end is known
    learning_rate(config.optimizer, step, total_steps, width)

A further schedule is a function, a row of the table and a name in `ScheduleName`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

ScheduleName = Literal["cosine", "linear", "constant", "noam", "wsd"]
DecayShape = Literal["linear", "sqrt", "cosine"]
SHAPES: dict[DecayShape, Callable[[float], float]] = {
    "linear": lambda done: 1 - done,
    "sqrt": lambda done: 1 - math.sqrt(done),
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
}
"""Remaining part of the way from the highest to the lowest rate, by the completed share of a decay."""


class RateSettings(Protocol):
    """The settings of `optimizer` that schedules read."""

    @property
    def schedule(self) -> ScheduleName: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def min_lr_ratio(self) -> float: ...
    @property
    def warmup_steps(self) -> int: ...
    @property
    def decay_steps(self) -> int: ...
    @property
    def decay_shape(self) -> DecayShape: ...
    def warmup(self, total_steps: int) -> int:
        """Returns the steps of the warm-up in a run of so many."""
        ...

    def decay_length(self, total_steps: int) -> int:
        """Returns the number of steps of the decay of `wsd`, at the end of a run."""
        ...


@dataclass(frozen=True)
class Schedule:
    """A learning-rate schedule."""

    rate: Callable[[RateSettings, int, int, int], float]
    """Called with settings, step, all steps of the run (0: unknown) and width, from the end of the warm-up on."""
    sentence: str
    """Its formula, for people."""
    falls: bool = False
    """Whether it falls to the lowest rate, and needs a known end of the run."""
    has_own_warmup: bool = False
    """Whether it is also called in the warm-up."""


def _fall(shape: DecayShape) -> Callable[[RateSettings, int, int, int], float]:
    """Returns the schedule that falls from the warm-up to the end."""

    def rate(settings: RateSettings, step: int, total_steps: int, width: int) -> float:
        begin, end = settings.warmup(total_steps), settings.decay_steps or total_steps
        return _decayed(settings, shape, (step - begin) / max(1, end - begin))

    return rate


def _warm_up_stay_decay(settings: RateSettings, step: int, total_steps: int, width: int) -> float:
    length = settings.decay_length(total_steps)
    begin = max(settings.warmup(total_steps), total_steps - length)
    return _decayed(settings, settings.decay_shape, (step - begin) / length if length else 0.0)


def _decayed(settings: RateSettings, shape: DecayShape, done: float) -> float:
    remaining = SHAPES[shape](min(1.0, max(0.0, done)))
    return settings.learning_rate * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * remaining)


def _noam(settings: RateSettings, step: int, total_steps: int, width: int) -> float:
    number, warmup = step + 1, settings.warmup(total_steps)
    return float(settings.learning_rate * width**-0.5 * min(number**-0.5, number * warmup**-1.5))


SCHEDULES: dict[ScheduleName, Schedule] = {
    "cosine": Schedule(_fall("cosine"), "falls to the end, as half a cosine (Loshchilov and Hutter, 2017)", falls=True),
    "linear": Schedule(_fall("linear"), "falls to the end, in a line", falls=True),
    "constant": Schedule(lambda settings, *_: settings.learning_rate, "stays"),
    "noam": Schedule(
        _noam,
        "learning_rate x hidden_size^-0.5 x min(n^-0.5, n x warmup_steps^-1.5) at the n-th step, warm-up included "
        "(Vaswani et al., 2017, eq. 3)",
        has_own_warmup=True,
    ),
    "wsd": Schedule(_warm_up_stay_decay, "stays, and falls over the last `decay_share` (Hu et al., 2024)", falls=True),
}


def learning_rate(settings: RateSettings, step: int, total_steps: int, width: int) -> float:
    """Returns the rate of update `step` (0 is the first) of `total_steps` (0: unknown), after a linear warm-up."""
    schedule, warmup = SCHEDULES[settings.schedule], settings.warmup(total_steps)
    if step < warmup and not schedule.has_own_warmup:
        # + 1, so that the first update does not have a rate of 0.
        return settings.learning_rate * (step + 1) / (warmup + 1)
    return schedule.rate(settings, step, total_steps, width)


def highest_step(settings: RateSettings, total_steps: float) -> int:
    """Returns the step, from 0, of the update with the highest rate."""
    warmup = settings.warmup(int(total_steps) if math.isfinite(total_steps) else 0)
    return warmup - SCHEDULES[settings.schedule].has_own_warmup


def describe_endless_warmup(settings: RateSettings, total_steps: float) -> str:
    """Returns a warning if the warm-up takes all of a run's steps; "" if the highest rate is reached."""
    if total_steps > highest_step(settings, total_steps):
        return ""
    return (
        f"the highest learning rate is never reached: optimizer.warmup_steps is {settings.warmup_steps}, and this run has "
        f"{total_steps} steps"
    )
