"""The trials of a sweep by Ray Tune: one after another, each a training of its own under Ray Train.

    measure(plan, candidates, [], len(candidates), done=lambda result: print(result.label))

Tune's function runs the trial's driver, in a process on the head node that holds no processor, so that all of them are left
to the workers; two trials that each held some, and waited for the rest, would wait for ever. It serves trial after trial,
while their workers are new processes each time. A result is kept in the sweep's folder before Tune hears of it. A trial that
Tune stops ends its training first, since Tune knows nothing of the workers.
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

from raystride.pipelines.cluster.cluster import joined
from raystride.pipelines.cluster.internals import free_places_of_the_dead, head_place
from raystride.pipelines.cluster.logins import of_mlflow
from raystride.pipelines.cluster.resources import resolve
from raystride.pipelines.cluster.trainer import ray_storage
from raystride.pipelines.config.sweep import Sweep, SweepConfig
from raystride.pipelines.sweep.choice import score, token_score
from raystride.pipelines.sweep.result import MeasuredWindow, Result, keep_result, result_of_candidate
from raystride.pipelines.sweep.space import Candidate, meets
from raystride.pipelines.sweep.trial import SweepPlan, TookTooLong, ended, refusal, result_of, run_trial

QUIET = {
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative places are those of the sweep's own working directory
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
}
SCORE, WINDOW, TRIAL = "score", "window", "trial"
END_S = 60
"""How long a trial that Tune stops may take to end its training."""


def measure(
    plan: SweepPlan, candidates: Sequence[Candidate], known: Sequence[Result], left: int, done: Callable[[Result], None]
) -> None:
    """Runs the candidates, or without any, with `sweep.search` optuna, `left` that it suggests, knowing what was measured.

    `done` hears of each that ended, in this process.
    """
    os.environ.update({name: os.environ.get(name, value) for name, value in QUIET.items()})
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # what ended trials is told in their own lines
    sweep = plan.base.sweep
    chosen = sweep.search == "optuna" and not candidates
    trials = [{"settings": dict(each.settings), "round": each.round} for each in candidates]
    together = 1 if sweep.isolated else sweep.at_once
    alone = together == 1 and not joined(plan.base.launch)
    free_places_of_the_dead(alone)  # there are none yet: where Ray is another, it is said here, where people see it
    function = tune.with_parameters(_trial, plan=plan, alone=alone, surroundings=of_mlflow())
    tune.Tuner(
        tune.with_resources(function, tune.PlacementGroupFactory([head_place()])),
        param_space=_distributions(plan.base) if chosen else {TRIAL: tune.grid_search(trials)},
        tune_config=tune.TuneConfig(
            metric=SCORE,
            mode="min",
            num_samples=left if chosen else 1,
            max_concurrent_trials=together,
            search_alg=_optuna(plan, known) if chosen else None,
            scheduler=_scheduler(sweep, candidates),
            # One process drives trial after trial.
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(
            name="tune", **ray_storage(plan.folder / ".ray"), verbose=0, callbacks=[_Ends(plan, done)]
        ),
    ).fit()


def candidate_of(parameters: Mapping[str, Any], base: SweepConfig) -> Candidate:
    """The candidate that Tune's parameters stand for."""
    trial = parameters.get(TRIAL)
    return Candidate(base, trial["settings"], trial["round"]) if trial else Candidate(base, dict(parameters))


def _trial(parameters: dict[str, Any], plan: SweepPlan, alone: bool, surroundings: Mapping[str, str]) -> None:
    """What Tune runs, `alone` where no one else can have workers on the cluster, with MLflow's variables of the driver.

    Raises where the trial hung, so that its process, and with it all that it started, is ended; SystemExit where Tune
    stopped it.
    """
    os.environ.update(surroundings)
    os.environ["TUNE_FUNCTION_THREAD_TIMEOUT_S"] = str(END_S)  # Tune looks it up when the next trial is to come here
    plan.carried.register()
    candidate = candidate_of(parameters, plan.base)
    result = result_of_candidate(plan.folder, candidate) or _breaks_a_condition(candidate) or refusal(candidate, plan.there)
    if result is None:
        free_places_of_the_dead(alone)
        told = _Told(plan, candidate)
        result = run_trial(candidate, plan.storage, plan.there, {"raystride.sweep": str(plan.base.run)}, told, plan.carried)
    keep_result(plan.folder, result)
    if result.status == "hung":
        raise TookTooLong(result.cause)
    if result.status == "stopped_early":
        sys.exit(0)  # as tune.report did, which is not to be called again
    value = score(result, plan.base.sweep, plan.price_per_hour)
    # Not a number, which both Optuna and ASHA leave out, where infinite would spoil their quantiles.
    tune.report({SCORE: value if math.isfinite(value) else math.nan, WINDOW: plan.base.sweep.windows + 1})


class _Told:
    """Tells the scheduler of each window, where there is one that stops trials, and says whether the trial is to go on.

    With the objective energy, which is known at the end alone, it hears of the speed.
    """

    def __init__(self, plan: SweepPlan, candidate: Candidate) -> None:
        assert candidate.config
        self._plan, self._asked = plan, plan.base.sweep.stop_bad != "none"
        self._workers = resolve(candidate.config, plan.there).workers
        self._speeds: list[float] = []

    def __call__(self, window: MeasuredWindow) -> bool:
        sweep = self._plan.base.sweep
        if not self._asked or window.begin < sweep.warmup_steps:
            return True
        self._speeds.append(window.tokens_per_second)
        value = token_score(statistics.fmean(self._speeds), self._workers, sweep, self._plan.price_per_hour)
        if sweep.objective in ("time_to_loss", "loss"):
            value = math.nan if window.loss is None else window.loss
        try:
            tune.report({SCORE: value, WINDOW: len(self._speeds)})
        except SystemExit:  # Tune's way to end a trial's thread, which would leave its workers behind
            return False
        return True


class _Ends(tune.Callback):  # type: ignore[misc]
    """Hears from Tune, in the sweep's own process, which trials ended."""

    def __init__(self, plan: SweepPlan, done: Callable[[Result], None]) -> None:
        self._plan, self._done = plan, done
        self._stopped: list[Any] = []
        """Trials that Tune stopped, whose trainings are ending."""

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune keeps its callbacks for a restore of its own; ours reads the results

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        if (result := self._kept(trial)) is None:
            self._stopped.append(trial)
        else:
            self._done(result)

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        # Its process has ended what it did before, or has died.
        self._tell_of_stopped()

    def on_experiment_end(self, trials: list[Any], **info: Any) -> None:
        self._tell_of_stopped()

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        candidate = candidate_of(trial.config, self._plan.base)
        cause = "the process that drove the trial ended"
        if trial.run_metadata.error_filename:  # its public reader looks where the file comes to only later
            with suppress(OSError):
                cause = cause_in(Path(trial.error_file).read_text()) or cause
        unsaid = ended(candidate, "failed", f"{cause}; its trial.txt and Ray's logs may say more")
        self._done(self._kept(trial) or self._keep(unsaid))

    def _tell_of_stopped(self) -> None:
        while self._stopped:
            trial = self._stopped.pop(0)
            self._done(self._kept(trial) or self._keep(self._read(trial)))

    def _read(self, trial: Any) -> Result:
        """What the journal says of a trial that was not let to end."""
        candidate = candidate_of(trial.config, self._plan.base)
        lasted = float(trial.last_result.get("time_total_s", 0.0))
        folder = self._plan.storage / candidate.run
        return result_of(candidate, folder, self._plan.there, "stopped_early", seconds=lasted)

    def _kept(self, trial: Any) -> Result | None:
        return result_of_candidate(self._plan.folder, candidate_of(trial.config, self._plan.base))

    def _keep(self, result: Result) -> Result:
        keep_result(self._plan.folder, result)
        return result


def cause_in(text: str) -> str:
    """What a trial's `error.txt` says in a line, empty where it says nothing.

    Tune pickles the error beside it, but by a pickle whoever can write the storage has this process run what they like.
    """
    *_, newest = text.rpartition("Failure # ")
    *_, told = re.split(r'^ +File ".*", line \d+.*$', newest.partition("\n")[2], flags=re.MULTILINE)
    return next((line.strip() for line in told.splitlines() if line and not line.startswith((" ", "\t", "\x1b"))), "")


def _scheduler(sweep: Sweep, candidates: Sequence[Candidate]) -> Any:
    """What decides which trials go on; None: all do."""
    from ray.tune.schedulers import ASHAScheduler

    if sweep.stop_bad == "none" or (candidates and all(each.round for each in candidates)):
        return None  # later rounds are of what was found good, and a mean of some that were stopped would flatter
    first = max(sweep.least_windows, math.ceil(sweep.windows / sweep.keep**2)) if sweep.objective == "loss" else None
    return ASHAScheduler(
        time_attr=WINDOW,
        max_t=sweep.windows + 1,
        grace_period=first or sweep.least_windows,
        reduction_factor=sweep.keep,
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


def _optuna(plan: SweepPlan, known: Iterable[Result]) -> Any:
    """Optuna's TPE, told of what was measured before."""
    import optuna
    from ray.tune.search.optuna import OptunaSearch

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    base = plan.base
    scored = [(result.settings, score(result, base.sweep, plan.price_per_hour)) for result in known]
    before = [(settings, value) for settings, value in scored if math.isfinite(value)]
    return OptunaSearch(
        seed=(base.seed + len(before)) % 2**32,  # started again, it would else begin with what it tried first
        points_to_evaluate=[settings for settings, _ in before] or None,
        evaluated_rewards=[value for _, value in before] or None,
    )


def _breaks_a_condition(candidate: Candidate) -> Result | None:
    """For searches that do not know of `sweep.where`: the candidate as refused, where it breaks one."""
    if meets(candidate.base, candidate.settings):
        return None
    return ended(candidate, "refused", f"it breaks a condition of sweep.where: {'; '.join(candidate.base.sweep.where)}")
