"""Rows with any values of a table are written unchanged, or refused with the format that supports them."""

import csv
import io
import json
import math
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pyarrow import parquet

from raystride.pipelines.data.sources.parquet_reader import BATCH_BYTES, BatchRow
from raystride.pipelines.evaluate.rows import (
    CHUNK_ROWS,
    Row,
    infer_schema,
    open_writer,
    pack_schema,
    split_chunks,
    storable_schema,
    to_json,
    unify,
    unpack_schema,
)
from tests.errors import unreadable

ROWS: list[dict[str, Any]] = [
    {"n": 1, "when": datetime(2026, 1, 2, tzinfo=UTC), "raw": b"\xff", "none": None, "mixed": 1, "empty": {}, "big": 2**63},
    {"n": 2, "when": None, "raw": b"", "none": None, "mixed": "x", "empty": {}, "big": 1, "half": "\ud800", "huge": 10**400},
]


def write_all(rows: list[Row], schema: Any = None, form: str = "parquet") -> bytes:
    stream = io.BytesIO()
    with open_writer(form, stream, schema) as writer:  # type: ignore[arg-type]
        writer.write(rows)
    return stream.getvalue()


def read_back(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    schema = storable_schema(infer_schema(rows))
    found: list[dict[str, Any]] = parquet.read_table(
        io.BytesIO(write_all([Row({}, row) for row in rows], schema))
    ).to_pylist()
    return found


def test_parquet_has_a_type_for_all_values_of_a_column() -> None:
    found = read_back([*ROWS, {"n": None, "none": "late", "late": 1.5}])
    assert [row["n"] for row in found] == [1, 2, None]
    assert [row["when"] for row in found] == [ROWS[0]["when"], None, None]
    assert [row["mixed"] for row in found] == ["1", "x", None]
    assert [row["none"] for row in found] == [None, None, "late"]
    assert [row["late"] for row in found] == [None, None, 1.5]
    assert [row["big"] for row in found] == [2**63, 1, None]
    assert (found[0]["raw"], found[0]["empty"], found[1]["huge"]) == (b"\xff", "{}", str(10**400))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text("ab\ud800ü", max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("xyz"), inner, max_size=2),
    max_leaves=6,
)


@given(rows=st.lists(st.dictionaries(st.sampled_from("abc"), VALUES, min_size=1), min_size=1, max_size=8))
@hypothesis_settings(max_examples=150, deadline=None)
def test_any_rows_are_written(rows: list[dict[str, Any]]) -> None:
    found = read_back(rows)
    assert len(found) == len(rows)
    for row, other in zip(rows, found, strict=True):
        for name, value in row.items():
            assert (other[name] is None) == (value is None), "no value comes or goes"
    lines = write_all([Row({}, row) for row in rows], form="jsonl").splitlines()
    assert len([json.loads(line, parse_constant=pytest.fail) for line in lines]) == len(rows)


def test_parquet_refuses_unsupported_values_by_name() -> None:
    schema = pa.schema([("n", pa.int64())])
    with unreadable(column="n", settings=("format",), names=["--format jsonl"]):
        write_all([Row({}, {"n": "three"})], schema)
    with unreadable(settings=("format",), names=["--format jsonl"]):
        write_all([Row({}, {"n": None})], pa.schema([("n", pa.month_day_nano_interval())]))


def test_json_lines_take_all() -> None:
    found = json.loads(write_all([Row({}, ROWS[0])], form="jsonl"))
    wanted = {
        "n": 1,
        "when": "2026-01-02 00:00:00+00:00",
        "raw": "/w==",
        "none": None,
        "mixed": 1,
        "empty": {},
        "big": 2**63,
    }
    assert found == wanted


def test_csv_is_read_back_by_others_as_it_was() -> None:
    rows = [
        {
            "text": 'a "quoted", line\nand more',
            "n": 1,
            "x": 0.1,
            "yes": True,
            "all": {"a": 0.5},
            "raw": b"\xff",
            "when": ROWS[0]["when"],
        },
        {"text": "", "n": None, "x": math.nan, "yes": None, "all": None, "raw": None, "when": None},
    ]
    schema = storable_schema(infer_schema(rows))
    written = write_all([Row({}, row) for row in rows], schema, "csv")
    first, second = csv.DictReader(io.StringIO(written.decode(), newline=""))
    expected = {"text": rows[0]["text"], "n": "1", "x": "0.1", "yes": "true", "all": '{"a": 0.5}', "raw": "/w=="}
    assert first == expected | {"when": "2026-01-02 00:00:00+00:00"}
    assert set(second.values()) == {""}
    table = pa.Table.from_pylist(rows, schema)
    batch = table.to_batches()[0]
    of_arrow = [Row({"prediction": "x"}, BatchRow(batch, number)) for number in range(2)]
    whole = pa.schema([*schema, pa.field("prediction", pa.string())])
    assert [row | {"prediction": "x"} for row in (first, second)] == [
        *csv.DictReader(io.StringIO(write_all(of_arrow, whole, "csv").decode(), newline=""))
    ]


def test_half_a_surrogate_pair_stays() -> None:
    (line,) = write_all([Row({}, {"x": "a\ud800ü"})], form="jsonl").splitlines()
    assert json.loads(line) == {"x": "a\ud800ü"}
    assert read_back([{"x": "a\ud800ü"}]) == [{"x": "a\\ud800ü"}]


def test_json_has_null_for_numbers_that_it_does_not_know() -> None:
    value = {"a": math.nan, "b": [1.5, math.inf, {"c": -math.inf}], "d": (math.nan, "NaN")}
    assert json.loads(to_json(value)) == {"a": None, "b": [1.5, None, {"c": None}], "d": [None, "NaN"]}


NS = 1_700_000_000_123_456_789
ARROW = pa.table(
    {
        "text": pa.array(["a", None, "c"], pa.large_string()),
        "when": pa.array([NS, None, 1], pa.timestamp("ns")),
        "zone": pa.array([NS, None, 1], pa.timestamp("ns", "Europe/Berlin")),
        "time": pa.array([1, None, 2], pa.time64("ns")),
        "took": pa.array([1, None, 2], pa.duration("ns")),
        "half": pa.array([0.5, None, math.nan], pa.float32()),
        "money": pa.array(["1.10", None, "2.00"], pa.string()).cast(pa.decimal128(10, 2)),
        "map": pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int8())),
        "big": pa.array([2**64 - 1, None, 0], pa.uint64()),
        "kind": pa.array(["x", None, "x"]).dictionary_encode(),
        "nested": pa.array([[{"n": 1}], None, []], pa.list_(pa.struct([("n", pa.uint16())]))),
        "nothing": pa.nulls(3),
    }
)


def rows_from_table(table: pa.Table) -> Iterator[Row]:
    for batch in table.to_batches(max_chunksize=2):
        for index in range(batch.num_rows):
            yield Row({"prediction": "p"}, BatchRow(batch, index))


def test_rows_of_arrow_keep_their_types() -> None:
    schema = pa.schema([*ARROW.schema, ("prediction", pa.string())])
    found = parquet.read_table(io.BytesIO(write_all(list(rows_from_table(ARROW)), schema)))
    assert found.schema == schema
    for name in ARROW.column_names:
        assert repr(found[name].to_pylist()) == repr(ARROW[name].to_pylist())


def test_rows_of_arrow_as_json_lines_lose_nothing() -> None:
    first, second, third = (json.loads(line) for line in write_all(list(rows_from_table(ARROW)), form="jsonl").splitlines())
    assert first["when"].endswith(".123456789")
    assert first["time"] == "00:00:00.000000001"
    assert (first["map"], first["big"], first["money"], first["prediction"]) == ({"k": 1}, 2**64 - 1, "1.10", "p")
    assert set(second.values()) == {None, "p"}
    assert third["half"] is None


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        (pa.array([10**18], pa.timestamp("us")), "<value out of range: 1000000000000000000>"),
        (pa.array([{"t": [1]}], pa.struct([("t", pa.list_(pa.time64("ns")))])), {"t": ["00:00:00.000000001"]}),
        (pa.array([[("k", 1), ("k", 2)]], pa.map_(pa.string(), pa.int8())), [["k", 1], ["k", 2]]),
        (pa.array([[(b"k", 1)]], pa.map_(pa.binary(), pa.int8())), [["aw==", 1]]),
        (pa.array([[(1, 2)]], pa.map_(pa.int8(), pa.int8())), {"1": 2}),
        (pa.array([b"\xff"], pa.binary(1)), "/w=="),
    ],
)
def test_json_has_a_form_for_all_of_arrow(values: pa.Array, wanted: Any) -> None:
    (line,) = write_all(list(rows_from_table(pa.table({"x": values}))), form="jsonl").splitlines()
    assert json.loads(line)["x"] == wanted


def test_files_of_other_schemas_get_one() -> None:
    must = pa.field("a", pa.int64(), nullable=False)
    first = pa.schema([must, ("b", pa.null()), ("c", pa.int8()), ("t", pa.timestamp("us"))])
    second = pa.schema([must, ("b", pa.string()), ("c", pa.string()), ("d", pa.uint64()), ("t", pa.timestamp("ns"))])
    found = unify([first, second])
    assert {column.name: column.type for column in found} == {
        "a": pa.int64(), "b": pa.string(), "c": pa.string(), "t": pa.timestamp("ns"), "d": pa.uint64()}  # fmt: skip
    assert [column.nullable for column in found] == [False, True, True, True, True]
    assert unpack_schema(pack_schema(found)) == found


@given(st.lists(st.lists(st.sampled_from("abc"), unique=True), min_size=1, max_size=4))
def test_a_column_that_any_of_the_files_lacks_may_be_empty(files: list[list[str]]) -> None:
    schemas = [pa.schema([pa.field(name, pa.int64(), nullable=False) for name in names]) for names in files]
    assert {column.name: column.nullable for column in unify(schemas)} == {
        name: any(name not in names for names in files) for names in files for name in names
    }


def test_large_rows_are_written_a_few_at_a_time() -> None:
    rows = [Row({"n": number}) for number in range(2 * CHUNK_ROWS + 1)]
    assert [len(chunk) for chunk in split_chunks(rows)] == [CHUNK_ROWS, CHUNK_ROWS, 1]

    class Batch:
        nbytes = BATCH_BYTES

    batches = [Batch() for _ in range(5)]
    large = [Row({}, BatchRow(batch, index)) for batch in batches for index in range(3)]
    assert [len(chunk) for chunk in split_chunks(large)] == [6, 6, 3]


@given(st.lists(st.tuples(st.sampled_from("ab-"), st.integers(0, 5)), min_size=1, max_size=12))
@hypothesis_settings(deadline=None)
def test_any_rows_of_two_batches_and_of_none_come_out_as_they_are(chosen: list[tuple[str, int]]) -> None:
    """Rows that were left out, that come twice or in another order, and rows that are no batch's."""
    batches = {name: pa.record_batch({"text": [f"{name}{number}" for number in range(6)]}) for name in "ab"}
    rows = [
        Row({"prediction": number}, {"text": f"-{index}"} if name == "-" else BatchRow(batches[name], index))
        for number, (name, index) in enumerate(chosen)
    ]
    wanted = [{"text": f"{name}{index}", "prediction": number} for number, (name, index) in enumerate(chosen)]
    assert [json.loads(line) for line in write_all(rows, form="jsonl").splitlines()] == wanted
    schema = pa.schema([("text", pa.string()), ("prediction", pa.int64())])
    assert parquet.read_table(io.BytesIO(write_all(rows, schema))).to_pylist() == wanted
