"""Cross-attention: queries from a decoder, keys and values from an encoder's memory.

Shapes: x (R, T, C), memory (B, S, C), of which the first lengths (B,) of each sentence count -> (R, T, C). R is a multiple
of B: neighbouring rows of x share a sentence, and its keys and values are read once.

    layer = CrossAttention(width=128, heads=4, kv_heads=2)
    y = layer(x, memory, lengths)                             # (6, T, 128), (2, S, 128) -> (6, T, 128)
"""

from typing import Any

import torch
from torch import nn

from raystride.model.dropout import dropout_arguments
from raystride.model.linear import Linear, Products
from raystride.triton_kernels.attention import attention


class MemoryCache:
    """Keys and values of the memory, (B, G, S, D) each, once a layer has computed them; no dataclass, like LayerCache."""

    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    def select(self, sentences: torch.Tensor) -> None:
        """Keeps the sentences at these indices (n,), in this order."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[sentences], self.values[sentences]


class CrossAttention(nn.Module):
    """Cross-attention; every query sees the full memory of its sentence (Vaswani et al., 2017, section 3.2.3)."""

    number: int | None = None
    row_keys: torch.Tensor | None = None
    first_head: int = 0
    """As in self-attention."""

    def __init__(
        self,
        *,
        width: int,
        heads: int,
        kv_heads: int,
        head_size: int = 0,
        bias: bool = False,
        dropout: float = 0.0,
        products: Products,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_size = heads, kv_heads, head_size or width // heads
        self.q = Linear(width, heads * self.head_size, bias=bias, products=products)
        self.kv = Linear(width, 2 * kv_heads * self.head_size, bias=bias, products=products)
        self.out = Linear(heads * self.head_size, width, bias=bias, products=products)
        self.dropout = dropout

    def forward(
        self, x: torch.Tensor, memory: torch.Tensor, lengths: torch.Tensor, cache: MemoryCache | None = None
    ) -> torch.Tensor:
        """Maps x (R, T, C) to (R, T, C). A cache is filled at its first use; then the memory is not read again."""
        sentences = memory.shape[0]
        q = self.q(x).view(sentences, -1, self.heads, self.head_size).transpose(1, 2)
        if cache is None or cache.keys is None or cache.values is None:
            kv = self.kv(memory).view(sentences, -1, 2 * self.kv_heads, self.head_size)
            k, v = (part.transpose(1, 2) for part in kv.chunk(2, dim=2))  # split first, as in self-attention
            if cache is not None:
                cache.keys, cache.values = k, v
        else:
            k, v = cache.keys, cache.values
        dropout = self.dropout if self.training else 0.0
        seed: dict[str, Any] = dropout_arguments(self, x.device, sentences) if dropout else {}
        y = attention(q, k, v, key_lengths=lengths, dropout=dropout, **seed)
        return self.out(y.transpose(1, 2).flatten(2).view(*x.shape[:2], -1))  # type: ignore[no-any-return]
