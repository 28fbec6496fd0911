"""Texts or lists of messages in a document, whose fields are texts: messages travel as JSON.

pack_messages([{"role": "user", "content": "Hi"}])        # '[{"role": "user", "content": "Hi"}]'
unpack_messages(text)                                     # the messages, or the text itself where it is none
shared_prompt(chosen, rejected)                           # the first turns of both, and what is left of each
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
"""`role` and `content`, both text, and what else a template knows; with `tool_calls` there may be no content."""
Turns = str | Sequence[Message]
"""What is said: a text, or several messages."""


def pack_messages(value: Sequence[Any]) -> str:
    """The JSON of a list of messages. Raises ValueError where it is none."""
    if not _are_messages(value):
        raise ValueError("a list in which not everything is a message with a `role` and a `content` that are texts")
    # Tables give every message the keys of all of them.
    kept = [{key: _calls(each) if key == "tool_calls" else each for key, each in without_none(one).items()} for one in value]
    return json.dumps(kept, ensure_ascii=False) if kept else ""


def without_none(value: Any) -> Any:
    """The same value without keys whose value is None, however deep: tables give them to all objects of a column."""
    if isinstance(value, Mapping):
        return {key: without_none(each) for key, each in value.items() if each is not None}
    return [without_none(each) for each in value] if isinstance(value, list) else value


def _calls(calls: Any) -> Any:
    """Calls of tools whose arguments are objects, as templates expect them, where they are the JSON of such."""
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                arguments = json.loads(function["arguments"])
            except ValueError:
                continue
            if isinstance(arguments, dict):
                function["arguments"] = arguments
    return calls


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
    return [turns] if isinstance(turns, str) else [message.get("content") or "" for message in turns]


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
        isinstance(each, Mapping) and isinstance(each.get("role"), str) and _has_content(each) for each in value
    )


def _has_content(message: Message) -> bool:
    """Who calls tools may say nothing."""
    content = message.get("content")
    return isinstance(content, str) or (content is None and bool(message.get("tool_calls")))
