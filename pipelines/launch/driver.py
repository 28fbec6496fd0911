"""A training job from its settings to its exit code.

    sys.exit(command(Config, run_training, program="train.py", description="..."))

Cheap things come first: whose run it is, whether anything is left to do, whether the settings may change. Then Ray, the
preflight, the data, the training; at the end the record is closed whatever happened, and the last screen says where to look.
"""

import faulthandler
import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from raystride.model.hugging_face_config import check_description
from raystride.pipelines.cluster.cluster import ask_a_node, cluster, several_nodes
from raystride.pipelines.cluster.internals import submission_id
from raystride.pipelines.cluster.places import PlacesWatch
from raystride.pipelines.cluster.resources import Resources, Share
from raystride.pipelines.cluster.resubmission import was_submitted_again, watch_over_job
from raystride.pipelines.commands import of_storage, pasted, program
from raystride.pipelines.config import Config, SettingError
from raystride.pipelines.config.combinations import DECODERS
from raystride.pipelines.config.parse import Parsed
from raystride.pipelines.feed.opening import open_feed, open_manifest
from raystride.pipelines.files import Folder
from raystride.pipelines.hang.detector import Hung
from raystride.pipelines.hang.process import process_start
from raystride.pipelines.hub import read_description
from raystride.pipelines.launch.check import checks_for, resources_for
from raystride.pipelines.launch.exit_codes import DONE, guarded
from raystride.pipelines.launch.failure import TrainingFailed
from raystride.pipelines.launch.job_page import JobPage, metadata_of
from raystride.pipelines.launch.many import train_many
from raystride.pipelines.launch.owner import Ownership, new_attempt
from raystride.pipelines.launch.place import locate, settled
from raystride.pipelines.launch.preflight import refuse_failing
from raystride.pipelines.launch.preparing import data_for, prepare_data, use_at_most
from raystride.pipelines.launch.profiled import under_profiler
from raystride.pipelines.launch.resume import (
    Earlier,
    bits_before,
    completed,
    keep_preparations,
    newest_manifest,
    newest_step,
    read_earlier,
    refuse_changes,
    refuse_fewer_steps,
    refuse_other_bits,
    same_data,
    what_bits_depend_on,
    write_settings,
)
from raystride.pipelines.launch.screen import Screen
from raystride.pipelines.launch.session import Beside, Watcher, conduct
from raystride.pipelines.launch.workers import settle_workers
from raystride.pipelines.plugins import Carried
from raystride.pipelines.prepare.fingerprint import NOTHING_KEPT, Kept, identity
from raystride.pipelines.prepare.one_source import Prepared
from raystride.pipelines.prepare.prepare import check_data
from raystride.pipelines.prepare.raw_files import hash_raw_files, read_raw_files
from raystride.pipelines.prepare.stage_speed import kept_stages, speeds
from raystride.pipelines.record import describe_environment
from raystride.pipelines.record.environment import DataOfRun, Environment, RunEnvironment, describe_node
from raystride.pipelines.record.links import job_link, on_a_server, run_link
from raystride.pipelines.record.mlflow_log import MLFLOW_REFERENCE
from raystride.pipelines.record.summary import RunSummary
from raystride.pipelines.record.tensorboard_log import check_tensorboard
from raystride.pipelines.report import closing_screen
from raystride.pipelines.signals import CODE_OF_SIGNAL
from raystride.pipelines.tasks import build_task
from raystride.pipelines.train.base_run import check_run, is_run
from raystride.pipelines.worker.job import Job

if TYPE_CHECKING:
    from raystride.pipelines.strategies.strategy import Strategy

LEAVE_S = 5.0
"""How long Python's end may take after an inline training that hangs."""


def run_training(parsed: Parsed[Config]) -> int:
    """Trains, or resumes, or says that there is nothing to do; returns the exit code and raises nothing a user can cause."""
    return guarded(lambda: _train(*locate(parsed)))


def run_preparation(parsed: Parsed[Config]) -> int:
    """Prepares the data of a configuration; returns the exit code."""
    return guarded(lambda: _prepare(*locate(parsed)))


def _train(config: Config, storage: Folder) -> int:
    if (code := under_profiler(config, storage)) is not None:
        return code
    try:
        summary = train(config, storage, Screen())
    except TrainingFailed as failed:
        if isinstance(failed.cause, Hung) and config.launch.mode == "inline":
            # What the training waits for may hold up Python's end too. This watchdog is no thread of Python's, and exits
            # with 1.
            faulthandler.dump_traceback_later(LEAVE_S, exit=True, file=os.open(os.devnull, os.O_WRONLY))
        raise
    return CODE_OF_SIGNAL[by] if (by := summary.get("interrupted_by")) else DONE


def train(
    config: Config,
    storage: Folder,
    screen: Screen,
    watcher: Watcher | None = None,
    tags: Mapping[str, str] | None = None,
    carried: Carried | None = None,
    strategy: "Strategy | None" = None,
) -> RunSummary:
    """Trains a configuration with a name and absolute places; returns the summary. Trials have a watcher, and tags.

    `carried` is what another process's script has registered; `strategy` shares a model with other trainings of this one.
    Raises SettingError, DataError, CannotRun, TrainingFailed, and OSError where the storage takes no files.
    """
    if config.lora.adapters > 1:
        return _train_many(config, storage, screen)
    milestones = {"driver": time.time()}
    config, carried = _with_plugins(config, carried or Carried.here())
    folder = storage / str(config.run)
    earlier = read_earlier(folder)
    if _nothing_left(config, storage, folder, earlier, screen):
        return (earlier and earlier.summary) or {}
    kept = _keep_data(config, storage, earlier, screen)
    check_data(config, storage, build_task(config), kept)
    attempt, told = new_attempt(), metadata_of(str(config.run), str(storage), config.record.mlflow)
    with (
        Ownership.take(folder, attempt, screen.line, wait=was_submitted_again()) as mine,
        cluster(config.launch, told) as dashboard,
        JobPage(told, folder) as page,
        ExitStack() as until_end,
    ):
        milestones["cluster"] = time.time()
        _watch_over(config, dashboard, screen)
        config, there, share = _proved(config, storage, screen, kept)
        prepared = until_end.enter_context(data_for(config, storage, screen, carried, kept, there.cpus - share.cpus))
        if earlier:
            # Once more, since only now it is known whether the same settings still mean the same data.
            refuse_changes(earlier, config, prepared.identity)
        milestones["data"] = time.time()
        environment: RunEnvironment = {**surroundings(config, there, share), "attempt": attempt, **_data(prepared, earlier)}
        job = Job(
            config=config,
            run=str(config.run),
            attempt=attempt,
            term=mine.owner.term,
            folder=folder,
            prepared=prepared.folder,
            device=share.device,
            threads=share.threads,
            carried=carried,
            # A trial's process has driven others before: its own start says nothing of this one.
            started_at=milestones["driver"] if watcher else process_start(os.getpid()) or milestones["driver"],
            milestones=milestones,
            strategy=strategy,
        )
        job, share = _settled(job, there, share, environment, None if watcher else screen.line)
        write_settings(folder, attempt, settled(config), environment)
        all_tags = _tags(environment, config, share) | _ray_tags(dashboard) | dict(tags or {})
        _show_pages(folder, all_tags, screen)
        page.end(
            summary := _conduct(job, share, storage, all_tags, Beside(screen, watcher or page, mine.check, mine.give_up))
        )
        return summary


def _with_plugins(config: Config, carried: Carried) -> tuple[Config, Carried]:
    """The settings with the plug-ins that they need, which are registered."""
    carried.register()
    return replace(config, plugins=tuple(dict.fromkeys([*config.plugins, *carried.needed(config)]))), carried


def _watch_over(config: Config, dashboard: str | None, screen: Screen) -> None:
    """Has the job submitted again should this driver be lost, where that is asked for and can be."""
    if not config.launch.resubmit:
        return
    if not (dashboard and (submission := submission_id())):
        screen.warning("launch.resubmit has no effect: this is no job that was submitted to a cluster with a dashboard")
    elif not watch_over_job(dashboard, submission, config.launch.resubmit):
        screen.warning(f"this job has been submitted again launch.resubmit = {config.launch.resubmit} times, and no more")


def _settled(
    job: Job, there: Resources, share: Share, environment: RunEnvironment, said: Callable[[str], None] | None
) -> tuple[Job, Share]:
    """The job with settled workers, and what its checkpoints say. Without `said` nothing is tried; see `_facts`."""
    if said:
        share = settle_workers(job, there, share, _total_steps(job), said)
    facts = _facts(job.config, job.folder, environment, share)
    return replace(job, threads=share.threads, facts=facts), share


def _nothing_left(config: Config, storage: Folder, folder: Folder, earlier: Earlier | None, screen: Screen) -> bool:
    """Says which run this is and whether it goes on; whether there is nothing left to do. Raises SettingError."""
    reached, step = (completed(earlier, config), newest_step(folder)) if earlier else (None, None)
    goes_on = f", going on from step {step}" if step and not reached else ""
    screen.line(f"run {config.run} in {storage}{goes_on}")
    _check_settings(config, storage, earlier)
    if earlier and reached:
        screen.line(_complete(folder, config, reached, earlier))
        return True
    refuse_fewer_steps(config, step)
    return False


def _check_settings(config: Config, storage: Folder, earlier: Earlier | None) -> None:
    """What can be refused before anything starts. Raises SettingError."""
    _check_metric(config)
    check_tensorboard(config.record)
    if earlier:
        refuse_changes(earlier, config, same_data=lambda: same_data(earlier, config, storage))
    elif config.model.init_from:
        _check_init(config.model.init_from, config)


def _keep_data(config: Config, storage: Folder, earlier: Earlier | None, screen: Screen) -> Kept:
    """Returns the preparations that the run goes on with. Raises DataError, SettingError if it cannot."""
    if not earlier:
        return NOTHING_KEPT
    kept = keep_preparations(earlier, config, storage, screen.line)
    if earlier.sources and config.data.sources:  # a source that comes back is in no settings to compare with
        refuse_changes(earlier, config, identity(config, build_task(config), kept, storage))
    return kept


def _train_many(config: Config, storage: Folder, screen: Screen) -> RunSummary:
    if config.launch.mode == "inline":  # others are refused there
        _proved(config, storage, screen)  # each has enough for itself, and all need it at once
    return train_many(config, storage, screen, train)


def _proved(config: Config, storage: Folder, screen: Screen, kept: Kept = NOTHING_KEPT) -> tuple[Config, Resources, Share]:
    """The configuration with what was left open, and on what it will run. Raises CannotRun where a check fails."""
    config, there, share = resources_for(config, storage, screen.line, kept)
    if there.gpu_problem and config.scaling.device == "auto":
        screen.warning(f"training on CPUs: {there.gpu_problem}")
    refuse_failing(checks_for(config, storage, there, share, kept), "cluster")
    return config, there, share


def _data(prepared: Prepared, earlier: Earlier | None) -> DataOfRun:
    """What `environment.json` says of the data: what another attempt is compared with, sources that have ended with it."""
    known, stages = prepared.identity, kept_stages(prepared.folder)
    found = DataOfRun(data=known.data)
    if content := {**(earlier.content if earlier else {}), **_hash_content(prepared)}:
        found["content"] = content
    if stages:
        found["prepared_at"] = speeds(stages)
    if not known.sources:
        return found
    return {**found, "sources": {**(earlier.sources if earlier else {}), **known.sources}, "learned": known.learned}


def _hash_content(prepared: Prepared) -> dict[str, str]:
    """Hashes of the raw files by source, as far as their preparations have noted them."""
    sources = prepared.manifest.sources
    folders = {name: prepared.folder.parent / one for name, one in sources.items()} or {"": prepared.folder}
    return {name: hash_raw_files(files) for name, folder in folders.items() if (files := read_raw_files(folder))}


def _prepare(config: Config, storage: Folder) -> int:
    check_data(config, storage, build_task(config))
    with cluster(config.launch):
        if config.data.start_after_mib and config.launch.mode != "inline":
            with suppress(SettingError):  # whoever does not fit here trains elsewhere
                _, there, share = resources_for(config, storage, Screen().line)
                use_at_most(there.cpus - share.cpus)
        prepared = prepare_data(config, storage, Screen(), alone=True)
    print(f"results  {prepared.folder}")
    print("mlflow   not logged there")
    print(f"next     {program()} train with the same settings {of_storage(str(storage))}".rstrip())
    return DONE


def surroundings(config: Config, there: Resources, share: Share) -> Environment:
    """What the run runs on: of this process, and versions and hardware of a node where its workers are."""
    found = describe_environment()
    if config.launch.mode == "ray" and several_nodes():
        found.update(cast(Environment, ask_a_node(describe_node, config.launch.timeout_s, gpu=share.device == "cuda")))
    if share.device == "cuda" and not found["gpus"] and there.gpu_name:  # no NVML there, or GPUs of another make
        found["gpus"] = [{"name": there.gpu_name, "memory_bytes": int(there.gpu_memory_bytes or 0), "driver": ""}]
    return found


def _complete(folder: Folder, config: Config, reached: str, earlier: Earlier) -> str:
    """What is said of a run that has nothing left to do."""
    more = 2 * max(1, (earlier.summary or {}).get("steps") or config.train.steps)
    return "\n".join(
        [
            f"this run is complete ({reached}). To train it further, give more steps or epochs, for instance",
            f"  {pasted('train', str(config.run), str(folder.parent), f'--train.steps {more}')}",
            "and to train another one, another name (--run NAME) or other settings",
            closing_screen(earlier.summary or {}, folder),
        ]
    )


def _check_metric(config: Config) -> None:
    """Refuses a metric that the task does not measure, before hours of training end at the first validation."""
    known = build_task(config).metrics
    if config.validation.metric not in known:
        raise config.validation.error("metric", f"must be one of {', '.join(sorted(known))}")


def _check_init(place: str, config: Config) -> None:
    """Refuses weights of another network before the run's name stands for these settings; workers look at all the rest."""
    if is_run(place):
        check_run(config, Folder(place))
        return
    if config.task not in DECODERS:
        raise config.model.error("init_from", f"must be a run's folder with task `{config.task}`: folders hold decoders")
    try:
        check_description(config.model, read_description(place))
    except (ValueError, FileNotFoundError) as error:
        raise SettingError(f"model.init_from is {place!r}: {error}", setting="model.init_from", value=place) from None


def _conduct(job: Job, share: Share, storage: Folder, tags: dict[str, str], beside: Beside) -> RunSummary:
    """Runs the workers beside the progress line, closes the record, and shows the last screen; the summary."""
    from raystride.pipelines.launch.inline import InlineRecorder, train_inline

    arguments: dict[str, Any] = {
        "run_folder": job.folder,
        "run": job.run,
        "attempt": job.attempt,
        "settings": job.config.record,
        "storage": storage,
        "parameters": job.config.flat() | {"workers": share.workers, "device": share.device, "threads": share.threads},
        "tags": tags,
        "total_steps": _total_steps(job),
    }
    if job.config.launch.mode == "inline":
        inline = InlineRecorder(**arguments)
        return conduct(job, inline, partial(train_inline, job, inline), beside)
    from raystride.pipelines.cluster.isolation import IsolationWatch
    from raystride.pipelines.cluster.recorder_handle import RecorderHandle
    from raystride.pipelines.cluster.trainer import train_on_ray

    recorder = RecorderHandle.start(**arguments)
    # An elastic run needs the parts of Ray Train that the fast start leaves out.
    fast_start = job.config.launch.lean and not share.least
    run = partial(train_on_ray, job, share, recorder, fast_start=fast_start)
    beside = replace(beside, waits_for=PlacesWatch(share, job.config.launch.wait_s).look)
    with IsolationWatch(recorder.heartbeats, recorder.node_id, beside.give_up):
        return conduct(job, recorder, run, beside)


def _total_steps(job: Job) -> int | None:
    """Where the run will end, as far as steps and epochs say."""
    steps: float = job.config.train.steps or math.inf
    if job.config.train.epochs or job.config.data.sources:
        newest = newest_manifest(job.folder)
        task = build_task(job.config, open_manifest(job.config, job.prepared).facts)
        known = newest.get("state", {}) if job.config.data.sources else {}
        since = {key: known.get(key, 0) for key in ("step", "position")}
        steps = min(steps, open_feed(job.config, task, job.prepared, past=newest.get("order"), **since).plan.steps)
    return None if math.isinf(steps) else int(steps)


def _facts(config: Config, folder: Folder, environment: RunEnvironment, share: Share) -> dict[str, object]:
    """What every checkpoint says of where it was made. Raises SettingError where an exact run would not go on exactly."""
    kept = {key: environment.get(key) for key in ("commit", "python", "versions") if key in environment}
    facts: dict[str, object] = kept | {"device": share.device, "threads": share.threads}
    if config.train.exact:
        facts["bits"] = bits = what_bits_depend_on(config, environment, share, bits_before(folder / "checkpoints")[1])
        refuse_other_bits(folder / "checkpoints", bits)
    return facts


def _tags(environment: RunEnvironment, config: Config, share: Share) -> dict[str, str]:
    strategy = config.scaling.strategy
    tags = {
        "strategy": strategy if strategy != "auto" else "ddp" if share.workers > 1 else "single",
        "version": environment["versions"]["raystride"],
        "commit": environment.get("commit"),
        "dirty": environment.get("dirty"),
        "data": environment["data"],
        "workers": share.workers,
        "device": share.device,
    }
    return {f"raystride.{key}": str(value) for key, value in tags.items() if value is not None}


def _ray_tags(dashboard: str | None) -> dict[str, str]:
    """The job's name in Ray, and its page where there is a dashboard."""
    if not dashboard:
        return {}
    import ray

    job = submission_id() or str(ray.get_runtime_context().get_job_id())
    return {"raystride.ray_job_id": job, "raystride.ray_job": job_link(dashboard, job)}


def _show_pages(folder: Folder, tags: dict[str, str], screen: Screen) -> None:
    """Says where the run is to be seen, which the log of a submitted job then begins with."""
    if page := tags.get("raystride.ray_job"):
        screen.line(f"ray      {page}")
    with suppress(FileNotFoundError, ValueError):
        reference = folder.read_json(MLFLOW_REFERENCE)
        if on_a_server(reference):
            screen.line(f"mlflow   {run_link(reference)}")
