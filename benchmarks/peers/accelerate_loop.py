"""A training by Hugging Face Accelerate as its documentation writes it: `prepare`, `save_state`, `skip_first_batches`.

accelerate launch --cpu -m benchmarks.peers.accelerate_loop --text input.txt --progress progress.jsonl --folder out
torchrun --nproc-per-node 2 -m benchmarks.peers.accelerate_loop ... --workers 2 --threads 1
"""

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from benchmarks.peers.characters import Windows, read_characters, validate
from benchmarks.peers.plain_loop import BATCH, GPT, RATE, learning_rate, make_optimizer
from benchmarks.peers.protocol import SEED, Job, Progress, read_job


def train(job: Job) -> None:
    """Trains, in each process of torchrun or alone."""
    torch.set_num_threads(job.threads)
    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        project_config=ProjectConfiguration(str(job.folder), automatic_checkpoint_naming=True, total_limit=2),
        step_scheduler_with_optimizer=False,
    )
    set_seed(SEED)
    text = read_characters(job.text)
    model = GPT(text.vocabulary)
    optimizer = make_optimizer(model)
    scheduler = LambdaLR(optimizer, lambda step: learning_rate(step, job.steps) / RATE)
    loader = DataLoader(Windows(text.train), BATCH // job.workers, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    first = 0
    if job.resume:
        accelerator.load_state()
        first = scheduler.scheduler.last_epoch
        accelerator.project_configuration.iteration = first // job.checkpoint_every
        loader = accelerator.skip_first_batches(loader, first)
    progress = Progress(job, accelerator.process_index)
    for step, batch in enumerate(loader, start=first):
        if step == job.steps:
            break
        accelerator.backward(model(batch["ids"], batch["targets"]))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        progress.step(step + 1)
        if job.validate_every and (step + 1) % job.validate_every == 0 and accelerator.is_main_process:
            loss = validate(accelerator.unwrap_model(model), text.validation)
            progress.validation(step + 1, loss)
        if job.checkpoint_every and (step + 1) % job.checkpoint_every == 0:
            accelerator.save_state()
    progress.done(accelerator.unwrap_model(model))
    accelerator.end_training()


if __name__ == "__main__":
    train(read_job("accelerate_loop", __doc__))
