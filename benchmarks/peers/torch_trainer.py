"""A training by Ray Train's TorchTrainer as its documentation writes it: `prepare_model`, `prepare_data_loader`, `report`.

python -m benchmarks.peers.torch_trainer --text input.txt --progress progress.jsonl --folder out --steps 200
"""

import tempfile
from pathlib import Path

import ray
import ray.train
import ray.train.torch
import torch
from ray.train import Checkpoint, CheckpointConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.peers.characters import Windows, read_characters, validate
from benchmarks.peers.plain_loop import BATCH, GPT, learning_rate, make_optimizer, update
from benchmarks.peers.protocol import SEED, Job, Progress, read_job
from benchmarks.peers.torch_loop import load, save


def restore(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Goes on from the newest checkpoint that Ray Train knows; its step, or 0."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        return load(Path(folder) / "checkpoint.pt", model, optimizer)


def report(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Reports a step to Ray Train, with a checkpoint of rank 0; every worker calls it."""
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = None
        if ray.train.get_context().get_world_rank() == 0:
            save(Path(scratch) / "checkpoint.pt", model, optimizer, step)
            checkpoint = Checkpoint.from_directory(scratch)
        ray.train.report({"step": step}, checkpoint=checkpoint)


def train_function(job: Job) -> None:
    """What each worker runs."""
    torch.set_num_threads(job.threads)
    torch.manual_seed(SEED)
    text = read_characters(job.text)
    raw = GPT(text.vocabulary)
    optimizer = make_optimizer(raw)
    first = restore(raw, optimizer)
    model = ray.train.torch.prepare_model(raw)
    loader = ray.train.torch.prepare_data_loader(DataLoader(Windows(text.train), BATCH // job.workers, shuffle=True))
    rank = ray.train.get_context().get_world_rank()
    progress = Progress(job, rank)
    for step, batch in enumerate(loader, start=first):
        if step == job.steps:
            break
        update(model, optimizer, batch["ids"], batch["targets"], learning_rate(step, job.steps))
        progress.step(step + 1)
        if job.validate_every and (step + 1) % job.validate_every == 0 and rank == 0:
            loss = validate(raw, text.validation)
            progress.validation(step + 1, loss)
        if job.checkpoint_every and (step + 1) % job.checkpoint_every == 0:
            report(raw, optimizer, step + 1)
    progress.done(raw)


def main(job: Job) -> None:
    """Trains on a local cluster of its own. A run of the same name goes on from its newest checkpoint."""
    ray.init(address="local", include_dashboard=False)
    trainer = TorchTrainer(
        train_function,
        train_loop_config=job,
        scaling_config=ScalingConfig(num_workers=job.workers, resources_per_worker={"CPU": job.threads}),
        run_config=RunConfig(name="run", storage_path=str(job.folder), checkpoint_config=CheckpointConfig(num_to_keep=2)),
    )
    trainer.fit()


if __name__ == "__main__":
    main(read_job("torch_trainer", __doc__))
