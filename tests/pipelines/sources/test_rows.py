"""Labels of Parquet files by the names that their metadata or dictionaries have."""

from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from raystride.pipelines.config import Data
from raystride.pipelines.sources.checking import check_source
from raystride.pipelines.sources.pieces import Piece
from raystride.pipelines.sources.source import open_source
from raystride.pipelines.tasks.task import Column
from tests.errors import unreadable
from tests.pipelines.conftest import settings
from tests.pipelines.prepare.tasks import Labelled
from tests.pipelines.sources.documents import open_documents

LABELLED = (Column("data.column", "text"), Column("data.label_column", "label", "label"))


def read(place: Path, columns: tuple[Column, ...] = LABELLED, **changes: object) -> list[tuple[str, ...]]:
    found = open_documents(Data(source=str(place), **changes), str(place), columns)  # type: ignore[arg-type]
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
    data = Data(source=str(classes), class_names=True)
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
    data = Data(source=str(classes), class_names=True)
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
    from raystride.pipelines.prepare.fingerprint import fingerprint

    plain, named = (settings(classes, **changes) for changes in ({}, {"class_names": True}))
    assert fingerprint(plain, Labelled(plain)) != fingerprint(named, Labelled(named))
