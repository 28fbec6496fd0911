"""Language modelling: predicts each next token of the concatenated documents.

A sample is a window of context + 1 tokens with stride context, across the borders of documents and shards; an incomplete
window at the end is dropped. A document begins with the tokens that the tokenizer puts before a text (`<bos>`), if any. With
`train.packing documents` attention in a window is limited to each document, from its begin token on, or else from the end
token before it.

    task = LanguageModel(config, {"vocabulary_size": 257})
    task.window                                             # Window(length=129, stride=128) with a context of 128
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from raystride.model.shape import flops_per_token
from raystride.pipelines.config import Config
from raystride.pipelines.data.tasks.contract import list_missing
from raystride.pipelines.data.tasks.encoder import Encoders
from raystride.pipelines.data.tasks.rows import losses_row_by_row, row_losses
from raystride.pipelines.data.tasks.task import IGNORED, Document, Facts, Inputs, NetworkMethods, Rows, Task, Window, mean
from raystride.pipelines.data.tokenizers.training import read_begin_ids, read_end_id

if TYPE_CHECKING:
    import torch
    from torch import nn

    from raystride.model.transformer import Decoder


class LanguageModel(Task):
    """Language modelling with a decoder: cross-entropy of the next token."""

    metrics: tuple[str, ...] = ("val_loss", "val_perplexity")
    packs = True
    continues_text = True
    network_methods: ClassVar[NetworkMethods] = {
        "hidden": ("generate", "predict"),
        "logits": ("generate", "predict"),
    }

    def __init__(self, config: Config, facts: Facts | None = None, encoders: Encoders | None = None) -> None:
        super().__init__(config, facts, encoders)
        if self.window and self.packs_documents and config.tokenizer.markers == "special":
            raise config.tokenizer.error(
                "markers", "must be `text` with train.packing `documents`: a document would end where a turn in it does"
            )

    @property
    def packs_documents(self) -> bool:
        """Whether attention is limited to each document, packed one after another without padding."""
        return self.config.train.packing == "documents"

    @property
    def window(self) -> Window | None:
        """Windows of context + 1 tokens, the context apart: as many targets as the context holds, each token once."""
        return Window(length=self.config.model.context + 1, stride=self.config.model.context)

    @property
    def begin_ids(self) -> Sequence[int]:
        """The tokenizer's begin tokens at the time of preparation."""
        ids: Sequence[int] = self.facts.get("begin_ids", ())
        return ids

    def shaped_by(self) -> dict[str, Any]:
        """Returns the other inputs of the stream: the begin tokens. Raises SettingError if the tokenizer cannot be read."""
        begin = self._begin_in_stream(read_begin_ids(self.config.tokenizer), lambda: read_end_id(self.config.tokenizer))
        return {"begin": begin} if begin else {}

    def learn(self, surveys: Sequence[Facts]) -> Facts:
        """Returns the vocabulary's size, the end token, and the begin tokens, if there are any."""
        encoder = self.encoders["tokenizer"]
        begin = [] if self.window is None else self._begin_in_stream([*encoder.begin_ids], lambda: encoder.end_id)
        return {**super().learn(surveys), **({"begin_ids": begin} if begin else {})}

    @staticmethod
    def _begin_in_stream(begin: list[int], end_id: Callable[[], int]) -> list[int]:
        """Returns the begin tokens in a stream: none if they equal the end token of the document before."""
        return [] if len(begin) == 1 and begin == [end_id()] else begin

    def encode(self, document: Document) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns the document's ids between begin tokens and an end token; every token counts."""
        encoder = self.encoders["tokenizer"]
        ids = prepend_begin_ids(encoder.encode(document[0]), self.begin_ids)
        return np.concatenate((ids, np.array([encoder.end_id], np.uint32))), None

    def decode(self, ids: np.ndarray, mask: np.ndarray | None) -> Document:
        """Returns the document's text."""
        return (self.encoders["tokenizer"].decode(ids.tolist()),)

    def collate(self, rows: Rows, masks: Rows | None) -> "tuple[Inputs, torch.Tensor]":
        """Returns inputs (B, T), all but the last token of windows (B, T + 1), and targets (B, T), all but the first; both
        int64.

        Packed documents: also their offsets in all rows, concatenated, and the end of the last (n + 1,) int32.
        """
        import torch

        windows = torch.from_numpy(np.asarray(rows))
        inputs, targets = windows[:, :-1], windows[:, 1:]
        if masks is not None:
            targets = targets.masked_fill(~torch.from_numpy(np.asarray(masks))[:, 1:], IGNORED)
        if not self.packs_documents:
            return (inputs.contiguous(),), targets.contiguous()
        begins = np.asarray(rows)[:, :-1] == (self.begin_ids or [self.facts["end_id"]])[0]
        begins[:, 0] = True
        documents = np.append(np.flatnonzero(begins), begins.size)
        return (inputs.contiguous(), torch.from_numpy(documents.astype(np.int32))), targets.contiguous()

    def prompt(self, text: str) -> np.ndarray:
        """Returns the ids (n) that a decoder continues, after the begin tokens; if packed and there are none, after an end
        token."""
        begin = self.encoders["tokenizer"].begin_ids or ([self.facts["end_id"]] if self.packs_documents else [])
        return prepend_begin_ids(super().prompt(text), begin)

    def build_model(self) -> "Decoder":
        """Returns a freshly initialised decoder."""
        from raystride.model.transformer import Decoder, PackedDecoder

        kind = PackedDecoder if self.packs_documents else Decoder
        return kind(self.config.model, int(self.facts["vocabulary_size"]))

    def answer(self, model: "nn.Module", inputs: Inputs) -> list[dict[str, Any]]:
        """Returns nothing: a decoder's prediction is a text, which is graded with the document's own."""
        return []

    def losses(self, model: "nn.Module", inputs: Inputs, targets: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
        """Returns the loss sum of each sample in nats, and its number of counted targets, both (B)."""
        if list_missing(self, model):
            return losses_row_by_row(model, inputs, targets)
        return row_losses(model.logits, self.hidden(model, inputs), targets)  # type: ignore[arg-type]

    def hidden(self, model: "nn.Module", inputs: Inputs) -> "torch.Tensor":
        """Returns the last hidden states (B, T, C) of inputs of `collate`."""
        ids, *documents = inputs
        given = {"documents": documents[0]} if documents else {}  # which a network of a user's own need not take
        found: torch.Tensor = model.hidden(ids, **given)  # type: ignore[operator]
        return found

    def score(self, loss_sum: float, targets: float, counts: np.ndarray) -> dict[str, float]:
        """Returns mean loss in nats per token, and its perplexity."""
        scores = super().score(loss_sum, targets, counts)
        return scores | {"val_perplexity": perplexity(scores["val_loss"])}

    def grades(self, table: Mapping[str, Any]) -> Callable[[np.ndarray], dict[str, float]]:
        """Returns loss, perplexity, and bits per byte of the text, which are comparable across tokenizers."""
        grades = super().grades(table)
        losses, size = (np.asarray(table[self.given(name)], float) for name in ("loss", "bytes"))

        def grade_with_weights(weights: np.ndarray) -> dict[str, float]:
            scores = grades(weights)
            bits = mean(float(weights @ losses) / math.log(2), float(weights @ size))
            return scores | {"perplexity": perplexity(scores["loss"]), "bits_per_byte": bits}

        return grade_with_weights

    def flops_per_token(self, model: "nn.Module", tokens: float) -> float | None:
        """Returns the training operations per token; attention spans the context, or packed documents of that many."""
        if not self.packs_documents:
            return super().flops_per_token(model, tokens)
        return flops_per_token(self.config.model, int(self.facts["vocabulary_size"]), tokens)

    @property
    def targets_per_sample(self) -> float | None:
        """As many as the context holds: every token of a window but the first."""
        return float(self.config.model.context)


def prepend_begin_ids(ids: np.ndarray, begin: Sequence[int]) -> np.ndarray:
    """Returns a text's ids after its begin tokens, unless it has them already."""
    given = ids[: len(begin)].tolist() == [*begin]
    return ids if given else np.concatenate((np.array(begin, np.uint32), ids))


def perplexity(loss: float) -> float:
    """Returns e to the power of a mean loss in nats; infinite if it exceeds a float."""
    return math.exp(loss) if loss < 700 else math.inf
