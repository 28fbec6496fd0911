"""Shards as read by Arrow: continued rows are joined, masks begin with the first, and damage is detected."""

import hashlib
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystride.pipelines.data.prepare.hash_list import hash_list_name, is_intact
from raystride.pipelines.data.prepare.manifest import Shard
from raystride.pipelines.data.prepare.shards import ShardWriter
from raystride.pipelines.system.storage.folder import Folder

Row = tuple[int, bool, bool, list[int], list[int] | None]
"""Document, whether it begins and ends here, ids, and the loss mask."""


def table_of(rows: list[Row]) -> pa.Table:
    """Returns the rows as a stage of the preparation passes them on."""
    columns = list(zip(*rows, strict=True)) or [()] * 5
    types = [pa.uint64(), pa.bool_(), pa.bool_(), pa.large_list(pa.uint16()), pa.large_list(pa.uint8())]
    names = ["document", "begins", "ends", "ids", "loss_mask"]
    return pa.table([pa.array(column, of) for column, of in zip(columns, types, strict=True)], names)


def write(folder: Path, *tables: list[Row], name: str = "train/00003.arrow") -> Shard | None:
    """Returns the shard of these rows, written table by table."""
    writer = ShardWriter(pa.uint16(), Folder(str(folder)))
    for rows in tables:
        writer.add(table_of(rows))
    return writer.finish(name)


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the rows, read by Arrow."""
    with pa.ipc.open_file(str(path)) as reader:
        assert reader.num_record_batches == 1
        return list(reader.get_batch(0).to_pylist())


def test_a_document_that_goes_on_is_one_row_and_ends_as_its_last_piece_does(tmp_path: Path) -> None:
    shard = write(
        tmp_path,
        [(4, False, False, [1, 2], None), (4, False, True, [3], None), (5, True, False, [4], None)],
        [(5, False, False, [5, 6], None)],
        [(5, False, True, [7], None), (6, True, False, [8, 9], None)],
    )
    assert shard
    assert read(tmp_path / shard.file) == [
        {"ids": [1, 2, 3], "document": 4, "begins": False, "ends": True},
        {"ids": [4, 5, 6, 7], "document": 5, "begins": True, "ends": True},
        {"ids": [8, 9], "document": 6, "begins": True, "ends": False},
    ]
    assert (shard.tokens, shard.documents, shard.rows, shard.mask_offset) == (9, 2, 3, None)


def test_tokens_without_a_mask_count(tmp_path: Path) -> None:
    shard = write(
        tmp_path,
        [(0, True, True, [1, 2], None)],
        [(1, True, True, [3, 4, 5], None), (2, True, False, [6, 7], [0, 1])],
        [(2, False, True, [8], [0]), (3, True, True, [9], None)],
        [(4, True, True, [10, 11], None)],
    )
    assert shard
    assert [row["loss_mask"] for row in read(tmp_path / shard.file)] == [[1, 1], [1, 1, 1], [0, 1, 0], [1], [1, 1]]


def test_only_the_given_rows_of_a_table_are_written(tmp_path: Path) -> None:
    table = table_of([(number, True, True, [number] * number, [1] * number if number == 3 else None) for number in range(7)])
    for rows, masked in (([0, 2, 4, 5], False), ([1, 3, 6], True), ([], False)):
        writer = ShardWriter(pa.uint16(), Folder(str(tmp_path)))
        writer.add(table.slice(0, 7), np.array(rows, np.int64))
        shard = writer.finish("train/0.arrow")
        assert (shard is not None) == bool(rows)
        if shard:
            found = read(tmp_path / shard.file)
            assert [(row["document"], row["ids"]) for row in found] == [(row, [row] * row) for row in rows]
            assert (shard.mask_offset is not None) == masked


lengths_and_masks = st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=8)


@given(tables=st.lists(lengths_and_masks, min_size=1, max_size=4))
def test_numbers_are_at_the_offsets_of_the_shard(
    tmp_path_factory: pytest.TempPathFactory, tables: list[list[tuple[int, bool]]]
) -> None:
    random, folder, number = np.random.default_rng(0), tmp_path_factory.mktemp("shard"), 0
    rows: list[list[Row]] = []
    for table in tables:
        rows.append([])
        for length, masked in table:
            ids = random.integers(0, 2**16, length).tolist()
            rows[-1].append((number, True, True, ids, random.integers(0, 2, length).tolist() if masked else None))
            number += 1
    shard, every = write(folder, *rows), [row for table in rows for row in table]
    ids = [each for row in every for each in row[3]]
    if not ids:
        assert shard is None
        assert not list(folder.rglob("*.arrow"))
        return
    assert shard
    path = folder / shard.file
    content = path.read_bytes()
    assert (shard.bytes, shard.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert (shard.tokens, shard.rows, shard.documents) == (len(ids), len(every), len(every))
    assert np.frombuffer(content, "<u2", len(ids), shard.ids_offset).tolist() == ids
    starts = np.cumsum([0, *(len(row[3]) for row in every)]).tolist()
    assert np.frombuffer(content, "<i8", len(every) + 1, shard.rows_offset or 0).tolist() == starts
    mask = [counts for row in every for counts in (row[4] if row[4] is not None else [1] * len(row[3]))]
    if any(row[4] is not None for row in every):
        assert np.frombuffer(content, np.uint8, len(ids), shard.mask_offset or 0).tolist() == mask
    else:
        assert shard.mask_offset is None


def test_a_shard_is_the_same_while_its_file_and_its_hash_list_are(tmp_path: Path) -> None:
    shard, folder = write(tmp_path, [(0, True, True, [1, 2, 3], None)]), Folder(str(tmp_path))
    assert shard
    known = vars(shard)
    assert is_intact(folder, known)
    assert not is_intact(folder, known | {"sha256": "0" * 64})
    assert not is_intact(folder, known | {"file": "train/00004.arrow", "top_hash": ""})
    list_of = tmp_path / hash_list_name(shard.file)
    list_of.unlink()
    assert not is_intact(folder, known)
    assert is_intact(folder, known | {"top_hash": ""}), "an older version wrote none"


def test_a_shard_takes_no_memory_by_its_size(tmp_path: Path) -> None:
    writer, count = ShardWriter(pa.uint16(), Folder(str(tmp_path))), 4 << 20
    ids = pa.LargeListArray.from_arrays(pa.array([0, count], pa.int64()), pa.array(np.zeros(count, np.uint16)))
    columns = {"document": [0], "begins": [True], "ends": [True], "ids": ids}
    for _ in range(8):
        writer.add(pa.table(columns | {"loss_mask": pa.nulls(1, pa.large_list(pa.uint8()))}))
    tracemalloc.start()
    shard = writer.finish("a.arrow")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert shard
    assert shard.tokens == 8 * count
    assert peak < count
