"""A trial's work and its measurements: the whole input of the scaling model about a training.

Seconds are those of the host's clock, bytes those on a link, tokens those of a whole step.

    work = Work(device="A100", model="7b", parameters=6_700_000_000, workers=8, workers_per_node=8, strategy="fsdp",
                slots=8, tokens_per_slot=4096, messages=33)
    trial = Observation(work, step_seconds=(0.52, 0.51, 0.53))
"""

import math
import statistics
from dataclasses import dataclass, replace
from typing import Literal

from raystride.pipelines.sweep.scaling_model.mesh import WorkMesh

Strategy = Literal["single", "ddp", "fsdp", "deepspeed"]


class TrialError(ValueError):
    """An impossible trial. The message names the field, its value and the allowed ones.

    So do `name` and `value`, if it is one field.
    """

    def __init__(self, message: str = "", *, name: str = "", value: object = None) -> None:
        super().__init__(message)
        self.name, self.value = name, value

    @classmethod
    def for_field(cls, name: str, value: object, rule: str) -> "TrialError":
        """Returns the error of one field, with the rule for its value."""
        return cls(f"{name} is {value}: {rule}", name=name, value=value)


@dataclass(frozen=True, kw_only=True)
class Work:
    """A group's work of a step, and its distribution over workers.

    Raises TrialError if a count is below 1, or the workers do not fill nodes, slots or groups evenly.
    """

    device: str
    """Device name of a worker: speeds are never transferred from one device to another."""
    model: str
    """Name of the network and its context, which fix the time a token."""
    parameters: int
    """Trained parameters of the whole model."""
    workers: int
    """Training processes."""
    workers_per_node: int
    """Training processes of one node."""
    strategy: Strategy
    """How the model is distributed."""
    slots: int
    """Slots of a step."""
    tokens_per_slot: int
    """Tokens of a slot."""
    messages: int
    """Messages that carry gradients or parameters: buckets under ddp, blocks and the layers around them under fsdp."""
    slots_per_micro_batch: int = 1
    """Slots of one forward and backward."""
    zero: int = 1
    """The ZeRO stage, with `deepspeed`."""
    reshard: bool = True
    """True if `fsdp` gathers parameters again for the backward."""
    shard_workers: int = 0
    """Workers that share one copy, with `fsdp`; 0: all."""
    precision: str = "fp32"
    """As in train.precision."""
    gradient_bytes: int = 4
    """Bytes of a parameter's gradient on the wire."""
    gather_bytes: int = 4
    """Bytes of a parameter when it is gathered."""
    threads: int = 0
    """Threads of a worker on CPUs."""
    recompute: bool = False
    """True if activations are recomputed in the backward."""
    variant: str = ""
    """Other choices that change how fast a worker computes: compilation, kernels."""
    backend: Literal["nccl", "gloo"] = "nccl"
    """Communication library: NCCL chooses between rings and trees, gloo has rings."""
    flops_per_token: float | None = None
    """Operations of forward and backward, for the utilisation."""
    mesh: WorkMesh | None = None
    """How groups of workers compute a slot together; None: each worker computes its own slots."""
    effort: float = 1.0
    """Computing of a token relative to that of the `model`, if several networks compute at one speed."""

    def __post_init__(self) -> None:
        counts = (
            "parameters",
            "workers",
            "workers_per_node",
            "slots",
            "tokens_per_slot",
            "messages",
            "slots_per_micro_batch",
        )
        for name in counts:
            if getattr(self, name) < 1:
                raise TrialError.for_field(name, getattr(self, name), "it must be at least 1")
        if self.workers > self.workers_per_node and self.workers % self.workers_per_node:
            rule = f"it must be a multiple of workers_per_node, {self.workers_per_node}"
            raise TrialError.for_field("workers", self.workers, rule)
        if self.mesh is not None:
            self._check_mesh()
            return
        if self.workers > self.slots:
            rule = f"it must be at most slots, {self.slots}, or some have nothing to do"
            raise TrialError.for_field("workers", self.workers, rule)
        if self.workers % self.num_shards or max(self.num_shards, self.local_workers) % min(
            self.num_shards, self.local_workers
        ):
            rule = f"it must divide workers, {self.workers}, and fill nodes of {self.local_workers} or divide them"
            raise TrialError.for_field("shard_workers", self.shard_workers, rule)

    def _check_mesh(self) -> None:
        if self.workers % self.group_workers:
            raise TrialError.for_field("workers", self.workers, f"it must be a multiple of a group's, {self.group_workers}")
        if self.groups > self.slots:
            raise TrialError.for_field(
                "workers", self.workers, f"slots, {self.slots}, must be at least its {self.groups} groups"
            )
        if self.groups % self.num_shards:
            raise TrialError.for_field("shard_workers", self.shard_workers, f"it must divide the groups, {self.groups}")

    @property
    def group_workers(self) -> int:
        """Workers that compute a slot together."""
        return self.mesh.group_workers if self.mesh else 1

    @property
    def groups(self) -> int:
        """Groups of workers, or without a mesh workers, among which slots are divided."""
        return self.workers // self.group_workers

    @property
    def nodes(self) -> int:
        """Nodes that the workers fill."""
        return math.ceil(self.workers / self.workers_per_node)

    @property
    def local_workers(self) -> int:
        """Number of the workers on one node."""
        return min(self.workers, self.workers_per_node)

    @property
    def num_shards(self) -> int:
        """Workers that share one copy of the model; with a mesh groups of them."""
        return self.shard_workers or self.groups

    @property
    def micro_batches(self) -> int:
        """Forwards and backwards of the busiest worker in a step."""
        return math.ceil(math.ceil(self.slots / self.groups) / self.slots_per_micro_batch)

    @property
    def tokens_per_worker(self) -> float:
        """Tokens of the busiest worker in a step, its share of the group's; empty slots take as long as full ones."""
        share = math.ceil(self.slots / self.groups) * self.tokens_per_slot
        return share if self.mesh is None else share / self.group_workers

    @property
    def tokens(self) -> int:
        """Tokens of a step, of all workers together."""
        return self.slots * self.tokens_per_slot

    @property
    def group(self) -> str:
        """Name of the set of works that compute equally fast a token."""
        parts = [self.device, self.model, self.precision, f"{self.threads} threads" * (self.threads > 0)]
        return " ".join(filter(None, [*parts, "recompute" * self.recompute, self.variant]))

    def scale_to(self, workers: int, workers_per_node: int, mesh: WorkMesh | None = None) -> "Work":
        """Returns the same work on another number of workers with the same share each, so that the batch grows.

        Groups of a mesh keep their size, or become those of `mesh`; a hybrid's keep theirs if there are as many workers.
        Raises TrialError if `workers` cannot be cut into nodes or groups.
        """
        mesh = mesh or self.mesh
        group_workers = mesh.group_workers if mesh else 1
        groups = workers // group_workers
        if workers % group_workers or not groups:
            raise TrialError.for_field("workers", workers, f"it must be a multiple of a group's, {group_workers}")
        share = math.ceil(math.ceil(self.slots / self.groups) * group_workers / self.group_workers)
        strategy: Strategy = "ddp" if self.strategy == "single" and workers > 1 else self.strategy
        return replace(
            self,
            workers=workers,
            workers_per_node=workers_per_node,
            slots=share * groups,
            strategy=strategy,
            shard_workers=min(self.shard_workers, groups),
            mesh=mesh,
        )

    def on_one_worker(self) -> "Work":
        """Returns the work of a group's slots on one worker."""
        slots = math.ceil(self.slots / self.groups)
        num_shards = min(self.shard_workers, 1)
        return replace(self, workers=1, workers_per_node=1, slots=slots, shard_workers=num_shards, mesh=None)


@dataclass(frozen=True)
class Observation:
    """One measured trial. Raises TrialError if no step was measured, or waiting for data took longer than a step."""

    work: Work
    step_seconds: tuple[float, ...]
    """Mean seconds of a step in each of a few windows, without the first steps."""
    data_seconds: float = 0.0
    """The part of them spent waiting for data."""
    reduce_seconds: float | None = None
    """The part of them spent waiting for the sum of gradients after the backward; None: not measured, or not applicable."""
    joules_per_token: float | None = None
    """Energy of all workers; None: not measured."""

    def __post_init__(self) -> None:
        if not self.step_seconds or min(self.step_seconds) <= 0:
            raise TrialError.for_field("step_seconds", self.step_seconds, "it must hold one time above 0 or more")
        if not 0 <= self.data_seconds < self.seconds:
            raise TrialError.for_field("data_seconds", self.data_seconds, f"it must be below the step's {self.seconds}")

    @property
    def seconds(self) -> float:
        """Seconds a step, the median of the windows."""
        return statistics.median(self.step_seconds)

    @property
    def relative_error(self) -> float:
        """Standard error of the windows' mean as a share of `seconds`; 0 if there is only one window."""
        count = len(self.step_seconds)
        return statistics.stdev(self.step_seconds) / self.seconds / math.sqrt(count) if count > 1 else 0.0

    @property
    def watts(self) -> float | None:
        """Average power of a worker in watts; None if energy was not measured."""
        if self.joules_per_token is None:
            return None
        return self.joules_per_token * self.work.tokens / self.seconds / self.work.workers
