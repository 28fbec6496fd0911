"""Multi-head self-attention with grouped heads, rotary positions and a key-value cache, causal or not.

Shapes: x (B, T, C); q (B, H, T, D); k and v (B, G, T, D); C = H D unless `head_size` is given.
The arithmetic is in `raystride.triton_kernels`: `attention`, and `attention_packed` for packed documents.

    layer = Attention(width=128, heads=4, kv_heads=2)
    y = layer(x, rotation)                                    # (B, T, 128) -> (B, T, 128)
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from raystride.model.dropout import dropout_arguments
from raystride.model.linear import Linear, Products
from raystride.model.norm import RMSNorm
from raystride.triton_kernels.attention import attention
from raystride.triton_kernels.attention_packed import attention_packed
from raystride.triton_kernels.rope import rope

Packed = Callable[..., torch.Tensor]
Rotation = tuple[torch.Tensor, ...]
"""Cosine and sine of the rotary angles, each (B or 1, 1, T, D or less), then those of layers with their own base."""


class LayerCache:
    """Key-value cache of one layer, (B, G, capacity, D) each, filled up to `length`.

    No dataclass: FSDP2 passes copies of those to blocks, and data written to a copy is lost.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    def extend(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends keys and values (B, G, T, D) and returns all so far. The capacity must suffice."""
        if self.keys is None or self.values is None:
            # Allocated at full capacity, so that a decoding step copies only its own keys.
            batch, groups, _, size = k.shape
            self.keys, self.values = (x.new_empty(batch, groups, self.capacity, size) for x in (k, v))
        end = self.length + k.shape[2]
        self.keys[:, :, self.length : end] = k
        self.values[:, :, self.length : end] = v
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def select(self, rows: torch.Tensor) -> None:
        """Keeps the rows at these indices (n,), in this order; an index may repeat, but n may not exceed the rows before."""
        if self.keys is None or self.values is None:
            return
        for name, old in (("keys", self.keys), ("values", self.values)):
            # In place: indexing by rows copies them before they are overwritten.
            kept = old[: len(rows)]
            kept[:, :, : self.length] = old[rows, :, : self.length]
            setattr(self, name, kept)


class Attention(nn.Module):
    """Self-attention, grouped if there are fewer key and value heads than query heads (Ainslie et al., 2023)."""

    number: int | None = None
    row_keys: torch.Tensor | None = None
    """As in `Dropout`, for dropout of the attention weights."""
    first_head: int = 0
    """Index of the first local head among all heads."""

    def __init__(
        self,
        *,
        width: int,
        heads: int,
        kv_heads: int,
        head_size: int = 0,
        bias: bool = False,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm: float | None = None,
        qk_norm_joint: bool = False,
        softcap: float = 0.0,
        scale: float | None = None,
        window: int = 0,
        rotation_index: int | None = 0,
        dropout: float = 0.0,
        products: Products,
        causal: bool = True,
    ) -> None:
        """`qk_norm`: the eps of RMSNorms over each head's query and key (Dehghani et al., 2023); None: no norms.
        `qk_norm_joint`: over all heads' queries together, and all keys (OLMo 2; Walsh et al., 2024).

        `scale` multiplies scores, `window` keys are visible; see `triton_kernels.attention`; if not `causal`, half a window
        on either side. `rotation_index`: the pair of cosine and sine in the rotation, 0 or 1; None: no rotation.
        """
        super().__init__()
        self.causal = causal
        self.heads, self.kv_heads, self.head_size = heads, kv_heads, head_size or width // heads
        self.qkv = Linear(width, (heads + 2 * kv_heads) * self.head_size, bias=bias or qkv_bias, products=products)
        self.joint_norm = qk_norm is not None and qk_norm_joint
        self.q_norm, self.k_norm = (
            None if qk_norm is None else RMSNorm(self.head_size * (count if qk_norm_joint else 1), eps=qk_norm)
            for count in (heads, kv_heads)
        )
        self.out = Linear(heads * self.head_size, width, bias=bias or out_bias, products=products)
        self.norm_eps, self.dropout, self.softcap = qk_norm or 0.0, dropout, softcap
        self.scale, self.window, self.rotation_index = scale, window, rotation_index
        self.packed: Packed = attention_packed
        """Attention over packed documents; replaced if a worker has a part of their tokens."""

    def forward(
        self,
        x: torch.Tensor,
        rotation: Rotation | None = None,
        cache: LayerCache | None = None,
        mask: torch.Tensor | None = None,
        key_lengths: torch.Tensor | None = None,
        documents: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Maps x (B, T, C) to (B, T, C). `mask` (B, 1, T, S) and `key_lengths` (B,) hide padding besides the causal mask.

        With `documents` (n + 1,) tokens see only their own document: these are offsets into the tokens of all rows, one row
        after another, and end with B T. For training only: without cache, mask and lengths.
        """
        batch, tokens, _ = x.shape
        # Split before transposed: the backward concatenates the three gradients as the layer's product reads them.
        parts = self.qkv(x).view(batch, tokens, -1, self.head_size).split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        if self.joint_norm and self.q_norm is not None and self.k_norm is not None:
            q, k, v = parts
            parts = self.q_norm(q.flatten(2)).view_as(q), self.k_norm(k.flatten(2)).view_as(k), v
        q, k, v = (part.transpose(1, 2) for part in parts)  # (B, H or G, T, D)
        q, k = self._apply_positions(q, k, rotation)
        if cache is not None:
            k, v = cache.extend(k, v)
        rules: dict[str, Any] = {
            "causal": self.causal,
            "dropout": self.dropout if self.training else 0.0,
            "softcap": self.softcap,
            "window": self.window,
            "scale": self.scale,
        }
        if self.window and not self.causal:
            # No kernel has a bidirectional window, so these layers use PyTorch with a mask.
            rules["window"], mask, key_lengths = (
                0,
                bidirectional_window_mask(tokens, self.window, key_lengths, x.device),
                None,
            )
        if rules["dropout"]:
            rules |= dropout_arguments(self, x.device, batch, documents, tokens)
        if documents is not None:
            q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # (B T, H or G, D)
            y = self.packed(q, k, v, documents, documents, longest=tokens, **rules)
            return self.out(y.view(batch, tokens, -1))  # type: ignore[no-any-return]
        y = attention(q, k, v, mask=mask, key_lengths=key_lengths, **rules)
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _apply_positions(
        self, q: torch.Tensor, k: torch.Tensor, rotation: Rotation | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalises and rotates q and k as this layer is configured."""
        weights = [norm.weight for norm in (self.q_norm, self.k_norm) if norm is not None and not self.joint_norm]
        turn = () if rotation is None or self.rotation_index is None else rotation[2 * self.rotation_index :][:2]
        if turn and turn[0].shape[-1] == self.head_size:
            return rope(q, k, *turn, *weights, eps=self.norm_eps)
        if self.q_norm is not None and self.k_norm is not None and not self.joint_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if turn:
            size = turn[0].shape[-1]
            turned = rope(q[..., :size], k[..., :size], *turn)
            q, k = (torch.cat((y, x[..., size:]), -1) for x, y in zip((q, k), turned, strict=True))
        return q, k


def bidirectional_window_mask(
    tokens: int, window: int, lengths: torch.Tensor | None, device: torch.device | None = None
) -> torch.Tensor:
    """Returns a mask, True where a token sees another at most window / 2 away: (T, T), or (B, 1, T, T) with lengths (B,).

    Padding sees itself, so that no row is without a key.
    """
    places = torch.arange(tokens, device=device)
    seen = (places[:, None] - places).abs() <= window // 2
    if lengths is None:
        return seen
    return (seen & (places < lengths[:, None, None, None])) | (places[:, None] == places)


def rotation_table(
    positions: torch.Tensor,
    head_size: int,
    theta: float,
    scaling: tuple[float, float, float, float] | None = None,
    factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns cosine and sine for positions (B or 1, T): angles position / factor * theta^(-2 i / D), in fp32.

    With `scaling` (factor, low, high, context) a frequency that turns fewer than `low` times in `context` is divided by the
    factor, one that turns more than `high` times is kept, with linear interpolation between them (Llama 3.1).
    """
    exponent = torch.arange(0, head_size, 2, dtype=torch.float32, device=positions.device) / head_size
    radius = theta**exponent
    if scaling is not None:
        slower, low, high, context = scaling
        kept = ((context / (2 * math.pi * radius) - low) / (high - low)).clamp(0, 1)
        radius = radius / (kept + (1 - kept) / slower)
    angles = positions[:, None, :, None].float() / (radius if factor == 1 else radius * factor)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()
