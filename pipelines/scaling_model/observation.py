"""What a trial ran and what was measured of it: all that the scaling model knows of a training.

Seconds are those of the host's clock, bytes those that go over a link, tokens those of a whole step.

    work = Work(device="A100", model="7b", parameters=6_700_000_000, workers=8, workers_per_node=8, strategy="fsdp",
                slots=8, tokens_per_slot=4096, messages=33)
    trial = Observation(work, step_seconds=(0.52, 0.51, 0.53))
"""

import math
import statistics
from dataclasses import dataclass, replace
from typing import Literal

from raystride.pipelines.scaling_model.mesh import WorkMesh

Strategy = Literal["single", "ddp", "fsdp", "deepspeed"]


class TrialError(ValueError):
    """A trial cannot have been as described. The message names the field, its value and what is allowed.

    So do `name` and `value`, where it is one field.
    """

    def __init__(self, message: str = "", *, name: str = "", value: object = None) -> None:
        super().__init__(message)
        self.name, self.value = name, value

    @classmethod
    def about(cls, name: str, value: object, rule: str) -> "TrialError":
        """Returns the error of one field, whose value must be as the rule says."""
        return cls(f"{name} is {value}: {rule}", name=name, value=value)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a group of workers does in a step, and how it is spread over them.

    Raises TrialError where a count is below 1, or the workers do not fill nodes, slots or groups evenly.
    """

    device: str
    """What a worker computes on, by name: speeds are never carried from one device to another."""
    model: str
    """Names the network and its context: what takes equally long a token."""
    parameters: int
    """Trained parameters of the whole model."""
    workers: int
    """Training processes."""
    workers_per_node: int
    """Of them, those on one node."""
    strategy: Strategy
    """How the model is spread."""
    slots: int
    """Slots of a step."""
    tokens_per_slot: int
    """Tokens of a slot."""
    messages: int
    """Pieces in which gradients or parameters are sent: buckets under ddp, blocks and what surrounds them under fsdp."""
    slots_per_micro_batch: int = 1
    """Slots that one forward and backward takes."""
    zero: int = 1
    """The ZeRO stage, with `deepspeed`."""
    reshard: bool = True
    """Whether `fsdp` gathers parameters again for the backward."""
    shard_workers: int = 0
    """Workers that hold one copy between them, with `fsdp`; 0: all."""
    precision: str = "fp32"
    """As in train.precision."""
    gradient_bytes: int = 4
    """Bytes that the gradient of a parameter takes on the wire."""
    gather_bytes: int = 4
    """Bytes that a parameter takes when it is gathered."""
    threads: int = 0
    """Threads of a worker on CPUs."""
    recompute: bool = False
    """Whether activations are computed again in the backward."""
    variant: str = ""
    """What else changes how fast a worker computes: compilation, kernels."""
    backend: Literal["nccl", "gloo"] = "nccl"
    """What sends: NCCL chooses between rings and trees, gloo has rings."""
    flops_per_token: float | None = None
    """Of forward and backward, for the utilisation."""
    mesh: WorkMesh | None = None
    """How groups of workers compute a slot together; None: each worker computes its own slots."""
    effort: float = 1.0
    """How many times the computing of a token of what `model` names, where several networks compute at one speed."""

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
                raise TrialError.about(name, getattr(self, name), "it must be at least 1")
        if self.workers > self.workers_per_node and self.workers % self.workers_per_node:
            rule = f"it must be a multiple of workers_per_node, {self.workers_per_node}"
            raise TrialError.about("workers", self.workers, rule)
        if self.mesh is not None:
            self._check_mesh()
            return
        if self.workers > self.slots:
            rule = f"it must be at most slots, {self.slots}, or some have nothing to do"
            raise TrialError.about("workers", self.workers, rule)
        if self.workers % self.shards or max(self.shards, self.neighbours) % min(self.shards, self.neighbours):
            rule = f"it must divide workers, {self.workers}, and fill nodes of {self.neighbours} or divide them"
            raise TrialError.about("shard_workers", self.shard_workers, rule)

    def _check_mesh(self) -> None:
        if self.workers % self.group_workers:
            raise TrialError.about("workers", self.workers, f"it must be a multiple of a group's, {self.group_workers}")
        if self.groups > self.slots:
            raise TrialError.about(
                "workers", self.workers, f"slots, {self.slots}, must be at least its {self.groups} groups"
            )
        if self.groups % self.shards:
            raise TrialError.about("shard_workers", self.shard_workers, f"it must divide the groups, {self.groups}")

    @property
    def group_workers(self) -> int:
        """Workers that compute a slot together."""
        return self.mesh.group_workers if self.mesh else 1

    @property
    def groups(self) -> int:
        """Groups of workers, or without a mesh workers, among which slots are shared out."""
        return self.workers // self.group_workers

    @property
    def nodes(self) -> int:
        """Nodes that the workers fill."""
        return math.ceil(self.workers / self.workers_per_node)

    @property
    def neighbours(self) -> int:
        """How many of the workers are on one node."""
        return min(self.workers, self.workers_per_node)

    @property
    def shards(self) -> int:
        """Workers that hold one copy of the model between them; with a mesh groups of them."""
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
        """What works have in common that compute equally fast a token, in words."""
        parts = [self.device, self.model, self.precision, f"{self.threads} threads" * (self.threads > 0)]
        return " ".join(filter(None, [*parts, "recompute" * self.recompute, self.variant]))

    def at(self, workers: int, workers_per_node: int, mesh: WorkMesh | None = None) -> "Work":
        """The same work on another number of workers, each with as much to do as now, so that the batch grows with them.

        Groups of a mesh stay as they are, or become those of `mesh`; a hybrid's stay as large, where there are as many
        workers. Raises TrialError where `workers` cannot be cut into nodes or groups.
        """
        mesh = mesh or self.mesh
        group = mesh.group_workers if mesh else 1
        groups = workers // group
        if workers % group or not groups:
            raise TrialError.about("workers", workers, f"it must be a multiple of a group's, {group}")
        share = math.ceil(math.ceil(self.slots / self.groups) * group / self.group_workers)
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

    def alone(self) -> "Work":
        """A group's slots on one worker."""
        slots = math.ceil(self.slots / self.groups)
        shards = min(self.shard_workers, 1)
        return replace(self, workers=1, workers_per_node=1, slots=slots, shard_workers=shards, mesh=None)


@dataclass(frozen=True)
class Observation:
    """One measured trial. Raises TrialError where no step was measured, or waiting for data took longer than a step."""

    work: Work
    step_seconds: tuple[float, ...]
    """Mean seconds of a step in each of a few windows, the first steps left out."""
    data_seconds: float = 0.0
    """Of them, waiting for data."""
    reduce_seconds: float | None = None
    """Of them, waiting for the sum of gradients after the backward; None: not measured, or the strategy waits elsewhere."""
    joules_per_token: float | None = None
    """Energy of all workers; None: not measured."""

    def __post_init__(self) -> None:
        if not self.step_seconds or min(self.step_seconds) <= 0:
            raise TrialError.about("step_seconds", self.step_seconds, "it must hold one time above 0 or more")
        if not 0 <= self.data_seconds < self.seconds:
            raise TrialError.about("data_seconds", self.data_seconds, f"it must be below the step's {self.seconds}")

    @property
    def seconds(self) -> float:
        """Seconds a step, in the middle one of the windows."""
        return statistics.median(self.step_seconds)

    @property
    def relative_error(self) -> float:
        """The standard error of the windows' mean as a share of `seconds`; 0 where there is but one window."""
        count = len(self.step_seconds)
        return statistics.stdev(self.step_seconds) / self.seconds / math.sqrt(count) if count > 1 else 0.0

    @property
    def watts(self) -> float | None:
        """Average power of a worker in watts; None where energy was not measured."""
        if self.joules_per_token is None:
            return None
        return self.joules_per_token * self.work.tokens / self.seconds / self.work.workers
