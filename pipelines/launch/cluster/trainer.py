"""Runs workers by Ray Train: its TorchTrainer, or a leaner trainer that starts in about half the time.

summary = train_on_ray(job, allocation, recorder, fast_start=True)  # raises the errors of fit()
"""

import os
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

from raystride.pipelines.launch.cluster.cluster import CannotRun, uses_running_cluster
from raystride.pipelines.launch.cluster.elastic import NEVER_S, StartPlan, train_on_nodes
from raystride.pipelines.launch.cluster.fallback import Warn
from raystride.pipelines.launch.cluster.fast_start import fast_start_trainer
from raystride.pipelines.launch.cluster.meeting import torch_config
from raystride.pipelines.launch.cluster.recorder_handle import RecorderHandle, StopPoll
from raystride.pipelines.launch.cluster.resources import Allocation
from raystride.pipelines.launch.hang.heartbeat import HeartbeatSender, exit_unreachable_worker
from raystride.pipelines.launch.hang.watch import HangWatch, heartbeat_interval_s
from raystride.pipelines.observability.profiling.nsight_commands import worker_executable
from raystride.pipelines.observability.record.summary import RunSummary
from raystride.pipelines.system.credentials import redact, redact_exception
from raystride.pipelines.system.permit import LOOK_S
from raystride.pipelines.system.service_thread import ServiceThread
from raystride.pipelines.system.storage.folder import Folder, resolve_filesystem
from raystride.pipelines.train.worker.job import Job, WorkerInfo

PLACEMENT_WAIT_S = "3"
"""Seconds that an elastic run waits for its placement group before it counts the slots again. For some seconds Ray knows of
a worker's death but not of its node's: slots there are requested in vain, for a minute with Ray's default."""

NODE_ID_LABEL = "ray.io/node-id"
"""Ray's label for a node's id."""


def train_on_ray(job: Job, allocation: Allocation, recorder: RecorderHandle, *, fast_start: bool) -> RunSummary:
    """Runs the job on Ray workers; returns rank 0's summary.

    Raises ray.train.TrainingFailedError, other errors of Ray, and Hung if the last group hung and was killed for it.
    """
    watch = HangWatch(recorder, job.folder, job.config.launch.hang_s)
    try:
        return _train(job, allocation, recorder, fast_start=fast_start)
    except Exception as error:
        raise watch.cause(error) from None
    finally:
        watch.end()


def _train(job: Job, allocation: Allocation, recorder: RecorderHandle, *, fast_start: bool) -> RunSummary:
    started = time.monotonic()

    def fit(start: StartPlan) -> RunSummary:
        remaining_job = _with_remaining_hours(job, time.monotonic() - started) if start.number else job
        settings = make_trainer_settings(remaining_job, allocation, recorder, start)
        result = make_trainer(worker_main, settings, fast_start=fast_start, warn=recorder.warn).fit()
        return cast(RunSummary, result.return_value or {})

    # Without checkpoints a stop would lose everything, so such a run keeps its workers.
    if not job.config.checkpoint.every or not (allocation.min_workers or uses_running_cluster(job.config.launch)):
        return fit(StartPlan(allocation.workers))
    if allocation.min_workers:
        os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", PLACEMENT_WAIT_S)
    scaling = job.config.scaling
    return train_on_nodes(fit, allocation, recorder, scaling.resize_every_s, scaling.drop_slower_than)


def make_trainer_settings(job: Job, allocation: Allocation, recorder: RecorderHandle, start: StartPlan) -> dict[str, Any]:
    """Returns the arguments of a Ray Train trainer for a start of the job."""
    from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig

    launch = job.config.launch
    under_nsys = {"py_executable": worker_executable(allocation.device)} if job.config.profile.tool == "nsys" else {}
    return {
        "train_loop_config": {"job": _for_workers(job), "recorder": recorder},
        "scaling_config": ScalingConfig(
            num_workers=(allocation.min_workers, start.max_workers) if allocation.min_workers else start.max_workers,
            use_gpu=allocation.device == "cuda",
            resources_per_worker=allocation.per_worker,
            label_selector={NODE_ID_LABEL: f"!in({','.join(sorted(start.excluded_nodes))})"}
            if start.excluded_nodes
            else None,
            # Ray Train would kill the workers to grow; see `elastic`.
            elastic_resize_monitor_interval_s=NEVER_S,
        ),
        "run_config": RunConfig(
            name=f"{job.run}-{job.attempt}" + (f"-{start.number}" if start.number else ""),
            **ray_storage_options(job.folder / ".ray"),
            failure_config=FailureConfig(
                max_failures=launch.max_restarts, max_preemption_failures=launch.max_preemption_restarts
            ),
            # Ray would print a failure's traceback three times; the closing screen shows the lines that matter.
            logging_config=LoggingConfig(log_level="CRITICAL"),
            worker_runtime_env=under_nsys,
        ),
    }


def _for_workers(job: Job) -> Job:
    """Returns the job with data by reference, and without the tracking server's address: it may hold a password."""
    config = replace(job.config, record=replace(job.config.record, mlflow_uri=None))  # only the recorder needs it
    return replace(job, config=config, plugin_bundle=job.plugin_bundle.for_workers())


def ray_storage_options(folder: Folder) -> dict[str, Any]:
    """Returns Ray's RunConfig options for a folder. Ray stores them, so a folder with a key is given as a file system."""
    if str(folder) == folder.uri:
        return {"storage_path": folder.uri}
    system, path = resolve_filesystem(folder.uri)
    return {"storage_path": path, "storage_filesystem": system}


def _with_remaining_hours(job: Job, seconds: float) -> Job:
    """Returns the job with its limit in hours, if any, reduced by `seconds`."""
    train = job.config.train
    if not train.hours:
        return job
    left = max(1e-9, train.hours - seconds / 3600)  # 0 would mean no limit
    return replace(job, config=replace(job.config, train=replace(train, hours=left)))


def make_trainer(function: Any, settings: dict[str, Any], *, fast_start: bool, warn: Warn) -> Any:
    """Returns the fast-start trainer if requested, else the stock TorchTrainer; also the latter, after a warning, if Ray's
    internals have changed.
    """
    if fast_start and (trainer := fast_start_trainer(function, settings, warn)):
        return trainer
    from ray.train.torch import TorchTrainer

    return TorchTrainer(function, torch_config=torch_config(), **settings)


def worker_main(config: dict[str, Any]) -> RunSummary:
    """Runs a worker process: heartbeats, stop poll and `run_worker`; returns its summary."""
    milestones = {"worker": time.time()}
    import ray.train

    from raystride.pipelines.train.worker.run import run_worker

    context, recorder = ray.train.get_context(), config["recorder"]
    world = context.get_world_size()
    worker = WorkerInfo(
        rank=context.get_world_rank(),
        world=world,
        local_rank=context.get_local_rank(),
        node=ray.util.get_node_ip_address(),
    )
    # One rank's request reaches all in the next step, so only rank 0 polls.
    stopping = StopPoll(partial(recorder.stop_requested, world), recorder.warn) if worker.rank == 0 else None
    # The driver may have lost the run while it was stopped, so that it can end nobody.
    permit = ServiceThread("permit", config["job"].permit.look, every_s=LOOK_S, max_pause_s=LOOK_S, log=recorder.warn)
    if stopping:
        permit.start()
    hang_s, node_id = config["job"].config.launch.hang_s, ray.get_runtime_context().get_node_id()
    cut_off = exit_unreachable_worker if node_id != recorder.node_id else None
    heartbeats = (
        HeartbeatSender(recorder.heartbeat, worker, node_id, heartbeat_interval_s(hang_s), cut_off) if hang_s else None
    )
    try:
        return run_worker(config["job"], worker, recorder.post, stopping or (lambda: False), milestones)
    except BaseException as error:
        redact_exception(error)  # Ray writes it into its logs
        # As a note of the error, the traceback survives pickling to another process.
        error.add_note(redact("".join(traceback.format_exception(error))))
        raise
    finally:
        if stopping:
            stopping.end()
            permit.stop()
        if heartbeats:
            heartbeats.end()


class PlacementWatcher:
    """Reports why a group of workers does not start: the placement group of its workers is pending on a busy cluster.

    Ray Train requests all workers of a group at once, as a placement group, and waits for it silently and without limit;
    `timeout_s` above 0 limits the wait in seconds.

        watcher = PlacementWatcher(allocation, timeout_s=600)
        watcher.describe_wait()                               # "waiting for 2 workers with GPU 1 each: 0 of 8 GPUs free"
    """

    def __init__(self, allocation: Allocation, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._allocation, self._timeout_s, self._clock = allocation, timeout_s, clock
        self._since: float | None = None

    def describe_wait(self) -> str | None:
        """Returns what the workers wait for, None if they have their slots. Raises CannotRun when they waited too long."""
        if not self._is_pending():
            self._since = None
            return None
        self._since = self._since or self._clock()
        text = f"waiting for {self._describe_workers()}: {self._describe_free()}"
        limit_s = self._timeout_s
        if limit_s and self._clock() - self._since > limit_s:
            raise CannotRun(
                f"no places for the workers in {limit_s:g} s (launch.placement_timeout_s), {text}. Ask for fewer with "
                "--scaling.workers, wait longer with --launch.placement_timeout_s, or see `ray status` for who has them",
                setting="launch.placement_timeout_s",
                value=self._timeout_s,
            )
        return text

    def _is_pending(self) -> bool:
        """Returns whether a placement group with bundles like those of the workers is pending."""
        from ray.util import placement_group_table

        wanted = {name: float(count) for name, count in self._allocation.per_worker.items()}
        for group in placement_group_table().values():
            bundles = [bundle for bundle in group["bundles"].values() if wanted.items() <= bundle.items()]
            if group["state"] in ("PENDING", "INFEASIBLE") and len(bundles) >= max(1, self._allocation.min_workers):
                return True
        return False

    def _describe_workers(self) -> str:
        per_worker = " and ".join(f"{name} {count:g}" for name, count in self._allocation.per_worker.items())
        workers = self._allocation.min_workers or self._allocation.workers
        return f"{workers} worker{'s' if workers > 1 else ''} with {per_worker} each"

    def _describe_free(self) -> str:
        import ray

        free, total = ray.available_resources(), ray.cluster_resources()
        return ", ".join(
            f"{free.get(name, 0):g} of {total.get(name, 0):g} {name}s free" for name in self._allocation.per_worker
        )
