"""The device, threads and process group of a worker.

device = set_up_device(job, WorkerInfo(rank=0, world=2))  # torch.device("cuda", 0), in a group of two
"""

import os

import torch
import torch.distributed as dist

from raystride.pipelines.config.combinations import SHARDED
from raystride.pipelines.distributed.process_group import join_group
from raystride.pipelines.hardware.heap import keep_freed_memory
from raystride.pipelines.worker.job import Job, WorkerInfo


def set_up_device(job: Job, worker: WorkerInfo) -> torch.device:
    """Sets threads, memory, determinism and device of this process, and joins the process group of several workers."""
    if job.device == "cuda":
        if job.config.train.deterministic:
            # CPU code is deterministic by itself, and this call imports the compiler, which takes 1.5 s.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
            # The default would fill every fresh tensor with NaN, which only finds bugs and costs a pass over memory.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        device = torch.device("cuda", worker.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(job.threads)
        keep_freed_memory()
    if not dist.is_initialized() and (worker.world > 1 or job.config.scaling.strategy in SHARDED):
        backend = "cpu:gloo,cuda:nccl" if job.device == "cuda" else "gloo"
        join_group(backend, worker.rank, worker.world)
    return device
