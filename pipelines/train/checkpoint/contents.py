"""What a checkpoint holds of a model and its optimiser: tensors by name, and what users' objects keep besides.

tensors = named_tensors(model, optimizer)                 # {"model.head.weight": ..., "optimizer.head.weight.exp_avg": ...}
content, tensors = split_tensors({"k": 3, "factors": [row, column]})   # strict JSON, {"factors.0": row, "factors.1": column}
join_tensors(content, tensors)                            # {"k": 3, "factors": [row, column]}
"""

import math
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from raystride.pipelines.system.errors import SettingError
from raystride.pipelines.train.checkpoint.layout import OBJECTS
from raystride.pipelines.train.checkpoint.pieces import unwrap_part, wrap_part
from raystride.pipelines.train.checkpoint.train_state import AVERAGE, TRAINED, EvaluatesOthers, Updater, UsersOptimizer
from raystride.pipelines.train.strategies.parameter_layout import saved_buffers, saved_parameters


def named_tensors(model: nn.Module, optimizer: Updater) -> dict[str, torch.Tensor]:
    """Returns all tensors of a checkpoint by name: `model.<parameter>` and `optimizer.<parameter>.<state>`; tied ones once,
    and none of adapters' base.

    The model's tensors are the master copies if there are any, or the weights to evaluate. All workers call it together.
    """
    tensors: dict[str, torch.Tensor] = {}
    evaluated: dict[str, torch.Tensor] = {}
    evaluates_others = isinstance(optimizer, EvaluatesOthers) and optimizer.evaluates_other_weights
    if evaluates_others and isinstance(optimizer, UsersOptimizer):
        with optimizer.evaluated_weights():
            evaluated = {name: parameter.detach().clone() for name, parameter in saved_parameters(model)}
    for name, parameter in saved_parameters(model):
        stored_state = dict(optimizer.state(parameter))
        value = stored_state.pop("master", parameter.detach())
        if evaluates_others and AVERAGE in stored_state:
            value, stored_state[TRAINED] = stored_state.pop(AVERAGE), value
        if name in evaluated:
            value, stored_state[TRAINED] = evaluated[name], value
        tensors[f"model.{name}"] = wrap_part(model, name, value)
        tensors |= {f"optimizer.{name}.{key}": wrap_part(model, name, value) for key, value in stored_state.items()}
    return tensors | {f"model.{name}": buffer for name, buffer in saved_buffers(model)}


def users_objects(model: nn.Module, optimizer: Updater) -> tuple[Any, dict[str, torch.Tensor]]:
    """Returns what a user's optimiser and modules keep besides parameters, buffers and states by parameter, as JSON and
    tensors. Raises SettingError for what is neither.
    """
    objects: dict[str, Any] = {}
    if isinstance(optimizer, UsersOptimizer):
        objects["optimizer"] = optimizer.plain_state(trained_names(model))
    if getattr(model, "saves_buffers", False) and (states := extra_states(model)):
        objects["modules"] = states
    try:
        return split_tensors(objects, OBJECTS)
    except TypeError as error:
        part, rule = (
            str(error).removeprefix(f"{OBJECTS}."),
            "must keep numbers, texts, tensors, and lists or mappings of these",
        )
        setting = "optimizer" if part.startswith("optimizer") else "model"
        raise SettingError(f"{setting} {rule}: {part}", setting=setting, value=part, allowed=rule) from None


def refuse_unlike_numbers(model: nn.Module, optimizer: Updater, group: dist.ProcessGroup) -> None:
    """Raises SettingError if a user's optimiser has another number on another worker: a checkpoint has rank 0's. Collective.

    One that takes norms of its shards is of this kind under fsdp.
    """
    if not isinstance(optimizer, UsersOptimizer):
        return
    names = trained_names(model)
    states = {name: optimizer.state(parameter) for parameter, name in names.items()}
    numbers = {name: {key: value for key, value in state.items() if not value.dim()} for name, state in states.items()}
    own = dict(_iterate_leaves({**optimizer.plain_state(names), "states": numbers}))
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, own, group=group)
    for rank, other in enumerate(found):
        for path in sorted(found[0].keys() | other.keys()):
            if (first := found[0].get(path)) != (second := other.get(path)):
                rule = "must keep the same numbers on all workers; sum them over the workers, or use scaling.strategy `ddp`"
                raise SettingError(
                    f"optimizer {rule}: {path} is {first} on worker 0 and {second} on worker {rank}",
                    setting="optimizer",
                    value=path,
                    allowed=rule,
                )


def _iterate_leaves(item: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yields the values of nested mappings and lists as texts, by their path; of tensors a checksum."""
    pairs = item.items() if isinstance(item, Mapping) else enumerate(item) if isinstance(item, list | tuple) else None
    if pairs is not None:
        for key, part in pairs:
            yield from _iterate_leaves(part, f"{path}.{key}" if path else str(key))
    elif not isinstance(item, torch.Tensor):
        yield path, repr(item)
    elif not item.dim():
        yield path, repr(item.item())
    else:
        content = item.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        yield path, f"a tensor with checksum {zlib.crc32(content)}"


def trained_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Returns the trained parameters with their names."""
    return {parameter: name for name, parameter in saved_parameters(model) if parameter.requires_grad}


def add_missing_buffers(model: nn.Module, stored: dict[str, Any]) -> None:
    """Registers stored buffers that a user's model makes in its first forward."""
    state = set(model.state_dict(keep_vars=True)) if getattr(model, "saves_buffers", False) else None
    for name in stored if state is not None else ():
        path = name.removeprefix("model.")
        if not name.startswith("model.") or path in state:  # type: ignore[operator]
            continue
        owner_name, _, leaf = path.rpartition(".")
        owner = dict(model.named_modules()).get(owner_name)
        if owner is not None and getattr(owner, leaf, None) is None:
            zeros = torch.zeros(stored[name]["size"], dtype=getattr(torch, stored[name]["dtype"]))
            owner.__dict__.pop(leaf, None)  # an attribute that is None
            owner.register_buffer(leaf, zeros.to(next(model.parameters()).device))


def load_targets(
    name: str, parameter: nn.Parameter, stored: dict[str, Any], optimizer: Updater | None
) -> dict[str, torch.Tensor]:
    """Returns the tensors to read a parameter's stored values into: the parameter itself, or new ones for the optimiser."""
    if optimizer is None:
        return {f"model.{name}": parameter.detach()}
    # A master is read into separate memory: the parameter itself would round it to bfloat16.
    value = optimizer.empty_state(parameter, None, torch.float32) if optimizer.has_masters else parameter.detach()
    wanted = {f"model.{name}": value}
    like_parameter = stored.get(f"model.{name}", {}).get("size")
    for key in (key for key in stored if key.startswith(f"optimizer.{name}.")):
        size = stored[key]["size"]
        is_like_parameter = bool(size) and size == like_parameter
        wanted[key] = optimizer.empty_state(
            parameter, None if is_like_parameter else size, getattr(torch, stored[key]["dtype"])
        )
    return wanted


def loaded_state(name: str, tensors: dict[str, torch.Tensor], optimizer: Updater) -> dict[str, torch.Tensor]:
    """Returns a parameter's state of these tensors, as an optimiser restores it."""
    prefix = f"optimizer.{name}."
    loaded = {key.removeprefix(prefix): unwrap_part(tensor) for key, tensor in tensors.items() if key.startswith(prefix)}
    return loaded | ({"master": unwrap_part(tensors[f"model.{name}"])} if optimizer.has_masters else {})


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
