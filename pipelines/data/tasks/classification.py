"""Classification of texts: predicts one of the data's labels for a text.

An example is the label's number and the text's ids, as many as the context holds. For a Hugging Face encoder, the special
tokens that its tokenizer adds, [CLS] and [SEP], surround them. With the tokenizer `bytes` the raw bytes are transferred, and
the kernel `byte_pack` pads and masks them on the device.

    task = Classification(config, {"vocabulary_size": 4096, "labels": ["asyncio", "email"], ...})
    (ids, lengths), labels = task.collate(rows, None)        # ids (B, T), lengths (B), labels (B), int64
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from raystride.model.shape import ENCODERS, classifier_flops_per_token
from raystride.pipelines.config import Config
from raystride.pipelines.data.tasks.encoder import Encoders
from raystride.pipelines.data.tasks.labels import LabelTask
from raystride.pipelines.data.tasks.rows import pad_sequences
from raystride.pipelines.data.tasks.task import Column, Document, Encoded, Facts, Inputs, Rows, Task
from raystride.pipelines.data.tokenizers.training import read_surrounding

if TYPE_CHECKING:
    import torch
    from torch import nn

    from raystride.model.classifier import Classifier


class Classification(LabelTask):
    """Classification of texts by an encoder, with one label a text."""

    unit = "examples"

    def __init__(self, config: Config, facts: Facts | None = None, encoders: Encoders | None = None) -> None:
        super().__init__(config, facts, encoders)
        self.bytes = config.tokenizer.kind == "bytes"

    @property
    def columns(self) -> tuple[Column, ...]:
        """The text and its label."""
        return (Column("data.column", self.config.data.column), self.label_column)

    @property
    def ids(self) -> int:
        """An upper bound of the numbers in an example: the text's ids, or bytes, and the label's number."""
        return max(256 if self.bytes else int(self.facts["vocabulary_size"]), len(self.labels))

    def learn(self, surveys: list[Facts]) -> Facts:  # type: ignore[override]
        """Returns the tokenizer's facts and the labels."""
        learned = {**Task.learn(self, surveys), **super().learn(surveys)}
        return learned | ({"around": read_surrounding(self.config.tokenizer)} if self._is_encoder else {})

    def shaped_by(self) -> dict[str, Any]:
        """Returns the other inputs of examples: the context, at which texts are truncated, and the tokens around an
        encoder's texts."""
        around = {"around": read_surrounding(self.config.tokenizer)} if self._is_encoder else {}
        return {"context": self.config.model.context, **around}

    @property
    def _is_encoder(self) -> bool:
        """Whether the network is a Hugging Face encoder, which needs special tokens around a text."""
        return self.config.model.architecture in ENCODERS

    def encode(self, document: Document) -> tuple[np.ndarray, None]:
        """Returns the label's number, 0 for an unlabelled text, and the first ids of the text, with the special tokens
        around them."""
        return self._encode_whole(document).ids, None

    def example(self, document: Document) -> Encoded:
        """Returns the example of `encode`, and the ids of the text if they do not all fit."""
        return self._encode_whole(document) if self._inherits(Classification, "encode") else super().example(document)

    def _encode_whole(self, document: Document) -> Encoded:
        label = self.label_number(document[1]) if len(document) > 1 else 0
        first, last = self.facts.get("around", ([], []))
        around, context = len(first) + len(last), self.config.model.context
        ids = self.encoders["tokenizer"].encode(document[0])
        cut = len(ids) + around if len(ids) + around > context else 0
        parts = ([label], first, ids[: max(0, context - around)], last)
        return Encoded(np.concatenate([np.asarray(part, np.uint32) for part in parts]), None, cut)

    def decode(self, ids: np.ndarray, mask: np.ndarray | None) -> Document:
        """Returns the text, as much of it as the context holds, and its label."""
        return self.encoders["tokenizer"].decode(ids[1:].tolist()), self.labels[int(ids[0])]

    def collate(self, rows: Rows, masks: Rows | None) -> "tuple[Inputs, torch.Tensor]":
        """Returns padded ids (B, T) and lengths (B), and the labels (B).

        For raw bytes: all bytes concatenated, the offsets of texts and T positions.
        """
        import torch

        targets = self.targets(rows, masks)
        texts = [row[1:] for row in rows]
        if not self.bytes:
            return pad_sequences(texts), targets
        offsets = torch.from_numpy(np.cumsum([0, *map(len, texts)], dtype=np.int64))
        longest = max(1, *map(len, texts))
        return (torch.from_numpy(np.concatenate(texts)), offsets, torch.arange(longest)), targets

    def unpack(self, inputs: Inputs) -> Inputs:
        """Returns ids (B, T) and lengths (B); for raw bytes the kernel `byte_pack` makes them on the device."""
        if not self.bytes:
            return inputs
        from raystride.triton_kernels.byte_pack import byte_pack

        data, offsets, positions = inputs
        ids, _ = byte_pack(data, offsets, length=len(positions))
        return ids, offsets.diff()

    def tokens_of(self, numbers: float) -> float:
        """Returns the tokens of an example of this many numbers: those of the text, without the label."""
        return numbers - 1

    def flops_per_token(self, model: "nn.Module", tokens: float) -> float:
        """Returns the training operations per token for texts of this length."""
        return classifier_flops_per_token(self.config.model, tokens)

    def build_model(self) -> "Classifier":
        """Returns a freshly initialised encoder with a classification head."""
        from raystride.model.classifier import Classifier

        return Classifier(
            self.config.model,
            int(self.facts["vocabulary_size"]),
            len(self.labels),
            class_weights=self.class_weights,
            label_smoothing=self.config.objective.label_smoothing,
        )
