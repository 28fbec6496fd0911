"""Chat messages in documents: a field of a document is text, so messages are stored as JSON.

pack_messages([{"role": "user", "content": "Hi"}])        # '[{"role": "user", "content": "Hi"}]'
unpack_messages(text)                                     # the messages, or the text itself if it has none
split_shared_prompt(chosen, rejected)                     # the first turns of both, and the rest of each
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
"""`role` and `content`, both text, and other keys of a template; with `tool_calls`, content is optional."""
Turns = str | Sequence[Message]
"""A text, or several messages."""


_ROLES = {"human": "user", "gpt": "assistant"}
"""Roles of ShareGPT's form, `from` and `value`; the others have one name in both."""


def pack_messages(value: Sequence[Any]) -> str:
    """Returns the JSON of a list of messages, also of ShareGPT's form; contents in parts of text are joined.

    Raises ValueError if it is none, or has other parts.
    """
    value = [_to_message(item) for item in value]
    if not _are_messages(value):
        raise ValueError("a list in which not everything is a message with a `role` and a `content` that are texts")
    # Tables add the keys of all messages to each one.
    kept = [
        {key: _parse_arguments(item) if key == "tool_calls" else item for key, item in drop_none_values(message).items()}
        for message in value
    ]
    return json.dumps(kept, ensure_ascii=False) if kept else ""


def _to_message(item: Any) -> Any:
    """Returns a message of either form with `role` and a text as `content`. Raises ValueError for parts that are no text."""
    if not isinstance(item, Mapping):
        return item
    if item.get("role") is None and isinstance(item.get("from"), str):
        content = {key: found for key, found in item.items() if key not in ("from", "value", "role", "content")}
        item = {"role": _ROLES.get(item["from"], item["from"]), "content": item.get("value"), **content}
    parts = item.get("content")
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
        return item
    if other := [part.get("type") for part in parts if not isinstance(part.get("text"), str)]:
        raise ValueError(f"a message with a part that is no text, but {other[0]!r}")
    return {**item, "content": "".join(part["text"] for part in parts)}


def drop_none_values(value: Any, *, except_keys: Collection[str] = ("arguments", "parameters")) -> Any:
    """Returns the same value without keys of value None, but as it is below `except_keys`, where a null has a meaning.

    Tables add keys to all objects of a column: their readers leave them out everywhere.
    """
    if isinstance(value, Mapping):
        return {
            key: item if key in except_keys else drop_none_values(item, except_keys=except_keys)
            for key, item in value.items()
            if item is not None
        }
    return [drop_none_values(item, except_keys=except_keys) for item in value] if isinstance(value, list) else value


def _parse_arguments(calls: Any) -> Any:
    """Returns tool calls with JSON arguments parsed to objects, as templates expect them."""
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
    """Returns the messages in a JSON text; any other text is returned unchanged."""
    if not text.lstrip().startswith("["):
        return text
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if value and _are_messages(value) else text


def message_texts(turns: Turns) -> Iterable[str]:
    """Returns the contents, without roles."""
    return [turns] if isinstance(turns, str) else [message.get("content") or "" for message in turns]


def split_shared_prompt(chosen: Turns, rejected: Turns) -> tuple[Sequence[Message], Sequence[Message], Sequence[Message]]:
    """Returns the first messages that both share, and the rest of each. Raises ValueError if there is no such prompt."""
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
        isinstance(item, Mapping) and isinstance(item.get("role"), str) and _has_content(item) for item in value
    )


def _has_content(message: Message) -> bool:
    """Returns whether a message has content: it is optional with tool calls."""
    content = message.get("content")
    return isinstance(content, str) or (content is None and bool(message.get("tool_calls")))
