"""Metrics on the validation samples: sums by batch, empty batches, and the metrics of each source."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raystride.model.transformer import Decoder
from raystride.pipelines.config import Config, DataConfig, ModelConfig
from raystride.pipelines.data.feed.loader import MicroBatch
from raystride.pipelines.data.feed.open_dataset import open_feed, open_manifest
from raystride.pipelines.data.prepare.prepare import prepare
from raystride.pipelines.data.prepare.run_context import RunContext
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.data.tasks.classification import Classification
from raystride.pipelines.data.tasks.language_model import LanguageModel
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.precision import Precision
from raystride.pipelines.train.strategies.strategy import Single
from raystride.pipelines.train.validation import Validation, ValidationSums, validation_scores, validation_sums
from tests.tiny import tiny, write_text

SHAPE = ModelConfig(layers=1, heads=1, hidden_size=8, context=4, dropout=0.5)
TASK = LanguageModel(Config(model=SHAPE), {"vocabulary_size": 11, "end_id": 0})


def _batch(slot: int, rows: int, **more: Any) -> MicroBatch:
    ids = torch.randint(0, 11, (rows, 5), generator=torch.Generator().manual_seed(slot))
    return MicroBatch(slot, (ids[:, :-1],), ids[:, 1:], **more)


@pytest.mark.parametrize("training", [True, False])
def test_sums_are_those_of_all_batches_without_dropout_and_the_mode_comes_back(training: bool) -> None:
    torch.manual_seed(0)
    model = Decoder(SHAPE, 11).train(training)
    batches = [_batch(0, 2), _batch(1, 3), _batch(2, 1, empty=True)]
    found = validation_sums(Single(torch.device("cpu")), model, Precision(), TASK, batches, 3)
    assert model.training is training
    model.eval()
    expected = [model(*batch.inputs, batch.targets) for batch in batches[:2]]
    assert found.loss == pytest.approx(sum(float(loss.detach()) for loss, _ in expected), rel=1e-6)
    assert found.targets == 2 * 4 + 3 * 4
    assert found.counts.shape == (0,)


def test_a_mixture_has_the_metrics_of_all_samples_and_of_each_source() -> None:
    task = Classification(Config(task="classification"), {"vocabulary_size": 9, "labels": ["a", "b"], "shares": [0.5, 0.5]})
    sums = {
        "web": ValidationSums(6.0, 3.0, np.array([2.0, 0.0, 1.0, 0.0])),
        "code": ValidationSums(2.0, 1.0, np.array([0.0, 0.0, 0.0, 1.0])),
    }
    found = validation_scores(task, sums)
    assert (found["val_loss"], found["val_accuracy"]) == (2.0, 0.75)
    assert (found["val_loss/web"], found["val_accuracy/web"]) == (2.0, pytest.approx(2 / 3))
    assert (found["val_loss/code"], found["val_accuracy/code"]) == (2.0, 1.0)
    alone = validation_scores(task, {"": sums["web"]})
    assert alone["val_accuracy"] == pytest.approx(2 / 3)
    assert not [name for name in alone if "/" in name]


def test_each_source_is_validated_by_its_own_share(tmp_path: Path) -> None:
    storage, sources = Folder.from_uri(str(tmp_path / "storage")), {}
    for name, weight in (("web", 1), ("code", 3), ("rest", 4)):
        (tmp_path / name).mkdir()
        sources[name] = {"source": str(write_text(tmp_path / name)), "kind": "text", "weight": weight}
    data = DataConfig(sources=sources, validation="tail", validation_fraction=0.1)
    config = replace(tiny(tmp_path / "text.txt"), data=data)
    folder = prepare(RunContext(config, storage, log=lambda _: None), build_task(config), on_ray=False).folder
    task = build_task(config, open_manifest(config.data, folder).facts)
    feed, model, rows = open_feed(config, task, folder), task.build_model(), Counter[int]()
    model.register_forward_hook(lambda _, inputs, __: rows.update([len(inputs[0])]))
    for numbers in ({"web": 2, "code": 6, "rest": 8}, {"rest": 8, "code": 6, "web": 2}):
        rows.clear()
        held_out = {name: feed.held_out[name] for name in numbers}
        shares = {name: feed.shares[name] for name in numbers}
        scores = Validation(config, Single(torch.device("cpu")), model, Precision(), task, held_out, shares)()
        assert sum(size * count for size, count in rows.items()) == 16 == sum(numbers.values())
        assert {name for name in scores if "/" in name} >= {f"val_loss/{name}" for name in numbers}
