"""Chooses the mesh of a run with `scaling.mesh auto`: a sweep's recommendation, or the smallest mesh that fits in memory.

    config, allocation = choose_mesh(config, resources, storage, screen.log)    # tensor, pipeline, context, strategy are set

A sweep over meshes stores its recommendation for trainings with the same steps (`store_mesh`). Without one, the meshes are
tried in this order, and the first one that passes the preflight is taken: first those without idle devices; then smaller
groups of workers, as groups communicate more internally than with each other; then `ddp` before `fsdp`; then fewer pipeline
stages, with less idle time; then less context parallelism, as it splits only tokens, and more tensor parallelism. Tensor and
context parallelism stay inside a node.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import gcd

from raystride.pipelines.config import Config, ModelConfig, SettingError
from raystride.pipelines.config.combinations import MESHED_DECODERS
from raystride.pipelines.config.run import ScalingConfig
from raystride.pipelines.launch.cluster.resources import Allocation, Resources, resolve_allocation
from raystride.pipelines.launch.preflight.checks import GIB, check_settings, estimate_memory
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import put_sealed, read_sealed

MESH_SETTINGS = ("tensor", "pipeline", "schedule", "context", "context_exchange", "strategy", "shard_workers")
"""Settings of a stored recommendation."""
STEP_SETTINGS = (
    "slots",
    "slot_size",
    "slot_tokens",
    "micro_batch_slots",
    "precision",
    "activation_checkpointing",
    "exact",
    "packing",
)
"""Settings of `train` that determine a mesh's speed and memory."""


def choose_mesh(
    config: Config, resources: Resources, storage: Folder | None, log: Callable[[str], None]
) -> tuple[Config, Allocation]:
    """Returns the settings with a mesh if they leave it open, and their allocation.

    They are unchanged if no mesh passes, so that the preflight says why. Raises SettingError if they are contradictory.
    """
    if config.scaling.mesh == "auto":
        for scaling, reason in _list_candidates(config, resources, storage):
            if passing := _resolve_if_passing(config, resources, scaling):
                log(f"mesh     {_describe_mesh(*passing)}, {reason}")
                return passing
    return config, resolve_allocation(config, resources)


def store_mesh(storage: Folder, recommended: Config, sweep: str) -> None:
    """Stores a sweep's recommended mesh for later trainings with the same steps."""
    scaling = recommended.scaling
    mesh = {name: getattr(scaling, name) for name in MESH_SETTINGS}
    put_sealed(storage, _mesh_file(recommended), mesh | {"sweep": sweep})


def _mesh_file(config: Config) -> str:
    train = {name: getattr(config.train, name) for name in STEP_SETTINGS}
    words = config.tokenizer.vocabulary_size
    model = {name: value for name, value in config.naming_settings().items() if name.startswith("model.")}
    work = {"task": config.task, "model": model, "train": train, "words": words}
    return f".meshes/{hashlib.sha256(json.dumps(work, sort_keys=True, default=str).encode()).hexdigest()[:16]}.json"


def _resolve_if_passing(config: Config, resources: Resources, scaling: ScalingConfig) -> tuple[Config, Allocation] | None:
    """Returns the settings with this mesh and their allocation, None if they are invalid or a check fails."""
    try:
        candidate = replace(config, scaling=scaling)
        allocation = resolve_allocation(candidate, resources)
    except SettingError:
        return None
    checks = check_settings(candidate, allocation, resources)
    return (candidate, allocation) if all(check.passed for check in checks) else None


def _list_candidates(config: Config, resources: Resources, storage: Folder | None) -> Iterator[tuple[ScalingConfig, str]]:
    """Yields meshes and why one would be taken: a sweep's recommendation, then the others from small to large."""
    if storage and storage.exists(_mesh_file(config)):
        stored = read_sealed(storage, _mesh_file(config), "remove it: it only says what a sweep recommended")
        recommended = replace(config.scaling, **{name: stored[name] for name in MESH_SETTINGS})
        yield recommended, f"as sweep {stored['sweep']} recommends"
    for scaling in _list_meshes(config.scaling, config.model, config.task, resources):
        yield scaling, "the smallest that fits"


def _list_meshes(scaling: ScalingConfig, model: ModelConfig, task: str, resources: Resources) -> list[ScalingConfig]:
    """Returns the candidate meshes in the order above; a dimension with an explicit value above 1 keeps it."""
    decoder = task in MESHED_DECODERS
    devices = int(resources.gpus if resources.gpus and scaling.device != "cpu" else resources.cpus)
    max_workers = scaling.workers if isinstance(scaling.workers, int) else max(1, devices)
    devices_per_node = max(1, devices // resources.nodes)
    heads = gcd(model.heads, model.kv_heads or model.heads)
    tensors = _candidate_sizes(scaling.tensor, [n for n in range(1, min(devices_per_node, heads) + 1) if heads % n == 0])
    contexts = _candidate_sizes(
        scaling.context, [n for n in range(1, devices_per_node + 1) if model.context % (2 * n) == 0] if decoder else [1]
    )
    pipelines = _candidate_sizes(scaling.pipeline, list(range(1, min(model.layers, max_workers) + 1)) if decoder else [1])
    meshes = [
        replace(scaling, tensor=tensor, pipeline=pipeline, context=context, strategy=strategy)
        for tensor in tensors
        for context in contexts
        for pipeline in pipelines
        for strategy in dict.fromkeys((scaling.strategy, "fsdp" if scaling.strategy == "auto" else scaling.strategy))
        if tensor * context <= devices_per_node and tensor * context * pipeline <= max_workers
    ]
    return sorted(meshes, key=lambda mesh: (max_workers % mesh.group > 0, *_preference_key(mesh)))


def _candidate_sizes(given: int, choices: list[int]) -> list[int]:
    return [given] if given > 1 else choices or [1]


def _preference_key(scaling: ScalingConfig) -> tuple[int, bool, int, int]:
    return scaling.group, scaling.strategy == "fsdp", scaling.pipeline, scaling.context


def _describe_mesh(config: Config, allocation: Allocation) -> str:
    """Returns for instance `2 groups of 2 workers (tensor 2), ddp, about 1.20 GiB a worker`."""
    scaling = config.scaling
    groups = allocation.workers // scaling.group
    dimensions = ("pipeline", "context", "tensor")
    sizes = ", ".join(f"{name} {getattr(scaling, name)}" for name in dimensions if getattr(scaling, name) > 1)
    description = _with_count(allocation.workers, "worker")
    description = (
        f"{_with_count(groups, 'group')} of {_with_count(scaling.group, 'worker')} ({sizes})" if sizes else description
    )
    strategy = f", {'ddp' if scaling.strategy == 'auto' else scaling.strategy}" if groups > 1 else ""
    need = estimate_memory(config, allocation)
    return description + strategy + (f", about {need.total / GIB:.2f} GiB a worker" if need else "")


def _with_count(count: int, name: str) -> str:
    return f"{count} {name}{'s' * (count != 1)}"
