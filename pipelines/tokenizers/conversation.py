"""A whole chat as a template writes it, in stretches: those that the assistant says, which are learned, and those around.

Where a turn of the assistant begins and ends is found by writing the chat up to there, or by `{% generation %}` in the
template. Special tokens in what people, tools and the assistant say are hidden while the template writes, so that all that
stand in what it wrote are its own.

    stretches(render, messages, marked=False)                # [Stretch("<|im_start|>user\\nHi", said=False), ...]
    hidden = SpecialTokens(["<|im_end|>"])
    hidden.restore(hidden.hide(messages)[0]["content"])      # as it was
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

BEGIN, END = "\ue001", "\ue002"
"""Stand around what `{% generation %}` marks: characters that no text has."""
_PRIVATE = 0xF0000
"""The first of the characters that stand for hidden ones."""
_TAG = re.compile(r"\{%-?\+?\s*generation\b")
_PROBE = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, "abcd", strict=True)]

Messages = Sequence[Mapping[str, Any]]


class Stretch(NamedTuple):
    """Part of a written chat."""

    text: str
    said: bool
    """Whether the assistant says it."""


class Render(Protocol):
    """What writes a chat, and with `asks` what leads in the next answer. Raises ValueError where the template refuses."""

    def __call__(self, messages: Messages, *, asks: bool) -> str: ...


def marks_answers(template: str) -> bool:
    """Whether a template marks what the assistant says."""
    return _TAG.search(template) is not None


def stretches(render: Render, messages: Messages, *, marked: bool, asks: bool = False) -> list[Stretch]:
    """The chat in order. Raises ValueError where the template writes a turn otherwise once others follow it."""
    whole = render(messages, asks=asks)
    return _between_marks(whole) if marked else _between_turns(render, messages, whole)


def _between_marks(whole: str) -> list[Stretch]:
    first, *others = whole.split(BEGIN)
    found = [Stretch(first, said=False)]
    for other in others:
        said, _, after = other.partition(END)
        found += [Stretch(said, said=True), Stretch(after, said=False)]
    return found


def _between_turns(render: Render, messages: Messages, whole: str) -> list[Stretch]:
    found: list[Stretch] = []
    at = 0
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = render(messages[:number], asks=True), render(messages[: number + 1], asks=False)
        if not (whole.startswith(after) and after.startswith(before) and at <= len(before)):
            raise ValueError(
                "is not written turn after turn by the chat template, so where the assistant's begin and end is not known: "
                "put {% generation %} and {% endgeneration %} around them in a copy of it, and name that as "
                "tokenizer.chat_template"
            )
        found += [Stretch(whole[at : len(before)], said=False), Stretch(whole[len(before) : len(after)], said=True)]
        at = len(after)
    return [*found, Stretch(whole[at:], said=False)]


def check_turns(render: Render, *, marked: bool) -> None:
    """Raises ValueError where a chat of two questions and answers does not come out in stretches of which some are said."""
    said = [each.text for each in stretches(render, _PROBE, marked=marked) if each.said]
    if not all(any(text in each for each in said) for text in "bd"):
        raise ValueError("has turns of the assistant that the chat template does not mark as what is learned")


class SpecialTokens:
    """Special tokens of a tokenizer, for which other characters stand in what is said while a template writes."""

    def __init__(self, specials: Sequence[str]) -> None:
        # The longest first: one special token may be the beginning of another.
        names = sorted((*specials, BEGIN, END), key=len, reverse=True)
        self._stands = {name: chr(_PRIVATE + number) for number, name in enumerate(names)}
        self._names = {ord(stand): name for name, stand in self._stands.items()}
        self._any = re.compile("|".join(map(re.escape, names)))

    def hide(self, value: Any) -> Any:
        """The same value, with all texts in it free of special tokens."""
        if isinstance(value, str):
            return self._any.sub(lambda found: self._stands[found[0]], value)
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(each) for key, each in value.items()}
        return [self.hide(each) for each in value] if isinstance(value, list | tuple) else value

    def restore(self, text: str) -> str:
        """The text as it was said."""
        return text.translate(self._names)
