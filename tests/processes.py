"""Real worker processes on gloo, without Ray: what distributed and fault tests start, kill and start again.

outcome = run_workers(job, world=3)                       # rank 0's summary
processes = start_workers(job, world=2); os.kill(processes[1].pid, signal.SIGKILL)
"""

import json
import pickle
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pipelines.config import Config
from pipelines.files import Folder
from pipelines.launch.job import Job, Place
from pipelines.prepare.prepare import prepare
from pipelines.tasks import build_task

ROOT = Path(__file__).resolve().parents[1]


def make_job(config: Config, storage: Path, run: str, attempt: str = "a1") -> Job:
    """A job on prepared data, as the driver would make it."""
    folder = Folder.at(str(storage))
    prepared = prepare(config, folder, build_task(config), on_ray=False, echo=lambda _: None)
    return Job(
        config=config, run=run, attempt=attempt, folder=folder / run, prepared=prepared.folder, device="cpu", threads=1
    )


def start_workers(job: Job, world: int) -> list[subprocess.Popen[str]]:
    """Starts the job's workers; the last line that rank 0 prints is its summary as JSON."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    file = Path(tempfile.mkstemp(suffix=".job")[1])
    file.write_bytes(pickle.dumps(job))
    return [
        subprocess.Popen(
            [sys.executable, "-m", "tests.processes", str(file), str(rank), str(world), str(port)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]


def finish(processes: list[subprocess.Popen[str]]) -> dict[str, Any]:
    """Waits for the workers; rank 0's summary. Fails where one failed."""
    outputs = [process.communicate(timeout=120) for process in processes]
    for rank, process in enumerate(processes):
        assert process.returncode == 0, f"rank {rank}: {outputs[rank][1][-3000:]}"
    return dict(json.loads(outputs[0][0].strip().splitlines()[-1]))


def run_workers(job: Job, world: int) -> dict[str, Any]:
    """Starts the job's workers and waits for the summary."""
    return finish(start_workers(job, world))


def _main(file: str, rank: int, world: int, port: str) -> None:
    import os

    import torch.distributed as dist

    from pipelines.launch.worker import run_worker

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    job = pickle.loads(Path(file).read_bytes())
    summary = run_worker(
        job, Place(rank=rank, world=world, local_rank=rank), lambda _, entries: entries[-1]["sequence"], lambda: False
    )
    assert not dist.is_initialized(), "a worker leaves its process group, or it may abort when Python ends"
    print(json.dumps(summary))


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
