"""Minimal tasks with several columns, and files of labelled texts for them.

result = made(Labelled, settings(as_csv(folder)), storage)
pairs(result)                                             # [('text 0: "naïve", 日本語', "ham"), ...]
"""

import csv
import json
from base64 import b64decode
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raystride.pipelines.config import Config
from raystride.pipelines.data.prepare.one_source import PreparedData
from raystride.pipelines.data.prepare.prepare import prepare
from raystride.pipelines.data.prepare.run_context import RunContext
from raystride.pipelines.data.tasks.task import Column, Document, Facts, Task
from raystride.pipelines.data.tokenizers import load_tokenizer
from raystride.pipelines.system.storage.folder import Folder
from tests.pipelines.conftest import rows

LABELS = ("ham", "spam", "7", "true")
ROWS = [(f'text {i}: "naïve", 日本語', LABELS[i % 4]) for i in range(200)]
TINY = 0.002  # MiB a shard, so that small files are cut into many parts


class Labelled(Task):
    """A label's number, and the bytes of a text."""

    surveyed = True

    @property
    def columns(self) -> tuple[Column, ...]:
        data = self.config.data
        return Column("data.column", data.column), Column("data.label_column", data.label_column, "label")

    @property
    def ids(self) -> int:
        return max(int(self.facts["vocabulary_size"]), len(self.facts["labels"]))

    def survey(self, documents: Iterable[Document]) -> Facts:
        return {"labels": sorted({label for _, label in documents})}

    def learn(self, surveys: Sequence[Facts]) -> Facts:
        labels = sorted({label for survey in surveys for label in survey["labels"]})
        return {**super().learn(surveys), "labels": labels}

    def encode(self, document: Document) -> tuple[np.ndarray, None]:
        if "(unreadable)" in document[0]:
            raise ValueError("is unreadable")
        return np.append(self.facts["labels"].index(document[1]), self.encoders["tokenizer"].encode(document[0])), None


class Pictures(Labelled):
    """A label's number, and the bytes of an image, without a tokenizer."""

    tokenizers = ()

    @property
    def columns(self) -> tuple[Column, ...]:
        return Column("data.image_column", "image", "image"), Column("data.label_column", "label", "label")

    @property
    def ids(self) -> int:
        return 256

    def learn(self, surveys: Sequence[Facts]) -> Facts:
        return {"labels": sorted({label for survey in surveys for label in survey["labels"]})}

    def encode(self, document: Document) -> tuple[np.ndarray, None]:
        content = b64decode(document[0].partition(",")[2])
        return np.append(self.facts["labels"].index(document[1]), np.frombuffer(content, np.uint8)), None


class Pairs(Task):
    """The bytes of two texts, each with its own tokenizer."""

    tokenizers = ("source_tokenizer", "target_tokenizer")

    @property
    def columns(self) -> tuple[Column, ...]:
        data = self.config.data
        return Column("data.column", data.column), Column("data.target_column", data.target_column)

    def texts(self, document: Document, tokenizer: str) -> Iterable[str]:
        return [document[self.tokenizers.index(tokenizer)]]

    def encode(self, document: Document) -> tuple[np.ndarray, np.ndarray]:
        first, second = (self.encoders[name].encode(text) for name, text in zip(self.tokenizers, document, strict=True))
        end = self.encoders["source_tokenizer"].end_id
        return np.concatenate([first, [end], second]), np.arange(len(first) + 1 + len(second)) > len(first)


def made(
    kind: type[Task], config: Config, storage: Path, *, on_ray: bool = False, log: Callable[[str], None] = lambda _: None
) -> PreparedData:
    return prepare(RunContext(config, Folder.from_uri(str(storage)), log=log), kind(config), on_ray=on_ray)


def pairs(result: PreparedData) -> list[tuple[str, str]]:
    """Returns the texts and labels of examples, training first."""
    encoder, labels = load_tokenizer(result.folder / "tokenizer"), result.manifest.facts["labels"]
    ids = [row["ids"] for split in ("train", "validation") for row in rows(result, split)]
    return [(encoder.decode(rest), labels[label]) for label, *rest in ids]


def as_json(folder: Path) -> Path:
    values: dict[str, Any] = {"7": 7, "true": True}
    lines = [json.dumps({"n": 1, "label": values.get(label, label), "text": text}) for text, label in ROWS]
    (folder / "rows.jsonl").write_text("\n".join([*lines, '{"text": null, "label": ""}']))
    return folder / "rows.jsonl"


def as_csv(folder: Path) -> Path:
    with (folder / "rows.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([["n", "label", "text"], *([1, label, text] for text, label in ROWS)])
    return folder / "rows.csv"


def as_parquet(folder: Path) -> Path:
    texts, labels = zip(*ROWS, strict=True)
    table = pa.table({"label": labels, "big": ["x" * 99] * len(ROWS), "text": texts})
    pq.write_table(table, folder / "rows.parquet", row_group_size=30)
    return folder / "rows.parquet"


def as_dataset(folder: Path) -> Path:
    import datasets

    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=list(LABELS))})
    texts, labels = zip(*ROWS, strict=True)
    values = {"text": texts, "label": [LABELS.index(label) for label in labels]}
    given = datasets.Dataset.from_dict(values, features=features)
    datasets.DatasetDict(train=given, test=given.select(range(40))).save_to_disk(folder / "saved")
    return folder / "saved"


def as_lines(folder: Path) -> Path:
    lines = [f"__label__{label} {text}" if number % 2 else f"{label}\t{text}" for number, (text, label) in enumerate(ROWS)]
    (folder / "rows.txt").write_text("\n".join(lines))
    return folder / "rows.txt"


def as_folders(folder: Path) -> Path:
    for number, (text, label) in enumerate(ROWS):
        (folder / label).mkdir(exist_ok=True)
        (folder / label / f"{number}.txt").write_text(text)
    (folder / "README").write_text("is no document")
    return folder
