"""Scaled dot-product attention, O = dropout(softmax(scale Q K^T + M)) V (Vaswani et al., 2017, eq. 1), optionally with
scores capped before the mask, s -> c tanh(s / c) (Gemma Team, 2024, section 2).

Shapes: B batch, H query heads, G key and value heads (H a multiple of G), T queries, S keys, D head size.
q (B, H, T, D); k and v (B, G, S, D); the result (B, H, T, D), in memory (B, T, H, D). Any strides are supported if the last
dimension is contiguous. Rows that see no key are zeros, and so are their gradients.

    o = attention(q, k, v, causal=True)
    o = attention(q, k, v, causal=True, window=4096)
    o = attention(q, k, v, mask=mask)             # mask (B, 1, T, S), True for visible keys
"""

import math
from typing import Any

import torch
import torch.nn.functional as F

from raystride.triton_kernels.arguments import INTEGERS, expect, expect_dropout, expect_heads, expect_rules
from raystride.triton_kernels.attention_backward import launch_backward
from raystride.triton_kernels.attention_decoding import MAX_QUERIES, decode
from raystride.triton_kernels.attention_forward import launch_forward
from raystride.triton_kernels.attention_masks import derive_seed, kept_weights, visible
from raystride.triton_kernels.attention_problem import (
    Rules,
    Sequences,
    contiguous_lengths,
    empty_like_rows,
    ensure_readable_rows,
    num_entries,
)
from raystride.triton_kernels.configurations import architecture_family, uncovered_reason
from raystride.triton_kernels.dispatch import active_transform, takes_library, takes_triton
from raystride.triton_kernels.launch import architecture
from raystride.triton_kernels.operation import operation

MAX_HEAD_SIZE = 256
"""The accumulators of a larger head fit no registers."""


def attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: int = 0,
    key_lengths: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    softcap: float = 0.0,
    seed: torch.Tensor | None = None,
    numbers: torch.Tensor | None = None,
    first_head: int = 0,
) -> torch.Tensor:
    """Computes attention by PyTorch's own operation, also on CPUs; with a seed by the formula, with the kernels' dropout.

    `numbers` (B,) are the indices of the sequences in dropout's counter, by default 0, 1, 2, ...; `first_head` is the index
    of the first head there.
    """
    queries, keys = q.shape[-2], k.shape[-2]
    blind = None
    if window or key_lengths is not None or (causal and (queries != keys or mask is not None)):
        seen = visible(queries, keys, causal=causal, window=window, key_lengths=key_lengths, device=q.device)
        mask = seen if mask is None else mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -math.inf)
        # PyTorch's kernels disagree on rows without a key, which arise only from lengths or from more queries than keys.
        blind = ~seen.any(-1, keepdim=True) if key_lengths is not None or queries > keys else None
        causal = False
    if softcap or (dropout and seed is not None) or active_transform():  # the library's kernels have no tangents
        if causal:
            mask = visible(queries, keys, causal=True, device=q.device)
        kept = None
        if dropout and seed is not None:
            kept = kept_weights(
                seed, q.shape[0], q.shape[1], queries, keys, dropout=dropout, numbers=numbers, first_head=first_head
            )
            kept = kept / (1.0 - dropout)
        elif dropout:
            kept = F.dropout(q.new_ones(*q.shape[:-1], keys), dropout)
        return _attention_by_formula(q, k, v, mask, blind, kept, scale, softcap)
    if blind is not None and mask is not None and mask.dtype == torch.bool:
        mask = mask | blind
    grouped = q.shape[1] != k.shape[1]
    o = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=causal, scale=scale, enable_gqa=grouped)
    return o if blind is None else o.masked_fill(blind, 0.0)


def _attention_by_formula(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    blind: torch.Tensor | None,
    kept: torch.Tensor | None,
    scale: float | None,
    softcap: float,
) -> torch.Tensor:
    """Computes attention by its formula; `kept` multiplies the weights; `blind` rows see no key."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if blind is not None:
        scores = scores.masked_fill(blind, 0.0)
    weights = scores.softmax(-1)
    o = (weights if kept is None else weights * kept.to(q.dtype)) @ v
    return o if blind is None else o.masked_fill(blind, 0.0)


@operation("raystride::attention")
def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_lengths: torch.Tensor | None,
    seed: torch.Tensor | None,
    causal: bool,
    window: int,
    scale: float,
    dropout: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = ensure_readable_rows(q), ensure_readable_rows(k), ensure_readable_rows(v)
    o, lse = empty_like_rows(q), q.new_empty((*q.shape[:2], num_entries(q.shape[2])), dtype=torch.float32)
    sequences = Sequences(q.shape[0], q.shape[2], k.shape[2], contiguous_lengths(key_lengths))
    launch_forward(q, k, v, o, lse, sequences, Rules(scale, causal, window, dropout, softcap, seed))
    return o, lse


@_attention.register_fake
def _(q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return empty_like_rows(q), q.new_empty((*q.shape[:2], num_entries(q.shape[2])), dtype=torch.float32)


@operation("raystride::attention_backward")
def _attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    key_lengths: torch.Tensor | None,
    seed: torch.Tensor | None,
    causal: bool,
    window: int,
    scale: float,
    dropout: float,
    softcap: float,
    for_queries: bool,
    for_keys: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grad, q, k, v = ensure_readable_rows(grad), ensure_readable_rows(q), ensure_readable_rows(k), ensure_readable_rows(v)
    dq, dk, dv = _allocate_gradients(q, k, v, for_queries, for_keys)
    sequences = Sequences(q.shape[0], q.shape[2], k.shape[2], contiguous_lengths(key_lengths))
    wanted = (dq if for_queries else None, dk if for_keys else None, dv if for_keys else None)
    launch_backward(grad, q, k, v, o, lse, *wanted, sequences, Rules(scale, causal, window, dropout, softcap, seed))
    return dq, dk, dv


@_attention_backward.register_fake
def _(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _allocate_gradients(q, k, v, *rest[-2:])


def _allocate_gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, for_queries: bool, for_keys: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocates the requested gradients; empty tensors for the others."""
    none = (0, 0, 0, 0)
    dq = empty_like_rows(q) if for_queries else q.new_empty(none)
    return (dq, empty_like_rows(k), empty_like_rows(v)) if for_keys else (dq, k.new_empty(none), v.new_empty(none))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, key_lengths, seed, *ctx.rules = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, key_lengths, seed)


def _backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    queries, keys, values = ctx.needs_input_grad[:3]
    dq, dk, dv = _attention_backward(grad, *ctx.saved_tensors, *ctx.rules, queries, keys or values)
    return dq if queries else None, dk if keys else None, dv if values else None, *[None] * 7


_attention.register_autograd(_backward, setup_context=_setup_context)


def unsupported_reason(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    window: int = 0,
    dropout: float = 0.0,
    softcap: float = 0.0,
    lengths: bool = False,
) -> str:
    """Returns the reason why the kernels do not support this call; empty if they do."""
    if mask is not None:
        return "a mask of its own"
    if q.shape[-1] != v.shape[-1]:
        return "values of another size than keys"
    if not 1 <= q.shape[-1] <= MAX_HEAD_SIZE:
        return f"head size {q.shape[-1]}"
    if not q.dtype == k.dtype == v.dtype:
        return "queries, keys and values of several dtypes"
    if softcap and (dropout or lengths):
        return f"capped scores with {'dropout' if dropout else 'key lengths'}, which would spill registers"
    if reason := uncovered_reason(architecture(q.device)):
        return reason
    single, near = q.dtype == torch.float32, architecture_family(architecture(q.device))
    older = near in ("sm_80", "sm_86")
    if (dropout or window or softcap) and single and q.shape[-1] > 128 and older:
        return f"dropout, a window or a cap in fp32 with head size {q.shape[-1]}, which would spill registers"
    if dropout and window and single and q.shape[-1] > (64 if older else 128) and near != "gfx942":
        return f"dropout under a window in fp32 with head size {q.shape[-1]}, which would spill registers"
    return "a scale that is not positive" if scale is not None and scale <= 0 else ""


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: int = 0,
    key_lengths: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    softcap: float = 0.0,
    seed: torch.Tensor | None = None,
    first_head: int = 0,
) -> torch.Tensor:
    """Computes attention of every query over its visible keys.

    With `causal`, query i of T sees keys 0 to S - T + i, so that a query against a cache of S keys sees all of them; with
    `window`, only the last `window` of these. Keys from key_lengths (B,) on are hidden; queries keep their positions at the
    end of the S keys. `scale` is 1 / sqrt(D) by default. `softcap` caps scaled scores; 0: none.
    `dropout` is the fraction of weights dropped, chosen by `seed` (1,) in int64, or by a key for each row (B,) in int32, see
    `row_masks`; without a seed, one is drawn from the device's generator. If these heads are a subset, `first_head` is the
    index of the first one: the reference, and kernels by keys, then drop the same weights as with all heads; by a seed
    kernels drop others than for the other heads.

    Raises ValueError for inconsistent shapes, heads that are no multiple of groups, key_lengths of another batch, tensors on
    several devices, dropout outside 0 to 1, a window without causal, and a negative window or cap.
    """
    expect_rules("attention", causal=causal, window=window, softcap=softcap)
    expect_heads("attention", "BHTD", q, k, v)
    expect_dropout("attention", dropout, seed, q, rows=len(q))
    if key_lengths is not None:
        expect("attention", "key_lengths", key_lengths, shape=(len(q),), dtypes=INTEGERS, beside=q)
    plain = (
        mask is None
        and key_lengths is None
        and not (window or dropout or softcap)
        and not (causal and q.shape[2] != k.shape[2])
    )
    if plain and takes_library("attention", q):
        return attention_reference(q, k, v, causal=causal, scale=scale)
    rest: dict[str, Any] = {"causal": causal, "window": window, "scale": scale, "dropout": dropout, "softcap": softcap}
    lengths = key_lengths is not None
    why = unsupported_reason(
        q, k, v, mask=mask, scale=scale, window=window, dropout=dropout, softcap=softcap, lengths=lengths
    )
    if not takes_triton("attention", q, refusal=why):
        return attention_reference(q, k, v, mask=mask, key_lengths=key_lengths, seed=seed, first_head=first_head, **rest)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    # Heads over 128 in fp32 would spill there: their scores are summed by columns in the other kernel.
    few = q.shape[2] <= MAX_QUERIES and not dropout and not (q.dtype == torch.float32 and q.shape[-1] > 128)
    if few and not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)):
        return decode(q, k, v, key_lengths, causal, window, scale, softcap)  # type: ignore[no-any-return]
    if dropout and seed is None:
        # On the device, so that the host does not wait for it.
        seed = torch.randint(0, 1 << 62, (1,), dtype=torch.int64, device=q.device)
    seed = None if seed is None else derive_seed(seed, 0, first_head)
    return _attention(q, k, v, key_lengths, seed if dropout else None, causal, window, scale, dropout, softcap)[0]  # type: ignore[no-any-return]
