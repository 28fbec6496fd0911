"""Documents of another source that are also in training are counted by their hashes, also long after the preparation."""

from pathlib import Path

import numpy as np
import pytest

from raystride.pipelines.config import Config, DataConfig
from raystride.pipelines.data.prepare import document_hashes
from raystride.pipelines.data.prepare.document_hashes import (
    FILE,
    DocumentHashes,
    Shared,
    hash_document,
    merge_hashes,
    put_part_hashes,
    read_hashes,
)
from raystride.pipelines.data.prepare.one_source import prepare_source
from raystride.pipelines.data.prepare.run_context import RunContext
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.system.storage.folder import Folder
from tests.tiny import tiny


def _prepare(config: Config) -> tuple[Folder, list[str]]:
    lines: list[str] = []
    context = RunContext(config, Folder(config.storage), log=lines.append)
    return prepare_source(context, build_task(config), on_ray=False).folder, lines


def _lines(tmp_path: Path, **data: object) -> Config:
    texts = [f"document {i} " * 20 for i in range(100)]
    (tmp_path / "a.txt").write_text("\n".join(texts[:80]))
    (tmp_path / "b.txt").write_text("\n".join(texts[70:]))
    return tiny(
        tmp_path / "a.txt",
        storage=str(tmp_path / "runs"),
        data=DataConfig(source=str(tmp_path / "a.txt"), kind="lines", **data),
    )  # type: ignore[arg-type]


def test_documents_of_validation_that_are_in_training_are_said(tmp_path: Path) -> None:
    config = _lines(tmp_path, validation="source", validation_source=str(tmp_path / "b.txt"))
    folder, lines = _prepare(config)
    assert f"data: 10 of 30 documents of {tmp_path / 'b.txt'} are also in training" in lines
    known = read_hashes(folder)
    assert known is not None
    assert len(known.hashes) == 80
    assert not (folder / document_hashes.PARTS).names()
    (tmp_path / "b.txt").write_text("\n".join(f"another {i}" for i in range(30)))
    assert not [line for line in _prepare(config)[1] if "also in training" in line]


def test_documents_are_the_same_by_their_beginning_whatever_their_pieces(tmp_path: Path) -> None:
    long = "word " * 500_000
    (tmp_path / "d").mkdir()
    for name, text in (("a", long), ("b", "other " * 9000), ("c", long + "more")):
        (tmp_path / f"d/{name}.txt").write_text(text)
    folder, _ = _prepare(
        tiny(
            tmp_path / "d",
            storage=str(tmp_path / "runs"),
            data=DataConfig(source=str(tmp_path / "d"), shard_mib=0.1, validation="tail"),
        )
    )
    known = read_hashes(folder)
    assert known is not None
    assert {hash_document(long[:4096]), hash_document(("other " * 9000)[:4096])} == set(known.hashes.tolist())


def test_of_many_documents_a_sample_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_hashes, "MAX_HASHES", 1100)
    folder, hashes = Folder(str(tmp_path)), np.array([hash_document(str(i)) for i in range(10_000)], np.uint64)
    put_part_hashes(folder, 0, hashes[:4000], hashes[:0])
    put_part_hashes(folder, 1, hashes[4000:8000], hashes[7000:])
    found = merge_hashes(folder, [0, 1])
    assert found is not None
    known, validation = found
    assert 900 < len(known.hashes) <= 1100
    assert known.step == 8
    counted = known.count_shared(validation)
    assert 300 < counted.documents < 450
    assert abs(counted.shared / counted.documents - 1 / 3) < 0.1
    assert np.array_equal(read_hashes(folder).hashes, known.hashes)  # type: ignore[union-attr]


def test_what_an_earlier_version_prepared_says_nothing(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    assert read_hashes(folder) is None
    put_part_hashes(folder, 0, np.zeros(1, np.uint64), np.zeros(0, np.uint64))
    assert merge_hashes(folder, [0, 1]) is None
    assert merge_hashes(folder, [0]) is not None
    folder.put(FILE, b"12345678")
    assert read_hashes(folder) is None
    assert DocumentHashes(np.zeros(1, np.uint64), 1).count_shared(np.zeros(3, np.uint64)) == Shared(3, 3)
