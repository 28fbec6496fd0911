"""The trials of a sweep beside each other in this process, over one base (`sweep.share_base`).

    measure_shared(plan, candidates, [], len(candidates), done=lambda result: print(result.label))

As `tuning.measure`, without Ray Tune: all trials are adapters that train at once, each to its end; see `launch.many`.
"""

import time
from collections.abc import Callable, Sequence

from raystride.pipelines.cluster.cluster import CannotRun
from raystride.pipelines.config import SettingError
from raystride.pipelines.launch.driver import train
from raystride.pipelines.launch.failure import TrainingFailed
from raystride.pipelines.launch.many import train_beside
from raystride.pipelines.launch.screen import Quiet
from raystride.pipelines.sources.faults import DataError
from raystride.pipelines.sweep.result import Result, keep_result
from raystride.pipelines.sweep.space import Candidate
from raystride.pipelines.sweep.trial import SweepPlan, ended, refusal, result_of, why


def measure_shared(
    plan: SweepPlan, candidates: Sequence[Candidate], known: Sequence[Result], left: int, done: Callable[[Result], None]
) -> None:
    """Trains the candidates at once; `done` hears of each when all have ended. Those that cannot run say why.

    Raises SettingError where they cannot share a base.
    """
    began = time.monotonic()
    ready = []
    for each in candidates:
        if refused := refusal(each, plan.there):
            _end(plan, refused, done)
        else:
            ready.append(each)
    if not ready:
        return
    outcomes = train_beside([each.config for each in ready if each.config], plan.storage, Quiet(), train)
    for each, outcome in zip(ready, outcomes, strict=True):
        # What all took together is what each took.
        seconds = time.monotonic() - began
        folder = plan.storage / each.run
        if isinstance(outcome, CannotRun | SettingError | DataError):
            result = ended(each, "refused", str(outcome), seconds)
        elif isinstance(outcome, TrainingFailed):
            result = result_of(each, folder, plan.there, *why(outcome.cause), seconds=seconds)
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            result = result_of(each, folder, plan.there, "measured", seconds=seconds)
        _end(plan, result, done)


def _end(plan: SweepPlan, result: Result, done: Callable[[Result], None]) -> None:
    keep_result(plan.folder, result)
    done(result)
