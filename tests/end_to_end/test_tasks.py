"""Each task as a user trains it, from its own kind of data to a good score; what is exact stays exact, whatever the task."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from raystride.pipelines.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    LaunchConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    PredictorConfig,
    RecordConfig,
    SampleConfig,
    ScalingConfig,
    TokenizerConfig,
    TrainConfig,
    ValidationConfig,
)
from raystride.pipelines.evaluate.answering import Predictor
from raystride.pipelines.evaluate.load_run import open_run
from raystride.pipelines.system.storage.folder import Folder
from tests.ray_jobs.jobs import run_well, summary

ENGLISH = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
WORDS = dict(zip(ENGLISH, ["uno", "due", "tre", "quattro", "cinque", "sei", "sette", "otto"], strict=True))


def _config(folder: Path, task: str, data: DataConfig, **changes: object) -> Config:
    base = Config(
        task=task,
        storage=str(folder / "runs"),
        data=data,
        tokenizer=TokenizerConfig(kind="bytes"),
        model=ModelConfig(layers=1, heads=2, hidden_size=32, context=32),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=10),
        train=TrainConfig(steps=60, slots=2, slot_size=8, log_every=20),
        validation=ValidationConfig(every=0, samples=0),
        checkpoint=CheckpointConfig(every=1000),
        scaling=ScalingConfig(threads=1),
        launch=LaunchConfig(mode="inline"),
        record=RecordConfig(mlflow=False),
        sample=SampleConfig(tokens=0),
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def _answers(config: Config, run: str, questions: list[tuple[str, ...]]) -> list[dict[str, Any]]:
    return list(Predictor(open_run(Folder.from_uri(config.storage), run), PredictorConfig(run=run)).predict(questions))


def _pairs(count: int, longest: int) -> list[tuple[str, str]]:
    """Words, and the others' words in reverse."""
    draw = random.Random(0)
    chosen = [[draw.choice(list(WORDS)) for _ in range(draw.randint(1, longest))] for _ in range(count)]
    return [(" ".join(words), " ".join(WORDS[word] for word in reversed(words))) for words in chosen]


@pytest.mark.long
def test_a_reversal_with_the_vocabulary_swapped_is_learned_exactly(tmp_path: Path) -> None:
    pairs = _pairs(6000, 4)
    for side, name in enumerate(("words.txt", "parole.txt")):
        (tmp_path / name).write_text("".join(f"{pair[side]}\n" for pair in pairs))
    config = _config(
        tmp_path,
        "translation",
        DataConfig(source=str(tmp_path / "words.txt"), target_source=str(tmp_path / "parole.txt"), validation_fraction=0.03),
        tokenizer=TokenizerConfig(kind="bpe", vocabulary_size=400),
        model=ModelConfig(architecture="original", norm="pre", layers=1, heads=2, hidden_size=64, context=24),
        optimizer=OptimizerConfig(learning_rate=5e-3, warmup_steps=40, weight_decay=0.0),
        train=TrainConfig(steps=400, slots=1, slot_tokens=1024, log_every=100),
    )
    run_well("train", config, "--run", "reversal")
    assert summary(config, "reversal")["metrics"]["val_bleu"] > 98
    fresh = _pairs(6400, 4)[6000:]
    given = _answers(config, "reversal", [(source,) for source, _ in fresh])
    right = sum(answer["translation"] == target for answer, (_, target) in zip(given, fresh, strict=True))
    assert right >= 0.99 * len(fresh)


@pytest.mark.parametrize("flavour", ["gpt2", pytest.param("llama", marks=pytest.mark.long)])
def test_texts_in_a_folder_a_class_are_told_apart(tmp_path: Path, flavour: str) -> None:
    draw = random.Random(0)
    for label, letters in (("vowels", "aeiou"), ("consonants", "bcdfg"), ("digits", "12345")):
        (tmp_path / "texts" / label).mkdir(parents=True)
        for number in range(80):
            text = "".join(draw.choices("xyz ", k=draw.randint(4, 30))) + draw.choice(letters)
            (tmp_path / "texts" / label / f"{number}.txt").write_text(text)
    data = DataConfig(source=str(tmp_path / "texts"), validation_fraction=0.2)
    model = ModelConfig(architecture=flavour, layers=1, heads=2, hidden_size=32, context=40, pooling="attention")  # type: ignore[arg-type]
    config = _config(tmp_path, "classification", data, model=model, objective=ObjectiveConfig(class_weights="balanced"))
    run_well("train", config, "--run", "texts", "--train.steps", "120")
    figures = summary(config, "texts")
    assert figures["metrics"]["val_accuracy"] > 0.9
    (answer,) = _answers(config, "texts", [("xyzx 3",)])
    assert answer["label"] == "digits"
    assert set(answer) >= {"text", "label", "probability"}


@pytest.mark.parametrize("loss", ["cross_entropy", pytest.param("mse", marks=pytest.mark.long)])
def test_images_of_several_sizes_are_told_apart(tmp_path: Path, loss: str) -> None:
    draw = np.random.default_rng(0)
    for label, axis in (("across", 0), ("down", 1)):
        (tmp_path / "images" / label).mkdir(parents=True)
        for number in range(60):
            size = int(draw.integers(9, 14))
            stripes = np.repeat(draw.integers(0, 2, (size, 1)) * 255, size, 1).astype(np.uint8)
            Image.fromarray(stripes if axis == 0 else stripes.T).save(tmp_path / "images" / label / f"{number}.png")
    data = DataConfig(source=str(tmp_path / "images"), image_size=(1, 8, 8), validation_fraction=0.2)
    config = _config(
        tmp_path,
        "images",
        data,
        model=ModelConfig(channels=(8, 8), hidden=(16,)),
        objective=ObjectiveConfig(loss=loss),  # type: ignore[arg-type]
        optimizer=OptimizerConfig(kind="sgd", learning_rate=0.3 if loss == "mse" else 0.1, warmup_steps=0, weight_decay=0.0),
    )
    run_well("train", config, "--run", "images", "--train.steps", "150")
    assert summary(config, "images")["metrics"]["val_accuracy"] > 0.9


@pytest.mark.long
def test_fine_tuning_learns_completions_and_not_prompts(tmp_path: Path) -> None:
    draw = random.Random(0)
    rows = [{"prompt": "".join(draw.choices("abc", k=6)) + "=", "completion": draw.choice(["yes"])} for _ in range(300)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(
        source=str(tmp_path / "pairs.jsonl"), column="prompt", target_column="completion", validation_fraction=0.1
    )
    config = _config(tmp_path, "completion", data)
    run_well("train", config, "--run", "pairs", "--train.steps", "40")
    # Prompts are random letters, which nobody can predict: only without them the loss comes near zero.
    assert summary(config, "pairs")["val_loss"] < 0.1
    (answer,) = _answers(config, "pairs", [("abcabc=",)])
    assert answer["continuation"].startswith("yes")


@pytest.mark.long
def test_bundles_are_exact_through_a_stop(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps({"text": a, "target": b}) + "\n" for a, b in _pairs(400, 6)))
    config = _config(
        tmp_path,
        "translation",
        DataConfig(source=str(tmp_path / "pairs.jsonl"), validation_fraction=0.1),
        model=ModelConfig(architecture="original", layers=1, heads=2, hidden_size=16, context=48, dropout=0.1),
        train=TrainConfig(steps=8, slots=3, slot_tokens=512, exact=True, log_every=2),
        checkpoint=CheckpointConfig(every=3),
    )
    run_well("train", config, "--run", "whole")
    run_well("train", config, "--run", "parts", "--train.steps", "5")
    run_well("train", config, "--run", "parts", "--train.steps", "8")
    assert summary(config, "parts")["parameters_sha256"] == summary(config, "whole")["parameters_sha256"]
    assert summary(config, "parts")["resumed_from"] == 5
