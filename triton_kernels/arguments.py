"""Checks of a public function's arguments before a pointer to one of them is used.

A kernel trusts its arguments: with lengths of another batch, or targets on another device, it would read foreign memory.
Calls are checked by host-side facts (shapes, dtypes, devices), without waiting for a device; an invalid value on the device,
such as a target that is no word, gives NaN in the result.

    expect("attention", "key_lengths", key_lengths, shape=(4,), dtypes=INTEGERS, beside=q)
    # ValueError: attention: key_lengths must be of shape (4,), but is of shape (1,)
"""

from collections.abc import Container, Sequence

import torch

INTEGERS = (torch.int32, torch.int64)
"""Dtypes of lengths and offsets."""


def expect(
    operation: str,
    name: str,
    x: torch.Tensor,
    *,
    shape: Sequence[int] | None = None,
    dtypes: Container[torch.dtype] | None = None,
    beside: torch.Tensor | None = None,
) -> None:
    """Checks the argument `name` of an operation; None accepts anything.

    Raises:
        ValueError: x has another shape, a dtype that is none of these, or another device than `beside`.
    """
    if beside is not None and x.device != beside.device:
        raise ValueError(f"{operation}: {name} must be on {beside.device}, as what comes before it, but is on {x.device}")
    if shape is not None and x.shape != tuple(shape):
        raise ValueError(f"{operation}: {name} must be of shape {tuple(shape)}, but is of shape {tuple(x.shape)}")
    if dtypes is not None and x.dtype not in dtypes:
        raise ValueError(f"{operation}: {name} must be of {_format_dtypes(dtypes)}, but is of {x.dtype}")


def expect_heads(operation: str, layout: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Checks queries, keys and values in a layout, such as "BHTD".

    Raises:
        ValueError: inconsistent shapes, query heads that are no multiple of key heads, several devices.
    """
    of_q, of_k, of_v = q.shape, k.shape, v.shape
    if not len(of_q) == len(of_k) == len(of_v) == len(layout):
        raise ValueError(f"{operation}: q, k and v must have {len(layout)} dimensions, but are {_format_shapes(q, k, v)}")
    heads, size = layout.index("H"), len(layout) - 1
    if of_k[:size] != of_v[:size] or of_q[size] != of_k[size] or (layout[0] == "B" and of_q[0] != of_k[0]):
        raise ValueError(
            f"{operation}: k and v must have the batch and the head size of q, and one length, but are "
            f"{_format_shapes(q, k, v)}"
        )
    if of_k[heads] < 1 or of_q[heads] % of_k[heads]:
        raise ValueError(
            f"{operation}: the heads of q must be a multiple of those of k and v, but are {_format_shapes(q, k, v)}"
        )
    expect(operation, "k", k, beside=q)
    expect(operation, "v", v, beside=q)


def expect_rules(operation: str, *, causal: bool, window: int, softcap: float) -> None:
    """Checks the mask rules and the score cap.

    Raises:
        ValueError: a window without causal, or one below zero; a cap below zero.
    """
    if window < 0 or (window and not causal):
        raise ValueError(
            f"{operation}: a window ({window}) is a number of keys up to a query's own position: it needs causal"
        )
    if softcap < 0:
        raise ValueError(f"{operation}: softcap must be at least 0, which is none, but is {softcap}")


def expect_dropout(operation: str, dropout: float, seed: torch.Tensor | None, beside: torch.Tensor, rows: int = 0) -> None:
    """Checks a dropout probability and its seed; `rows`: the number of int32 keys that may be given instead, 0: none.

    Raises:
        ValueError: a probability that is not between 0 and 1, a seed that is neither one int64 nor an int32 for each row, or
            one on another device.
    """
    if not 0 <= dropout <= 1:
        raise ValueError(f"{operation}: dropout must be between 0 and 1, but is {dropout}")
    if seed is not None:
        expect(operation, "seed", seed, dtypes=(torch.int64, torch.int32) if rows else (torch.int64,), beside=beside)
        if seed.dtype == torch.int32:
            expect(operation, "seed", seed, shape=(rows,), dtypes=(torch.int32,), beside=beside)
        elif seed.numel() != 1:
            raise ValueError(f"{operation}: seed must be a single number, but is of shape {tuple(seed.shape)}")


def _format_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
    return f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}"


def _format_dtypes(dtypes: Container[torch.dtype]) -> str:
    return " or ".join(map(str, dtypes)) if isinstance(dtypes, tuple) else str(dtypes)
