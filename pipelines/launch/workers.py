"""Workers of a training job: their final number, the last step of their training, and their run with the record.

job, allocation = finalize_job(job, resources, allocation, environment, screen.log)
summary = train_on_workers(job, allocation, storage, tags, SessionHooks(screen, watcher, lease.check, lease.give_up))
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from raystride.pipelines.cluster.resources import Allocation, Resources
from raystride.pipelines.console.session import SessionHooks, run_session
from raystride.pipelines.feed.open_dataset import open_feed, open_manifest
from raystride.pipelines.launch.inline import InlineRecorder, train_inline
from raystride.pipelines.launch.provenance import checkpoint_facts
from raystride.pipelines.preflight.choose_workers import choose_workers
from raystride.pipelines.record.environment import RunEnvironment
from raystride.pipelines.record.summary import RunSummary
from raystride.pipelines.run_store.resume import newest_manifest
from raystride.pipelines.storage.folder import Folder
from raystride.pipelines.tasks import build_task
from raystride.pipelines.worker.job import Job


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
        newest = newest_manifest(job.folder)
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
    }
    if job.config.launch.mode == "inline":
        inline = InlineRecorder(**arguments)
        return run_session(job, inline, partial(train_inline, job, inline), hooks)
    from raystride.pipelines.cluster.isolation import IsolationWatcher
    from raystride.pipelines.cluster.recorder_handle import RecorderHandle
    from raystride.pipelines.cluster.trainer import PlacementWatcher, train_on_ray

    recorder = RecorderHandle.start(**arguments)
    # An elastic run needs the parts of Ray Train that the fast start leaves out.
    fast_start = job.config.launch.fast_start and not allocation.min_workers
    run = partial(train_on_ray, job, allocation, recorder, fast_start=fast_start)
    hooks = replace(hooks, pending_reason=PlacementWatcher(allocation, job.config.launch.placement_timeout_s).describe_wait)
    with IsolationWatcher(recorder.heartbeats, recorder.node_id, hooks.give_up):
        return run_session(job, recorder, run, hooks)
