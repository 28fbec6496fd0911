"""Chats that a template does not write turn after turn are counted and left out; if they are most, they are refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.config import Config, DataConfig, ObjectiveConfig, TokenizerConfig
from raystride.pipelines.data.prepare.one_source import PreparedData
from raystride.pipelines.data.prepare.prepare import prepare
from raystride.pipelines.data.prepare.run_context import RunContext
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.data.tokenizers import train_tokenizer
from raystride.pipelines.system.storage.folder import Folder
from tests.bases import write_tokenizer
from tests.errors import refused, unreadable
from tests.tiny import tiny

QWEN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""In the way of Qwen3's: the last turn has thoughts, earlier ones have none."""


def _chat(number: int, turns: int = 1) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"rain {number}?"}, {"role": "assistant", "content": "yes"}] * turns}


def _settings(tmp_path: Path, rows: list[dict[str, Any]], **data: Any) -> Config:
    added = dict.fromkeys(("<eos>", "<|im_start|>", "<|im_end|>"), True)
    write_tokenizer(tmp_path / "base", added, {"eos_token": "<eos>", "chat_template": QWEN})
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tiny(tmp_path / "chats.jsonl")
    return replace(
        config,
        task="completion",
        data=DataConfig(source=config.data.source, messages_column="messages", validation_fraction=0.2, **data),
        tokenizer=_tokenizer(tmp_path),
        model=replace(config.model, context=256),
    )


def _tokenizer(tmp_path: Path) -> TokenizerConfig:
    return TokenizerConfig(kind="file", file=str(tmp_path / "base" / "tokenizer.json"))


def _prepare(config: Config, tmp_path: Path, lines: list[str]) -> PreparedData:
    context = RunContext(config, Folder.from_uri(str(tmp_path / "storage")), log=lines.append)
    return prepare(context, build_task(config), on_ray=False)


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_chats_that_cannot_be_split_are_left_out_and_named(tmp_path: Path, on_error: str) -> None:
    rows = [_chat(number, 1 + (number % 10 == 3)) for number in range(40)]
    lines: list[str] = []
    manifest = _prepare(_settings(tmp_path, rows, on_error=on_error), tmp_path, lines).manifest
    assert sum(manifest.documents(split) for split in ("train", "validation")) == 36
    assert len(manifest.skipped) == 4
    assert manifest.skipped[0]["place"].endswith("chats.jsonl, line 4")
    (line,) = [line for line in lines if "skipped" in line]
    assert "4 files or documents skipped" in line
    assert "not written turn after turn" in line


def test_other_faults_still_raise(tmp_path: Path) -> None:
    rows = [_chat(0, 2), {"messages": _chat(1)["messages"][:1]}, *map(_chat, range(20))]
    with unreadable("chats.jsonl", names=["no turn of the assistant"]):
        _prepare(_settings(tmp_path, rows), tmp_path, [])


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_data_of_which_half_cannot_be_split_is_refused_with_the_remedy(tmp_path: Path, on_error: str) -> None:
    rows = [_chat(number, 1 + number % 2) for number in range(40)]
    with refused("tokenizer.chat_template", names=["20 of 40 chats", "chats.jsonl, line 2", "{% generation %}"]):
        _prepare(_settings(tmp_path, rows, on_error=on_error), tmp_path, [])


def test_what_chats_hold_and_the_template_does_not_write_is_said(tmp_path: Path) -> None:
    rows = [_chat(number) | ({"tools": [{"name": "add"}]} if number % 4 == 0 else {}) for number in range(40)]
    lines: list[str] = []
    _prepare(_settings(tmp_path, rows, tools_column="tools"), tmp_path, lines)
    found = [line for line in lines if "writes no" in line]
    assert found == ["data: warning: the template writes no tools: 10 of 40 chats have some"]


def test_pairs_of_messages_say_so_too(tmp_path: Path) -> None:
    _settings(tmp_path, [])
    encoder = train_tokenizer(_tokenizer(tmp_path), ["a"], Folder.from_uri(str(tmp_path / "t")), lambda _: None)
    config = Config(task="preference", tokenizer=_tokenizer(tmp_path), objective=ObjectiveConfig(reference_free=True))
    task = build_task(config, {"vocabulary_size": 300, "end_id": 0}, {"tokenizer": encoder})
    prompt, answer = [{"role": "user", "content": "rain?"}], {"role": "assistant", "content": "yes", "reasoning": "hm"}
    pair = (json.dumps(prompt), json.dumps([answer]), json.dumps([answer | {"content": "no"}]))
    (line,) = task.describe_losses([pair, ("rain?", "yes", "no")])
    assert line == "the template writes no thoughts: 1 of 1 chats have some"
