"""Runs the trials of a sweep concurrently in this process, over one base (`sweep.share_base`).

    measure_shared(plan, candidates, [], len(candidates), on_result=lambda result: print(result.label))

As `tuning.measure_with_tune`, without Ray Tune: all trials are adapters that train at once, each to its end; see
`launch.adapters_job`.
"""

import time
from collections.abc import Callable, Sequence

from raystride.pipelines.config import SettingError
from raystride.pipelines.data.sources.faults import DataError
from raystride.pipelines.launch.adapters_job import train_concurrently
from raystride.pipelines.launch.cluster.cluster import CannotRun
from raystride.pipelines.launch.console.failure import TrainingFailed
from raystride.pipelines.launch.console.screen import SilentScreen
from raystride.pipelines.launch.train_job import train
from raystride.pipelines.sweep.result import Result, save_result
from raystride.pipelines.sweep.space import Candidate
from raystride.pipelines.sweep.trial import (
    SweepPlan,
    build_result,
    classify_failure,
    refuse_candidate,
    result_without_figures,
)


def measure_shared(
    plan: SweepPlan,
    candidates: Sequence[Candidate],
    known: Sequence[Result],
    num_left: int,
    on_result: Callable[[Result], None],
) -> None:
    """Trains the candidates at once; `on_result` gets each result when all have ended, or the reason of a refusal.

    Raises SettingError if they cannot share a base.
    """
    start = time.monotonic()
    ready = []
    for candidate in candidates:
        if refused_result := refuse_candidate(candidate, plan.resources):
            _save_and_report(plan, refused_result, on_result)
        else:
            ready.append(candidate)
    if not ready:
        return
    configs = [candidate.config for candidate in ready if candidate.config]
    outcomes = train_concurrently(configs, plan.storage, SilentScreen(), train)
    for candidate, outcome in zip(ready, outcomes, strict=True):
        # Each took as long as all together.
        seconds = time.monotonic() - start
        folder = plan.storage / candidate.run
        if isinstance(outcome, CannotRun | SettingError | DataError):
            result = result_without_figures(candidate, "refused", str(outcome), seconds)
        elif isinstance(outcome, TrainingFailed):
            result = build_result(candidate, folder, plan.resources, *classify_failure(outcome.cause), seconds=seconds)
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            result = build_result(candidate, folder, plan.resources, "measured", seconds=seconds)
        _save_and_report(plan, result, on_result)


def _save_and_report(plan: SweepPlan, result: Result, on_result: Callable[[Result], None]) -> None:
    save_result(plan.folder, result)
    on_result(result)
