"""Chats as samples: lists of messages, with the tools that the assistant may call; the assistant's turns are trained on.

chat = read_conversation(('[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]',))
ids, mask, cut = encode_chat(template, chat, context + 1)    # up to the assistant's last turn that fits
chat.question.messages                                   # all before its last turn
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from raystride.pipelines.tasks.encoder import ChatTemplate
from raystride.pipelines.tasks.messages import Message, unpack_messages
from raystride.pipelines.tasks.task import Document, Encoded

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of messages."""


@dataclass(frozen=True)
class Conversation:
    """A chat's messages and the tools that the assistant may call."""

    messages: Sequence[Message]
    tools: Sequence[Any] = ()

    @property
    def up_to_last_answer(self) -> "Conversation":
        """The chat up to the assistant's last turn; nothing after it is trained on. Raises ValueError if it has none."""
        if not (turns := [number for number, message in enumerate(self.messages) if message["role"] == "assistant"]):
            raise ValueError("has no turn of the assistant, of which alone a chat is learned")
        return replace(self, messages=self.messages[: turns[-1] + 1])

    @property
    def question(self) -> "Conversation":
        """The messages that the assistant answers: all, or if its turn is last, all before that."""
        answered = self.messages[-1]["role"] == "assistant"
        return replace(self, messages=self.messages[:-1]) if answered else self

    @property
    def answer_bytes(self) -> int:
        """Bytes of the assistant's turns, with tool calls as JSON."""
        said = [message for message in self.messages if message["role"] == "assistant"]
        calls = [json.dumps(message["tool_calls"], ensure_ascii=False) for message in said if message.get("tool_calls")]
        return sum(len(text.encode()) for text in (*calls, *(message.get("content") or "" for message in said)))


def read_conversation(document: Document) -> Conversation:
    """Reads the chat of a document: its messages as JSON, and its tools from a second field; plain text is a user's message.

    Raises ValueError for an unknown role, or if tools are not a list.
    """
    messages = unpack_messages(document[0])
    if isinstance(messages, str):
        if messages.lstrip().startswith(("[", "{")):
            raise ValueError("is no list of messages, each with a `role` and a `content`")
        messages = [{"role": "user", "content": messages}]
    for number, message in enumerate(messages, 1):
        if message["role"] not in ROLES:
            raise ValueError(f"has the role {message['role']!r} in message {number}, which is none of {', '.join(ROLES)}")
    return Conversation(messages, _parse_tools(document[1]) if len(document) > 1 else ())


def _parse_tools(text: str) -> Sequence[Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"has tools that are no JSON: {error}") from error
    if not isinstance(found, list) or not all(isinstance(tool, Mapping) for tool in found):
        raise ValueError("has tools that are no list of objects")
    return found


def encode_chat(template: ChatTemplate, chat: Conversation, room: int) -> Encoded:
    """Encodes the chat in at most `room` ids, without the turns at its end that do not fit. Raises ValueError.

    If not even the assistant's first turn fits, the context before it is cut from the left down to one id, then the turn's
    end.
    """
    ids, mask = template.conversation(chat.up_to_last_answer.messages, chat.tools)
    if not mask.any():
        raise ValueError("has turns of the assistant in which nothing is said")
    edges = np.flatnonzero(np.diff(mask, append=False))
    ends = edges[mask[edges]] + 1  # after each turn of the assistant
    if len(ids) <= room:
        return Encoded(ids, mask)
    if ends[0] <= room:
        last = ends[ends <= room][-1]
        return Encoded(ids[:last], mask[:last], cut=True)
    first = int(mask.argmax())
    answer = ids[first : ends[0]]
    asked = ids[:first][-max(1, room - len(answer)) :]
    answer = answer[: room - len(asked)]
    return Encoded(np.concatenate((asked, answer)), np.arange(len(asked) + len(answer)) >= len(asked), cut=True)
