"""A training by Ray Data and Ray Train in the shape of PyTorch's tutorial of both, rewritten for characters.

Text is read, cut into blocks and encoded by Ray Data while workers train from `iter_torch_batches`. Blocks do not overlap,
as in the tutorial, so that an epoch is a 64th of what the other peers shuffle.

    python -m benchmarks.peers.ray_data_loop --text input.txt --progress progress.jsonl --folder out --steps 200
    python -m benchmarks.peers.ray_data_loop ... --steps 0     # only prepares: blocks as Parquet files in the folder
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import ray
import ray.train
import ray.train.torch
import torch
from ray.train import CheckpointConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from benchmarks.peers.characters import validate
from benchmarks.peers.plain_loop import BATCH, BLOCK, GPT, learning_rate, make_optimizer, update
from benchmarks.peers.protocol import SEED, Job, Progress, read_job
from benchmarks.peers.torch_trainer import report, restore


class Blocks:
    """Lines of text into blocks of BLOCK + 1 characters' numbers, of which the last is the next one's first."""

    def __init__(self, characters: str) -> None:
        self.number = {character: i for i, character in enumerate(characters)}

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        ids = np.array([self.number[c] for c in "\n".join(batch["text"])], dtype=np.int64)
        rows = (len(ids) - 1) // BLOCK
        return {
            "ids": ids[: rows * BLOCK].reshape(rows, BLOCK),
            "targets": ids[1 : 1 + rows * BLOCK].reshape(rows, BLOCK),
        }


def batches(job: Job) -> Iterator[dict[str, torch.Tensor]]:
    """This worker's batches, epoch after epoch."""
    shard = ray.train.get_dataset_shard("train")
    epoch = 0
    while True:
        yield from shard.iter_torch_batches(
            batch_size=BATCH // job.workers,
            drop_last=True,
            local_shuffle_buffer_size=10_000,
            local_shuffle_seed=SEED + epoch,
        )
        epoch += 1


def train_function(config: dict[str, Any]) -> None:
    """What each worker runs."""
    job, validation = config["job"], config["validation"]
    torch.set_num_threads(job.threads)
    torch.manual_seed(SEED)
    raw = GPT(config["vocabulary"])
    optimizer = make_optimizer(raw)
    first = restore(raw, optimizer)
    model = ray.train.torch.prepare_model(raw)
    rank = ray.train.get_context().get_world_rank()
    progress = Progress(job, rank)
    for step, batch in zip(range(first, job.steps), batches(job), strict=False):
        update(model, optimizer, batch["ids"], batch["targets"], learning_rate(step, job.steps))
        progress.step(step + 1)
        if job.validate_every and (step + 1) % job.validate_every == 0 and rank == 0:
            loss = validate(raw, validation)
            progress.validation(step + 1, loss)
        if job.checkpoint_every and (step + 1) % job.checkpoint_every == 0:
            report(raw, optimizer, step + 1)
    progress.done(raw)


def main(job: Job) -> None:
    """Trains on a local cluster of its own, which has CPUs for Ray Data beside those of the workers."""
    ray.init(address="local", include_dashboard=False, num_cpus=4)
    content = job.text.read_text()
    characters, cut = "".join(sorted(set(content))), int(0.9 * len(content))
    train = job.folder / "train.txt"
    train.write_text(content[:cut])
    lines = ray.data.read_text(str(train), drop_empty_lines=False)
    blocks = lines.map_batches(Blocks, fn_constructor_args=(characters,), batch_size=None, concurrency=1)
    if not job.steps:
        blocks.write_parquet(str(job.folder / "blocks"))
        return
    validation = torch.from_numpy(np.array([characters.index(c) for c in content[cut:]], dtype=np.int64))
    trainer = TorchTrainer(
        train_function,
        train_loop_config={"job": job, "validation": validation, "vocabulary": len(characters)},
        datasets={"train": blocks},
        scaling_config=ScalingConfig(num_workers=job.workers, resources_per_worker={"CPU": job.threads}),
        run_config=RunConfig(name="run", storage_path=str(job.folder), checkpoint_config=CheckpointConfig(num_to_keep=2)),
    )
    trainer.fit()


if __name__ == "__main__":
    main(read_job("ray_data_loop", __doc__))
