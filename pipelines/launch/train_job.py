"""A training job from its settings to its exit code.

Cheap checks come first: an earlier attempt, its completion, changed settings. Then Ray, the preflight, the data, the final
number of workers and the training; at the end the record is closed whatever happened, and the closing screen names the
results.

    sys.exit(command(Config, run_training, program="train.py", description="..."))
    summary = train(config, storage, screen)                  # raises errors; `run_training` prints them
"""

import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING

from raystride.pipelines.config import Config
from raystride.pipelines.config.parse import Parsed
from raystride.pipelines.data.plugins import PluginBundle
from raystride.pipelines.data.prepare.run_context import RunContext
from raystride.pipelines.launch.adapters_job import train_adapters
from raystride.pipelines.launch.cluster.cluster import cluster, has_started_head
from raystride.pipelines.launch.cluster.resubmission import arrange_resubmission, is_resubmitted
from raystride.pipelines.launch.console.exit_codes import DONE
from raystride.pipelines.launch.console.ray_job_status import JobStatusReporter, job_metadata, short_stop_warning
from raystride.pipelines.launch.console.screen import Screen
from raystride.pipelines.launch.console.session import SessionHooks, Watcher
from raystride.pipelines.launch.inline import exit_despite_hang
from raystride.pipelines.launch.preflight.check import resolve_and_check
from raystride.pipelines.launch.preflight.prove_kernels import proving_beside
from raystride.pipelines.launch.preparing import open_prepared_data
from raystride.pipelines.launch.profiled import run_under_profiler
from raystride.pipelines.launch.provenance import (
    OWNER_TAG,
    describe_changes,
    describe_run,
    driver_start,
    find_owner,
    metric_labels,
    owner_tags,
    run_tags,
    show_pages,
)
from raystride.pipelines.launch.run_store.admission import admit_run
from raystride.pipelines.launch.run_store.lease import RunLease, new_attempt
from raystride.pipelines.launch.run_store.location import locate_run, with_absolute_paths
from raystride.pipelines.launch.run_store.resume import refuse_changes, refuse_removed, write_settings
from raystride.pipelines.launch.run_store.start_over import move_checkpoints_aside
from raystride.pipelines.launch.run_store.uses import marked_uses, prepared_names, wait_for_removals
from raystride.pipelines.observability.record.summary import RunSummary
from raystride.pipelines.system.signals import EXIT_CODES
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.worker.job import Job

if TYPE_CHECKING:
    from raystride.pipelines.train.strategies.strategy import Strategy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from raystride.pipelines.data.feed.open_dataset import open_feed, open_manifest
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.launch.cluster.resources import Allocation, Resources
from raystride.pipelines.launch.console.session import run_session
from raystride.pipelines.launch.inline import InlineRecorder, train_inline
from raystride.pipelines.launch.preflight.choose_workers import choose_workers
from raystride.pipelines.launch.provenance import checkpoint_facts
from raystride.pipelines.observability.record.environment import RunEnvironment
from raystride.pipelines.train.checkpoint.layout import beginning_manifest


def finalize_job(
    job: Job, resources: Resources, allocation: Allocation, environment: RunEnvironment, log: Callable[[str], None] | None
) -> tuple[Job, Allocation]:
    """Returns the job with its checkpoint facts, and the final allocation. Without `log` no numbers of workers are tried.

    Raises SettingError if an exact run would not resume exactly.
    """
    if log:
        allocation = choose_workers(job, resources, allocation, total_steps(job), log)
    facts = checkpoint_facts(job.config, job.folder, environment, allocation)
    return replace(job, threads=allocation.threads, facts=facts), allocation


def total_steps(job: Job) -> int | None:
    """Returns the last step of the run by its steps and epochs, None if these do not bound it."""
    steps: float = job.config.train.steps or math.inf
    if job.config.train.epochs or job.config.data.sources:
        newest = beginning_manifest(job.folder, job.config.train.branch_from)
        task = build_task(job.config, open_manifest(job.config.data, job.prepared).facts)
        state = newest.get("state", {}) if job.config.data.sources else {}
        since = {key: state.get(key, 0) for key in ("step", "position")}
        steps = min(steps, open_feed(job.config, task, job.prepared, past=newest.get("order"), **since).plan.steps)
    return None if math.isinf(steps) else int(steps)


def train_on_workers(
    job: Job, allocation: Allocation, storage: Folder, tags: dict[str, str], hooks: SessionHooks
) -> RunSummary:
    """Runs the workers with a progress line, closes the record, and shows the closing screen; returns the summary."""
    arguments: dict[str, Any] = {
        "run_folder": job.folder,
        "run": job.run,
        "attempt": job.attempt,
        "settings": job.config.record,
        "storage": storage,
        "parameters": job.config.flat()
        | {"workers": allocation.workers, "device": allocation.device, "threads": allocation.threads},
        "tags": tags,
        "total_steps": total_steps(job),
        "permit": job.permit,
    }
    if job.config.launch.mode == "inline":
        inline = InlineRecorder(**arguments)
        return run_session(job, inline, partial(train_inline, job, inline), hooks)
    from raystride.pipelines.launch.cluster.isolation import HeadWatch, IsolationWatcher
    from raystride.pipelines.launch.cluster.recorder_handle import RecorderHandle
    from raystride.pipelines.launch.cluster.trainer import PlacementWatcher, train_on_ray
    from raystride.pipelines.launch.console.run_metrics import RunMetrics

    recorder = RecorderHandle.start(**arguments)
    # An elastic run needs the parts of Ray Train that the fast start leaves out.
    fast_start = job.config.launch.fast_start and not allocation.min_workers
    run = partial(train_on_ray, job, allocation, recorder, fast_start=fast_start)
    hooks = replace(hooks, pending_reason=PlacementWatcher(allocation, job.config.launch.placement_timeout_s).describe_wait)
    metrics = RunMetrics(job, storage)
    hooks = metrics.attach(hooks)
    if has_started_head():
        hooks = replace(hooks, check_cluster=HeadWatch().check)
    with IsolationWatcher(recorder.heartbeats, recorder.node_id, hooks.give_up, hooks.screen.warn):
        summary = run_session(job, recorder, run, hooks)
        metrics.set_state("stopped" if summary.get("status") == "stopped" else "finished")
        return summary


def run_training(parsed: Parsed[Config]) -> int:
    """Trains or resumes a run, or reports that it is complete; returns the exit code."""
    config, storage = locate_run(parsed)
    if (code := run_under_profiler(config, storage)) is not None:
        return code
    with exit_despite_hang(config.launch):
        tags = describe_changes(parsed.settings, parsed.preset)
        summary = train(config, storage, Screen(), tags=tags, started_at=driver_start(time.time()))
    return EXIT_CODES[by] if (by := summary.get("interrupted_by")) else DONE


def train(
    config: Config,
    storage: Folder,
    screen: Screen,
    watcher: Watcher | None = None,
    tags: Mapping[str, str] | None = None,
    plugin_bundle: PluginBundle | None = None,
    strategy: "Strategy | None" = None,
    started_at: float | None = None,
) -> RunSummary:
    """Trains a configuration with a name and absolute paths; returns the summary. Trials of a sweep have a watcher and tags.

    `plugin_bundle` holds plug-ins registered in another process; `strategy` shares a model with other trainings of this
    process. The time to the first step counts from `started_at` (s since 1970), by default from now.

    Raises SettingError, DataError, CannotRun, TrainingFailed, and OSError if the storage is not writable.
    """
    if config.lora.adapters > 1:
        return train_adapters(config, storage, screen, train)
    milestones = {"driver": time.time()}
    config, plugin_bundle = _register_plugins(config, plugin_bundle or PluginBundle.collect(config))
    if config.launch.mode == "ray":
        plugin_bundle.refuse_unpicklable(config.task)
    admission = admit_run(RunContext(config, storage, screen.log, notice=screen.notice))
    previous, folder = admission.origin, admission.context.run_folder
    if admission.is_complete:
        return (admission.previous and admission.previous.summary) or {}
    attempt, owner = new_attempt(), (tags or {}).get(OWNER_TAG) or find_owner(config.record)
    charged = owner_tags(owner, config.record)
    metadata = job_metadata(str(config.run), str(storage), config.record.mlflow, charged)
    with (
        RunLease.acquire(folder, attempt, screen.log, wait=is_resubmitted()) as lease,
        cluster(config.launch, metadata) as dashboard,
        JobStatusReporter(metadata, folder) as page,
        ExitStack() as until_end,
    ):
        if admission.previous:
            refuse_removed(folder)
        milestones["cluster"] = time.time()
        arrange_resubmission(config.launch, dashboard, screen.warn)
        if config.checkpoint.every and (warning := short_stop_warning()):
            screen.warn(warning)
        resolved = resolve_and_check(admission.context, screen.warn)
        config, resources, allocation = resolved.context.config, resolved.resources, resolved.allocation
        uses = prepared_names(resolved.context.identity())
        until_end.enter_context(marked_uses(folder, attempt, uses))
        wait_for_removals(storage, uses, screen.log)
        with proving_beside(resolved, screen.log):
            prepared = until_end.enter_context(
                open_prepared_data(resolved.context, plugin_bundle, resources.cpus - allocation.cpus)
            )
        if previous:
            # Checked again, as only the prepared data shows whether the same settings still mean the same data.
            refuse_changes(previous, config, prepared.identity)
        milestones["data"] = time.time()
        lease.permit.check()  # the cluster and the preparation may have taken hours
        if admission.starts_over:
            move_checkpoints_aside(folder, attempt, screen.log)
        environment = describe_run(config, resources, allocation, attempt, admission.base, prepared, previous, owner)
        job = Job(
            config=config,
            run=str(config.run),
            attempt=attempt,
            term=lease.owner.term,
            permit=lease.permit,
            folder=folder,
            prepared=prepared.folder,
            device=allocation.device,
            threads=allocation.threads,
            plugin_bundle=plugin_bundle,
            started_at=started_at or milestones["driver"],
            milestones=milestones,
            strategy=strategy,
            labels=metric_labels(owner, config.record),
        )
        job, allocation = finalize_job(job, resources, allocation, environment, None if watcher else screen.log)
        lease.permit.check()
        write_settings(folder, attempt, with_absolute_paths(config), environment)
        all_tags = run_tags(environment, config.scaling, config.record, allocation, dashboard) | dict(tags or {})
        show_pages(folder, all_tags, screen.log)
        hooks = SessionHooks(screen, watcher or page, lease.permit, lease.give_up)
        summary = train_on_workers(job, allocation, storage, all_tags, hooks)
        page.finish(summary)
        return summary


def _register_plugins(config: Config, plugin_bundle: PluginBundle) -> tuple[Config, PluginBundle]:
    """Registers the plug-ins; returns the settings with the plug-ins that they need."""
    plugin_bundle.register()
    return plugin_bundle.complete(config), plugin_bundle
