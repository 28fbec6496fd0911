"""Tensors of the same values in other memory layouts, as from slices, transpositions and expansions.

Gaps between elements contain NaN, or ones among integers, which a kernel reads if it assumes contiguous elements.

    t = laid(torch.tensor([4, 7, 9]), "stepped")          # strides (2,), the same three numbers
"""

from typing import Any

import torch
from hypothesis import strategies as st

KINDS = ("plain", "offset", "stepped", "sliced", "transposed")
LAYOUTS = st.sampled_from(KINDS)
"""Layouts that keep the values of a tensor."""
ANY_LAYOUT = st.one_of(LAYOUTS, st.integers(0, 3).map(lambda dimension: f"expanded {dimension}"))
"""These, and an expansion that repeats the first entry of a dimension, and so changes the values."""


def laid(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Returns x in the layout `kind`; `expanded 1` repeats index 0 of dimension 1, and returns x without that dimension."""
    poison = float("nan") if x.is_floating_point() else 1
    if not x.numel() or not x.dim():
        return x
    if kind == "offset":
        buffer = torch.full((x.numel() + 3,), poison, dtype=x.dtype)
        return buffer[1:-2].view(x.shape).copy_(x)
    if kind == "stepped":
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), poison, dtype=x.dtype)
        return wide[..., ::2].copy_(x)
    if kind == "sliced":
        wide = torch.full([size + 2 for size in x.shape], poison, dtype=x.dtype)
        return wide[tuple(slice(1, -1) for _ in x.shape)].copy_(x)
    if kind == "transposed":
        order = list(reversed(range(x.dim())))
        return x.permute(order).contiguous().permute(order)
    if kind.startswith("expanded") and (dimension := int(kind.split()[1])) < x.dim():
        return x.narrow(dimension, 0, 1).expand_as(x)
    return x


def packed_again(x: Any) -> Any:
    """Returns a contiguous copy of a tensor; other objects unchanged."""
    return x.detach().clone(memory_format=torch.contiguous_format) if isinstance(x, torch.Tensor) else x
