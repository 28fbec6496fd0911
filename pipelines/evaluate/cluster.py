"""Parts answered over Ray Data: actors hold the model, and each takes the next part when it has written one.

answer_on_ray(work, parts, workers=4, per_worker={"CPU": 2})     # ray.init was called before
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import ray
from ray.data import ActorPoolStrategy

from pipelines.evaluate.parts import Work, answer_part
from pipelines.prepare.cluster import quiet_context
from pipelines.prepare.faults import DataError
from pipelines.prepare.pieces import Part


class _Actor:
    """A worker with its model."""

    def __init__(self, work: Work, parts: dict[int, Part]) -> None:
        self._work, self._parts, self._answerer = work, parts, work.answerer()

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Answers one part; its number comes back, and what is wrong with its data: Ray Data loses the error's class."""
        problem = ""
        try:
            answer_part(self._work, self._answerer, self._parts[int(batch["part"][0])])
        except DataError as error:
            problem = str(error)
        return batch | {"problem": np.array([problem])}


def answer_on_ray(work: Work, parts: list[Part], *, workers: int, per_worker: Mapping[str, float]) -> None:
    """Answers the parts on so many actors with so many CPUs or GPUs each. Raises DataError as a part raised it."""
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
