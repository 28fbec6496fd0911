"""Bad steps: planted where they cannot be missed, found on the device, named, and dealt with by each policy."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from raystride.pipelines.config import (
    CheckpointConfig,
    GuardConfig,
    ModelConfig,
    OptimizerConfig,
    ScalingConfig,
    TrainConfig,
    ValidationConfig,
)
from raystride.pipelines.data.tasks.task import Inputs
from raystride.pipelines.train.checkpoint.audit import audit
from raystride.pipelines.train.loop import Training
from raystride.pipelines.train.step import FINE, NOT_FINITE, OVERFLOW, SPIKE, StepCheck
from raystride.pipelines.train.worker.job import Job
from tests.pipelines.train.strategies.course import course_job, run_course

TRAIN = TrainConfig(steps=9, slots=4, slot_size=2, log_every=1, micro_batch_slots=1)
BAD = (5, 2)
"""Step and slot, both from 0, whose data is bad."""
LATE = 40
"""A step at which the loss has become flat."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder with data that is prepared once."""
    return tmp_path_factory.mktemp("guard")


def _job(folder: Path, run: str, policy: str, strategy: str = "auto", **more: Any) -> Job:
    settings: dict[str, Any] = {
        "train": TRAIN,
        "checkpoint": CheckpointConfig(every=4),
        "validation": ValidationConfig(every=0),  # before one the verdict on its step is read at once
        "guard": GuardConfig(policy=policy, **more),  # type: ignore[arg-type]
        "scaling": ScalingConfig(strategy=strategy),  # type: ignore[arg-type]
    }
    return course_job(folder, run, **settings)


def _bad_inputs(training: Training, step: int = BAD[0]) -> torch.Tensor:
    """The planted slot's inputs, by which a hook recognises it on whatever worker it is."""
    return replace(training.loader, rank=0, world=1, micro_batch_slots=1).read_step(step).micro_batches[BAD[1]].inputs[0]


def plant_nan(training: Training, steps: tuple[int, ...] = BAD[:1]) -> None:
    """The second block's feed-forward gives one NaN for the samples of the bad slot, in step `BAD[0]` or in these."""
    bad, is_bad = [_bad_inputs(training, step) for step in steps], [False]

    def look(_: Any, arguments: tuple[torch.Tensor, ...]) -> None:
        is_bad[0] = any(torch.equal(arguments[0], inputs) for inputs in bad)

    def spoil(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        return output.index_fill(1, torch.tensor([3]), float("nan")) if is_bad[0] else output

    training.model.register_forward_pre_hook(look)
    training.model.blocks[1].feed_forward.register_forward_hook(spoil)  # type: ignore[index, union-attr]


def plant_nan_twice(training: Training) -> None:
    """Of these steps the second comes after another checkpoint."""
    plant_nan(training, (BAD[0], BAD[0] + 2))


def plant_garbage(training: Training) -> None:
    """The bad slot's samples ask for a byte that no other does."""
    collate, bad = training.loader.samples.task.collate, _bad_inputs(training, LATE)

    def garble_output(windows: Any, masks: Any) -> tuple[Inputs, torch.Tensor]:
        inputs, targets = collate(windows, masks)
        if torch.equal(inputs[0], bad):
            targets = torch.full_like(targets, 255)
        return inputs, targets

    training.loader.samples.task.collate = garble_output  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize(("world", "strategy"), [(1, "auto"), (3, "ddp"), (2, "fsdp")])
def test_stop_names_layer_slot_and_samples(folder: Path, world: int, strategy: str) -> None:
    job = _job(folder, f"stop-{strategy}", "stop", strategy)
    with pytest.raises(AssertionError) as caught:
        run_course(job, world, plant_nan)
    text = str(caught.value)
    assert "Diverged: step 6: " in text
    assert " first in blocks.1.feed_forward;" in text
    assert "slot(s) 2, sample(s) " in text
    assert "guard.policy" in text
    # The steps before are safe, and nothing was saved after.
    names = [name for name in (job.folder / "checkpoints").names() if name.startswith("step-")]
    assert max(names) == "step-00000004"


@pytest.mark.parametrize(("world", "strategy"), [(1, "auto"), (2, "ddp"), (2, "fsdp")])
def test_skip_drops_the_step_and_goes_on(folder: Path, world: int, strategy: str) -> None:
    job = _job(folder, f"skip-{strategy}-{world}", "skip", strategy)
    course = run_course(job, world, plant_nan)
    assert course.step == TRAIN.steps
    assert [number for number, loss in enumerate(course.losses) if math.isnan(loss)] == [BAD[0]]
    assert course.logged[-1]["dropped_steps"] == 1
    assert "step 6" in course.said[-1]
    proof = audit(job.folder / "checkpoints")
    assert (proof.dropped, proof.left_out) == ((BAD[0],), 0)
    assert "1 step(s) changed nothing" in str(proof)


@pytest.mark.parametrize(("world", "strategy"), [(1, "auto"), (3, "ddp"), (2, "fsdp")])
def test_rewind_comes_again_without_the_slot(folder: Path, world: int, strategy: str) -> None:
    job = _job(folder, f"rewind-{strategy}-{world}", "rewind", strategy)
    course = run_course(job, world, plant_nan)
    assert course.step == TRAIN.steps
    # The verdict comes a step late, so steps 5 to 7 come twice, the second time step 6 without the slot.
    assert len(course.losses) == TRAIN.steps + 3
    assert [number for number, loss in enumerate(course.losses) if math.isnan(loss)] == [BAD[0]]
    proof = audit(job.folder / "checkpoints")
    assert (proof.dropped, proof.left_out) == ((), 2)
    assert "; 2 sample(s) " in str(proof)


def test_going_back_and_leaving_out_is_exact(folder: Path) -> None:
    """The slot that is left out is the same on any number of workers, and so are the bits."""
    hashes = set()
    for world in (1, 2, 3):
        job = _job(folder, f"exact-{world}", "rewind")
        job = replace(job, config=replace(job.config, train=replace(TRAIN, exact=True, micro_batch_slots=0)))
        hashes.add(run_course(job, world, plant_nan).sha256)
    assert len(hashes) == 1


def test_rewind_before_the_first_checkpoint_goes_back_to_the_start(folder: Path) -> None:
    job = _job(folder, "early", "rewind")
    job = replace(job, config=replace(job.config, checkpoint=CheckpointConfig(every=100)))
    course = run_course(job, 1, plant_nan)
    assert course.step == TRAIN.steps
    assert audit(job.folder / "checkpoints").left_out == 2


@pytest.mark.parametrize("policy", ["skip", "rewind"])
def test_garbage_is_a_spike(folder: Path, policy: str) -> None:
    job = _job(folder, f"spike-{policy}", policy, spike=3.0, window=8)
    job = replace(job, config=replace(job.config, train=replace(TRAIN, steps=LATE + 5)))
    course = run_course(job, 2, plant_garbage)
    assert course.step == LATE + 5
    assert any("spike" in text and "slot(s) 2" in text for text in course.said)
    assert [course.logged[step]["loss_spikes"] for step in (0, -1)] == [0, 1]
    proof = audit(job.folder / "checkpoints")
    assert (len(proof.dropped), proof.left_out) == ((1, 0) if policy == "skip" else (0, 2))


def test_too_many_bad_steps_end_the_run(folder: Path) -> None:
    job = _job(folder, "many", "skip", max_bad_steps=3)
    hot = OptimizerConfig(kind="sgd", learning_rate=1e30, warmup_steps=0)
    train = replace(TRAIN, clip_norm=0.0)
    job = replace(job, config=replace(job.config, optimizer=hot, train=train, checkpoint=CheckpointConfig(every=0)))
    with pytest.raises(AssertionError, match=r" 3 bad steps .*guard\.max_bad_steps 3 "):
        run_course(job, 1)


def test_verdicts() -> None:
    check, one = StepCheck(torch.device("cpu"), spike=5.0, window=10), torch.tensor(1.0)
    nan, infinite = torch.tensor(float("nan")), torch.tensor(float("inf"))
    assert check(nan, one) == check(one, infinite) == check(infinite, one) == NOT_FINITE
    assert check(one, infinite, torch.tensor(8.0)) == OVERFLOW
    assert check(nan, infinite, torch.tensor(8.0)) == NOT_FINITE
    assert check(one, infinite, torch.tensor(1.0)) == NOT_FINITE
    generator = torch.Generator().manual_seed(0)
    wanted, spread = 0.0, 0.0
    for number in range(30):
        loss = 2 + 0.1 * torch.randn((), generator=generator)
        assert check(loss, one) == FINE
        # West (1979) in fp64: the plain mean at first, then of a weight of a tenth.
        weight, above = 1 / min(number + 1, 10), float(loss) - wanted
        wanted, spread = wanted + weight * above, (1 - weight) * (spread + weight * above**2)
    mean, variance, steps = check.read_state()
    assert (mean, steps) == (pytest.approx(wanted, rel=1e-6), 30)
    assert variance == pytest.approx(spread, rel=1e-4)
    assert check(torch.tensor(3.0), one) == SPIKE
    assert check.read_state() == [mean, variance, steps]
    again = StepCheck(torch.device("cpu"), 5.0, 10, check.read_state())
    assert again(torch.tensor(2.2), one) == FINE
    assert again(torch.tensor(3.0), one) == SPIKE


def test_the_running_mean_is_the_plain_one_at_first() -> None:
    check, values = StepCheck(torch.device("cpu"), spike=1e9, window=100), torch.rand(20)
    for value in values:
        check(value, torch.tensor(1.0))
    mean, variance, _ = check.read_state()
    assert mean == pytest.approx(float(values.mean()), rel=1e-5)
    assert variance == pytest.approx(float(values.var(unbiased=False)), rel=1e-4)


def test_a_guard_that_rewinds_needs_checkpoints() -> None:
    from raystride.pipelines.config import Config, SettingError

    with pytest.raises(SettingError, match=r"guard.policy is 'rewind'.*checkpoint.every"):
        Config(guard=GuardConfig(policy="rewind"), checkpoint=CheckpointConfig(every=0), model=ModelConfig())


@pytest.mark.parametrize("policy", ["skip", "rewind"])
def test_a_second_bad_step_is_dealt_with_as_the_first(folder: Path, policy: str) -> None:
    """The second rewind goes back to a later checkpoint, keeps what the first left out, and counts; a third is too many."""
    job = _job(folder, f"twice-{policy}", policy, max_bad_steps=2)
    course = run_course(job, 1, plant_nan_twice)
    assert course.step == TRAIN.steps
    proof = audit(job.folder / "checkpoints")
    assert (proof.dropped, proof.left_out) == (((BAD[0], BAD[0] + 2), 0) if policy == "skip" else ((), 4))
    assert sum("warning: step" in text for text in course.said) == 2
    thrice = partial(plant_nan, steps=(BAD[0], BAD[0] + 1, BAD[0] + 2))  # all after the same checkpoint
    with pytest.raises(AssertionError, match=r" 2 bad steps .*guard\.max_bad_steps 2 "):
        run_course(_job(folder, f"thrice-{policy}", policy, max_bad_steps=2), 1, thrice)
