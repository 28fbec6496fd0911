"""A rehearsal of what a user hands to `fit`: two equal steps, a save, all built anew, a load, a second step both ways.

What then differs, bit by bit, would be lost in a training that is stopped, or is not reproducible by itself.

    rehearse(own, config, batches)                            # SettingError with the object and its part; warnings
    graph_leaves(loss)                                        # parameters that a loss was computed from
"""

import inspect
import json
import random
import tempfile
import time
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from raystride.pipelines.config import Config, FitConfig, SettingError
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.checkpoint.contents import split_tensors, users_objects
from raystride.pipelines.train.checkpoint.manager import Checkpoints
from raystride.pipelines.train.checkpoint.train_state import TrainState, Updater, UsersOptimizer
from raystride.pipelines.train.optimizer import build_optimizer
from raystride.pipelines.train.own_model.definition import OwnModel, call_users
from raystride.pipelines.train.own_model.network import OwnNetwork
from raystride.pipelines.train.own_model.optimizer import TorchOptimizer, build_own_optimizer
from raystride.pipelines.train.own_model.samples import NestedBatch, seed_generators
from raystride.pipelines.train.randomness import preserve_generators

MAX_COMPARED_BYTES, MAX_COMPARED_S = 256 << 20, 20.0
"""Bytes of parameters, and seconds of a first step, above which names, shapes and types are compared and no bits."""
_INTERNAL = frozenset(vars(nn.Module())) | {"training"}
"""Attributes of every module."""
RANDOM = "the random state"
"""Part of a snapshot that a step leaves behind."""
Snapshot = dict[str, int]
"""Checksums by object and part."""


@dataclass
class _Cast:
    """A network with its loss and optimiser, as a training builds them."""

    network: OwnNetwork
    optimizer: Updater


def rehearse(own: OwnModel, config: Config, batches: Sequence[tuple[NestedBatch, int]]) -> float | None:
    """Rehearses a training on two batches, each with its number of samples.

    Returns the numbers that an optimiser of the user's own keeps for a parameter, None for ours or without a rehearsal.
    Raises SettingError for what a training could not resume, or under exact not repeat; warns where that is only likely.
    """
    if config.fit.rehearse == "off":
        return None
    began = time.perf_counter()
    first = _build(own, config)
    bits = compares_bits(config.fit, first.network)
    before = _take_snapshot(first, bits)
    if isinstance(first.optimizer, TorchOptimizer):
        _say_what_stays(first.network, first.optimizer)
    _step(own, config, first, batches, 0)
    moments = _count_moments(first) if own.optimizer else None
    if config.fit.rehearse == "auto" and time.perf_counter() - began > MAX_COMPARED_S:
        bits = False
    if not bits:
        users_objects(first.network, first.optimizer)  # raises for what no checkpoint can hold
        shapes = {name: (value.shape, value.dtype) for name, value in first.network.state_dict().items()}
        del first
        again = {name: (value.shape, value.dtype) for name, value in _build(own, config).network.state_dict().items()}
        _refuse_loss([name for name in again if shapes.get(name) != again[name]], [], [])
        return moments
    once = _take_snapshot(first, bits)
    with tempfile.TemporaryDirectory(prefix="raystride-rehearsal-") as place:
        checkpoints = Checkpoints(Folder(place), "rehearsal", keep=1, log=lambda _: None)
        checkpoints.save(first.network, first.optimizer, TrainState(step=1), {}, best=False)
        _step(own, config, first, batches, 1)  # while a copy is written
        twice = _take_snapshot(first, bits)
        del first
        try:
            repeats = _repeats(own, config, batches, once)
        except BaseException:
            checkpoints.wait_after_error()  # else its folder is removed below it, whose error would be raised in place
            raise
        checkpoints.finish()
        resumed = _build(own, config)
        found = checkpoints.find_newest()
        assert found is not None
        checkpoints.load(found, resumed.network, resumed.optimizer)
    lost = _differences(once, _take_snapshot(resumed, bits))
    _step(own, config, resumed, batches, 1)
    later = _differences(twice, _take_snapshot(resumed, bits)) if repeats else []
    _refuse_loss(lost, later, changed=_differences(before, once))
    return moments


def _say_what_stays(network: nn.Module, optimizer: TorchOptimizer) -> None:
    """Warns of trained parameters that a user's optimiser does not hold."""
    trained = {parameter: name for name, parameter in network.named_parameters() if parameter.requires_grad}
    if left := [name for parameter, name in trained.items() if parameter not in optimizer.parameters]:
        warnings.warn(
            f"optimizer holds {len(trained) - len(left)} of the {len(trained)} parameters that require gradients: "
            f"{_list_some(left)} stay as they are; freeze them with requires_grad_(False) if they are to",
            stacklevel=5,
        )


def _count_moments(cast: _Cast) -> float:
    trained = [parameter for parameter in cast.network.parameters() if parameter.requires_grad]
    states = [value for parameter in trained for value in cast.optimizer.state(parameter).values()]
    held = sum(value.nbytes for value in states if isinstance(value, torch.Tensor))
    return held / (4 * sum(parameter.numel() for parameter in cast.network.parameters()))


def compares_bits(settings: FitConfig, network: nn.Module) -> bool:
    """Returns whether a rehearsal compares all bits, by the setting and the size of the network."""
    size = sum(parameter.nbytes for parameter in network.parameters())
    return settings.rehearse == "full" or (settings.rehearse == "auto" and size <= MAX_COMPARED_BYTES)


def _build(own: OwnModel, config: Config) -> _Cast:
    seed_generators(config.seed)
    network = OwnNetwork(own.make_network(config.fit), own, {}, config.train.precision)
    if own.optimizer:
        return _Cast(network, build_own_optimizer(own, config.optimizer, network))
    _refuse_other_types(network)
    return _Cast(network, build_optimizer(config.optimizer, network))


def _refuse_other_types(network: nn.Module) -> None:
    """Raises SettingError for a trained parameter that is not in fp32, which our own update rules do not take."""
    for name, parameter in network.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            rule = "must have float32 parameters, or give an `optimizer` of your own"
            found = f"{name} is {parameter.dtype}; " + (
                "keep its torch.view_as_real" if parameter.is_complex() else "call float()"
            )
            raise SettingError(f"model {rule}: {found}", setting="model", value=name, allowed=rule)


def _step(own: OwnModel, config: Config, cast: _Cast, batches: Sequence[tuple[NestedBatch, int]], number: int) -> None:
    """Does a step as the loop does it. Raises SettingError, with the line of the user's code, if it fails."""
    batch, num_samples = batches[number]
    seed_generators(config.seed + number)
    cast.network.zero_grad()
    loss_sum, counted = cast.network(batch.copy(), torch.zeros(num_samples, dtype=torch.int64))
    call_users("loss", (loss_sum / counted).backward)
    for name, parameter in cast.network.named_parameters():
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            rule = "must give dense gradients; leave `sparse=True` out of its embeddings"
            raise SettingError(f"model {rule}: that of {name} is sparse", setting="model", value=name, allowed=rule)
    factor = call_users("schedule", own.schedule, number, config.train.steps or 2) if own.schedule else 1.0
    call_users("optimizer", cast.optimizer.update, config.optimizer.learning_rate * float(factor))
    if config.scaling.strategy == "fsdp":
        _refuse_other_shapes(cast)


def _refuse_other_shapes(cast: _Cast) -> None:
    for name, parameter in cast.network.named_parameters():
        for key, value in cast.optimizer.state(parameter).items() if parameter.requires_grad else ():
            if value.dim() and value.shape != parameter.shape:
                rule = "must keep states of a parameter's shape under fsdp; use scaling.strategy `ddp`"
                shapes = f"{key} of {name} is {tuple(value.shape)}, and the parameter {tuple(parameter.shape)}"
                raise SettingError(f"optimizer {rule}: {shapes}", setting="optimizer", value=key, allowed=rule)


def _repeats(own: OwnModel, config: Config, batches: Sequence[tuple[NestedBatch, int]], once: Snapshot) -> bool:
    """Returns whether two equal steps have the same results; says it, and refuses it under exact, if not."""
    second = _build(own, config)
    _step(own, config, second, batches, 0)
    differences = _differences(once, _take_snapshot(second, True))
    if not (differing := [part for part in differences if not part.startswith("attribute ")]):
        return True
    said = f"two equal steps differ in {_list_some(differing)}"
    if config.train.exact:
        rule = "must be false where equal steps have other results: draw from the generators of Python, NumPy and PyTorch"
        raise SettingError(f"train.exact {rule}; {said}", setting="train.exact", value=True, allowed=rule)
    warnings.warn(f"not reproducible: {said}, so a resumed training has other bits than one that went through", stacklevel=5)
    return False


def _refuse_loss(lost: list[str], later: list[str], changed: list[str]) -> None:
    """Refuses what a checkpoint does not bring back; says what it may not, where the next step was the same."""
    attributes = [part for part in lost if part.startswith("attribute ")]
    if parts := [part for part in lost if part not in attributes and part != RANDOM]:
        rule = "must come back from a checkpoint as they were saved"
        setting = "optimizer" if parts[0].startswith("optimizer") else "model"
        raise SettingError(f"{setting}: {_list_some(parts)} {rule}", setting=setting, value=parts[0], allowed=rule)
    kept = [part for part in attributes if part in changed]
    remedy = "keep it in a buffer, or return it from get_extra_state"
    if carried := [part for part in later if not part.startswith("attribute ")]:
        rule = f"must train alike after a resume; {remedy}"
        cause = f"a step changes {_list_some(kept)}, which no checkpoint holds" if kept else "a checkpoint lacks something"
        raise SettingError(
            f"model {rule}: {cause}, and the next step has another {carried[0]}", setting="model", value=kept, allowed=rule
        )
    if left := [part for part in kept if part in later]:
        warnings.warn(f"a step changes {_list_some(left)}, which no checkpoint holds: {remedy}", stacklevel=5)


def _list_some(parts: list[str]) -> str:
    return ", ".join(parts[:3]) + (f" and {len(parts) - 3} more" if len(parts) > 3 else "")


def _differences(one: Snapshot, other: Snapshot) -> list[str]:
    return [part for part in {**one, **other} if one.get(part) != other.get(part)]


def _take_snapshot(cast: _Cast, bits: bool) -> Snapshot:
    """Returns hashes of all that a step may change; without `bits` of shapes and types."""
    network, optimizer = cast.network, cast.optimizer
    found: dict[str, Any] = {f"parameter {name}": value for name, value in network.named_parameters()}
    saved = network.state_dict(keep_vars=True)
    for name, value in network.named_buffers():
        owner, _, key = name.rpartition(".")
        found[f"buffer {name}" if name in saved else f"attribute {key} of {owner}"] = value
    for name, module in network.named_modules():
        found[f"mode of {name or 'the model'}"] = module.training
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            found[f"extra state of {name}"] = module.get_extra_state()
        if module is not network:
            found |= {f"attribute {key} of {name}": value for key, value in _attributes(module).items()}
    names = {parameter: name for name, parameter in network.named_parameters() if parameter.requires_grad}
    for parameter, name in names.items():
        found |= {f"optimizer's {key} of {name}": value for key, value in optimizer.state(parameter).items()}
    if isinstance(optimizer, UsersOptimizer):
        found["optimizer's groups"] = optimizer.plain_state(names)
        found |= {f"attribute {key} of the optimizer": value for key, value in optimizer.attributes().items()}
    found[RANDOM] = [random.random(), float(np.random.rand()), torch.get_rng_state()] if bits else None
    return {part: found_sum for part, value in found.items() if (found_sum := checksum(value, bits)) is not None}


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Returns what lies on a module besides parameters, buffers and modules, also in slots."""
    slots = [key for kind in type(module).__mro__ for key in vars(kind).get("__slots__", ()) if hasattr(module, key)]
    held = vars(module) | {key: getattr(module, key) for key in slots}
    return {key: value for key, value in held.items() if key not in _INTERNAL}


def checksum(value: Any, bits: bool) -> int | None:
    """Returns a checksum of a value; None for one that is not made of numbers, texts and tensors."""
    try:
        content, tensors = split_tensors(value)
    except (TypeError, RecursionError):
        return None
    found = zlib.crc32(json.dumps(content).encode() if bits else repr(_shape_of(content)).encode())
    for name, tensor in tensors.items():
        found = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), found)
        if bits and tensor.layout == torch.strided:
            found = zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data, found)
    return found


def _shape_of(content: Any) -> Any:
    if isinstance(content, list):
        return [_shape_of(part) for part in content]
    if isinstance(content, dict):
        return {key: _shape_of(part) for key, part in content.items()}
    return type(content).__name__


def graph_leaves(value: torch.Tensor) -> list[torch.Tensor]:
    """Returns the tensors that require gradients and that a value was computed from."""
    waiting, seen, leaves = [value.grad_fn], set[Any](), list[torch.Tensor]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        waiting += [following for following, _ in node.next_functions]
    return leaves


@contextmanager
def generators_untouched(parts: Mapping[str, Any]) -> Iterator[None]:
    """Puts back the global generators, and those of NumPy, PyTorch and Python that functions of the user hold."""
    held = list(_find_generators(list(parts.values())))
    states = [_read_state(each) for each in held]
    with preserve_generators(torch.device("cpu")):
        try:
            yield
        finally:
            for each, state in zip(held, states, strict=True):
                _set_state(each, state)


def _read_state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return generator.getstate() if isinstance(generator, random.Random) else generator.bit_generator.state


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.bit_generator.state = state


def _find_generators(waiting: list[Any]) -> Iterator[Any]:
    """Yields generators that closures, defaults, named globals and attributes of these objects hold, each once."""
    seen, left = set[int](), 10_000
    while waiting and (left := left - 1):
        item = waiting.pop()
        if (
            id(item) in seen
            or item is None
            or isinstance(item, str | bytes | int | float | torch.Tensor | np.ndarray | type)
        ):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Generator | np.random.Generator | random.Random):
            if not isinstance(item, random.SystemRandom):
                yield item
        elif isinstance(item, Mapping):
            waiting += list(item.values())[:100]
        elif isinstance(item, list | tuple):
            waiting += item[:100]
        elif inspect.isfunction(item) or inspect.ismethod(item):  # compiled ones, which also have code, name no variables
            named = inspect.getclosurevars(item)
            waiting += [*named.nonlocals.values(), *named.globals.values()]
            waiting += [*(item.__defaults__ or ()), *(getattr(item, "__kwdefaults__", None) or {}).values()]
        elif hasattr(item, "__dict__") and type(item).__module__ != "builtins":
            waiting += [vars(item), *vars(type(item)).values()]
