"""Chats as samples: lists of messages of which the assistant's turns are learned, with the tools that it may call.

chat = read_conversation(('[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]',))
ids, mask, cut = encode_chat(template, chat, context + 1)    # up to the assistant's last turn that fits
chat.question.messages                                   # all before its last turn
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from raystride.pipelines.tasks.messages import Message, unpack_messages
from raystride.pipelines.tasks.task import ChatTemplate, Document, Encoded

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Who may speak."""


@dataclass(frozen=True)
class Conversation:
    """What is said, and the tools that the assistant may call."""

    messages: Sequence[Message]
    tools: Sequence[Any] = ()

    @property
    def learned(self) -> "Conversation":
        """Up to the assistant's last turn, behind which there is nothing to learn. Raises ValueError where it has none."""
        if not (turns := [at for at, message in enumerate(self.messages) if message["role"] == "assistant"]):
            raise ValueError("has no turn of the assistant, of which alone a chat is learned")
        return replace(self, messages=self.messages[: turns[-1] + 1])

    @property
    def question(self) -> "Conversation":
        """What the assistant is to answer: all, or where it has spoken last, all before that."""
        answered = self.messages[-1]["role"] == "assistant"
        return replace(self, messages=self.messages[:-1]) if answered else self

    @property
    def answer_bytes(self) -> int:
        """Bytes of what the assistant says, calls of tools as JSON."""
        said = [message for message in self.messages if message["role"] == "assistant"]
        calls = [json.dumps(message["tool_calls"], ensure_ascii=False) for message in said if message.get("tool_calls")]
        return sum(len(text.encode()) for text in (*calls, *(message.get("content") or "" for message in said)))


def read_conversation(document: Document) -> Conversation:
    """The chat of a document: its messages as JSON, and those of two fields its tools; a mere text is what a user says.

    Raises ValueError where somebody speaks whose role is unknown, or where tools are no list.
    """
    messages = unpack_messages(document[0])
    if isinstance(messages, str):
        if messages.lstrip().startswith(("[", "{")):
            raise ValueError("is no list of messages, each with a `role` and a `content`")
        messages = [{"role": "user", "content": messages}]
    for number, message in enumerate(messages, 1):
        if message["role"] not in ROLES:
            raise ValueError(f"has the role {message['role']!r} in message {number}, which is none of {', '.join(ROLES)}")
    return Conversation(messages, _tools(document[1]) if len(document) > 1 else ())


def _tools(text: str) -> Sequence[Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"has tools that are no JSON: {error}") from error
    if not isinstance(found, list) or not all(isinstance(each, Mapping) for each in found):
        raise ValueError("has tools that are no list of objects")
    return found


def encode_chat(template: ChatTemplate, chat: Conversation, room: int) -> Encoded:
    """The chat in at most `room` ids: without the turns at its end that do not fit. Where not even the assistant's first
    does, the beginning of what is before it goes first, but for one id, then its own end. Raises ValueError."""
    ids, mask = template.conversation(chat.learned.messages, chat.tools)
    if not mask.any():
        raise ValueError("has turns of the assistant in which nothing is said")
    edges = np.flatnonzero(np.diff(mask, append=False))
    ends = edges[mask[edges]] + 1  # behind each turn of the assistant's
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
