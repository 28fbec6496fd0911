"""How wrong a result is, row by row, in units of what is allowed; what the device's checks and the tests compare by.

The measure is FlashAttention's own, taken of every row: the error against float64 may be twice that of PyTorch's own
implementation in the same dtype, and a rounding of the row. Of a whole tensor it would not do: the last of 4,096 causal rows
is 250 times as small as the first, whose rounding would hide that it is wrong.

    row_errors(mine, theirs, exact)          # 0.6: right; 2.5: some row is two and a half times as wrong as it may be
"""

import torch

_FLOOR = 64 * torch.finfo(torch.float32).eps
"""Of the largest row: what sums in fp32 leave where terms cancel, as in rows whose exact gradient is zero."""


def row_errors(mine: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest error of a row of mine (..., C), beside PyTorch's own in the same dtype and float64; above 1 is wrong.

    Rows are compared by their length and by their largest element. What is no number where the exact result is one is
    infinitely wrong. Raises ValueError for results of several shapes.
    """
    if not mine.shape == theirs.shape == exact.shape:
        raise ValueError(f"results of shapes {tuple(mine.shape)}, {tuple(theirs.shape)} and {tuple(exact.shape)}")
    if not mine.numel():
        return 0.0
    eps = torch.finfo(mine.dtype).eps
    width = mine.shape[-1] if mine.dim() else 1
    rows = [x.double().reshape(-1, width) for x in (mine, theirs, exact)]
    worst = 0.0
    for order, roundings in ((2.0, 1.0), (float("inf"), 2.0)):
        size = torch.linalg.vector_norm(rows[2], order, dim=-1)
        error, their_error = (torch.linalg.vector_norm(x - rows[2], order, dim=-1) for x in rows[:2])
        allowed = 2 * their_error + roundings * eps * size + _FLOOR * size.max() + torch.finfo(mine.dtype).tiny
        worst = max(worst, float((error / allowed).nan_to_num(nan=float("inf")).max()))
    return worst
