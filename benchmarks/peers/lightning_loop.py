"""A training by Lightning as its documentation writes it: a LightningModule, ModelCheckpoint, `Trainer.fit`.

python -m benchmarks.peers.lightning_loop --text input.txt --progress progress.jsonl --folder out --steps 200
"""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from benchmarks.peers.characters import Windows, read_characters
from benchmarks.peers.plain_loop import BATCH, BLOCK, GPT, RATE, learning_rate, make_optimizer
from benchmarks.peers.protocol import SEED, Job, Progress, read_job


class Module(L.LightningModule):
    """The model, its loss and its optimiser."""

    def __init__(self, vocabulary: int, steps: int) -> None:
        super().__init__()
        self.gpt, self.steps = GPT(vocabulary), steps

    def training_step(self, batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
        """(B, T) ids and targets -> the mean loss in nats."""
        return self.gpt(batch["ids"], batch["targets"])  # type: ignore[no-any-return]

    def validation_step(self, batch: dict[str, torch.Tensor], number: int) -> None:
        """The same, averaged over the whole tail."""
        self.log("val_loss", self.gpt(batch["ids"], batch["targets"]), sync_dist=True, batch_size=len(batch["ids"]))

    def configure_optimizers(self) -> Any:
        """AdamW, and its rate by the step."""
        optimizer = make_optimizer(self)
        scheduler = LambdaLR(optimizer, lambda step: learning_rate(step, self.steps) / RATE)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Reporting(Callback):
    """Tells the progress of each step and validation."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def on_train_batch_end(self, trainer: Any, *more: Any) -> None:
        """After each optimiser step."""
        if trainer.is_global_zero:
            self.progress.step(trainer.global_step)

    def on_validation_end(self, trainer: Any, *more: Any) -> None:
        """After each validation."""
        if trainer.is_global_zero:
            self.progress.validation(trainer.global_step, float(trainer.callback_metrics["val_loss"]))


def train(job: Job) -> None:
    """Trains; Lightning starts the other processes itself."""
    torch.set_num_threads(job.threads)
    L.seed_everything(SEED)
    text = read_characters(job.text)
    module, progress = Module(text.vocabulary, job.steps), Progress(job)
    callbacks: list[Callback] = [Reporting(progress)]
    if job.checkpoint_every:
        callbacks.append(ModelCheckpoint(job.folder, every_n_train_steps=job.checkpoint_every, save_last=True))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=job.workers,
        strategy="ddp" if job.workers > 1 else "auto",
        max_steps=job.steps,
        gradient_clip_val=1.0,
        val_check_interval=job.validate_every or None,
        check_val_every_n_epoch=None if job.validate_every else 1,
        limit_val_batches=None if job.validate_every else 0,
        num_sanity_val_steps=0,
        callbacks=callbacks,
        enable_checkpointing=bool(job.checkpoint_every),
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(
        module,
        DataLoader(Windows(text.train), BATCH // job.workers, shuffle=True),
        DataLoader(Windows(text.validation, every=BLOCK), 128),
        ckpt_path="last" if job.resume else None,
    )
    if trainer.is_global_zero:
        progress.done(module)


if __name__ == "__main__":
    train(read_job("lightning_loop", __doc__))
