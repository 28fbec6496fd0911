"""A classifier begins with an encoder by its folder's name alone, goes to transformers, and comes back with its head."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.config import PredictorConfig
from raystride.pipelines.evaluate.answering import Predictor
from raystride.pipelines.evaluate.load_run import open_run
from raystride.pipelines.system.storage.folder import Folder
from tests.bases import write_encoder
from tests.ray_jobs.jobs import finish_job, start_script

SMALL = {
    "launch": "inline", "task": "classification", "data.kind": "json", "train.steps": 120, "train.slots": 2,
    "train.slot_size": 8, "optimizer.learning_rate": 1e-2, "validation.every": 0, "record.mlflow": "false",
    "scaling.threads": 1,
}  # fmt: skip
TOPICS = {"business": ["market", "stock", "price", "bank"], "sport": ["team", "game", "goal"]}


def write_topics(path: Path) -> Path:
    """Texts of a few words, the last of which tells the label."""
    draw = random.Random(0)
    rows = []
    for _ in range(400):
        label = draw.choice(list(TOPICS))
        words = draw.choices(["the", "a", "rose", "fell", "won", "lost", "!"], k=draw.randint(1, 8))
        rows.append({"text": " ".join([*words, draw.choice(TOPICS[label])]), "label": label})
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def run_of(place: Path, name: str, base: Path, **changes: Any) -> dict[str, Any]:
    """Trains a run over a base; its summary."""
    given = SMALL | {"data.source": place / "topics.jsonl", "storage": place / "runs", "run": name, "model.init_from": base}
    flags = [text for key, value in (given | changes).items() for text in (f"--{key}", str(value))]
    trained = finish_job(start_script("train", *flags))
    assert trained.code == 0, trained.err
    found: dict[str, Any] = json.loads((place / "runs" / name / "summary.json").read_text())
    return found


def said(place: Path, name: str) -> str:
    return (place / "runs" / name / "log.txt").read_text()


@pytest.mark.long
def test_an_encoder_learns_labels_and_keeps_its_head_on_the_way_back(tmp_path: Path) -> None:
    from transformers import pipeline

    write_topics(tmp_path / "topics.jsonl")
    base = write_encoder(tmp_path / "base", "bert")
    assert run_of(tmp_path, "first", base)["metrics"]["val_accuracy"] > 0.95
    assert "dense and head of the classifier: begun anew" in said(tmp_path, "first")
    exported = finish_job(start_script("export", "--run", "first", "--storage", str(tmp_path / "runs")))
    assert "AutoModelForSequenceClassification" in exported.out, exported.err
    folder = tmp_path / "runs" / "first" / "export" / "hugging_face"
    texts = ["the market", "a goal, the game won"]
    predictor = Predictor(open_run(Folder(str(tmp_path / "runs")), "first"), PredictorConfig(run="first"))
    given = list(predictor.predict([(text,) for text in texts]))
    theirs = pipeline("text-classification", model=str(folder))(texts)
    assert [answer["label"] for answer in given] == [answer["label"] for answer in theirs] == ["business", "sport"]
    for answer, other in zip(given, theirs, strict=True):
        assert abs(answer["probability"] - other["score"]) < 1e-5
    # A step that changes nothing: what came back is as good as what went out.
    again = run_of(tmp_path, "again", folder, **{"train.steps": 1, "optimizer.learning_rate": 1e-9})
    assert again["metrics"]["val_accuracy"] > 0.95
    assert "begun anew" not in said(tmp_path, "again")


@pytest.mark.long
def test_the_preset_of_fine_tuning_sees_an_encoder_and_goes_on(tmp_path: Path) -> None:
    write_topics(tmp_path / "topics.jsonl")
    base = write_encoder(tmp_path / "base", "modernbert", ["business", "sport"])
    flags = ["--config", "finetune", "--model.init_from", str(base), "--data.source", str(tmp_path / "topics.jsonl")]
    flags += ["--storage", str(tmp_path / "runs"), "--run", "tuned", "--launch", "inline", "--record.mlflow", "false"]
    flags += ["--train.epochs", "0", "--scaling.threads", "1"]
    for steps in ("2", "4"):
        trained = finish_job(start_script("train", *flags, "--train.steps", steps))
        assert trained.code == 0, trained.err
    assert "resumed from step 2" in said(tmp_path, "tuned")
    assert "begun anew" not in said(tmp_path, "tuned"), "the base has a head for these labels"
    exported = finish_job(start_script("export", "--run", "tuned", "--storage", str(tmp_path / "runs")))
    assert exported.code == 0, exported.err
    described = json.loads((tmp_path / "runs" / "tuned" / "export" / "adapter" / "adapter_config.json").read_text())
    assert (described["task_type"], described["modules_to_save"]) == ("SEQ_CLS", ["head", "classifier"])
