"""A table as it was downloaded trains a classifier by flags alone, and answers in a table of the same form."""

import csv
import json
from pathlib import Path

from tests.ray_jobs.jobs import finish_job, start_script

WORDS = {"1": "war peace minister", "2": "match goal season", "3": "market oil pension", "4": "software chip phone"}
SMALL = {
    "launch": "inline", "train.steps": 4, "train.slots": 2, "train.slot_size": 4, "model.layers": 1, "model.hidden_size": 16,
    "model.heads": 2, "tokenizer.kind": "bytes", "record.mlflow": "false", "data.validation_fraction": 0.2,
}  # fmt: skip


def write_news(path: Path) -> Path:
    """As the test file of AG News is: quoted, class, title and text, and no line of names."""
    rows = [(label, f"{words} {i}", f'Fears, for "{words}"; {i}') for i in range(20) for label, words in WORDS.items()]
    with path.open("w", newline="") as stream:
        csv.writer(stream, quoting=csv.QUOTE_ALL).writerows(rows)
    return path


def test_a_table_without_names_trains_by_flags_alone(tmp_path: Path) -> None:
    news = write_news(tmp_path / "test.csv")
    common = ["--task", "classification", "--data.source", str(news), "--storage", str(tmp_path / "runs")]
    common += [text for name, value in SMALL.items() for text in (f"--{name}", str(value))]
    refused = finish_job(start_script("train", *common, "--run", "unnamed"))
    assert refused.code == 2
    assert "the first line looks like data: 1 | war peace minister 0 | Fears, for" in refused.err
    assert "--data.header false" in refused.err
    trained = finish_job(start_script("train", *common, "--run", "news", "--data.column", "2", "--data.label_column", "0"))
    assert trained.code == 0, trained.err
    summary = json.loads((tmp_path / "runs" / "news" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 4)
