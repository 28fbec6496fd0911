"""A model of a user's own trains as plain PyTorch would, on any number of workers, and goes on after a kill."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from raystride.pipelines.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    OptimizerConfig,
    RecordConfig,
    ScalingConfig,
    SettingError,
    TrainConfig,
    ValidationConfig,
)
from raystride.pipelines.config.parse import to_yaml
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.train.own_model.definition import OwnModel
from raystride.pipelines.train.worker.build import build_training
from raystride.pipelines.train.worker.job import Job, WorkerInfo
from raystride.run import Run
from tests.distributed import run_distributed
from tests.pipelines.train.own_model import models
from tests.pipelines.train.strategies.course import Course, next_attempt, run_course
from tests.processes import make_job

STEPS = 6
DDP, FSDP = ScalingConfig(strategy="ddp"), ScalingConfig(strategy="fsdp")
WAYS = [(ScalingConfig(), 1), (DDP, 3), (FSDP, 2)]
DEEPSPEED = pytest.param(ScalingConfig(strategy="deepspeed"), 2, marks=pytest.mark.long)


def own_job(storage: Path, name: str, run: str = "run", scaling: ScalingConfig | None = None, **train: Any) -> Job:
    """A job of a model of `models`, whose steps take all samples; `train` are settings of that section."""
    settings = {"steps": STEPS, "slots": 6, "slot_size": 10, "micro_batch_slots": 1} | train
    config = Config(
        task=name,
        plugins=("tests.pipelines.train.own_model.models",),
        data=DataConfig(source=name),
        optimizer=OptimizerConfig(learning_rate=0.1, schedule="constant", warmup_steps=0, weight_decay=0.0),
        train=TrainConfig(log_every=1, clip_norm=0.5, **settings),
        scaling=scaling or ScalingConfig(),
        validation=ValidationConfig(every=3, samples=50),
        checkpoint=CheckpointConfig(every=3),
        record=RecordConfig(mlflow=False),
    )
    job = make_job(config, storage, run)
    job.folder.put("config.yaml", to_yaml(config).encode())
    return job


def train_plainly(job: Job, optimizer: Any, schedule: Any = None) -> list[dict[str, float]]:
    """The steps of a training over all samples at once, by PyTorch alone but for the first values of parameters."""
    torch.manual_seed(job.config.seed)
    task: Any = build_task(job.config)
    own: OwnModel = task.own_model
    model: nn.Module = task.build_model().users_module
    updates, logged = optimizer(model), []
    rates = [group["lr"] for group in updates.param_groups]
    batch = {name: torch.from_numpy(values) for name, values in models.DATA.items()}
    for step in range(STEPS):
        returned = own.loss(model, batch)
        loss = returned["loss"][0] / returned["loss"][1] if isinstance(returned, dict) else returned
        updates.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_([each for each in model.parameters() if each.requires_grad], 0.5)
        for group, rate in zip(updates.param_groups, rates, strict=True):
            group["lr"] = rate * (schedule(step, STEPS) if schedule else 1.0)
        updates.step()
        row = {"train_loss": float(loss.detach()), "gradient_norm": float(norm)}
        logged.append(row | ({"train_size": float(returned["size"].detach())} if isinstance(returned, dict) else {}))
    return logged


def assert_same(course: Course, wanted: list[dict[str, float]]) -> None:
    """Loss and further figures to 1e-6, norms to 1e-5, as for our own networks (see tests/plain_training.py)."""
    for name in wanted[0]:
        found = [row[name] for row in course.logged]
        tolerance = 1e-5 if name == "gradient_norm" else 2e-6
        assert found == pytest.approx([row[name] for row in wanted], rel=tolerance), name


def make_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of the settings."""
    return torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)


@pytest.mark.parametrize(("scaling", "world"), [*WAYS, DEEPSPEED], ids=["one", "ddp", "fsdp", "deepspeed"])
def test_samples_that_count_differently_are_weighted_as_in_one_batch(tmp_path: Path, scaling: Any, world: int) -> None:
    job = own_job(tmp_path, "masked", scaling=scaling)
    course = run_course(job, world)
    assert_same(course, train_plainly(job, make_adamw))


@pytest.mark.parametrize("name", ["groups", "instances"])
@pytest.mark.parametrize(("scaling", "world"), WAYS, ids=["one", "ddp", "fsdp"])
def test_an_optimizer_and_a_schedule_of_ones_own_are_pytorchs(tmp_path: Path, scaling: Any, world: int, name: str) -> None:
    job = own_job(tmp_path, name, scaling=scaling)
    plain = train_plainly(job, lambda model: models.make_sgd(model, 0.1), models.halve)
    course = run_course(job, world)
    assert_same(course, plain)
    assert [row["learning_rate"] for row in course.logged] == pytest.approx([0.1] * 3 + [0.05] * 3)


@pytest.mark.parametrize("name", ["momentum", "noisy"])
def test_a_resumed_training_has_the_bits_of_one_that_went_through(tmp_path: Path, name: str) -> None:
    through = run_course(own_job(tmp_path, name, "through"), 1)
    job = own_job(tmp_path, name, "cut", steps=3)
    assert run_course(job, 1).step == 3
    longer = replace(job.config.train, steps=STEPS)
    resumed = run_course(next_attempt(job, train=longer), 1)
    assert (resumed.sha256, resumed.losses) == (through.sha256, through.losses[3:])


@pytest.mark.parametrize(("scaling", "world"), WAYS, ids=["one", "ddp", "fsdp"])
def test_frozen_parameters_are_saved_since_nothing_else_has_their_values(tmp_path: Path, scaling: Any, world: int) -> None:
    job = own_job(tmp_path, "groups", scaling=scaling)
    torch.manual_seed(job.config.seed)
    task: Any = build_task(job.config)
    wanted = task.build_model().users_module[0].weight
    run_course(job, world)
    torch.manual_seed(1 + job.config.seed)
    found: Any = Run.open("run", str(tmp_path)).load_model("last")
    assert torch.equal(found[0].weight, wanted)
    assert not found[0].weight.requires_grad


def test_exact_training_has_the_same_bits_on_any_number_of_workers(tmp_path: Path) -> None:
    single = run_course(own_job(tmp_path, "noisy", "one", exact=True), 1)
    three = run_course(own_job(tmp_path, "noisy", "three", DDP, exact=True), 3)
    assert (single.sha256, single.losses, single.validations) == (three.sha256, three.losses, three.validations)
    assert len(set(single.losses)) == STEPS


def test_a_checkpoint_of_one_strategy_is_read_by_another(tmp_path: Path) -> None:
    through = run_course(own_job(tmp_path, "noisy", "through"), 1)
    job = own_job(tmp_path, "noisy", "cut", DDP, steps=3)
    run_course(job, 2)
    changed = {"train": replace(job.config.train, steps=STEPS), "scaling": FSDP}
    resumed = run_course(next_attempt(job, **changed), 3)
    assert resumed.losses == pytest.approx(through.losses[3:], rel=2e-6)


def _score_all(job: Job) -> dict[str, float]:
    """The figures of a validation over all samples in one batch, at the values that a checkpoint restores."""
    task: Any = build_task(job.config)
    model = task.own_model.make_network(job.config.fit)
    checkpoint = Run.open(job.run, str(job.folder.parent)).load_model("last")
    model.load_state_dict(checkpoint.state_dict())
    batch = {name: torch.from_numpy(values) for name, values in models.DATA.items()}
    with torch.no_grad():
        loss, scores = models.masked_loss(model, batch), models.score(model, batch)
    figures = {"loss": loss["loss"], "size": (loss["size"], 1), "signs": scores["signs"], "height": (scores["height"], 1)}
    return {f"val_{name}": float(total) / float(count) for name, (total, count) in figures.items()}


@pytest.mark.parametrize(("scaling", "world"), WAYS, ids=["one", "ddp", "fsdp"])
def test_metrics_and_further_losses_are_those_of_all_samples(tmp_path: Path, scaling: Any, world: int) -> None:
    job = own_job(tmp_path, "masked", scaling=scaling)
    everything = ValidationConfig(every=STEPS, samples=0)
    job = replace(job, config=replace(job.config, validation=everything, checkpoint=CheckpointConfig(every=STEPS)))
    course = run_course(job, world)
    assert course.scored[-1] == pytest.approx(_score_all(job), rel=2e-6)


def _read_head(rank: int, world: int, job: Job) -> list[list[float]]:
    """The parameters of the heads after the training."""
    training = build_training(job, WorkerInfo(rank=rank, world=world), [], lambda: False, lambda _: None)
    before = [head.weight.detach().clone() for head in training.model.module.heads]  # type: ignore[union-attr]
    training.run()
    heads = training.model.module.heads  # type: ignore[union-attr]
    return [(head.weight - old).abs().sum().item() for head, old in zip(heads, before, strict=True)]  # type: ignore[arg-type]


@pytest.mark.parametrize(("rule", "moves"), [("auto", False), ("zero", True)])
@pytest.mark.parametrize("exact", [False, True])
def test_a_parameter_that_no_worker_used_does_not_move(tmp_path: Path, rule: Any, moves: bool, exact: bool) -> None:
    """The second head's samples are in every tenth micro-batch, so most steps have none for one of the workers."""
    job = own_job(tmp_path, "routed", scaling=DDP, exact=exact, slots=6, slot_size=1)
    settings = replace(job.config.optimizer, absent_gradients=rule, weight_decay=0.1)
    job = replace(job, config=replace(job.config, optimizer=settings))
    single, *_ = run_distributed(_read_head, 1, replace(job, folder=job.folder / "one"))
    both = run_distributed(_read_head, 2, replace(job, folder=job.folder / "two"))
    assert both[0] == both[1]
    assert single[0] > 0
    assert (both[0][2] > 0) is moves
    if not moves:
        assert both[0] == pytest.approx(single, rel=1e-4)


def _train_and_read_buffers(rank: int, world: int, job: Job) -> tuple[dict[str, torch.Tensor], int]:
    training = build_training(job, WorkerInfo(rank=rank, world=world), [], lambda: False, lambda _: None)
    training.run()
    return {name: value.clone() for name, value in training.model.named_buffers()}, job.config.train.slots // world


@pytest.mark.parametrize("world", [1, 2])
def test_buffers_of_norms_are_averaged_over_workers_and_saved(tmp_path: Path, world: int) -> None:
    job = own_job(tmp_path, "norms", scaling=DDP)
    found = run_distributed(_train_and_read_buffers, world, job)
    saved = dict(Run.open("run", str(tmp_path)).load_model("last").named_buffers())
    for buffers, slots in found:
        assert buffers["module.1.num_batches_tracked"] == STEPS * slots
        assert all(torch.equal(value, saved[name.removeprefix("module.")]) for name, value in buffers.items())
    assert saved["1.running_var"].std() > 0


def test_saves_by_the_clock_leave_a_workers_buffers_as_they_were(tmp_path: Path) -> None:
    """An average in the middle of a training, at a time of the clock's, would make two runs differ."""
    found = []
    for run, minutes in (("never", 0.0), ("always", 1e-9)):
        job = own_job(tmp_path, "norms", run, scaling=DDP)
        by_clock = CheckpointConfig(every=1000, minutes=minutes)
        rare = {"validation": replace(job.config.validation, every=0), "checkpoint": by_clock}
        found.append(run_distributed(_train_and_read_buffers, 2, replace(job, config=replace(job.config, **rare))))
    never, always = ([buffers for buffers, _ in of_run] for of_run in found)
    assert len(list((tmp_path / "always").glob("checkpoints/*/MANIFEST.json"))) > 1
    for one, other in zip(never, always, strict=True):
        assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_norms_that_follow_the_data_are_refused_under_exact(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"train\.exact must be false where a forward changes buffers.*1\.running_mean"):
        own_job(tmp_path, "norms", exact=True)


@pytest.mark.parametrize(("every", "step"), [(3, 3), (0, 6)], ids=["a validation", "a checkpoint"])
def test_a_buffer_that_begins_to_change_ends_a_run_under_exact_by_name(tmp_path: Path, every: int, step: int) -> None:
    job = own_job(tmp_path, "late", exact=True)
    config = replace(
        job.config, validation=replace(job.config.validation, every=every), checkpoint=CheckpointConfig(every=6)
    )
    training = build_training(replace(job, config=config), WorkerInfo(rank=0, world=1), [], lambda: False, lambda _: None)
    with pytest.raises(SettingError, match=rf"train\.exact must be false.*module\.seen has changed by step {step}\)"):
        training.run()
    assert not list(tmp_path.glob("run/checkpoints/*/MANIFEST.json"))


def test_validations_of_a_loss_that_draws_are_the_same_on_any_number_of_workers(tmp_path: Path) -> None:
    """And so are early stopping and parameters, which follow from them."""
    courses = []
    for world in (1, 2, 3):
        job = own_job(tmp_path, "drawn", f"on-{world}", DDP if world > 1 else None, exact=True, steps=8, slot_size=2)
        chosen = replace(job.config.validation, every=1, patience=1)
        data = replace(job.config.data, validation_fraction=0.5)
        courses.append(run_course(replace(job, config=replace(job.config, validation=chosen, data=data)), world))
    one, *others = courses
    for other in others:
        assert (other.sha256, other.step, other.scored) == (one.sha256, one.step, one.scored)


def test_the_guards_second_look_leaves_all_generators_as_they_were(tmp_path: Path) -> None:
    job = own_job(tmp_path, "noisy")
    training = build_training(job, WorkerInfo(rank=0, world=1), [], lambda: False, lambda _: None)

    def states() -> list[Any]:
        return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]  # type: ignore[union-attr]

    before = states()
    training._diagnose_step(0, spike=True)
    assert states() == before
