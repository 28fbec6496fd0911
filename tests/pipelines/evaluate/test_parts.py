"""A part of some data, predicted: its file and its record, skipped rows, and the names of predictions' columns."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from raystride.pipelines.config import Config, DataConfig, ModelConfig, PredictorConfig, TokenizerConfig
from raystride.pipelines.data.prepare.class_split import validates
from raystride.pipelines.data.prepare.parts import divide_without_validation
from raystride.pipelines.data.sources.pieces import Part, Piece
from raystride.pipelines.data.sources.source import open_source
from raystride.pipelines.data.tasks import Task, build_task
from raystride.pipelines.data.tokenizers.byte_pairs import CharacterEncoder
from raystride.pipelines.evaluate import rows as rows_module
from raystride.pipelines.evaluate.answering import Predictor
from raystride.pipelines.evaluate.load_run import LoadedModel, SelectedRun
from raystride.pipelines.evaluate.parts import (
    MAX_FAULTS,
    RECORDS_FOLDER,
    PredictJob,
    load_records,
    name_probabilities,
    predict_part,
)
from raystride.pipelines.system.storage.folder import Folder
from tests.errors import unreadable

LETTERS = CharacterEncoder("abcdefghijklmnopqrstuvwxyz 0123456789")
FACTS = {"vocabulary_size": LETTERS.vocabulary_size, "end_id": 0, "labels": ["ham", "spam"], "shares": [0.5, 0.5]}


def make_config(source: Path) -> Config:
    """A classification of JSON lines."""
    return Config(
        task="classification",
        model=ModelConfig(layers=1, heads=1, hidden_size=8, context=16),
        tokenizer=TokenizerConfig(kind="characters"),
        data=DataConfig(source=str(source), kind="json", validation_fraction=0.4),
    )


def make_task(config: Config) -> Task:
    """Its task, which knows its labels."""
    return build_task(config, FACTS, {"tokenizer": LETTERS})


def write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """A file of JSON lines."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_job(source: Path, *, whole: bool = True, **changes: Any) -> tuple[PredictJob, Predictor, Part]:
    """Returns work for a network that has learned nothing, its answerer, and the one part of the source."""
    config = make_config(source)
    task = make_task(config)
    torch.manual_seed(0)
    opened = LoadedModel(config, task, task.build_model().eval(), 0, Folder(str(source.parent)))
    settings = PredictorConfig(run="r", batch=4, device="cpu", on_error=changes.pop("on_error", "raise"))
    found = open_source(config.data, str(source), task.columns if whole else task.asked, whole=True).keeping_rows()
    (part,) = divide_without_validation(found, config.data)
    given: dict[str, Any] = {"form": "jsonl", "graded": whole, "readers": {"": found.reader}}
    folder = Folder(str(source.parent / "answers"))
    job = PredictJob(chosen=SelectedRun(config, ()), settings=settings, folder=folder, **given | changes)
    return job, Predictor(opened, settings, graded=job.graded), replace(part, number=7)


def read(job: PredictJob) -> list[dict[str, Any]]:
    """Returns the rows of the part's file."""
    return [json.loads(line) for line in job.folder.read("00007.jsonl").decode().splitlines()]


ROWS = [{"text": f"text {number}", "label": "ham" if number % 2 else "spam", "id": number} for number in range(11)]


def test_a_part_has_its_rows_in_order_in_one_file_and_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "CHUNK_ROWS", 4)  # so that it is written in three goes
    job, predictor, part = make_job(write(tmp_path, ROWS))
    record = predict_part(job, predictor, part)
    rows = read(job)
    assert [row["text"] for row in rows] == [row["text"] for row in ROWS]
    assert [row["label"] for row in rows] == [row["label"] for row in ROWS]
    assert {"label_given", "probability", "loss", "targets"} <= rows[0].keys()
    size = (tmp_path / "answers/00007.jsonl").stat().st_size
    expected = {"part": 7, "rows": 11, "file": "00007.jsonl", "bytes": size, "skipped": 0, "faults": []}
    assert record | expected == record
    assert load_records(job.folder) == {7: record}


def test_predictions_keep_the_datas_rows_and_put_answers_beside_them(tmp_path: Path) -> None:
    job, predictor, part = make_job(write(tmp_path, ROWS), whole=False)
    predict_part(job, predictor, part)
    rows = read(job)
    assert [{key: row[key] for key in ("text", "label", "id")} for row in rows] == ROWS
    for row in rows:
        assert row["prediction"] in ("ham", "spam")
        assert row["probabilities"].keys() == {"ham", "spam"}
        assert row["probabilities"][row["prediction"]] == pytest.approx(row["probability"])
        assert "loss" not in row


def test_a_part_without_documents_has_a_record_and_no_file(tmp_path: Path) -> None:
    job, predictor, part = make_job(write(tmp_path, ROWS))
    record = predict_part(job, predictor, replace(part, slices=()))
    expected = {"part": 7, "rows": 0, "file": None, "bytes": 0, "skipped": 0, "faults": [], "written": 0}
    assert record | expected == record
    assert job.folder.names() == [RECORDS_FOLDER]
    assert load_records(job.folder) == {7: record}


def test_unreadable_inputs_fail_or_are_counted(tmp_path: Path) -> None:
    bad: list[dict[str, Any]] = [{"text": "no label"}, {"text": "other", "label": "eggs"}] * 60
    source = write(tmp_path, [ROWS[0], *bad, ROWS[1]])
    job, predictor, part = make_job(source)
    with unreadable("rows.jsonl", line=2):
        predict_part(job, predictor, part)
    job, predictor, part = make_job(source, on_error="skip")
    record = predict_part(job, predictor, part)
    assert (record["rows"], record["skipped"], len(record["faults"])) == (2, 120, MAX_FAULTS)
    assert [fault["place"].rpartition(", ")[2] for fault in record["faults"][:2]] == ["line 2", "line 3"]
    assert "'eggs'" in record["faults"][1]["reason"]
    assert [row["text"] for row in read(job)] == ["text 0", "text 1"]


@pytest.mark.parametrize("split", ["train", "validation", None])
def test_documents_that_a_hash_divides_are_those_of_the_split(tmp_path: Path, split: Any) -> None:
    job, predictor, part = make_job(write(tmp_path, ROWS), split=split)
    predict_part(job, predictor, part)
    expected = [
        row["text"] for row in ROWS if split is None or validates(Piece((row["text"],)), {}, 0.4) == (split == "validation")
    ]
    assert 0 < len(expected) < len(ROWS) or split is None
    assert [row["text"] for row in read(job)] == expected
    whole, predictor, part = make_job(write(tmp_path, ROWS), split=split)
    whole = replace(whole, readers={"train": whole.readers[""]})
    predict_part(whole, predictor, replace(part, split="train"))
    assert len(read(whole)) == len(ROWS), "no hash divides a part that is of one split"


def test_a_record_counts_while_its_file_is_as_it_was_written(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    known = {"part": 1, "file": "00001.jsonl", "bytes": 3, "rows": 1}
    for number, content in ((1, b"abc"), (2, b"abcd"), (3, None)):
        (folder / RECORDS_FOLDER).put_json(f"{number:05d}.json", known | {"part": number, "file": f"{number:05d}.jsonl"})
        if content:
            folder.put(f"{number:05d}.jsonl", content)
    (folder / RECORDS_FOLDER).put("00004.json", b"{")
    (folder / RECORDS_FOLDER).put_json("00005.json", {"part": 5})
    (folder / RECORDS_FOLDER).put_json("00006.json", {"part": 6, "file": None, "bytes": 0, "rows": 0})
    assert sorted(load_records(folder)) == [1, 6]


def test_probabilities_have_the_labels_names_in_a_task_with_labels() -> None:
    task = make_task(make_config(Path("x")))
    answer = {"label": "ham", "probabilities": [0.75, 0.25]}
    assert name_probabilities(task, answer) == {"label": "ham", "probabilities": {"ham": 0.75, "spam": 0.25}}
    assert name_probabilities(task, {"label": "ham"}) == {"label": "ham"}
    writer = build_task(Config(tokenizer=TokenizerConfig(kind="bytes")))
    assert name_probabilities(writer, answer) == answer
