"""Our model, our batches and our update in a loop with nothing around it: the peer of `benchmarks.loop`.

What it lacks is what a training needs: no log, validation, checkpoint, wish to stop, resume or observer; only the loss is
read every `log_every` steps. With several ranks gradients are averaged by PyTorch's DistributedDataParallel.

    ends = bare_loop(job, WorkerInfo(), steps=60)                  # times (s) at which steps ended
    python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.peers.bare_loop JOB STEPS
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.workers import read_job
from raystride.pipelines.config.schedules import learning_rate
from raystride.pipelines.data.feed.cache import NodeCache
from raystride.pipelines.data.feed.loader import Loader
from raystride.pipelines.data.feed.order import Order
from raystride.pipelines.data.feed.plan import Plan
from raystride.pipelines.data.feed.samples import open_samples
from raystride.pipelines.data.feed.stream import TokenStream
from raystride.pipelines.data.prepare.manifest import Manifest
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.train.optimizer import build_optimizer
from raystride.pipelines.train.worker.job import Job, WorkerInfo

LEFT_OUT = 20
"""First steps that are not counted, when run as a program."""


def bare_loop(job: Job, place: WorkerInfo, steps: int) -> list[float]:
    """Trains from scratch; the times (s) at which steps ended."""
    return [time.perf_counter() for _ in bare_steps(job, place, steps)]


def bare_steps(job: Job, place: WorkerInfo, steps: int) -> Iterator[int]:
    """Trains from scratch, a step each time that the next one is asked for."""
    config = job.config
    torch.set_num_threads(job.threads)
    manifest = Manifest.load(job.prepared)
    task = build_task(config, manifest.facts)
    torch.manual_seed(config.seed)
    model = task.build_model()
    optimizer = build_optimizer(config.optimizer, model)
    parameters = list(model.parameters())
    samples = open_samples(
        config.train, config.seed, task, TokenStream(job.prepared, manifest, "train", NodeCache(Path("unused"), 0))
    )
    plan = Plan(Order(samples.num_samples, config.seed), config.train.slots, config.train.slot_size)
    loader = Loader(plan, samples, rank=place.rank, world=place.world)
    spread = DistributedDataParallel(model) if place.world > 1 else model
    for step in loader.steps(0, steps):
        for parameter in parameters:
            parameter.grad = None
        (batch,) = step.micro_batches
        loss_sum, counted = spread(*batch.inputs, batch.targets)
        loss = loss_sum / counted
        loss.backward()
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        torch._foreach_mul_(gradients, (config.train.clip_norm / (norm + 1e-6)).clamp(max=1.0))
        optimizer.update(learning_rate(config.optimizer, step.number, steps, config.model.hidden_size))
        if (step.number + 1) % config.train.log_every == 0:
            loss.item()
        yield step.number


def main(file: str, steps: int) -> None:
    """A rank that torchrun started; rank 0 prints tokens a second and milliseconds a step (median) as JSON."""
    job = read_job(file)
    dist.init_process_group("gloo")
    place = WorkerInfo(rank=dist.get_rank(), world=dist.get_world_size(), local_rank=int(os.environ["LOCAL_RANK"]))
    counted = np.diff(bare_loop(job, place, steps)[LEFT_OUT - 1 :])
    if place.rank == 0:
        tokens = job.config.train.samples_per_step * job.config.model.context
        rate, middle = tokens / float(counted.mean()), 1000 * statistics.median(counted.tolist())
        print(json.dumps({"tokens_per_second": rate, "step_ms": middle}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
