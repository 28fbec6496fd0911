"""A run learns from a teacher: the same on any number of workers and through stops, from no other teacher than its first."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from raystride.model.transformer import Decoder
from raystride.pipelines.config import Config, LoraConfig, ModelConfig, ObjectiveConfig, ScalingConfig, TrainConfig
from raystride.pipelines.data.teacher import check_teacher, load_teacher, teacher_flops_per_token, teacher_shape
from raystride.pipelines.data.tokenizers.byte_pairs import ByteEncoder
from raystride.pipelines.evaluate.export import _byte_tokenizer_json
from raystride.pipelines.train.checkpoint.layout import MANIFEST_KEYS
from raystride.pipelines.train.loop import Training
from raystride.pipelines.train.memory.estimate import estimate
from raystride.pipelines.train.worker.build import TEACHER, build_training
from raystride.pipelines.train.worker.job import WorkerInfo
from tests.bases import SHAPES, write_base, write_encoder, write_tokenizer
from tests.errors import refused
from tests.processes import make_job, run_workers
from tests.tiny import tiny, write_text

STEPS = TrainConfig(steps=8, slots=4, slot_size=2, log_every=2, exact=True)


def write_teacher(folder: Path, seed: int = 1) -> Path:
    """Writes a decoder of bytes with its tokenizer, as an export has it."""
    write_base(folder, SHAPES["llama"], seed=seed)
    (folder / "tokenizer.json").write_text(_byte_tokenizer_json(ByteEncoder()))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text and a teacher."""
    path = tmp_path_factory.mktemp("distillation")
    write_text(path)
    write_teacher(path / "teacher")
    return path


def _config(folder: Path, train: TrainConfig = STEPS, **changes: Any) -> Config:
    objective = ObjectiveConfig(teacher=str(folder / "teacher"), kd_ratio=0.7, temperature=2.0)
    return tiny(folder / "text.txt", **{"train": train, "objective": objective} | changes)


def _training(config: Config, folder: Path, run: str, stop_at: int = 99) -> Training:
    training: Training
    training = build_training(
        make_job(config, folder, run), WorkerInfo(), [], lambda: training.state.step >= stop_at, lambda _: None
    )
    return training


def test_it_has_the_same_bits_on_any_number_of_workers_and_in_shards_the_same_loss(folder: Path) -> None:
    ends = [run_workers(make_job(_config(folder), folder, f"workers-{world}"), world) for world in (1, 2, 3)]
    assert len({end["parameters_sha256"] for end in ends}) == 1
    plain = run_workers(make_job(_config(folder, objective=ObjectiveConfig()), folder, "plain"), 1)
    assert plain["val_loss"] != ends[0]["val_loss"]
    sharded = _config(folder, replace(STEPS, exact=False), scaling=ScalingConfig(workers=2, strategy="fsdp"))
    found = run_workers(make_job(sharded, folder, "sharded"), 2)
    assert found["val_loss"] == pytest.approx(ends[0]["val_loss"], rel=1e-4)


def test_adapters_learn_from_it_on_any_number_of_workers(folder: Path) -> None:
    base = write_base(folder / "base", SHAPES["qwen2"])
    model, lora = replace(SHAPES["qwen2"], init_from=str(base)), LoraConfig(rank=2)
    config = _config(folder, model=model, lora=lora)
    ends = [run_workers(make_job(config, folder, f"adapters-{world}"), world) for world in (1, 2)]
    assert len({end["parameters_sha256"] for end in ends}) == 1


def test_a_stop_changes_no_bit_and_another_teacher_is_refused(folder: Path) -> None:
    whole = _training(_config(folder), folder, "whole")
    whole.run()
    _training(_config(folder), folder, "cut", stop_at=4).run()
    cut = _training(_config(folder), folder, "cut")
    assert 4 <= cut.state.step < 8
    assert len(cut.header[TEACHER]) == 64
    assert cut.header.keys() <= MANIFEST_KEYS, "a later version's manifest with these keys can be read"
    cut.run()
    for one, other in zip(whole.model.parameters(), cut.model.parameters(), strict=True):
        assert torch.equal(one, other)
    kept = folder / "kept"
    shutil.copytree(folder / "teacher", kept)
    try:
        write_teacher(folder / "teacher", seed=2)
        with refused("objective.teacher", str(folder / "teacher"), names=[cut.header[TEACHER][:12]]):
            _training(_config(folder, replace(STEPS, steps=12)), folder, "cut")
    finally:
        shutil.rmtree(folder / "teacher")
        kept.rename(folder / "teacher")


def test_validation_has_the_labels_loss(folder: Path) -> None:
    training = _training(_config(folder), folder, "validated")
    plain = _training(_config(folder, objective=ObjectiveConfig()), folder, "validated-plain")
    assert training.validate() == plain.validate()


def test_the_teachers_network_and_operations_are_known(folder: Path) -> None:
    config = _config(folder)
    shape = teacher_shape(config.model, config.objective)
    assert (shape.layers, shape.kv_heads, shape.context) == (2, 2, config.model.context)
    assert check_teacher(config).vocabulary_size == 257
    assert teacher_flops_per_token(config.objective, config.model, 257) > 0
    assert teacher_flops_per_token(ObjectiveConfig(), config.model, 257) == 0


def test_the_estimate_has_the_teachers_weights_and_a_chunk_of_logits(folder: Path) -> None:
    config, facts = _config(folder), {"vocabulary_size": 30_000}
    plain = estimate(replace(config, objective=ObjectiveConfig()), facts, workers=1, device="cpu")
    taught = estimate(config, facts, workers=1, device="cpu")
    assert plain
    assert taught
    weights = sum(
        parameter.numel() for parameter in Decoder(teacher_shape(config.model, config.objective), 30_000).parameters()
    )
    assert taught.parameters - plain.parameters == 4 * weights
    many = replace(config, train=replace(STEPS, slots=64, slot_size=64, exact=False))
    several = estimate(many, facts, workers=1, device="cpu")
    without = estimate(replace(many, objective=ObjectiveConfig()), facts, workers=1, device="cpu")
    assert several
    assert without
    assert several.activations < 0.5 * without.activations, "PyTorch has all logits"


def _with_tokenizer_of(letters: Path) -> None:
    write_tokenizer(letters, {"<|end|>": True})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json"),
        (_with_tokenizer_of, "--tokenizer.file"),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
    ],
)
def test_another_vocabulary_and_what_is_no_model_are_refused(make: Any, words: str, folder: Path, tmp_path: Path) -> None:
    teacher = write_teacher(tmp_path / "other")
    make(teacher)
    config = _config(folder, objective=ObjectiveConfig(teacher=str(teacher)))
    job = make_job(_config(folder), folder, "refused")
    with refused("objective.teacher", str(teacher), names=[words]):
        load_teacher(config.model, config.objective, job.prepared / "tokenizer", 257, print)
    with refused("objective.teacher", str(teacher), names=[words]):
        check_teacher(config)


def test_an_encoder_a_run_and_a_teacher_of_shorter_texts_are_refused_before_the_start(folder: Path, tmp_path: Path) -> None:
    encoder, run = write_encoder(tmp_path / "bert", "bert"), tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("{}")
    for place, word in ((encoder, "encoder"), (run, "raystride export")):
        with refused("objective.teacher", str(place), names=[word]):
            check_teacher(_config(folder, objective=ObjectiveConfig(teacher=str(place))))
    with refused("objective.teacher", names=["model.context"]):
        check_teacher(_config(folder, model=ModelConfig(layers=2, heads=2, hidden_size=16, context=512)))


@pytest.mark.parametrize(
    ("setting", "changes"),
    [
        ("objective.teacher", {"task": "classification"}),
        ("objective.teacher", {"scaling": ScalingConfig(workers=2, strategy="deepspeed"), "train": TrainConfig()}),
        ("objective.teacher", {"scaling": ScalingConfig(workers=2, tensor=2, strategy="ddp"), "train": TrainConfig()}),
        ("train.compile", {"train": TrainConfig(compile="model")}),
    ],
)
def test_what_has_no_whole_logits_of_next_tokens_is_refused(setting: str, changes: Any, folder: Path) -> None:
    with refused(setting):
        _config(folder, **changes)


def test_settings_of_a_teacher_need_one() -> None:
    for name, value in {"divergence": "reverse_kl", "kd_ratio": 0.1, "temperature": 2.0}.items():
        with refused(f"objective.{name}", value, names=["objective.teacher"]):
            ObjectiveConfig(**{name: value})  # type: ignore[arg-type]
