"""Where a finished run's answers are computed: in this process, or on a Ray cluster's workers.

predict(chosen, settings, "mails.csv", folder, answerers(settings, launch))       # ray.init ... ray.shutdown, where needed
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from raystride.pipelines.cluster.cluster import CannotRun, cluster, joined
from raystride.pipelines.cluster.resources import Resources
from raystride.pipelines.config import Answering, Launch

if TYPE_CHECKING:
    import numpy as np

    from raystride.pipelines.evaluate.parts import AnswerWork
    from raystride.pipelines.evaluate.prediction import RunParts
    from raystride.pipelines.sources.pieces import Part


HERE_BYTES = 2 << 20
"""Of data that is answered in this process where nobody asks for Ray: starting it takes as long as thousands of texts."""


def answerers(settings: Answering, launch: Launch) -> "RunParts":
    """What answers parts; Ray starts when there are some, and not before. Raises SettingError.

    What it returns raises NoCluster, SettingError where there are fewer places than `workers`, and DataError as parts do.
    """
    if launch.mode == "inline" and settings.workers not in ("auto", 1):
        raise settings.error("workers", "must be 1 (or auto) with --launch inline, which is this one process")
    return partial(_answer, settings, launch)


def _answer(settings: Answering, launch: Launch, work: "AnswerWork", parts: "list[Part]") -> None:
    from raystride.pipelines.evaluate.prediction import answer_here

    # Of parts that a hash divides, all is read and a share answered.
    share = work.chosen.config.data.validation_fraction if work.split == "validation" else 1.0
    size = sum(part.bytes * (1.0 if part.split else share) for part in parts)
    small = size <= HERE_BYTES and settings.workers in ("auto", 1) and not joined(launch)
    if launch.mode == "inline" or (launch.mode != "ray" and small):
        answer_here(work, parts)
        return
    # Ray Data's actors would each be announced with an error of Ray's core that is none.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    with cluster(launch):
        _on_cluster(work, parts)


def _on_cluster(work: "AnswerWork", parts: "list[Part]") -> None:
    settings, there = work.settings, Resources.of_cluster()
    cuda = settings.device == "cuda" or (settings.device == "auto" and there.gpus >= 1)
    if cuda and there.gpu_problem:
        message = f"device is cuda: {there.gpu_problem}, or use --device cpu"
        raise CannotRun(message, setting="device", value=settings.device)
    workers = int(there.gpus if cuda else there.cpus) if settings.workers == "auto" else settings.workers
    if workers > (most := int(there.gpus if cuda else there.cpus)):
        raise settings.error("workers", f"must be at most {most}, the cluster's {'GPUs' if cuda else 'cores'}")
    workers = max(1, min(workers, len(parts)))
    threads = settings.threads or max(1, int(there.cpus // workers))
    work = replace(work, settings=replace(settings, device="cuda" if cuda else "cpu", threads=threads))
    answer_on_ray(work, parts, workers=workers, per_worker={"GPU": 1} if cuda else {"CPU": threads})


class _Actor:
    """A worker with its model."""

    def __init__(self, work: "AnswerWork", parts: "dict[int, Part]") -> None:
        self._work, self._parts, self._answerer = work, parts, work.answerer()

    def __call__(self, batch: "dict[str, np.ndarray]") -> "dict[str, np.ndarray]":
        """Answers one part; its number comes back, and what is wrong with its data: Ray Data loses the error's class."""
        import numpy as np

        from raystride.pipelines.evaluate.parts import answer_part
        from raystride.pipelines.sources.faults import DataError

        problem = ""
        try:
            answer_part(self._work, self._answerer, self._parts[int(batch["part"][0])])
        except DataError as error:
            problem = str(error)
        return batch | {"problem": np.array([problem])}


def answer_on_ray(work: "AnswerWork", parts: "list[Part]", *, workers: int, per_worker: Mapping[str, float]) -> None:
    """Answers the parts on so many actors with so many CPUs or GPUs each. Raises DataError as a part raised it."""
    import ray
    from ray.data import ActorPoolStrategy

    from raystride.pipelines.prepare.ray_data import quiet_context
    from raystride.pipelines.sources.faults import DataError

    # Ray Data keeps a task that reads apart from the actors; if they held every CPU, it would never start.
    resources: dict[str, Any] = {f"num_{name.lower()}s": 0.9 * n if name == "CPU" else n for name, n in per_worker.items()}
    numbers = {part.number: part for part in parts}
    with quiet_context():
        rows = ray.data.from_items([{"part": number} for number in numbers], override_num_blocks=len(parts))
        pool = ActorPoolStrategy(size=workers, max_tasks_in_flight_per_actor=2)
        answered = rows.map_batches(_Actor, batch_size=1, compute=pool, fn_constructor_args=(work, numbers), **resources)
        for row in answered.iter_rows():
            if row["problem"]:
                raise DataError(row["problem"])
