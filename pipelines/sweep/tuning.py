"""Runs the trials of a sweep by Ray Tune: one after another, each a training of its own under Ray Train.

    measure_with_tune(plan, candidates, [], len(candidates), on_result=lambda result: print(result.label))

Tune's function runs the trial's driver, in a process on the head node that reserves no processor, so that all of them are
left to the workers; two trials that each reserved some, and waited for the rest, would deadlock. It serves trial after
trial, while their workers are new processes each time. A result is saved in the sweep's folder before Tune gets it. A trial
that Tune stops ends its training first, since Tune knows nothing of the workers.
"""

import logging
import math
import os
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ray import tune

from raystride.pipelines.config.sweep import SEARCHES, SweepConfig, SweepJobConfig
from raystride.pipelines.launch.cluster.cluster import uses_running_cluster
from raystride.pipelines.launch.cluster.internals import head_node_resources, remove_orphaned_placement_groups
from raystride.pipelines.launch.cluster.recorder_handle import mlflow_environment
from raystride.pipelines.launch.cluster.resources import resolve_allocation
from raystride.pipelines.launch.cluster.trainer import ray_storage_options
from raystride.pipelines.sweep.choice import compute_score, token_score
from raystride.pipelines.sweep.result import MeasuredWindow, Result, load_candidate_result, save_result
from raystride.pipelines.sweep.space import Candidate, meets_conditions
from raystride.pipelines.sweep.trial import (
    SweepPlan,
    TrialTimeout,
    build_result,
    refuse_candidate,
    result_without_figures,
    run_trial,
)

QUIET_ENVIRONMENT = {
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths are those of the sweep's own working directory
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
}
SCORE, WINDOW, TRIAL = "score", "window", "trial"
STOP_TIMEOUT_S = 60
"""Time that a trial stopped by Tune has to end its training."""


def measure_with_tune(
    plan: SweepPlan,
    candidates: Sequence[Candidate],
    known: Sequence[Result],
    num_left: int,
    on_result: Callable[[Result], None],
) -> None:
    """Runs the candidates; without any, with an adaptive search, `num_left` suggested ones, given the `known` results.

    `on_result` gets each result when its trial ends, in this process.
    """
    os.environ.update({name: os.environ.get(name, value) for name, value in QUIET_ENVIRONMENT.items()})
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # failures of trials are in their own lines
    sweep = plan.base.sweep
    is_adaptive = SEARCHES[sweep.search].is_adaptive and not candidates
    trials = [{"settings": dict(candidate.settings), "round": candidate.round} for candidate in candidates]
    max_concurrent = 1 if sweep.isolated else sweep.max_concurrent
    is_only_driver = max_concurrent == 1 and not uses_running_cluster(plan.base.launch)
    remove_orphaned_placement_groups(is_only_driver)  # there are none yet: an unsupported Ray is reported here, visibly
    function = tune.with_parameters(_trial, plan=plan, is_only_driver=is_only_driver, environment=mlflow_environment())
    tune.Tuner(
        tune.with_resources(function, tune.PlacementGroupFactory([head_node_resources()])),
        param_space=_tune_space(plan.base) if is_adaptive else {TRIAL: tune.grid_search(trials)},
        tune_config=tune.TuneConfig(
            metric=SCORE,
            mode="min",
            num_samples=num_left if is_adaptive else 1,
            max_concurrent_trials=max_concurrent,
            search_alg=_build_optuna(plan, known) if is_adaptive else None,
            scheduler=_build_scheduler(sweep, candidates),
            # One process drives trial after trial.
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(
            name="tune", **ray_storage_options(plan.folder / ".ray"), verbose=0, callbacks=[_ResultCallback(plan, on_result)]
        ),
    ).fit()


def parse_candidate(parameters: Mapping[str, Any], base: SweepJobConfig) -> Candidate:
    """Returns the candidate of Tune's parameters."""
    trial = parameters.get(TRIAL)
    return Candidate(base, trial["settings"], trial["round"]) if trial else Candidate(base, dict(parameters))


def _trial(parameters: dict[str, Any], plan: SweepPlan, is_only_driver: bool, environment: Mapping[str, str]) -> None:
    """Runs one trial in Tune's process.

    `is_only_driver`: no one else can have workers on the cluster. `environment`: MLflow's variables of the driver. Raises if
    the trial hung, so that its process, and with it all that it started, is ended; SystemExit if Tune stopped it.
    """
    os.environ.update(environment)
    os.environ["TUNE_FUNCTION_THREAD_TIMEOUT_S"] = str(STOP_TIMEOUT_S)  # Tune reads it before the next trial
    plan.plugins.register()
    candidate = parse_candidate(parameters, plan.base)
    result = (
        load_candidate_result(plan.folder, candidate)
        or _refuse_unmet_conditions(candidate)
        or refuse_candidate(candidate, plan.resources)
    )
    if result is None:
        remove_orphaned_placement_groups(is_only_driver)
        reporter = _WindowReporter(plan, candidate)
        result = run_trial(candidate, plan.storage, plan.resources, plan.tags, reporter, plan.plugins)
    save_result(plan.folder, result)
    if result.status == "hung":
        raise TrialTimeout(result.cause)
    if result.status == "stopped_early":
        sys.exit(0)  # as tune.report did, which must not be called again
    value = compute_score(result, plan.base.sweep, plan.price_per_hour)
    # Both Optuna and ASHA leave out NaN; infinity would spoil their quantiles.
    tune.report({SCORE: value if math.isfinite(value) else math.nan, WINDOW: plan.base.sweep.windows + 1})


class _WindowReporter:
    """Reports each window to the scheduler, if there is one that stops trials; returns False to stop the trial.

    With the objective energy, which is known only at the end, it reports the speed.
    """

    def __init__(self, plan: SweepPlan, candidate: Candidate) -> None:
        assert candidate.config
        self._plan, self._asked = plan, plan.base.sweep.early_stopping != "none"
        self._warmup_steps = candidate.sweep.warmup_steps
        self._workers = resolve_allocation(candidate.config, plan.resources).workers
        self._speeds: list[float] = []

    def __call__(self, window: MeasuredWindow) -> bool:
        sweep = self._plan.base.sweep
        if not self._asked or window.begin < self._warmup_steps:
            return True
        self._speeds.append(window.tokens_per_second)
        value = token_score(statistics.fmean(self._speeds), self._workers, sweep, self._plan.price_per_hour)
        if sweep.objective == "time_to_loss" or sweep.by_quality:
            value = math.nan if window.loss is None else window.loss
        try:
            tune.report({SCORE: value, WINDOW: len(self._speeds)})
        except SystemExit:  # Tune's way to end a trial's thread, which would leave its workers behind
            return False
        return True


class _ResultCallback(tune.Callback):  # type: ignore[misc]
    """Receives from Tune, in the sweep's own process, the trials that ended."""

    def __init__(self, plan: SweepPlan, on_result: Callable[[Result], None]) -> None:
        self._plan, self._on_result = plan, on_result
        self._stopped: list[Any] = []
        """Trials that Tune stopped while their trainings are ending."""

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune saves its callbacks for a restore of its own; ours reads the results

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        if (result := self._load_result(trial)) is None:
            self._stopped.append(trial)
        else:
            self._on_result(result)

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        # Its process has ended the previous trial, or has died.
        self._report_stopped()

    def on_experiment_end(self, trials: list[Any], **info: Any) -> None:
        self._report_stopped()

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        candidate = parse_candidate(trial.config, self._plan.base)
        cause = "the process that drove the trial ended"
        if trial.run_metadata.error_filename:  # its public reader looks in a place that gets the file only later
            with suppress(OSError):
                cause = parse_cause(Path(trial.error_file).read_text()) or cause
        fallback = result_without_figures(candidate, "failed", f"{cause}; its trial.txt and Ray's logs may say more")
        self._on_result(self._load_result(trial) or self._save_result(fallback))

    def _report_stopped(self) -> None:
        while self._stopped:
            trial = self._stopped.pop(0)
            self._on_result(self._load_result(trial) or self._save_result(self._read_stopped(trial)))

    def _read_stopped(self, trial: Any) -> Result:
        """Returns the result from the journal of a trial that did not end by itself."""
        candidate = parse_candidate(trial.config, self._plan.base)
        duration_s = float(trial.last_result.get("time_total_s", 0.0))
        folder = self._plan.storage / candidate.run
        return build_result(candidate, folder, self._plan.resources, "stopped_early", seconds=duration_s)

    def _load_result(self, trial: Any) -> Result | None:
        return load_candidate_result(self._plan.folder, parse_candidate(trial.config, self._plan.base))

    def _save_result(self, result: Result) -> Result:
        save_result(self._plan.folder, result)
        return result


def parse_cause(text: str) -> str:
    """Returns the cause in a trial's `error.txt` in a line, empty if there is none.

    Tune also pickles the error, but a pickle would let anyone who can write the storage run code in this process.
    """
    *_, newest = text.rpartition("Failure # ")
    *_, after_traceback = re.split(r'^ +File ".*", line \d+.*$', newest.partition("\n")[2], flags=re.MULTILINE)
    return next(
        (line.strip() for line in after_traceback.splitlines() if line and not line.startswith((" ", "\t", "\x1b"))), ""
    )


def _build_scheduler(sweep: SweepConfig, candidates: Sequence[Candidate]) -> Any:
    """Returns the scheduler that stops bad trials; None: all continue."""
    from ray.tune.schedulers import ASHAScheduler

    if sweep.early_stopping == "none" or (candidates and all(candidate.round for candidate in candidates)):
        return None  # later rounds are of good candidates, and a mean with stopped ones would be too optimistic
    first = max(sweep.min_windows, math.ceil(sweep.windows / sweep.reduction_factor**2)) if sweep.by_quality else None
    return ASHAScheduler(
        time_attr=WINDOW,
        max_t=sweep.windows + 1,
        grace_period=first or sweep.min_windows,
        reduction_factor=sweep.reduction_factor,
    )


def _tune_space(base: SweepJobConfig) -> dict[str, Any]:
    """Returns the space as Tune's distributions."""
    samplers = {
        "uniform": tune.uniform,
        "log_uniform": tune.loguniform,
        "integers": lambda low, high: tune.randint(low, high + 1),
    }
    space = {}
    for key, choices in base.sweep.space.items():
        if isinstance(choices, Mapping):
            ((kind, (low, high)),) = choices.items()
            space[key] = samplers[kind](low, high)
        else:
            space[key] = tune.choice(list(choices))
    return space


def _build_optuna(plan: SweepPlan, known: Iterable[Result]) -> Any:
    """Returns Optuna's TPE, given the earlier results."""
    import optuna
    from ray.tune.search.optuna import OptunaSearch

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    base = plan.base
    scored = [(result.settings, compute_score(result, base.sweep, plan.price_per_hour)) for result in known]
    measured = [(settings, value) for settings, value in scored if math.isfinite(value)]
    return OptunaSearch(
        seed=(base.seed + len(measured)) % 2**32,  # else a restart would begin with the same suggestions
        points_to_evaluate=[settings for settings, _ in measured] or None,
        evaluated_rewards=[value for _, value in measured] or None,
    )


def _refuse_unmet_conditions(candidate: Candidate) -> Result | None:
    """Returns the candidate as refused, if it breaks `sweep.constraints`; for searches that do not know the conditions."""
    if meets_conditions(candidate.base, candidate.settings):
        return None
    return result_without_figures(
        candidate, "refused", f"it breaks a condition of sweep.constraints: {'; '.join(candidate.base.sweep.constraints)}"
    )
