"""Which mesh a run takes with `scaling.mesh auto`: what a sweep has recommended, or the smallest that the memory allows.

    config = choose_mesh(config, there, storage, screen.line)     # with tensor, pipeline, context and strategy settled

A sweep over meshes leaves its answer in the storage, for trainings whose steps are the same (`keep_mesh`). Without one, the
meshes are looked at in this order, and the first one that the preflight lets pass is taken: those that leave no device
idle; of these groups of fewer workers, since within a group more is exchanged than between groups; of these `ddp` before
`fsdp`; of these pipelines of fewer stages, which wait least; of these less of context, which shares out tokens alone, and
more of tensor parallelism. Tensor and context stay inside a node.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from math import gcd

from raystride.pipelines.cluster.resources import Resources, resolve
from raystride.pipelines.config import Config, SettingError
from raystride.pipelines.config.combinations import MESHED_DECODERS
from raystride.pipelines.config.run import Scaling
from raystride.pipelines.files import Folder
from raystride.pipelines.launch.preflight import GIB, checks_of_settings, estimate_memory

CHOSEN = ("tensor", "pipeline", "schedule", "context", "context_exchange", "strategy", "shard_workers")
"""What a sweep's answer says."""
STEP = (
    "slots",
    "slot_size",
    "slot_tokens",
    "micro_batch_slots",
    "precision",
    "activation_checkpointing",
    "exact",
    "packing",
)
"""The settings of `train` that a mesh's speed and memory depend on."""


def choose_mesh(config: Config, there: Resources, storage: Folder | None, said: Callable[[str], None]) -> Config:
    """The settings with a mesh, if they leave it open; as they are where none passes the preflight, which will say why."""
    if config.scaling.mesh != "auto":
        return config
    known = storage.read_json(_place(config)) if storage and storage.exists(_place(config)) else None
    if known and (chosen := _passing(config, there, replace(config.scaling, **{name: known[name] for name in CHOSEN}))):
        said(f"mesh     {_in_words(chosen, there)}, as sweep {known['sweep']} recommends")
        return chosen
    for scaling in _meshes(config, there):
        if chosen := _passing(config, there, scaling):
            said(f"mesh     {_in_words(chosen, there)}, the smallest that fits")
            return chosen
    return config


def keep_mesh(storage: Folder, recommended: Config, sweep: str) -> None:
    """Leaves the mesh that a sweep recommends to later trainings of the same steps."""
    scaling = recommended.scaling
    storage.put_json(_place(recommended), {name: getattr(scaling, name) for name in CHOSEN} | {"sweep": sweep})


def _place(config: Config) -> str:
    train = {name: getattr(config.train, name) for name in STEP}
    words = config.tokenizer.vocabulary_size
    model = {name: value for name, value in config.flat().items() if name.startswith("model.")}
    work = {"task": config.task, "model": model, "train": train, "words": words}
    return f".meshes/{hashlib.sha256(json.dumps(work, sort_keys=True, default=str).encode()).hexdigest()[:16]}.json"


def _passing(config: Config, there: Resources, scaling: Scaling) -> Config | None:
    """The settings with this mesh; None where a rule or a check is against it."""
    try:
        made = replace(config, scaling=scaling)
        share = resolve(made, there)
    except SettingError:
        return None
    checks = checks_of_settings(made, share, there, made.tokenizer.vocabulary_size)
    return made if all(check.passed for check in checks) else None


def _meshes(config: Config, there: Resources) -> list[Scaling]:
    """What may be tried, in the order above; a dimension that is given as more than 1 keeps its number."""
    scaling, shape, decoder = config.scaling, config.model, config.task in MESHED_DECODERS
    devices = int(there.gpus if there.gpus and scaling.device != "cpu" else there.cpus)
    most = scaling.workers if isinstance(scaling.workers, int) else max(1, devices)
    inside = max(1, devices // there.nodes)
    heads = gcd(shape.heads, shape.kv_heads or shape.heads)
    tensors = _open(scaling.tensor, [n for n in range(1, min(inside, heads) + 1) if heads % n == 0])
    contexts = _open(scaling.context, [n for n in range(1, inside + 1) if shape.context % (2 * n) == 0] if decoder else [1])
    pipelines = _open(scaling.pipeline, list(range(1, min(shape.layers, most) + 1)) if decoder else [1])
    found = [
        replace(scaling, tensor=tensor, pipeline=pipeline, context=context, strategy=strategy)
        for tensor in tensors
        for context in contexts
        for pipeline in pipelines
        for strategy in dict.fromkeys((scaling.strategy, "fsdp" if scaling.strategy == "auto" else scaling.strategy))
        if tensor * context <= inside and tensor * context * pipeline <= most
    ]
    return sorted(found, key=lambda each: (most % each.group > 0, *_order(each)))


def _open(given: int, choices: list[int]) -> list[int]:
    return [given] if given > 1 else choices or [1]


def _order(scaling: Scaling) -> tuple[int, bool, int, int]:
    return scaling.group, scaling.strategy == "fsdp", scaling.pipeline, scaling.context


def _in_words(config: Config, there: Resources) -> str:
    """`2 groups of 2 workers (tensor 2), ddp, about 1.20 GiB a worker`."""
    scaling, share = config.scaling, resolve(config, there)
    groups = share.workers // scaling.group
    dimensions = ("pipeline", "context", "tensor")
    sizes = ", ".join(f"{name} {getattr(scaling, name)}" for name in dimensions if getattr(scaling, name) > 1)
    of = _counted(share.workers, "worker")
    of = f"{_counted(groups, 'group')} of {_counted(scaling.group, 'worker')} ({sizes})" if sizes else of
    strategy = f", {'ddp' if scaling.strategy == 'auto' else scaling.strategy}" if groups > 1 else ""
    need = estimate_memory(config, share, config.tokenizer.vocabulary_size)
    return of + strategy + (f", about {need.total / GIB:.2f} GiB a worker" if need else "")


def _counted(count: int, name: str) -> str:
    return f"{count} {name}{'s' * (count != 1)}"
