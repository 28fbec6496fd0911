"""Networks that a training could not keep as they are given: lazy ones, shared memory, functions that hold the original.

refuse_lazy(network)                                      # SettingError with the name of a parameter without a shape
refuse_shared_memory(network)                             # ... with those of parameters and buffers with the same elements
refuse_held_original(given, copied)                       # ... with that of a module whose hook reaches what was copied
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from raystride.pipelines.config import SettingError


def refuse_lazy(network: nn.Module) -> None:
    """Raises SettingError for parameters and buffers whose shapes only a first forward sets, and for TorchScript."""
    for name, module in network.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            rule = "must be made of Python modules, not of TorchScript: give the module that was scripted"
            raise SettingError(f"model {rule} ({name or 'the model'})", setting="model", value=name, allowed=rule)
    for name, value in _tensors(network):
        if is_lazy(value):
            rule = "must have the shapes of its parameters: call it with a sample once, `model(sample)`, before it is given"
            raise SettingError(f"model {rule}; {name} has none", setting="model", value=name, allowed=rule)


def refuse_shared_memory(network: nn.Module) -> None:
    """Raises SettingError for parameters and buffers with elements in common: copies, devices and shards separate them.

    Parts of one memory without common elements, as flat weights have, are taken.
    """
    by_memory: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, value in _tensors(network):
        if value.device.type == "cpu" and value.layout == torch.strided and value.numel():
            by_memory.setdefault(value.untyped_storage().data_ptr(), []).append((name, value.detach()))
    for sharing in (each for each in by_memory.values() if len(each) > 1):
        taken = torch.zeros(sharing[0][1].untyped_storage().nbytes(), dtype=torch.bool)
        for name, value in sharing:
            size = value.element_size()
            first_bytes = taken.as_strided(
                value.shape, [size * each for each in value.stride()], size * value.storage_offset()
            )
            if first_bytes.any():
                rule = "must have memory of its own for each parameter and buffer: compute one of the other in the forward"
                names = ", ".join(each for each, _ in sharing)
                raise SettingError(f"model {rule}; {names} share it", setting="model", value=name, allowed=rule)
            first_bytes.fill_(True)


def refuse_held_original(given: nn.Module, copied: nn.Module) -> None:
    """Raises SettingError for hooks and functions of a copied module whose closure holds parts of the `given` one."""
    if copied is given:
        return
    original = {id(part) for part in (*given.modules(), *(value for _, value in _tensors(given)))}
    for name, module in copied.named_modules():
        for key, function in _functions(module):
            if any(id(part) in original for part in _closure(function)):
                rule = "must be the callable that makes it, where a function on it holds the module itself"
                where = f"{key} of {name or 'the model'}"
                raise SettingError(f"model {rule}, as {where} does", setting="model", value=where, allowed=rule)


def _tensors(network: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from network.named_parameters()
    yield from network.named_buffers()


def _functions(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the functions among a module's attributes and hooks, with the attribute's name."""
    for key, value in vars(module).items():
        for part in value.values() if isinstance(value, dict) else (value,):
            if hasattr(part, "__closure__"):
                yield key.strip("_"), part


def _closure(function: Any) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue
