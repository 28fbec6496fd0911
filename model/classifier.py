"""A classifier of texts: the decoder's blocks without causality, one vector a text, a linear layer.

Without blocks, and with `windows` for its pooling, it is the convolutional network of Kim (2014).

Shapes: ids (B, T) of which the first lengths (B,) count -> logits (B, classes), or with targets (B,) -> the loss sum and the
number of targets that count. What is padded at the end of a text changes nothing.

    model = Classifier(config.model, vocabulary_size=4096, classes=4)
    loss_sum, counted = model(ids, lengths, targets)
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from raystride.model.block import Block, build_final_norm, build_positions, build_rotation, initialise, with_positions
from raystride.model.dropout import Dropout
from raystride.model.linear import Linear, Products
from raystride.model.loss import cross_entropy
from raystride.model.shape import ClassifierShape, classifier_flops_per_token, pooled_width


class Classifier(nn.Module):
    """Embedding, blocks that look both ways, pooling and a head."""

    class_weights: torch.Tensor | None

    def __init__(
        self,
        shape: ClassifierShape,
        vocabulary_size: int,
        classes: int,
        *,
        class_weights: tuple[float, ...] = (),
        label_smoothing: float = 0.0,
    ) -> None:
        """`class_weights`, one a class, multiply losses in training; a mean of 1 over the texts keeps learning rates right.

        Raises ValueError where there are weights, but not one a class.
        """
        super().__init__()
        if class_weights and len(class_weights) != classes:
            raise ValueError(f"class_weights are {len(class_weights)}, classes {classes}: give one weight a class, or none")
        self.shape, self.label_smoothing = shape, label_smoothing
        self.products = Products(shape.linear)
        self.embedding = nn.Embedding(vocabulary_size, shape.width)
        self.positions = build_positions(shape)
        self.dropout, self.last_dropout = Dropout(shape.dropout), Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape, self.products, causal=False) for _ in range(shape.layers))
        self.norm = build_final_norm(shape)
        # Zeros, so that it begins as the mean.
        self.query = nn.Parameter(torch.zeros(shape.width)) if shape.pooling == "attention" else None
        sizes = shape.windows if shape.pooling == "windows" else ()
        self.windows = nn.ModuleList(WindowConvolution(shape, size, self.products) for size in sizes)
        self.head = Linear(pooled_width(shape), classes, bias=True, products=self.products)
        self.register_buffer("class_weights", torch.tensor(class_weights) if class_weights else None, persistent=False)
        initialise(self, shape, additions=max(1, 2 * shape.layers))

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum of the cross-entropies in nats over targets that are not -100, and how many those are.

        Class weights and label smoothing are for training; in evaluation mode it is the plain loss.
        """
        logits = self.logits(ids, lengths)
        if not self.training:
            return cross_entropy(logits, targets)
        return cross_entropy(logits, targets, weights=self.class_weights, label_smoothing=self.label_smoothing)

    def logits(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """ids (B, T), lengths (B,) -> (B, classes). A text without tokens is read as its first padding."""
        lengths = lengths.clamp(min=1)
        x, rotation = with_positions(self.embedding(ids), self.shape, self.positions), build_rotation(ids, self.shape)
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, rotation, None, None, lengths)
        return self.head(self.last_dropout(self._pool(self.norm(x), lengths)))  # type: ignore[no-any-return]

    def _pool(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """(B, T, C) -> (B, C), or all channels of the windows."""
        if self.shape.pooling == "first":
            return x[:, 0]
        real = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
        if self.windows:
            return torch.cat([window(x, real) for window in self.windows], dim=-1)
        if self.query is None:
            return (real[:, None].to(x.dtype) @ x)[:, 0] / lengths[:, None].to(x.dtype)
        scores = (x @ self.query.to(x.dtype) / math.sqrt(x.shape[-1])).masked_fill(~real, -math.inf)
        return (scores.softmax(-1).to(x.dtype)[:, None] @ x)[:, 0]

    def flops_per_token(self) -> float:
        """Operations to train on a token of the longest text."""
        return classifier_flops_per_token(self.shape)


class WindowConvolution(nn.Module):
    """A convolution over neighbouring tokens, and the maximum of each channel over the text (Kim, 2014, section 2)."""

    def __init__(self, shape: ClassifierShape, size: int, products: Products) -> None:
        super().__init__()
        self.size = size
        self.convolution = Linear(size * shape.width, shape.window_channels, bias=True, products=products)

    def forward(self, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """(B, T, C), of which the tokens count where real (B, T) is True, -> (B, channels)."""
        # A window ends at each token, so that none that counts has padding in it; zeros stand before the first token.
        seen = F.pad(x, (0, 0, self.size - 1, 0)).unfold(1, self.size, 1).flatten(2)
        return self.convolution(seen).masked_fill(~real[..., None], -math.inf).amax(1).relu()  # type: ignore[no-any-return]
