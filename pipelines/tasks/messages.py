"""Texts or lists of messages in a document, whose fields are texts: messages travel as JSON.

pack_messages([{"role": "user", "content": "Hi"}])        # '[{"role": "user", "content": "Hi"}]'
unpack_messages(text)                                     # the messages, or the text itself where it is none
shared_prompt(chosen, rejected)                           # the first turns of both, and what is left of each
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
"""`role` and `content`, both text, and what else a template knows."""
Turns = str | Sequence[Message]
"""What is said: a text, or several messages."""


def pack_messages(value: Sequence[Any]) -> str:
    """The JSON of a list of messages. Raises ValueError where it is none."""
    if not _are_messages(value):
        raise ValueError("a list in which not everything is a message with a `role` and a `content` that are texts")
    # Tables give every message the keys of all of them.
    kept = [{key: each for key, each in message.items() if each is not None} for message in value]
    return json.dumps(kept, ensure_ascii=False) if kept else ""


def unpack_messages(text: str) -> Turns:
    """The messages whose JSON a text is; any other text is itself."""
    if not text.lstrip().startswith("["):
        return text
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if value and _are_messages(value) else text


def texts_of(turns: Turns) -> Iterable[str]:
    """What is said, without who says it."""
    return [turns] if isinstance(turns, str) else [message["content"] for message in turns]


def shared_prompt(chosen: Turns, rejected: Turns) -> tuple[Sequence[Message], Sequence[Message], Sequence[Message]]:
    """The first messages that both share, and what follows in each. Raises ValueError where there is no such prompt."""
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise ValueError("has a text where only messages have a prompt that is shared: name its column, data.prompt_column")
    turns, most = 0, min(len(chosen), len(rejected)) - 1  # an answer has one message at least
    while turns < most and chosen[turns] == rejected[turns]:
        turns += 1
    if not turns:
        raise ValueError("has no prompt: the two lists of messages begin differently, or have one message each")
    return chosen[:turns], chosen[turns:], rejected[turns:]


def _are_messages(value: Any) -> bool:
    return isinstance(value, Sequence) and all(
        isinstance(each, Mapping) and all(isinstance(each.get(key), str) for key in ("role", "content")) for each in value
    )
