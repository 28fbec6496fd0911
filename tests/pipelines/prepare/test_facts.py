"""What a task learns of the data is learned once, before anything is encoded, and is part of what a preparation is."""

import gzip
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raystride.pipelines.config import Tokenizer
from raystride.pipelines.prepare.fingerprint import fingerprint
from raystride.pipelines.tasks.task import Column, Document, Facts
from tests.pipelines.conftest import rows, settings
from tests.pipelines.prepare.tasks import TINY, Labelled, Pictures, as_csv, as_json, made


def test_a_task_of_examples_gets_long_files_whole(tmp_path: Path) -> None:
    class Whole(Labelled):
        surveyed = False

        @property
        def columns(self) -> tuple[Column, ...]:
            return super().columns[:1]

        def learn(self, surveys: Sequence[Facts]) -> Facts:
            return {"vocabulary_size": 257, "end_id": 256, "labels": ["long"]}

        def encode(self, document: Document) -> tuple[np.ndarray, None]:
            return self.encoders["tokenizer"].encode(document[0]), None

    texts = ["".join(f"{n} line {i}\n" for i in range(150_000)) for n in range(3)]
    for number, text in enumerate(texts[:2]):
        (tmp_path / f"{number}.txt").write_text(text)
    (tmp_path / "2.txt.gz").write_bytes(gzip.compress(texts[2].encode(), 1))
    config = settings(tmp_path, shard_mib=0.1, validation="tail", validation_fraction=0.5)
    result = made(Whole, config, tmp_path / "runs")
    found = [bytes(row["ids"]).decode() for split in ("train", "validation") for row in rows(result, split)]
    assert found == texts


class Interrupted(Labelled):
    """Breaks down while encoding, and counts surveys."""

    surveys = 0
    broken = True

    def survey(self, documents: Iterable[Document]) -> Facts:
        type(self).surveys += 1
        return super().survey(documents)

    def encode(self, document: Document) -> tuple[np.ndarray, None]:
        if self.broken and document[0].startswith("text 150:"):
            raise MemoryError
        return super().encode(document)


def test_an_interrupted_preparation_does_not_survey_again(tmp_path: Path) -> None:
    config = settings(as_json(tmp_path), shard_mib=TINY, validation_fraction=0.2)
    with pytest.raises(MemoryError):
        made(Interrupted, config, tmp_path / "runs")
    surveys = Interrupted.surveys
    Interrupted.broken = False
    result = made(Interrupted, config, tmp_path / "runs")
    assert Interrupted.surveys == surveys > 3
    assert result.manifest == made(Labelled, config, tmp_path / "whole").manifest


def test_the_fingerprint_knows_the_columns_and_the_task(tmp_path: Path) -> None:
    class Shaped(Labelled):
        def shaped_by(self) -> dict[str, Any]:
            return {"longest": 7}

    config = settings(as_csv(tmp_path))
    data = config.data
    same = [config, replace(config, data=replace(data, target_column="other", test_source="x", encoding="utf8"))]
    other = [
        config,
        replace(config, data=replace(data, column="n")),
        replace(config, data=replace(data, label_column="n")),
        replace(config, data=replace(data, encoding="latin-1")),
        replace(config, tokenizer=Tokenizer(kind="characters")),
    ]
    assert len({fingerprint(each, Labelled(each)) for each in same}) == 1
    found = {fingerprint(each, Labelled(each)) for each in other}
    assert len(found | {fingerprint(config, Shaped(config)), fingerprint(config, Pictures(config))}) == 7


def test_numbers_that_are_out_of_bounds_are_a_defect(tmp_path: Path) -> None:
    class Narrow(Labelled):
        ids = 100

    with pytest.raises(RuntimeError, match=r"example holds \d+, but its numbers must be below `ids`, 100"):
        made(Narrow, settings(as_csv(tmp_path)), tmp_path / "runs")


@pytest.mark.usefixtures("ray_cluster")
def test_on_ray_labels_are_the_same(tmp_path: Path) -> None:
    config = settings(as_csv(tmp_path), shard_mib=TINY, validation_fraction=0.2)
    alone, cluster = (made(Labelled, config, tmp_path / str(ray), on_ray=ray) for ray in (False, True))
    assert cluster.manifest == alone.manifest
