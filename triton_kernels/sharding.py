"""How the operations act on tensors that are spread over devices (DTensor), for tensor and sequence parallelism.

Elementwise operations take any sharding. Attention is independent over the batch and over heads, as long as a group's query
heads stay with its keys: heads are sharded as Megatron-LM does (Shoeybi et al., 2019, section 3). Norms are independent over
rows (sequence parallelism, Korthikanti et al., 2022); the gradient of their weight is a sum over the devices. What is not
named here is gathered first, or refused by DTensor.

DTensor takes a second to import, so nothing is registered until it is wanted.

    register_shardings()
    y = swiglu(distribute_tensor(gate, mesh, [Shard(2)]), distribute_tensor(up, mesh, [Shard(2)]))
"""

from collections.abc import Sequence
from typing import Any

import torch

import raystride.triton_kernels.attention
import raystride.triton_kernels.gelu
import raystride.triton_kernels.relu
import raystride.triton_kernels.rms_norm
import raystride.triton_kernels.rope
import raystride.triton_kernels.swiglu  # noqa: F401  (each import registers its operations)

_registered = False

Placements = tuple[list[Any], list[Any]]
"""Of the outputs and of the arguments; None for an argument that is no tensor."""


def register_shardings() -> None:
    """Tells DTensor how each operation may be sharded; a second call does nothing."""
    global _registered
    if _registered:
        return
    _registered = True
    from torch.distributed.tensor.experimental import register_sharding

    operations: Any = torch.ops.raystride
    for name, outputs, inputs in (("gelu", 1, 1), ("gelu_backward", 1, 2), ("relu", 1, 1), ("relu_backward", 1, 2)):
        register_sharding(getattr(operations, name).default)(_Elementwise(outputs, inputs))
    register_sharding(operations.swiglu.default)(_Elementwise(1, 2))
    register_sharding(operations.swiglu_backward.default)(_Elementwise(2, 3))
    register_sharding(operations.attention.default)(_attention)
    register_sharding(operations.attention_backward.default)(_attention_backward)
    register_sharding(operations.rope.default)(_rope)
    register_sharding(operations.rope_backward.default)(_rope_backward)
    register_sharding(operations.rms_norm.default)(_rms_norm)
    register_sharding(operations.add_rms_norm.default)(_add_rms_norm)
    register_sharding(operations.rms_norm_backward.default)(_rms_norm_backward)


class _Elementwise:
    """Any dimension, the same for all tensors."""

    def __init__(self, outputs: int, inputs: int) -> None:
        self._outputs, self._inputs = outputs, inputs

    def __call__(self, *arguments: Any) -> Sequence[Placements]:
        rest = [None] * (len(arguments) - self._inputs)
        return [
            ([place] * self._outputs, [place] * self._inputs + rest) for place in _whole_or(range(len(arguments[0].shape)))
        ]


def _whole_or(dimensions: Sequence[int]) -> list[Any]:
    from torch.distributed.tensor import Replicate, Shard

    return [Replicate(), *(Shard(dimension) for dimension in dimensions)]


def _attention(q: Any, k: Any, v: Any, key_lengths: Any, seed: Any, *settings: Any) -> Sequence[Placements]:
    """Batch and heads. Not with dropout, whose counter is the head's number; over the batch not with key lengths."""
    optional, rest = [None if x is None else _whole_or([])[0] for x in (key_lengths, seed)], [None] * len(settings)
    return [([place] * 2, [place] * 3 + optional + rest) for place in _whole_or(_free(key_lengths, seed))]


def _attention_backward(
    grad: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, key_lengths: Any, seed: Any, *settings: Any
) -> Sequence[Placements]:
    optional, rest = [None if x is None else _whole_or([])[0] for x in (key_lengths, seed)], [None] * len(settings)
    return [([place] * 3, [place] * 6 + optional + rest) for place in _whole_or(_free(key_lengths, seed))]


def _free(key_lengths: Any, seed: Any) -> list[int]:
    """The dimensions over which attention falls apart: batch and heads."""
    if seed is not None:
        return []
    return [1] if key_lengths is not None else [0, 1]


def _rope(q: Any, k: Any, cos: Any, sin: Any, q_weight: Any, k_weight: Any, eps: float) -> Sequence[Placements]:
    """Heads, of which every one turns by the same tables. With norms all of them: what they keep is a vector over heads."""
    whole = _whole_or([])[0]
    weights = [None if x is None else whole for x in (q_weight, k_weight)]
    found = [whole] if q_weight is not None else _whole_or([1])
    return [([place, place, whole, whole], [place, place, whole, whole, *weights, None]) for place in found]


def _rope_backward(
    grad_q: Any, grad_k: Any, q: Any, k: Any, cos: Any, sin: Any, q_weight: Any, k_weight: Any, *inverse: Any
) -> Sequence[Placements]:
    whole = _whole_or([])[0]
    rest = [None if x is None else whole for x in (q, k)] + [whole] * 2
    rest += [None if x is None else whole for x in (q_weight, k_weight)] + [whole] * 2
    found = [whole] if q_weight is not None else _whole_or([1])
    return [([place, place, whole, whole], [place, place, *rest]) for place in found]


def _rms_norm(x: Any, weight: Any, eps: float, dtype: Any) -> Sequence[Placements]:
    """Rows. What is kept for the backward is a vector over a device's own rows."""
    whole, *rows = _whole_or(range(len(x.shape) - 1))
    vector = _whole_or([0])[1]
    return [([whole, whole], [whole, whole, None, None]), *(([place, vector], [place, whole, None, None]) for place in rows)]


def _add_rms_norm(x: Any, residual: Any, weight: Any, eps: float, dtype: Any) -> Sequence[Placements]:
    whole, *rows = _whole_or(range(len(x.shape) - 1))
    vector = _whole_or([0])[1]
    split = [([place, place, vector], [place, place, whole, None, None]) for place in rows]
    return [([whole] * 3, [whole] * 3 + [None] * 2), *split]


def _rms_norm_backward(
    grad: Any, grad_total: Any, x: Any, weight: Any, inverse: Any, needs_weight: bool
) -> Sequence[Placements]:
    from torch.distributed.tensor import Partial

    whole, *rows = _whole_or(range(len(x.shape) - 1))
    vector = _whole_or([0])[1]
    found = [([whole, whole], [whole, None if grad_total is None else whole, whole, whole, whole, None])]
    for place in rows:
        other = None if grad_total is None else place
        found.append(([place, Partial() if needs_weight else whole], [place, other, place, whole, vector, None]))
    return found
