"""Hypothesis strategies for kernels: dtypes, odd shapes, and inputs that are not contiguous."""

import torch
from hypothesis import strategies as st

DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
LENGTHS = st.one_of(st.sampled_from([0, 1, 2, 16, 31, 32, 33, 64, 127, 128, 129]), st.integers(0, 200))


def strided(x: torch.Tensor, kind: str) -> torch.Tensor:
    """The same values, `plain`, as a slice of a wider tensor (`slice`) or with its last two dimensions swapped in memory."""
    if kind == "slice":
        wide = torch.full((*x.shape[:-1], x.shape[-1] + 8), float("nan"), dtype=x.dtype)
        wide[..., 3 : 3 + x.shape[-1]] = x
        return wide[..., 3 : 3 + x.shape[-1]]
    if kind == "transposed" and x.dim() >= 2:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    return x


STRIDED = st.sampled_from(["plain", "slice", "transposed"])
