"""Interfaces of tokenizers and chat templates to tasks; `raystride.pipelines.data.tokenizers` implements them.

ids = encoders["tokenizer"].encode("a text")               # uint32, without an end token
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from raystride.pipelines.data.tasks.messages import Message, Turns


class ChatTemplate(Protocol):
    """Renders and encodes turns of a chat for a tokenizer; see `raystride.pipelines.data.tokenizers.chat`."""

    def question(self, prompt: Turns) -> np.ndarray:
        """Returns ids up to the beginning of the answer."""
        ...

    def exchange(self, prompt: Turns, completion: Turns) -> tuple[np.ndarray, int]:
        """Returns ids of the prompt, of its answer and of the tokens that end it, and how many are the prompt's."""
        ...

    def conversation(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> tuple[np.ndarray, np.ndarray]:
        """Returns ids of a whole chat, and a mask of the assistant's turns."""
        ...

    def opening(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> np.ndarray:
        """Returns ids of a chat up to the beginning of the next answer."""
        ...

    def describe_losses(self, chats: Iterable[tuple[Sequence[Message], Sequence[Any]]]) -> list[str]:
        """Returns lines about what the chats, messages and tools, hold and the template does not write."""
        ...


class Encoder(Protocol):
    """A tokenizer for preparation and generation; see `raystride.pipelines.data.tokenizers`."""

    vocabulary_size: int
    end_id: int

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that end an answer: the end of a turn by the chat template, and the end of a document."""
        ...

    @property
    def chat(self) -> ChatTemplate | None:
        """The chat template of the tokenizer, if it has one."""
        ...

    @property
    def begin_ids(self) -> tuple[int, ...]:
        """Ids at the beginning of a text that no template writes."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids (uint32) of a text, without an end token."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Returns the text of some ids; bytes that form no character become U+FFFD."""
        ...


Encoders = Mapping[str, Encoder]
"""A task's tokenizers by name."""
