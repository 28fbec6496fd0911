"""Messages are stored as text and restored unchanged; similar text stays text."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystride.pipelines.config import Config, DataConfig, TokenizerConfig
from raystride.pipelines.data.sources.pieces import Piece
from raystride.pipelines.data.sources.source import first_items, open_source
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.data.tasks.messages import message_texts, pack_messages, split_shared_prompt, unpack_messages

MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": st.text()}), min_size=1
)


@given(MESSAGES)
def test_messages_come_back(messages: list[dict[str, str]]) -> None:
    assert unpack_messages(pack_messages(messages)) == messages
    assert list(message_texts(messages)) == [each["content"] for each in messages]


@given(st.one_of(st.text(), st.sampled_from(["[1, 2]", "[]", '["role"]', '[{"role": "user"}]', "[not JSON", '{"role": 1}'])))
def test_text_stays_text(text: str) -> None:
    assert unpack_messages(text) == text
    assert list(message_texts(text)) == [text]


def test_keys_that_a_table_gives_to_all_messages_are_left_out() -> None:
    packed = pack_messages([{"role": "user", "content": "a", "name": None}, {"role": "user", "content": "b", "name": "N"}])
    assert unpack_messages(packed) == [{"role": "user", "content": "a"}, {"role": "user", "content": "b", "name": "N"}]
    assert pack_messages([]) == "", "nothing is said"


CALL = {"type": "function", "id": None, "function": {"name": "weather", "arguments": {"city": "Zürich", "days": None}}}
PARAMETERS = {"default": None, "a": [{"b": None}]}
TOOL = {"type": "function", "strict": None, "function": {"name": "weather", "parameters": PARAMETERS}}


def test_nulls_in_arguments_and_parameters_stay_in_json_lines_and_go_in_tables(tmp_path: Path) -> None:
    row = {"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL]}], "tools": [TOOL]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    data = DataConfig(messages_column="messages", tools_column="tools")
    columns = build_task(Config(task="completion", data=data, tokenizer=TokenizerConfig(kind="file", file="t.json"))).columns
    found = {}
    for ending in ("jsonl", "parquet"):
        source = open_source(data, str(tmp_path / f"rows.{ending}"), columns)
        (item,) = first_items(source.reader, source.kind, source.files[0])
        assert isinstance(item, Piece)
        (message,), (tool,) = map(json.loads, item.document)
        found[ending] = message["tool_calls"][0]["function"]["arguments"], tool["function"]["parameters"]
        assert "id" not in message["tool_calls"][0]
        assert "strict" not in tool
    assert found["jsonl"] == ({"city": "Zürich", "days": None}, PARAMETERS)
    assert found["parquet"] == ({"city": "Zürich"}, {"a": [{}]})


@pytest.mark.parametrize("wrong", [["text"], [{"role": "user"}], [{"role": "user", "content": ["parts"]}]])
def test_other_lists_than_messages_raise(wrong: list[object]) -> None:
    with pytest.raises(ValueError, match="not everything is a message"):
        pack_messages(wrong)


@given(shared=MESSAGES, chosen=MESSAGES, rejected=MESSAGES)
def test_the_prompt_is_shared_and_each_keeps_an_answer(
    shared: list[dict[str, str]], chosen: list[dict[str, str]], rejected: list[dict[str, str]]
) -> None:
    prompt, one, other = split_shared_prompt(shared + chosen, shared + rejected)
    assert [*prompt, *one] == shared + chosen
    assert [*prompt, *other] == shared + rejected
    assert len(prompt) >= len(shared)
    assert one
    assert other
    assert one[0] != other[0] or min(len(one), len(other)) == 1


def test_the_forms_of_the_api_and_of_sharegpt_are_messages() -> None:
    """Both were refused; half of the chats on the hub are of the second."""
    parts = [{"type": "text", "text": "hi ", "image_url": None}, {"type": "text", "text": "there!"}]
    assert unpack_messages(pack_messages([{"role": "user", "content": parts}])) == [{"role": "user", "content": "hi there!"}]
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "weight": 0}]
    shared = [{"from": "system", "value": "Be kind."}, *turns]
    assert unpack_messages(pack_messages(shared)) == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "weight": 0},
    ]


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "x"}, "text": None}, {"type": "audio"}])
def test_a_part_that_is_no_text_is_named(part: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"a part that is no text, but '{part['type']}'"):
        pack_messages([{"role": "user", "content": [{"type": "text", "text": "see"}, part]}])
