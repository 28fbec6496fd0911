"""Whole chats: the assistant's text is separated from the rest, and has the ids of transformers."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from raystride.pipelines.config import TokenizerConfig
from raystride.pipelines.data.tokenizers import load_tokenizer, train_tokenizer
from raystride.pipelines.data.tokenizers.chat import Chat, check_conversations
from raystride.pipelines.data.tokenizers.conversation import BEGIN, END, marks_answers
from raystride.pipelines.system.storage.folder import Folder
from tests.preferences import CHATML, write_base

TOOLS = (
    "{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{{ message.content or '' }}"
    "{%- for call in message.tool_calls or [] %}{{ '<call>' }}{{ call.function | tojson }}{{ '</call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
MARKED = (
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.role == 'assistant' %}{%- generation %}{{ message.content + '<|im_end|>' }}{%- endgeneration %}"
    "{%- else %}{{ message.content + '<|im_end|>' }}{%- endif %}{{ '\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
# The last answer has its thoughts, earlier ones have lost theirs.
FORGETFUL = (
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{%- if loop.last and message.role == 'assistant' %}{{ '<think>' }}{%- endif %}{{ message.content + '<|im_end|>\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
# As Phi-3's: a chat that goes no further has one more token, which is of no turn.
CLOSED = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_start|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% else %}{{ eos_token }}{% endif %}"
)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "what is the sum?"},
    {"role": "assistant", "content": "it is 46."},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "I am sure."},
]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 12, "b": "<|im_end|>"}}}
USE = [
    {"role": "user", "content": "the sum?"},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "content": "46"},
    {"role": "assistant", "content": "it is 46."},
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("chat"), chat=True)


def _encoder(base: Path, out: Path, template: str) -> Any:
    (base / "chat_template.jinja").write_text(template)
    chosen = TokenizerConfig(kind="file", file=str(base / "tokenizer.json"), end_token="<|im_end|>")
    train_tokenizer(chosen, ["some text"], Folder.from_uri(str(out)), lambda _: None)
    return load_tokenizer(Folder.from_uri(str(out)))


def _assistant_texts(encoder: Any, messages: list[dict[str, Any]], tools: tuple[Any, ...] = ()) -> str:
    ids, mask = encoder.chat.conversation(messages, tools)
    assert len(ids) == len(mask)
    return str(encoder.decode(ids[mask].tolist()))


@pytest.mark.parametrize("template", [CHATML, TOOLS, MARKED])
def test_all_that_the_assistant_says_is_learned_and_nothing_else(base: Path, tmp_path: Path, template: str) -> None:
    encoder = _encoder(base, tmp_path, template)
    turns = _assistant_texts(encoder, TALK).replace("\n", "").replace("<|im_end|>", "")
    assert turns == "it is 46.I am sure."
    ids, mask = encoder.chat.conversation(TALK)
    ends = ids == encoder.end_id
    assert (ends & mask).sum() == 2, "the tokens that end the assistant's turns are learned"
    assert (ends & ~mask).sum() == 3


@pytest.mark.parametrize("template", [CHATML, TOOLS, MARKED, CLOSED])
def test_the_ids_are_those_of_transformers(base: Path, tmp_path: Path, template: str) -> None:
    from transformers import AutoTokenizer

    encoder = _encoder(base, tmp_path, template)
    theirs = AutoTokenizer.from_pretrained(str(base))
    found = theirs.apply_chat_template(TALK, chat_template=template, tokenize=True, return_dict=True,
                                       return_assistant_tokens_mask=marks_answers(template))  # fmt: skip
    ids, mask = encoder.chat.conversation(TALK)
    assert ids.tolist() == list(found["input_ids"])
    if marks_answers(template):
        assert mask.astype(int).tolist() == list(found["assistant_masks"])
    asked = theirs.apply_chat_template(
        TALK[:-1], chat_template=template, tokenize=True, return_dict=False, add_generation_prompt=True
    )
    assert encoder.chat.opening(TALK[:-1]).tolist() == asked
    assert encoder.chat.opening(TALK[:-1]).tolist() == ids[: len(asked)].tolist(), "asked as it was learned"


def test_text_after_the_last_turn_belongs_to_no_turn(base: Path, tmp_path: Path) -> None:
    encoder = _encoder(base, tmp_path, CLOSED)
    check_conversations({"template": CLOSED, "tokens": {"eos_token": "<|im_end|>"}})
    ids, mask = encoder.chat.conversation(TALK)
    assert _assistant_texts(encoder, TALK) == "it is 46.\nI am sure.\n"
    assert ids[-1] == encoder.end_id
    assert not mask[-1]
    assert (ids == encoder.end_id).sum() == 1
    assert mask[:-1][-1], "what ends the turn is learned"


def test_calls_of_tools_are_learned_and_their_results_are_not(base: Path, tmp_path: Path) -> None:
    encoder = _encoder(base, tmp_path, TOOLS)
    tools = ({"name": "add", "description": "Adds <|im_end|>"},)
    said = _assistant_texts(encoder, USE, tools)
    assert said.count("46") == 1
    assert '"name": "add"' in said
    ids, mask = encoder.chat.conversation(USE, tools)
    everything = encoder.decode(ids.tolist())
    assert '"description"' in everything
    assert "<|im_end|>" in everything, "what was hidden from the template comes back"
    assert (ids == encoder.end_id).sum() == 5, "neither a tool nor a call of it ends a turn"
    assert not mask[: len(encoder.chat.opening(USE[:1], tools))].any()


def test_a_template_that_rewrites_earlier_turns_raises_with_a_remedy(base: Path, tmp_path: Path) -> None:
    encoder = _encoder(base, tmp_path, FORGETFUL)
    with pytest.raises(ValueError, match=r"not written turn after turn.*\{% generation %\}.*tokenizer.chat_template"):
        encoder.chat.conversation(TALK)
    thinking = FORGETFUL.replace("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n<think>\n' }}")
    for template, match in ((thinking, "turn after turn"), ("{% generation %}{% endgeneration %}x", "does not mark")):
        with pytest.raises(ValueError, match=match):
            check_conversations({"template": template, "tokens": {}})
    for template in (CHATML, TOOLS, MARKED, FORGETFUL):  # its single turns are right
        check_conversations({"template": template, "tokens": {}})


LETTERS = sorted({*"ab<|im_end|>_start\n ", *"user", *"assistant", BEGIN, END})


def _letters() -> str:
    """A `tokenizer.json` in which every character is an id."""
    letters = Tokenizer(models.WordLevel({letter: number for number, letter in enumerate(LETTERS)}, unk_token="a"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    letters.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return str(letters.to_str())


@given(st.lists(st.text("ab<|im_end|>\n \ue001\ue002"), min_size=1, max_size=4), st.sampled_from([CHATML, MARKED]))
@settings(deadline=None, max_examples=60)
def test_nobody_forges_a_turn(contents: list[str], template: str) -> None:
    first = len(LETTERS)
    chat = Chat({"template": template, "tokens": {}}, _letters(), {"<|im_start|>": first, "<|im_end|>": first + 1})
    messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(contents)]
    ids, mask = chat.conversation(messages)
    assert (ids == first).sum() == (ids == first + 1).sum() == len(messages)
    text = "".join("" if number >= first else LETTERS[number] for number in ids)
    assert text == "".join(f"{each['role']}\n{each['content']}\n" for each in messages)
    said = "".join(LETTERS[number] for number in ids[mask] if number < first)
    after = "" if template == MARKED else "\n"
    assert said == "".join(f"{each}{after}" for each in contents[1::2])
