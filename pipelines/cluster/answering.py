"""Where a finished run's answers are computed: in this process, or on a Ray cluster's workers.

with answerers(settings, launch) as run_parts:            # ray.init ... ray.shutdown, unless launch.mode is inline
    predict(chosen, settings, "mails.csv", folder, run_parts)
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from pipelines.config import Answering, Launch
from pipelines.launch.cluster import cluster
from pipelines.launch.resources import Resources

if TYPE_CHECKING:
    from pipelines.evaluate.parts import Work
    from pipelines.evaluate.prediction import RunParts
    from pipelines.prepare.pieces import Part


@contextmanager
def answerers(settings: Answering, launch: Launch) -> "Iterator[RunParts]":
    """What answers parts, within the block. Raises SettingError, NoCluster."""
    if launch.mode == "inline":
        if settings.workers not in ("auto", 1):
            raise settings.error("workers", "must be 1 (or auto) with --launch inline, which is this one process")
        from pipelines.evaluate.prediction import answer_here

        yield answer_here
        return
    # Ray Data's actors would each be announced with an error of Ray's core that is none.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    with cluster(launch):
        yield _on_cluster


def _on_cluster(work: "Work", parts: "list[Part]") -> None:
    from pipelines.evaluate.cluster import answer_on_ray

    settings, there = work.settings, Resources.of_cluster()
    cuda = settings.device == "cuda" or (settings.device == "auto" and there.gpus >= 1)
    workers = int(there.gpus if cuda else there.cpus) if settings.workers == "auto" else settings.workers
    if workers > (most := int(there.gpus if cuda else there.cpus)):
        raise settings.error("workers", f"must be at most {most}, the cluster's {'GPUs' if cuda else 'cores'}")
    workers = max(1, min(workers, len(parts)))
    threads = settings.threads or max(1, int(there.cpus // workers))
    work = replace(work, settings=replace(settings, device="cuda" if cuda else "cpu", threads=threads))
    answer_on_ray(work, parts, workers=workers, per_worker={"GPU": 1} if cuda else {"CPU": threads})
