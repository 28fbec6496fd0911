"""Text classifier: bidirectional transformer blocks, pooling to one vector a text, and a linear head.

In the flavours of BERT (Devlin et al., 2019) and ModernBERT (Warner et al., 2024) it is their sequence classifier. Without
blocks and with `windows` pooling it is the convolutional network of Kim (2014).

Shapes: ids (B, T) of which the first lengths (B,) count -> logits (B, classes), or with targets (B,) -> the loss sum and the
number of targets that count. Padding at the end of a text changes nothing.

    model = Classifier(config.model, vocabulary_size=4096, classes=4)
    loss_sum, counted = model(ids, lengths, targets)
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from raystride.model.block import (
    Block,
    add_positions,
    build_final_norm,
    build_norm,
    build_positions,
    build_rotation,
    initialize_weights,
)
from raystride.model.dropout import Dropout
from raystride.model.linear import Linear, Products
from raystride.model.loss import cross_entropy
from raystride.model.norm import LayerNorm
from raystride.model.shape import (
    ENCODERS,
    ClassifierShape,
    classifier_flops_per_token,
    has_biases,
    has_dense_bias,
    pooled_width,
)


class Classifier(nn.Module):
    """Embedding, bidirectional blocks, pooling and a head."""

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

        Raises ValueError if there are weights, but not one a class.
        """
        super().__init__()
        if class_weights and len(class_weights) != classes:
            raise ValueError(f"class_weights are {len(class_weights)}, classes {classes}: give one weight a class, or none")
        self.shape, self.label_smoothing = shape, label_smoothing
        self.products = Products(shape.linear)
        self.embedding = nn.Embedding(vocabulary_size, shape.hidden_size)
        self.positions = build_positions(shape)
        self.embedding_norm = build_norm(shape) if shape.architecture in ENCODERS else None
        self.dropout, self.last_dropout = Dropout(shape.dropout), Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape, self.products, causal=False, layer=layer) for layer in range(shape.layers))
        self.norm = build_final_norm(shape)
        # Zeros, so that pooling starts as the mean.
        self.query = nn.Parameter(torch.zeros(shape.hidden_size)) if shape.pooling == "attention" else None
        sizes = shape.windows if shape.pooling == "windows" else ()
        self.windows = nn.ModuleList(WindowConvolution(shape, size, self.products) for size in sizes)
        self.dense, self.dense_norm = build_dense(shape, self.products)
        self.head = Linear(pooled_width(shape), classes, bias=True, products=self.products)
        self.register_buffer("class_weights", torch.tensor(class_weights) if class_weights else None, persistent=False)
        initialize_weights(self, shape, additions=max(1, 2 * shape.layers))

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the sum of cross-entropies in nats over targets other than -100, and their number.

        Class weights and label smoothing are for training; in evaluation mode the loss is plain.
        """
        logits = self.logits(ids, lengths)
        if not self.training:
            return cross_entropy(logits, targets)
        return cross_entropy(logits, targets, weights=self.class_weights, label_smoothing=self.label_smoothing)

    def logits(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Maps ids (B, T), lengths (B,) to logits (B, classes). A text without tokens is read as its first padding."""
        lengths = lengths.clamp(min=1)
        x, rotation = add_positions(self.embedding(ids), self.shape, self.positions), build_rotation(ids, self.shape)
        x = self.dropout(x if self.embedding_norm is None else self.embedding_norm(x))
        for block in self.blocks:
            x = block(x, rotation, None, None, lengths)
        pooled = self._apply_dense(self._pool_tokens(self.norm(x), lengths))
        return self.head(self.last_dropout(pooled))  # type: ignore[no-any-return]

    def _apply_dense(self, pooled: torch.Tensor) -> torch.Tensor:
        """Applies the dense layer before the head, if there is one: (B, C) -> (B, C)."""
        if self.dense is None:
            return pooled
        activated = _ACTIVATIONS[self.shape.head_dense](self.dense(pooled))
        return activated if self.dense_norm is None else self.dense_norm(activated)  # type: ignore[no-any-return]

    def _pool_tokens(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Pools x (B, T, C) to (B, C), or to all channels of the windows."""
        if self.shape.pooling == "first":
            return x[:, 0]
        real = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
        if self.windows:
            return torch.cat([window(x, real) for window in self.windows], dim=-1)
        if self.query is None:
            return (real[:, None].to(x.dtype) @ x)[:, 0] / lengths[:, None].to(x.dtype)
        scores = (x @ self.query.to(x.dtype) / math.sqrt(x.shape[-1])).masked_fill(~real, -math.inf)
        return (scores.softmax(-1).to(x.dtype)[:, None] @ x)[:, 0]

    @property
    def fully_trained_modules(self) -> dict[str, nn.Module]:
        """Modules trained beside adapters: those after an encoder's pooling, which its base may lack."""
        if self.shape.architecture not in ENCODERS:
            return {}
        modules = {"dense": self.dense, "dense_norm": self.dense_norm, "head": self.head}
        return {name: module for name, module in modules.items() if module is not None}

    def flops_per_token(self) -> float:
        """Returns the FLOPs to train on a token of the longest text."""
        return classifier_flops_per_token(self.shape)


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"tanh": torch.tanh, "relu": torch.relu, "gelu": F.gelu}


def build_dense(shape: ClassifierShape, products: Products) -> tuple[Linear | None, nn.Module | None]:
    """Builds the layer between pooling and head, and the norm after its activation, if the shape has them."""
    if shape.head_dense == "none":
        return None, None
    width = pooled_width(shape)
    dense = Linear(width, width, bias=has_dense_bias(shape), products=products)
    return dense, LayerNorm(width, bias=has_biases(shape), eps=shape.norm_eps) if shape.head_dense == "gelu" else None


class WindowConvolution(nn.Module):
    """A convolution over neighbouring tokens, and the maximum of each channel over the text (Kim, 2014, section 2)."""

    def __init__(self, shape: ClassifierShape, size: int, products: Products) -> None:
        super().__init__()
        self.size = size
        self.convolution = Linear(size * shape.hidden_size, shape.window_channels, bias=True, products=products)

    def forward(self, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """Maps x (B, T, C) to (B, channels); real (B, T) is False for padding."""
        # Each window ends at a token, so that no counted one contains padding; zeros precede the first token.
        seen = F.pad(x, (0, 0, self.size - 1, 0)).unfold(1, self.size, 1).flatten(2)
        return self.convolution(seen).masked_fill(~real[..., None], -math.inf).amax(1).relu()  # type: ignore[no-any-return]
