"""The stages from a document's text to its shard: ids, masks, end tokens of pieces, and faults."""

import itertools
import json
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raystride.pipelines.config import Config, DataConfig
from raystride.pipelines.data.prepare import stages
from raystride.pipelines.data.prepare.class_split import validates
from raystride.pipelines.data.prepare.parts import divide_without_validation
from raystride.pipelines.data.prepare.stages import (
    _TEXT,
    Preparation,
    _encode_stretch,
    read_part,
    tokenise_table,
)
from raystride.pipelines.data.sources.pieces import Piece
from raystride.pipelines.data.sources.source import open_source
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.data.tasks.language_model import LanguageModel
from raystride.pipelines.data.tasks.task import Document, Encoded
from raystride.pipelines.data.tokenizers.byte_pairs import ByteEncoder
from raystride.pipelines.system.storage.folder import Folder
from tests.tiny import tiny

END = ByteEncoder.end_id


class Masked(LanguageModel):
    """Only the end token counts."""

    def example(self, document: Document) -> Encoded:
        ids, _, cut = super().example(document)
        return Encoded(ids, np.arange(len(ids)) == len(ids) - 1, cut)


def _task(kind: type[LanguageModel] = LanguageModel) -> LanguageModel:
    return kind(tiny(Path("unused")), {"vocabulary_size": 257, "end_id": END}, {"tokenizer": ByteEncoder()})


def test_a_piece_that_does_not_end_its_document_has_no_end() -> None:
    assert _encode_stretch(_task(), ("ab",), begins=True, ends=True).ids.tolist() == [*b"ab", END]
    assert _encode_stretch(_task(), ("ab",), begins=True, ends=False).ids.tolist() == [*b"ab"]
    ids, mask, _ = _encode_stretch(_task(Masked), ("ab",), begins=True, ends=False)
    assert (ids.tolist(), mask.tolist()) == ([*b"ab"], [False, False])  # type: ignore[union-attr]
    ids, mask, _ = _encode_stretch(_task(Masked), ("ab",), begins=True, ends=True)
    assert mask is not None
    assert (mask.dtype, mask.tolist()) == (np.uint8, [0, 0, 1])


class OneByOne(LanguageModel):
    """A task of one's own, whose documents are encoded one by one."""


pieces = st.lists(st.tuples(st.booleans(), st.booleans(), st.text(max_size=5)) | st.none(), min_size=1, max_size=9)


@given(pieces=pieces, start=st.integers(0, 8))
@settings(max_examples=40, deadline=None)
def test_bytes_of_a_table_at_once_are_those_of_its_documents(
    pieces: list[tuple[bool, bool, str] | None], start: int
) -> None:
    rows = [
        (0, number, *piece[:2], number % 3 == 0, piece[2], "place", None, number)
        if piece
        else (0, *[None] * 6, "fault", None)
        for number, piece in enumerate(pieces)
    ]
    columns = [pa.array(column, kind) for column, kind in zip(zip(*rows, strict=True), _TEXT.types, strict=True)]
    table = pa.Table.from_arrays(columns, schema=_TEXT).slice(min(start, len(rows) - 1))
    both = [
        tokenise_table(Preparation(Folder("unused"), {}, _task(kind), 0.5, False), table)  # type: ignore[arg-type]
        for kind in (LanguageModel, OneByOne)
    ]
    assert both[0].drop_columns(["tokenise_s"]).equals(both[1].drop_columns(["tokenise_s"]))


def test_a_document_of_a_task_without_windows_must_have_something_in_it() -> None:
    config = Config(task="completion", tokenizer=tiny(Path("unused")).tokenizer)
    task = build_task(config, {"vocabulary_size": 257, "end_id": END}, {"tokenizer": ByteEncoder()})
    task.example = lambda document: Encoded(np.empty(0, np.uint32), None)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="nothing in it"):
        _encode_stretch(task, ("", ""), begins=True, ends=True)
    assert len(_encode_stretch(_task(), ("",), begins=True, ends=False).ids) == 0, "an empty piece of a text is none"


def test_about_as_many_documents_validate_as_were_asked_for_and_always_the_same() -> None:
    texts = [f"document {number}" for number in range(4000)]
    chosen = [text for text in texts if validates(Piece((text,)), {}, 0.25)]
    assert abs(len(chosen) - 1000) < 6 * np.sqrt(4000 * 0.25 * 0.75)  # six standard deviations of a binomial count
    assert chosen == [text for text in texts if validates(Piece((text,)), {}, 0.25)]
    assert {text for text in texts if validates(Piece((text,)), {}, 0.1)} < set(chosen), (
        "more validate where a larger share does"
    )
    assert not any(validates(Piece((text,)), {}, 0.0) for text in texts)


def test_reading_seconds_sum_over_all_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock advances at each reading: once for each table, and once at the end."""
    (tmp_path / "lines.jsonl").write_text("".join(f'{{"text": "line {number}"}}\n' for number in range(6)))
    task = _task()
    source = open_source(DataConfig(source=str(tmp_path / "lines.jsonl")), str(tmp_path / "lines.jsonl"), task.columns)
    job = Preparation(Folder(str(tmp_path)), {"train": source.reader}, task, 0.5, False, None)
    (part,) = divide_without_validation(source, DataConfig())
    monkeypatch.setattr(stages, "_TABLE_ROWS", 2)
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    tables = [table.to_pylist() for table in read_part(job, part)]
    assert [len(table) for table in tables] == [2, 2, 2, 1]
    assert [row["text"] for table in tables[:3] for row in table] == [f"line {number}" for number in range(6)]
    assert [row["document"] for table in tables[:3] for row in table] == list(range(6))
    assert json.loads(tables[3][0]["place"])["seconds"] == {"read": 4.0, "clean": 0.0}
