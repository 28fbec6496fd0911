"""`task: auto` chooses the task by the data's columns, in any file format, and a run that has begun keeps its task."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.config import Config, DataConfig, ObjectiveConfig, TokenizerConfig, TrainConfig
from raystride.pipelines.config.parse import to_yaml
from raystride.pipelines.data.prepare.choose_task import choose_task, choose_validation
from raystride.pipelines.data.sources.faults import DataError
from raystride.pipelines.system.storage.folder import Folder
from tests.errors import refused

CHAT = [{"role": "user", "content": "Is it raining?"}, {"role": "assistant", "content": "Yes."}]
PAIR = {"prompt": "Is it raining?", "completion": "Yes."}
RANKED = {"prompt": "Is it raining?", "chosen": "Yes.", "rejected": "No."}
TEMPLATED = TokenizerConfig(kind="file", file="tokenizer.json")


def _write(file: Path, row: dict[str, Any]) -> str:
    """Writes a table of one row, in the format of the file's name."""
    if file.suffix == ".csv":
        file.write_text(",".join(row) + "\n" + ",".join(map(str, row.values())) + "\n")
    elif file.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist([row]), file)
    else:
        file.write_text(json.dumps(row) + "\n")
    return str(file)


def _auto(source: str, **changes: Any) -> Config:
    return Config(
        task="auto", data=DataConfig(source=source, **changes), tokenizer=TEMPLATED, train=TrainConfig(slot_tokens=1024)
    )


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "csv"])
@pytest.mark.parametrize(
    ("row", "task", "columns"),
    [
        ({"messages": CHAT, "text": "a chat"}, "completion", {"messages_column": "messages"}),
        (PAIR, "completion", {"column": "prompt", "target_column": "completion"}),
        ({"prompt": "a", "response": "b"}, "completion", {"column": "prompt", "target_column": "response"}),
        (RANKED, "preference", {"prompt_column": "prompt"}),
        ({"id": "1", "text": "Is it raining?"}, "language_model", {"column": "text"}),
    ],
)
def test_columns_choose_the_task(
    row: dict[str, Any], task: str, columns: dict[str, str], ending: str, tmp_path: Path
) -> None:
    if ending == "csv" and "messages" in row:
        row = row | {"messages": '"' + json.dumps(CHAT).replace('"', '""') + '"'}
    base = replace(Config().model, init_from=str(tmp_path))
    chosen = choose_task(replace(_auto(_write(tmp_path / f"rows.{ending}", row)), model=base))
    assert (chosen.task, {name: getattr(chosen.data, name) for name in columns}) == (task, columns)
    # Windows have no lengths of their own: as many tokens are a slot by their number.
    windows = task == "language_model"
    assert (chosen.train.slot_tokens, chosen.train.slot_size) == ((0, 8) if windows else (1024, TrainConfig.slot_size))


def test_a_teacher_is_refused_only_with_the_task_that_was_chosen(tmp_path: Path) -> None:
    base, objective = replace(Config().model, init_from=str(tmp_path)), ObjectiveConfig(teacher=str(tmp_path))
    for row, task in ((PAIR, "completion"), ({"text": "Is it raining?"}, "language_model")):
        config = replace(_auto(_write(tmp_path / "rows.jsonl", row)), model=base, objective=objective)
        chosen = choose_task(config)
        assert (chosen.task, chosen.objective) == (task, objective)
    ranked = replace(_auto(_write(tmp_path / "ranked.jsonl", RANKED)), model=base, objective=objective)
    with refused("objective.teacher", str(tmp_path), names=["`preference`"]):
        choose_task(ranked)


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_tools_beside_chats_are_used(ending: str, tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    source = _write(tmp_path / f"rows.{ending}", {"messages": CHAT, "tools": tools})
    assert choose_task(_auto(source)).data.tools_column == "tools"
    assert choose_task(_auto(source, tools_column="tools")).data.messages_column == "messages"
    for name, row in {"none": {"tools": []}, "null": {"tools": None}, "no column": {}}.items():
        plain = _write(tmp_path / f"{name}.jsonl", {"messages": CHAT, **row})
        assert choose_task(_auto(plain)).data.tools_column is None


def test_an_encoder_is_for_one_task_whatever_the_columns(tmp_path: Path) -> None:
    source = _write(tmp_path / "rows.jsonl", {"text": "It rains.", "label": "weather"})
    encoder = replace(Config().model, architecture="bert", init_from=str(tmp_path))
    assert choose_task(replace(_auto(source), model=encoder)).task == "classification"


def test_a_text_has_no_columns_and_is_one_task(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("Is it raining?\n")
    assert choose_task(_auto(str(tmp_path / "notes.txt"))).task == "language_model"


def test_named_columns_come_first(tmp_path: Path) -> None:
    source = _write(tmp_path / "rows.jsonl", {"dialogue": CHAT, "question": "a", "answer": "b", "text": "c"})
    assert choose_task(_auto(source, messages_column="dialogue")).data.messages_column == "dialogue"
    chosen = choose_task(_auto(source, column="question", target_column="answer"))
    assert (chosen.task, chosen.data.column, chosen.data.target_column) == ("completion", "question", "answer")


def test_a_task_that_was_given_stays(tmp_path: Path) -> None:
    config = replace(_auto(_write(tmp_path / "rows.jsonl", PAIR)), task="classification", train=TrainConfig())
    assert choose_task(config) is config


def test_chats_without_a_template_are_refused_and_texts_need_none(tmp_path: Path) -> None:
    chats = replace(_auto(_write(tmp_path / "chats.jsonl", {"messages": CHAT})), tokenizer=TokenizerConfig(kind="bytes"))
    with refused("data.messages_column", "messages"):
        choose_task(chats)
    texts = replace(chats, data=DataConfig(source=_write(tmp_path / "texts.jsonl", {"text": "a"})))
    assert choose_task(texts).task == "language_model"


def test_data_without_a_task_and_missing_data_raise_errors(tmp_path: Path) -> None:
    source = _write(tmp_path / "rows.jsonl", {"a": 1})
    with refused("task", "auto", names=[source, "messages", "chosen", "--task"]):
        choose_task(_auto(source))
    with pytest.raises(DataError) as raised:
        choose_task(_auto(str(tmp_path / "gone.jsonl")))
    assert raised.value.settings == ("data.source",)


def test_a_run_that_has_begun_keeps_its_task_though_its_data_is_gone(tmp_path: Path) -> None:
    config = replace(_auto(_write(tmp_path / "rows.jsonl", {"text": "a"})), run="mine")
    begun, storage = choose_task(config), Folder(str(tmp_path / "runs"))
    (storage / "mine").put("config.yaml", to_yaml(begun))
    (tmp_path / "rows.jsonl").unlink()
    assert choose_task(config, storage) == begun


@pytest.mark.parametrize(
    ("name", "changes", "chosen"),
    [
        ("input.txt", {}, "tail"),
        ("input", {}, "tail"),
        ("input.txt.gz", {}, "tail"),
        ("input.txt", {"kind": "lines"}, "hash"),
        ("input.csv", {}, "hash"),
        ("input.zip", {}, "hash"),
        ("", {}, "hash"),
        ("input.txt", {"validation": "source", "validation_source": "other.txt"}, "source"),
    ],
)
def test_a_single_text_is_validated_on_its_end(tmp_path: Path, name: str, changes: dict[str, Any], chosen: str) -> None:
    (tmp_path / "input.txt").write_text("a text")
    if name:
        (tmp_path / name).write_text("a text")
    data = DataConfig(source=str(tmp_path / name), **changes)
    assert choose_validation(data, "language_model").validation == chosen
    assert choose_validation(data, "completion") == data
