"""Segments of a rendered chat: the assistant's, which are trained on, and the rest.

The bounds of an assistant's turn are found by rendering the chat up to there, or by `{% generation %}` in the template.
Special tokens in messages of people, tools and the assistant are hidden while the template renders, so that all tokens in
its output are its own.

    split_stretches(render, messages, marked=False)          # [Stretch("<|im_start|>user\\nHi", said=False), ...]
    hidden = SpecialTokens(["<|im_end|>"])
    hidden.restore(hidden.hide(messages)[0]["content"])      # unchanged
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

BEGIN, END = "\ue001", "\ue002"
"""Enclose the text of `{% generation %}`: characters that no text has."""
_PRIVATE = 0xF0000
"""The first of the characters that replace hidden ones."""
_TAG = re.compile(r"\{%-?\+?\s*generation\b")
_PROBE = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, "abcd", strict=True)]

CANNOT_SPLIT = "is not written turn after turn by the chat template"
"""Begins the error about a chat of which a turn is rendered differently once others follow. Other chats may be right."""
Messages = Sequence[Mapping[str, Any]]


class Stretch(NamedTuple):
    """A segment of a rendered chat."""

    text: str
    said: bool
    """Whether the assistant says it."""


class Render(Protocol):
    """Renders a chat, and with `asks` the header of the next answer. Raises ValueError if the template refuses it."""

    def __call__(self, messages: Messages, *, asks: bool) -> str: ...


def marks_answers(template: str) -> bool:
    """Returns whether a template marks the assistant's text."""
    return _TAG.search(template) is not None


def split_stretches(
    render: Render, messages: Messages, *, marked: bool, asks: bool = False, closings: Collection[str] = ()
) -> list[Stretch]:
    """Returns the segments of the chat in order.

    `closings` are tokens that the template may write after the last turn of a chat, as Phi-3's does; they belong to no turn.
    Raises ValueError if the template renders a turn differently once others follow it.
    """
    whole = render(messages, asks=asks)
    if marked:
        return _split_at_marks(whole)
    try:
        return _split_at_turns(render, messages, whole)
    except ValueError:
        if closing := _find_closing(render, closings):
            return _split_at_turns(_without_closing(render, closing), messages, whole)
        raise


def _find_closing(render: Render, closings: Collection[str]) -> str:
    """Returns the token that a template writes after the last turn of every chat; empty if it writes none."""
    short, long = render(_PROBE[:2], asks=False), render(_PROBE, asks=False)
    fitting = (token for token in closings if short.endswith(token) and long.endswith(token))
    return next((token for token in fitting if long.startswith(short.removesuffix(token))), "")


def _without_closing(render: Render, closing: str) -> Render:
    """Returns the same renderer without the token after the last turn."""

    def render_open(messages: Messages, *, asks: bool) -> str:
        text = render(messages, asks=asks)
        return text if asks else text.removesuffix(closing)

    return render_open


def _split_at_marks(whole: str) -> list[Stretch]:
    first, *others = whole.split(BEGIN)
    found = [Stretch(first, said=False)]
    for other in others:
        said, _, after = other.partition(END)
        found += [Stretch(said, said=True), Stretch(after, said=False)]
    return found


def _split_at_turns(render: Render, messages: Messages, whole: str) -> list[Stretch]:
    found: list[Stretch] = []
    position = 0
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = render(messages[:number], asks=True), render(messages[: number + 1], asks=False)
        if not (whole.startswith(after) and after.startswith(before) and position <= len(before)):
            raise ValueError(
                f"{CANNOT_SPLIT}, so where the assistant's begin and end is not known: "
                "put {% generation %} and {% endgeneration %} around them in a copy of it, and name that as "
                "tokenizer.chat_template"
            )
        found += [Stretch(whole[position : len(before)], said=False), Stretch(whole[len(before) : len(after)], said=True)]
        position = len(after)
    return [*found, Stretch(whole[position:], said=False)]


def check_turns(render: Render, *, marked: bool, closings: Collection[str] = ()) -> None:
    """Raises ValueError if a chat of a question and an answer is not split into segments with the answer."""
    found = split_stretches(render, _PROBE[:2], marked=marked, closings=closings)
    if not any(stretch.said and _PROBE[1]["content"] in stretch.text for stretch in found):
        raise ValueError("has turns of the assistant that the chat template does not mark as what is learned")


class SpecialTokens:
    """Special tokens of a tokenizer, replaced by other characters in messages while a template renders."""

    def __init__(self, specials: Sequence[str]) -> None:
        # The longest first: one special token may be the beginning of another.
        names = sorted((*specials, BEGIN, END), key=len, reverse=True)
        self.names = frozenset(specials)
        self._stands = {name: chr(_PRIVATE + number) for number, name in enumerate(names)}
        self._names = {ord(stand): name for name, stand in self._stands.items()}
        self._any = re.compile("|".join(map(re.escape, names)))
        self._hidden = re.compile(f"[{chr(_PRIVATE)}-{chr(_PRIVATE + len(names) - 1)}]")
        self._split = re.compile("(" + "|".join(map(re.escape, sorted(specials, key=len, reverse=True))) + ")")

    def hide(self, value: Any, except_tokens: Collection[str] = ()) -> Any:
        """Returns the same value with special tokens replaced in all its texts, except `except_tokens`."""
        if isinstance(value, str):
            return self._any.sub(lambda found: found[0] if found[0] in except_tokens else self._stands[found[0]], value)
        if isinstance(value, Mapping):
            return {self.hide(key, except_tokens): self.hide(item, except_tokens) for key, item in value.items()}
        return [self.hide(item, except_tokens) for item in value] if isinstance(value, list | tuple) else value

    def is_in(self, text: str) -> bool:
        """Returns whether a text holds a token that was hidden."""
        return self._hidden.search(text) is not None

    def split(self, text: str) -> list[str]:
        """Returns the text cut before and after each token."""
        return self._split.split(text) if self.names else [text]

    def restore(self, text: str) -> str:
        """Returns the original text."""
        return text.translate(self._names)
