"""The course of a small training on several processes: what the tests of strategies and precisions compare.

job = course_job(storage, "fsdp", scaling=ScalingConfig(strategy="fsdp"))
course = run_course(job, world=2)                         # a Course: losses, norms, ...
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from raystride.pipelines.config import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
    ValidationConfig,
)
from raystride.pipelines.observability.observers.observer import Observer
from raystride.pipelines.train.worker.job import Job, WorkerInfo
from tests.distributed import run_distributed
from tests.processes import make_job
from tests.tiny import tiny, write_text

STEPS = 12
SLOTS = 5
"""A number that 2, 3 and 4 workers cannot share evenly."""


@dataclass
class Course(Observer):
    """Measurements of a training at each step, and its outcome."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    validations: list[float] = field(default_factory=list)
    scored: list[dict[str, float]] = field(default_factory=list)
    logged: list[dict[str, float]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    sha256: str = ""
    step: int = 0

    def on_log(self, step: int, measured: dict[str, float]) -> None:
        if "val_loss" in measured:
            self.validations.append(measured["val_loss"])
            self.scored.append({name: value for name, value in measured.items() if name.startswith("val_")})
        else:
            self.losses.append(measured.get("train_loss", float("nan")))
            self.norms.append(measured["gradient_norm"])
            self.logged.append(dict(measured))


def course_job(storage: Path, run: str, **sections: Any) -> Job:
    """A job of a two-layer model with tied embeddings; `sections` replace settings of whole sections."""
    settings = {
        "model": ModelConfig(layers=2, heads=2, hidden_size=16, context=16),
        "optimizer": OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
        "train": TrainConfig(steps=STEPS, slots=SLOTS, slot_size=2, log_every=1),
        "validation": ValidationConfig(every=6, samples=15),
        "checkpoint": CheckpointConfig(every=0),
    }
    text = storage / "text.txt"
    if not text.exists():
        write_text(storage)
    return make_job(tiny(text, **settings | sections), storage, run)


def documents(folder: Path) -> DataConfig:
    """Short documents, several to a window of `course_job`."""
    source = folder / "documents.jsonl"
    source.write_text("".join(f'{{"text": "{number * 7919 % 1000} times"}}\n' for number in range(400)))
    return DataConfig(source=str(source), kind="json", column="text", validation_fraction=0.2)


def next_attempt(job: Job, attempt: str = "a2", **sections: Any) -> Job:
    """Returns the next attempt of a job, with other settings."""
    return replace(job, attempt=attempt, config=replace(job.config, **sections))


def run_course(job: Job, world: int, prepare: Any = None) -> Course:
    """Runs the job on `world` processes; rank 0's course. `prepare(training)` may change it before it runs."""
    return run_distributed(_run, world, job, prepare)[0]  # type: ignore[no-any-return]


def _run(rank: int, world: int, job: Job, prepare: Any) -> Course:
    from raystride.pipelines.train.checkpoint.pieces import parameters_sha256
    from raystride.pipelines.train.worker.build import build_training

    course = Course()
    training = build_training(job, WorkerInfo(rank=rank, world=world), [course], lambda: False, course.said.append)
    if prepare:
        prepare(training)
    training.run()
    course.sha256 = parameters_sha256(training.model, training.optimizer)
    course.step = training.state.step
    return course
