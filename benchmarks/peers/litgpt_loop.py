"""A training by litgpt's `pretrain.setup` with a DataModule of one's own, as its documentation writes it.

Its networks know rotary positions alone, so that this one has no table of positions; all else is as the others have it. It
compiles its network, prints each step, and has no way to train in several processes on CPUs: it asks FSDP for devices.

    python -m benchmarks.peers.litgpt_loop --text input.txt --progress progress.jsonl --folder out --steps 200
"""

import re
import sys
from pathlib import Path
from typing import Any

import torch
from litgpt import GPT, Config
from litgpt.args import EvalArgs, TrainArgs
from litgpt.data import DataModule
from litgpt.pretrain import setup
from torch.utils.data import DataLoader, Dataset

from benchmarks.peers.characters import read_characters
from benchmarks.peers.plain_loop import BATCH, BLOCK, HEADS, LAYERS, LOWEST_RATE, RATE, WARM_UP, WIDTH
from benchmarks.peers.protocol import SEED, Job, Progress, read_job


class Rows(Dataset[torch.Tensor]):
    """Windows of BLOCK + 1 characters: all of them, or every n-th."""

    def __init__(self, ids: torch.Tensor, every: int = 1) -> None:
        self.ids, self.every = ids, every

    def __len__(self) -> int:
        return (len(self.ids) - 1 - BLOCK) // self.every + 1

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.ids[index * self.every : index * self.every + BLOCK + 1]


class Text(DataModule):
    """A text as litgpt reads it."""

    def __init__(self, file: Path) -> None:
        self.characters = read_characters(file)

    def connect(self, *_: Any, **__: Any) -> None:
        """Nothing depends on a tokenizer."""

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        """Shuffled windows."""
        return DataLoader(Rows(self.characters.train), BATCH, shuffle=True)

    def val_dataloader(self) -> DataLoader[torch.Tensor]:
        """Consecutive windows."""
        return DataLoader(Rows(self.characters.validation, every=BLOCK), 128)


class Reporting:
    """What litgpt prints, passed on, and each step and validation of it as progress."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.to = progress, sys.stdout

    def write(self, text: str) -> int:
        """A piece of output."""
        if found := re.search(r"iter (\d+) step (\d+) \| loss", text):
            self.progress.step(int(found[2]))
        elif found := re.search(r"iter (\d+): val loss ([\d.]+)", text):
            self.progress.validation(int(found[1]), float(found[2]))
        return self.to.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.to, name)


def train(job: Job) -> None:
    """Trains in this process."""
    torch.set_num_threads(job.threads)
    progress = Progress(job)
    sys.stdout = Reporting(progress)  # type: ignore[assignment]
    text = Text(job.text)
    config = Config(
        name="small",
        block_size=BLOCK,
        vocab_size=text.characters.vocabulary,
        padded_vocab_size=text.characters.vocabulary,
        n_layer=LAYERS,
        n_head=HEADS,
        n_embd=WIDTH,
        intermediate_size=4 * WIDTH,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
    )
    never = 10**9
    decay = {"lr": RATE, "weight_decay": 0.1, "betas": (0.9, 0.99)}
    setup(
        "small",
        model_config=config,
        out_dir=job.folder,
        precision="32-true",
        resume=job.resume,
        data=text,
        train=TrainArgs(
            save_interval=job.checkpoint_every or None,
            log_interval=1,
            global_batch_size=BATCH,
            micro_batch_size=BATCH,
            lr_warmup_steps=WARM_UP,
            max_tokens=job.steps * BATCH * BLOCK,
            max_norm=1.0,
            min_lr=LOWEST_RATE,
            tie_embeddings=True,
        ),
        eval=EvalArgs(interval=job.validate_every or never, max_iters=never, final_validation=False),
        optimizer={"class_path": "torch.optim.AdamW", "init_args": decay},
        devices=1,
        logger_name="csv",
        seed=SEED,
    )
    model = GPT(config)
    model.load_state_dict(torch.load(job.folder / "final" / "lit_model.pth")["model"])
    progress.done(model)


if __name__ == "__main__":
    train(read_job("litgpt_loop", __doc__))
