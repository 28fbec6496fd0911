"""Metrics on the validation samples: sums by batch, empty batches, and the metrics of each source."""

from typing import Any

import numpy as np
import pytest
import torch

from raystride.model.transformer import Decoder
from raystride.pipelines.config import Config, ModelConfig
from raystride.pipelines.data.feed.loader import MicroBatch
from raystride.pipelines.data.tasks.classification import Classification
from raystride.pipelines.data.tasks.language_model import LanguageModel
from raystride.pipelines.train.precision import Precision
from raystride.pipelines.train.strategies.strategy import Single
from raystride.pipelines.train.validation import ValidationSums, validation_scores, validation_sums

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
