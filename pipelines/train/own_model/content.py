"""A hash of a dataset's content, by samples at equal distances: equal lengths and shapes do not make equal data.

found = read_content(open_dataset({"x": features, "y": labels}))
found.hash                                                # 16 hexadecimal digits, or several such, joined by "-"
found.differing                                           # samples that are others when they are read again
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np
import torch

from raystride.pipelines.train.own_model.dataset import ArrayColumns, IndexedDataset, is_plain
from raystride.pipelines.train.own_model.samples import seed_generators
from raystride.pipelines.train.own_model.streams import StoredRows
from raystride.pipelines.train.randomness import preserve_generators

MAX_PLAIN, PORTIONS = 4096, (4, 16, 64)
"""Most samples that are hashed of arrays, tables and lists, and of a dataset whose samples a user's code makes: portions,
each with a hash of its own and spread over all samples."""
MAX_WHOLE_BYTES = 64 << 20
"""Most bytes of arrays that are hashed as a whole."""
MAX_S = 5.0
"""Seconds of reading that a further portion, which takes four times as long as those before, must not exceed."""


@dataclass
class Content:
    """What is known of a dataset's content."""

    hash: str = ""
    """16 hexadecimal digits for each portion of samples, joined by "-". "" if it is unknown: a sample is another one when it
    is read again, cannot be read, or is of a type without known bytes."""
    differing: list[int] = field(default_factory=list)
    """Samples that are others when they are read again with the same random seeds."""


def read_content(dataset: IndexedDataset) -> Content:
    """Hashes evenly spaced samples, each read with its own random seed; those that a user's code makes are read twice.

    Call it in a copy of this process for those: their code may change what it holds.
    """
    given = getattr(dataset, "given", dataset)
    if isinstance(given, StoredRows):  # the name is a hash of all rows
        return Content(hashlib.sha256(given.name.encode()).hexdigest()[:16])
    try:
        with preserve_generators(torch.device("cpu")):
            return _read_portions(dataset)
    except Exception:  # the training names a sample that cannot be read
        return Content()


def _read_portions(dataset: IndexedDataset) -> Content:
    found = hashlib.sha256()
    if is_plain(dataset):
        for values in _whole_arrays(dataset) or (_read(dataset, number) for number in _spread(len(dataset), MAX_PLAIN)):
            _add(found, values, exact=True)
        return Content(found.hexdigest()[:16])
    began, hashes = time.monotonic(), list[str]()
    for count in PORTIONS:
        numbers, digests, found = _spread(len(dataset), count), list[str](), hashlib.sha256()
        for number in numbers:
            sample = _read(dataset, number)
            digests.append(_digest(sample))
            _add(found, sample, exact=False)
        if differing := [n for n, before in zip(numbers, digests, strict=True) if _digest(_read(dataset, n)) != before]:
            return Content(differing=differing)
        hashes.append(found.hexdigest()[:16])
        if 4 * (time.monotonic() - began) > MAX_S:
            break
    return Content("-".join(hashes))


def _whole_arrays(dataset: IndexedDataset) -> list[Any]:
    """Returns the columns of arrays, by name, if their bytes are few enough to be hashed; else nothing."""
    given = getattr(dataset, "given", dataset)
    columns = given.columns if isinstance(given, ArrayColumns) else {}
    if not all(hasattr(column, "nbytes") and str(column.dtype) != "object" for column in columns.values()):
        return []
    return list(columns.items()) if sum(column.nbytes for column in columns.values()) <= MAX_WHOLE_BYTES else []


def _read(dataset: IndexedDataset, number: int) -> Any:
    seed_generators(number)
    return dataset[number]


def _digest(sample: Any) -> str:
    found = hashlib.sha256()
    _add(found, sample, exact=True)
    return found.hexdigest()


def _spread(length: int, count: int) -> list[int]:
    return np.unique(np.linspace(0, length - 1, min(length, count)).astype(np.int64)).tolist()  # type: ignore[no-any-return]


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
