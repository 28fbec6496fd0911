"""Adapters: eight at once on one base against eight runs one after another, and a run beside PEFT with Trainer.

The base is a small Llama with random weights, frozen; adapters of rank 8 learn some of Python's own source with it. Eight
differ in their learning rate; their seconds are from each start to its end, in a process that has everything loaded and data
that is prepared. PEFT trains the same adapters, of the same first values, on the same batches by the same rule: the seconds
are those of its steps and of ours; quality is the loss on our validation samples of what both have learned.

    python -m benchmarks.adapters                              # some minutes; --steps, --adapters, --width for others
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.pairs import Comparison, command_line, machine, machine_line, report, take_turns
from raystride.pipelines.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    LaunchConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    RecordConfig,
    SampleConfig,
    TokenizerConfig,
    TrainConfig,
    ValidationConfig,
)
from raystride.pipelines.data.prepare.prepare import prepare
from raystride.pipelines.data.prepare.run_context import RunContext
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.launch.console.screen import SilentScreen
from raystride.pipelines.launch.run_store.naming import expand_adapters
from raystride.pipelines.launch.train_job import train
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.lora.peft import write_adapter
from raystride.pipelines.train.worker.build import build_training
from raystride.pipelines.train.worker.job import Job, WorkerInfo
from tests.bases import BYTES, write_base

RATES = (5e-4, 8e-4, 1.2e-3, 2e-3, 3e-3, 5e-3, 8e-3, 1.2e-2)


def settings(given: argparse.Namespace, folder: Path) -> Config:
    """A training of adapters on a base that is written there."""
    shape = ModelConfig(architecture="llama", layers=4, heads=4, hidden_size=given.width, context=64)
    files = sorted(Path(os.__file__).parent.glob("[a-h]*.py"))
    (folder / "text.txt").write_text("\n".join(file.read_text(errors="replace") for file in files))
    base = write_base(folder / "base", shape, vocabulary=BYTES)
    return Config(
        storage=str(folder),
        data=DataConfig(source=str(folder / "text.txt"), kind="text", validation="tail"),
        tokenizer=TokenizerConfig(kind="bytes"),
        model=replace(shape, init_from=str(base)),
        lora=LoraConfig(rank=8),
        optimizer=OptimizerConfig(learning_rate=3e-3, schedule="constant", warmup_steps=0, weight_decay=0.0),
        train=TrainConfig(steps=given.steps, slots=1, slot_size=4, log_every=given.steps, precision="fp32"),
        validation=ValidationConfig(every=0, samples=128),
        checkpoint=CheckpointConfig(every=0),
        record=RecordConfig(mlflow=False),
        sample=SampleConfig(tokens=0),
        launch=LaunchConfig(mode="inline"),
    )


def many_against_runs(given: argparse.Namespace, folder: Path) -> Comparison:
    """Seconds of so many adapters, at once and one after another."""
    each = {"optimizer.learning_rate": list(RATES[: given.adapters])}
    config = settings(given, folder)
    config = replace(config, lora=replace(config.lora, adapters=given.adapters, variants=each))
    rounds = iter(range(10**6))

    def timed(make: Callable[[str], None]) -> float:
        name, began = f"round-{next(rounds)}", time.perf_counter()
        make(name)
        return time.perf_counter() - began

    def at_once(name: str) -> None:
        train(replace(config, run=name), Folder(str(folder)), SilentScreen())

    def one_by_one(name: str) -> None:
        for one in expand_adapters(replace(config, run=name)):
            train(one, Folder(str(folder)), SilentScreen())

    at_once("warm")  # imports, and products that are timed once for a machine
    ways = {f"{given.adapters} runs": partial(timed, one_by_one), "at once": partial(timed, at_once)}
    samples = take_turns(ways, given.rounds, lambda _, seconds: f"{seconds:.1f} s")
    return Comparison(f"seconds of {given.adapters} adapters", samples, f"{given.adapters} runs", {"at once": "below 1"})


def ours_beside_peft(given: argparse.Namespace, folder: Path) -> list[Comparison]:
    """Seconds of the steps alone, and the validation loss afterwards."""
    config = settings(given, folder)
    task = build_task(config)
    prepared = prepare(RunContext(config, Folder(str(folder)), log=lambda _: None), task, on_ray=False)
    rounds = iter(range(10**6))

    def build_training_of_round() -> Any:
        place = Folder(str(folder)) / f"beside-{next(rounds)}"
        job = Job(
            config=config,
            run="beside",
            attempt="a",
            folder=place,
            prepared=prepared.folder,
            device="cpu",
            threads=given.threads,
        )
        return build_training(job, WorkerInfo(), [], lambda: False, lambda _: None)

    def ours() -> tuple[float, float]:
        training = build_training_of_round()
        validate, training.validate = training.validate, lambda: {"val_loss": 0.0}
        began = time.perf_counter()
        training.run()
        return time.perf_counter() - began, validate()["val_loss"]

    def time_peer() -> tuple[float, float]:
        return _with_trainer(config, build_training_of_round(), folder)

    found = take_turns(
        {"PEFT and Trainer": time_peer, "ours": ours}, given.rounds, lambda _, one: f"{one[0]:.1f} s, {one[1]:.4f}"
    )
    seconds, losses = ({way: [one[index] for one in values] for way, values in found.items()} for index in (0, 1))
    return [
        Comparison(f"seconds of {given.steps} steps", seconds, "PEFT and Trainer", {"ours": "at most 1"}),
        Comparison("validation loss", losses, "PEFT and Trainer", {"ours": "1"}, ".4f"),
    ]


def _with_trainer(config: Config, training: Any, folder: Path) -> tuple[float, float]:
    """The same adapters, batches and rule by Trainer; the loss is that of our validation, of what it has learned."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    write_adapter(training.model, config.lora, Folder(str(folder / "adapter")), base="")
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    model = PeftModel.from_pretrained(base, str(folder / "adapter"), is_trainable=True)
    rows = []
    for number in range(config.train.steps):
        for batch in training.loader.read_step(number).micro_batches:
            (ids,) = training.loader.samples.task.unpack(batch.inputs)
            # Trainer shifts labels by itself: a last token stands behind each row, and what it would predict is left out.
            whole = torch.cat([ids, batch.targets[:, -1:]], 1)
            rows += [{"input_ids": row, "labels": row} for row in whole]
    rule = config.optimizer
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=config.train.steps,
        per_device_train_batch_size=config.train.samples_per_step,
        learning_rate=rule.learning_rate,
        lr_scheduler_type="constant",
        adam_beta1=rule.betas[0],
        adam_beta2=rule.betas[1],
        adam_epsilon=rule.eps,
        weight_decay=rule.weight_decay,
        max_grad_norm=config.train.clip_norm,
        train_sampling_strategy="sequential",
        report_to=[],
        save_strategy="no",
        logging_steps=config.train.steps,
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    began = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - began
    model.save_pretrained(str(folder / "learned"))
    from raystride.pipelines.train.lora.peft import read_adapter

    read_adapter(training.model, config.lora, Folder(str(folder / "learned")))
    return seconds, training.validate()["val_loss"]


def main() -> None:
    """Parses the command line and prints the tables."""
    parser: argparse.ArgumentParser = command_line("adapters", __doc__, rounds=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--adapters", type=int, default=8, choices=range(2, len(RATES) + 1))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=128)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    found = machine(f"{given.threads} thread(s)")
    print(machine_line(found))
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        comparisons = [many_against_runs(given, Path(one)), *ours_beside_peft(given, Path(two))]
    report(given, found, comparisons)


if __name__ == "__main__":
    main()
