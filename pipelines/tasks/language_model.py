"""Language modelling: predict each next token of the concatenated documents.

A sample is a window of context + 1 tokens with stride context, over the borders of documents and shards; the tail that
fills no window is dropped. With `train.packing documents` each document in a window is read by itself, from the end token
before it on.

    task = LanguageModel(config, {"vocabulary_size": 257})
    task.window                                             # Window(length=129, stride=128) with a context of 128
"""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from raystride.model.shape import flops_per_token
from raystride.pipelines.tasks.row_losses import row_losses
from raystride.pipelines.tasks.task import IGNORED, Document, Inputs, Rows, Task, Window, mean

if TYPE_CHECKING:
    import torch
    from torch import nn

    from raystride.model.transformer import Decoder


class LanguageModel(Task):
    """The task of a decoder: cross-entropy of the next token."""

    metrics: tuple[str, ...] = ("val_loss", "val_perplexity")
    packs = True

    @property
    def packed(self) -> bool:
        """Whether documents are read by themselves, one after another without padding."""
        return self.config.train.packing == "documents"

    @property
    def window(self) -> Window | None:
        """Windows of context + 1 tokens, the context apart: as many targets as the context holds, each token once."""
        return Window(length=self.config.model.context + 1, stride=self.config.model.context)

    def encode(self, document: Document) -> tuple[np.ndarray, np.ndarray | None]:
        """The document's ids and an end token; every token counts."""
        encoder = self.encoders["tokenizer"]
        return np.append(encoder.encode(document[0]), np.uint32(encoder.end_id)), None

    def decode(self, ids: np.ndarray, mask: np.ndarray | None) -> Document:
        """Returns the document's text."""
        return (self.encoders["tokenizer"].decode(ids.tolist()),)

    def collate(self, rows: Rows, masks: Rows | None) -> "tuple[Inputs, torch.Tensor]":
        """Inputs (B, T), all but the last token of windows (B, T + 1), and targets (B, T), all but the first; both int64.

        Of packed documents also where they begin in all rows, one row after another, and the end of the last (n + 1,) int32.
        """
        import torch

        windows = torch.from_numpy(np.asarray(rows))
        inputs, targets = windows[:, :-1], windows[:, 1:]
        if masks is not None:
            targets = targets.masked_fill(~torch.from_numpy(np.asarray(masks))[:, 1:], IGNORED)
        if not self.packed:
            return (inputs.contiguous(),), targets.contiguous()
        begins = np.asarray(rows)[:, :-1] == self.facts["end_id"]
        begins[:, 0] = True
        documents = np.append(np.flatnonzero(begins), begins.size)
        return (inputs.contiguous(), torch.from_numpy(documents.astype(np.int32))), targets.contiguous()

    def prompt(self, text: str) -> np.ndarray:
        """The ids (n) after which a decoder writes on; the end token first where documents were trained to begin with it."""
        ids = super().prompt(text)
        return np.append(np.uint32(self.facts["end_id"]), ids) if self.packed else ids

    def build_model(self) -> "Decoder":
        """A freshly initialised decoder."""
        from raystride.model.transformer import Decoder, PackedDecoder

        kind = PackedDecoder if self.packed else Decoder
        return kind(self.config.model, int(self.facts["vocabulary_size"]))

    def answer(self, model: "nn.Module", inputs: Inputs) -> list[dict[str, Any]]:
        """None: what a decoder answers is a text, and of what it is graded on the document has one."""
        return []

    def losses(self, model: "nn.Module", inputs: Inputs, targets: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
        """The loss sum of each sample in nats, and its targets that count, both (B)."""
        return row_losses(model.logits, self.hidden(model, inputs), targets)  # type: ignore[arg-type]

    def hidden(self, model: "nn.Module", inputs: Inputs) -> "torch.Tensor":
        """The last hidden states (B, T, C) of inputs as `collate` makes them."""
        ids, *documents = inputs
        found: torch.Tensor = model.hidden(ids, documents=documents[0] if documents else None)  # type: ignore[operator]
        return found

    def score(self, loss_sum: float, targets: float, counts: np.ndarray) -> dict[str, float]:
        """Mean loss in nats a token, and its perplexity."""
        scores = super().score(loss_sum, targets, counts)
        return scores | {"val_perplexity": perplexity(scores["val_loss"])}

    def grades(self, table: Mapping[str, Any]) -> Callable[[np.ndarray], dict[str, float]]:
        """Loss, perplexity, and bits a byte of the text, which compares models whatever their tokenizers."""
        grades = super().grades(table)
        losses, size = (np.asarray(table[self.given(name)], float) for name in ("loss", "bytes"))

        def of(weights: np.ndarray) -> dict[str, float]:
            scores = grades(weights)
            bits = mean(float(weights @ losses) / math.log(2), float(weights @ size))
            return scores | {"perplexity": perplexity(scores["loss"]), "bits_per_byte": bits}

        return of

    def flops_per_token(self, model: "nn.Module", tokens: float) -> float | None:
        """Operations to train on a token; attention's over the context, or over packed documents of so many tokens."""
        if not self.packed:
            return super().flops_per_token(model, tokens)
        return flops_per_token(self.config.model, int(self.facts["vocabulary_size"]), tokens)

    @property
    def targets_per_sample(self) -> float | None:
        """As many as the context holds: every token of a window but the first."""
        return float(self.config.model.context)


def perplexity(loss: float) -> float:
    """e to the power of a mean loss in nats; infinite where that is more than a float holds."""
    return math.exp(loss) if loss < 700 else math.inf
