"""Workers by Ray Train: its TorchTrainer, or a leaner trainer that starts in about half the time.

summary = train_on_ray(job, share, recorder, fast_start=True)       # raises what fit() raises
"""

import os
import time
import traceback
from dataclasses import replace
from functools import partial
from typing import Any, cast

from raystride.pipelines.cluster.cluster import joined
from raystride.pipelines.cluster.elastic import NEVER_S, Start, train_on_nodes
from raystride.pipelines.cluster.fallback import Warn
from raystride.pipelines.cluster.internals import fast_start_trainer
from raystride.pipelines.cluster.meeting import torch_config
from raystride.pipelines.cluster.recorder_handle import RecorderHandle, StopPoll
from raystride.pipelines.cluster.resources import Share
from raystride.pipelines.credentials import conceal, hidden
from raystride.pipelines.files import Folder, filesystem
from raystride.pipelines.hang.heartbeat import HeartbeatSender, end_cut_off_worker
from raystride.pipelines.hang.watch import HangWatch, heartbeat_every_s
from raystride.pipelines.profiling.nsight_commands import worker_executable
from raystride.pipelines.record.summary import RunSummary
from raystride.pipelines.worker.job import Job, WorkerInfo

PLACES_WAIT_S = "3"
"""How long an elastic run waits for its workers' places before it looks again how many there are. A worker's death is known
before that of its node, for some seconds: places there are asked for in vain, with Ray's default for a minute."""

NODE_ID = "ray.io/node-id"
"""The label by which Ray knows a node."""


def train_on_ray(job: Job, share: Share, recorder: RecorderHandle, *, fast_start: bool) -> RunSummary:
    """Runs the job on Ray workers; returns rank 0's summary.

    Raises ray.train.TrainingFailedError, what Ray raises besides, and Hung where the last group hung and was ended for it.
    """
    watch = HangWatch(recorder, job.folder, job.config.launch.hang_s)
    try:
        return _train(job, share, recorder, fast_start=fast_start)
    except Exception as error:
        raise watch.cause(error) from None
    finally:
        watch.end()


def _train(job: Job, share: Share, recorder: RecorderHandle, *, fast_start: bool) -> RunSummary:
    began = time.monotonic()

    def fit(start: Start) -> RunSummary:
        rest = _with_less_time(job, time.monotonic() - began) if start.number else job
        settings = trainer_settings(rest, share, recorder, start)
        result = make_trainer(worker_main, settings, fast_start=fast_start, warn=recorder.warn).fit()
        return cast(RunSummary, result.return_value or {})

    # Without checkpoints a stop would lose all, so such a run keeps the workers that it has.
    if not job.config.checkpoint.every or not (share.least or joined(job.config.launch)):
        return fit(Start(share.workers))
    if share.least:
        os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", PLACES_WAIT_S)
    scaling = job.config.scaling
    return train_on_nodes(fit, share, recorder, scaling.resize_every_s, scaling.drop_slower_than)


def trainer_settings(job: Job, share: Share, recorder: RecorderHandle, start: Start) -> dict[str, Any]:
    """What a trainer takes for a start of the job."""
    from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig

    launch = job.config.launch
    under_nsys = {"py_executable": worker_executable(share.device)} if job.config.profile.tool == "nsys" else {}
    return {
        "train_loop_config": {"job": _for_workers(job), "recorder": recorder},
        "scaling_config": ScalingConfig(
            num_workers=(share.least, start.most) if share.least else start.most,
            use_gpu=share.device == "cuda",
            resources_per_worker=share.per_worker,
            label_selector={NODE_ID: f"!in({','.join(sorted(start.without))})"} if start.without else None,
            # By itself it would kill the workers where they are in order to grow; see `elastic`.
            elastic_resize_monitor_interval_s=NEVER_S,
        ),
        "run_config": RunConfig(
            name=f"{job.run}-{job.attempt}" + (f"-{start.number}" if start.number else ""),
            **ray_storage(job.folder / ".ray"),
            failure_config=FailureConfig(max_failures=launch.restarts, max_preemption_failures=launch.preemptions),
            # Ray would print a failure's traceback three times; the last screen shows the lines that matter.
            logging_config=LoggingConfig(log_level="CRITICAL"),
            worker_runtime_env=under_nsys,
        ),
    }


def _for_workers(job: Job) -> Job:
    """The job without the tracking server's address, which may hold a password: the recorder alone talks to it."""
    return replace(job, config=replace(job.config, record=replace(job.config.record, mlflow_uri=None)))


def ray_storage(folder: Folder) -> dict[str, Any]:
    """A folder as Ray's RunConfig takes it, which Ray also writes down: one that is reached by a key as its file system."""
    if str(folder) == folder.uri:
        return {"storage_path": folder.uri}
    system, path = filesystem(folder.uri)
    return {"storage_path": path, "storage_filesystem": system}


def _with_less_time(job: Job, seconds: float) -> Job:
    """The job that ends as many seconds earlier by its bound on hours, where it has one."""
    train = job.config.train
    if not train.hours:
        return job
    left = max(1e-9, train.hours - seconds / 3600)  # 0 would be no bound
    return replace(job, config=replace(job.config, train=replace(train, hours=left)))


def make_trainer(function: Any, settings: dict[str, Any], *, fast_start: bool, warn: Warn) -> Any:
    """The fast-start trainer where it is asked for, else the stock TorchTrainer; this one also, after a warning, where Ray's
    internals are not as the other knows them.
    """
    if fast_start and (trainer := fast_start_trainer(function, settings, warn)):
        return trainer
    from ray.train.torch import TorchTrainer

    return TorchTrainer(function, torch_config=torch_config(), **settings)


def worker_main(config: dict[str, Any]) -> RunSummary:
    """What each worker process runs."""
    milestones = {"worker": time.time()}
    import ray.train

    from raystride.pipelines.worker.worker import run_worker

    context, recorder = ray.train.get_context(), config["recorder"]
    world = context.get_world_size()
    worker = WorkerInfo(
        rank=context.get_world_rank(),
        world=world,
        local_rank=context.get_local_rank(),
        node=ray.util.get_node_ip_address(),
    )
    # One rank's request reaches all in the next step, so one rank asks.
    stopping = StopPoll(partial(recorder.stop_requested, world)) if worker.rank == 0 else None
    hang_s, node_id = config["job"].config.launch.hang_s, ray.get_runtime_context().get_node_id()
    cut_off = end_cut_off_worker if node_id != recorder.node_id else None
    heartbeats = HeartbeatSender(recorder.heartbeat, worker, node_id, heartbeat_every_s(hang_s), cut_off) if hang_s else None
    try:
        return run_worker(config["job"], worker, recorder.post, stopping or (lambda: False), milestones)
    except BaseException as error:
        conceal(error)  # Ray writes it into its logs
        # Written into the error it outlives the way to another process.
        error.add_note(hidden("".join(traceback.format_exception(error))))
        raise
    finally:
        if stopping:
            stopping.end()
        if heartbeats:
            heartbeats.end()
