"""What a classifier's training leaves for its page: the confusion matrix of its validation, and documents with answers."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raystride.pipelines.config import Config, ModelConfig, SampleConfig, TokenizerConfig, TrainConfig, ValidationConfig
from raystride.pipelines.config.parse import to_yaml
from raystride.pipelines.data.tasks.labels import accuracy_and_macro_f1
from raystride.pipelines.evaluate.load_run import open_run
from raystride.pipelines.system.storage.folder import Folder
from tests.pipelines.evaluate.conftest import texts, write_rows
from tests.processes import make_job, run_workers
from tests.tiny import tiny


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    source = write_rows(tmp_path_factory.mktemp("labels") / "train.jsonl", texts())
    base = tiny(
        source,
        task="classification",
        model=ModelConfig(layers=1, heads=2, hidden_size=16, context=48),
        tokenizer=TokenizerConfig(kind="characters"),
        train=TrainConfig(steps=12, slots=2, slot_size=8, log_every=3),
        sample=SampleConfig(tokens=0),
        validation=ValidationConfig(every=0, samples=64),
    )
    return replace(base, data=replace(base.data, kind="json", validation_fraction=0.2))


def _answers(config: Config, storage: Path, world: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what a training of so many workers says of its model, and its summary."""
    job = make_job(config, storage, "labels")
    job.folder.put("config.yaml", to_yaml(config))
    summary = run_workers(job, world)
    return json.loads((storage / "labels" / "answers.json").read_text()), summary


@pytest.mark.parametrize(("strategy", "world"), [("ddp", 1), ("fsdp", 2)])
def test_answers_are_those_of_the_trained_model(strategy: str, world: int, config: Config, tmp_path: Path) -> None:
    config = replace(config, scaling=replace(config.scaling, strategy=strategy))
    found, summary = _answers(config, tmp_path, world)
    confusion = np.array(found["confusion"])
    accuracy, macro_f1 = accuracy_and_macro_f1(confusion)
    assert found["step"] == 12
    assert (accuracy, macro_f1) == pytest.approx((summary["metrics"]["val_accuracy"], summary["metrics"]["val_macro_f1"]))
    labels = Counter(document["label"] for document in found["documents"])
    assert {label: int(count) for label, count in zip(found["labels"], confusion.sum(1), strict=True)} == labels
    opened = open_run(Folder(str(tmp_path)), "labels", "last")
    for document in found["documents"]:
        rows = [opened.task.encode((document["text"], document["label"]))[0]]
        with torch.no_grad():
            (answer,) = opened.task.answer(opened.model, opened.task.collate(rows, None)[0])
        assert answer["label"] == document["answer"]
        assert answer["probability"] == pytest.approx(document["probability"], abs=1e-5)
