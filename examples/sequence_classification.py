"""A Hugging Face AutoModelForSequenceClassification with its tokenizer, as they are, on texts of varying length.

    python examples/sequence_classification.py distilbert/distilbert-base-uncased questions.jsonl

The file has a `text` and a `label` (0, 1, ...) in each line. The first argument is a model of the hub, or a folder.
"""

import sys
from functools import partial
from typing import Any

import datasets
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerBase

import raystride

Batch = dict[str, Tensor]


def make_model(base: str, num_labels: int) -> nn.Module:
    """The base with a fresh head."""
    return AutoModelForSequenceClassification.from_pretrained(base, num_labels=num_labels)


def collate(tokenizer: PreTrainedTokenizerBase, samples: list[dict[str, Any]]) -> Batch:
    """Pads the texts of a batch to the longest."""
    texts = [str(sample["text"]) for sample in samples]
    batch = tokenizer(texts, truncation=True, padding=True, return_tensors="pt")
    return dict(batch) | {"labels": Tensor([sample["label"] for sample in samples]).long()}


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """The model's own loss, a mean over the texts."""
    return model(**batch).loss


def accuracy(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The share of texts with the right label."""
    return {"accuracy": (model(**batch).logits.argmax(1) == batch["labels"]).float().mean()}


def train(base: str, file: str, **settings: Any) -> raystride.Run:
    """Trains, or resumes the run `texts`."""
    rows = datasets.load_dataset("json", data_files=file, split="train")
    return raystride.fit(
        model=make_model,
        data=rows,
        loss=loss,
        metrics=accuracy,
        collate=partial(collate, AutoTokenizer.from_pretrained(base)),
        settings={
            "fit.model_args": {"base": base, "num_labels": max(rows["label"]) + 1},
            "train.batch": 16,
            "train.epochs": 3,
            "optimizer.learning_rate": 5e-5,
            "data.validation_fraction": 0.1,
            "validation.every": 50,
        }
        | settings,
        run="texts",
        progress=True,
    )


if __name__ == "__main__":
    run = train(*sys.argv[1:])
    print(f"accuracy {run.summary['metrics']['val_accuracy']:.3f}; export: {run.export('hugging_face')}")
