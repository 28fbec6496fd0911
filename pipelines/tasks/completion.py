"""Fine-tuning on pairs of a prompt and its completion, or on chats: language modelling whose loss leaves out the prompt.

Each pair is a sample of its own, padded to the longest beside it. With a tokenizer that has a chat template, prompt and
completion are the turns of a chat, as the template writes them; else they follow each other, and an end token them. With
`data.messages_column` a sample is a whole chat, of which all that the assistant says is learned (`tasks.chats`).

    task = Completion(config, {"vocabulary_size": 50257, "end_id": 50256}, encoders)
    (inputs,), targets = task.collate(rows, masks)           # both (B, T), int64; the prompt's targets are IGNORED
"""

from collections.abc import Iterable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from raystride.pipelines.tasks.chats import encode_chat, read_conversation
from raystride.pipelines.tasks.language_model import LanguageModel
from raystride.pipelines.tasks.messages import pack_messages, texts_of, unpack_messages
from raystride.pipelines.tasks.padding import pad
from raystride.pipelines.tasks.row_losses import row_losses
from raystride.pipelines.tasks.task import IGNORED, ChatTemplate, Column, Document, Encoded, Inputs, Rows
from raystride.pipelines.tokenizers.chat import check_conversations
from raystride.pipelines.tokenizers.training import read_chat

if TYPE_CHECKING:
    import torch
    from torch import nn


class Completion(LanguageModel):
    """Fine-tuning of a decoder that answers a prompt."""

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
        """Both the prompt and the completion, or all that is said."""
        return texts_of(unpack_messages(document[0])) if self.chats else document

    @property
    def chats(self) -> bool:
        """Whether documents are chats."""
        return self.config.data.messages_column is not None

    def shaped_by(self) -> dict[str, Any]:
        """What shapes examples besides: the context, beyond which they are cut off, and the chat's template.

        Raises SettingError where chats have no template, or one that does not tell which turns are the assistant's.
        """
        tokenizer = self.config.tokenizer
        template = read_chat(tokenizer) if tokenizer.kind == "file" else None
        shape = {"context": self.config.model.context, "chat": template}
        if not self.chats:
            return shape
        if template is None:
            raise tokenizer.error("chat_template", f"must name a template for chats: there is none beside {tokenizer.file}")
        try:
            check_conversations(template)
        except ValueError as error:
            raise tokenizer.error("chat_template", f"must suit chats: one of two questions and answers {error}") from error
        return shape | {"chats": True}

    def encode(self, document: Document) -> tuple[np.ndarray, np.ndarray]:
        """Ids, and which of them count, as `example` has them. Raises ValueError where a chat is none."""
        ids, mask, _ = self.example(document)
        assert mask is not None
        return ids, mask

    def example(self, document: Document) -> Encoded:
        """Ids of prompt and completion, of which the latter count. Of what is longer than context + 1, the prompt's
        beginning goes first, but for one id, then the completion's end; of a chat, turns at its end.

        Raises ValueError where a chat is none, or its template refuses it.
        """
        if self.chats:
            return encode_chat(self._template, read_conversation(document), self.config.model.context + 1)
        prompt = self.prompt(document[0])
        if len(document) == 1:
            return Encoded(prompt, np.zeros(len(prompt), bool))
        encoder = self.encoders["tokenizer"]
        chat, end = encoder.chat, np.uint32(encoder.end_id)
        answer = chat.answer(*document) if chat else np.append(encoder.encode(document[1]), end)
        room = self.config.model.context + 1
        cut = len(prompt) + len(answer) > room
        prompt = prompt[-max(1, room - len(answer)) :]
        answer = answer[: room - len(prompt)]
        return Encoded(np.concatenate((prompt, answer)), np.arange(len(prompt) + len(answer)) >= len(prompt), cut)

    def decode(self, ids: np.ndarray, mask: np.ndarray | None) -> Document:
        """Returns the prompt and the completion, or messages: each of the assistant's and all that stands between two.

        With a chat template they have the template's words around them.
        """
        counted = np.ones(len(ids), bool) if mask is None else mask
        borders = np.flatnonzero(np.diff(counted)) + 1
        texts = [self.encoders["tokenizer"].decode(some.tolist()) for some in np.split(ids, borders)]
        if not self.chats:
            return ("", texts[0]) if counted[0] else (texts[0], "".join(texts[1:]))
        roles = ("assistant", "user") if counted[0] else ("user", "assistant")
        messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]
        return (pack_messages(messages), "[]")[: len(self.columns)]

    @property
    def _template(self) -> ChatTemplate:
        template = self.encoders["tokenizer"].chat
        assert template  # as `shaped_by` made sure
        return template

    def question(self, document: Document) -> np.ndarray:
        """Ids of the prompt; of a chat all before the assistant's last turn. Raises ValueError where a chat is none."""
        if not self.chats:
            return self.prompt(document[0])
        asked = read_conversation(document).question
        return self._template.opening(asked.messages, asked.tools)

    def answer_bytes(self, document: Document) -> int:
        """Bytes of the completion, or of all that the assistant says. Raises ValueError where a chat is none."""
        return read_conversation(document).answer_bytes if self.chats else super().answer_bytes(document)

    def prompt(self, text: str) -> np.ndarray:
        """Ids of a prompt, with what leads in its answer in a chat; of an empty one an end token.

        Raises ValueError where a chat is none.
        """
        if self.chats:
            return self.question((text,))
        encoder = self.encoders["tokenizer"]
        ids = encoder.chat.question(text) if encoder.chat else encoder.encode(text)
        return ids if len(ids) else np.array([encoder.end_id], np.uint32)

    def collate(self, rows: Rows, masks: Rows | None) -> "tuple[Inputs, torch.Tensor]":
        """Inputs are all but each pair's last id, targets all but its first; padding stands behind, and is no target.

        Packed, all pairs follow each other in one row (1, N), and beside it stands where each begins, as in LanguageModel.
        """
        kept = [np.ones(len(row), bool) for row in rows] if masks is None else masks
        wanted = [np.where(mask, row.astype(np.int64), IGNORED)[1:] for row, mask in zip(rows, kept, strict=True)]
        read = [row[:-1] for row in rows]
        if self.packed:
            import torch

            documents = torch.tensor([0, *accumulate(map(len, read))], dtype=torch.int32)
            inputs, targets = (torch.from_numpy(np.concatenate(each).astype(np.int64))[None] for each in (read, wanted))
            return (inputs, documents), targets
        inputs, _ = pad(read)
        targets, _ = pad(wanted, IGNORED)
        return (inputs,), targets

    def losses(self, model: "nn.Module", inputs: Inputs, targets: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
        """The loss sum of each pair in nats, and its targets that count, both (B)."""
        if not self.packed:
            return super().losses(model, inputs, targets)
        import torch

        # Each token as a row of its own, then added up by pair.
        hidden, wanted = self.hidden(model, inputs)[0, :, None], targets[0, :, None]
        losses, counts = row_losses(model.logits, hidden, wanted)  # type: ignore[arg-type]
        lengths = inputs[1].diff().long()
        sums, counted = (torch.segment_reduce(each.float(), "sum", lengths=lengths) for each in (losses, counts))
        return sums, counted.long()

    @property
    def targets_per_sample(self) -> None:
        """None: about as many targets as a pair has ids, the prompt's among them."""
        return
