"""A sweep from its settings to its answer: what to use here, and why.

    sys.exit(command(SweepConfig, run_sweep, program="sweep.py", description="..."))

Nothing is lost: every trial that ended is a file in the sweep's folder, with its figures or with why it has none, and the
same command again measures only what is missing.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from shlex import quote

from raystride.pipelines.cluster.cluster import cluster, joined
from raystride.pipelines.cluster.internals import tell_of_job
from raystride.pipelines.cluster.resources import Resources
from raystride.pipelines.commands import of_storage, pasted, program
from raystride.pipelines.config import Config, SettingError
from raystride.pipelines.config.parse import Parsed, to_yaml
from raystride.pipelines.config.sweep import SweepConfig
from raystride.pipelines.files import Folder
from raystride.pipelines.launch.exit_codes import DONE, FAILED, guarded
from raystride.pipelines.launch.job_page import metadata_of
from raystride.pipelines.launch.mesh_choice import keep_mesh
from raystride.pipelines.launch.owner import Ownership, new_attempt
from raystride.pipelines.launch.place import locate
from raystride.pipelines.launch.screen import Screen
from raystride.pipelines.plugins import Carried
from raystride.pipelines.prepare.prepare import check_data, prepare
from raystride.pipelines.scaling_model.described import ClusterDescription, ClusterError
from raystride.pipelines.sources.faults import DataError
from raystride.pipelines.sweep.answer import Answer, answer
from raystride.pipelines.sweep.choice import price_of, undecided
from raystride.pipelines.sweep.page import write_report
from raystride.pipelines.sweep.progress import Board
from raystride.pipelines.sweep.result import WITHOUT_FIGURES, Result, forget, keep_result, keys, results
from raystride.pipelines.sweep.shared import measure_shared
from raystride.pipelines.sweep.space import MESH, Candidate, draw, grid, mesh_flags
from raystride.pipelines.sweep.tracking import Tracking
from raystride.pipelines.sweep.trial import SweepPlan
from raystride.pipelines.tasks import build_task


def run_sweep(parsed: Parsed[SweepConfig]) -> int:
    """Measures what is missing, writes the report and `recommended.yaml`; the exit code. Raises nothing a user can cause."""
    return guarded(lambda: DONE if run_trials(*located(parsed), Screen()).best else FAILED)


def located(parsed: Parsed[SweepConfig]) -> tuple[SweepConfig, Folder]:
    """The sweep with a name and absolute places, and the storage. Raises SettingError where it is to run without Ray."""
    config, storage = locate(Parsed(parsed.settings.training(), parsed.preset))
    if parsed.settings.sweep.share_base:
        config = replace(config, launch=replace(config.launch, mode="inline"))
    elif config.launch.mode != "ray":
        raise config.launch.error("mode", "must be `ray` for a sweep, whose trials Ray Tune runs")
    return replace(parsed.settings, **{item.name: getattr(config, item.name) for item in fields(Config)}), storage


def run_trials(base: SweepConfig, storage: Folder, screen: Screen) -> Answer:
    """Measures what is missing, and answers.

    Raises SettingError where the space is empty, a price is missing or a training has the name; DataError where no data can
    be prepared, CannotRun where there is no cluster.
    """
    assert base.run
    folder = storage / base.run
    candidates, described = candidates_of(base), _described(base)
    if base.sweep.objective == "cost" and not price_of(base, described):
        raise base.sweep.error("price_per_hour", f"must be given: {base.sweep.cluster} has no price_per_gpu_hour")
    if folder.exists("journal"):
        raise SettingError(
            f"run is {base.run!r}: it is the name of a training; give the sweep another one, by --run",
            setting="run",
            value=base.run,
        )
    screen.line(f"sweep {base.run} in {storage}")
    if base.sweep.share:
        _measure_share(base, storage, candidates, described, screen)
        known = _known(base, folder, candidates)
        if left := len(candidates) - len(known):
            screen.line(f"share {base.sweep.share} is measured; the job that measures the last of the {left} others answers")
            return answer(base, list(known.values()), described)
    with Ownership.take(folder, new_attempt()):
        folder.put("config.yaml", to_yaml(replace(base, sweep=replace(base.sweep, share=""))))
        tracking = Tracking(folder, base, storage)
        try:
            if base.sweep.retry and not base.sweep.share:
                _forget_failures(folder, results(folder))
            _measure_missing(base, storage, candidates, described, tracking, screen)
            return _conclude(base, folder, candidates, described, tracking, screen)
        except BaseException as error:
            tracking.end("failed" if isinstance(error, Exception) else "stopped")
            raise


def _measure_share(
    base: SweepConfig,
    storage: Folder,
    candidates: Sequence[Candidate],
    described: ClusterDescription | None,
    screen: Screen,
) -> None:
    """Measures what is missing of this job's share; MLflow is told by the job that answers."""
    number, count = base.sweep.part
    folder = storage / str(base.run)
    with Ownership.take(folder / "shares" / f"{number}-of-{count}", new_attempt()):
        mine = candidates[number::count]
        if base.sweep.retry:
            _forget_failures(folder, _known(base, folder, mine))
        _measure_missing(base, storage, mine, described, None, screen)


def _measure_missing(
    base: SweepConfig,
    storage: Folder,
    candidates: Sequence[Candidate],
    described: ClusterDescription | None,
    tracking: Tracking | None,
    screen: Screen,
) -> None:
    folder = storage / str(base.run)
    known = _known(base, folder, candidates)
    missing = [candidate for candidate in candidates if candidate.key not in known]
    left = len(missing) if candidates else base.sweep.trials - len(known)
    # What a share does not tell apart is measured once more by the job that answers, which knows all.
    decides = tracking is not None
    if left <= 0 and not (decides and undecided(list(known.values()), base)):
        return
    _each_kind(base, missing, lambda config: check_data(config, storage, build_task(config)))
    told = metadata_of(str(base.run), str(storage), base.record.mlflow)
    from raystride.pipelines.sweep.tuning import measure as measure_by_tune  # Ray Tune takes a second to import

    with cluster(base.launch, told):
        if not base.sweep.share_base:
            tell_of_job(told)
        _prepare_all(base, storage, missing, screen)
        shared = base.sweep.share_base
        there = Resources.of_this_machine() if shared else Resources.of_cluster()
        plan = SweepPlan(base, storage, price_of(base, described), there, Carried.here())
        run = measure_shared if shared else measure_by_tune
        with Board(base.sweep.space, left, quiet=not screen.seen) as board:
            on_end = partial(_on_end, folder, tracking, board)
            if left > 0:
                run(plan, missing, list(known.values()), left, on_end)
            while decides and (further := undecided(list(_known(base, folder, candidates).values()), base)):
                names = "; ".join(each.label for each in further)
                board.more(len(further), f"another seed for what the loss does not tell apart: {names}")
                run(plan, further, [], len(further), on_end)


def _described(base: SweepConfig) -> ClusterDescription | None:
    try:
        return ClusterDescription.load(base.sweep.cluster) if base.sweep.cluster else None
    except ClusterError as error:
        raise SettingError(str(error), setting="sweep.cluster", value=base.sweep.cluster, allowed=error.allowed) from None


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


def _prepare_all(base: SweepConfig, storage: Folder, candidates: Sequence[Candidate], screen: Screen) -> None:
    """Prepares the data that trials read, each kind once, so that no trial does.

    On a local cluster in this process: workers of a trial are then surely new, and none has prepared data before. Those that
    Optuna will ask for are not known yet: what they need beside the configured data, they prepare. Raises DataError where
    nothing can be prepared; where only some cannot, their trials say so.
    """
    on_ray = joined(base.launch)
    _each_kind(base, candidates, lambda it: prepare(it, storage, build_task(it), on_ray=on_ray, echo=screen.line))


def _each_kind(base: SweepConfig, candidates: Sequence[Candidate], job: Callable[[Config], object]) -> None:
    """Does a job for every kind of data. Raises DataError where it cannot be done for any."""
    configs = [each.config for each in candidates if each.config] or [base.training()]
    kinds = {repr((config.data, config.tokenizer, config.model.context)): config for config in configs}
    faults = []
    for config in kinds.values():
        try:
            job(config)
        except DataError as fault:
            faults.append(fault)
    if len(faults) == len(kinds):
        raise faults[0]


def _forget_failures(folder: Folder, found: Mapping[str, Result]) -> None:
    for result in found.values():
        if result.status in WITHOUT_FIGURES:
            forget(folder, result.key)


def _known(base: SweepConfig, folder: Folder, candidates: Sequence[Candidate]) -> dict[str, Result]:
    """The folder's results of these candidates, or for Optuna of this space and configuration: both may have changed.

    By the candidates' keys, which stand for all that figures depend on; earlier versions named results otherwise.
    """
    found, wanted = results(folder), defaultdict[str, list[Candidate]](list)
    if candidates:
        rounds = range(base.sweep.repeats, base.sweep.seeds if base.sweep.objective == "loss" else 0)
        every = {(each.key, number): each for each in candidates for number in (each.round, *rounds)}
        tried = [replace(each, round=number) for (_, number), each in every.items()]
    else:
        own = [result for result in found.values() if set(result.settings) == set(base.sweep.space)]
        tried = [Candidate(base, result.settings, result.round) for result in own]
    for each in tried:
        for key in each.keys:
            wanted[key].append(each)
    measured = ((each, result) for key, result in found.items() for each in wanted[key])
    return {each.key: result for each, result in measured if each.has(result.settings, result.round)}


def _on_end(folder: Folder, tracking: Tracking | None, board: Board, result: Result) -> None:
    """Between two trials: tells people and MLflow of the one that ended."""
    board.ended(_logged(folder, tracking, result, number=len(keys(folder))) if tracking else result)


def _logged(folder: Folder, tracking: Tracking, result: Result, number: int) -> Result:
    told = tracking.trial(result, number)
    if told is not result:
        keep_result(folder, told)
    return told


def _conclude(
    base: SweepConfig,
    folder: Folder,
    candidates: Sequence[Candidate],
    described: ClusterDescription | None,
    tracking: Tracking,
    screen: Screen,
) -> Answer:
    """Writes the report, the recommendation and the summary; shows the last screen."""
    found = list(_known(base, folder, candidates).values())
    # What a sweep that was killed, or a server that was away, left untold.
    found = [result if result.mlflow_run_id else _logged(folder, tracking, result, len(found)) for result in found]
    asked = [result for result in found if not candidates or result.round < base.sweep.repeats]
    unfinished = max(0, (len(candidates) or base.sweep.trials) - len(asked))
    outcome = answer(base, found, described)
    write_report(folder, outcome)
    if outcome.recommended:
        folder.put("recommended.yaml", outcome.recommended)
        tracking.artifact("recommended.yaml")
    if outcome.best and set(MESH) & set(outcome.best.settings):
        keep_mesh(folder.parent, Candidate(base, outcome.best.settings).recommended, str(base.run))
    folder.put_json("summary.json", outcome.summary | {"mlflow_run_id": tracking.run_id, "unfinished": unfinished})
    tracking.end("finished" if outcome.best and not unfinished else "stopped" if unfinished else "failed")
    _show_closing(folder, outcome, tracking, unfinished, screen)
    return outcome


def _show_closing(folder: Folder, outcome: Answer, tracking: Tracking, unfinished: int, screen: Screen) -> None:
    storage = folder.parent
    screen.line(outcome.text)
    if unfinished:
        screen.warning(f"{unfinished} trials are missing: the same command again goes on with them")
    if link := tracking.comparison([result for result in outcome.results if result.measured]):
        screen.line(f"compare  {link}")
    screen.line(f"results  {folder}")
    ui = pasted("ui", storage=str(storage))
    screen.line(f"mlflow   {tracking.link or (ui if tracking.run_id else 'not logged there')}")
    # Whoever starts it sees over how many workers a model is spread, and what to change where there are others.
    flags = mesh_flags(outcome.best.settings) if outcome.best else ""
    parts = [program(), "train --config", quote(str(folder / "recommended.yaml")), flags, of_storage(str(storage))]
    next_job = " ".join(filter(None, parts))
    screen.line(f"next     {next_job if outcome.best else 'look at the causes in report.html, and change sweep.space'}")
