"""Attention over sequences of several lengths, packed one after another without padding.

Shapes: B sequences, N queries and M keys of all of them; q (N, H, D); k and v (M, G, D); offsets (B + 1,) in int32, where
each sequence begins and, last, where all end; the result (N, H, D). Each sequence is attended to as in `attention`.

    o = attention_packed(q, k, v, offsets, offsets, 512, 512, causal=True)    # no sequence is longer than 512
"""

from typing import Any

import torch

from raystride.triton_kernels.arguments import INTEGERS, expect, expect_dropout, expect_heads
from raystride.triton_kernels.attention import attention_reference, why_refused
from raystride.triton_kernels.attention_backward import differentiate
from raystride.triton_kernels.attention_forward import attend
from raystride.triton_kernels.attention_problem import Rules, Sequences, rows_readable
from raystride.triton_kernels.dispatch import takes_triton


def attention_packed_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_offsets: torch.Tensor,
    key_offsets: torch.Tensor,
    *,
    causal: bool = False,
    window: int = 0,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: torch.Tensor | None = None,
) -> torch.Tensor:
    """`attention_reference` of one sequence after another; sequence b drops what row b of a batch drops."""
    results = [q.new_zeros(0, *q.shape[1:])]
    starts, key_starts = query_offsets.tolist(), key_offsets.tolist()
    for b in range(len(starts) - 1):
        rows, keys = slice(starts[b], starts[b + 1]), slice(key_starts[b], key_starts[b + 1])
        one = (q[rows], k[keys], v[keys])
        rules: dict[str, Any] = {"causal": causal, "window": window, "scale": scale, "dropout": dropout, "seed": seed}
        o = attention_reference(*(x.transpose(0, 1)[None] for x in one), **rules, first=b)
        results.append(o[0].transpose(0, 1))
    return torch.cat(results)


@torch.library.custom_op("raystride::attention_packed", mutates_args=())
def _attention_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_offsets: torch.Tensor,
    key_offsets: torch.Tensor,
    seed: torch.Tensor | None,
    longest_query: int,
    longest_key: int,
    causal: bool,
    window: int,
    scale: float,
    dropout: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = rows_readable(q), rows_readable(k), rows_readable(v)
    o, lse = q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    _assert_offsets("query_offsets", query_offsets, len(q), longest_query)
    _assert_offsets("key_offsets", key_offsets, len(k), longest_key)
    sequences = _sequences(query_offsets, key_offsets, longest_query, longest_key)
    attend(q, k, v, o, lse, sequences, Rules(scale, causal, window, dropout, seed))
    return o, lse


@_attention_packed.register_fake
def _(q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@torch.library.custom_op("raystride::attention_packed_backward", mutates_args=())
def _attention_packed_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    query_offsets: torch.Tensor,
    key_offsets: torch.Tensor,
    seed: torch.Tensor | None,
    longest_query: int,
    longest_key: int,
    causal: bool,
    window: int,
    scale: float,
    dropout: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grad, q, k, v = rows_readable(grad), rows_readable(q), rows_readable(k), rows_readable(v)
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    sequences = _sequences(query_offsets, key_offsets, longest_query, longest_key)
    differentiate(grad, q, k, v, o, lse, dq, dk, dv, sequences, Rules(scale, causal, window, dropout, seed))
    return dq, dk, dv


@_attention_packed_backward.register_fake
def _(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _assert_offsets(name: str, offsets: torch.Tensor, rows: int, longest: int) -> None:
    """An error on the device, which the host does not wait for, where offsets lead outside the rows."""
    lengths = offsets.diff()
    right = (offsets[0] == 0) & (offsets[-1] == rows) & ((lengths >= 0) & (lengths <= longest)).all()
    torch._assert_async(right, f"attention_packed: {name} must rise from 0 to {rows}, by {longest} at most")


def _sequences(query_offsets: torch.Tensor, key_offsets: torch.Tensor, longest_query: int, longest_key: int) -> Sequences:
    # Kernels read them one after another, and count in 32 bits.
    query_offsets, key_offsets = query_offsets.int().contiguous(), key_offsets.int().contiguous()
    return Sequences(query_offsets.shape[0] - 1, longest_query, longest_key, None, query_offsets, key_offsets)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, query_offsets, key_offsets, seed, *ctx.rules = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, query_offsets, key_offsets, seed)


def _differentiate(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    return *_attention_packed_backward(grad, *ctx.saved_tensors, *ctx.rules), *[None] * 9


_attention_packed.register_autograd(_differentiate, setup_context=_save)


def attention_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_offsets: torch.Tensor,
    key_offsets: torch.Tensor,
    longest_query: int,
    longest_key: int,
    *,
    causal: bool = False,
    window: int = 0,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: torch.Tensor | None = None,
) -> torch.Tensor:
    """`attention` of each sequence over its own keys. The offsets begin with 0 and end with N and M; sequences may be empty.

    No sequence may have more queries than `longest_query` or keys than `longest_key`; wrong offsets are an error on the
    device.

    Raises ValueError for shapes that do not go together, offsets that are no vectors of one length, tensors on several
    devices, a share of dropout outside 0 to 1, and for a window without causal, or one below zero.
    """
    if window < 0 or (window and not causal):
        raise ValueError(f"a window ({window}) is a number of keys up to a query's own position: it needs causal")
    expect_heads("attention_packed", "NHD", q, k, v)
    expect_dropout("attention_packed", dropout, seed, q)
    count = max(1, query_offsets.numel())
    expect("attention_packed", "query_offsets", query_offsets, shape=(count,), dtypes=INTEGERS, beside=q)
    expect("attention_packed", "key_offsets", key_offsets, shape=(count,), dtypes=INTEGERS, beside=q)
    if not takes_triton("attention_packed", q, refusal=why_refused(q, k, v, scale=scale, window=window, dropout=dropout)):
        rules: dict[str, Any] = {"causal": causal, "window": window, "scale": scale, "dropout": dropout, "seed": seed}
        return attention_packed_reference(q, k, v, query_offsets, key_offsets, **rules)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if dropout and seed is None:
        seed = torch.randint(0, 1 << 62, (1,), dtype=torch.int64, device=q.device)
    return _attention_packed(  # type: ignore[no-any-return]
        q,
        k,
        v,
        query_offsets,
        key_offsets,
        seed if dropout else None,
        longest_query,
        longest_key,
        causal,
        window,
        scale,
        dropout,
    )[0]
