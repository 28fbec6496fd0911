"""A training by `transformers.Trainer` around a model of one's own, as its documentation writes it.

python -m benchmarks.peers.hf_trainer --text input.txt --progress progress.jsonl --folder out --steps 200
torchrun --nproc-per-node 2 -m benchmarks.peers.hf_trainer ... --workers 2 --threads 1
"""

from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments, set_seed

from benchmarks.peers.characters import Windows, read_characters
from benchmarks.peers.plain_loop import BATCH, BLOCK, GPT, RATE, learning_rate, make_optimizer
from benchmarks.peers.protocol import SEED, Job, Progress, read_job


class Wrapped(PreTrainedModel):
    """The model as Trainer wants it: a dictionary with the loss, and tied weights that are saved once."""

    config_class = PretrainedConfig
    _tied_weights_keys = {"gpt.tokens.weight": "gpt.head.weight"}  # noqa: RUF012

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.gpt = GPT(config.vocabulary)
        self.post_init()

    def _init_weights(self, module: Any) -> None:
        """GPT has set its weights itself."""

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """(B, T) each -> the mean loss in nats."""
        return {"loss": self.gpt(ids, targets)}


class Reporting(TrainerCallback):
    """Tells the progress of each step and validation."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """After each optimiser step."""
        self.progress.step(state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **more: Any) -> None:
        """After each validation."""
        self.progress.validation(state.global_step, metrics["eval_loss"])


def train(job: Job) -> None:
    """Trains, in each process of torchrun or alone."""
    torch.set_num_threads(job.threads)
    set_seed(SEED)
    text = read_characters(job.text)
    model = Wrapped(PretrainedConfig(vocabulary=text.vocabulary))
    optimizer = make_optimizer(model)
    arguments = TrainingArguments(
        output_dir=str(job.folder),
        use_cpu=True,
        ddp_backend="gloo" if job.workers > 1 else None,
        max_steps=job.steps,
        per_device_train_batch_size=BATCH // job.workers,
        per_device_eval_batch_size=128,
        max_grad_norm=1.0,
        label_names=["targets"],
        prediction_loss_only=True,
        logging_steps=50,
        eval_strategy="steps" if job.validate_every else "no",
        eval_steps=job.validate_every or None,
        save_strategy="steps" if job.checkpoint_every else "no",
        save_steps=job.checkpoint_every or 500,
        save_total_limit=2,
        seed=SEED,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=Windows(text.train),
        eval_dataset=Windows(text.validation, every=BLOCK),
        optimizers=(optimizer, LambdaLR(optimizer, lambda step: learning_rate(step, job.steps) / RATE)),
    )
    progress = Progress(job, trainer.args.process_index)
    trainer.add_callback(Reporting(progress))
    trainer.train(resume_from_checkpoint=job.resume or None)
    progress.done(model.gpt)


if __name__ == "__main__":
    train(read_job("hf_trainer", __doc__))
