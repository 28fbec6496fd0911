"""Shared parts of the transformers: block, norms, feed-forward, positions and weight initialization.

Shapes: the stream x (B, T, C). A block normalises before its parts (pre-norm, as GPT-2 does) or after each addition
(post-norm; Vaswani et al., 2017; see `model.shape.is_post_norm`), or before and after its parts (sandwich; Gemma 2, 2024).
Its feed-forward is a ReLU (Vaswani et al., 2017), GELU for GPT-2 (Hendrycks and Gimpel, 2016), SwiGLU for Llama (Shazeer,
2020), or GeGLU for Gemma and ModernBERT (the same paper).

    block = Block(config.model, products=Products(), causal=False)
    x, rotation = add_positions(embedding(ids), config.model, learned=None), build_rotation(ids, config.model)
    x = block(x, rotation, None, None, lengths)               # (B, T, C) -> (B, T, C)
"""

import math
from functools import partial

import torch
from torch import nn

from raystride.model.attention import Attention, LayerCache, Rotation, rotation_table
from raystride.model.cut import apply_cut_plan, fill_parameter
from raystride.model.dropout import Dropout
from raystride.model.experts import Experts
from raystride.model.linear import Linear, Products
from raystride.model.norm import LayerNorm, RMSNorm
from raystride.model.shape import (
    DecoderShape,
    has_biases,
    has_first_norm,
    has_learned_positions,
    hidden_width,
    is_post_norm,
    is_rotated,
    is_sandwich_norm,
    layer_window,
    rotary_size,
)
from raystride.triton_kernels.geglu import geglu
from raystride.triton_kernels.gelu import gelu
from raystride.triton_kernels.relu import relu
from raystride.triton_kernels.swiglu import swiglu


class GELU(nn.Module):
    """W2 gelu(W1 x); `tanh`: GELU by its approximation."""

    def __init__(self, width: int, hidden: int, *, bias: bool = False, tanh: bool = False, products: Products) -> None:
        super().__init__()
        self.tanh = tanh
        self.up = Linear(width, hidden, bias=bias, products=products)
        self.down = Linear(hidden, width, bias=bias, products=products)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, C) -> (B, T, C)."""
        return self.down(gelu(self.up(x), tanh=self.tanh))  # type: ignore[no-any-return]


class ReLU(nn.Module):
    """W2 max(W1 x, 0)."""

    def __init__(self, width: int, hidden: int, *, bias: bool = False, products: Products) -> None:
        super().__init__()
        self.up = Linear(width, hidden, bias=bias, products=products)
        self.down = Linear(hidden, width, bias=bias, products=products)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, C) -> (B, T, C)."""
        return self.down(relu(self.up(x)))  # type: ignore[no-any-return]


class SwiGLU(nn.Module):
    """W2 (silu(W1 x) * W3 x), without biases."""

    def __init__(self, width: int, hidden: int, *, products: Products) -> None:
        super().__init__()
        self.gate = Linear(width, hidden, products=products)
        self.up = Linear(width, hidden, products=products)
        self.down = Linear(hidden, width, products=products)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, C) -> (B, T, C)."""
        return self.down(swiglu(self.gate(x), self.up(x)))  # type: ignore[no-any-return]


class GeGLU(nn.Module):
    """W2 (gelu(W1 x) * W3 x), without biases; `tanh`: GELU by its approximation."""

    def __init__(self, width: int, hidden: int, *, tanh: bool = True, products: Products) -> None:
        super().__init__()
        self.tanh = tanh
        self.gate = Linear(width, hidden, products=products)
        self.up = Linear(width, hidden, products=products)
        self.down = Linear(hidden, width, products=products)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, C) -> (B, T, C)."""
        return self.down(geglu(self.gate(x), self.up(x), tanh=self.tanh))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and feed-forward, each added to the stream."""

    def __init__(self, shape: DecoderShape, products: Products, *, causal: bool = True, layer: int = 0) -> None:
        """`layer` is its index from 0; alternating layers depend on it."""
        super().__init__()
        self.post = is_post_norm(shape)
        # With post-norm the norms' results are the stream itself.
        self.norm1 = build_norm(shape, narrow=not self.post) if has_first_norm(shape, layer) else nn.Identity()
        self.attention = build_attention(shape, products, causal=causal, layer=layer)
        self.norm3 = build_norm(shape) if is_sandwich_norm(shape) else None
        self.norm2 = build_norm(shape, narrow=not self.post)
        self.feed_forward = build_feed_forward(shape, products)
        self.norm4 = build_norm(shape) if is_sandwich_norm(shape) else None
        self.dropout1, self.dropout2 = Dropout(shape.dropout), Dropout(shape.dropout)

    def forward(
        self,
        x: torch.Tensor,
        rotation: Rotation | None,
        cache: LayerCache | None,
        mask: torch.Tensor | None,
        key_lengths: torch.Tensor | None = None,
        documents: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(B, T, C) -> (B, T, C)."""
        beside = (rotation, cache, mask, key_lengths, documents)
        if self.post:
            x, _ = self.norm1.add(self.dropout1(self.attention(x, *beside), documents), x)  # type: ignore[operator]
            x, _ = self.norm2.add(self.dropout2(self.feed_forward(x), documents), x)
            return x
        # The addition and the norm after it are one pass over memory.
        branch = self.attention(self.norm1(x), *beside)
        branch = branch if self.norm3 is None else self.norm3(branch)
        y, x = self.norm2.add(self.dropout1(branch, documents), x)
        branch = self.feed_forward(y)
        branch = branch if self.norm4 is None else self.norm4(branch)
        return x + self.dropout2(branch, documents)  # type: ignore[no-any-return]


def build_attention(shape: DecoderShape, products: Products, *, causal: bool = True, layer: int = 0) -> Attention:
    """Builds the self-attention of the block at this index."""
    window = layer_window(shape, layer)
    own_base = 1 if window and shape.window_rope_theta else 0
    return Attention(
        width=shape.hidden_size,
        heads=shape.heads,
        kv_heads=shape.kv_heads or shape.heads,
        head_size=shape.head_size,
        bias=has_biases(shape),
        qkv_bias=shape.qkv_bias,
        out_bias=shape.out_bias,
        qk_norm=shape.norm_eps if shape.qk_norm else None,
        qk_norm_joint=shape.qk_norm_joint,
        softcap=shape.softcap,
        scale=shape.query_pre_attn_scalar**-0.5 if shape.query_pre_attn_scalar else None,
        window=window,
        rotation_index=None if layer in shape.nope_layers else own_base,
        dropout=shape.dropout,
        products=products,
        causal=causal,
    )


def build_norm(shape: DecoderShape, *, narrow: bool = False) -> LayerNorm | RMSNorm:
    """Builds the flavour's norm over the width; `narrow` if only linear layers read its result."""
    if shape.architecture == "llama":
        return RMSNorm(shape.hidden_size, eps=shape.norm_eps, narrow=narrow)
    return LayerNorm(shape.hidden_size, bias=has_biases(shape), eps=shape.norm_eps, narrow=narrow)


def build_final_norm(shape: DecoderShape) -> nn.Module:
    """Builds the norm after the last block; with post-norm the block has normalised already."""
    return nn.Identity() if is_post_norm(shape) else build_norm(shape)


def build_feed_forward(shape: DecoderShape, products: Products) -> nn.Module:
    """Builds the flavour's feed-forward."""
    if shape.architecture == "llama":
        gated = partial(GeGLU if shape.gate == "gelu" else SwiGLU, shape.hidden_size, products=products)
        return Experts(shape, gated) if shape.experts else gated(hidden_width(shape))
    tanh = shape.gelu == "tanh"
    if shape.architecture == "modernbert":
        return GeGLU(shape.hidden_size, hidden_width(shape), tanh=tanh, products=products)
    if shape.architecture in ("gpt2", "bert"):
        return GELU(shape.hidden_size, hidden_width(shape), bias=has_biases(shape), tanh=tanh, products=products)
    return ReLU(shape.hidden_size, hidden_width(shape), bias=has_biases(shape), products=products)


def build_positions(shape: DecoderShape) -> nn.Embedding | None:
    """Builds learned positions (context, C) if the flavour has them."""
    return nn.Embedding(shape.context, shape.hidden_size) if has_learned_positions(shape) else None


def add_positions(
    x: torch.Tensor, shape: DecoderShape, learned: nn.Embedding | None, positions: torch.Tensor | None = None
) -> torch.Tensor:
    """Adds positions (B or 1, T), by default 0, 1, 2, ..., to embedded ids (B, T, C).

    `original` multiplies the embeddings by sqrt(C) first (Vaswani et al., 2017, section 3.4), as Gemma does.
    """
    if learned is not None:
        return x + (learned.weight[: x.shape[1]] if positions is None else learned(positions))
    if shape.architecture == "original":
        return x * math.sqrt(shape.hidden_size) + sinusoidal_positions(
            _positions_or_default(positions, x), shape.hidden_size
        ).to(x.dtype)
    return x * math.sqrt(shape.hidden_size) if shape.scaled_embedding else x


def build_rotation(ids: torch.Tensor, shape: DecoderShape, positions: torch.Tensor | None = None) -> Rotation | None:
    """Returns the rotary tables of ids (B, T) at `positions` (B or 1, T), by default 0, 1, 2, ...; None without rotary."""
    if not is_rotated(shape):
        return None
    at, size = _positions_or_default(positions, ids), rotary_size(shape)
    found: Rotation = rotation_table(at, size, shape.rope_theta, shape.rope_scaling, shape.rope_factor)
    return found + rotation_table(at, size, shape.window_rope_theta) if shape.window_rope_theta else found


def _positions_or_default(positions: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
    return torch.arange(rows.shape[1], device=rows.device)[None] if positions is None else positions


def sinusoidal_positions(positions: torch.Tensor, width: int) -> torch.Tensor:
    """Returns sin and cos of position / 10000^(2 i / C) in 2 i and 2 i + 1 (Vaswani et al., 2017, 3.5), (B, T, C)."""
    exponent = torch.arange(0, width, 2, dtype=torch.float32, device=positions.device) / width
    angles = positions[..., None].float() / 10000.0**exponent
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)


def initialize_weights(model: nn.Module, shape: DecoderShape, additions: int) -> None:
    """Initializes all matrices; `additions` is the number of residual additions over all blocks.

    N(0, 0.02), and N(0, 0.02 / sqrt(additions)) for a block's output projections (Radford et al., 2019, section 2.3).
    `original`: uniform after Glorot and Bengio (2010, eq. 16), and embeddings N(0, 1 / sqrt(C)): the scale in
    `add_positions` makes 1.
    """
    apply_cut_plan(model)
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, parameter in model.named_parameters():
        # The order of these draws is part of every run's bits.
        if parameter.dim() < 2:
            continue
        if shape.architecture == "original":
            if parameter in embeddings:
                fill_parameter(parameter, partial(nn.init.normal_, std=shape.hidden_size**-0.5))
            else:
                fill_parameter(parameter, nn.init.xavier_uniform_)
        else:
            adds_to_stream = name.endswith(("attention.out.weight", "feed_forward.down.weight", "shared.down.weight"))
            fill_parameter(parameter, partial(nn.init.normal_, std=0.02 / math.sqrt(additions) if adds_to_stream else 0.02))
