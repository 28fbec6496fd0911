"""What a sweep tries: the space of settings, and the candidates in it.

    for candidate in grid(config): ...                        # every combination, in rounds
    candidate.config                                          # the training's settings, or None where a rule refuses them
    candidate.refusal                                         # the rule, in words

The order of a grid and of random draws depends on the configuration alone, so a sweep that is started again meets the same
candidates, and their keys tell which of them have been measured.
"""

import hashlib
import itertools
import json
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from raystride.pipelines.config import Config, Scaling, SettingError
from raystride.pipelines.config.condition import Condition
from raystride.pipelines.config.parse import with_settings
from raystride.pipelines.config.sweep import SweepConfig

Settings = Mapping[str, Any]
"""Values by the settings' full names."""
ATTEMPTS = 100
"""Random draws for each candidate before the conditions are taken to leave no more."""
DECISIVE = ("scaling", "warmup_steps", "window_steps", "windows", "objective", "target_loss")
"""Settings of a sweep on which a trial's figures depend."""
MESH = ("scaling.tensor", "scaling.pipeline", "scaling.schedule", "scaling.context", "scaling.context_exchange")
"""Settings that say how a group of workers computes a slot together."""
ASIDE = ("run", "storage", "launch.", "record.")
"""Settings of a training on which they do not, or names that begin so."""


@dataclass(frozen=True)
class Candidate:
    """One combination of settings, in one round."""

    base: SweepConfig
    settings: Settings
    """What differs from the base, by full name."""
    round: int = 0
    """From 0; each combination is measured once a round, with the objective `loss` from another seed."""

    @cached_property
    def _made(self) -> Config | SettingError:
        try:
            return self._as_trial(with_settings(self.base.training(), self._spread_out()))
        except SettingError as error:
            return error

    @property
    def config(self) -> Config | None:
        """The training's settings; None where they contradict each other."""
        return self._made if isinstance(self._made, Config) else None

    @property
    def refusal(self) -> str:
        """The rule that refuses the settings, in words; empty where none does."""
        return "" if isinstance(self._made, Config) else str(self._made)

    @property
    def recommended(self) -> Config:
        """The settings to train with: those of the sweep's training, with this combination. Raises SettingError."""
        return replace(with_settings(self.base.training(), self._spread_out()), run=None)

    @cached_property
    def key(self) -> str:
        """Sixteen hexadecimal digits of all that the figures depend on."""
        training = {name: value for name, value in self.base.training().lasting().items() if not name.startswith(ASIDE)}
        sweep = {name: getattr(self.base.sweep, name) for name in DECISIVE}
        text = json.dumps([training | dict(self.settings), sweep, self.round], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def keys(self) -> tuple[str, str]:
        """The key, and the one that earlier versions gave it: half as long, so that two candidates may share it."""
        return self.key, self.key[:8]

    def has(self, settings: Settings, number: int) -> bool:
        """Whether these are its settings, as they were or as JSON holds them, and this its round."""
        own, given = (json.dumps(dict(each), sort_keys=True, default=str) for each in (self.settings, settings))
        return own == given and number == self.round

    @property
    def run(self) -> str:
        """The name of the run that measures it."""
        return f"{self.base.run}-{self.key}"

    @property
    def label(self) -> str:
        """The settings in short, for tables: `workers 2, precision bf16`."""
        return ", ".join(f"{short(key)} {shown_value(value)}" for key, value in self.settings.items()) or "as configured"

    def _spread_out(self) -> dict[str, Any]:
        """The settings, under weak scaling with as many slots a worker as there would be in all."""
        settings, base = dict(self.settings), self.base
        if self.round and base.sweep.objective == "loss":
            settings["seed"] = settings.get("seed", base.seed) + self.round
        if base.sweep.scaling == "weak":
            workers = settings.get("scaling.workers", base.scaling.workers)
            if not isinstance(workers, int):
                raise base.scaling.error("workers", "must be a number where sweep.scaling is weak")
            settings["train.slots"] = settings.get("train.slots", base.train.slots) * workers
        return settings

    def _as_trial(self, config: Config) -> Config:
        """The settings of a training that is there to be measured: short, and without what is not the step."""
        sweep, train = self.base.sweep, config.train
        by_loss = sweep.objective == "loss"
        if sweep.objective != "time_to_loss":
            train = replace(train, steps=sweep.warmup_steps + sweep.windows * sweep.window_steps, epochs=0, hours=0)
        return replace(
            config,
            run=self.run,
            train=replace(train, log_every=sweep.window_steps),
            # One at the end, as small as can be, unless it is what counts.
            validation=replace(config.validation, every=0, samples=config.validation.samples if by_loss else 1),
            checkpoint=replace(config.checkpoint, every=0),
            sample=replace(config.sample, tokens=0),
            # MLflow is told between two trials, so that no measurement is disturbed.
            record=replace(config.record, mlflow=False),
            # A failure is a result too.
            launch=replace(config.launch, restarts=0),
        )


def short(key: str) -> str:
    """A setting's name without its section."""
    return key.rsplit(".", 1)[-1]


def shown_value(value: Any) -> str:
    """A value as people read it."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def mesh_words(scaling: Scaling, settings: Settings) -> str:
    """How a combination's groups of workers compute a slot together; empty where a group is one worker.

    In words: `groups of 4 (pipeline 2 zbv, tensor 2)`. Raises SettingError where `settings` has what is no mesh.
    """
    scaling = replace(scaling, **{short(key): settings[key] for key in MESH if key in settings})
    if scaling.group == 1:
        return ""
    several = {
        "pipeline": f"pipeline {scaling.pipeline} {scaling.schedule}",
        "context": f"context {scaling.context} {scaling.context_exchange}",
        "tensor": f"tensor {scaling.tensor}",
    }
    named = ", ".join(words for name, words in several.items() if getattr(scaling, name) > 1)
    return f"groups of {scaling.group} ({named})"


def mesh_flags(settings: Settings) -> str:
    """The mesh of a combination as flags of a command line; empty where none varies."""
    return " ".join(f"--{key} {settings[key]}" for key in MESH if key in settings)


def grid(base: SweepConfig) -> Iterator[Candidate]:
    """Every combination of the lists, the first setting slowest, that meets the conditions; all of them in each round."""
    space = base.sweep.space
    combinations = [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]
    return _in_rounds(base, [settings for settings in combinations if meets(base, settings)])


def draw(base: SweepConfig) -> Iterator[Candidate]:
    """`sweep.trials` different random combinations that meet the conditions, fewer where there are no more."""
    chance, found = random.Random(base.seed), []  # the settings' own seed: the same draws when started again
    for _ in range(base.sweep.trials * ATTEMPTS):
        settings = {key: _drawn(choices, chance) for key, choices in base.sweep.space.items()}
        if settings not in found and meets(base, settings):
            found.append(settings)
        if len(found) == base.sweep.trials:
            break
    return _in_rounds(base, found)


def meets(base: SweepConfig, settings: Settings) -> bool:
    """Whether the conditions of `sweep.where` hold. Raises SettingError for one that cannot be told."""
    values = base.training().flat() | dict(settings)
    return all(Condition(text, values).holds(values) for text in base.sweep.where)


def _in_rounds(base: SweepConfig, combinations: list[dict[str, Any]]) -> Iterator[Candidate]:
    for number in range(base.sweep.repeats):
        # Every other round backwards: what drifts with time then hits both ends of the list alike.
        for settings in combinations[:: -1 if number % 2 else 1]:
            yield Candidate(base, settings, number)


def _drawn(choices: Any, chance: random.Random) -> Any:
    if not isinstance(choices, Mapping):
        return chance.choice(list(choices))
    ((kind, (low, high)),) = choices.items()
    if kind == "integers":
        return chance.randint(low, high)
    if kind == "log_uniform":
        return math.exp(chance.uniform(math.log(low), math.log(high)))
    return chance.uniform(low, high)
