"""The search space of a sweep: its settings, and the candidates in it.

    for candidate in enumerate_grid(config): ...              # every combination, in rounds
    candidate.config                                          # the training's settings, or None if a rule refuses them
    candidate.refusal                                         # the rule, in words

The order of a grid and of random draws depends on the configuration alone, so a restarted sweep meets the same candidates,
and their keys show the measured ones.
"""

import hashlib
import itertools
import json
import math
import random
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

from raystride.pipelines.config import Config, OptimizerConfig, ScalingConfig, SettingError, TrainConfig
from raystride.pipelines.config.parse import with_settings
from raystride.pipelines.config.renamed import oldest_names
from raystride.pipelines.config.schedules import highest_step
from raystride.pipelines.config.sweep import Condition, SweepConfig, SweepJobConfig
from raystride.pipelines.data.plugins import PluginBundle
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.observability.report.run_figures import rate_unit

Settings = Mapping[str, Any]
"""Values by the settings' full names."""
MAX_DRAWS_PER_CANDIDATE = 100
"""Random draws for each candidate before the conditions are assumed to leave no more."""
KEY_SWEEP_SETTINGS = ("scaling", "warmup_steps", "window_steps", "windows", "objective", "target_loss")
"""Settings of a sweep that affect a trial's figures."""
SCHEDULE_STEPS = ("warmup_steps", "decay_steps")
"""Settings of the optimizer that are numbers of steps."""
MESH_SETTINGS = ("scaling.tensor", "scaling.pipeline", "scaling.schedule", "scaling.context", "scaling.context_exchange")
"""Settings of how a group of workers computes a slot together."""
IGNORED_SETTINGS = ("run", "storage", "launch.", "record.")
"""Settings of a training that do not affect figures, or prefixes of their names."""


@dataclass(frozen=True)
class Candidate:
    """One combination of settings, in one round."""

    base: SweepJobConfig
    settings: Settings
    """Differences from the base, by full name."""
    round: int = 0
    """From 0; each combination is measured once a round, if trials are compared by quality from another seed."""

    @cached_property
    def _built_config(self) -> Config | SettingError:
        try:
            return self._shorten_training(self._whole_training)
        except SettingError as error:
            return error

    @property
    def config(self) -> Config | None:
        """The training's settings; None if they contradict each other."""
        return self._built_config if isinstance(self._built_config, Config) else None

    @property
    def refusal(self) -> str:
        """The rule that refuses the settings, in words; empty if none does."""
        return "" if isinstance(self._built_config, Config) else str(self._built_config)

    @property
    def recommended(self) -> Config:
        """The settings to train with: those of the sweep's training, with this combination, and the modules that have
        registered its task or sources. Raises SettingError."""
        training = self.base.training()
        modules = PluginBundle.collect(training).imported
        return replace(self._whole_training, run=None, plugins=(*training.plugins, *modules))

    @cached_property
    def _whole_training(self) -> Config:
        """The training that the trial stands for. Compared by quality it has as many samples as the configured one, so that
        another batch has another number of steps. Raises SettingError."""
        config, factor = with_settings(self.base.training(), self._trial_settings()), self._step_factor
        if factor == 1:
            return config
        optimizer = scale_schedule(config.optimizer, factor, fixed=self.settings)
        steps = config.train.steps if "train.steps" in self.settings else round(config.train.steps * factor)
        return replace(config, train=replace(config.train, steps=steps), optimizer=optimizer)

    @cached_property
    def _step_factor(self) -> Fraction:
        """Steps of this batch that have the samples, or targets, of a configured step; 1 where quality is not compared.
        Raises SettingError."""
        if not self.base.sweep.by_quality:
            return Fraction(1)
        configured, own = (
            config.train.samples_per_step
            * (config.train.slot_tokens or 1)
            * round(build_task(config).targets_per_sample or 1)
            for config in (self.base.training(), with_settings(self.base.training(), self._trial_settings()))
        )
        return Fraction(configured, own)

    @property
    def sweep(self) -> SweepConfig:
        """The measurement of this trial: that of the sweep, in steps of this batch. Raises SettingError."""
        sweep, factor = self.base.sweep, self._step_factor
        if factor == 1:
            return sweep
        steps = round(sweep.trial_steps * factor)
        window_steps = max(1, sweep.window_steps * steps // sweep.trial_steps)
        if (warmup_steps := steps - sweep.windows * window_steps) < 1:
            raise sweep.error(
                "windows",
                f"leaves a trial of this batch {steps} steps, as all trials have the same samples: give a longer "
                "sweep.window_steps, or smaller batches",
            )
        return replace(sweep, warmup_steps=warmup_steps, window_steps=window_steps)

    @cached_property
    def key(self) -> str:
        """Sixteen hexadecimal digits of everything that affects the figures."""
        training = {
            name: value
            for name, value in self.base.training().naming_settings().items()
            if not name.startswith(IGNORED_SETTINGS)
        }
        sweep = {name: getattr(self.base.sweep, name) for name in KEY_SWEEP_SETTINGS}
        first = oldest_names(Config)
        own = {first.get(name, name): value for name, value in self.settings.items()}
        # Earlier versions gave every trial the whole training's warm-up: those figures are not comparable with these.
        parts = [training | own, sweep, self.round, *["schedule in small"] * self._has_short_schedule()]
        parts += [f"equal samples, {self._factor_or_1} of the steps"] * (self._factor_or_1 != 1)
        text = json.dumps(parts, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def keys(self) -> tuple[str, str]:
        """The key, and that of earlier versions: half as long, so that two candidates may share it."""
        return self.key, self.key[:8]

    def matches(self, settings: Settings, number: int) -> bool:
        """Returns True if these are its settings, as they are or as JSON holds them, and this its round."""
        own_json, given_json = (
            json.dumps(dict(values), sort_keys=True, default=str) for values in (self.settings, settings)
        )
        return own_json == given_json and number == self.round

    @property
    def run(self) -> str:
        """Name of the run that measures it."""
        return f"{self.base.run}-{self.key}"

    @property
    def label(self) -> str:
        """The settings in short, for tables: `workers 2, precision bf16`."""
        return (
            ", ".join(f"{setting_name(key)} {format_value(value)}" for key, value in self.settings.items())
            or "as configured"
        )

    def _short_schedule(self, optimizer: OptimizerConfig, train: TrainConfig) -> OptimizerConfig:
        """Returns the trial's schedule: that of the training in small, except for what the space varies."""
        return shorten_schedule(optimizer, self.sweep.trial_steps, known_steps(train), fixed=self.settings)

    def _has_short_schedule(self) -> bool:
        """Returns True if the trial's schedule is another one than the training's."""
        if not self.base.sweep.by_quality:
            return False
        try:
            training = self._whole_training
            return self._short_schedule(training.optimizer, training.train) != training.optimizer
        except SettingError:
            return False

    @property
    def _factor_or_1(self) -> Fraction:
        """The factor of the steps; 1 of settings that contradict each other."""
        try:
            return self._step_factor
        except SettingError:
            return Fraction(1)

    def _trial_settings(self) -> dict[str, Any]:
        """Returns the settings; under weak scaling each worker gets the slots of the base."""
        settings, base = dict(self.settings), self.base
        if self.round and base.sweep.by_quality:
            settings["seed"] = settings.get("seed", base.seed) + self.round
        if base.sweep.scaling == "weak":
            workers = settings.get("scaling.workers", base.scaling.workers)
            if not isinstance(workers, int):
                raise base.scaling.error("workers", "must be a number where sweep.scaling is weak")
            settings["train.slots"] = settings.get("train.slots", base.train.slots) * workers
        return settings

    def _shorten_training(self, config: Config) -> Config:
        """Returns the settings of a training for measurement only: short, with nothing besides the steps."""
        sweep, train, optimizer = self.sweep, config.train, config.optimizer
        if sweep.objective != "time_to_loss":
            train = replace(train, steps=sweep.trial_steps, epochs=0, hours=0)
        if sweep.by_quality:
            optimizer = self._short_schedule(config.optimizer, config.train)
            refuse_endless_warmup(optimizer, sweep)
        return replace(
            config,
            run=self.run,
            train=replace(train, log_every=sweep.window_steps),
            optimizer=optimizer,
            # One at the end, as small as possible, unless the objective is a figure of it.
            validation=replace(
                config.validation, every=0, every_epochs=0.0, samples=config.validation.samples if sweep.by_quality else 1
            ),
            checkpoint=replace(config.checkpoint, every=0),
            sample=replace(config.sample, tokens=0),
            # Trials are logged to MLflow between two of them, so that no measurement is disturbed.
            record=replace(config.record, mlflow=False),
            # A failure is a result too.
            launch=replace(config.launch, max_restarts=0),
        )


def known_steps(train: TrainConfig) -> int:
    """Returns the steps of a training; 0 if epochs or hours end it, so that their number is not known before."""
    return 0 if train.epochs or train.hours else train.steps


def scale_schedule(optimizer: OptimizerConfig, factor: Fraction, fixed: Container[str] = ()) -> OptimizerConfig:
    """Returns the schedule with its steps multiplied by a factor, at least one; `fixed` names settings that keep theirs."""
    steps = {name: getattr(optimizer, name) for name in SCHEDULE_STEPS if f"optimizer.{name}" not in fixed}
    scaled: dict[str, Any] = {name: max(1, int(value * factor)) for name, value in steps.items() if value}
    return replace(optimizer, **scaled)


def shorten_schedule(
    optimizer: OptimizerConfig, trial_steps: int, training_steps: int, fixed: Container[str] = ()
) -> OptimizerConfig:
    """Returns the schedule of a training in small: warm-up and decay end at the same share of its steps.

    `training_steps` 0: unknown, so the schedule is unchanged, as for a trial that is no shorter. `fixed` names settings that
    keep their values. A warm-up that ends within the training ends within a trial of two steps or more.
    """
    if not 0 < trial_steps < training_steps:
        return optimizer
    return scale_schedule(optimizer, Fraction(trial_steps, training_steps), fixed)


def refuse_endless_warmup(optimizer: OptimizerConfig, sweep: SweepConfig) -> None:
    """Raises SettingError if a trial ends inside its warm-up, so that it never has the learning rate it is compared for."""
    # The update with the highest rate, counted from 0.
    highest = highest_step(optimizer, sweep.trial_steps)
    if sweep.trial_steps <= highest:
        raise optimizer.error(
            "warmup_steps",
            f"must be less than the {sweep.trial_steps} steps of a trial, which has not its learning rate before: give "
            "train.steps, by which the warm-up becomes as much shorter as the trial is, or more sweep.windows",
        )


def throughput_unit(base: SweepJobConfig) -> str:
    """Returns what the throughput of a sweep's trials counts, `tokens` for instance."""
    return rate_unit(build_task(base.training()).unit)


def setting_name(key: str) -> str:
    """Returns a setting's name without its section."""
    return key.rsplit(".", 1)[-1]


def format_value(value: Any) -> str:
    """Returns a value for display."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def describe_mesh(scaling: ScalingConfig, settings: Settings) -> str:
    """Returns the mesh of a combination in words: `groups of 4 (pipeline 2 zbv, tensor 2)`; empty if a group is one worker.

    Raises SettingError if `settings` has an invalid mesh.
    """
    scaling = replace(scaling, **{setting_name(key): settings[key] for key in MESH_SETTINGS if key in settings})
    if scaling.group == 1:
        return ""
    text_by_dimension = {
        "pipeline": f"pipeline {scaling.pipeline} {scaling.schedule}",
        "context": f"context {scaling.context} {scaling.context_exchange}",
        "tensor": f"tensor {scaling.tensor}",
    }
    dimensions = ", ".join(words for name, words in text_by_dimension.items() if getattr(scaling, name) > 1)
    return f"groups of {scaling.group} ({dimensions})"


def format_mesh_flags(settings: Settings) -> str:
    """Returns the mesh of a combination as flags of a command line; empty if none varies."""
    return " ".join(f"--{key} {settings[key]}" for key in MESH_SETTINGS if key in settings)


def enumerate_grid(base: SweepJobConfig) -> Iterator[Candidate]:
    """Yields every combination that meets the conditions, the first setting slowest; all of them in each round."""
    space = base.sweep.space
    combinations = [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]
    return _repeat_rounds(base, [settings for settings in combinations if meets_conditions(base, settings)])


def draw_random(base: SweepJobConfig) -> Iterator[Candidate]:
    """Yields `sweep.trials` different random combinations that meet the conditions, fewer if there are no more."""
    rng, drawn = random.Random(base.seed), []  # the settings' own seed: the same draws when started again
    for _ in range(base.sweep.trials * MAX_DRAWS_PER_CANDIDATE):
        settings = {key: _draw_value(choices, rng) for key, choices in base.sweep.space.items()}
        if settings not in drawn and meets_conditions(base, settings):
            drawn.append(settings)
        if len(drawn) == base.sweep.trials:
            break
    return _repeat_rounds(base, drawn)


def meets_conditions(base: SweepJobConfig, settings: Settings) -> bool:
    """Returns True if the conditions of `sweep.constraints` hold. Raises SettingError for one that cannot be evaluated."""
    values = base.training().flat() | dict(settings)
    return all(Condition(text, values).holds(values) for text in base.sweep.constraints)


def _repeat_rounds(base: SweepJobConfig, combinations: list[dict[str, Any]]) -> Iterator[Candidate]:
    for number in range(base.sweep.repeats):
        # Every other round backwards: drift over time then affects both ends of the list alike.
        for settings in combinations[:: -1 if number % 2 else 1]:
            yield Candidate(base, settings, number)


def _draw_value(choices: Any, rng: random.Random) -> Any:
    if not isinstance(choices, Mapping):
        return rng.choice(list(choices))
    ((kind, (low, high)),) = choices.items()
    if kind == "integers":
        return rng.randint(low, high)
    if kind == "log_uniform":
        return math.exp(rng.uniform(math.log(low), math.log(high)))
    return rng.uniform(low, high)
