"""Dropout masks by row: each row of a batch has a key, and an element is kept by a hash of its row's key and its position.

A row's mask depends on its key alone: not on the rows beside it, on padding behind it, or on how many rows there are. So a
joined batch has the masks of its parts. The hash is two multiplications modulo 2^32 with a shift between them, a finalizer
as in MurmurHash3 with the constants of Wellons' `lowbias32`; on CPUs it is several times faster than a generator.

    kept = kept_by_row(keys, 64, 128, dropout=0.1)            # keys (B,) int32 -> (B, 64, 128) bool
"""

import torch

from raystride.triton_kernels.language import jit, tl

_FIRST, _SECOND, _KEY = -1640531535, -2048144777, -1028477379
"""Odd factors of the first and second index and of what is folded into a key: xxHash's primes, as int32."""
_MIX = 2146121005, -2073254261
"""Factors of the finalizer, as int32."""


def fold(keys: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Returns other keys for these numbers (integers, broadcast with the keys), in int32; for 0 the keys themselves."""
    return keys + numbers.int() * _KEY


def kept_by_row(keys: torch.Tensor, first: int, second: int, *, dropout: float) -> torch.Tensor:
    """Returns a mask, True where an element is kept: keys (...) int32 -> (..., first, second) bool."""
    i, j = (torch.arange(n, dtype=torch.int32, device=keys.device) for n in (first, second))
    words, keys = _mix(i[:, None] * _FIRST + j * _SECOND), _mix(keys.clone())[..., None, None]
    words, keys = words ^ (words >> 16), keys ^ (keys >> 16)
    # The comparison of kernels: 24 bits above a threshold.
    bound = (round(dropout * (1 << 24)) << 8) - (1 << 31)
    return _mix(words ^ keys) >= min(bound, (1 << 31) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Mixes int32 in place; the upper bits of the result depend on all bits."""
    x *= _MIX[0]
    x ^= x >> 15
    x *= _MIX[1]
    return x


@jit
def _mix_word(x):
    x = x * 2146121005
    x = x ^ (x >> 15)
    return x * -2073254261


@jit
def kept_block(key, i, j, threshold):
    """`kept_by_row` for indices i and j (int32, broadcast); `key` is that of the row, `threshold` of 24 bits."""
    words, key = _mix_word(i * -1640531535 + j * -2048144777), _mix_word(key.to(tl.int32))
    words, key = words ^ (words >> 16), key ^ (key >> 16)
    return (_mix_word(words ^ key) >> 8) + 8388608 >= threshold


@jit
def fold_key(key, number):
    """`fold`; the number may be Python's, whose product would not wrap."""
    return key + (key * 0 + number) * -1028477379
