"""Runs batch inference of a finished run in this process or on a Ray cluster's workers.

predict(chosen, settings, InputData(source="mails.csv"), folder, make_part_runner(settings, launch))  # starts Ray if needed
"""

import os
import pickle
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from raystride.pipelines.config import LaunchConfig, PredictorConfig, SettingError
from raystride.pipelines.launch.cluster.cluster import CannotRun, cluster, uses_running_cluster
from raystride.pipelines.launch.cluster.resources import Resources

if TYPE_CHECKING:
    import numpy as np

    from raystride.pipelines.data.prepare.ray_data import PartRefs
    from raystride.pipelines.data.sources.pieces import Part
    from raystride.pipelines.evaluate.prediction import PartJob, RunParts


MAX_TRIAL_BYTES = 8 << 20
"""Data up to this size is begun in this process unless Ray is requested; its parts are small, so a slow model is noticed."""
TRIAL_S = 5.0
"""Seconds after which the rest is estimated, about as long as Ray and its workers take to start."""
MAX_LOCAL_S = 30.0
"""Estimated seconds up to which the rest stays in this process."""


def make_part_runner(settings: PredictorConfig, launch: LaunchConfig) -> "RunParts":
    """Returns a function that runs inference on parts, and starts Ray only when it gets some. Raises SettingError.

    The function raises NoCluster, SettingError if `workers` exceeds the worker slots, and DataError if a part's data is bad.
    """
    if launch.mode == "inline" and settings.workers not in ("auto", 1):
        raise settings.error("workers", "must be 1 (or auto) with --launch inline, which is this one process")
    return partial(_run_parts, settings, launch)


def _run_parts(settings: PredictorConfig, launch: LaunchConfig, job: "PartJob", parts: "list[Part]") -> dict[int, Any]:
    """Runs the parts of a job; returns their results by number. Raises as the function of `make_part_runner`."""
    from raystride.pipelines.evaluate.prediction import predict_locally

    if launch.mode == "inline":
        return predict_locally(job, parts)
    done: dict[int, Any] = {}
    if launch.mode != "ray" and settings.workers in ("auto", 1) and not uses_running_cluster(launch):
        done = _try_locally(job, parts)
    if not (left := [part for part in parts if part.number not in done]):
        return done
    # Otherwise Ray's core logs a spurious error for each Ray Data actor.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    with cluster(launch):
        return done | _run_on_cluster(job, left)


def _try_locally(job: "PartJob", parts: "list[Part]") -> dict[int, Any]:
    """Runs parts of small data in this process while that is faster than starting Ray; returns their results by number."""
    # Parts that are split by a hash are read whole, but only this fraction of their rows is answered.
    share = job.chosen.config.data.validation_fraction if job.split == "validation" else 1.0
    sizes = [part.bytes * (1.0 if part.split else share) for part in parts]
    if (total := sum(sizes)) > MAX_TRIAL_BYTES:
        return {}
    done, finished = dict[int, Any](), 0.0
    predictor, began = job.load_predictor(), time.monotonic()
    for part, size in zip(parts, sizes, strict=True):
        seconds = time.monotonic() - began
        if finished and seconds > TRIAL_S and seconds / finished * (total - finished) > MAX_LOCAL_S:
            break
        done[part.number] = job.run_part(predictor, part)
        finished += size
    return done


def _run_on_cluster(job: "PartJob", parts: "list[Part]") -> dict[int, Any]:
    settings, cluster_resources = job.settings, Resources.of_cluster()
    cuda = settings.device == "cuda" or (settings.device == "auto" and cluster_resources.gpus >= 1)
    if cuda and cluster_resources.gpu_problem:
        message = f"device is cuda: {cluster_resources.gpu_problem}, or use --device cpu"
        raise CannotRun(message, setting="device", value=settings.device)
    workers = (
        int(cluster_resources.gpus if cuda else cluster_resources.cpus) if settings.workers == "auto" else settings.workers
    )
    if workers > (max_workers := int(cluster_resources.gpus if cuda else cluster_resources.cpus)):
        raise settings.error("workers", f"must be at most {max_workers}, the cluster's {'GPUs' if cuda else 'cores'}")
    workers = max(1, min(workers, len(parts)))
    threads = settings.threads or max(1, int(cluster_resources.cpus // workers))
    settings = replace(settings, device="cuda" if cuda else "cpu", threads=threads)
    job = replace(job.for_workers(), settings=settings)  # type: ignore[type-var]
    return predict_on_ray(job, parts, workers=workers, per_worker={"GPU": 1} if cuda else {"CPU": threads})


class _PredictActor:
    """Actor that holds the model and runs inference on one part at a time."""

    def __init__(self, job: "PartJob", parts: "PartRefs") -> None:
        self._job, self._parts, self._predictor = job, parts, job.load_predictor()

    def __call__(self, batch: "dict[str, np.ndarray]") -> "dict[str, np.ndarray]":
        """Processes one part; returns its number, its pickled result, and whether that is an error with the data or with
        what a user's function returned: Ray Data loses the error's class."""
        import numpy as np

        from raystride.pipelines.data.sources.faults import DataError

        failed, result = False, None
        try:
            result = self._job.run_part(self._predictor, self._parts[int(batch["part"][0])])
        except (DataError, SettingError) as error:
            failed, result = True, error
        return batch | {"failed": np.array([failed]), "result": np.array([pickle.dumps(result)], object)}


def predict_on_ray(job: "PartJob", parts: "list[Part]", *, workers: int, per_worker: Mapping[str, float]) -> dict[int, Any]:
    """Processes the parts on `workers` actors with `per_worker` CPUs or GPUs each; returns their results by number.

    Raises the DataError or SettingError of a part.
    """
    import ray
    from ray.data import ActorPoolStrategy

    from raystride.pipelines.data.prepare.ray_data import PartRefs, quiet_ray_data

    # Ray Data needs CPU for a reading task besides the actors; if they held every CPU, it would never start.
    resources: dict[str, Any] = {f"num_{name.lower()}s": 0.9 * n if name == "CPU" else n for name, n in per_worker.items()}
    done = dict[int, Any]()
    with quiet_ray_data():
        rows = ray.data.from_items([{"part": part.number} for part in parts], override_num_blocks=len(parts))
        pool = ActorPoolStrategy(size=workers, max_tasks_in_flight_per_actor=2)
        results = rows.map_batches(
            _PredictActor, batch_size=1, compute=pool, fn_constructor_args=(job, PartRefs(parts)), **resources
        )
        for row in results.iter_rows():
            result = pickle.loads(row["result"])  # from our own actor  # noqa: S301
            if row["failed"]:
                raise result
            done[int(row["part"])] = result
    return done
