"""State of users' objects as strict JSON for a manifest, with its tensors aside.

content, tensors = split_tensors({"k": 3, "factors": [row, column]})     # tensors: {"factors.0": row, "factors.1": column}
join_tensors(content, tensors)                                           # {"k": 3, "factors": [row, column]}
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def split_tensors(value: Any, name: str = "") -> tuple[Any, dict[str, torch.Tensor]]:
    """Returns numbers, texts, None, tensors, and lists, tuples and mappings of these as JSON, and the tensors by path.

    Raises TypeError, with the path, for anything else.
    """
    tensors: dict[str, torch.Tensor] = {}

    def encode(item: Any, path: str) -> Any:
        if item is None or isinstance(item, bool | int | str):
            return item
        if isinstance(item, float):
            return item if math.isfinite(item) else {"float": repr(item)}
        if isinstance(item, complex):
            return {"complex": [encode(part, path) for part in (item.real, item.imag)]}
        if isinstance(item, torch.Tensor):
            tensors[path] = item.detach()
            return {"tensor": path}
        if isinstance(item, torch.dtype):
            return {"dtype": str(item).removeprefix("torch.")}
        inside = f"{path}." if path else ""
        if type(item) in (list, tuple):
            parts = [encode(part, f"{inside}{number}") for number, part in enumerate(item)]
            return parts if type(item) is list else {"tuple": parts}
        if isinstance(item, Mapping) and all(isinstance(key, str | int) for key in item):
            return {"dict": [[key, encode(part, f"{inside}{key}")] for key, part in item.items()]}
        raise TypeError(f"{path or 'the state'} is a {type(item).__name__}")

    return encode(value, name), tensors


def join_tensors(content: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Reverses `split_tensors`. Raises KeyError for a tensor that is not there."""
    if isinstance(content, list):
        return [join_tensors(part, tensors) for part in content]
    if not isinstance(content, dict):
        return content
    ((kind, inside),) = content.items()
    if kind == "tensor":
        return tensors[inside]
    if kind == "dtype":
        return getattr(torch, inside)
    if kind == "float":
        return float(inside)
    parts = join_tensors(inside, tensors)
    return dict(parts) if kind == "dict" else complex(*parts) if kind == "complex" else tuple(parts)


def extra_states(model: nn.Module) -> dict[str, Any]:
    """Returns what modules keep besides parameters and buffers, by `get_extra_state`, by the module's name."""
    kept = nn.Module.get_extra_state
    return {name: part.get_extra_state() for name, part in model.named_modules() if type(part).get_extra_state is not kept}


def load_extra_states(model: nn.Module, states: Mapping[str, Any]) -> None:
    """Restores what `extra_states` returned; passes over modules that the model lacks."""
    modules = dict(model.named_modules())
    for name, state in states.items():
        if name in modules:
            modules[name].set_extra_state(state)
