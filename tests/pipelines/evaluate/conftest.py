"""Small trained runs of every task, as inputs of the package's tests."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from raystride.pipelines.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    SampleConfig,
    TokenizerConfig,
    TrainConfig,
    ValidationConfig,
)
from raystride.pipelines.config.parse import to_yaml
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.worker.build import build_training
from raystride.pipelines.train.worker.job import WorkerInfo
from tests.processes import make_job
from tests.tiny import tiny

FRUITS = ["apple", "pear", "plum"]


def texts(count: int = 240) -> list[dict[str, str]]:
    """Texts of several lengths that name a fruit, their label, and the text in capitals, its target."""
    rows = []
    for number in range(count):
        fruit = FRUITS[number % 3]
        text = f"{'very ' * (number % 7)}ripe {fruit} number {number}"
        rows.append({"text": text, "label": fruit, "target": text.upper()[: 8 + number % 5]})
    return rows


def write_rows(path: Path, rows: list[dict[str, str]]) -> Path:
    """Writes the rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train(config: Config, storage: Path, run: str) -> None:
    """Trains a run of this name, as the driver would have it trained."""
    job = make_job(config, storage, run)
    job.folder.put("config.yaml", to_yaml(job.config))
    build_training(job, WorkerInfo(), [], lambda: False, lambda _: None).run()


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """A storage with runs of 6 steps, saved at 3 and 6: `labels`, `translates`, `writes`, and of pairs `completes` and
    `packs`."""
    path = tmp_path_factory.mktemp("finished")
    source = write_rows(path / "train.jsonl", texts())
    write_rows(path / "test.jsonl", texts(60))
    base = tiny(
        source,
        data=DataConfig(source=str(source), kind="json", validation_fraction=0.2, test_source=str(path / "test.jsonl")),
        model=ModelConfig(layers=1, encoder_layers=1, heads=2, hidden_size=16, context=48),
        tokenizer=TokenizerConfig(kind="characters"),
        validation=ValidationConfig(every=0),
        checkpoint=CheckpointConfig(every=3, keep=2),
        train=TrainConfig(steps=6, slots=2, slot_size=8, log_every=3),
        sample=SampleConfig(tokens=0),
    )
    tasks = {"labels": "classification", "translates": "translation", "writes": "language_model"}
    for run, task in tasks.items():
        train(replace(base, task=task), path, run)
    for run, packing in (("completes", "none"), ("packs", "documents")):
        settings = replace(base.train, packing=packing)
        train(replace(base, task="completion", data=replace(base.data, target_column="target"), train=settings), path, run)
    return Folder(str(path))
