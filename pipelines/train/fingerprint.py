"""One hash that says whether two models are the same to the last bit.

parameters_sha256(model, optimizer)                       # 64 hexadecimal digits
"""

import hashlib

import torch
from torch import nn

from raystride.pipelines.strategies.spread import whole_values
from raystride.pipelines.train.optimizer import Updater


def parameters_sha256(model: nn.Module, optimizer: Updater | None = None) -> str:
    """SHA-256 over the parameters by name, tied ones once: name, shape, type, and the values as little-endian fp32.

    Of a parameter that has a master copy, that is taken. All workers call it together: parts are gathered one by one.
    """
    digest = hashlib.sha256()
    for name, held in whole_values(model, optimizer):
        dtype = str(held.dtype).removeprefix("torch.")
        digest.update(f"{name} {list(held.shape)} {dtype}\n".encode())
        values = held.to("cpu", torch.float32).contiguous().reshape(-1)
        digest.update(values.numpy().astype("<f4", copy=False).data)
    return digest.hexdigest()
