"""Computing activations again, or compiling, changes what is kept and not what is learned."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from raystride.model.transformer import Decoder
from raystride.pipelines.config import ModelConfig, ScalingConfig, TrainConfig
from raystride.pipelines.train.strategies.recompute import model_blocks, recompute
from tests.pipelines.train.strategies.course import Course, course_job, documents, run_course

TRAIN = TrainConfig(steps=3, slots=4, slot_size=2, log_every=1)
DROPOUT = ModelConfig(layers=2, heads=2, hidden_size=16, context=16, dropout=0.2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder with data that is prepared once."""
    return tmp_path_factory.mktemp("recompute")


def _course(
    folder: Path, run: str, world: int = 1, strategy: str = "auto", model: ModelConfig = DROPOUT, **train: Any
) -> Course:
    scaling = ScalingConfig(strategy=strategy)  # type: ignore[arg-type]
    return run_course(course_job(folder, run, model=model, scaling=scaling, train=replace(TRAIN, **train)), world)


@pytest.mark.parametrize(
    ("compile_", "whole", "blocks_are"), [("none", False, False), ("block", False, True), ("model", True, False)]
)
def test_what_is_compiled_is_what_was_asked_for(compile_: str, whole: bool, blocks_are: bool) -> None:
    """Nothing is compiled before its first forward, so asking costs nothing."""
    model = recompute(Decoder(DROPOUT, 11), replace(TRAIN, compile=compile_))  # type: ignore[arg-type]
    assert (model._compiled_call_impl is not None) is whole
    assert [block._compiled_call_impl is not None for block in model_blocks(model)] == [blocks_are] * 2


@pytest.mark.parametrize("linear", ["torch", "onednn"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "pure_bf16"])
def test_the_bits_are_those_of_a_training_that_keeps_everything(folder: Path, precision: str, linear: str) -> None:
    model, name = replace(DROPOUT, linear=linear, bias=True), f"{precision}-{linear}"  # type: ignore[arg-type]
    kept = _course(folder, f"kept-{name}", model=model, precision=precision)
    for way in ("selective", "full"):
        found = _course(folder, f"{way}-{name}", model=model, precision=precision, activation_checkpointing=way)
        assert found.sha256 == kept.sha256, way


@pytest.mark.parametrize("way", ["selective", "full"])
def test_in_shards(folder: Path, way: str) -> None:
    kept = _course(folder, f"shards-kept-{way}", 2, "fsdp", precision="bf16")
    found = _course(folder, f"shards-{way}", 2, "fsdp", precision="bf16", activation_checkpointing=way)
    assert found.sha256 == kept.sha256


@pytest.mark.weekly
@pytest.mark.parametrize("linear", ["torch", "onednn"])
@pytest.mark.long
def test_compiled_it_learns_the_same(folder: Path, linear: str) -> None:
    """Few cases: on CPUs the compiler takes half a minute for the smallest model."""
    model = replace(DROPOUT, dropout=0.0, linear=linear)  # type: ignore[arg-type]
    courses = [_course(folder, f"{linear}-{way}", strategy="fsdp", model=model, compile=way) for way in ("none", "block")]
    # Compiled sums are in another order: some units of 2^-24 a step, over three steps.
    assert courses[1].losses == pytest.approx(courses[0].losses, rel=1e-4)


@pytest.mark.long
@pytest.mark.weekly
def test_packed_documents_recomputed_and_compiled(folder: Path) -> None:
    """Compiled on CPUs their attention is left out, as its groups are made of lengths."""

    def train(run: str, **settings: Any) -> Course:
        settings = {"packing": "documents", **settings}
        return run_course(
            course_job(folder, run, model=DROPOUT, data=documents(folder), train=replace(TRAIN, **settings)), 1
        )

    kept = train("packed-kept")
    for way in ("selective", "full"):
        assert train(f"packed-{way}", activation_checkpointing=way).sha256 == kept.sha256, way
    assert all(loss > 0 for loss in train("packed-block", compile="block", steps=2).losses)


def _saved_bytes(way: str, linear: str) -> int:
    """Returns the bytes that a model's forward saves for its backward."""
    torch.manual_seed(0)
    model = recompute(
        Decoder(ModelConfig(layers=3, heads=2, hidden_size=32, context=64, architecture="llama", linear=linear), 50),  # type: ignore[arg-type]
        TrainConfig(activation_checkpointing=way),  # type: ignore[arg-type]
    )
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    ids = torch.randint(0, 50, (4, 64))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss, _ = model(ids, ids)
    loss.backward()
    return sum(kept.values())


@pytest.mark.parametrize("linear", ["torch", "onednn"])
def test_less_is_kept(linear: str) -> None:
    kept, full = _saved_bytes("none", linear), _saved_bytes("full", linear)
    assert full < 0.5 * kept
