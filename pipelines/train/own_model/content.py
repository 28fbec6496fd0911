"""A hash of a dataset's content, by samples at equal distances: equal lengths and shapes do not make equal data.

hash_content(open_dataset({"x": features, "y": labels}))  # 16 hexadecimal digits; "" if a sample differs at each reading
"""

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch

from raystride.pipelines.train.own_model.dataset import IndexedDataset, is_plain
from raystride.pipelines.train.own_model.samples import seed_generators
from raystride.pipelines.train.own_model.streams import StoredRows

MAX_PLAIN, MAX_READ = 4096, 16
"""Most samples that are hashed: of arrays, tables and lists, and of a dataset whose samples a user's code makes."""


def hash_content(dataset: IndexedDataset) -> str:
    """Returns 16 hexadecimal digits of evenly spaced samples, each read with its own random seed.

    "" if it is unknown: a sample is another one when it is read again, cannot be read, or is of a type without known bytes.
    """
    if isinstance(dataset, StoredRows):  # the name is a hash of all rows
        return hashlib.sha256(dataset.name.encode()).hexdigest()[:16]
    exact = is_plain(dataset)
    most = min(len(dataset), MAX_PLAIN if exact else MAX_READ)
    numbers = np.unique(np.linspace(0, len(dataset) - 1, most).astype(np.int64)).tolist()
    state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            first, again = (_hash_samples(dataset, numbers[:1], exact=exact) for _ in range(2))
            return _hash_samples(dataset, numbers, exact=exact) if first == again else ""
    except Exception:  # the training names a sample that cannot be read
        return ""
    finally:
        random.setstate(state[0])
        np.random.set_state(state[1])


def _hash_samples(dataset: IndexedDataset, numbers: list[int], *, exact: bool) -> str:
    found = hashlib.sha256()
    for number in numbers:
        seed_generators(number)
        _add(found, dataset[number], exact=exact)
    return found.hexdigest()[:16]


def _add(found: Any, value: Any, *, exact: bool) -> None:
    """Adds a sample's structure and content to a hash; unless `exact`, of fractions only means of three digits.

    A user's code computes those, and another processor may round them otherwise. Raises TypeError for an unknown type.
    """
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = value.float().numpy() if value.dtype == torch.bfloat16 else value.numpy()
    if isinstance(value, float) and not exact:
        value = np.float64(value)
    if isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        found.update(f"{value.dtype} {value.shape}".encode())
        found.update(value.tobytes() if exact or value.dtype.kind not in "fc" else _coarse(value))
    elif isinstance(value, Mapping):
        _add(found, [[key, item] for key, item in value.items()], exact=exact)
    elif value is None or isinstance(value, str | bytes | int | float | complex):
        found.update(f"{type(value).__name__} {value!r}".encode("utf-8", "surrogatepass"))
    elif isinstance(value, Sequence | np.ndarray):
        found.update(f"{type(value).__name__} {len(value)}".encode())
        for item in value:
            _add(found, item, exact=exact)
    elif is_dataclass(value):
        _add(found, [getattr(value, item.name) for item in fields(value)], exact=exact)
    elif hasattr(value, "tobytes"):  # a picture
        found.update(value.tobytes())
    else:
        raise TypeError(type(value).__name__)


def _coarse(value: Any) -> bytes:
    """Returns means of fractions in which nothing cancels, with three digits."""
    numbers = np.abs(value) if value.dtype.kind == "c" else np.asarray(value, np.float64)
    parts = (np.clip(numbers, 0, None), np.clip(-numbers, 0, None), np.square(numbers))
    return " ".join(f"{part.mean() if part.size else 0:.3g}" for part in parts).encode()
