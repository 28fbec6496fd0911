"""A classifier that is an encoder predicts the same in transformers after its export."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from raystride.model.classifier import Classifier
from raystride.pipelines.config import Config, PredictorConfig, TokenizerConfig
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.data.tokenizers import train_tokenizer
from raystride.pipelines.evaluate.answering import Predictor
from raystride.pipelines.evaluate.export import export_hugging_face
from raystride.pipelines.evaluate.load_run import LoadedModel
from raystride.pipelines.system.storage.folder import Folder
from tests.bases import ENCODERS, write_encoder
from tests.errors import refused

TEXTS = [
    "the market rose",
    "",
    "a team won the game, a goal!",
    "the bank lost, the team lost, the stock fell, the price rose, a",
]
LABELS = ["business", "sport"]


def open_exported(folder: Path, kind: str, **changes: Any) -> LoadedModel:
    """A classifier over a base of this kind in which no two numbers are alike, as it would be opened after training."""
    base = write_encoder(folder / "base", kind)
    shape = replace(ENCODERS[kind], init_from=str(base), **changes)
    config = Config(
        task="classification", model=shape, tokenizer=TokenizerConfig(kind="file", file=str(base / "tokenizer.json"))
    )
    encoder = train_tokenizer(config.tokenizer, [], Folder(str(folder / "tokenizer")), lambda _: None)
    task = build_task(config, None, {"tokenizer": encoder})
    facts = task.learn([{"labels": {"sport": 3, "business": 2}}])
    torch.manual_seed(5)
    model = Classifier(shape, encoder.vocabulary_size, len(LABELS)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1 if parameter.dim() < 2 else 0.6)
    return LoadedModel(config, task.knowing(facts, {"tokenizer": encoder}), model, step=0, place=Folder(str(folder)))


def probabilities(folder: Folder) -> torch.Tensor:
    """Returns transformers' probabilities of the texts, one padded batch, by the files of a folder alone."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model, report = AutoModelForSequenceClassification.from_pretrained(str(folder), output_loading_info=True)
    assert not any(report.values()), report
    assert model.config.id2label == dict(enumerate(LABELS))
    assert model.config.problem_type == "single_label_classification"
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    batch = tokenizer(TEXTS, padding=True, truncation=True, return_tensors="pt")
    assert len(set(batch["attention_mask"].sum(1).tolist())) == len(TEXTS)
    with torch.no_grad():
        found: torch.Tensor = model.eval()(**batch).logits.softmax(-1)
    return found


@pytest.mark.parametrize("kind", ENCODERS)
def test_transformers_answers_as_the_run_does(kind: str, tmp_path: Path) -> None:
    opened = open_exported(tmp_path, kind)
    given = list(Predictor(opened, PredictorConfig(run="x")).predict([(text,) for text in TEXTS]))
    expected = torch.tensor([answer["probabilities"] for answer in given])
    assert expected.std(0).min() > 0.01
    folder = export_hugging_face(opened, Folder(str(tmp_path / "export")))
    torch.testing.assert_close(probabilities(folder), expected, rtol=0, atol=1e-5)


def test_unsupported_layouts_are_refused(tmp_path: Path) -> None:
    opened = open_exported(tmp_path, "bert", pooling="mean")
    with refused("model.pooling", "mean", names=["BertForSequenceClassification"]):
        export_hugging_face(opened, Folder(str(tmp_path / "export")))
