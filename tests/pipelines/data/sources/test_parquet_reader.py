"""Rows of Parquet files: read by their bytes, and labels by the names that metadata or dictionaries have."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from raystride.pipelines.config import DataConfig
from raystride.pipelines.data.sources.checking import check_source
from raystride.pipelines.data.sources.faults import FaultError, raise_as_faults
from raystride.pipelines.data.sources.parquet_reader import read_batches
from raystride.pipelines.data.sources.pieces import Piece, Slice
from raystride.pipelines.data.sources.source import open_source
from raystride.pipelines.data.tasks.task import Column
from tests.errors import unreadable
from tests.pipelines.conftest import settings
from tests.pipelines.data.prepare.tasks import Labelled
from tests.pipelines.data.sources.documents import open_documents

LABELLED = (Column("data.column", "text"), Column("data.label_column", "label", "label"))


def read(place: Path, columns: tuple[Column, ...] = LABELLED, **changes: object) -> list[tuple[str, ...]]:
    found = open_documents(DataConfig(source=str(place), **changes), str(place), columns)  # type: ignore[arg-type]
    return [document for part in found.parts for _, document in found.read(part)]


@pytest.fixture
def classes(tmp_path: Path) -> Path:
    """Rows as the library `datasets` writes them."""
    import datasets

    kinds = datasets.ClassLabel(names=["ham", "spam"])
    features = datasets.Features({"text": datasets.Value("string"), "label": kinds, "meta": {"kind": kinds}})
    rows = {"text": ["tea", "gold", "none"], "label": [0, 1, -1], "meta": [{"kind": 1}, {"kind": 0}, {"kind": 0}]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "a.parquet")
    return tmp_path / "a.parquet"


def test_classes_have_their_names_where_they_are_wanted(classes: Path) -> None:
    assert read(classes, on_error="skip") == [("tea", "0"), ("gold", "1"), ("none", "-1")]
    assert read(classes, on_error="skip", class_names=True) == [("tea", "ham"), ("gold", "spam")]
    with unreadable(row=3, column="label"):
        read(classes, class_names=True)
    nested = (LABELLED[0], Column("data.label_column", "meta.kind", "label"))
    assert read(classes, nested, class_names=True) == [("tea", "spam"), ("gold", "ham"), ("none", "ham")]


def test_whole_rows_have_the_names_too(classes: Path) -> None:
    data = DataConfig(source=str(classes), class_names=True)
    source = open_source(data, data.source, LABELLED).keeping_rows()
    (piece,) = source.reader.slices(source.files[0], 1 << 20)
    rows = [item.row for item in source.reader.read(piece) if isinstance(item, Piece)]
    assert [row["label"] for row in rows if row] == ["ham", "spam"]
    assert [row["meta"] for row in rows if row] == [{"kind": 1}, {"kind": 0}]


def test_a_class_without_a_name_is_a_fault(classes: Path) -> None:
    table = parquet.read_table(classes)
    at = table.schema.get_field_index("label")
    table = table.set_column(at, table.schema.field(at), pa.array([0, 7, 1]))
    parquet.write_table(table, classes)
    data = DataConfig(source=str(classes), class_names=True)
    with unreadable(row=2, names=["class 7"]):
        check_source(open_source(data, data.source, LABELLED))
    assert read(classes, class_names=True, on_error="skip") == [("tea", "ham"), ("none", "spam")]


@pytest.mark.parametrize("class_names", [False, True])
def test_dictionaries_give_their_values(tmp_path: Path, class_names: bool) -> None:
    labels = pa.DictionaryArray.from_arrays(pa.array([1, 0, 1], pa.int8()), ["ham", "spam"])
    table = pa.table({"text": ["a", "b", "c"], "label": labels}).replace_schema_metadata({"huggingface": "no json"})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", class_names=class_names) == [("a", "spam"), ("b", "ham"), ("c", "spam")]


def test_only_names_that_are_wanted_ask_for_another_preparation(classes: Path) -> None:
    from raystride.pipelines.data.prepare.fingerprint import identity

    plain, named = (settings(classes, **changes) for changes in ({}, {"class_names": True}))
    assert identity(plain, Labelled(plain)).data != identity(named, Labelled(named)).data


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_rows_are_read_by_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: bool, keep: bool) -> None:
    """Also where the file's own figures are too small: those of equal rows, which it has but once."""
    monkeypatch.setattr("raystride.pipelines.data.sources.parquet_reader.BATCH_BYTES", 100_000)
    texts = [f"{0 if same else number:04d}" + "x" * 10_000 for number in range(100)]
    parquet.write_table(pa.table({"text": texts, "n": range(100)}), tmp_path / "a.parquet", row_group_size=64)
    with parquet.ParquetFile(tmp_path / "a.parquet") as table:
        batches = [batch for group in (0, 1) for _, batch in read_batches(table, group, None, "a")]
    assert [value for batch in batches for value in batch.column("n").to_pylist()] == list(range(100))
    assert max(batch.num_rows for batch in (batches[1:] if same else batches)) <= 40
    source = open_source(DataConfig(), str(tmp_path / "a.parquet"), LABELLED[:1])
    source = source.keeping_rows() if keep else source
    for start, stop in [(0, 100), (7, 93), (63, 65), (10, 11)]:
        found = list(source.reader.read(Slice(source.files[0], start, stop, 0)))
        assert [item.document[0] for item in found if isinstance(item, Piece)] == texts[start:stop]
        assert [item.place.rpartition(" ")[2] for item in found if isinstance(item, Piece)] == [
            str(number + 1) for number in range(start, stop)
        ]
        if keep:
            assert [item.row["n"] for item in found if item.row] == list(range(start, stop))


class Nested:
    """A Parquet file of which Arrow puts no more than so many rows into one batch."""

    def __init__(self, rows: int, most: int) -> None:
        self.rows, self.most = rows, most
        self.asked: list[int] = []

    @property
    def metadata(self) -> Any:
        table = pa.table({"n": range(self.rows)})
        sink = pa.BufferOutputStream()
        parquet.write_table(table, sink, row_group_size=self.rows)
        return parquet.read_metadata(pa.BufferReader(sink.getvalue()))

    def iter_batches(self, batch_size: int, **_: Any) -> Iterator[pa.RecordBatch]:
        self.asked.append(batch_size)
        for first, after in pairwise([*range(0, self.rows, batch_size), self.rows]):
            if after - first > self.most:
                raise pa.ArrowNotImplementedError("Nested data conversions not implemented for chunked array outputs")
            yield pa.RecordBatch.from_pydict({"n": range(first, after)})


@pytest.mark.parametrize("most", [1, 7, 100, 5000])
def test_what_arrow_has_no_batch_for_is_read_in_smaller_ones(most: int) -> None:
    table = Nested(1100, most)
    found = [(first, batch) for first, batch in read_batches(table, 0, None, "a")]
    assert [value for _, batch in found for value in batch.column("n").to_pylist()] == list(range(1100))
    assert [first for first, _ in found] == [batch.column("n")[0].as_py() for _, batch in found]
    assert len(table.asked) <= 11


def test_a_whole_file_is_not_called_broken() -> None:
    with pytest.raises(FaultError) as raised:
        list(read_batches(Nested(5, 0), 0, None, "a.parquet"))
    assert "truncated" not in raised.value.fault.reason
    assert "pyarrow" in raised.value.fault.reason
    for error, word in [(OSError(24, "Too many open files"), "open files"), (pa.ArrowInvalid("is encrypted"), "encrypted")]:
        with pytest.raises(FaultError) as raised, raise_as_faults("a.parquet"):
            raise error
        assert word in raised.value.fault.reason
        assert "truncated" not in raised.value.fault.reason
    with pytest.raises(FaultError) as raised, raise_as_faults("a.parquet"):
        raise pa.ArrowInvalid("Parquet magic bytes not found in footer")
    assert "truncated or broken" in raised.value.fault.reason
    with pytest.raises(MemoryError), raise_as_faults("a.parquet"):
        raise pa.ArrowMemoryError("malloc of size 64 failed")
