"""Dropout by slot: neither the number of workers, nor joined slots, padding or recomputation change a mask."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from raystride.model.classifier import Classifier
from raystride.model.dropout import RowKeys
from raystride.model.lora import attach_adapters
from raystride.model.transformer import Decoder, PackedDecoder
from raystride.model.translator import Translator
from raystride.pipelines.config import CheckpointConfig, LoraConfig, ModelConfig, ScalingConfig, TrainConfig
from raystride.pipelines.train.randomness import row_keys
from raystride.pipelines.train.strategies.recompute import recompute
from raystride.triton_kernels.row_masks import kept_by_row
from tests.pipelines.train.strategies.course import Course, course_job, documents, next_attempt, run_course

DROPOUT = ModelConfig(layers=2, heads=2, hidden_size=16, context=16, dropout=0.2)
JOINED = "draws random numbers for the"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder with data that is prepared once."""
    return tmp_path_factory.mktemp("masks")


def _course(folder: Path, run: str, world: int = 1, **sections: Any) -> Course:
    train = replace(TrainConfig(steps=12, slots=5, slot_size=2, log_every=1), **sections.pop("train", {}))
    return run_course(course_job(folder, run, **{"model": DROPOUT, "train": train, **sections}), world)


def _difference(first: Course, second: Course) -> float:
    return max(abs(a - b) for a, b in zip(first.losses + first.validations, second.losses + second.validations, strict=True))


def test_workers_and_slots_of_a_micro_batch_change_the_order_of_sums_alone(folder: Path) -> None:
    """Four digits more than by the order of draws, which differ by some 1e-2 here."""
    alone = _course(folder, "alone")
    assert not any(JOINED in line for line in alone.said)
    assert _difference(_course(folder, "slots", train={"micro_batch_slots": 1}), alone) < 1e-6
    for world in (2, 3):
        assert _difference(_course(folder, f"of-{world}", world), alone) < 1e-6, world
    assert _difference(_course(folder, "order", train={"dropout_masks": "order"}), alone) > 1e-3


@pytest.mark.parametrize("way", ["selective", "full"])
def test_recomputed_activations_have_the_masks_of_the_forward(folder: Path, way: str) -> None:
    assert _course(folder, way, train={"activation_checkpointing": way}).sha256 == _course(folder, "kept").sha256


def test_packed_documents(folder: Path) -> None:
    packed = {"data": documents(folder), "train": {"packing": "documents"}}
    assert _difference(_course(folder, "packed", **packed), _course(folder, "packed-2", 2, **packed)) < 1e-6


def test_what_draws_for_joined_slots_is_named(folder: Path) -> None:
    for masks, world, said in (("order", 1, True), ("order", 5, False), ("slot", 2, False)):
        course = _course(folder, f"said-{masks}-{world}", world, train={"dropout_masks": masks, "steps": 1})
        assert any(JOINED in line for line in course.said) is said, (masks, world)


def test_a_run_keeps_the_masks_that_it_began_with(folder: Path) -> None:
    """One that began by order, as all until 0.3, goes on so under the default of today."""

    def cut_at_half(run: str, first: str, then: str) -> Course:
        train = TrainConfig(steps=6, slots=4, slot_size=2, log_every=1, dropout_masks=first)  # type: ignore[arg-type]
        job = course_job(folder, run, model=DROPOUT, train=train, checkpoint=CheckpointConfig(every=6))
        run_course(job, 2)
        on = replace(train, steps=12, dropout_masks=then)  # type: ignore[arg-type]
        return run_course(next_attempt(job, train=on), 2)

    found = {
        pair: cut_at_half("-then-".join(pair), *pair).sha256
        for pair in (("auto", "auto"), ("auto", "slot"), ("slot", "slot"))
    }
    assert found["auto", "slot"] == found["auto", "auto"] != found["slot", "slot"]


SHAPE = ModelConfig(layers=2, heads=2, hidden_size=16, context=24, dropout=0.3)


LENGTHS = (4, 9, 6, 20, 3)


def _padded_ids(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ids of some of five texts (B, T), padded to the longest of these, and their lengths (B)."""
    lengths = torch.tensor(LENGTHS[rows])
    return torch.randint(1, 11, (5, 20), generator=torch.Generator().manual_seed(0))[rows, : int(lengths.max())], lengths


def _adapted_decoder() -> Decoder:
    model = Decoder(replace(SHAPE, dropout=0.0), 11)
    attach_adapters(model, LoraConfig(rank=2, dropout=0.3), lambda _: ())
    for _, parameter in model.named_parameters():
        parameter.data.normal_(std=0.3)
    return model


@pytest.mark.parametrize(
    ("network", "compute"),
    [
        (lambda: Decoder(SHAPE, 11), lambda model, ids, lengths: model.hidden(ids)),
        (lambda: Decoder(replace(SHAPE, architecture="llama"), 11), lambda model, ids, lengths: model.hidden(ids)),
        (_adapted_decoder, lambda model, ids, lengths: model.hidden(ids)),
        (lambda: Classifier(SHAPE, 11, 3), lambda model, ids, lengths: model.logits(ids, lengths)),
        (lambda: Translator(SHAPE, 11), lambda model, ids, lengths: model.hidden(ids, lengths, (3 * ids) % 11)),
        (
            lambda: Decoder(SHAPE, 11),
            lambda model, ids, lengths: model.hidden(torch.cat((ids, (3 * ids) % 11))).unflatten(0, (2, -1))[1],
        ),
    ],
    ids=["decoder", "llama", "adapters", "classifier", "translator", "pairs"],
)
def test_rows_of_a_joined_batch_have_the_masks_of_their_slots(
    network: Callable[[], Any], compute: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    """Though padded to another length: slot 3 has two samples, slot 7 three."""
    torch.manual_seed(0)
    model = network()
    rows = RowKeys(model)

    def run(slots: list[tuple[int, int]], part: slice) -> torch.Tensor:
        rows.set(row_keys(1, 2, slots, rows.modules))
        found: torch.Tensor = compute(model, *_padded_ids(part))
        return found

    joined = run([(3, 2), (7, 3)], slice(5))
    for slot, part in (((3, 2), slice(2)), ((7, 3), slice(2, 5))):
        for row, (first, second) in enumerate(zip(joined[part], run([slot], part), strict=True)):
            real = LENGTHS[part][row] if second.dim() == 2 else len(second)
            torch.testing.assert_close(first[:real], second[:real], rtol=1e-4, atol=1e-5)
    assert (run([(3, 2), (8, 3)], slice(5))[2:] - joined[2:]).abs().max() > 0.01


def test_documents_have_the_masks_of_their_rows() -> None:
    torch.manual_seed(0)
    model = PackedDecoder(SHAPE, 11)
    rows, ids = RowKeys(model), torch.randint(0, 11, (3, 8))

    def run(slots: list[tuple[int, int]], part: slice, offsets: list[int]) -> torch.Tensor:
        rows.set(row_keys(1, 2, slots, rows.modules))
        return model.hidden(ids[part], documents=torch.tensor(offsets, dtype=torch.int32))

    joined = run([(0, 1), (1, 2)], slice(0, 3), [0, 3, 8, 10, 16, 24])
    torch.testing.assert_close(joined[:1], run([(0, 1)], slice(0, 1), [0, 3, 8]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(joined[1:], run([(1, 2)], slice(1, 3), [0, 2, 8, 16]), rtol=1e-4, atol=1e-5)


def test_masks_are_independent() -> None:
    """Shares, and agreements of neighbouring rows, modules, steps, tokens and channels, within 4 standard errors."""
    keys = torch.stack([row_keys(0, step, [(slot, 8) for slot in range(32)], 3) for step in range(2)])
    for dropout in (0.1, 0.5):
        kept = kept_by_row(keys, 20, 24, dropout=dropout).double()
        assert abs(kept.mean() - (1 - dropout)) < 4 * (dropout * (1 - dropout) / kept.numel()) ** 0.5
        scaled = (kept - (1 - dropout)) / (dropout * (1 - dropout)) ** 0.5
        for dimension in range(5):
            for lag in (1, 2):
                size = kept.shape[dimension]
                if lag < size:
                    pairs = scaled.narrow(dimension, 0, size - lag) * scaled.narrow(dimension, lag, size - lag)
                    assert abs(pairs.mean()) < 4 / pairs.numel() ** 0.5, (dropout, dimension, lag)
        per_row = kept.mean((-1, -2))
        assert 0.85 < float(per_row.var() / (dropout * (1 - dropout) / (20 * 24))) < 1.2


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_strategies(folder: Path, strategy: str) -> None:
    course = _course(folder, strategy, 2, scaling=ScalingConfig(strategy=strategy))  # type: ignore[arg-type]
    assert _difference(course, _course(folder, f"{strategy}-alone")) < 1e-6


@pytest.mark.long
@pytest.mark.weekly
def test_compiled_blocks_have_the_same_masks() -> None:
    """Compiled sums are in another order; other masks would differ by 1e-2."""
    ids, found = _padded_ids(slice(5))[0], []
    for way in ("none", "block"):
        torch.manual_seed(0)
        model = recompute(Decoder(SHAPE, 11), TrainConfig(compile=way))  # type: ignore[arg-type]
        rows = RowKeys(model)
        for step in range(3):
            rows.set(row_keys(0, step, [(0, 2), (1, 3)], rows.modules))
            found.append(float(model(ids, ids)[0].detach()))
    assert found[3:] == pytest.approx(found[:3], rel=1e-5)
    assert len(set(found[:3])) == 3
