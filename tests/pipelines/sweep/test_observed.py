"""A trial's observation for the scaling model follows from its settings."""

from dataclasses import replace
from typing import Any

import pytest

from raystride.model.transformer import Decoder
from raystride.pipelines.config import Config, ModelConfig, ScalingConfig, TokenizerConfig, TrainConfig
from raystride.pipelines.sweep.observed import MIB, build_observation
from raystride.pipelines.sweep.result import Result
from raystride.pipelines.sweep.scaling_model.observation import TrialError
from tests.pipelines.sweep.test_report_page import trial

MODEL = ModelConfig(layers=3, heads=2, hidden_size=64, context=64)
BASE = Config(tokenizer=TokenizerConfig(kind="bytes"), model=MODEL, train=TrainConfig(slots=8, slot_size=4))
PARAMETERS = sum(p.numel() for p in Decoder(MODEL, BASE.tokenizer.vocabulary_size).parameters())
TWO: Result = replace(trial(1000.0, 2), tokens_per_step=8 * 4 * 64, figures={"joules_per_token": 0.5})


def config(**changes: Any) -> Config:
    """Returns the base, with these settings of `scaling`, or of `train`."""
    ours = {"strategy", "bucket_mib", "zero", "shard_workers", "reshard", "context", "context_exchange"}
    scaling = {key: value for key, value in changes.items() if key in ours}
    train = {key: value for key, value in changes.items() if key not in ours}
    return replace(BASE, scaling=ScalingConfig(workers=2, **scaling), train=replace(BASE.train, **train))


def test_under_ddp_buckets_are_sent_and_waiting_for_their_sum_is_seen() -> None:
    found = build_observation(config(strategy="ddp", bucket_mib=1), TWO)
    work = found.work
    assert (work.strategy, work.workers, work.slots, work.tokens_per_slot) == ("ddp", 2, 8, 4 * 64)
    assert (work.parameters, work.messages) == (PARAMETERS, -(-PARAMETERS * 4 // MIB))
    assert (work.slots_per_micro_batch, work.variant, work.backend) == (4, "", "gloo")
    assert found.reduce_seconds == pytest.approx(TWO.shares["reduce"] * found.seconds)
    assert found.data_seconds == pytest.approx(TWO.shares["data"] * found.seconds)
    assert (found.step_seconds, found.joules_per_token) == (TWO.step_seconds, 0.5)


@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed"])
def test_sharded_strategies_send_blocks_and_wait_where_no_range_is(strategy: str) -> None:
    found = build_observation(config(strategy=strategy, zero=2), TWO)
    assert (found.work.strategy, found.work.messages, found.work.zero) == (strategy, MODEL.layers + 1, 2)
    assert found.reduce_seconds is None
    assert strategy in found.work.variant


@pytest.mark.parametrize(
    ("strategy", "precision", "size"), [("fsdp", "fp32", 4), ("fsdp", "bf16", 2), ("fsdp", "pure_bf16", 2)]
)
def test_parameters_are_gathered_in_matmul_precision_and_gradients_summed_in_fp32(
    strategy: str, precision: str, size: int
) -> None:
    work = build_observation(config(strategy=strategy, precision=precision), TWO).work
    assert (work.gather_bytes, work.gradient_bytes, work.precision) == (size, 4, precision)


def test_another_task_counts_as_its_own_summary_says() -> None:
    measured = replace(TWO, tokens_per_step=32.0, figures={"parameters": 5000, "flops_per_token": 1e6})
    work = build_observation(replace(config(strategy="ddp"), task="my_own"), measured).work
    assert (work.parameters, work.tokens_per_slot, work.flops_per_token) == (5000, 4, 1e6)
    assert "my_own" in work.model
    with pytest.raises(TrialError, match=r"my_own.*no parameters"):
        build_observation(replace(config(strategy="ddp"), task="my_own"), TWO)


def test_auto_is_resolved_as_in_a_training() -> None:
    assert build_observation(config(strategy="auto"), TWO).work.strategy == "ddp"
    assert build_observation(config(strategy="auto"), trial(1000.0, 1)).work.strategy == "single"


def test_other_compute_speeds_are_other_groups() -> None:
    changes: list[dict[str, Any]] = [{}, {"exact": True}, {"compile": "block"}, {"compile": "model"}, {"precision": "bf16"}]
    changes += [{"activation_checkpointing": "full"}, {"deterministic": False}]
    groups = {build_observation(config(**settings), TWO).work.group for settings in changes}
    models = [replace(MODEL, heads=4), replace(MODEL, ffn_size=96), replace(MODEL, dropout=0.1), MODEL]
    groups |= {build_observation(replace(config(), model=model), TWO).work.group for model in models}
    assert len(groups) == len(changes) + 3


def test_micro_batches_are_as_large_as_settings_and_shares_allow() -> None:
    sizes = [build_observation(config(micro_batch_slots=most), TWO).work.slots_per_micro_batch for most in (1, 3, 8)]
    assert sizes == [1, 3, 4]
    assert build_observation(config(exact=True), TWO).work.slots_per_micro_batch == 1


def test_a_group_of_workers_is_told_with_its_mesh() -> None:
    four = replace(TWO, workers=4)
    spread = ScalingConfig(workers=4, tensor=2, pipeline=2, schedule="interleaved", strategy="ddp")
    deep = replace(BASE, model=replace(MODEL, layers=4), scaling=spread)
    found = build_observation(deep, four)
    work, mesh = found.work, found.work.mesh
    assert mesh
    assert (work.group_workers, work.groups, work.micro_batches, work.slots_per_micro_batch) == (4, 1, 8, 1)
    assert (mesh.tensor, mesh.pipeline, mesh.stages_per_worker, mesh.schedule) == (2, 2, 2, "interleaved")
    assert (mesh.layers, mesh.width, mesh.queries, mesh.keys) == (4, 64, 64, 128)
    assert (mesh.stream_bytes, mesh.product_bytes, mesh.documents) == (4, 4, 4)
    assert found.reduce_seconds is None
    assert work.tokens_per_worker == 8 * 4 * 64 / 4
    shared = build_observation(
        config(context=2, context_exchange="keys", micro_batch_slots=2, strategy="fsdp"), TWO
    ).work.mesh
    assert shared
    assert (shared.context, shared.context_exchange, shared.documents, shared.pipeline) == (2, "keys", 8, 1)
    assert build_observation(config(), TWO).work.mesh is None


def test_workers_that_fill_no_node_are_not_described() -> None:
    with pytest.raises(TrialError, match=r"^workers is 6: .*workers_per_node, 4$"):
        build_observation(config(), replace(TWO, workers=6))
