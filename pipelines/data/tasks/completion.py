"""Fine-tuning on pairs of a prompt and its completion, or on chats: language modelling with the prompt left out of the loss.

Each pair is a sample of its own, padded to the longest in its batch. With a tokenizer that has a chat template, prompt and
completion are rendered as the turns of a chat; else they are concatenated, with an end token. With `data.messages_column` a
sample is a whole chat, a list of messages with the tools that the assistant may call; all turns of the assistant are trained
on, up to the last that fits.

    task = Completion(config, {"vocabulary_size": 50257, "end_id": 50256}, encoders)
    (inputs,), targets = task.collate(rows, masks)           # both (B, T), int64; the prompt's targets are IGNORED
    chat = read_conversation(('[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]',))
    ids, mask, cut = encode_chat(template, chat, context + 1)
"""

from collections.abc import Iterable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from raystride.pipelines.data.tasks.encoder import ChatTemplate
from raystride.pipelines.data.tasks.language_model import LanguageModel, prepend_begin_ids
from raystride.pipelines.data.tasks.messages import message_texts, pack_messages, unpack_messages
from raystride.pipelines.data.tasks.rows import pad_sequences, row_losses
from raystride.pipelines.data.tasks.task import IGNORED, Column, Document, Encoded, Inputs, Rows
from raystride.pipelines.data.tokenizers.chat import check_conversations
from raystride.pipelines.data.tokenizers.training import read_begin_ids, read_chat

if TYPE_CHECKING:
    import torch
    from torch import nn
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from raystride.pipelines.data.tasks.messages import Message, Turns

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


def _read_or_none(document: Document) -> Conversation | None:
    try:
        return read_conversation(document)
    except ValueError:  # a fault, which encoding the chat reports
        return None


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
        return Encoded(ids[:last], mask[:last], cut=len(ids))
    first = int(mask.argmax())
    answer = ids[first : ends[0]]
    asked = ids[:first][-max(1, room - len(answer)) :]
    answer = answer[: room - len(asked)]
    return Encoded(np.concatenate((asked, answer)), np.arange(len(asked) + len(answer)) >= len(asked), cut=len(ids))


class Completion(LanguageModel):
    """Fine-tuning of a decoder that answers a prompt."""

    unit = "pairs"

    @property
    def window(self) -> None:
        """None: each pair is a sample of its own."""
        return

    @property
    def columns(self) -> tuple[Column, ...]:
        """The prompt and the completion, or the messages and the tools."""
        data = self.config.data
        if data.messages_column:
            messages = Column("data.messages_column", data.messages_column, "messages")
            return (messages, Column("data.tools_column", data.tools_column, "tools")) if data.tools_column else (messages,)
        return (Column("data.column", data.column), Column("data.target_column", data.target_column, answer=True))

    def texts(self, document: Document, tokenizer: str) -> Iterable[str]:
        """Returns the prompt and the completion, or the contents of all messages."""
        return message_texts(unpack_messages(document[0])) if self.chats else document

    @property
    def chats(self) -> bool:
        """Whether documents are chats."""
        return self.config.data.messages_column is not None

    @property
    def writes_chats(self) -> bool:
        """Whether the tokenizer has a chat template that renders prompts and completions as turns."""
        return self.encoders["tokenizer"].chat is not None

    def shaped_by(self) -> dict[str, Any]:
        """Returns the other inputs of examples: the context, at which they are truncated, and the chat template.

        Raises SettingError if chats have no template, or one that does not delimit the assistant's turns.
        """
        tokenizer = self.config.tokenizer
        template = read_chat(tokenizer) if tokenizer.kind == "file" else None
        shape: dict[str, Any] = {"context": self.config.model.context, "chat": template}
        if template is not None and tokenizer.markers != "text":
            raise tokenizer.error(
                "markers", "must be `text` where a chat template writes the markers; or set tokenizer.chat_template none"
            )
        if template is None and (begin := read_begin_ids(tokenizer)):
            shape["begin"] = begin
        if not self.chats:
            return shape
        if template is None:
            raise tokenizer.error("chat_template", f"must name a template for chats: there is none beside {tokenizer.file}")
        try:
            check_conversations(template)
        except ValueError as error:
            raise tokenizer.error("chat_template", f"must suit chats: a question and its answer {error}") from error
        return shape | {"chats": True}

    def describe_losses(self, documents: Iterable[Document]) -> list[str]:
        """Returns lines about what chats hold and their template does not write."""
        if not self.chats:
            return []
        found = (chat for document in documents if (chat := _read_or_none(document)))
        return self._chat_template.describe_losses((chat.messages, chat.tools) for chat in found)

    def encode(self, document: Document) -> tuple[np.ndarray, np.ndarray]:
        """Returns ids and loss mask of `example`. Raises ValueError if a chat is invalid."""
        ids, mask, _ = self.example(document)
        assert mask is not None
        return ids, mask

    def example(self, document: Document) -> Encoded:
        """Returns the ids of prompt and completion, with a loss mask of the completion.

        If they are longer than context + 1, the prompt is cut from the left, as `fit_prompt` says, then the completion from
        the right; a chat loses turns at its end. Raises ValueError if a chat is invalid, or its template refuses it.
        """
        if self.chats:
            return encode_chat(self._chat_template, read_conversation(document), self.config.model.context + 1)
        if len(document) == 1:
            prompt = self.prompt(document[0])
            return Encoded(prompt, np.zeros(len(prompt), bool))
        prompt, answer = self.encode_exchange(*document)
        room = self.config.model.context + 1
        longest = len(prompt) + len(answer)
        prompt = self.fit_prompt(prompt, room - len(answer))
        answer = answer[: room - len(prompt)]
        cut = longest if longest > room else 0
        return Encoded(np.concatenate((prompt, answer)), np.arange(len(prompt) + len(answer)) >= len(prompt), cut)

    def decode(self, ids: np.ndarray, mask: np.ndarray | None) -> Document:
        """Returns the prompt and the completion, or messages: each turn of the assistant, and the text between two as one.

        With a chat template they include the template's text.
        """
        counted = np.ones(len(ids), bool) if mask is None else mask
        borders = np.flatnonzero(np.diff(counted)) + 1
        texts = [self.encoders["tokenizer"].decode(stretch.tolist()) for stretch in np.split(ids, borders)]
        if not self.chats:
            return ("", texts[0]) if counted[0] else (texts[0], "".join(texts[1:]))
        roles = ("assistant", "user") if counted[0] else ("user", "assistant")
        messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]
        return (pack_messages(messages), "[]")[: len(self.columns)]

    @property
    def _chat_template(self) -> ChatTemplate:
        if template := self.encoders["tokenizer"].chat:
            return template
        raise ValueError("has messages, and the tokenizer has no chat template: see tokenizer.chat_template")

    def question(self, document: Document) -> np.ndarray:
        """Returns the prompt's ids; for a chat, all before the assistant's last turn. Raises ValueError if a chat is
        invalid."""
        if not self.chats:
            return self.prompt(document[0])
        asked = read_conversation(document).question
        return self._chat_template.opening(asked.messages, asked.tools)

    def answer_bytes(self, document: Document) -> int:
        """Returns the bytes of the completion, or of all turns of the assistant. Raises ValueError if a chat is invalid."""
        return read_conversation(document).answer_bytes if self.chats else super().answer_bytes(document)

    def prompt(self, text: str) -> np.ndarray:
        """Returns the ids of a prompt, with begin tokens, or in a chat with the header of its answer; if empty, an end
        token.

        Raises ValueError if a chat is invalid.
        """
        if self.chats:
            return self.question((text,))
        encoder = self.encoders["tokenizer"]
        ids = encoder.chat.question(text) if encoder.chat else prepend_begin_ids(encoder.encode(text), encoder.begin_ids)
        return ids if len(ids) else np.array([encoder.end_id], np.uint32)

    def encode_exchange(self, prompt: Turns, completion: Turns) -> tuple[np.ndarray, np.ndarray]:
        """Returns ids of a prompt, and of its answer with the end of its turn or, without a chat template, an end token.

        Raises ValueError if the template refuses them.
        """
        encoder = self.encoders["tokenizer"]
        if isinstance(prompt, str) and isinstance(completion, str) and not encoder.chat:
            return self.prompt(prompt), np.append(encoder.encode(completion), np.uint32(encoder.end_id))
        ids, count = self._chat_template.exchange(prompt, completion)
        return ids[:count], ids[count:]

    def fit_prompt(self, prompt: np.ndarray, room: int) -> np.ndarray:
        """Returns the last ids of a prompt that fit into `room`, at least one, after the begin tokens."""
        encoder = self.encoders["tokenizer"]
        begin = len(encoder.begin_ids) if encoder.chat is None else 0
        if len(prompt) <= max(1, room) or room <= begin:
            return prompt[-max(1, room) :]
        return np.concatenate((prompt[:begin], prompt[len(prompt) - (room - begin) :]))

    def collate(self, rows: Rows, masks: Rows | None) -> "tuple[Inputs, torch.Tensor]":
        """Returns as inputs all but each pair's last id, as targets all but its first; padding is on the right, and is
        IGNORED.

        Packed: all pairs are concatenated in one row (1, N), with the offsets of pairs as in LanguageModel.
        """
        kept = [np.ones(len(row), bool) for row in rows] if masks is None else masks
        wanted = [np.where(mask, row.astype(np.int64), IGNORED)[1:] for row, mask in zip(rows, kept, strict=True)]
        read = [row[:-1] for row in rows]
        if self.packs_documents:
            import torch

            documents = torch.tensor([0, *accumulate(map(len, read))], dtype=torch.int32)
            inputs, targets = (torch.from_numpy(np.concatenate(ids).astype(np.int64))[None] for ids in (read, wanted))
            return (inputs, documents), targets
        inputs, _ = pad_sequences(read)
        targets, _ = pad_sequences(wanted, IGNORED)
        return (inputs,), targets

    def losses(self, model: "nn.Module", inputs: Inputs, targets: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
        """Returns the loss sum of each pair in nats, and its number of counted targets, both (B)."""
        if not self.packs_documents:
            return super().losses(model, inputs, targets)
        import torch

        # Each token as a row of its own, then added up by pair.
        hidden, wanted = self.hidden(model, inputs)[0, :, None], targets[0, :, None]
        losses, counts = row_losses(model.logits, hidden, wanted)  # type: ignore[arg-type]
        lengths = inputs[1].diff().long()
        sums, counted = (torch.segment_reduce(values.float(), "sum", lengths=lengths) for values in (losses, counts))
        return sums, counted.long()

    @property
    def targets_per_sample(self) -> None:
        """None: about as many targets as a pair has ids, including the prompt's."""
        return
