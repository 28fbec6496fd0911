"""Marked copies render the text of the original and mark what the assistant writes, as TRL's training variants do."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.config import TokenizerConfig
from raystride.pipelines.data.tokenizers import train_tokenizer
from raystride.pipelines.data.tokenizers.conversation import BEGIN, END, split_stretches
from raystride.pipelines.data.tokenizers.marked_copies import mark_known_template
from raystride.pipelines.data.tokenizers.template import Template, export_template
from raystride.pipelines.data.tokenizers.training import read_chat
from raystride.pipelines.system.storage.folder import Folder
from tests.bases import write_tokenizer

TEMPLATES = {
    "qwen3": "Qwen3",
    "qwen3_5_think": "Qwen3.5",
    "qwen3_5_nothink": "Qwen3.5",
    "qwen3_6": "Qwen3.6",
    "nemotron_3_nano": "Nemotron 3 Nano",
    "nemotron_3_super": "Nemotron 3 Super",
    "nemotron_3_ultra": "Nemotron 3 Ultra",
    "nemotron_3_5_lightning": "Nemotron 3.5",
    "gptoss": "gpt-oss",
    "deepseek_r1_distill": "DeepSeek-R1-Distill",
    "deepseekv3": "DeepSeek-V3",
}
USER, TOOL = {"role": "user", "content": "Rain?"}, {"role": "tool", "name": "weather", "content": "sun"}


def _say(text: str | None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def _call(*cities: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "weather", "arguments": {"city": city}}} for city in cities]


CHATS: Mapping[str, list[dict[str, Any]]] = {
    "one turn": [USER, _say("Yes.")],
    "two turns": [{"role": "system", "content": "Be brief."}, USER, _say("Yes."), USER, _say("No.")],
    "thoughts": [USER, _say("Yes.", reasoning_content="hm"), USER, _say("No.", reasoning_content="so")],
    "thoughts in the text": [USER, _say("<think>\nhm\n</think>\n\nYes."), USER, _say("<think>\nso\n</think>\n\nNo.")],
    "a call": [USER, _say(None, tool_calls=_call("Basel")), TOOL, _say("Sun.")],
    "two calls": [USER, _say(None, tool_calls=_call("Basel", "Bern")), TOOL, TOOL, _say("Sun.")],
    "a call with text": [USER, _say("Look.", tool_calls=_call("Basel")), TOOL, _say("Sun."), USER, _say("Yes.")],
}


def _read(name: str) -> str:
    trl = pytest.importorskip("trl")
    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def _template(text: str) -> Template:
    tokens = {"bos_token": "<bos>", "eos_token": "<eos>"}
    return Template({"format": 2, "template": text, "tokens": tokens, "date": "2026-01-01"})


def _said(text: str) -> Sequence[str]:
    return re.findall(f"{BEGIN}(.*?){END}", text, re.DOTALL)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_copy_renders_the_original_and_marks_the_assistants_text(name: str) -> None:
    original, marked = _read(name), mark_known_template(_read(name))
    assert marked
    assert marked.family == TEMPLATES[name]
    plain, copy, theirs = _template(original), _template(marked.template), _template(_read(f"{name}_training"))
    compared = 0
    for about, messages in CHATS.items():
        try:
            text = plain.render(messages)
        except ValueError:  # R1's and V3's ask for a content, or for none
            with pytest.raises(ValueError, match="refused"):
                copy.render(messages)
            continue
        ours = copy.render(messages)
        assert ours.replace(BEGIN, "").replace(END, "") == text, about
        for asks in (True, False):
            assert copy.render([USER], asks=asks) == plain.render([USER], asks=asks)
        said = "".join(_said(ours))
        for message in messages:
            spoken = (message["content"] or "").rpartition("</think>")[2].strip()
            if spoken in text:  # gpt-oss's leaves out what is said beside a call
                assert (spoken in said) == (message["role"] == "assistant"), about
        by_trl = theirs.render(messages)
        if by_trl.replace(BEGIN, "").replace(END, "") == text:
            compared += 1
            # TRL's marks hold the header of DeepSeek's answers and, behind results of tools, their end.
            headers = r"<｜Assistant｜>|<｜tool▁outputs▁end｜>"
            assert said == re.sub(headers, "", "".join(_said(by_trl))), about
    assert compared


@pytest.mark.parametrize("name", TEMPLATES)
def test_only_templates_that_cannot_be_split_are_copied(name: str) -> None:
    template = _template(_read(name))
    with pytest.raises(ValueError, match="turn after turn"):
        split_stretches(template.render, CHATS["two turns"], marked=False, closings=["<bos>", "<eos>"])


def test_a_line_says_so_and_the_export_has_the_original(tmp_path: Path) -> None:
    names = {"<eos>": True, "<|im_start|>": True, "<|im_end|>": True}
    write_tokenizer(tmp_path, names, {"eos_token": "<eos>", "chat_template": _read("qwen3")})
    settings = TokenizerConfig(kind="file", file=str(tmp_path / "tokenizer.json"))
    lines: list[str] = []
    encoder = train_tokenizer(settings, ["a text"], Folder.from_uri(str(tmp_path / "out")), lines.append)
    assert any("Qwen3's" in line for line in lines)
    assert export_template(read_chat(settings) or {}) == _read("qwen3")
    assert encoder.chat
    ids, mask = encoder.chat.conversation(CHATS["two turns"])
    assert encoder.decode(ids[mask].tolist()) == "Yes.\n<think>\n\n</think>\n\nNo.\n"


def test_a_template_that_is_not_as_published_is_left_alone() -> None:
    assert mark_known_template(_read("qwen3") + " ") is None
