"""Chat templates of tokenizers: they render turns with the words and special tokens around each message.

The template is the Jinja text that Hugging Face keeps beside a tokenizer (`chat_template.jinja`, or in
`tokenizer_config.json`). It is untrusted, so it runs in Jinja's sandbox. Special tokens that it writes, and added tokens
that it uses as markers, become their ids. Message contents are encoded as ordinary text, so nobody can forge a turn by
typing `<|im_end|>`. Only the assistant may write `<think>` and other paired tags. The tag `{% generation %}` means what it
does in Hugging Face: the assistant is trained on the text inside it.

    chat = load_chat(folder, encoder)                        # None: there is no template
    question = chat.question("Who are you?")                 # ids (uint32) up to the beginning of the answer
    ids, count = chat.exchange("Who are you?", "A model.")   # ids of both, and how many are the question's
    ids, mask = chat.conversation(messages, tools)           # a whole chat, with a mask of the assistant's turns
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from raystride.pipelines.data.tokenizers.conversation import (
    BEGIN,
    END,
    SpecialTokens,
    Stretch,
    check_turns,
    split_stretches,
)
from raystride.pipelines.data.tokenizers.marked_copies import mark_known_template
from raystride.pipelines.data.tokenizers.rendered import RenderedEncoder
from raystride.pipelines.data.tokenizers.template import FORMAT, Template, is_earlier, needs_date
from raystride.pipelines.data.tokenizers.unwritten import describe_unwritten
from raystride.pipelines.system.storage.folder import Folder, parent_and_name

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE = "chat.json"
"""In a tokenizer's folder: the template, and the tokens that it refers to by name."""
CONTENT_STAND_IN = "\ue000"
"""Replaces contents, to find the template's text around them: a character that no text has."""
Message = Mapping[str, Any]
Turns = str | Sequence[Message]
"""The turns of one side: a text, or several messages; see `raystride.pipelines.data.tasks.messages`."""
_TAG = re.compile(r"</?([a-z_]+)>")
_SIGN = re.compile(r"[^\w\s\u2581]")
_EARLIER_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
TOKEN_NAMES = (*_EARLIER_TOKEN_NAMES, "sep_token", "cls_token", "mask_token")


class TextEncoder(Protocol):
    """An encoder, as far as this module needs it."""

    def encode(self, text: str) -> np.ndarray: ...


class ChatEncoder(TextEncoder, Protocol):
    """An encoder of a tokenizer that may have a template."""

    def with_plain_tokens(self, names: Collection[str]) -> TextEncoder:
        """Returns an encoder that reads these added tokens as ordinary text."""
        ...


class Chat:
    """A template and the tokens of its tokenizer. Ids are those of the whole rendered chat, as in transformers."""

    def __init__(
        self,
        content: Mapping[str, Any],
        tokenizer: str,
        specials: Mapping[str, int],
        added: Mapping[str, int] | None = None,
        markers: Collection[str] = (),
    ) -> None:
        """`content` is that of the chat file, `tokenizer` that of `tokenizer.json`; `specials` and all `added` tokens are
        ids by name.

        `markers` are added tokens that the template writes. Raises ValueError if the template is invalid.
        """
        self._template = Template(content)
        self._added = {**specials, **(added or {})}
        self._specials = {name: self._added[name] for name in (*specials, *markers)}
        self._hidden, self._tags = SpecialTokens(list(self._specials)), _paired_tags(markers)
        self._encoder = RenderedEncoder(tokenizer, self._hidden)

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """The id of the first added token that the template writes after an answer; empty if it writes none there."""
        try:
            text = self._render_turns(
                [*self._hide_turns("?", "user"), {"role": "assistant", "content": CONTENT_STAND_IN}], answered=True
            )
        except ValueError:  # it refuses a chat with one question
            return ()
        _, spoken, behind = text.rpartition(CONTENT_STAND_IN)
        found = [(position, -len(name), name) for name in self._added if spoken and (position := behind.find(name)) >= 0]
        return (self._added[min(found)[2]],) if found else ()

    def question(self, prompt: Turns) -> np.ndarray:
        """Returns ids (uint32) of the first turns and of the answer's header. Raises ValueError if the template refuses
        them."""
        return self._encoder.encode(self._render_turns(self._hide_turns(prompt, "user"))).ids

    def exchange(self, prompt: Turns, completion: Turns) -> tuple[np.ndarray, int]:
        """Returns ids (uint32) of the prompt with its answer and the end of its turn, and how many are the prompt's.

        Raises ValueError as `question` does.
        """
        asked, said = self._hide_turns(prompt, "user"), self._hide_turns(completion, "assistant")
        before, answer = self._render_answer(asked, said)
        found = self._encoder.encode(before + answer)
        return found.ids, found.count_ended(len(before))

    def conversation(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> tuple[np.ndarray, np.ndarray]:
        """Returns ids (uint32) of a whole chat, and a mask (bool) of the assistant's turns, with their end tokens.

        Raises ValueError if the template refuses it, or the bounds of turns cannot be found.
        """
        return self._encode_stretches(self._split(messages, tools, asks=False))

    def opening(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> np.ndarray:
        """Returns ids (uint32) of a chat and of the next answer's header. Raises ValueError if the template refuses them."""
        turns = [self._hide(message) for message in messages]
        return self._encoder.encode(self._render_turns(turns, self._hidden.hide(list(tools)))).ids

    def describe_losses(self, chats: Iterable[tuple[Sequence[Message], Sequence[Any]]]) -> list[str]:
        """Returns lines about what these chats hold, or what ends an answer, and is not learned because of the template."""
        lines = describe_unwritten(self._template.render, chats)
        with suppress(ValueError):  # it refuses a chat with one question
            ids, mask = self.conversation([{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}])
            if self.end_ids and not np.isin(ids[mask], self.end_ids).any():
                end = next(name for name, number in self._added.items() if number == self.end_ids[0])
                lines.append(f"the template's marks leave out {end}, which ends an answer: no answer learns to end")
        return lines

    def _split(self, messages: Sequence[Message], tools: Sequence[Any], *, asks: bool) -> list[Stretch]:
        render = partial(self._template.render, tools=self._hidden.hide(list(tools)))
        turns, closings = [self._hide(message) for message in messages], self._template.tokens.values()
        return split_stretches(render, turns, marked=self._template.marks_answers, asks=asks, closings=closings)

    def _encode_stretches(self, stretches: Sequence[Stretch]) -> tuple[np.ndarray, np.ndarray]:
        found = self._encoder.encode("".join(stretch.text for stretch in stretches))
        mask, start = np.zeros(len(found.ids), bool), 0
        for text, said in stretches:
            if said and text:  # an id across a bound is the assistant's, as in transformers
                mask[found.count_ended(start) : found.count_begun(start + len(text))] = True
            start += len(text)
        return found.ids, mask

    def _hide_turns(self, said: Turns, role: str) -> list[Message]:
        """Returns messages with special tokens hidden; a text is one message of this role."""
        turns = [{"role": role, "content": said}] if isinstance(said, str) else said
        return [self._hide(turn) for turn in turns]

    def _hide(self, turn: Message) -> Message:
        """Returns a turn with special tokens hidden in contents and tool calls, except the assistant's own tags."""
        hidden: Message = self._hidden.hide(turn, except_tokens=self._tags if turn.get("role") == "assistant" else ())
        return hidden

    def _render_answer(self, prompt: list[Message], completion: list[Message]) -> tuple[str, str]:
        """Returns the rendered prompt, and the text that a completion adds to it."""
        before, whole = self._render_turns(prompt), self._render_turns([*prompt, *completion], answered=True)
        if not whole.startswith(before):
            raise ValueError("is another text for the chat template once it is answered: set tokenizer.chat_template none")
        return before, whole[len(before) :]

    def _render_turns(self, messages: list[Message], tools: Sequence[Any] = (), *, answered: bool = False) -> str:
        text = self._template.render(messages, tools, asks=not answered)
        return text.replace(BEGIN, "").replace(END, "") if self._template.marks_answers else text


class EarlierChat(Chat):
    """A chat of a run of 0.3, which goes on as it began: each text between special tokens is encoded by itself."""

    def __init__(self, *chat: Any, plain_encoder: TextEncoder) -> None:
        """`plain_encoder` reads special tokens and markers as ordinary text; `chat` are the arguments of `Chat`."""
        super().__init__(*chat)
        self._plain_encoder = plain_encoder

    def question(self, prompt: Turns) -> np.ndarray:
        """Returns ids (uint32) of the first turns and of the answer's header."""
        turns = self._hide_turns(prompt, "user")
        return self._encode_rendered(self._render_turns(turns), self._render_turns(_with_stand_ins(turns)), turns)

    def exchange(self, prompt: Turns, completion: Turns) -> tuple[np.ndarray, int]:
        """Returns the ids of `question` and those of the answer, and the number of the first."""
        asked, said = self._hide_turns(prompt, "user"), self._hide_turns(completion, "assistant")
        _, answer = self._render_answer(asked, said)
        _, pattern = self._render_answer(_with_stand_ins(asked), _with_stand_ins(said))
        question = self.question(prompt)
        return np.concatenate((question, self._encode_rendered(answer, pattern, said))), len(question)

    def opening(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> np.ndarray:
        """Returns the ids of a chat and of the next answer's header, as in `conversation`. Raises as that does."""
        return self._encode_stretches(self._split(messages, tools, asks=True))[0]

    def _encode_stretches(self, stretches: Sequence[Stretch]) -> tuple[np.ndarray, np.ndarray]:
        parts, masks = [np.empty(0, np.uint32)], [np.empty(0, bool)]
        for stretch in stretches:
            found = self._encode_with_specials(stretch.text)
            parts += found
            masks.append(np.full(sum(map(len, found)), stretch.said))
        return np.concatenate(parts), np.concatenate(masks)

    def _encode_rendered(self, text: str, pattern: str, turns: list[Message]) -> np.ndarray:
        """Encodes the template's tokens as their ids; contents, at CONTENT_STAND_IN in `pattern`, are encoded separately."""
        around = pattern.split(CONTENT_STAND_IN)
        said = _match_contents(text, around, [turn["content"] for turn in turns if _has_content(turn)])
        if said is None:  # for instance a template that depends on contents
            around, said = [text], []
        parts = [*self._encode_with_specials(around[0])]
        for spoken, after in zip(said, around[1:], strict=True):
            parts += [*self._encode_with_specials(spoken), *self._encode_with_specials(after)]
        return np.concatenate([*parts, np.empty(0, np.uint32)])

    def _encode_with_specials(self, text: str) -> list[np.ndarray]:
        return [
            np.array([self._specials[piece]], np.uint32)
            if piece in self._specials
            else self._plain_encoder.encode(self._hidden.restore(piece))
            for piece in self._hidden.split(text)
            if piece
        ]


def _with_stand_ins(turns: list[Message]) -> list[Message]:
    """Returns the same turns with a stand-in for their contents."""
    return [{**turn, "content": CONTENT_STAND_IN} if _has_content(turn) else turn for turn in turns]


def _has_content(turn: Message) -> bool:
    """Returns whether a turn has content: it is optional with tool calls."""
    return isinstance(turn.get("content"), str)


def _match_contents(text: str, around: list[str], contents: list[str]) -> list[str] | None:
    """Returns the text between these pieces: contents, possibly changed by the template; None without a match."""
    if len(around) == 2:  # the content may be changed in any way
        before, after = around
        fits = len(text) >= len(before) + len(after) and text.startswith(before) and text.endswith(after)
        return [text[len(before) : len(text) - len(after)]] if fits else None
    if len(around) != len(contents) + 1 or not text.startswith(around[0]):
        return None
    position, said = len(around[0]), []
    for content, after in zip(contents, around[1:], strict=True):
        left = (variant for variant in (content, content.strip()) if text.startswith(variant + after, position))
        if (found := next(left, None)) is None:
            return None
        said.append(found)
        position += len(found) + len(after)
    return said if position == len(text) else None


def answer_end_ids(end_id: int, chat: Chat | None) -> tuple[int, ...]:
    """Returns the ids that end an answer: those of the end of a turn, and of a document."""
    return tuple(dict.fromkeys((*(chat.end_ids if chat else ()), end_id)))


def load_chat(folder: Folder, encoder: ChatEncoder) -> Chat | None:
    """Returns the chat of a tokenizer's folder; None if it was saved without one."""
    if not folder.exists(FILE):
        return None
    content, tokenizer = folder.read_json(FILE), folder.read("tokenizer.json").decode()
    tokens = parse_tokenizer(tokenizer).get_added_tokens_decoder()
    added = {token.content: number for number, token in tokens.items()}
    specials = {token.content: added[token.content] for token in tokens.values() if token.special}
    markers = find_markers(content, [name for name in added if name not in specials])
    if is_earlier(content):
        return EarlierChat(content, tokenizer, specials, added, markers, plain_encoder=encoder.with_plain_tokens(markers))
    return Chat(content, tokenizer, specials, added, markers)


def is_of_earlier_version(folder: Folder) -> bool:
    """Returns whether a tokenizer's folder has a chat template that 0.3 has stored."""
    return folder.exists(FILE) and is_earlier(folder.read_json(FILE))


def as_of_earlier_version(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of a chat file as 0.3 would have stored it."""
    tokens = {name: token for name, token in content["tokens"].items() if name in _EARLIER_TOKEN_NAMES}
    return {"template": content["template"], "tokens": tokens}


def find_markers(content: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Returns the tokens that a template writes around contents, or that occur in its text."""
    template, written = Template(content), [content["template"]]
    turns = [{"role": role, "content": CONTENT_STAND_IN} for role in ("system", "user", "assistant", "user")]
    for probe, asks in ((turns, True), (turns[1:], True), (turns[1:3], False)):
        with suppress(ValueError):  # for instance it refuses a system message
            written.append(template.render(probe, asks=asks))
    # Gemma has added line breaks and blanks, and others have words: they are no markers.
    return [name for name in names if _SIGN.search(name) and any(name in text for text in written)]


def _paired_tags(markers: Collection[str]) -> frozenset[str]:
    """Returns the tokens that occur in pairs around a part of an answer: `<think>` and `</think>`."""
    tags = [found[1] for name in markers if (found := _TAG.fullmatch(name))]
    return frozenset(name for tag in tags if tags.count(tag) == 2 for name in (f"<{tag}>", f"</{tag}>"))


def parse_tokenizer(content: str) -> "Tokenizer":
    """Returns the tokenizer, set to read special tokens in a text as ordinary text. Raises ValueError if it is invalid."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(content)
    except Exception as error:  # tokenizers raises the bare class
        raise ValueError(str(error)) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def find_chat(place: Folder, chosen: str, day: str) -> dict[str, Any] | None:
    """Returns the content of the chat file for the template of `tokenizer.chat_template`; None without a template.

    It has the `day` if the template asks for it, and a copy with marks if it is a known one. `place` is the folder of
    `tokenizer.json`. Raises ValueError if a named file is no template.
    """
    config = place.read_json("tokenizer_config.json") if place.exists("tokenizer_config.json") else {}
    template: Any = None
    if chosen not in ("auto", "none"):
        where, name = parent_and_name(Folder.from_uri(chosen).uri)
        template = where.read(name).decode()
    elif chosen == "auto" and place.exists("chat_template.jinja"):
        template = place.read("chat_template.jinja").decode()
    elif chosen == "auto":
        template = config.get("chat_template")
        if isinstance(template, list):  # several by name
            template = {named["name"]: named["template"] for named in template}.get("default")
    if not template:
        return None
    named = {name: config.get(name) for name in TOKEN_NAMES}
    tokens = {name: token["content"] if isinstance(token, dict) else token for name, token in named.items() if token}
    content: dict[str, Any] = {"format": FORMAT, "template": template, "tokens": tokens}
    if needs_date(template):
        content["date"] = day
    if marked := mark_known_template(template):
        content |= {"marked": marked.template, "family": marked.family}
    Template(content)
    return content


def check_conversations(content: Mapping[str, Any]) -> None:
    """Raises ValueError if the bounds of the assistant's turns cannot be found in the template of a chat file."""
    template = Template(content)
    check_turns(template.render, marked=template.marks_answers, closings=template.tokens.values())
