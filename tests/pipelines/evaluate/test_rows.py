"""Rows with whatever a table holds are written as they are, or refused with the form that has a place for them."""

import io
import json
from datetime import UTC, datetime
from typing import Any

import pytest
from pyarrow import parquet

from raystride.pipelines.evaluate.rows import rows_writer
from raystride.pipelines.sources.faults import DataError

ROWS: list[dict[str, Any]] = [
    {"n": 1, "when": datetime(2026, 1, 2, tzinfo=UTC), "raw": b"\xff", "none": None, "mixed": 1, "empty": {}},
    {"n": 2, "when": None, "raw": b"", "none": None, "mixed": "x", "empty": {}},
]


def test_parquet_keeps_types_and_makes_several_text() -> None:
    stream = io.BytesIO()
    with rows_writer("parquet", stream, ROWS) as writer:
        writer.write(ROWS)
        writer.write([{"n": None, "none": "late"}])
    found = parquet.read_table(io.BytesIO(stream.getvalue())).to_pylist()
    assert [row["n"] for row in found] == [1, 2, None]
    assert [row["when"] for row in found] == [ROWS[0]["when"], None, None]
    assert [row["mixed"] for row in found] == ["1", "x", None]
    assert [row["none"] for row in found] == [None, None, "late"]
    assert found[0]["raw"] == b"\xff"


def test_parquet_refuses_what_comes_later_by_name() -> None:
    with (
        rows_writer("parquet", io.BytesIO(), ROWS) as writer,
        pytest.raises(DataError, match=r"column 'n' .*--format jsonl"),
    ):
        writer.write([{"n": "three"}])


def test_json_lines_take_all() -> None:
    stream = io.BytesIO()
    with rows_writer("jsonl", stream, ROWS) as writer:
        writer.write(ROWS)
    found = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert found[0] == {"n": 1, "when": "2026-01-02 00:00:00+00:00", "raw": "/w==", "none": None, "mixed": 1, "empty": {}}
