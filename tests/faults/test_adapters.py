"""Adapters over a base in shards, killed on two, one and four workers: the bits of one that nobody disturbed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.config import LoraConfig, ScalingConfig, TrainConfig
from raystride.pipelines.train.checkpoint.audit import audit
from tests.bases import SHAPES, write_base
from tests.faults.schedules import Attempt, exact_job, run_schedule
from tests.tiny import write_text

SHARDS = ScalingConfig(strategy="fsdp")
DISTURBED = [
    Attempt(2, "kill one", after=9, victim=1, scaling=SHARDS),
    Attempt(1, "kill all", after=8, scaling=SHARDS),
    Attempt(4, "kill one", after=7, victim=2, scaling=SHARDS),
    Attempt(2, "stop", after=6, scaling=SHARDS),
    Attempt(1, scaling=SHARDS),
]


@pytest.mark.long
@pytest.mark.parametrize("lora", [LoraConfig(rank=4, dropout=0.1), LoraConfig(rank=4, init="pissa")])
def test_adapters_keep_their_bits_through_kills_and_other_numbers_of_workers(lora: LoraConfig, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", SHAPES["llama"])
    settings: dict[str, Any] = {
        "model": replace(SHAPES["llama"], dropout=0.2, init_from=str(base)),
        "lora": lora,
        "train": TrainConfig(steps=32, slots=7, slot_size=2, log_every=4, exact=True, clip_norm=0.5),
    }
    text = write_text(tmp_path, 6_000)
    calm = run_schedule(exact_job(text, tmp_path, "calm", **settings), [], tmp_path).summary
    job = exact_job(text, tmp_path, "disturbed", **settings)
    outcome = run_schedule(job, DISTURBED, tmp_path)
    assert outcome.resumed >= 1
    for key in ("parameters_sha256", "steps", "samples_seen", "tokens_seen", "val_loss", "train_loss"):
        assert outcome.summary[key] == calm[key]
    assert audit(job.folder / "checkpoints").samples == calm["samples_seen"]
