"""One hash that says whether two models are the same to the last bit.

parameters_sha256(model, optimizer)                       # 64 hexadecimal digits
"""

import hashlib
from collections.abc import Iterable

import torch
from torch import nn

from raystride.pipelines.strategies.spread import whole_base, whole_values
from raystride.pipelines.train.optimizer import Updater


def parameters_sha256(model: nn.Module, optimizer: Updater | None = None) -> str:
    """SHA-256 over a run's own parameters by name, tied ones once: name, shape, type, and the values as little-endian fp32.

    Of a parameter that has a master copy, that is taken. Of adapters without their base. All workers call it together: parts
    are gathered one by one.
    """
    return _sha256(whole_values(model, optimizer))


def base_sha256(model: nn.Module) -> str:
    """The same over the frozen parameters under adapters."""
    return _sha256(whole_base(model))


def _sha256(values: Iterable[tuple[str, torch.Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, held in values:
        dtype = str(held.dtype).removeprefix("torch.")
        digest.update(f"{name} {list(held.shape)} {dtype}\n".encode())
        numbers = held.to("cpu", torch.float32).contiguous().reshape(-1)
        digest.update(numbers.numpy().astype("<f4", copy=False).data)
    return digest.hexdigest()
