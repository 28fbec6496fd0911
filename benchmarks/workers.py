"""Our training without Ray: a job made by hand, and its workers as plain processes that record to nowhere.

What a benchmark compares is then the loop alone; the difference to a run under Ray is what Ray costs.

    job = make_job(settings(*runs.small_setting(text), "--train.steps", "200"), storage, threads=1)
    run_workers(job, world=2)["tokens_per_second"]            # two processes on gloo; rank 0's summary
"""

import json
import os
import pickle
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import runs
from raystride.pipelines.config import Config
from raystride.pipelines.config.parse import parse
from raystride.pipelines.data.prepare.prepare import prepare
from raystride.pipelines.data.prepare.run_context import RunContext
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.worker.job import Job, WorkerInfo
from raystride.pipelines.train.worker.rehearsal import discard_entries


def settings(*flags: str) -> Config:
    """What `ray_jobs/train.py` would make of the flags."""
    return parse(Config, flags, program="benchmark").settings


def make_job(config: Config, storage: Path, threads: int) -> Job:
    """A job on prepared data, as the driver makes it."""
    folder = Folder.from_uri(str(storage))
    prepared = prepare(RunContext(config, folder, log=lambda _: None), build_task(config), on_ray=False)
    run = folder / "job"
    return Job(config=config, run="job", attempt="a1", folder=run, prepared=prepared.folder, device="cpu", threads=threads)


def write_job(job: Job) -> Path:
    """Writes a job for other processes to read, into its storage."""
    assert job.folder.local is not None
    file = job.folder.local.with_suffix(".pickle")
    file.write_bytes(pickle.dumps(job))
    return file


def read_job(file: str | Path) -> Job:
    """The job in a file that `write_job` wrote."""
    return pickle.loads(Path(file).read_bytes())  # type: ignore[no-any-return]


def run_workers(job: Job, world: int) -> dict[str, Any]:
    """Runs the job on so many processes; rank 0's summary. Raises runs.Failed."""
    file = write_job(job)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    with ThreadPoolExecutor(world) as pool:
        ranks = [pool.submit(runs.run, "-m", __name__, str(file), str(rank), str(world), port) for rank in range(world)]
        ended = [rank.result() for rank in ranks]
    return ended[0].answer


def main(file: str, rank: int, world: int, port: str) -> None:
    """What each process runs; prints its summary as JSON."""
    from raystride.pipelines.train.worker.run import run_worker

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    place = WorkerInfo(rank=rank, world=world, local_rank=rank)
    print(json.dumps(run_worker(read_job(file), place, discard_entries, lambda: False)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
