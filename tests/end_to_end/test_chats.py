"""Chats from every form of data to a model that answers them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.config import (
    Config,
    DataConfig,
    LaunchConfig,
    ObjectiveConfig,
    OptimizerConfig,
    PredictorConfig,
    SampleConfig,
    ScalingConfig,
    TrainConfig,
)
from raystride.pipelines.data.prepare.prepare import prepare
from raystride.pipelines.data.prepare.run_context import RunContext
from raystride.pipelines.data.sources.faults import DataError
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.evaluate.answering import Predictor
from raystride.pipelines.evaluate.load_run import open_run
from raystride.pipelines.system.storage.folder import Folder
from tests.pipelines.conftest import rows as rows_of
from tests.preferences import pair_settings, write_base
from tests.ray_jobs.jobs import run_well, summary


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("chatting"), chat=True)


def _rows(count: int) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    found: list[dict[str, Any]] = []
    for number in range(count):
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": f"is {number}?"},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": "sure?"},
            {"role": "assistant", "content": "yes"},
        ]
        if number % 3 == 0:
            messages = [{"role": "system", "content": "be"}, *messages[:1], {"role": "assistant", "content": "yes"}]
        if number % 5 == 0:
            messages[-1] = messages[-1] | {"tool_calls": [call]}
        found.append({"talk": messages, "tools": [{"name": "add"}] if number % 2 else None})
    return found


def _config(base: Path, source: Path, **data: Any) -> Config:
    config = pair_settings(base, source)
    data = {"validation_fraction": 0.2, "messages_column": "talk", "tools_column": "tools"} | data
    model = replace(config.model, init_from=None, context=128)
    return replace(
        config, task="completion", objective=ObjectiveConfig(), model=model, data=DataConfig(source=str(source), **data)
    )


def _write(rows: list[dict[str, Any]], place: Path, form: str) -> Path:
    if form == "huggingface":
        from datasets import Dataset

        Dataset.from_list(rows).save_to_disk(str(place / "saved"))
        return place / "saved"
    path = place / f"chats.{form}"
    if form == "parquet":
        import pyarrow as pa
        from pyarrow import parquet

        parquet.write_table(pa.Table.from_pylist(rows), path)
    elif form == "csv":
        import csv

        with path.open("w", newline="") as stream:
            table = csv.writer(stream)
            table.writerow(["talk", "tools"])
            table.writerows([json.dumps(row["talk"]), json.dumps(row["tools"] or [])] for row in rows)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_every_form_of_data_gives_the_same_samples(base: Path, tmp_path: Path) -> None:
    found = []
    for form in ("jsonl", "parquet", "huggingface", "csv"):
        config = _config(base, _write(_rows(30), tmp_path, form))
        result = prepare(
            RunContext(config, Folder.from_uri(str(tmp_path / form)), log=lambda _: None), build_task(config), on_ray=False
        )
        found.append([(row["ids"], row["loss_mask"]) for split in ("train", "validation") for row in rows_of(result, split)])
    assert len(found[0]) == 30
    assert all(sum(mask) > 0 for _, mask in found[0])
    assert found[1] == found[0]
    assert found[2] == found[0]
    assert found[3] == found[0]


def test_a_bad_chat_is_named_by_its_row_and_a_long_one_is_counted(base: Path, tmp_path: Path) -> None:
    rows = _rows(40)
    rows[3]["talk"] = [{"role": "user", "content": "only a question"}]
    rows[4]["talk"] = [{"role": "robot", "content": "beep"}, {"role": "assistant", "content": "yes"}]
    rows[6]["talk"] = rows[6]["talk"] * 20
    source = _write(rows, tmp_path, "jsonl")
    with pytest.raises(DataError, match=r"chats.jsonl, line 4: has no turn of the assistant"):
        prepare(
            RunContext(config := _config(base, source), Folder.from_uri(str(tmp_path))), build_task(config), on_ray=False
        )
    rows[5]["talk"] = ["no message"]
    source = _write(rows, tmp_path, "jsonl")
    said: list[str] = []
    config = _config(base, source, on_error="skip")
    result = prepare(RunContext(config, Folder.from_uri(str(tmp_path)), log=said.append), build_task(config), on_ray=False)
    reasons = {each["place"].rpartition(" ")[2]: each["reason"] for each in result.manifest.skipped}
    assert set(reasons) == {"4", "5", "6"}
    assert "the role 'robot' in message 1" in reasons["5"]
    assert "not everything is a message" in reasons["6"]
    assert result.manifest.source["cut"] == 1
    assert any(line.startswith("data: cut: 1 of ") for line in said)


@pytest.mark.parametrize("packing", [pytest.param("none", marks=pytest.mark.long), "documents"])
def test_a_model_learns_to_answer(base: Path, tmp_path: Path, packing: Any) -> None:
    source = _write(_rows(60), tmp_path, "jsonl")
    config = replace(
        _config(base, source),
        storage=str(tmp_path / "runs"),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=5),
        train=TrainConfig(steps=40, slots=2, slot_size=8, log_every=20, packing=packing),
        scaling=ScalingConfig(threads=1),
        launch=LaunchConfig(mode="inline"),
    )
    run_well("train", config, "--run", "chats")
    assert summary(config, "chats")["val_loss"] < 1.0
    opened = open_run(Folder.from_uri(config.storage), "chats")
    sample = SampleConfig(tokens=4, temperature=0.0)
    chat = json.dumps([{"role": "user", "content": "is 7?"}])
    (answer,) = Predictor(opened, PredictorConfig(run="chats"), sample).predict([(chat, "[]")])
    assert answer["continuation"].strip().startswith("yes")
    graded = list(
        Predictor(opened, PredictorConfig(run="chats"), graded=True).predict([(json.dumps(_rows(2)[1]["talk"]), "[]")])
    )
    assert graded[0]["targets"] > 4
    assert graded[0]["bytes"] == len("yesyes")
