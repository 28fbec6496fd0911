"""A training by PyTorch alone, as its tutorials write it: DataLoader, DistributedDataParallel, torchrun, torch.save.

python -m benchmarks.peers.torch_loop --text input.txt --progress progress.jsonl --folder out --steps 200
torchrun --nproc-per-node 2 -m benchmarks.peers.torch_loop ... --workers 2 --threads 1
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.peers.characters import Windows, read_characters, validate
from benchmarks.peers.plain_loop import BATCH, GPT, learning_rate, make_optimizer, update
from benchmarks.peers.protocol import SEED, Job, Progress, read_job


def save(file: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Writes a checkpoint."""
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, file)


def load(file: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Reads a checkpoint into both; its step."""
    saved = torch.load(file)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return int(saved["step"])


def train(job: Job) -> None:
    """Trains, in each process of torchrun or alone."""
    torch.set_num_threads(job.threads)
    torch.manual_seed(SEED)
    if job.workers > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    text = read_characters(job.text)
    raw = GPT(text.vocabulary)
    model = DistributedDataParallel(raw) if job.workers > 1 else raw
    optimizer = make_optimizer(raw)
    windows = Windows(text.train)
    sampler: DistributedSampler[dict[str, torch.Tensor]] = DistributedSampler(windows, job.workers, rank, seed=SEED)
    loader = DataLoader(windows, BATCH // job.workers, sampler=sampler)
    first, file = 0, job.folder / "checkpoint.pt"
    if job.resume:
        first = load(file, raw, optimizer)
    progress = Progress(job, rank)
    for step, batch in enumerate(loader, start=first):
        if step == job.steps:
            break
        update(model, optimizer, batch["ids"], batch["targets"], learning_rate(step, job.steps))
        progress.step(step + 1)
        if job.validate_every and (step + 1) % job.validate_every == 0 and rank == 0:
            loss = validate(raw, text.validation)
            progress.validation(step + 1, loss)
        if job.checkpoint_every and (step + 1) % job.checkpoint_every == 0 and rank == 0:
            save(job.folder / "new.pt", raw, optimizer, step + 1)
            os.replace(job.folder / "new.pt", file)
    progress.done(raw)
    if job.workers > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    train(read_job("torch_loop", __doc__))
