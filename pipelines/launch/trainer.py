"""Workers by Ray Train: its TorchTrainer, or a leaner trainer that starts in about half the time on a local cluster.

summary = train_on_ray(job, share, wire, lean=True)       # raises what fit() raises
"""

import os
import time
from typing import Any

from pipelines.launch.job import Job, Place
from pipelines.launch.resources import Share
from pipelines.launch.wire import StopPoll, Wire

PLACES_WAIT_S = "15"
"""How long an elastic run waits for its workers' places. A worker's death is known before that of its node, for some seconds
and up to 20 s of Ray Train's own bookkeeping: places there are asked for in vain, with Ray's default for a minute."""


def train_on_ray(job: Job, share: Share, wire: Wire, *, lean: bool) -> dict[str, Any]:
    """Runs the job on Ray workers; returns rank 0's summary. Raises ray.train.TrainingFailedError, and what Ray raises."""
    from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig

    if share.least:
        os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", PLACES_WAIT_S)
    settings = {
        "train_loop_config": {"job": job, "wire": wire},
        "scaling_config": ScalingConfig(
            num_workers=(share.least, share.workers) if share.least else share.workers,
            use_gpu=share.device == "cuda",
            resources_per_worker=share.per_worker,
            elastic_resize_monitor_interval_s=job.config.scaling.resize_every_s,
        ),
        "run_config": RunConfig(
            name=job.attempt,
            storage_path=(job.folder / ".ray").uri,
            failure_config=FailureConfig(max_failures=job.config.launch.restarts),
            logging_config=LoggingConfig(log_level="CRITICAL"),
        ),
    }
    result = make_trainer(worker_main, settings, lean=lean).fit()
    return dict(result.return_value or {})


def make_trainer(function: Any, settings: dict[str, Any], *, lean: bool) -> Any:
    """The lean trainer where it is asked for and Ray's internals are as it knows them, else the stock TorchTrainer."""
    if lean:
        try:
            from pipelines.launch.lean import LeanTrainer

            return LeanTrainer(function, **settings)
        except (ImportError, AttributeError, TypeError):
            pass  # another version of Ray: what the lean trainer leaves out is not where it was
    from ray.train.torch import TorchTrainer

    return TorchTrainer(function, **settings)


def worker_main(config: dict[str, Any]) -> dict[str, Any]:
    """What each worker process runs."""
    marks = {"worker": time.time()}
    import ray.train

    from pipelines.launch.failure import keep_traceback
    from pipelines.launch.worker import run_worker

    context, wire = ray.train.get_context(), config["wire"]
    world, here = context.get_world_size(), context.get_local_world_size()
    place = Place(
        rank=context.get_world_rank(),
        world=world,
        local_rank=context.get_local_rank(),
        nodes=-(-world // here),
        node=ray.util.get_node_ip_address(),
    )
    # One rank's wish reaches all in the next step, so one rank asks.
    stopping = StopPoll(wire.stop_requested) if place.rank == 0 else None
    try:
        return run_worker(config["job"], place, wire.post, stopping or (lambda: False), marks)
    except BaseException as error:
        keep_traceback(error)
        raise
    finally:
        if stopping:
            stopping.end()
