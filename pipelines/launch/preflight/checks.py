"""Preflight checks of kernels, slots, resources, memory and storage, before anything expensive starts.

checks = preflight(config, allocation, resources, storage)
failed = [check for check in checks if not check.passed]  # non-empty: exit code 3, each with its remedy
"""

import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec

from raystride.pipelines.config import Config, ModelConfig, ScalingConfig, TrainConfig
from raystride.pipelines.config.combinations import MESHED_DECODERS, MESHLESS
from raystride.pipelines.data.plugins import BUILT_IN_TASKS
from raystride.pipelines.launch.cluster.cluster import CannotRun
from raystride.pipelines.launch.cluster.resources import Allocation, Resources
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.memory.estimate import FRAMEWORK_BYTES, MemoryEstimate, estimate
from raystride.pipelines.train.memory.networks import expected_facts

GIB = 2**30


@dataclass(frozen=True)
class Check:
    """Result of one check."""

    name: str
    passed: bool
    found: str
    """The request, compared with the resources."""
    remedy: str = ""
    """The fix, if it did not pass."""


def preflight(config: Config, allocation: Allocation, resources: Resources, storage: Folder) -> list[Check]:
    """Runs all checks of the settings and of this machine, in the order of display; see `hosts` for other hosts."""
    decided = with_proved_kernels(config, allocation, storage)
    return [*check_settings(config, allocation, resources, decided), _check_storage(storage)]


def with_proved_kernels(config: Config, allocation: Allocation, storage: Folder) -> Config:
    """Returns the settings with `model.kernels` as `auto` will choose on this machine's GPU, for an estimate; unchanged if
    that is open."""
    if config.model.kernels != "auto" or allocation.device != "cuda":
        return config
    from raystride.pipelines.train.worker.prover import predict_kernels  # slow import

    chosen = predict_kernels(config, storage)
    return replace(config, model=replace(config.model, kernels=chosen))


def check_settings(
    config: Config, allocation: Allocation, resources: Resources, decided: Config | None = None
) -> list[Check]:
    """Runs the checks that only compute, so that a sweep can check many settings; the memory check comes last.

    `decided`: the settings with what is known of the kernels that `auto` will choose.
    """
    return [
        _check_kernels(config.model, allocation),
        _check_slots(config.train, config.scaling, allocation),
        _check_resources(allocation, resources),
        _check_memory(decided or config, allocation, resources),
    ]


def _check_kernels(model: ModelConfig, allocation: Allocation) -> Check:
    """Checks that the chosen kernels can run; otherwise the first step would fail."""
    # Repeats triton_kernels.interpreting, which cannot be imported here: another package may be in Triton's place.
    choice = model.kernels
    interpreting = os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "on", "yes")
    runs = choice != "triton" or (find_spec("triton") is not None and (allocation.device == "cuda" or interpreting))
    remedy = "set model.kernels auto or torch; or scaling.device cuda; or TRITON_INTERPRET=1 to run kernels on CPUs, slowly"
    return Check("kernels", runs, f"model.kernels is {choice}, the device {allocation.device}", remedy)


def _check_slots(train: TrainConfig, scaling: ScalingConfig, allocation: Allocation) -> Check:
    slots = train.slots
    groups = allocation.workers // scaling.group
    found = f"{slots} slots a step for {groups} {'groups of workers' if scaling.group > 1 else 'workers'}"
    return Check("slots", groups <= slots, found, f"raise train.slots to {groups} or lower scaling.workers")


def _check_resources(allocation: Allocation, resources: Resources) -> Check:
    workers = allocation.min_workers or allocation.workers
    asked = {kind: amount * workers for kind, amount in allocation.per_worker.items()}
    have = {"CPU": resources.cpus, "GPU": resources.gpus}
    missing = [kind for kind, amount in asked.items() if amount > have[kind]]
    found = ", ".join(f"{kind}: {amount:g} asked, {have[kind]:g} there" for kind, amount in asked.items())
    cpus = allocation.per_worker.get("CPU", 0)
    if not missing and cpus and (num_fitting_workers := resources.num_fitting_workers(cpus)) < workers:
        # Ray would wait forever: a worker needs its CPUs on one node.
        missing = ["CPU"]
        nodes = ", ".join(f"{node:g}" for node in resources.node_cpus or (resources.cpus,))
        found = f"{num_fitting_workers} of {workers} workers with {cpus:g} CPU each fit on nodes with {nodes}"
    remedy = "lower scaling.workers or scaling.threads, or add nodes to the cluster"
    if "GPU" in missing:
        remedy = "use --scaling.device cpu, lower scaling.workers, or add nodes with GPUs"
        if resources.gpu_problem:
            problem, _, install = resources.gpu_problem.partition(": ")
            found, remedy = f"{found}: {problem}", f"{install}, or use --scaling.device cpu"
    return Check("resources", not missing, found, remedy)


def _check_memory(config: Config, allocation: Allocation, resources: Resources) -> Check:
    name, need = "memory", estimate_memory(config, allocation)
    if need is None:
        missing = "data.image_size, without which only preparation tells it," if config.task == "images" else "the network"
        return Check(name, True, f"not looked at: {missing} of task {config.task} is not known here")
    workers_per_node = -(-allocation.workers // resources.nodes)
    if allocation.device == "cuda":
        host = (need.host + FRAMEWORK_BYTES) * workers_per_node
        if need.host and host > resources.memory_bytes:
            have_gib = resources.memory_bytes / GIB
            found = f"about {host / GIB:.1f} GiB of main memory for {workers_per_node} worker(s), {have_gib:.1f} there"
            return Check(name, False, found, "set scaling.offload false, or use more nodes")
        have, workers = resources.gpu_memory_bytes, 1
    else:
        have, workers = resources.memory_bytes, workers_per_node
    if have is None:
        return Check(name, True, f"about {need.total / GIB:.1f} GiB a worker; the device's memory is not known here")
    found = f"about {need.total * workers / GIB:.1f} GiB for {workers} worker(s), {have / GIB:.1f} GiB there"
    if need.total * workers > have and allocation.device == "cuda" and config.model.kernels == "auto":
        by_kernels = estimate_memory(replace(config, model=replace(config.model, kernels="triton")), allocation)
        if by_kernels and by_kernels.total * workers <= have:
            less = f"about {by_kernels.total * workers / GIB:.1f} GiB once kernels are proved (`raystride check --kernels`)"
            return Check(name, True, f"{found} by PyTorch alone; {less}")
    return Check(
        name,
        need.total * workers <= have,
        f"{found}; {_describe_memory_use(need)}",
        _suggest_less_memory(config, allocation, need),
    )


def _describe_memory_use(need: MemoryEstimate) -> str:
    """Returns a worker's memory in GiB by use."""
    parts = {"parameters": need.parameters, "gradients": need.gradients, "optimiser": need.optimizer}
    parts |= {"activations": need.activations, "PyTorch": need.framework}
    return "a worker's " + ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())


def _suggest_less_memory(config: Config, allocation: Allocation, need: MemoryEstimate) -> str:
    """Returns remedies against too much memory, the most effective first."""
    train, scaling = config.train, config.scaling
    states = need.parameters + need.gradients + need.optimizer
    smaller = "train.slot_tokens" if train.slot_tokens else "train.micro_batch_slots (1 is the least) or train.slot_size"
    for_activations = [f"lower {smaller}"]
    if train.activation_checkpointing != "full":
        for_activations.append("set train.activation_checkpointing full (or selective)")
    if config.task in MESHED_DECODERS and not config.model.context % (4 * scaling.context):
        for_activations.append(f"set scaling.context {2 * scaling.context} on more workers")
    for_states = []
    if not scaling.kind.is_sharded and allocation.workers > 1 and not train.exact:
        for_states.append("set scaling.strategy fsdp")
    elif scaling.kind.is_sharded and allocation.device == "cuda" and not scaling.offload:
        for_states.append("set scaling.offload true")
    if train.precision != "pure_bf16":
        for_states.append("set train.precision pure_bf16" + (" or bf16" if allocation.device == "cuda" else ""))
    if config.task in BUILT_IN_TASKS and config.task not in MESHLESS and not config.model.heads % (2 * scaling.tensor):
        for_states.append(f"set scaling.tensor {2 * scaling.tensor} on more workers")
    for_states.append("lower the model's size")
    ordered = [*for_states, *for_activations] if states > need.activations else [*for_activations, *for_states]
    return "; or ".join(ordered)


def estimate_memory(config: Config, allocation: Allocation) -> MemoryEstimate | None:
    """Returns the memory estimate of a worker of this run, None if it is unknown before preparation."""
    return estimate(config, expected_facts(config), workers=allocation.workers, device=allocation.device)


def _check_storage(storage: Folder) -> Check:
    name = f".probe-{uuid.uuid4().hex[:8]}"
    problem = ""
    try:
        storage.put(name, "driver")
        storage.remove(name)
    except Exception as error:  # the error types depend on the file system's library
        problem = f"{type(error).__name__}: {error}"
    remedy = "give --storage a folder or URI that every node can write, such as a network drive or an object store"
    return Check("storage", not problem, problem or f"{storage} can be written", remedy)


def describe_failures(checks: list[Check]) -> Iterator[str]:
    """Yields two lines for each failed check: the finding and the remedy."""
    for check in checks:
        if not check.passed:
            yield f"{check.name}: {check.found}\n  {check.remedy}"


def raise_for_failures(checks: list[Check], subject: str) -> None:
    """Raises CannotRun if a check did not pass; `subject` is `cluster` or `place`."""
    if problems := list(describe_failures(checks)):
        failed = [(check.name, check.found) for check in checks if not check.passed]
        raise CannotRun(f"this {subject} cannot run it:\n" + "\n".join(problems), problems=failed)
