"""The identity of a user's model and data, from one forward and backward before anything starts.

describe_own_model(own_model, config)["parameters"]       # {"0.weight": [32, 8], ...}
split_indices(2000, 0.05, seed=0)["validation"]           # 100 samples
"""

import hashlib
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from torch import nn

from raystride.pipelines.config import Config, SettingError, TrainConfig
from raystride.pipelines.data.feed.order import Order
from raystride.pipelines.data.prepare.code_hash import hash_code, qualified_name
from raystride.pipelines.data.sources.faults import DataError
from raystride.pipelines.train.memory.storages import Storages
from raystride.pipelines.train.own_model.adopted import Adopted
from raystride.pipelines.train.own_model.content import Content, read_content
from raystride.pipelines.train.own_model.dataset import IndexedDataset, copy_sample, describe_sample, is_plain
from raystride.pipelines.train.own_model.definition import OwnModel, call_users, describe_error
from raystride.pipelines.train.own_model.forked import call_forked
from raystride.pipelines.train.own_model.network import as_sums, read_loss
from raystride.pipelines.train.own_model.rehearsal import (
    checksum,
    compares_bits,
    generators_untouched,
    graph_leaves,
    rehearse,
)
from raystride.pipelines.train.own_model.samples import Collate, NestedBatch, collate_samples, seed_generators
from raystride.pipelines.train.own_model.set_metrics import ProbedMetrics, probe_metrics
from raystride.pipelines.train.own_model.streams import StoredRows
from raystride.pipelines.train.own_model.structure import refuse_held_original, refuse_shared_memory
from raystride.pipelines.train.validation import evaluation_mode

T = TypeVar("T")
PROBED = 2
"""Samples of the batch that runs through the network."""


@dataclass
class _Probe:
    """The first samples of a dataset."""

    structure: Any
    """That of the first sample, as JSON."""
    batches: list[Any]
    """Two batches of `PROBED` samples, or of fewer, collated."""
    singles: list[Any]
    """Each sample of the first batch by itself, collated; empty if that is not possible."""
    joined: Any = None
    """Both batches in one; None if that is not possible."""
    count: int = PROBED
    """Samples of a batch."""


def describe_own_model(own: OwnModel, config: Config) -> dict[str, Any]:
    """Returns the description of `OwnModelTask.describe_dataset`, after one forward and backward of the first samples.

    Raises SettingError for a network or loss that cannot be trained, DataError for data that cannot be read.
    """
    if own.optimizer and config.train.ema:
        raise config.train.error("ema", "must be 0 with an `optimizer` of your own, which keeps its own averages")
    if own.optimizer and config.optimizer.groups:
        raise config.optimizer.error("groups", "must be empty with an `optimizer` of your own, which has groups of its own")
    dataset, held_out = own.open_split("train", config.fit), own.open_split("validation", config.fit)
    assert dataset is not None
    num_train, num_validation = len(dataset), len(held_out) if held_out is not None else 0
    if not num_train or (held_out is not None and not num_validation):
        raise DataError(f"{'validation' if num_train else 'data'} has no samples")
    if held_out is None:
        indices = split_indices(num_train, config.data.validation_fraction, config.seed)
        num_train, num_validation = len(indices["train"]), len(indices["validation"])
    users = {item.name: getattr(own, item.name) for item in fields(own)}
    with generators_untouched(users):
        probe = _probe(partial(_read_first, dataset, own.collate, config.seed), is_inline=is_plain(dataset))
        content = {"data": _probe(partial(read_content, dataset), is_inline=is_plain(dataset))}
        held = None
        if held_out is not None:
            read = partial(_read_first, held_out, own.collate, config.seed, "validation")
            held = _probe(read, is_inline=is_plain(held_out))
            content["validation"] = _probe(partial(read_content, held_out), is_inline=is_plain(held_out))
        _check_repeats(content, exact=config.train.exact)
        seed_generators(config.seed)
        network = own.make_network(config.fit)
        if config.fit.rehearse != "off":
            given = own.model if isinstance(own.model, nn.Module) else network
            refuse_shared_memory(given)
            refuse_held_original(given, network)
        tried = _try_network(own, config, network, probe, held)
        del network
        _check_schedule(own, config.train, num_train)
        moments = None
        try:
            moments = rehearse(own, config, [(NestedBatch(batch), probe.count) for batch in probe.batches])
        except (OSError, MemoryError) as error:
            warnings.warn(f"not rehearsed: {type(error).__name__}: {error}", stacklevel=4)
    return {
        "train": num_train,
        "validation": num_validation,
        "sample": probe.structure,
        **tried,
        **({} if moments is None else {"optimizer_moments": moments}),
        "code": _hash_parts(own),
        "content": {name: part.hash for name, part in content.items()},
    }


def _try_network(own: OwnModel, config: Config, network: nn.Module, probe: _Probe, held: _Probe | None) -> dict[str, Any]:
    """Returns the part of the description that a step, and a validation on the samples `held` out for it, say of a network.

    Raises SettingError.
    """
    sizes = {name: list(value.shape) for name, value in network.named_parameters()}
    bits = compares_bits(config.fit, network)
    before = _mark_parameters(network, bits)
    others, saved = _run_step(own, network, probe, exact=config.train.exact, tries_samples=bits)
    stepped = _mark_parameters(network, bits)
    moving = {name: network.get_parameter(name).requires_grad for name in stepped if stepped[name] != before[name]}
    check_strategy(sizes, moving, config)
    found = _run_validation(own, network, held or probe, others, is_given=held is not None)
    for name, mark in _mark_parameters(network, bits).items() if own.metrics else ():
        if mark != stepped[name] and name not in moving:
            rule = "must leave the model's parameters as they are"
            raise SettingError(f"metrics {rule}, and change {name}", setting="metrics", value=name, allowed=rule)
    step_bytes = [(0.0, saved / probe.count)]
    if bits and probe.joined:
        few, many = NestedBatch(probe.batches[0]), NestedBatch(probe.joined)
        try:
            step_bytes = _measure_steps(own, network, [(few, probe.count), (many, 2 * probe.count)])
        except Exception as error:  # of an operation that PyTorch's dispatch does not follow, for instance
            said = f"memory: estimated from what a forward keeps, as no step can be followed: {describe_error(error)}"
            warnings.warn(said, stacklevel=5)
    return {
        "parameters": sizes,
        "logged": sorted(others),
        "measured": found.means,
        **({"of_set": found.of_set} if found.of_set else {}),
        "numbers": found.numbers,
        "gathered_bytes": found.gathered_bytes / probe.count,
        "moving": moving,
        "step_bytes": step_bytes,
    }


def _probe(read: Callable[[], T], *, is_inline: bool) -> T:
    """Returns what is read of a dataset; in a copy of this process where a user's code, as it may change what it holds."""
    return read() if is_inline else call_forked(read)


def _read_first(dataset: IndexedDataset, collate: Collate | None, seed: int, name: str = "data") -> _Probe:
    """Reads and collates the first samples. Raises DataError."""
    count = min(PROBED, len(dataset))
    try:
        structure = describe_sample(dataset[0])
    except Exception as error:
        raise DataError(f"sample 0 of {name} raised {describe_error(error)}") from error
    seed_generators(seed)
    samples = [dataset[i % len(dataset)] for i in range(2 * count)]
    single = [copy_sample(sample) for sample in samples[:count]]
    again = [copy_sample(sample) for sample in samples]
    batches = [collate_samples(part, collate) for part in (samples[:count], samples[count:])]
    probe = _Probe(structure, batches, [], count=count)
    with suppress(DataError):
        probe.singles = [collate_samples([sample], collate) for sample in single]
    with suppress(DataError):
        probe.joined = collate_samples(again, collate)
    return probe


def _check_repeats(content: Mapping[str, Content], *, exact: bool) -> None:
    """Says which data is another when it is read again. Raises SettingError for it under exact."""
    for name, found in content.items():
        if not found.differing:
            continue
        said = f"sample {found.differing[0]} of {name} is another one when it is read again with the same random seeds"
        remedy = "draw from the generators of Python, NumPy and PyTorch, and change nothing that the dataset holds"
        if exact:
            rule = "must be false where data is not the same at each reading"
            raise SettingError(f"train.exact {rule}: {said}; {remedy}", setting="train.exact", value=True, allowed=rule)
        warnings.warn(f"not reproducible: {said}, so a resumed training sees other samples: {remedy}", stacklevel=5)


def _hash_parts(own: OwnModel) -> str:
    """Returns a hash of the code of everything that the user gave, and of the rows of a stream."""
    given = (own.model, own.data, own.loss, own.validation, own.metrics, own.collate, own.optimizer, own.schedule)
    adopted = [part.identity for part in given if isinstance(part, Adopted)]
    parts = [part.code if isinstance(part, Adopted) else part for part in given]
    with_code = [part for part in parts if callable(part) or type(part).__module__ not in ("builtins", "numpy", "torch")]
    streams = [part.name for part in parts if isinstance(part, StoredRows)]
    found = hash_code([qualified_name(part) for part in with_code], follow_installed=False)
    if adopted:
        found = hashlib.sha256(repr([found, *adopted]).encode()).hexdigest()[:16]
    return "-".join([found, *streams])


def _run_step(
    own: OwnModel, network: nn.Module, probe: _Probe, *, exact: bool, tries_samples: bool
) -> tuple[dict[str, Any], int]:
    """Returns the further figures of the loss, and the bytes saved, by a forward and backward. Raises SettingError.

    `tries_samples`: whether a loss without a count is compared with those of its samples, which takes three more forwards.
    """
    trained = [(name, parameter) for name, parameter in network.named_parameters() if parameter.requires_grad]
    if not trained:
        rule = "must have parameters that require gradients"
        raise SettingError(f"model {rule}, and has none", setting="model", value=0, allowed=rule)
    before = {name: value.clone() for name, value in network.named_buffers()}
    held = {value.untyped_storage().data_ptr() for value in (*network.parameters(), *network.buffers())}
    saved: dict[int, int] = {}

    def note_saved(value: torch.Tensor) -> torch.Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in held:
            saved[storage.data_ptr()] = storage.nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(note_saved, lambda value: value):
        returned = call_users("loss", own.loss, network, NestedBatch(probe.batches[0]).copy().content)
    (loss_sum, counted), others = read_loss(returned, probe.count)
    if not loss_sum.requires_grad:
        rule = "must depend on the model's parameters"
        raise SettingError(f"loss {rule}, and has no gradient", setting="loss", value=float(loss_sum), allowed=rule)
    if any(parameter.grad is not None for _, parameter in trained):
        rule = "must leave backward() to Raystride, else gradients count twice"
        raise SettingError(f"loss {rule}", setting="loss", allowed=rule)
    _refuse_foreign_parameters(network, own, loss_sum)
    call_users("loss", loss_sum.backward)
    is_pair = isinstance(returned["loss"] if isinstance(returned, Mapping) else returned, tuple | list)
    if is_pair or tries_samples:
        _check_parts(own, network, probe, counted if is_pair else None)
    unused = [name for name, parameter in trained if parameter.grad is None]
    if unused:
        warnings.warn(
            f"{len(unused)} parameters have no gradient from the first batch, {unused[0]} for instance: freeze them with "
            "requires_grad_(False) if they are not to be trained",
            stacklevel=2,
        )
    changed = [name for name, value in network.named_buffers() if name not in before or not torch.equal(value, before[name])]
    if exact and changed:
        rule = "must be false where a forward changes buffers, whose values depend on how workers share the samples"
        raise SettingError(
            f"train.exact {rule} ({changed[0]}, for instance); use a norm without running statistics, as GroupNorm",
            setting="train.exact",
            value=True,
            allowed=rule,
        )
    return others, sum(saved.values())


def _run_validation(
    own: OwnModel, network: nn.Module, probe: _Probe, others: Mapping[str, Any], *, is_given: bool
) -> ProbedMetrics:
    """Returns what loss and metrics give in a validation; the loss runs on samples that are `given` for it.

    `others`: the further figures of the loss in training. Raises SettingError.
    """
    content, place = NestedBatch(probe.batches[0]).copy().content, " of validation samples" * is_given
    figures: Any = {}
    with evaluation_mode(network), torch.no_grad():
        if is_given:
            _, found = read_loss(call_users(f"loss{place}", own.loss, network, content), probe.count)
            if differing := sorted(found.keys() ^ others.keys()):
                rule = f"must return the same figures in training and validation, and {differing[0]} is in one alone"
                raise SettingError(f"loss {rule}", setting="loss", value=differing[0], allowed=rule)
        if own.metrics:
            figures = call_users(f"metrics{place}", own.metrics, network, content)
    if not isinstance(figures, Mapping):
        rule = "must return a mapping of names to means, (sum, count), or (function, predictions, labels)"
        raise SettingError(f"metrics {rule}, and returned {type(figures).__name__}", setting="metrics", value=figures)
    figures = {str(name): value for name, value in figures.items()}
    if taken := sorted(figures.keys() & {"loss", *others}):
        rule = f"must have other names than the loss and its figures ({', '.join(['loss', *others])})"
        raise SettingError(f"metrics {rule}, and return {taken[0]!r}", setting="metrics", value=taken[0], allowed=rule)
    probed = probe_metrics(figures, others)
    for name, value in {**others, **{name: figures[name] for name in probed.means}}.items():
        as_sums(value, probe.count, name, torch.device("cpu"))
    return probed


def _mark_parameters(network: nn.Module, bits: bool) -> dict[str, tuple[int, int | None]]:
    """Returns by name what differs where a parameter was changed: its version, and a checksum of its bits."""
    return {name: (value._version, checksum(value, bits)) for name, value in network.named_parameters()}


def _measure_steps(
    own: OwnModel, network: nn.Module, batches: Iterable[tuple[NestedBatch, int]]
) -> list[tuple[float, float]]:
    """Returns the fixed part and the part by sample of what a step holds besides parameters and gradients, at each moment
    that is the worst for some number of samples.

    It follows from steps of two batches, each with its number of samples. Raises what the user's code raises.
    """
    gradients = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
    held: list[list[int]] = []
    counts: list[int] = []
    for batch, count in batches:
        with Storages(before=gradients, ignoring=[*network.parameters(), *network.buffers()]) as alive:
            (loss_sum, _), _ = read_loss(own.loss(network, batch.copy().content), count)
            loss_sum.backward()
        held.append(alive.moments(besides=gradients))
        counts.append(count)
    few, many = counts
    if len(held[0]) != len(held[1]):  # other operations for other sizes
        held = [[max(moments)] for moments in held]
    slopes = [max(0.0, (at_many - at_few) / (many - few)) for at_few, at_many in zip(*held, strict=True)]
    lines = sorted({(at_many - many * slope, slope) for at_many, slope in zip(held[1], slopes, strict=True)}, reverse=True)
    steepest, worst = -1.0, list[tuple[float, float]]()
    for fixed, slope in lines:  # a smaller fixed part is the worst for no number, unless it grows faster
        if slope > steepest:
            steepest = slope
            worst.append((fixed, slope))
    return worst


def check_strategy(sizes: Mapping[str, list[int]], moving: Mapping[str, bool], config: Config) -> None:
    """Raises SettingError for parameters that cannot be sharded, and for `moving` ones, which a forward changes, where
    workers would part or shards lose it. Frozen ones, as those of a teacher that follows, are made equal with the buffers.

    `sizes`: of all parameters; `moving`: whether each of these is trained.
    """
    scaling = config.scaling
    scalars = [name for name, size in sizes.items() if not size]
    wrapped = [name for name in sizes if "_orig_mod" in name.split(".")]
    trained = [name for name, is_trained in moving.items() if is_trained]
    alone = scaling.workers == 1 or scaling.strategy == "single" or config.launch.mode == "inline"

    def refuse(setting: str, value: Any, rule: str, names: Iterable[str]) -> NoReturn:
        raise SettingError(f"{setting} {rule} ({next(iter(names))})", setting=setting, value=value, allowed=rule)

    if scalars and scaling.kind.is_sharded:
        rule = "must not be fsdp or deepspeed for parameters without a dimension: use `ddp`, or give them one"
        refuse("scaling.strategy", scaling.strategy, rule, scalars)
    if wrapped and scaling.strategy == "deepspeed" and scaling.zero == 3:
        rule = "must be 1 or 2 for modules that torch.compile() has wrapped; `model.compile()` and `train.compile` wrap none"
        refuse("scaling.zero", 3, rule, wrapped)
    if moving and config.train.exact:
        rule = "must be false where a forward changes parameters, whose values depend on how workers share the samples"
        refuse("train.exact", True, rule, moving)
    if moving and scaling.kind.is_sharded:
        rule = "must not be fsdp or deepspeed where a forward changes parameters, whose shards do not see it; use `ddp`"
        refuse("scaling.strategy", scaling.strategy, rule, moving)
    if trained and not alone:
        rule = "must be 1 where a forward changes trained parameters, which would differ between workers"
        refuse("scaling.workers", scaling.workers, rule, trained)


def _check_parts(own: OwnModel, network: nn.Module, probe: _Probe, counted: torch.Tensor | None) -> None:
    """Raises SettingError for a second value that is no count, as that of a batch is the sum of its samples' `counted`; and
    for a loss without one that is a sum over the samples, and no mean.
    """
    total, count = 0.0, float(counted.detach()) if counted is not None else 1.0
    sums = list[tuple[float, float]]()
    batches = [NestedBatch(probe.batches[0]).copy().content, *probe.singles]
    with suppress(Exception), evaluation_mode(network), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a sample by itself, which norms over a batch do not take
        parts = [read_loss(own.loss(network, each), 1)[0] for each in batches]
        (total, count), *sums = [(float(each), float(number)) for each, number in parts]
    if counted is None:
        of_samples = sum(each for each, _ in sums)
        if len(sums) > 1 and of_samples and math.isclose(total, of_samples, rel_tol=1e-5):
            rule = "must return a mean over the batch's samples, or (sum, count)"
            said = "it returns the sum, as with reduction='sum'; add the count, (loss, samples)"
            raise SettingError(f"loss {rule}: {said}", setting="loss", value=total, allowed=rule)
        return
    of_samples = sum(number for _, number in sums) if sums else count
    if not counted.requires_grad and count > 0 and math.isclose(count, of_samples, rel_tol=1e-3):
        return
    rule = "must return (sum, count), or a mean, and further figures by name, {'loss': mean, 'aux': ...}"
    found = f"{count:g} for {probe.count} samples together, and {of_samples:g} for each of them by itself"
    raise SettingError(f"loss {rule}: its second value is no count ({found})", setting="loss", value=count, allowed=rule)


def _refuse_foreign_parameters(network: nn.Module, own: OwnModel, loss_sum: torch.Tensor) -> None:
    """Raises SettingError for parameters that the loss reaches, and nobody would train or save."""
    known = {id(parameter) for parameter in network.parameters()}
    if isinstance(own.loss, nn.Module):
        known |= {id(parameter) for parameter in own.loss.parameters()}
    if foreign := [leaf for leaf in graph_leaves(loss_sum) if id(leaf) not in known]:
        rule = (
            "must reach parameters of the model alone: put others into the model, or give `loss` as the module that has them"
        )
        shape = tuple(foreign[0].shape)
        raise SettingError(f"loss {rule}; it reaches one of shape {shape}", setting="loss", value=shape, allowed=rule)


def _check_schedule(own: OwnModel, settings: TrainConfig, num_samples: int) -> None:
    """Raises SettingError unless a schedule of one's own returns numbers, for the first step and the last of this start."""
    if not own.schedule:
        return
    limits = (settings.steps, math.ceil(num_samples * settings.epochs / settings.samples_per_step))
    total_steps = min((limit for limit in limits if limit), default=1)
    for step in (0, total_steps - 1):
        returned = call_users("schedule", own.schedule, step, total_steps)
        if not isinstance(returned, int | float):
            rule = "must return a number"
            name = type(returned).__name__
            raise SettingError(
                f"schedule {rule}, and returned {name} for step {step}", setting="schedule", value=name, allowed=rule
            )


def split_indices(count: int, fraction: float, seed: int) -> dict[str, np.ndarray]:
    """Returns the samples of each split, in order: a random `fraction` of all, at least one, is held out.

    Raises DataError for fewer than two samples.
    """
    if count < 2:
        raise DataError(f"data has {count} samples: give at least two, or `validation` samples of their own")
    held_out = min(count - 1, max(1, round(count * fraction)))
    shuffled = Order(count, seed).sample_ids_at(np.arange(count))
    return {"train": np.sort(shuffled[held_out:]), "validation": np.sort(shuffled[:held_out])}
