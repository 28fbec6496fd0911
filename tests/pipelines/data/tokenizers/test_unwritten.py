"""What chats hold and the template does not write is named with its number of chats."""

from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.config import TokenizerConfig
from raystride.pipelines.data.tokenizers import load_tokenizer, train_tokenizer
from raystride.pipelines.data.tokenizers.chat import Chat
from raystride.pipelines.system.storage.folder import Folder
from tests.bases import CHATML, write_tokenizer

CALL = {"type": "function", "id": "c1", "function": {"name": "weather", "arguments": {"city": "Basel"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}
CHATS = [
    ([{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": "No."}], ()),
    (
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Rain?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "hm", "weight": 0},
            {"role": "tool", "content": "sun", "tool_call_id": "c1"},
            {"role": "assistant", "content": "No."},
        ],
        [TOOL],
    ),
]
ALL = (
    "{{ tools | tojson }}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + (m.reasoning_content or '') + m.content }}"
    "{{ m.tool_calls | tojson if m.tool_calls else '' }}{{ m.weight }}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% generation %}{{ m.content }}{% endgeneration %}{{ '<|im_end|>\n' }}{% endfor %}"
)


def _chat(folder: Path, template: str) -> Chat:
    names = dict.fromkeys(("<eos>", "<|im_start|>", "<|im_end|>"), True)
    write_tokenizer(folder, names, {"eos_token": "<eos>", "chat_template": template})
    place = Folder.from_uri(str(folder / "out"))
    train_tokenizer(TokenizerConfig(kind="file", file=str(folder / "tokenizer.json")), ["a"], place, lambda _: None)
    chat = load_tokenizer(place).chat
    assert chat
    return chat


def test_what_a_template_does_not_write_is_named_with_its_number_of_chats(tmp_path: Path) -> None:
    lines = _chat(tmp_path, CHATML).describe_losses([*CHATS, CHATS[1]])
    kinds = ("tools", "calls of tools", "thoughts", "`weight`")
    assert lines == [f"the template writes no {kind}: 2 of 3 chats have some" for kind in kinds]
    without_system = CHATML.replace("{{", "{% if message.role != 'system' %}{{", 1).replace(
        "{% endfor", "{% endif %}{% endfor", 1
    )
    (tmp_path / "other").mkdir()
    assert "system messages: 1 of 2" in str(_chat(tmp_path / "other", without_system).describe_losses(CHATS))


@pytest.mark.parametrize("chats", [CHATS, []])
def test_a_template_that_writes_all_has_no_line(chats: list[Any], tmp_path: Path) -> None:
    assert _chat(tmp_path, ALL).describe_losses(chats) == []


def test_marks_that_leave_out_the_end_of_an_answer_are_named(tmp_path: Path) -> None:
    (line,) = _chat(tmp_path, MARKED).describe_losses([])
    assert "leave out <|im_end|>" in line
    whole = MARKED.replace("{% endgeneration %}{{ '<|im_end|>\n' }}", "{{ '<|im_end|>\n' }}{% endgeneration %}")
    (tmp_path / "whole").mkdir()
    assert _chat(tmp_path / "whole", whole).describe_losses([]) == []
