"""The table of chat templates in docs/finetuning.md, from the originals that TRL ships: `python -m tests.templates_page`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from raystride.pipelines.data.tokenizers.conversation import marks_answers, split_stretches
from raystride.pipelines.data.tokenizers.marked_copies import mark_known_template
from raystride.pipelines.data.tokenizers.template import Template, needs_date
from raystride.pipelines.data.tokenizers.unwritten import describe_unwritten

PAGE = Path(__file__).parent.parent / "docs" / "finetuning.md"
BEGIN, END = "<!-- templates -->\n", "<!-- end of templates -->\n"
NAMES = {
    "llama3": "Llama 3",
    "llama3_1": "Llama 3.1",
    "llama3_2": "Llama 3.2",
    "qwen2_5": "Qwen2.5",
    "qwen3": "Qwen3",
    "qwen3_instruct_2507": "Qwen3 2507",
    "qwen3_5_think": "Qwen3.5",
    "qwen3_6": "Qwen3.6",
    "phi3": "Phi-3",
    "phi3_5": "Phi-3.5",
    "gemma": "Gemma, Gemma 2",
    "gemma3": "Gemma 3",
    "gptoss": "gpt-oss",
    "deepseekv3": "DeepSeek-V3",
    "deepseek_r1_distill": "DeepSeek-R1-Distill",
    "nemotron_3_nano": "Nemotron 3 Nano",
    "cohere2": "Command R7B",
    "glm4moe": "GLM-4.5",
    "lfm2": "LFM2",
}
USER = {"role": "user", "content": "Rain?"}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "weather", "arguments": {"city": "Basel"}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "", "parameters": {"properties": {}}}}


def _say(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


CALLING = {"role": "assistant", "tool_calls": [CALL]}
PARTS: dict[str, tuple[list[dict[str, Any]], list[Any]]] = {
    "system": ([SYSTEM, USER, _say("No.")], []),
    "tools": ([USER, _say("No.")], [TOOL]),
    "calls": ([USER, CALLING, {"role": "tool", "name": "weather", "content": "sun"}, _say("No.")], []),
    "thoughts": ([USER, _say("No.", reasoning_content="hm")], []),
}


def write_table(folder: Path) -> str:
    """Returns the table for the templates in TRL's folder."""
    rows = ["| template | several turns | " + " | ".join(PARTS) + " | day |", "| --- |" + " --- |" * (len(PARTS) + 2)]
    for file, name in NAMES.items():
        text = (folder / f"{file}.jinja").read_text(encoding="utf-8")
        rows.append(f"| {name} | {' | '.join(_describe(text))} |")
    return "\n".join(rows) + "\n"


def _describe(text: str) -> Iterator[str]:
    marked = mark_known_template(text)
    content = {"format": 2, "template": text, "tokens": {"bos_token": "<bos>", "eos_token": "<eos>"}, "date": "2026-01-01"}
    template = Template(content | ({"marked": marked.template} if marked else {}))
    yield _describe_turns(template, is_copy=marked is not None)
    for chat in PARTS.values():
        try:
            template.render(*chat)
        except ValueError:
            yield "refused"
        else:
            yield "no" if describe_unwritten(template.render, [chat]) else "yes"
    yield "`tokenizer.date`" if needs_date(text) else ""


def _describe_turns(template: Template, *, is_copy: bool) -> str:
    try:
        split_stretches(
            template.render, [USER, _say("No.")] * 2, marked=template.marks_answers, closings=template.tokens.values()
        )
    except ValueError:
        return "left out"
    return "marked by us" if is_copy else "has marks" if marks_answers(template.text) else "yes"


def find_templates() -> Path:
    """Returns TRL's folder of templates. Raises ImportError without TRL."""
    import trl

    return Path(trl.__file__).parent / "chat_templates"


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + write_table(find_templates()) + END + rest.partition(END)[2])
