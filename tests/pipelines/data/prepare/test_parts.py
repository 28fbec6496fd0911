"""A source is divided into parts of about equal text, for any sizes of files, and each piece is in exactly one."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raystride.pipelines.config import DataConfig
from raystride.pipelines.data.prepare import parts as parts_module
from raystride.pipelines.data.prepare.parts import (
    divide_into_parts,
    divide_without_validation,
    read_part_items,
    sample_documents,
    sample_slices,
    target_part_bytes,
)
from raystride.pipelines.data.sources.faults import Fault
from raystride.pipelines.data.sources.pieces import File, Piece, Slice
from raystride.pipelines.data.sources.source import Source, open_source
from raystride.pipelines.data.sources.text import TextReader
from raystride.pipelines.data.tasks.task import Column

LINES = [f"line {number} of the text\n" for number in range(4000)]


@pytest.fixture
def source(tmp_path: Path) -> Source:
    """Four files of some 24 kB."""
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text("".join(LINES[1000 * number :][:1000]))
    return open_source(_data(tmp_path), str(tmp_path), (Column("data.column", "text"),))


def _data(path: Path, **changes: object) -> DataConfig:
    return DataConfig(source=str(path), kind="text", shard_mib=8 / 1024, **changes)  # type: ignore[arg-type]


def _text(source: Source, parts: object) -> str:
    items = [item for part in parts for item in read_part_items(source.reader, part)]  # type: ignore[attr-defined]
    assert all(isinstance(item, Piece) for item in items)
    return "".join(item.document[0] for item in items if isinstance(item, Piece))


@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.3337])
def test_a_tail_is_the_end_of_the_text_and_both_have_all_of_it(source: Source, tmp_path: Path, fraction: float) -> None:
    found = divide_into_parts(source, None, _data(tmp_path, validation="tail", validation_fraction=fraction))
    assert [part.number for part in found] == list(range(len(found)))
    total = sum(len(line) for line in LINES)
    assert sum(part.bytes for part in found) == total
    front, tail = ([part for part in found if part.split == split] for split in ("train", "validation"))
    assert found == (*front, *tail)
    assert abs(sum(part.bytes for part in tail) - fraction * total) <= 4
    assert _text(source, front) + _text(source, tail) == "".join(LINES)
    assert max(part.bytes for part in found) <= 1.5 * target_part_bytes(total, _data(tmp_path))


def test_parts_have_no_split_if_documents_decide(source: Source, tmp_path: Path) -> None:
    found = divide_into_parts(source, None, _data(tmp_path))
    assert {part.split for part in found} == {None}
    assert found == divide_without_validation(source, _data(tmp_path))
    both = divide_into_parts(source, source, _data(tmp_path))
    assert [part.split for part in both] == ["train"] * len(found) + ["validation"] * len(found)
    assert _text(source, both) == 2 * "".join(LINES)


def test_parts_are_small_for_few_workers_and_never_above_a_shard() -> None:
    data = DataConfig(shard_mib=32.0)
    assert target_part_bytes(0, data) == 256 << 10
    assert target_part_bytes(16 << 20, data) == 1 << 20
    assert target_part_bytes(1 << 40, data) == 32 << 20
    assert target_part_bytes(1 << 30, DataConfig(shard_mib=0.01)) == int(0.01 * 2**20)


def test_a_sample_is_spread_over_all_slices(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slices = [piece for part in divide_without_validation(source, _data(tmp_path)) for piece in part.slices]
    total = sum(piece.bytes for piece in slices)
    assert sample_slices(slices, total) == slices
    assert sample_slices(slices, 1) == slices, "few enough"
    monkeypatch.setattr(parts_module, "_SAMPLED_SLICES", 4)
    few = sample_slices(slices, total - 1)
    assert few == [slices[len(slices) * number // 4] for number in range(4)]
    assert "".join(text for (text,) in sample_documents(source.reader, slices, total)) == "".join(LINES)
    lines = open_source(_data(tmp_path), str(tmp_path), (Column("data.column", "text"),)).reader
    some = [text for (text,) in sample_documents(lines, few, 100)]
    assert 100 <= sum(map(len, some)) < total
    assert list(sample_documents(lines, [Slice(few[0].file, 0, 0, 0)], 100)) == []


@dataclass(frozen=True)
class _Documents(TextReader):
    """Reads slices of some documents."""

    documents: tuple[Piece, ...] = ()

    def read(self, piece: Slice) -> Iterator[Piece | Fault]:
        """Yields the documents of a slice."""
        yield from self.documents[piece.start : piece.stop]


@given(length=st.integers(2, 400), count=st.integers(1, 40), size=st.integers(1, 4000))
@settings(deadline=None)
def test_slices_of_long_documents_give_the_size_and_no_more_than_one_document_beyond(
    length: int, count: int, size: int
) -> None:
    documents = tuple(Piece((f"{number:02}".ljust(length, "x"),)) for number in range(2 * count))
    slices = [Slice(File("/a", "a", 8), 2 * number, 2 * number + 2, 2 * length) for number in range(count)]
    found = list(sample_documents(_Documents(documents=documents), slices, size))
    total = sum(len(text) for (text,) in found)
    whole = 2 * count * length
    assert total == whole if size >= whole else size - length <= total <= size + count + length
    assert found == [piece.document for piece in documents if piece.document in found], "in the order of the slices"


@given(st.lists(st.integers(1, 40), min_size=1, max_size=120), st.integers(40, 200))
@settings(deadline=None)
def test_every_part_but_the_last_ends_where_it_is_nearest_to_the_target(sizes: list[int], target: int) -> None:
    slices = [Slice(File("/a", "a", 8), 0, size, size) for size in sizes]
    groups = list(parts_module._group_slices(slices, target))
    assert [piece for group in groups for piece in group] == slices
    for group in groups:
        total = sum(piece.bytes for piece in group)
        assert total - group[-1].bytes / 2 <= target
        assert group is groups[-1] or total + max(sizes) / 2 > target


def test_a_hundred_equal_slices_are_ten_parts_of_ten() -> None:
    slices = [Slice(File("/a", "a", 8), 0, 8, 8)] * 100
    assert [len(group) for group in parts_module._group_slices(slices, 80)] == [10] * 10
