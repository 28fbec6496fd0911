"""Variable-length attention over sequences packed one after another without padding.

Shapes: B sequences, N queries and M keys of all of them; q (N, H, D); k and v (M, G, D); offsets (B + 1,) in int32, the
start of each sequence and the end of the last; the result (N, H, D). Within a sequence it is `attention`.

    o = attention_packed(q, k, v, offsets, offsets, causal=True)

If a library was chosen (`use_library`), plain calls in 16 bits go to PyTorch's `varlen_attn`, which has FlashAttention.
"""

import inspect
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from raystride.triton_kernels.arguments import INTEGERS, expect, expect_dropout, expect_heads, expect_rules
from raystride.triton_kernels.attention import attention_reference, unsupported_reason
from raystride.triton_kernels.attention_backward import launch_backward
from raystride.triton_kernels.attention_forward import launch_forward
from raystride.triton_kernels.attention_masks import derive_seed
from raystride.triton_kernels.attention_problem import Rules, Sequences, ensure_readable_rows
from raystride.triton_kernels.dispatch import takes_library, takes_triton
from raystride.triton_kernels.operation import operation


class _Group(NamedTuple):
    """Sequences of similar length, computed as a batch, padded to the longest of them."""

    numbers: np.ndarray
    """Their indices, (n) int64."""
    queries: np.ndarray
    """Their rows of q, (n T) int64; any row for padding."""
    keys: np.ndarray
    """Their rows of k and v, (n S) int64."""
    key_lengths: np.ndarray | None
    """Number of keys of each, (n) int64; None without padding."""


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
    softcap: float = 0.0,
    seed: torch.Tensor | None = None,
    first_head: int = 0,
) -> torch.Tensor:
    """Computes `attention_reference` of each sequence, batched by similar length; also used on CPUs.

    Nothing is computed across sequences. Dropout of sequence b equals that of row b in a batch.
    """
    groups, back = _plan_groups(tuple(query_offsets.tolist()), tuple(key_offsets.tolist()))
    if not groups:  # no query at all
        return attention_reference(*(x.transpose(0, 1)[None] for x in (q, k, v)))[0].transpose(0, 1)
    results = []
    for group in groups:
        numbers, queries, keys = (torch.from_numpy(rows).to(q.device) for rows in group[:3])
        one = [
            x.index_select(0, rows).unflatten(0, (len(numbers), -1)).transpose(1, 2)
            for x, rows in ((q, queries), (k, keys), (v, keys))
        ]
        # With a causal mask the padding at the end is visible only to padding.
        lengths = None if causal or group.key_lengths is None else torch.from_numpy(group.key_lengths).to(q.device)
        o = attention_reference(
            *one,
            causal=causal,
            window=window,
            key_lengths=lengths,
            scale=scale,
            dropout=dropout,
            softcap=softcap,
            seed=seed,
            numbers=numbers,
            first_head=first_head,
        )
        results.append(o.transpose(1, 2).flatten(0, 1))
    return torch.cat(results).index_select(0, torch.from_numpy(back).to(q.device))


_reference = attention_packed_reference


def exclude_packed_from_compile() -> None:
    """Excludes the reference from torch.compile: its groups depend on lengths, so each batch would be recompiled.

    Not a decorator: its import would add a second to every start.
    """
    global _reference
    _reference = torch.compiler.disable(attention_packed_reference)


@lru_cache(maxsize=2)
def _plan_groups(query_offsets: tuple[int, ...], key_offsets: tuple[int, ...]) -> tuple[list[_Group], np.ndarray]:
    """Returns the groups, and the position of each row of q among theirs, (N) int64. Cached for all layers of a network.

    In NumPy: a recomputed forward must run the same tensor operations, whether or not the plan is still cached.
    """
    starts, key_starts = np.array(query_offsets[:-1], np.int64), np.array(key_offsets[:-1], np.int64)
    lengths, key_lengths = np.diff(query_offsets), np.diff(key_offsets)
    # Padding keeps positions only in self-attention; other sequences are grouped by equal lengths.
    alike = query_offsets == key_offsets
    kinds = np.stack((_round_up_lengths(lengths), _round_up_lengths(lengths)) if alike else (lengths, key_lengths), 1)
    back, groups, first = np.zeros(query_offsets[-1], np.int64), [], 0
    for kind in np.unique(kinds[lengths > 0], axis=0):
        numbers = np.flatnonzero((kinds == kind).all(1) & (lengths > 0))
        rows, real = _padded_rows(starts[numbers], lengths[numbers])
        back[rows[real]] = first + np.flatnonzero(real)
        first += len(rows)
        keys, real_keys = _padded_rows(key_starts[numbers], key_lengths[numbers])
        groups.append(_Group(numbers, rows, keys, None if real_keys.all() else key_lengths[numbers]))
    return groups, back


def _padded_rows(starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows of sequences, each padded to the longest, and a mask of real rows, (n T) both."""
    places = np.arange(lengths.max())
    real = places < lengths[:, None]
    return np.where(real, starts[:, None] + places, starts[:, None]).reshape(-1), real.reshape(-1)


def _round_up_lengths(lengths: np.ndarray) -> np.ndarray:
    """Rounds lengths up to 1, 2, 3, 4, 6, 8, 12, 16, ...: padding adds at most half."""
    power = 2 ** np.floor(np.log2(np.maximum(lengths, 1))).astype(np.int64)
    halfway = power + power // 2
    return np.select([lengths <= power, lengths <= halfway], [power, halfway], 2 * power)


@operation("raystride::attention_packed")
def _attention_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_offsets: torch.Tensor,
    key_offsets: torch.Tensor,
    seed: torch.Tensor | None,
    causal: bool,
    window: int,
    scale: float,
    dropout: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = ensure_readable_rows(q), ensure_readable_rows(k), ensure_readable_rows(v)
    o, lse = q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    _assert_offsets("query_offsets", query_offsets, len(q))
    _assert_offsets("key_offsets", key_offsets, len(k))
    sequences = _build_sequences(q, k, query_offsets, key_offsets)
    launch_forward(q, k, v, o, lse, sequences, Rules(scale, causal, window, dropout, softcap, seed))
    return o, lse


@_attention_packed.register_fake
def _(q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@operation("raystride::attention_packed_backward")
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
    causal: bool,
    window: int,
    scale: float,
    dropout: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grad, q, k, v = ensure_readable_rows(grad), ensure_readable_rows(q), ensure_readable_rows(k), ensure_readable_rows(v)
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    sequences = _build_sequences(q, k, query_offsets, key_offsets)
    launch_backward(grad, q, k, v, o, lse, dq, dk, dv, sequences, Rules(scale, causal, window, dropout, softcap, seed))
    return dq, dk, dv


@_attention_packed_backward.register_fake
def _(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _assert_offsets(name: str, offsets: torch.Tensor, rows: int) -> None:
    """Raises an error on the device, without the host waiting, if offsets lead outside the rows."""
    is_valid = (offsets[0] == 0) & (offsets[-1] == rows) & (offsets.diff() >= 0).all()
    torch._assert_async(is_valid, f"attention_packed: {name} must rise from 0 to {rows}")


def _build_sequences(q: torch.Tensor, k: torch.Tensor, query_offsets: torch.Tensor, key_offsets: torch.Tensor) -> Sequences:
    # Kernels read them contiguously, in 32 bits.
    query_offsets, key_offsets = query_offsets.int().contiguous(), key_offsets.int().contiguous()
    return Sequences(query_offsets.shape[0] - 1, len(q), len(k), None, query_offsets, key_offsets)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, query_offsets, key_offsets, seed, *ctx.rules = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, query_offsets, key_offsets, seed)


def _backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    return *_attention_packed_backward(grad, *ctx.saved_tensors, *ctx.rules), *[None] * 8


_attention_packed.register_autograd(_backward, setup_context=_setup_context)


MAX_LIBRARY_HEAD = 256
"""Largest head of FlashAttention-2, which also takes multiples of 8 alone."""


@cache
def packed_library_reason(device: torch.device) -> str:
    """Returns the reason why PyTorch has no library for packed sequences on a device; empty if it has one.

    On CPUs it is the reference, which tests take.
    """
    if device.type == "cpu":
        return ""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return f"PyTorch {torch.__version__} has no torch.nn.attention.varlen"
    missing = {"window_size", "enable_gqa", "scale"} - set(inspect.signature(varlen_attn).parameters)
    return f"varlen_attn of PyTorch {torch.__version__} lacks {', '.join(sorted(missing))}" if missing else ""


# torch.compile takes the result as a constant.
packed_library_reason._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _attention_by_library(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_offsets: torch.Tensor,
    key_offsets: torch.Tensor,
    causal: bool,
    scale: float | None,
    longest: int,
) -> torch.Tensor:
    if q.device.type == "cpu":
        return _reference(q, k, v, query_offsets, key_offsets, causal=causal, scale=scale)
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(  # type: ignore[return-value]  # without return_aux it is a tensor
        q, k, v, query_offsets.int(), key_offsets.int(), longest or len(q), longest or len(k),
        scale=scale, window_size=(-1, 0) if causal else (-1, -1), enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip


def attention_packed(
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
    softcap: float = 0.0,
    seed: torch.Tensor | None = None,
    first_head: int = 0,
    longest: int = 0,
) -> torch.Tensor:
    """Computes `attention` of each sequence over its own keys. Offsets start with 0 and end with N and M; empty is allowed.

    `seed` is one, or a key for each sequence (n,) in int32.
    Lengths stay on the device: the host does not wait for them. Wrong offsets are an error there. `longest` is an upper
    bound of the lengths, for a library's grid; 0: N and M.

    Raises ValueError for inconsistent shapes, offsets that are no vectors of one length, tensors on several devices, dropout
    outside 0 to 1, a window without causal, and a negative window or cap.
    """
    expect_rules("attention_packed", causal=causal, window=window, softcap=softcap)
    expect_heads("attention_packed", "NHD", q, k, v)
    count = max(1, query_offsets.numel())
    expect_dropout("attention_packed", dropout, seed, q, rows=count - 1)
    expect("attention_packed", "query_offsets", query_offsets, shape=(count,), dtypes=INTEGERS, beside=q)
    expect("attention_packed", "key_offsets", key_offsets, shape=(count,), dtypes=INTEGERS, beside=q)
    plain = not (window or dropout or softcap) and q.shape[-1] <= MAX_LIBRARY_HEAD and q.shape[-1] % 8 == 0
    if plain and not packed_library_reason(q.device) and takes_library("attention_packed", q):
        return _attention_by_library(q, k, v, query_offsets, key_offsets, causal, scale, longest)
    why = unsupported_reason(q, k, v, scale=scale, window=window, dropout=dropout, softcap=softcap)
    if not takes_triton("attention_packed", q, refusal=why):
        rules: dict[str, Any] = {"causal": causal, "window": window, "scale": scale, "dropout": dropout, "softcap": softcap}
        return _reference(q, k, v, query_offsets, key_offsets, seed=seed, first_head=first_head, **rules)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if dropout and seed is None:
        seed = torch.randint(0, 1 << 62, (1,), dtype=torch.int64, device=q.device)
    seed = None if seed is None else derive_seed(seed, 0, first_head)
    return _attention_packed(  # type: ignore[no-any-return]
        q,
        k,
        v,
        query_offsets,
        key_offsets,
        seed if dropout else None,
        causal,
        window,
        scale,
        dropout,
        softcap,
    )[0]
