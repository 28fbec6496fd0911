"""Fine-tuning on pairs of a prompt and its completion: language modelling whose loss leaves out the prompt.

Each pair is a sample of its own, padded to the longest beside it. With a tokenizer that has a chat template, prompt and
completion are the turns of a chat, as the template writes them; else they follow each other, and an end token them.

    task = Completion(config, {"vocabulary_size": 50257, "end_id": 50256}, encoders)
    (inputs,), targets = task.collate(rows, masks)           # both (B, T), int64; the prompt's targets are IGNORED
"""

from collections.abc import Iterable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from raystride.pipelines.tasks.language_model import LanguageModel
from raystride.pipelines.tasks.padding import pad
from raystride.pipelines.tasks.row_losses import row_losses
from raystride.pipelines.tasks.task import IGNORED, Column, Document, Inputs, Rows
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
        """The prompt and the completion."""
        data = self.config.data
        return (Column("data.column", data.column), Column("data.target_column", data.target_column, answer=True))

    def texts(self, document: Document, tokenizer: str) -> Iterable[str]:
        """Both the prompt and the completion."""
        return document

    def shaped_by(self) -> dict[str, Any]:
        """What shapes examples besides: the context, beyond which they are cut off, and the chat's template."""
        tokenizer = self.config.tokenizer
        return {"context": self.config.model.context, "chat": read_chat(tokenizer) if tokenizer.kind == "file" else None}

    def encode(self, document: Document) -> tuple[np.ndarray, np.ndarray]:
        """Ids of prompt and completion, of which the latter count. Of what is longer than context + 1, the prompt's
        beginning goes first, but for one id, then the completion's end."""
        prompt = self.prompt(document[0])
        if len(document) == 1:
            return prompt, np.zeros(len(prompt), bool)
        encoder = self.encoders["tokenizer"]
        chat, end = encoder.chat, np.uint32(encoder.end_id)
        answer = chat.answer(*document) if chat else np.append(encoder.encode(document[1]), end)
        room = self.config.model.context + 1
        prompt = prompt[-max(1, room - len(answer)) :]
        answer = answer[: room - len(prompt)]
        return np.concatenate((prompt, answer)), np.arange(len(prompt) + len(answer)) >= len(prompt)

    def prompt(self, text: str) -> np.ndarray:
        """Ids of a prompt, with what leads in its answer in a chat; of an empty one an end token."""
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
