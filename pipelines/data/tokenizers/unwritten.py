"""What chats hold and their template does not write: found by changing it in a chat, and seeing whether the text changes.

describe_unwritten(template.render, [(messages, tools), ...])
# ["the template writes no tools: 30 of 30 chats have some"]
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from raystride.pipelines.data.tokenizers.conversation import Messages
from raystride.pipelines.data.tokenizers.template import THOUGHTS

Render = Callable[[Messages, Sequence[Any]], str]
"""Renders messages with tools. Raises ValueError if the template refuses them."""
_OTHER = "\ue000"
_TOOLS, _CALLS, _THOUGHTS, _SYSTEM = "tools", "calls of tools", "thoughts", "system messages"
_NAMES = ("id", "type", "tool_call_id", "name")
"""Keys that only refer to something, which few templates write."""


def describe_unwritten(render: Render, chats: Iterable[tuple[Messages, Sequence[Any]]]) -> list[str]:
    """Returns a line for each part of the chats that has no effect on their text, with the number of chats that have it."""
    count, found = 0, Counter[str]()
    for messages, tools in chats:
        count += 1
        try:
            text = render(messages, tools)
            found.update(what for what, *changed in _change_parts(messages, tools) if render(*changed) == text)
        except ValueError:  # a fault, which encoding the chat reports
            continue
    return [f"the template writes no {what}: {number:,} of {count:,} chats have some" for what, number in found.items()]


def _change_parts(messages: Messages, tools: Sequence[Any]) -> Iterator[tuple[str, Messages, Sequence[Any]]]:
    """Yields each part that the chat has, with the chat without it or with another one in its place."""
    if tools:
        yield _TOOLS, messages, ()
    if any(message.get("tool_calls") for message in messages):
        yield _CALLS, [_change_calls(message) for message in messages], tools
    if any(message.get(key) for message in messages for key in THOUGHTS):
        yield _THOUGHTS, [_without(message, THOUGHTS) for message in messages], tools
    if any(message["role"] in ("system", "developer") and message.get("content") for message in messages):
        yield _SYSTEM, [_change_system(message) for message in messages], tools
    known = {"role", "content", "tool_calls", *THOUGHTS, *_NAMES}
    for key in dict.fromkeys(key for message in messages for key in message if key not in known):
        yield f"`{key}`", [_without(message, (key,)) for message in messages], tools


def _without(message: Mapping[str, Any], keys: Sequence[str]) -> Mapping[str, Any]:
    return {key: value for key, value in message.items() if key not in keys}


def _change_system(message: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**message, "content": _OTHER} if message["role"] in ("system", "developer") else message


def _change_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(calls := message.get("tool_calls"), list):
        return message
    return {**message, "tool_calls": [_change_names(call) for call in calls]}


def _change_names(value: Any) -> Any:
    """Returns a call with other names, wherever it has them."""
    if not isinstance(value, Mapping):
        return value
    return {key: _OTHER if key == "name" else _change_names(item) for key, item in value.items()}
