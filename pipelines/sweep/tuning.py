"""The trials of a sweep by Ray Tune: one after another, each a training of its own under Ray Train.

    measure(plan, candidates, len(candidates), done=lambda result: print(result.label))

Tune's function runs the trial's driver, in a process on the head node that holds no processor, so that all of them are left
to the workers; two trials that each held some, and waited for the rest, would wait for ever. It serves trial after trial,
while their workers are new processes each time. A result is kept in the sweep's folder before Tune hears of it.
"""

import logging
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray import tune

from pipelines.config.sweep import SweepConfig
from pipelines.files import Folder
from pipelines.launch.resources import Resources
from pipelines.sweep.choice import score, token_score
from pipelines.sweep.result import Result, Window, keep, results
from pipelines.sweep.space import Candidate, meets
from pipelines.sweep.trial import ended, refusal, result_of, run_trial

HEAD = {"node:__internal_head__": 0.001}
"""What a trial's driver asks for: a place on the head node, and nothing that workers need."""
QUIET = {
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative places are those of the sweep's own working directory
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
}
SCORE, WINDOW, TRIAL = "score", "window", "trial"


@dataclass(frozen=True)
class Plan:
    """What all trials of a sweep share."""

    base: SweepConfig
    storage: Folder
    price_per_hour: float
    """Of a worker; 0: unknown."""
    there: Resources
    """What the cluster has."""

    @property
    def folder(self) -> Folder:
        """The sweep's own."""
        assert self.base.run
        return self.storage / self.base.run


def measure(plan: Plan, candidates: Sequence[Candidate], left: int, done: Callable[[Result], None]) -> None:
    """Runs the candidates, or with `sweep.search` optuna those that it suggests; `done` hears of each that ended."""
    os.environ.update({name: os.environ.get(name, value) for name, value in QUIET.items()})
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # what ended trials is told in their own lines
    sweep = plan.base.sweep
    chosen = sweep.search == "optuna"
    trials = [{"settings": dict(each.settings), "round": each.round} for each in candidates]
    function = tune.with_parameters(_trial, plan=plan)
    tune.Tuner(
        tune.with_resources(function, tune.PlacementGroupFactory([HEAD])),
        param_space=_distributions(plan.base) if chosen else {TRIAL: tune.grid_search(trials)},
        tune_config=tune.TuneConfig(
            metric=SCORE,
            mode="min",
            num_samples=left if chosen else 1,
            max_concurrent_trials=1 if sweep.isolated else sweep.concurrent,
            search_alg=_optuna(plan) if chosen else None,
            scheduler=_scheduler(plan.base),
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(
            name="tune", storage_path=(plan.folder / ".ray").uri, verbose=0, callbacks=[_Ends(plan, done)]
        ),
    ).fit()


def candidate_of(parameters: Mapping[str, Any], base: SweepConfig) -> Candidate:
    """The candidate that Tune's parameters stand for."""
    trial = parameters.get(TRIAL)
    return Candidate(base, trial["settings"], trial["round"]) if trial else Candidate(base, dict(parameters))


def _trial(parameters: dict[str, Any], plan: Plan) -> None:
    """What Tune runs. Raises where the trial hung, so that its process, and with it all that it started, is ended."""
    candidate = candidate_of(parameters, plan.base)
    result = results(plan.folder).get(candidate.key) or _breaks_a_condition(candidate) or refusal(candidate, plan.there)
    if result is None:
        told = _Told(plan, candidate)
        result = run_trial(candidate, plan.storage, plan.there, {"raystride.sweep": str(plan.base.run)}, told)
    keep(plan.folder, result)
    if result.status == "hung":
        raise TimeoutError(result.cause)
    value = score(result, plan.base.sweep, plan.price_per_hour)
    # Not a number, which both Optuna and ASHA leave out, where infinite would spoil their quantiles.
    tune.report({SCORE: value if math.isfinite(value) else math.nan, WINDOW: plan.base.sweep.windows + 1})


class _Told:
    """Tells the scheduler of each window, where there is one that stops trials."""

    def __init__(self, plan: Plan, candidate: Candidate) -> None:
        assert candidate.config
        self._plan, self._asked = plan, plan.base.sweep.stop_bad != "none"
        workers = candidate.config.scaling.workers
        self._workers = workers if isinstance(workers, int) else 1
        self._speeds: list[float] = []

    def __call__(self, window: Window) -> None:
        sweep = self._plan.base.sweep
        if not self._asked or window.begin < sweep.warmup_steps:
            return
        self._speeds.append(window.tokens_per_second)
        speed = statistics.fmean(self._speeds)
        by_loss = sweep.objective == "time_to_loss"
        value = window.loss if by_loss else token_score(speed, self._workers, sweep, self._plan.price_per_hour)
        tune.report({SCORE: value, WINDOW: len(self._speeds)})


class _Ends(tune.Callback):  # type: ignore[misc]
    """Hears from Tune, in the sweep's own process, which trials ended."""

    def __init__(self, plan: Plan, done: Callable[[Result], None]) -> None:
        self._plan, self._done = plan, done

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune keeps its callbacks for a restore of its own; ours reads the results

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        lasted = float(trial.last_result.get("time_total_s", 0.0))
        self._tell(
            trial, lambda candidate, folder: result_of(candidate, folder, self._plan.there, "stopped_early", seconds=lasted)
        )

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        cause = "the process that drove the trial ended; its trial.txt and Ray's logs may say why"
        self._tell(trial, lambda candidate, folder: ended(candidate, "failed", cause))

    def _tell(self, trial: Any, otherwise: Callable[[Candidate, Folder], Result]) -> None:
        """The result that the trial kept, or what else is to be said of one that was not let to."""
        candidate = candidate_of(trial.config, self._plan.base)
        result = results(self._plan.folder).get(candidate.key)
        if result is None:
            result = otherwise(candidate, self._plan.storage / candidate.run)
            keep(self._plan.folder, result)
        self._done(result)


def _scheduler(base: SweepConfig) -> Any:
    """Which trials go on; None: all."""
    from ray.tune.schedulers import ASHAScheduler

    sweep = base.sweep
    if sweep.stop_bad == "none":
        return None
    return ASHAScheduler(
        time_attr=WINDOW, max_t=sweep.windows + 1, grace_period=sweep.least_windows, reduction_factor=sweep.keep
    )


def _distributions(base: SweepConfig) -> dict[str, Any]:
    """The space in Tune's words."""
    words = {
        "uniform": tune.uniform,
        "log_uniform": tune.loguniform,
        "integers": lambda low, high: tune.randint(low, high + 1),
    }
    found = {}
    for key, choices in base.sweep.space.items():
        if isinstance(choices, Mapping):
            ((kind, (low, high)),) = choices.items()
            found[key] = words[kind](low, high)
        else:
            found[key] = tune.choice(list(choices))
    return found


def _optuna(plan: Plan) -> Any:
    """Optuna's TPE, told of what was measured before."""
    import optuna
    from ray.tune.search.optuna import OptunaSearch

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    base = plan.base
    known = [result for result in results(plan.folder).values() if set(result.settings) == set(base.sweep.space)]
    scores = [score(result, base.sweep, plan.price_per_hour) for result in known]
    before = [(result.settings, value) for result, value in zip(known, scores, strict=True) if math.isfinite(value)]
    return OptunaSearch(
        seed=base.seed % 2**32,
        points_to_evaluate=[settings for settings, _ in before] or None,
        evaluated_rewards=[value for _, value in before] or None,
    )


def _breaks_a_condition(candidate: Candidate) -> Result | None:
    """For searches that do not know of `sweep.where`: the candidate as refused, where it breaks one."""
    if meets(candidate.base, candidate.settings):
        return None
    return ended(candidate, "refused", f"it breaks a condition of sweep.where: {'; '.join(candidate.base.sweep.where)}")
