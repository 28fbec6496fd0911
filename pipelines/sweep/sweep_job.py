"""A sweep from its settings to its answer: the settings to use here, and why.

    sys.exit(command(SweepConfig, run_sweep, program="sweep.py", description="..."))

Nothing is lost: every trial that ended is a file in the sweep's folder, with its figures or the reason why it has none. The
same command again measures only the missing ones.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from shlex import quote

from raystride.pipelines.config import Config, SettingError
from raystride.pipelines.config.attempts import SETTINGS_FILE
from raystride.pipelines.config.metrics import is_mean_per_token, known_direction
from raystride.pipelines.config.parse import Parsed, to_stored_yaml
from raystride.pipelines.config.sweep import SEARCHES, SweepJobConfig
from raystride.pipelines.data.plugins import PluginBundle
from raystride.pipelines.data.prepare.prepare import check_data, prepare
from raystride.pipelines.data.prepare.run_context import OnRay, RunContext
from raystride.pipelines.data.sources.faults import DataError
from raystride.pipelines.data.stored_code import hash_named_code
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.launch.cluster.cluster import cluster, uses_running_cluster
from raystride.pipelines.launch.cluster.internals import update_job_metadata
from raystride.pipelines.launch.cluster.resources import Resources
from raystride.pipelines.launch.cluster.wait_for_nodes import wait_for_nodes
from raystride.pipelines.launch.console.exit_codes import DONE, FAILED
from raystride.pipelines.launch.console.ray_job_status import job_metadata
from raystride.pipelines.launch.console.screen import Screen
from raystride.pipelines.launch.preflight.choose_mesh import store_mesh
from raystride.pipelines.launch.provenance import find_owner, owner_tags
from raystride.pipelines.launch.run_store.admission import check_metric
from raystride.pipelines.launch.run_store.changes import identify_own_model
from raystride.pipelines.launch.run_store.lease import RunLease, new_attempt
from raystride.pipelines.launch.run_store.location import locate_run
from raystride.pipelines.observability.record.summary import put_summary
from raystride.pipelines.sweep.answer import Answer, build_answer, describe_horizon
from raystride.pipelines.sweep.choice import confirming_round, list_further_trials, resolve_price
from raystride.pipelines.sweep.progress import ProgressBoard
from raystride.pipelines.sweep.report_page import write_report
from raystride.pipelines.sweep.result import RETRYABLE_STATUSES, Result, list_keys, load_results, remove_result, save_result
from raystride.pipelines.sweep.scaling_model.described import ClusterDescription, ClusterError
from raystride.pipelines.sweep.shared import measure_shared
from raystride.pipelines.sweep.space import (
    MESH_SETTINGS,
    SCHEDULE_STEPS,
    Candidate,
    draw_random,
    enumerate_grid,
    format_mesh_flags,
    known_steps,
    refuse_endless_warmup,
    shorten_schedule,
    throughput_unit,
)
from raystride.pipelines.sweep.tracking import SweepTracking
from raystride.pipelines.sweep.trial import SweepPlan
from raystride.pipelines.system.commands import launch_command, shell_command, storage_flag
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import put_sealed, read_sealed

PER_TOKEN_TASKS = ("language_model", "completion", "translation")
"""Tasks whose tokens are those that a tokenizer makes of a text."""
CODE_FILE = "code.json"
"""In a sweep's folder, hashes of the user's code and data with which its trials were measured."""


def run_sweep(parsed: Parsed[SweepJobConfig]) -> int:
    """Measures missing trials, writes the report and `recommended.yaml`; returns the exit code."""
    return DONE if run_trials(*resolve_storage(parsed), Screen()).best else FAILED


def resolve_storage(parsed: Parsed[SweepJobConfig]) -> tuple[SweepJobConfig, Folder]:
    """Returns the sweep with a name and absolute paths, and the storage. Raises SettingError if it is to run without Ray."""
    config, storage = locate_run(Parsed(parsed.settings.training(), parsed.preset, parsed.has_source))
    if parsed.settings.sweep.share_base:
        config = replace(config, launch=replace(config.launch, mode="inline"))
    elif config.launch.mode != "ray":
        raise config.launch.error("mode", "must be `ray` for a sweep, whose trials Ray Tune runs")
    return replace(parsed.settings, **{item.name: getattr(config, item.name) for item in fields(Config)}), storage


def run_trials(base: SweepJobConfig, storage: Folder, screen: Screen) -> Answer:
    """Measures missing trials, and returns the answer.

    Raises SettingError if the space is empty, a price is missing or a training has the name; DataError if no data can be
    prepared, CannotRun if there is no cluster.
    """
    assert base.run
    folder = storage / base.run
    candidates, described = list_candidates(base), _load_cluster_description(base)
    if base.sweep.objective == "cost" and not resolve_price(base, described):
        raise base.sweep.error("price_per_hour", f"must be given: {base.sweep.cluster} has no price_per_gpu_hour")
    if folder.exists("journal"):
        raise SettingError(
            f"run is {base.run!r}: it is the name of a training; give the sweep another one, by --run",
            setting="run",
            value=base.run,
        )
    if base.sweep.by_quality:
        _check_quality(base)
    screen.log(f"sweep {base.run} in {storage}")
    if base.sweep.by_quality:
        screen.log(describe_horizon(base))
    if warning := _tokenizer_warning(base, candidates):
        screen.log(f"warning: {warning}")
    if base.sweep.shard:
        _measure_share(base, storage, candidates, described, screen)
        known = _load_known(base, folder, candidates)
        if num_left := len(candidates) - len(known):
            screen.log(
                f"share {base.sweep.shard} is measured; the job that measures the last of the {num_left} others answers"
            )
            return build_answer(base, list(known.values()), described)
    with RunLease.acquire(folder, new_attempt(), screen.log):
        _refuse_other_code(base, folder)
        folder.put(SETTINGS_FILE, to_stored_yaml(replace(base, sweep=replace(base.sweep, shard=""))))
        tracking = SweepTracking(folder, base, storage)
        try:
            if base.sweep.retry and not base.sweep.shard:
                _remove_failures(folder, load_results(folder))
            _measure_missing(base, storage, candidates, described, tracking, screen)
            return _write_answer(base, folder, candidates, described, tracking, screen)
        except BaseException as error:
            tracking.end("failed" if isinstance(error, Exception) else "stopped")
            raise


def _refuse_other_code(base: SweepJobConfig, folder: Folder) -> None:
    """Raises SettingError if trials were measured with other code of the user, or other data given to it; stores both.

    Keys of trials hold their settings alone. Sweeps of 0.3 have stored nothing to compare.
    """
    training = base.training()
    task = build_task(training)
    now = {"code": sorted(hash_named_code(training).values()), "own_model": {}}
    if task.reads_dataset:
        now["own_model"] = identify_own_model(task)
    try:
        before = read_sealed(folder, CODE_FILE, "remove it if the trials are of this code")
    except FileNotFoundError:
        before = now
    if now != {key: before.get(key) for key in now} and list_keys(folder):
        raise SettingError(
            f"run is {base.run!r}: the trials of this sweep were measured with other code of plug-ins, model or loss, or "
            "other data: give this one another name (--run NAME, in Python run=)",
            setting="run",
            value=base.run,
        )
    put_sealed(folder, CODE_FILE, now)


def answer_so_far(base: SweepJobConfig, storage: Folder) -> Answer:
    """Returns the answer of the trials that have ended, without measuring or writing anything."""
    known = _load_known(base, storage / str(base.run), list_candidates(base))
    return build_answer(base, list(known.values()), _load_cluster_description(base))


def _check_quality(base: SweepJobConfig) -> None:
    """Raises SettingError if trials cannot be compared by the objective, before any of them starts."""
    training = base.training()
    if base.sweep.objective == "metric":
        check_metric(training)
        name = base.validation.metric
        if base.validation.better == "min" and known_direction(name) == "max":
            raise base.validation.error(
                "direction", f"must be `max` with sweep.objective `metric`: more of {name} is better"
            )
    _ = base.validation.better
    if not {f"optimizer.{name}" for name in (*SCHEDULE_STEPS, "schedule")} & set(base.sweep.space):
        in_small = shorten_schedule(training.optimizer, base.sweep.trial_steps, known_steps(training.train))
        refuse_endless_warmup(in_small, base.sweep)


def _tokenizer_warning(base: SweepJobConfig, candidates: Sequence[Candidate]) -> str:
    """Returns why losses of these trials cannot be compared, or an empty text if they can."""
    tokenizers = {candidate.config.tokenizer for candidate in candidates if candidate.config}
    is_per_token = base.task in PER_TOKEN_TASKS and is_mean_per_token(base.quality_name)
    if not (base.sweep.by_quality and is_per_token and len(tokenizers) > 1):
        return ""
    return (
        "tokenizers differ between trials, and losses per token can be compared only where they are equal: compare "
        "bits_per_byte of `raystride evaluate` instead"
    )


def _measure_share(
    base: SweepJobConfig,
    storage: Folder,
    candidates: Sequence[Candidate],
    described: ClusterDescription | None,
    screen: Screen,
) -> None:
    """Measures missing trials of this job's share; the job that answers logs them to MLflow."""
    number, count = base.sweep.part
    folder = storage / str(base.run)
    with RunLease.acquire(folder / "shares" / f"{number}-of-{count}", new_attempt(), screen.log):
        _refuse_other_code(base, folder)
        own = candidates[number::count]
        if base.sweep.retry:
            _remove_failures(folder, _load_known(base, folder, own))
        _measure_missing(base, storage, own, described, None, screen)


def _measure_missing(
    base: SweepJobConfig,
    storage: Folder,
    candidates: Sequence[Candidate],
    described: ClusterDescription | None,
    tracking: SweepTracking | None,
    screen: Screen,
) -> None:
    folder = storage / str(base.run)
    known = _load_known(base, folder, candidates)
    missing = [candidate for candidate in candidates if candidate.key not in known]
    chosen_by = [result for result in known.values() if result.round < base.sweep.repeats]
    num_left = len(missing) if candidates else base.sweep.trials - len(chosen_by)
    price = resolve_price(base, described)

    def list_further() -> list[Candidate]:
        """Lists what the job that answers, which knows all results, still has to measure."""
        known = _load_known(base, folder, candidates)
        return list_further_trials(list(known.values()), base, price) if tracking is not None else []

    if num_left <= 0 and not list_further():
        return
    _for_each_data_kind(base, missing, lambda config: check_data(RunContext(config, storage)))
    owner = find_owner(base.record)
    metadata = job_metadata(str(base.run), str(storage), base.record.mlflow, owner_tags(owner, base.record))
    from raystride.pipelines.sweep.tuning import measure_with_tune  # Ray Tune takes a second to import

    with cluster(base.launch, metadata):
        if not base.sweep.share_base:
            update_job_metadata(metadata)
        wait_for_nodes(base.scaling.min_nodes, base.launch, screen.log)
        _prepare_all(base, storage, missing, screen)
        is_shared = base.sweep.share_base
        resources = Resources.of_this_machine() if is_shared else Resources.of_cluster()
        plan = SweepPlan(base, storage, price, resources, PluginBundle.collect(base), owner)
        run = measure_shared if is_shared else measure_with_tune
        with ProgressBoard(
            base.sweep.space, num_left, base.quality_name, throughput_unit(base), quiet=not screen.is_visible
        ) as board:
            on_result = partial(_report_result, folder, tracking, board)
            if num_left > 0:
                run(plan, missing, list(known.values()), num_left, on_result)
            while further := list_further():
                names = "; ".join(candidate.label for candidate in further)
                why = "from another seed" if base.sweep.by_quality else "once more, as being chosen takes luck"
                board.add_trials(len(further), f"the best, {why}: {names}")
                run(plan, further, [], len(further), on_result)


def _load_cluster_description(base: SweepJobConfig) -> ClusterDescription | None:
    try:
        return ClusterDescription.load(base.sweep.cluster) if base.sweep.cluster else None
    except ClusterError as error:
        raise SettingError(str(error), setting="sweep.cluster", value=base.sweep.cluster, allowed=error.allowed) from None


def list_candidates(base: SweepJobConfig) -> list[Candidate]:
    """Returns all candidates of a grid or random draws; none for a search that chooses by earlier results.

    Raises SettingError if the space is empty, or the conditions exclude all of it.
    """
    if not base.sweep.space:
        raise base.sweep.error("space", "must name at least one setting to vary, as {scaling.workers: [1, 2]}")
    if SEARCHES[base.sweep.search].is_adaptive:
        return []
    candidates = list(enumerate_grid(base) if SEARCHES[base.sweep.search].lists_all else draw_random(base))
    if not candidates:
        raise base.sweep.error("constraints", "leaves nothing of sweep.space")
    return candidates


def _prepare_all(base: SweepJobConfig, storage: Folder, candidates: Sequence[Candidate], screen: Screen) -> None:
    """Prepares the data that trials read, each kind once, so that no trial does.

    On a local cluster it happens in this process: workers of a trial are then new, and none has prepared data before. Data
    that Optuna's candidates will need besides the configured one is unknown yet; they prepare it. Raises DataError if
    nothing can be prepared; if only some cannot, their trials report it.
    """
    on_ray: OnRay = "large" if uses_running_cluster(base.launch) else False

    def prepare_for(config: Config) -> None:
        context = RunContext(config, storage, screen.log)
        prepare(context, context.task, on_ray=on_ray)

    _for_each_data_kind(base, candidates, prepare_for)


def _for_each_data_kind(base: SweepJobConfig, candidates: Sequence[Candidate], job: Callable[[Config], object]) -> None:
    """Runs a job for every kind of data. Raises DataError if it fails for all."""
    configs = [candidate.config for candidate in candidates if candidate.config] or [base.training()]
    kinds = {repr((config.data, config.tokenizer, config.model.context)): config for config in configs}
    faults = []
    for config in kinds.values():
        try:
            job(config)
        except DataError as fault:
            faults.append(fault)
    if len(faults) == len(kinds):
        raise faults[0]


def _remove_failures(folder: Folder, results: Mapping[str, Result]) -> None:
    for result in results.values():
        if result.status in RETRYABLE_STATUSES:
            remove_result(folder, result.key)


def _load_known(base: SweepJobConfig, folder: Folder, candidates: Sequence[Candidate]) -> dict[str, Result]:
    """Returns the folder's results of these candidates, or for Optuna of this space and configuration: both may have
    changed.

    They are found by the candidates' keys, which cover everything that affects figures; earlier versions used other names.
    """
    results, candidates_by_key = load_results(folder), defaultdict[str, list[Candidate]](list)
    if candidates:
        rounds = range(base.sweep.repeats, confirming_round(base.sweep) + 1)
        by_key_and_round = {
            (candidate.key, number): candidate for candidate in candidates for number in (candidate.round, *rounds)
        }
        tried = [replace(candidate, round=number) for (_, number), candidate in by_key_and_round.items()]
    else:
        own_results = [result for result in results.values() if set(result.settings) == set(base.sweep.space)]
        tried = [Candidate(base, result.settings, result.round) for result in own_results]
    for candidate in tried:
        for key in candidate.keys:
            candidates_by_key[key].append(candidate)
    measured = ((candidate, result) for key, result in results.items() for candidate in candidates_by_key[key])
    return {candidate.key: result for candidate, result in measured if candidate.matches(result.settings, result.round)}


def _report_result(folder: Folder, tracking: SweepTracking | None, board: ProgressBoard, result: Result) -> None:
    """Between two trials: shows and logs the one that ended."""
    board.add_result(_log_to_mlflow(folder, tracking, result, number=len(list_keys(folder))) if tracking else result)


def _log_to_mlflow(folder: Folder, tracking: SweepTracking, result: Result, number: int) -> Result:
    logged = tracking.log_trial(result, number)
    if logged is not result:
        save_result(folder, logged)
    return logged


def _write_answer(
    base: SweepJobConfig,
    folder: Folder,
    candidates: Sequence[Candidate],
    described: ClusterDescription | None,
    tracking: SweepTracking,
    screen: Screen,
) -> Answer:
    """Writes the report, the recommendation and the summary; shows the last screen."""
    results = list(_load_known(base, folder, candidates).values())
    # Results that a killed sweep or an unreachable server left unlogged.
    results = [
        result if result.mlflow_run_id else _log_to_mlflow(folder, tracking, result, len(results)) for result in results
    ]
    requested = [result for result in results if result.round < base.sweep.repeats]
    unfinished = max(0, (len(candidates) or base.sweep.trials) - len(requested))
    outcome = build_answer(base, results, described)
    write_report(folder, outcome)
    if outcome.recommended:
        folder.put("recommended.yaml", outcome.recommended)
        tracking.log_artifact("recommended.yaml")
    if outcome.best and set(MESH_SETTINGS) & set(outcome.best.settings):
        store_mesh(folder.parent, Candidate(base, outcome.best.settings).recommended, str(base.run))
    put_summary(folder, outcome.summary | {"mlflow_run_id": tracking.run_id, "unfinished": unfinished})
    tracking.end("finished" if outcome.best and not unfinished else "stopped" if unfinished else "failed")
    _show_summary(folder, outcome, tracking, unfinished, screen)
    return outcome


def _show_summary(folder: Folder, outcome: Answer, tracking: SweepTracking, unfinished: int, screen: Screen) -> None:
    storage = folder.parent
    screen.log(outcome.text)
    if unfinished:
        screen.warn(f"{unfinished} trials are missing: the same command again goes on with them")
    if link := tracking.comparison_url([result for result in outcome.results if result.is_measured]):
        screen.log(f"compare  {link}")
    screen.log(f"results  {folder}")
    ui = shell_command("ui", storage=str(storage))
    screen.log(f"mlflow   {tracking.link or (ui if tracking.run_id else 'not logged')}")
    # The flags show the mesh, and what to change for another number of workers.
    flags = format_mesh_flags(outcome.best.settings) if outcome.best else ""
    parts = [launch_command(), "train --config", quote(str(folder / "recommended.yaml")), flags, storage_flag(str(storage))]
    next_job = " ".join(filter(None, parts))
    screen.log(f"next     {next_job if outcome.best else 'look at the causes in report.html, and change sweep.space'}")
