"""A run that is killed on one mesh goes on with another: nothing lost or fed twice, and the course that nobody disturbed."""

from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.config import CheckpointConfig, ModelConfig, OptimizerConfig, ScalingConfig, TrainConfig
from raystride.pipelines.train.checkpoint.audit import audit
from tests.faults.schedules import Attempt, exact_job, run_schedule
from tests.tiny import write_text

TENSOR, STAGES, TOKENS = ScalingConfig(tensor=2), ScalingConfig(pipeline=2), ScalingConfig(context=2)
BOTH, SHARDS = ScalingConfig(pipeline=2, tensor=2), ScalingConfig(tensor=2, strategy="fsdp")
DISTURBED = [
    Attempt(2, "kill one", after=9, victim=1, scaling=TENSOR),
    Attempt(4, "kill all", after=8, scaling=BOTH),
    Attempt(2, "stop", after=7, scaling=TOKENS),
    Attempt(4, "kill one", after=6, victim=2, scaling=SHARDS),
    Attempt(2, "kill one", after=8, victim=0, scaling=STAGES),
    Attempt(1, scaling=ScalingConfig()),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text of some 300 samples, so that epochs are short."""
    path = tmp_path_factory.mktemp("meshes")
    write_text(path, 6_000)
    return path


def _settings(*, exact: bool) -> dict[str, Any]:
    return {
        "model": ModelConfig(architecture="llama", layers=2, heads=2, hidden_size=16, context=16, dropout=0.2),
        "optimizer": OptimizerConfig(learning_rate=3e-3, warmup_steps=2, eps=1e-4),
        "train": TrainConfig(
            steps=0, epochs=2.3, slots=7, slot_size=2, log_every=4, micro_batch_slots=1, dropout_masks="place", exact=exact
        ),
        "checkpoint": CheckpointConfig(every=4, keep=2),
    }


@pytest.mark.long
def test_a_run_goes_on_with_another_mesh(folder: Path) -> None:
    """The last steps of an epoch have slots without samples, which every mesh computes as empty ones."""
    settings = _settings(exact=False)
    calm = run_schedule(exact_job(folder / "text.txt", folder, "calm", **settings), [], folder).summary
    job = exact_job(folder / "text.txt", folder, "disturbed", **settings)
    outcome = run_schedule(job, DISTURBED, folder)
    assert outcome.resumed >= 2
    for key in ("steps", "samples_seen", "tokens_seen"):
        assert outcome.summary[key] == calm[key]
    assert outcome.summary["val_loss"] == pytest.approx(calm["val_loss"], rel=1e-5)
    assert audit(job.folder / "checkpoints").samples == calm["samples_seen"]


@pytest.mark.long
@pytest.mark.weekly
def test_exact_groups_end_with_the_same_bits_through_kills(folder: Path) -> None:
    settings = _settings(exact=True)
    calm = run_schedule(exact_job(folder / "text.txt", folder, "calm-e", **settings), [Attempt(2, scaling=TENSOR)], folder)
    schedule = [
        Attempt(4, "kill one", after=9, victim=3, scaling=TENSOR),
        Attempt(2, "stop", after=8, scaling=TENSOR),
        Attempt(4, scaling=TENSOR),
    ]
    outcome = run_schedule(exact_job(folder / "text.txt", folder, "disturbed-e", **settings), schedule, folder)
    assert outcome.resumed
    assert outcome.summary["parameters_sha256"] == calm.summary["parameters_sha256"]
