"""Language modelling: predict each next token of the concatenated documents.

A sample is a window of context + 1 tokens with stride context, over the borders of documents and shards; the tail that
fills no window is dropped.

    task = LanguageModel(config.model)
    task.samples(1000)                                        # 7 with a context of 128: (1000 - 1) // 128
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipelines.config import Model
from pipelines.tasks.task import IGNORED, Encoder

if TYPE_CHECKING:
    import torch

    from model.transformer import Decoder


@dataclass(frozen=True)
class LanguageModel:
    """The task of a decoder: cross-entropy of the next token."""

    model: Model
    """Settings of the network; its context is the length of a sample."""

    def encode(self, text: str, encoder: Encoder) -> tuple[np.ndarray, np.ndarray | None]:
        """The document's ids and an end token; every token counts."""
        return np.append(encoder.encode(text), np.uint32(encoder.end_id)), None

    def samples(self, tokens: int) -> int:
        """Whole windows in that many tokens."""
        return max(0, tokens - 1) // self.model.context

    def window(self, sample: np.ndarray) -> tuple[np.ndarray, int]:
        """First tokens and length of the samples' windows."""
        return sample * self.model.context, self.model.context + 1

    def collate(self, windows: np.ndarray, masks: np.ndarray | None) -> "tuple[torch.Tensor, torch.Tensor]":
        """Inputs windows[:, :-1], targets windows[:, 1:]; a masked target is ignored."""
        import torch

        inputs, targets = torch.from_numpy(windows[:, :-1]), torch.from_numpy(windows[:, 1:])
        if masks is not None:
            targets = targets.masked_fill(~torch.from_numpy(masks[:, 1:]), IGNORED)
        return inputs.contiguous(), targets.contiguous()

    def build_model(self, vocabulary_size: int) -> "Decoder":
        """A freshly initialised decoder."""
        from model.transformer import Decoder

        return Decoder(self.model, vocabulary_size)

    def score(self, loss_sum: float, targets: float) -> dict[str, float]:
        """Mean loss in nats a token, and its perplexity."""
        loss = loss_sum / targets if targets else math.nan
        return {"val_loss": loss, "val_perplexity": math.exp(loss) if loss < 700 else math.inf}
