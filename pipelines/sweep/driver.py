"""A sweep from its settings to its answer: what to use here, and why.

    sys.exit(command(SweepConfig, run_sweep, program="sweep.py", description="..."))

Nothing is lost: every trial that ended is a file in the sweep's folder, with its figures or with why it has none, and the
same command again measures only what is missing.
"""

import os
import secrets
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from pipelines.config.parse import Parsed, to_yaml
from pipelines.config.sweep import SweepConfig
from pipelines.files import Folder
from pipelines.launch.cluster import cluster, joined
from pipelines.launch.driver import guarded, locate
from pipelines.launch.owner import Ownership
from pipelines.launch.resources import Resources
from pipelines.launch.session import DONE, FAILED
from pipelines.prepare.prepare import prepare
from pipelines.sweep.answer import Answer, answer
from pipelines.sweep.page import write_report
from pipelines.sweep.progress import Board
from pipelines.sweep.result import WITHOUT_FIGURES, Result, forget, keep, results
from pipelines.sweep.space import Candidate, draw, grid
from pipelines.sweep.tracking import Tracking
from pipelines.sweep.trial import refusal
from pipelines.sweep.tuning import Plan, measure
from pipelines.tasks import build_task


def run_sweep(parsed: Parsed[SweepConfig]) -> int:
    """Measures what is missing, writes the report and `recommended.yaml`; the exit code. Raises nothing a user can cause."""
    return guarded(lambda: _sweep(*_located(parsed)))


def _located(parsed: Parsed[SweepConfig]) -> tuple[SweepConfig, Folder]:
    config, storage = locate(Parsed(parsed.settings.training(), parsed.preset))
    if config.launch.mode != "ray":
        raise config.launch.error("mode", "must be `ray` for a sweep, whose trials Ray Tune runs")
    return replace(parsed.settings, run=config.run, storage=config.storage), storage


def _sweep(base: SweepConfig, storage: Folder) -> int:
    assert base.run
    folder = storage / base.run
    candidates = candidates_of(base)
    attempt = time.strftime("%Y%m%d-%H%M%S-", time.gmtime()) + secrets.token_hex(2)
    print(f"sweep {base.run} in {storage}", flush=True)
    with Ownership.take(folder, attempt):
        folder.put("config.yaml", to_yaml(base))
        with cluster(base.launch):
            there = Resources.of_cluster()
            _prepare_all(base, storage, candidates)
            plan = Plan(base, storage, base.sweep.price_per_hour, partial(refusal, there=there))
            missing = _missing(plan, candidates)
            board = Board(base.sweep.space, total=len(missing) if candidates else base.sweep.trials)
            tracking = Tracking(folder, base, storage, warn=board.warn)
            with board:
                measure(plan, missing, partial(_on_end, plan, tracking, board))
            return _conclude(plan, candidates, tracking, there)


def candidates_of(base: SweepConfig) -> list[Candidate]:
    """All that a grid or random draws try; none for Optuna, which chooses by what it has seen.

    Raises SettingError where the space is empty, or the conditions leave nothing of it.
    """
    if not base.sweep.space:
        raise base.sweep.error("space", "must name at least one setting to vary, as {scaling.workers: [1, 2]}")
    if base.sweep.search == "optuna":
        return []
    found = list(grid(base) if base.sweep.search == "grid" else draw(base))
    if not found:
        raise base.sweep.error("where", "leaves nothing of sweep.space")
    return found


def _prepare_all(base: SweepConfig, storage: Folder, candidates: Sequence[Candidate]) -> None:
    """Prepares the data that trials read, each kind once, so that no trial does.

    On a local cluster in this process: workers of a trial are then surely new, and none has prepared data before.
    """
    configs = [each.config for each in candidates if each.config] or [base.training()]
    kinds = {(config.data, config.tokenizer, config.model.context): config for config in configs}
    for config in kinds.values():
        prepare(config, storage, build_task(config), on_ray=joined(base.launch))


def _missing(plan: Plan, candidates: Iterable[Candidate]) -> list[Candidate]:
    """Those that have no result yet; what is not started at all has one now."""
    known, missing = results(plan.folder), []
    for candidate in candidates:
        if candidate.key in known and not (plan.base.sweep.retry and known[candidate.key].status in WITHOUT_FIGURES):
            continue
        forget(plan.folder, candidate.key)
        if refused := plan.refusal(candidate):
            keep(plan.folder, refused)
        else:
            missing.append(candidate)
    return missing


def _on_end(plan: Plan, tracking: Tracking, board: Board, candidate: Candidate, result: Result) -> None:
    """Between two trials: tells people and MLflow of the one that ended."""
    number = len(results(plan.folder))
    told = tracking.trial(result, number)
    if told is not result:
        keep(plan.folder, told)
    board.ended(told)


def _conclude(plan: Plan, candidates: Sequence[Candidate], tracking: Tracking, there: Resources) -> int:
    """Writes the report, the recommendation and the summary; prints the last screen; the exit code."""
    found = list(results(plan.folder).values())
    wanted = {each.key for each in candidates}
    found = [result for result in found if not wanted or result.key in wanted]
    unfinished = len(wanted - {result.key for result in found})
    outcome = answer(plan.base, found, there, plan.price_per_hour)
    write_report(plan.folder, outcome)
    if outcome.recommended:
        plan.folder.put("recommended.yaml", outcome.recommended)
    plan.folder.put_json("summary.json", outcome.summary | {"mlflow_run_id": tracking.run_id, "unfinished": unfinished})
    if outcome.recommended:
        tracking.artifact("recommended.yaml")
    tracking.end("finished" if outcome.best and not unfinished else "stopped" if unfinished else "failed")
    _say(plan, outcome, tracking, unfinished)
    return DONE if outcome.best else FAILED


def _say(plan: Plan, outcome: Answer, tracking: Tracking, unfinished: int) -> None:
    place = f"--storage {plan.storage}"
    print(outcome.text)
    if unfinished:
        print(
            f"{unfinished} trials are missing: the same command with --run {plan.base.run} goes on with them",
            file=sys.stderr,
        )
    measured = [result for result in outcome.results if result.measured]
    if link := tracking.comparison(measured):
        print(f"compare  {link}")
    print(f"results  {plan.folder}")
    print(f"mlflow   {tracking.link or f'python -m pipelines.record.ui {place}' if tracking.run_id else 'not logged there'}")
    next_job = f"python ray_jobs/train.py --config {os.path.join(plan.folder.uri, 'recommended.yaml')} {place}"
    print(f"next     {next_job if outcome.best else 'look at the causes in report.html, and change sweep.space'}")
