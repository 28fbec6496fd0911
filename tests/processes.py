"""Real worker processes on gloo, without Ray: what distributed and fault tests start, kill and start again.

They are forked from a server that has PyTorch loaded, which saves each of them some seconds.

    outcome = run_workers(job, world=3)                       # rank 0's summary
    workers = start_workers(job, world=2); workers.processes[1].kill()
"""

import json
import sys
import tempfile
import traceback
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from raystride.pipelines.config import Config
from raystride.pipelines.data.prepare.prepare import prepare
from raystride.pipelines.data.prepare.run_context import RunContext
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.worker.job import Job, WorkerInfo
from tests.distributed import LIMIT_S
from tests.fork_server import CONTEXT
from tests.receipts import accept


@dataclass(frozen=True)
class Workers:
    """The workers of a job, by rank, and where they leave their summary or what they raised."""

    processes: list[BaseProcess]
    place: Path


def make_job(config: Config, storage: Path, run: str, attempt: str = "a1") -> Job:
    """A job on prepared data, as the driver would make it."""
    folder = Folder.from_uri(str(storage))
    prepared = prepare(RunContext(config, folder, log=lambda _: None), build_task(config), on_ray=False)
    return Job(
        config=config, run=run, attempt=attempt, folder=folder / run, prepared=prepared.folder, device="cpu", threads=1
    )


def start_workers(job: Job, world: int) -> Workers:
    """Starts the job's workers."""
    place = Path(tempfile.mkdtemp(prefix="workers-"))
    (place / "meeting").mkdir()
    arguments = [(job, rank, world, place) for rank in range(world)]
    processes: list[BaseProcess] = [CONTEXT.Process(target=_work, args=each, daemon=True) for each in arguments]
    for process in processes:
        process.start()
    return Workers(processes, place)


def finish(workers: Workers) -> dict[str, Any]:
    """Waits for the workers; rank 0's summary. Fails where one failed."""
    for rank, process in enumerate(workers.processes):
        process.join(LIMIT_S)
        error = workers.place / f"error-{rank}"
        assert process.exitcode == 0, f"rank {rank}: {error.read_text()[-3000:] if error.exists() else process.exitcode}"
    return dict(json.loads((workers.place / "summary.json").read_text()))


def run_workers(job: Job, world: int) -> dict[str, Any]:
    """Starts the job's workers and waits for the summary."""
    return finish(start_workers(job, world))


def _work(job: Job, rank: int, world: int, place: Path) -> None:
    import torch.distributed as dist

    from raystride.pipelines.train.distributed.process_group import set_rendezvous_file
    from raystride.pipelines.train.worker.run import run_worker

    set_rendezvous_file(str(place / "meeting" / "store"))
    try:
        place_of = WorkerInfo(rank=rank, world=world, local_rank=rank)
        summary = run_worker(job, place_of, accept, lambda: False)
        assert not dist.is_initialized(), "a worker leaves its process group, or it may abort when Python ends"
    except BaseException:
        (place / f"error-{rank}").write_text(traceback.format_exc())
        sys.exit(1)
    if rank == 0:
        (place / "summary.json").write_text(json.dumps(summary))
