"""Row-wise relative error of a result against the allowed one, for device checks and tests.

The measure is FlashAttention's, for every row: the error against float64 may be twice that of PyTorch's implementation in
the same dtype, plus a rounding of the row. A measure of the full tensor would not work: the last of 4,096 causal rows is 250
times as small as the first, whose rounding would hide its error.

Gradients of attention are differences that cancel: dS = P (dP - D), where D comes from an output that was rounded to its
dtype. Their rows may be off by roundings of the tensor's largest row, as those of PyTorch's FlashAttention are by up to 1.04
beside its own math backend (240 outputs and gradients in 16 bits on a CPU, of which 57 were called wrong without this); the
whole tensor may not.

    row_errors(mine, theirs, exact)          # 0.6: right; 2.5: a row has 2.5 times the allowed error
    row_errors(dq, their_dq, exact_dq, cancels=CANCELLED_ROUNDINGS)
"""

import torch

_FLOOR = 64 * torch.finfo(torch.float32).eps
"""Allowed error relative to the largest row, from cancellation in fp32 sums, as in rows with an exact gradient of zero."""

CANCELLED_ROUNDINGS = 2.0
"""Allowed error of attention's gradients, in roundings of the tensor's largest row to its dtype."""


def row_errors(mine: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor, cancels: float = 0.0) -> float:
    """Returns the largest relative row error of mine (..., C), from PyTorch's result in the same dtype and in float64.

    Above 1 is wrong. `cancels`: roundings of the largest row that are allowed besides; the whole tensor, as one row, is then
    compared without them. Rows are compared by their norm and by their largest element. A NaN has an infinite error unless
    the exact result is one. Raises ValueError for results of different shapes.
    """
    if not mine.shape == theirs.shape == exact.shape:
        raise ValueError(f"results of shapes {tuple(mine.shape)}, {tuple(theirs.shape)} and {tuple(exact.shape)}")
    if not mine.numel():
        return 0.0
    eps = torch.finfo(mine.dtype).eps
    width = mine.shape[-1] if mine.dim() else 1
    rows = [x.double().reshape(-1, width) for x in (mine, theirs, exact)]
    worst = row_errors(mine.reshape(1, -1), theirs.reshape(1, -1), exact.reshape(1, -1)) if cancels else 0.0
    for order, roundings in ((2.0, 1.0), (float("inf"), 2.0)):
        size = torch.linalg.vector_norm(rows[2], order, dim=-1)
        error, their_error = (torch.linalg.vector_norm(x - rows[2], order, dim=-1) for x in rows[:2])
        allowed = (
            2 * their_error + roundings * eps * size + max(_FLOOR, cancels * eps) * size.max() + torch.finfo(mine.dtype).tiny
        )
        worst = max(worst, float((error / allowed).nan_to_num(nan=float("inf")).max()))
    return worst
