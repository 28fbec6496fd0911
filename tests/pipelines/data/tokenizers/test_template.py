"""Templates get what transformers gives them: a day, `tojson`, three names of thoughts. Exports keep the day."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.config import TokenizerConfig
from raystride.pipelines.data.tokenizers import load_tokenizer, train_tokenizer
from raystride.pipelines.data.tokenizers.template import Template, export_template
from raystride.pipelines.data.tokenizers.training import read_chat
from raystride.pipelines.system.storage.folder import Folder
from tests.bases import write_tokenizer
from tests.errors import refused

SMOL = (
    "{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}\n"
    '{{- "<|im_start|>system\\n" -}}\n'
    '{%- set today = strftime_now("%d %B %Y") -%}\n{{- "Today Date: " ~ today ~ "\\n\\n" -}}\n'
    "{%- for message in messages -%}\n  {%- if message.role == 'user' -%}\n"
    "    {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' -}}\n  {%- else -%}\n"
    "    {{- '<|im_start|>assistant\\n' + message.content + '<|im_end|>\\n' -}}\n  {%- endif -%}\n{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}\n    {{- '<|im_start|>assistant\\n' -}}\n{%- endif -%}"
)
"""In the way of SmolLM3's."""
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]


def _render_by_transformers(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    found = render_jinja_template([messages], chat_template=template, **options)
    return str((found[0] if isinstance(found, tuple) else found)[0])


def _content(template: str, **fields: Any) -> dict[str, Any]:
    return {"format": 2, "template": template, "tokens": {"bos_token": "<s>", "eos_token": "</s>"}, **fields}


def _trl_template(name: str) -> str:
    trl = pytest.importorskip("trl")
    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def _write(folder: Path, template: str) -> TokenizerConfig:
    write_tokenizer(folder, {"<eos>": True, "<|im_start|>": True, "<|im_end|>": True}, {"chat_template": template})
    return TokenizerConfig(kind="file", file=str(folder / "tokenizer.json"), end_token="<eos>")


@pytest.mark.parametrize("template", [SMOL, "gptoss", "llama3_2"])
def test_a_template_writes_the_day_of_the_settings_and_its_export_keeps_it(template: str, tmp_path: Path) -> None:
    text = template if "{" in template else _trl_template(template)
    settings = _write(tmp_path, text)
    chat = read_chat(settings)
    assert chat
    assert chat["date"] == "2026-01-01"
    rendered = Template(chat | {"marked": None}).render(CHAT)
    exported = _render_by_transformers(export_template(chat), CHAT)
    assert "2026" in rendered
    assert exported == rendered
    # An export is the base of another run: it keeps its day, whatever the settings say.
    again = read_chat(_write(tmp_path / "again", export_template(chat)))
    assert again
    assert "date" not in again
    assert Template(again).render(CHAT) == rendered
    assert export_template(again) == export_template(chat)


def test_the_day_is_part_of_the_chat_only_where_a_template_asks_for_it(tmp_path: Path) -> None:
    settings = _write(tmp_path, SMOL)
    changed = TokenizerConfig(kind="file", file=settings.file, date="2024-07-09")
    assert "Today Date: 09 July 2024" in Template(read_chat(changed) or {}).render(CHAT)
    (tmp_path / "plain.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    plain = TokenizerConfig(kind="file", file=settings.file, date="2024-07-09", chat_template=str(tmp_path / "plain.jinja"))
    assert "date" not in (read_chat(plain) or {"date": ""})
    with refused("tokenizer.date", names=["2026-01-01"]):
        TokenizerConfig(date="July")


def test_a_stored_chat_keeps_its_day(tmp_path: Path) -> None:
    place = Folder.from_uri(str(tmp_path / "out"))
    train_tokenizer(_write(tmp_path, SMOL), ["a text"], place, lambda _: None)
    encoder = load_tokenizer(place)
    assert encoder.chat
    assert "Today Date: 01 January 2026" in encoder.decode(encoder.chat.question("Hi").tolist())
    # Stored by 0.3, a template has no such function, and goes on as it was.
    stored = json.loads((tmp_path / "out" / "chat.json").read_text())
    earlier = {"template": "{{ strftime_now('%Y') if strftime_now is defined else 'then' }}", "tokens": stored["tokens"]}
    assert Template(earlier).render(CHAT) == "then"


VALUE: Mapping[str, Any] = {"b": "ü<", "a": [1, {"c": None}]}


@pytest.mark.parametrize(
    "options",
    [
        "",
        "ensure_ascii=False",
        "ensure_ascii=True",
        "True",
        "indent=4",
        "False, 2",
        "separators=(',', ':')",
        "sort_keys=True",
    ],
)
def test_tojson_has_the_signature_of_transformers(options: str) -> None:
    template = f"{{{{ messages[0].content | tojson({options}) }}}}"
    chat = [{"role": "user", "content": VALUE}]
    assert Template(_content(template)).render(chat) == _render_by_transformers(template, chat)


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_thoughts_have_the_names_of_transformers(key: str) -> None:
    template = "{{ messages[0].reasoning_content }} {{ messages[0].thinking }} {{ documents is defined }}"
    chat = [{"role": "assistant", "content": "Yes", key: "hm"}]
    assert Template(_content(template)).render(chat) == _render_by_transformers(template, chat)


def test_arguments_are_given_as_text_where_the_object_fails() -> None:
    calls = [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": None}}}]
    chat = [{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": None, "tool_calls": calls}]
    template = "{{ '```json' + messages[1].tool_calls[0].function.arguments + '```' }}"
    assert Template(_content(template)).render(chat) == '```json{"city": "Zürich", "days": null}```'
    with pytest.raises(ValueError, match="concatenate"):
        Template({"template": template, "tokens": {}}).render(chat)  # of 0.3
    assert "days" in Template(_content(_trl_template("deepseekv3"))).render(chat)
    # As chats are stored, a message with calls has no content; R1's template asks whether it is null.
    stored = [chat[0], {key: value for key, value in chat[1].items() if key != "content"}]
    assert "days" in Template(_content(_trl_template("deepseek_r1_distill"))).render(stored)
