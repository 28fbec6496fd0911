"""What could go wrong, looked at before anything expensive starts.

checks = preflight(config, share, there, storage, vocabulary_size=4096)
failed = [check for check in checks if not check.passed]  # non-empty: exit code 3, each with its remedy
"""

import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

from raystride.pipelines.cluster.cluster import CannotRun
from raystride.pipelines.cluster.resources import Resources, Share
from raystride.pipelines.config import Config
from raystride.pipelines.config.combinations import MESHED_DECODERS, MESHLESS, SHARDED
from raystride.pipelines.files import Folder
from raystride.pipelines.memory.estimate import FRAMEWORK_BYTES, MemoryEstimate, estimate
from raystride.pipelines.memory.networks import expected

GIB = 2**30


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    passed: bool
    found: str
    """What was asked and what there is."""
    remedy: str = ""
    """What to do, where it did not pass."""


def preflight(config: Config, share: Share, there: Resources, storage: Folder, vocabulary_size: int) -> list[Check]:
    """Makes all checks of settings and of this machine, in the order in which they are shown; see `hosts` for others."""
    return [*checks_of_settings(config, share, there, vocabulary_size), _check_storage(storage)]


def checks_of_settings(config: Config, share: Share, there: Resources, vocabulary_size: int) -> list[Check]:
    """The checks that need nothing but figures, so that a sweep can make them of many settings; memory's comes last."""
    return [
        _check_kernels(config, share),
        _check_slots(config, share),
        _check_resources(share, there),
        _check_memory(config, share, there, vocabulary_size),
    ]


def _check_kernels(config: Config, share: Share) -> Check:
    """A setting that no worker could obey ends here and not in the middle of the first step."""
    # As triton_kernels.interpreting, which cannot be asked: a foreign package may stand in its place.
    choice = config.model.kernels
    interpreting = os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "on", "yes")
    runs = choice != "triton" or (find_spec("triton") is not None and (share.device == "cuda" or interpreting))
    remedy = "set model.kernels auto or torch; or scaling.device cuda; or TRITON_INTERPRET=1 to run kernels on CPUs, slowly"
    return Check("kernels", runs, f"model.kernels is {choice}, the device {share.device}", remedy)


def _check_slots(config: Config, share: Share) -> Check:
    slots = config.train.slots
    groups = share.workers // config.scaling.group
    found = f"{slots} slots a step for {groups} {'groups of workers' if config.scaling.group > 1 else 'workers'}"
    return Check("slots", groups <= slots, found, f"raise train.slots to {groups} or lower scaling.workers")


def _check_resources(share: Share, there: Resources) -> Check:
    workers = share.least or share.workers
    asked = {kind: amount * workers for kind, amount in share.per_worker.items()}
    have = {"CPU": there.cpus, "GPU": there.gpus}
    missing = [kind for kind, amount in asked.items() if amount > have[kind]]
    found = ", ".join(f"{kind}: {amount:g} asked, {have[kind]:g} there" for kind, amount in asked.items())
    cpus = share.per_worker.get("CPU", 0)
    if not missing and cpus and (fit := there.fit(cpus)) < workers:
        # Ray would wait for ever: a worker needs its processors on one node.
        missing = ["CPU"]
        nodes = ", ".join(f"{node:g}" for node in there.node_cpus or (there.cpus,))
        found = f"{fit} of {workers} workers with {cpus:g} CPU each fit on nodes with {nodes}"
    remedy = "lower scaling.workers or scaling.threads, or add nodes to the cluster"
    if "GPU" in missing:
        remedy = "use --scaling.device cpu, lower scaling.workers, or add nodes with GPUs"
        if there.gpu_problem:
            why, _, install = there.gpu_problem.partition(": ")
            found, remedy = f"{found}: {why}", f"{install}, or use --scaling.device cpu"
    return Check("resources", not missing, found, remedy)


def _check_memory(config: Config, share: Share, there: Resources, vocabulary_size: int) -> Check:
    name, need = "memory", estimate_memory(config, share, vocabulary_size)
    if need is None:
        missing = "data.image_size, without which only preparation tells it," if config.task == "images" else "the network"
        return Check(name, True, f"not looked at: {missing} of task {config.task} is not known here")
    beside = -(-share.workers // there.nodes)
    if share.device == "cuda":
        host = (need.host + FRAMEWORK_BYTES) * beside
        if need.host and host > there.memory_bytes:
            found = f"about {host / GIB:.1f} GiB of main memory for {beside} worker(s), {there.memory_bytes / GIB:.1f} there"
            return Check(name, False, found, "set scaling.offload false, or use more nodes")
        have, workers = there.gpu_memory_bytes, 1
    else:
        have, workers = there.memory_bytes, beside
    if have is None:
        return Check(name, True, f"about {need.total / GIB:.1f} GiB a worker; the device's memory is not known here")
    found = f"about {need.total * workers / GIB:.1f} GiB for {workers} worker(s), {have / GIB:.1f} GiB there"
    return Check(name, need.total * workers <= have, f"{found}; {_shares(need)}", _less_memory(config, share, need))


def _shares(need: MemoryEstimate) -> str:
    """What a worker's memory is for."""
    parts = {"parameters": need.parameters, "gradients": need.gradients, "optimiser": need.optimizer}
    parts |= {"activations": need.activations, "PyTorch": need.framework}
    return "a worker's " + ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())


def _less_memory(config: Config, share: Share, need: MemoryEstimate) -> str:
    """What would help, the most helpful first."""
    train, scaling = config.train, config.scaling
    states = need.parameters + need.gradients + need.optimizer
    smaller = "train.slot_tokens" if train.slot_tokens else "train.micro_batch_slots (1 is the least) or train.slot_size"
    for_activations = [f"lower {smaller}"]
    if train.activation_checkpointing != "full":
        for_activations.append("set train.activation_checkpointing full (or selective)")
    if config.task in MESHED_DECODERS and not config.model.context % (4 * scaling.context):
        for_activations.append(f"set scaling.context {2 * scaling.context} on more workers")
    for_states = []
    if scaling.strategy not in SHARDED and share.workers > 1 and not train.exact:
        for_states.append("set scaling.strategy fsdp")
    elif scaling.strategy in SHARDED and share.device == "cuda" and not scaling.offload:
        for_states.append("set scaling.offload true")
    if train.precision != "pure_bf16":
        for_states.append("set train.precision pure_bf16" + (" or bf16" if share.device == "cuda" else ""))
    if config.task not in MESHLESS and not config.model.heads % (2 * scaling.tensor):
        for_states.append(f"set scaling.tensor {2 * scaling.tensor} on more workers")
    for_states.append("lower the model's size")
    ordered = [*for_states, *for_activations] if states > need.activations else [*for_activations, *for_states]
    return "; or ".join(ordered)


def estimate_memory(config: Config, share: Share, vocabulary_size: int) -> MemoryEstimate | None:
    """Bytes that a worker of this run will need; None where that cannot be told before preparation."""
    facts = {**expected(config), "vocabulary_size": vocabulary_size}
    return estimate(config, facts, workers=share.workers, device=share.device)


def _check_storage(storage: Folder) -> Check:
    name = f".probe-{uuid.uuid4().hex[:8]}"
    problem = ""
    try:
        storage.put(name, "driver")
        storage.remove(name)
    except Exception as error:  # what a file system raises depends on its library
        problem = f"{type(error).__name__}: {error}"
    remedy = "give --storage a folder or URI that every node can write, such as a network drive or an object store"
    return Check("storage", not problem, problem or f"{storage} can be written", remedy)


def failing(checks: list[Check]) -> Iterator[str]:
    """A line for each check that did not pass: what was asked, what there is, what to do."""
    for check in checks:
        if not check.passed:
            yield f"{check.name}: {check.found}\n  {check.remedy}"


def refuse_failing(checks: list[Check], where: str) -> None:
    """Raises CannotRun where a check did not pass; `where` is `cluster` or `place`."""
    if problems := list(failing(checks)):
        failed = [(check.name, check.found) for check in checks if not check.passed]
        raise CannotRun(f"this {where} cannot run it:\n" + "\n".join(problems), problems=failed)
