"""What is not prepared is read as preparation reads it: whole, in order, with the place of each document."""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from raystride.pipelines.config import Data
from raystride.pipelines.sources.faults import DataError
from raystride.pipelines.tasks.task import Column, Document
from tests.pipelines.prepare.tasks import ROWS, TINY, as_folders, as_json, as_lines
from tests.pipelines.sources.documents import open_documents

LABELLED = (Column("data.column", "text"), Column("data.label_column", "label", "label"))
PAIR = (Column("data.column", "text"), Column("data.target_column", "target"))


def read(data: Data, name: object, columns: tuple[Column, ...]) -> list[tuple[str, Document]]:
    found = pickle.loads(pickle.dumps(open_documents(data, str(name), columns)))
    return [item for part in found.parts for item in found.read(part)]


def test_all_columns_or_those_that_prediction_reads(tmp_path: Path) -> None:
    path = as_json(tmp_path)
    data = Data(shard_mib=TINY)
    assert len(open_documents(data, str(path), LABELLED).parts) > 3
    assert [document for _, document in read(data, path, LABELLED)] == ROWS
    assert [document for _, document in read(data, path, LABELLED[:1])] == [(text,) for text, _ in ROWS]
    assert read(data, path, LABELLED)[0][0] == f"{path}, line 1"


def test_labels_that_are_not_asked_for_are_passed_over(tmp_path: Path) -> None:
    for write, kind in [(as_lines, "labelled"), (as_folders, "folders")]:
        (tmp_path / kind).mkdir()
        found = read(Data(kind=kind), write(tmp_path / kind), LABELLED[:1])  # type: ignore[arg-type]
        assert {(text,) for text, _ in ROWS} <= {document for _, document in found}


def test_lines_without_targets_are_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "b.txt").write_text("eins\n\nzwei\n")
    data = Data(source="elsewhere", target_source="elsewhere.de")
    wanted = [(f"{tmp_path}/a.txt, line 1", ("one",)), (f"{tmp_path}/a.txt, line 3", ("two",))]
    assert read(data, f"{tmp_path}/a.txt", PAIR[:1]) == wanted
    assert read(Data(kind="lines"), f"{tmp_path}/a.txt", PAIR[:1]) == wanted
    both = [document for _, document in read(data, f"{tmp_path}/a.txt,{tmp_path}/b.txt", PAIR)]
    assert both == [("one", "eins"), ("two", "zwei")]


def test_faults_are_raised_or_left_out(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "a"}), json.dumps({"text": "b", "label": 1})]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    data = Data()
    with pytest.raises(DataError, match="line 1: has no column 'label'"):
        read(data, tmp_path / "rows.jsonl", LABELLED)
    found = read(replace(data, on_error="skip"), tmp_path / "rows.jsonl", LABELLED)
    assert found == [(f"{tmp_path}/rows.jsonl, line 2", ("b", "1"))]
