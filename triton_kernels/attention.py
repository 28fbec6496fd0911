"""Scaled dot-product attention, O = softmax(Q K^T / sqrt(D) + M) V (Vaswani et al., 2017, eq. 1).

Shapes: B batch, H query heads, G key and value heads (H a multiple of G), T queries, S keys, D head size.
q (B, H, T, D); k and v (B, G, S, D); the result (B, H, T, D).

    o = attention(q, k, v, causal=True)
    o = attention(q, k, v, mask=mask)             # mask (B, 1, T, S), True where a query may look
"""

import torch
import torch.nn.functional as F


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Attention of every query over the keys that it may see; `dropout` is the share of weights dropped.

    With `causal`, query i of T sees keys 0 to S - T + i, so that a query against a cache of S keys sees all of them.
    """
    return attention_reference(q, k, v, causal=causal, mask=mask, dropout=dropout)


def attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """PyTorch's own attention, which is also what CPUs run."""
    queries, keys = q.shape[-2], k.shape[-2]
    if causal and (queries != keys or mask is not None):
        visible = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
        mask = visible if mask is None else mask & visible
        causal = False
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=causal, enable_gqa=grouped)
