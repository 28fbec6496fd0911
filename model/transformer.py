"""A decoder-only transformer, in the flavour of GPT-2 (Radford et al., 2019) or of Llama (Touvron et al., 2023).

Shapes: ids (B, T) -> logits (B, T, V), or with targets (B, T) -> the loss sum and the number of targets that count.

    model = Decoder(config.model, vocabulary_size=4096)
    loss_sum, counted = model(ids, targets)
"""

import math
from functools import partial

import torch
from torch import nn

from model.attention import Attention, LayerCache, Rotation, rotation_table
from model.feed_forward import GELU, SwiGLU
from model.linear import Linear, linear, use_onednn
from model.norm import LayerNorm, RMSNorm
from model.shape import DecoderShape, flops_per_token, head_size, hidden_width, is_tied
from triton_kernels.linear_cross_entropy import linear_cross_entropy


class Block(nn.Module):
    """Attention and feed-forward, each on a normalised input and added to the stream (pre-norm)."""

    def __init__(self, shape: DecoderShape, onednn: bool) -> None:
        super().__init__()
        self.norm1 = _norm(shape)
        self.attention = Attention(
            width=shape.width,
            heads=shape.heads,
            kv_heads=shape.kv_heads or shape.heads,
            head_size=shape.head_size,
            bias=shape.bias,
            qkv_bias=shape.qkv_bias,
            qk_norm=shape.norm_eps if shape.qk_norm else None,
            dropout=shape.dropout,
            onednn=onednn,
        )
        self.norm2 = _norm(shape)
        self.feed_forward: nn.Module
        if shape.flavour == "gpt2":
            self.feed_forward = GELU(
                shape.width, hidden_width(shape), bias=shape.bias, tanh=shape.gelu == "tanh", onednn=onednn
            )
        else:
            self.feed_forward = SwiGLU(shape.width, hidden_width(shape), onednn=onednn)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(
        self, x: torch.Tensor, rotation: Rotation | None, cache: LayerCache | None, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """(B, T, C) -> (B, T, C)."""
        y, x = self.norm2.add(self.dropout(self.attention(self.norm1(x), rotation, cache, mask)), x)
        return x + self.dropout(self.feed_forward(y))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Embedding, blocks, norm and a head, which may be the embedding's weight."""

    def __init__(self, shape: DecoderShape, vocabulary_size: int) -> None:
        super().__init__()
        self.shape, self.vocabulary_size = shape, vocabulary_size
        self.onednn = use_onednn(shape.linear)
        self.embedding = nn.Embedding(vocabulary_size, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width) if shape.flavour == "gpt2" else None
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape, self.onednn) for _ in range(shape.layers))
        self.norm = _norm(shape)
        self.head = None if is_tied(shape) else Linear(shape.width, vocabulary_size, onednn=self.onednn)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """N(0, 0.02) everywhere, and 0.02 / sqrt(2 layers) where a block adds to the stream (Radford et al., 2019, 2.3)."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            adds_to_stream = name.endswith(("attention.out.weight", "feed_forward.down.weight"))
            nn.init.normal_(parameter, 0.0, 0.02 / math.sqrt(2 * self.shape.layers) if adds_to_stream else 0.02)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum of the cross-entropies in nats over targets that are not -100, and how many those are."""
        return linear_cross_entropy(self.hidden(ids), self._head(), targets, product=partial(linear, onednn=self.onednn))

    def hidden(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor | None = None,
        caches: list[LayerCache] | None = None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The normalised last hidden states (B, T, C) of ids (B, T); `positions` (B or 1, T) default to 0, 1, 2, ..."""
        x = self.embedding(ids)
        rotation = None
        if self.positions is not None:
            x = x + (self.positions.weight[: ids.shape[1]] if positions is None else self.positions(positions))
        else:
            if positions is None:
                positions = torch.arange(ids.shape[1], device=ids.device)[None]
            rotation = rotation_table(positions, head_size(self.shape), self.shape.rope_theta, self.shape.rope_scaling)
        x = self.dropout(x)
        for layer, block in enumerate(self.blocks):
            x = block(x, rotation, caches[layer] if caches else None, mask)
        return self.norm(x)  # type: ignore[no-any-return]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(B, T, C) -> (B, T, V)."""
        return linear(hidden, self._head(), onednn=self.onednn)

    def _head(self) -> torch.Tensor:
        return self.embedding.weight if self.head is None else self.head.weight

    def flops_per_token(self) -> float:
        """Operations to train on a token."""
        return flops_per_token(self.shape, self.vocabulary_size)


def _norm(shape: DecoderShape) -> LayerNorm | RMSNorm:
    if shape.flavour == "gpt2":
        return LayerNorm(shape.width, bias=shape.bias, eps=shape.norm_eps)
    return RMSNorm(shape.width, eps=shape.norm_eps)
