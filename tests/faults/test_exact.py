"""With train.exact a run ends with the same bits on any number of workers, whatever befell it on the way."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from raystride.pipelines.config import CheckpointConfig, ModelConfig, ScalingConfig, TrainConfig
from raystride.pipelines.train.checkpoint.audit import audit
from tests.faults.schedules import Attempt, Outcome, draw_schedule, exact_config, exact_job, run_schedule
from tests.ray_jobs.jobs import run_job, run_well, summary
from tests.tiny import write_text

SAME = ("parameters_sha256", "steps", "samples_seen", "tokens_seen", "val_loss", "train_loss")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text of some 300 samples, so that epochs are short."""
    path = tmp_path_factory.mktemp("exact")
    write_text(path, 6_000)
    return path


@pytest.fixture(scope="module")
def calm(folder: Path) -> Outcome:
    """A run on one worker that nothing disturbs."""
    return run_schedule(exact_job(folder / "text.txt", folder, "calm"), [], folder)


def test_the_last_step_has_empty_slots(calm: Outcome, folder: Path) -> None:
    """So the tests below have them, too."""
    train = exact_config(folder / "text.txt").train
    assert 0 < calm.summary["samples_seen"] % train.samples_per_step <= train.samples_per_step - 2 * train.slot_size


@pytest.mark.long
@pytest.mark.parametrize(("flavour", "bucket_mib"), [pytest.param("gpt2", 25.0, marks=pytest.mark.long), ("llama", 0.01)])
def test_any_number_of_workers_ends_with_the_same_bits(folder: Path, flavour: str, bucket_mib: float) -> None:
    shape = ModelConfig(architecture=flavour, layers=2, heads=2, hidden_size=16, context=16, dropout=0.2)  # type: ignore[arg-type]
    config = exact_config(folder / "text.txt", model=shape, checkpoint=CheckpointConfig(every=0))
    changes = {"model": shape, "checkpoint": CheckpointConfig(every=0)}
    changes["scaling"] = replace(config.scaling, bucket_mib=bucket_mib)
    name = f"{flavour}-{bucket_mib}"
    found = [
        run_schedule(exact_job(folder / "text.txt", folder, f"{name}-{world}", **changes), [Attempt(world)], folder).summary
        for world in (1, 2, 3, 4)
    ]
    for key in SAME:
        assert len({summary[key] for summary in found}) == 1, key


def test_without_it_bits_depend_on_the_workers(folder: Path) -> None:
    """So the test above could fail."""
    changes = {
        "model": ModelConfig(layers=2, heads=2, hidden_size=16, context=16),
        "train": TrainConfig(steps=20, slots=7, slot_size=2, micro_batch_slots=1),
    }
    hashes = {
        run_schedule(exact_job(folder / "text.txt", folder, f"plain-{world}", **changes), [Attempt(world)], folder).summary[
            "parameters_sha256"
        ]
        for world in (1, 3)
    }
    assert len(hashes) == 2


@pytest.mark.parametrize(
    "number", [0, 1, pytest.param(2, marks=pytest.mark.weekly), pytest.param(3, marks=pytest.mark.weekly)]
)
@pytest.mark.long
def test_kills_stops_and_resizes_change_nothing(folder: Path, calm: Outcome, number: int) -> None:
    """The schedules are other ones each day; `RAYSTRIDE_SEED=739580 make test-of faults` repeats those of that seed."""
    seed = 10 * int(os.environ["RAYSTRIDE_SEED"]) + number
    schedule = draw_schedule(seed, calm.summary["steps"])
    job = exact_job(folder / "text.txt", folder, f"disturbed-{number}")
    outcome = run_schedule(job, schedule, folder)
    for key in SAME:
        assert outcome.summary[key] == calm.summary[key], (key, seed, schedule)
    proven = audit(job.folder / "checkpoints")
    assert proven.samples == calm.summary["samples_seen"]


@pytest.mark.long
def test_a_run_that_meets_everything(folder: Path, calm: Outcome) -> None:
    """A schedule that surely disturbs: each later attempt begins at a checkpoint, on another number of workers."""
    schedule = [
        Attempt(3, "kill one", after=20, victim=1),
        Attempt(1, "stop", after=6),
        Attempt(4, "kill all", after=10),
        Attempt(2),
    ]
    job = exact_job(folder / "text.txt", folder, "everything")
    outcome = run_schedule(job, schedule, folder)
    assert outcome.resumed == 2  # those that lived to tell
    for key in SAME:
        assert outcome.summary[key] == calm.summary[key], key
    proven = audit(job.folder / "checkpoints")
    assert proven.attempts >= 3
    assert set(proven.workers) >= {3, 1, 2}


@pytest.mark.long
def test_a_run_under_ray_goes_on_alone_and_refuses_what_would_change_its_bits(folder: Path, calm: Outcome) -> None:
    config = exact_config(folder / "text.txt", storage=str(folder / "runs"))
    steps = calm.summary["steps"]
    half = ("--train.steps", str(steps // 2), "--train.epochs", "0", "--optimizer.decay_steps", str(steps))
    run_well("train", replace(config, scaling=ScalingConfig(workers=2)), *half, "--run", "ray")
    refused = run_job("train", config, "--launch", "inline", "--run", "ray", "--scaling.threads", "2")
    assert refused.code == 2
    assert "threads a worker: 1 before, 2 now" in refused.err
    run_well("train", config, "--launch", "inline", "--run", "ray")
    for key in ("parameters_sha256", "samples_seen", "val_loss"):
        assert summary(config, "ray")[key] == calm.summary[key], key
