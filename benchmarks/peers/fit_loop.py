"""The same network and data by `raystride.fit`, in one process or on Ray's workers.

python -m benchmarks.peers.fit_loop --text input.txt --progress progress.jsonl --folder jobs/run-1 --steps 200
"""

import torch
from torch import nn

import raystride
from benchmarks.peers.characters import Windows, read_characters
from benchmarks.peers.plain_loop import BATCH, BLOCK, GPT, RATE, learning_rate, make_optimizer
from benchmarks.peers.protocol import SEED, Job, read_job


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The network's own, a mean."""
    return model(batch["ids"], batch["targets"])  # type: ignore[no-any-return]


def train(job: Job) -> raystride.Run:
    """Trains, or goes on with the run that the folder is named after."""
    text = read_characters(job.text)
    return raystride.fit(
        model=lambda: GPT(text.vocabulary),
        data=Windows(text.train),
        validation=Windows(text.validation, every=BLOCK),
        loss=loss,
        optimizer=lambda model, rate: make_optimizer(model),
        schedule=lambda step, steps: learning_rate(step, steps) / RATE,
        settings={
            "seed": SEED,
            "train.batch": BATCH,
            "train.steps": job.steps,
            "train.log_every": 1 if job.steps <= 10 else 10,
            "train.exact": job.checkpoint_every > 0,  # the summary names the parameters of exact runs alone
            "optimizer.learning_rate": RATE,
            "scaling.workers": job.workers,
            "scaling.threads": job.threads,
            "validation.every": job.validate_every,
            "validation.samples": 0 if job.validate_every else BATCH,
            "checkpoint.every": job.checkpoint_every,
            "launch": "ray" if job.workers > 1 else "inline",
        },
        run=job.folder.name,
        storage=job.folder.parent.parent / "fit",
    )


if __name__ == "__main__":
    train(read_job("fit_loop", __doc__))
