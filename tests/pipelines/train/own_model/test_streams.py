"""A stream's rows are written once, read like any data, and are refused where a table cannot hold them."""

import itertools
import pickle
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

import raystride
from raystride.pipelines.data.feed.verification import BesideTraining
from raystride.pipelines.data.sources.faults import DataError
from raystride.pipelines.launch.console.exit_codes import WRONG_SETTINGS, run_with_exit_code
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.own_model import streams
from raystride.pipelines.train.own_model.streams import FOLDER, StoredRows, is_stream, store_stream
from tests.flips import flip_bit
from tests.pipelines.data.feed.far import far_folder

COUNT = 2500  # more than two batches of rows


def make_rows() -> Iterator[dict[str, Any]]:
    """Rows of every kind of value."""
    for i in range(COUNT):
        ids = np.arange(i % 5, dtype=np.int32)
        yield {"i": i, "x": np.float32(i / 3), "ids": ids, "image": torch.full((2, 3), i), "text": f"{i}", "list": [i, i]}


class Rows(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[dict[str, Any]]:
        return make_rows()


def _open(tmp_path: Path, stream: Any) -> Any:
    return store_stream(stream, Folder(str(tmp_path)))


@pytest.mark.parametrize("stream", [make_rows, make_rows(), Rows()], ids=["function", "generator", "dataset"])
def test_rows_are_those_of_the_stream(tmp_path: Path, stream: Any) -> None:
    assert is_stream(stream)
    rows = _open(tmp_path, stream)
    rows = pickle.loads(pickle.dumps(rows))
    assert len(rows) == COUNT
    expected = list(make_rows())
    for i in (0, 4, 1023, 1024, COUNT - 1):
        row, wanted = rows[i], expected[i]
        assert (row["i"], row["x"], row["text"]) == (wanted["i"], wanted["x"], wanted["text"])
        assert row["ids"].tolist() == wanted["ids"].tolist()
        assert row["image"].tolist() == wanted["image"].tolist()
        assert np.asarray(row["list"]).tolist() == wanted["list"]
        assert np.asarray(row["x"]).dtype == np.float32


def test_the_same_rows_are_stored_once(tmp_path: Path) -> None:
    assert _open(tmp_path, make_rows).name == _open(tmp_path, Rows()).name
    assert _open(tmp_path, iter([{"a": 1}, {"a": 2}])).name != _open(tmp_path, iter([{"a": 1}, {"a": 3}])).name
    assert len(list((tmp_path / FOLDER).glob("*.arrow"))) == 3


def test_a_stream_is_held_in_memory_by_bytes(tmp_path: Path) -> None:
    """A thousand rows of a MiB are not."""
    rows = ({"x": np.zeros(2**18, np.float32)} for _ in range(130))
    assert [len(columns["x"]) for columns in streams._iterate_batches(rows)] == [64, 64, 2]


def test_an_endless_stream_is_refused_before_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk of 100 MiB with 20 MiB free, less what is written; the progress is said."""
    monkeypatch.setattr(streams, "BATCH_BYTES", 2**20)
    monkeypatch.setattr(streams, "LOG_S", 0.0)

    def usage(folder: Any) -> Any:
        written = sum(each.stat().st_size for each in Path(folder).iterdir())
        return shutil._ntuple_diskusage(100 << 20, (80 << 20) + written, (20 << 20) - written)  # type: ignore[attr-defined]

    monkeypatch.setattr(shutil, "disk_usage", usage)
    said: list[str] = []
    endless = ({"x": np.zeros(2**17, np.float32)} for _ in itertools.count())
    with pytest.raises(DataError, match=r"^\d+ rows of the stream, \d+ MiB, are written, and the disk of .* TMPDIR"):
        store_stream(endless, Folder(str(tmp_path)), said.append)
    assert re.fullmatch(r"data: 1\d rows of the stream, \d MiB, are written so far", said[-1])
    assert not (tmp_path / FOLDER).exists()


def test_a_stored_stream_of_other_content_is_stored_anew(tmp_path: Path) -> None:
    stored = _open(tmp_path, make_rows)
    file = tmp_path / FOLDER / stored.name
    content = file.read_bytes()
    flip_bit(file, len(content) // 2)
    assert _open(tmp_path, make_rows).name == stored.name
    assert file.read_bytes() == content


def test_a_changed_stream_on_a_store_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    name = _open(tmp_path, make_rows).name
    assert len(StoredRows(far_folder(tmp_path / FOLDER), name)) == COUNT
    flip_bit(tmp_path / FOLDER / name, (tmp_path / FOLDER / name).stat().st_size // 2)
    with pytest.raises(DataError, match=f"{name}: its bytes, from 0 on, are not what was stored"):
        len(StoredRows(far_folder(tmp_path / FOLDER), name))


def test_a_node_hashes_a_stream_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYSTRIDE_CACHE", str(tmp_path / "cache"))
    stored = _open(tmp_path, make_rows)
    for expected in ((tmp_path / FOLDER / stored.name).stat().st_size, 0):
        beside = BesideTraining()
        stored.verify(beside)
        beside.finish()
        assert beside.hashed_bytes == expected


@pytest.mark.parametrize("data", [[1], {"a": [1]}, lambda: [1], np.ones(3), torch.utils.data.TensorDataset(torch.ones(2))])
def test_what_can_be_indexed_is_no_stream(data: Any) -> None:
    assert not is_stream(data)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "data is a stream without rows"),
        ([{"a": 1}, (1, 2)], "row 1 of the stream is a tuple: yield mappings"),
        ([{"a": 1}, {"b": 2}], "row 1 of the stream has the columns b, others a"),
        ([{"a": object()}], "column 'a' of rows 0 to 0 of the stream cannot be stored"),
        ([{"a": i} for i in range(1024)] + [{"b": 1}], "row 1024 of the stream has the columns b, those before a"),
        (
            [{"a": i} for i in range(1024)] + [{"a": "b"}],
            "column 'a' of rows 1024 to 1024 of the stream cannot be stored, whe",
        ),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_what_a_table_cannot_hold_is_refused(tmp_path: Path, rows: list[Any], words: str) -> None:
    with pytest.raises(DataError) as raised:
        _open(tmp_path, iter(rows))
    assert words in str(raised.value)


def test_a_training_on_a_stream_says_where_its_rows_are_and_goes_on_with_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts: dict[str, Any] = {
        "model": lambda: torch.nn.Linear(1, 1),
        "loss": lambda model, batch: ((model(batch["x"][:, None]) - 2 * batch["x"][:, None]) ** 2).mean(),
    }
    settings = {"launch": "inline", "record.mlflow": False, "train.batch": 8, "train.steps": 4, "scaling.threads": 1}
    run = raystride.fit(
        data=({"x": np.float32(i % 7)} for i in range(64)),
        settings=settings,
        run="s",
        storage=tmp_path,
        progress=True,
        **parts,
    )
    assert f"data: the 64 rows of a generator are written to {tmp_path / FOLDER}" in capsys.readouterr().out
    assert run.summary["steps"] == 4
    longer = settings | {"train.steps": 6}
    again = raystride.fit(
        data=({"x": np.float32(i % 7)} for i in range(64)), settings=longer, run="s", storage=tmp_path, **parts
    )
    assert again.summary["resumed_from"] == 4
    with pytest.raises(raystride.SettingError, match="train"):
        raystride.fit(
            data=({"x": np.float32(i)} for i in range(65)),
            settings=longer,
            run="s",
            storage=tmp_path,
            **parts,
        )


def test_a_training_on_a_changed_stream_ends_before_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYSTRIDE_CACHE", str(tmp_path / "cache"))
    stored = store_stream(({"x": np.float32(i % 7)} for i in range(5000)), Folder(str(tmp_path)))
    file = tmp_path / FOLDER / stored.name
    flip_bit(file, file.stat().st_size // 2)
    settings = {"launch": "inline", "record.mlflow": False, "train.batch": 8, "train.steps": 4, "checkpoint.every": 2}

    def train() -> int:
        raystride.fit(
            lambda: torch.nn.Linear(1, 1),
            stored,
            lambda model, batch: model(batch["x"][:, None]).square().mean(),
            settings=settings | {"scaling.threads": 1},
            run="changed",
            storage=tmp_path,
            progress=True,
        )
        return 0

    assert run_with_exit_code(train) == WRONG_SETTINGS
    screen = capsys.readouterr().err
    assert f"{file}: its bytes, from 0 on, are not what was stored" in screen
    assert "everything up to the newest checkpoint is kept" in screen
    assert raystride.Run.open("changed", tmp_path).checkpoints == []
    flip_bit(file, file.stat().st_size // 2)
    assert train() == 0
