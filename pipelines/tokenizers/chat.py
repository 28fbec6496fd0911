"""Chats as a tokenizer's own template writes them: which words and special tokens stand around what each side says.

The template is the Jinja text that Hugging Face keeps beside a tokenizer (`chat_template.jinja`, or in
`tokenizer_config.json`). It comes from elsewhere, so it runs in Jinja's sandbox. Special tokens that it writes become their
ids; what people write in between is encoded as any text, so nobody can forge a turn by typing `<|im_end|>`.

    chat = load_chat(folder, encoder)                        # None: there is no template
    question = chat.question("Who are you?")                 # ids up to where the answer begins
    answer = chat.answer("Who are you?", "A model.")         # ids of the answer, with the token that ends a turn
    chat.question([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}])
    ids, mask = chat.conversation(messages, tools)           # a whole chat, of which the assistant's turns are learned
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from raystride.pipelines.files import Folder, parent_and_name
from raystride.pipelines.tokenizers.conversation import BEGIN, END, SpecialTokens, check_turns, marks_answers, stretches

if TYPE_CHECKING:
    from jinja2 import Template
    from tokenizers import Tokenizer

FILE = "chat.json"
"""In a tokenizer's folder: the template, and the tokens that it knows by name."""
SPOKEN = "\ue000"
"""Stands for what somebody says, to see what the template writes around it: a character that no text has."""
Message = Mapping[str, Any]
Turns = str | Sequence[Message]
"""What a side says: a text, or messages of several; see `raystride.pipelines.tasks.messages`."""
NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class TextEncoder(Protocol):
    """What is asked of an encoder here."""

    def encode(self, text: str) -> np.ndarray: ...


class Chat:
    """A template and the special tokens of its tokenizer."""

    def __init__(self, content: dict[str, Any], specials: dict[str, int], encoder: TextEncoder) -> None:
        """`content` is that of the chat file. Raises ValueError where the template is none."""
        self._template, self._tokens = _compile(content["template"]), content["tokens"]
        self._specials, self._encoder = specials, encoder
        self._marks, self._hidden = marks_answers(content["template"]), SpecialTokens(list(specials))
        # The longest first: one special token may be the beginning of another.
        names = sorted(specials, key=len, reverse=True)
        self._cut = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None

    def question(self, prompt: Turns) -> np.ndarray:
        """Ids (uint32) of the first turns and of what leads in the answer. Raises ValueError where the template refuses."""
        turns = self._turns(prompt, "user")
        return self._ids(self._written(turns), self._written(_hidden(turns)), turns)

    def answer(self, prompt: Turns, completion: Turns) -> np.ndarray:
        """Ids (uint32) of an answer to that, and of what ends its turn. Raises ValueError as above."""
        asked, said = self._turns(prompt, "user"), self._turns(completion, "assistant")
        return self._ids(self._behind(asked, said), self._behind(_hidden(asked), _hidden(said)), said)

    def conversation(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> tuple[np.ndarray, np.ndarray]:
        """Ids (uint32) of a whole chat, and which of them (bool) the assistant says, with what ends its turns.

        Raises ValueError where the template refuses it, or does not tell where turns begin and end.
        """
        return self._stretched(messages, tools, asks=False)

    def opening(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> np.ndarray:
        """Ids (uint32) of a chat and of what leads in the next answer, as `conversation` has them. Raises as that does."""
        return self._stretched(messages, tools, asks=True)[0]

    def _stretched(self, messages: Sequence[Message], tools: Sequence[Any], *, asks: bool) -> tuple[np.ndarray, np.ndarray]:
        render = partial(_render, self._template, self._tokens, self._hidden.hide(list(tools)))
        parts, masks = [np.empty(0, np.uint32)], [np.empty(0, bool)]
        for stretch in stretches(render, self._hidden.hide(messages), marked=self._marks, asks=asks):
            found = self._marked(stretch.text, self._hidden)
            parts += found
            masks.append(np.full(sum(map(len, found)), stretch.said))
        return np.concatenate(parts), np.concatenate(masks)

    def _turns(self, said: Turns, role: str) -> list[Message]:
        """Messages; a text is one of this role. Special tokens are hidden in all but what is said, in calls of tools too."""
        turns = [{"role": role, "content": said}] if isinstance(said, str) else said
        return [{key: each if key == "content" else self._hidden.hide(each) for key, each in turn.items()} for turn in turns]

    def _behind(self, prompt: list[Message], completion: list[Message]) -> str:
        """What a completion adds to its question."""
        before, whole = self._written(prompt), self._written([*prompt, *completion], answered=True)
        if not whole.startswith(before):
            raise ValueError("is another text for the chat template once it is answered: set tokenizer.chat_template none")
        return whole[len(before) :]

    def _written(self, messages: list[Message], *, answered: bool = False) -> str:
        text = _render(self._template, self._tokens, [], messages, asks=not answered)
        return text.replace(BEGIN, "").replace(END, "") if self._marks else text

    def _ids(self, text: str, pattern: str, turns: list[Message]) -> np.ndarray:
        """Special tokens become their ids, but not in what was said: it stands where SPOKEN does in the pattern."""
        around = pattern.split(SPOKEN)
        said = _said(text, around, [turn["content"] for turn in turns if _speaks(turn)])
        if said is None:  # a template that looks at what is said, for instance
            around, said = [text], []
        parts = [*self._marked(around[0], self._hidden)]
        for spoken, after in zip(said, around[1:], strict=True):
            parts += [*([self._encoder.encode(spoken)] if spoken else []), *self._marked(after, self._hidden)]
        return np.concatenate([*parts, np.empty(0, np.uint32)])

    def _marked(self, text: str, hidden: SpecialTokens) -> list[np.ndarray]:
        pieces = self._cut.split(text) if self._cut else [text]
        return [
            np.array([self._specials[piece]], np.uint32)
            if piece in self._specials
            else self._encoder.encode(hidden.restore(piece))
            for piece in pieces
            if piece
        ]


def _hidden(turns: list[Message]) -> list[Message]:
    """The same turns with a stand-in for what is said."""
    return [{**turn, "content": SPOKEN} if _speaks(turn) else turn for turn in turns]


def _speaks(turn: Message) -> bool:
    """Whether a turn says something; who calls tools need not."""
    return isinstance(turn.get("content"), str)


def _said(text: str, around: list[str], contents: list[str]) -> list[str] | None:
    """What a text has between these pieces: the contents, or what a template leaves of them. None: it has other pieces."""
    if len(around) == 2:  # whatever becomes of it
        before, after = around
        fits = len(text) >= len(before) + len(after) and text.startswith(before) and text.endswith(after)
        return [text[len(before) : len(text) - len(after)]] if fits else None
    if len(around) != len(contents) + 1 or not text.startswith(around[0]):
        return None
    at, said = len(around[0]), []
    for content, after in zip(contents, around[1:], strict=True):
        left = (each for each in (content, content.strip()) if text.startswith(each + after, at))
        if (found := next(left, None)) is None:
            return None
        said.append(found)
        at += len(found) + len(after)
    return said if at == len(text) else None


def load_chat(folder: Folder, encoder: TextEncoder) -> Chat | None:
    """The chat of a tokenizer's folder; None where it was saved without one."""
    if not folder.exists(FILE):
        return None
    tokenizer = parse_tokenizer(folder.read("tokenizer.json").decode())
    specials = {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    return Chat(folder.read_json(FILE), specials, encoder)


def parse_tokenizer(content: str) -> "Tokenizer":
    """The tokenizer, which takes special tokens in a text as ordinary text. Raises ValueError where it is none."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(content)
    except Exception as error:  # tokenizers raises the bare class
        raise ValueError(str(error)) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def find_chat(place: Folder, chosen: str) -> dict[str, Any] | None:
    """What to save of the template that `tokenizer.chat_template` chooses; `place` is where `tokenizer.json` lies.

    Raises ValueError where a file that it names is no template.
    """
    config = place.read_json("tokenizer_config.json") if place.exists("tokenizer_config.json") else {}
    template: Any = None
    if chosen not in ("auto", "none"):
        where, name = parent_and_name(Folder.at(chosen).uri)
        template = where.read(name).decode()
    elif chosen == "auto" and place.exists("chat_template.jinja"):
        template = place.read("chat_template.jinja").decode()
    elif chosen == "auto":
        template = config.get("chat_template")
        if isinstance(template, list):  # several by name
            template = {each["name"]: each["template"] for each in template}.get("default")
    if not template:
        return None
    _compile(template)
    named = {name: config.get(name) for name in NAMES}
    tokens = {name: token["content"] if isinstance(token, dict) else token for name, token in named.items() if token}
    return {"template": template, "tokens": tokens}


def check_conversations(content: Mapping[str, Any]) -> None:
    """Raises ValueError where the template of a chat file does not tell where the assistant's turns begin and end."""
    template = content["template"]
    check_turns(partial(_render, _compile(template), content["tokens"], []), marked=marks_answers(template))


def _render(
    template: "Template", tokens: Mapping[str, str], tools: Sequence[Any], messages: Sequence[Message], *, asks: bool
) -> str:
    from jinja2 import TemplateError

    try:
        return template.render(messages=messages, tools=tools or None, add_generation_prompt=asks, **tokens)
    except (TemplateError, TypeError) as error:
        raise ValueError(f"is refused by the chat template: {error}") from error


def _compile(template: str) -> "Template":
    """The template, with what Hugging Face gives to templates besides Jinja's own."""
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    from raystride.pipelines.tokenizers.generation_tag import Generation

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    try:
        return environment.from_string(template)
    except TemplateError as error:
        raise ValueError(f"its chat template is none: {error}") from error


def _refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, **options)
