"""Classification of texts: which of the labels that the data has a text gets.

An example is the label's number and the text's ids, as many as the context holds. With the tokenizer `bytes` the raw bytes
travel, and the kernel `byte_pack` pads and masks them on the device.

    task = Classification(config, {"vocabulary_size": 4096, "labels": ["asyncio", "email"], ...})
    (ids, lengths), labels = task.collate(rows, None)        # ids (B, T), lengths (B), labels (B), int64
"""

from typing import TYPE_CHECKING

import numpy as np

from raystride.model.shape import classifier_flops_per_token
from raystride.pipelines.config import Config
from raystride.pipelines.tasks.labels import Labelling
from raystride.pipelines.tasks.padding import pad
from raystride.pipelines.tasks.task import Column, Document, Encoders, Facts, Inputs, Rows, Task

if TYPE_CHECKING:
    import torch
    from torch import nn

    from raystride.model.classifier import Classifier


class Classification(Labelling):
    """Classification of texts by an encoder, with one answer a text."""

    def __init__(self, config: Config, facts: Facts | None = None, encoders: Encoders | None = None) -> None:
        super().__init__(config, facts, encoders)
        self.bytes = config.tokenizer.kind == "bytes"

    @property
    def columns(self) -> tuple[Column, ...]:
        """The text and its label."""
        return (Column("data.column", self.config.data.column), self.label_column)

    @property
    def ids(self) -> int:
        """A bound of the numbers in an example: of the text's ids, or its bytes, and of the labels' numbers."""
        return max(256 if self.bytes else int(self.facts["vocabulary_size"]), len(self.labels))

    def learn(self, surveys: list[Facts]) -> Facts:  # type: ignore[override]
        """The tokenizer's facts and the labels."""
        return {**Task.learn(self, surveys), **super().learn(surveys)}

    def encode(self, document: Document) -> tuple[np.ndarray, None]:
        """The label's number, 0 for a question, and the first ids of the text."""
        label = self.number_of(document[1]) if len(document) > 1 else 0
        ids = self.encoders["tokenizer"].encode(document[0])[: self.config.model.context]
        return np.concatenate(([np.uint32(label)], ids)), None

    def decode(self, ids: np.ndarray, mask: np.ndarray | None) -> Document:
        """Returns the text, as much of it as the context holds, and its label."""
        return self.encoders["tokenizer"].decode(ids[1:].tolist()), self.labels[int(ids[0])]

    def collate(self, rows: Rows, masks: Rows | None) -> "tuple[Inputs, torch.Tensor]":
        """Padded ids (B, T) and lengths (B), or of bytes all of them, where each text begins and T positions; labels (B)."""
        import torch

        targets = self.targets(rows, masks)
        texts = [row[1:] for row in rows]
        if not self.bytes:
            return pad(texts), targets
        offsets = torch.from_numpy(np.cumsum([0, *map(len, texts)], dtype=np.int64))
        longest = max(1, *map(len, texts))
        return (torch.from_numpy(np.concatenate(texts)), offsets, torch.arange(longest)), targets

    def unpack(self, inputs: Inputs) -> Inputs:
        """Ids (B, T) and lengths (B); those of raw bytes are made on the device, by the kernel `byte_pack`."""
        if not self.bytes:
            return inputs
        from raystride.triton_kernels.byte_pack import byte_pack

        data, offsets, positions = inputs
        ids, _ = byte_pack(data, offsets, length=len(positions))
        return ids, offsets.diff()

    def tokens_of(self, numbers: float) -> float:
        """Tokens of an example of so many numbers: those of the text, without the label."""
        return numbers - 1

    def flops_per_token(self, model: "nn.Module", tokens: float) -> float:
        """Operations to train on a token of texts of this length."""
        return classifier_flops_per_token(self.config.model, tokens)

    def build_model(self) -> "Classifier":
        """A freshly initialised encoder with a head."""
        from raystride.model.classifier import Classifier

        return Classifier(
            self.config.model,
            int(self.facts["vocabulary_size"]),
            len(self.labels),
            class_weights=self.class_weights,
            label_smoothing=self.config.objective.label_smoothing,
        )
