"""A step's time from computing and communication: the formulas, with their sources.

Work of the busiest worker, seconds:

    compute   = tokens x (seconds a token) x (1 + crowding x other workers on the node)
    waiting   = compute x slowest x E(workers)
    exposed   = max(sent - overlap x hideable compute, tail x sent)
    sent      = bytes over the slower link + hops x latency, inside nodes and between them
    overhead  = micro-batches x (seconds a micro-batch) + seconds a step

In a mesh (`mesh`) a worker computes a part of its group's tokens, at the pace of the costliest stage, and also

    bubble    = compute x the schedule's share
    exposed  += communication inside of groups; its overlapped part is hidden as above

Neighbours along tensor are numbered next to each other, then those along context, the groups, and the pipeline, so that
nodes split the pipeline first and tensor last.

E(n) is the expected largest of n standard normal numbers, by Blom's approximation (1958): a group waits for its slowest.

Bytes and hops of a collective of b bytes over n workers (Thakur, Rabenseifner and Gropp, 2005; Patarasuk and Yuan, 2009): a
ring's all-gather or reduce-scatter sends (n - 1)/n b over every link of the ring in n - 1 hops, its all-reduce does both.
Over several nodes the ring passes each node once, as NCCL's do, so that a node sends as much as each of its workers does.
Double binary trees over the nodes (Sanders, Speck and Träff, 2009; in NCCL since 2.4) send 2 b in 2 log2(nodes) hops between
nodes; the faster of the two is taken.

    traffic = step_traffic(work)
    parts = evaluate_terms(build_table([work, ...]), values)         # arrays, draws x works
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from raystride.pipelines.sweep.scaling_model.mesh import Exchange, WorkMesh
from raystride.pipelines.sweep.scaling_model.observation import Work

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Route:
    """Bytes and hops of a step inside a node, on each worker's link, and between nodes, on a whole node's."""

    intra_bytes: float = 0.0
    intra_hops: float = 0.0
    inter_bytes: float = 0.0
    inter_hops: float = 0.0

    def __add__(self, other: "Route") -> "Route":
        return Route(*(left + right for left, right in zip(astuple(self), astuple(other), strict=True)))

    def repeat(self, count: float) -> "Route":
        """Returns the bytes and hops of `count` such exchanges."""
        return Route(*(count * value for value in astuple(self)))


@dataclass(frozen=True)
class Traffic:
    """Communication of a step: gathers and scatters on rings, and sums on rings or along trees."""

    gathers: Route = Route()
    ring: Route = Route()
    tree: Route = Route()
    blocking: Route = Route()
    """Communication inside of a group that blocks computing."""
    passing: Route = Route()
    """Communication inside of a group that overlaps with computing."""


def all_gather_route(size: float, messages: int, local: int, nodes: int, num_parallel: int = 1) -> Route:
    """Returns the route of all-gathers or reduce-scatters of `size` bytes in all over `nodes` with `local` workers each.

    `messages`: their number. `num_parallel`: groups that do the same at once, and share a node's link.
    """
    workers = local * nodes
    sent = (workers - 1) / workers * size
    inter_hops = nodes if nodes > 1 else 0
    return Route(
        intra_bytes=sent if local > 1 else 0.0,
        intra_hops=messages * max(0, workers - 1 - inter_hops),
        inter_bytes=sent * num_parallel if inter_hops else 0.0,
        inter_hops=messages * min(inter_hops, workers - 1),
    )


def all_reduce_traffic(size: float, messages: int, local: int, nodes: int, *, trees: bool, num_parallel: int = 1) -> Traffic:
    """Returns a sum of `size` bytes by a ring and, if `trees` are available, by a chain in each node and trees over the
    nodes."""
    ring = all_gather_route(size, messages, local, nodes, num_parallel).repeat(2)
    if not trees or nodes == 1:
        return Traffic(ring=ring, tree=ring)
    tree = Route(
        intra_bytes=2 * size if local > 1 else 0.0,
        intra_hops=2 * messages * (local - 1),
        inter_bytes=2 * size * num_parallel,
        inter_hops=2 * messages * math.log2(nodes),
    )
    return Traffic(ring=ring, tree=tree)


@dataclass(frozen=True)
class Placement:
    """Placement of communicating workers: those on one node, the number of nodes, and such groups on a node."""

    local: int
    nodes: int
    num_parallel: int


def place_workers(work: Work, count: int, stride: int) -> Placement:
    """Returns the placement of `count` workers with ranks `stride` apart."""
    local = min(count, max(1, work.local_workers // stride))
    return Placement(local, math.ceil(count / local), work.local_workers // local)


def step_traffic(work: Work) -> Traffic:
    """Returns the communication of one step of `work`.

    ddp sums gradients once, in the last micro-batch. fsdp gathers parameters for every forward, and with reshard for every
    backward, and scatters gradients in the last; copies then sum their shards. ZeRO by DeepSpeed sums whole buckets in
    stages 1 (last micro-batch) and 2 (every one), and gathers parameters after the update; stage 3 gathers twice and
    scatters once in every micro-batch. In a mesh every worker holds its part of the parameters, whose gradients are summed
    over groups and context; with a pipeline, fsdp gathers once a step.
    """
    if work.mesh is not None:
        return _mesh_traffic(work, work.mesh)
    gradients, weights = work.parameters * work.gradient_bytes, work.parameters * work.gather_bytes
    trees, messages, local = work.backend == "nccl", work.messages, min(work.num_shards, work.local_workers)
    all_workers = all_reduce_traffic(gradients, messages, work.local_workers, work.nodes, trees=trees)
    gather = all_gather_route(weights, messages, local, work.num_shards // local)
    # Gloo implements reduce-scatter by an all-reduce.
    scatter = all_gather_route(gradients, messages, local, work.num_shards // local).repeat(1 if trees else 2)
    match work.strategy, work.zero:
        case "single", _:
            return Traffic()
        case "ddp", _:
            return all_workers
        case "fsdp", _:
            passes = (2 if work.reshard else 1) * work.micro_batches
            return replace(_hybrid_all_reduce(work, gradients, trees), gathers=gather.repeat(passes) + scatter)
        case _, 3:
            return Traffic(gathers=(gather.repeat(2) + scatter).repeat(work.micro_batches))
        case _, stage:
            sums = work.micro_batches if stage == 2 else 1
            return Traffic(gather, all_workers.ring.repeat(sums), all_workers.tree.repeat(sums))


def _hybrid_all_reduce(work: Work, gradients: float, trees: bool) -> Traffic:
    """Returns the all-reduce of shards over a hybrid's copies: workers with the same shard, in parallel on every node."""
    num_parallel = min(work.num_shards, work.local_workers)
    local = work.local_workers // num_parallel
    nodes = work.workers // work.num_shards // local
    return all_reduce_traffic(
        gradients / work.num_shards, work.messages, local, nodes, trees=trees, num_parallel=num_parallel
    )


def _mesh_traffic(work: Work, mesh: WorkMesh) -> Traffic:
    """Returns the communication between groups, for a worker's parameters, and inside of a group."""
    trees, messages = work.backend == "nccl", math.ceil(work.messages * mesh.parameter_fraction)
    gradients = work.parameters * mesh.parameter_fraction * work.gradient_bytes
    if work.strategy == "fsdp":
        traffic = _mesh_fsdp_traffic(work, mesh, gradients, trees)
    else:
        placement = place_workers(work, work.groups * mesh.context, mesh.tensor)
        traffic = all_reduce_traffic(
            gradients, messages, placement.local, placement.nodes, trees=trees, num_parallel=placement.num_parallel
        )
    tokens = work.slots_per_micro_batch * work.tokens_per_slot
    exchanges = list(mesh.list_exchanges(tokens=tokens, micro_batches=work.micro_batches, recompute=work.recompute))
    for exchange in exchanges:
        route = _exchange_route(work, mesh, exchange)
        name = "passing" if exchange.is_overlapped else "blocking"
        traffic = replace(traffic, **{name: getattr(traffic, name) + route})
    return traffic


def _mesh_fsdp_traffic(work: Work, mesh: WorkMesh, gradients: float, trees: bool) -> Traffic:
    """Returns the communication of groups that share a copy in shards; workers along context, then copies, sum theirs."""
    workers_per_stage, messages = mesh.context * mesh.tensor, math.ceil(work.messages / mesh.pipeline)
    weights = work.parameters * mesh.parameter_fraction * work.gather_bytes
    shard_placement = place_workers(work, work.num_shards, workers_per_stage)
    passes = 1 if mesh.pipeline > 1 else (2 if work.reshard else 1) * work.micro_batches
    gather = all_gather_route(
        weights, messages, shard_placement.local, shard_placement.nodes, shard_placement.num_parallel
    ).repeat(passes)
    scatter = all_gather_route(
        gradients, messages, shard_placement.local, shard_placement.nodes, shard_placement.num_parallel
    ).repeat(1 if trees else 2)
    parts = []
    for count, stride in (
        (mesh.context, mesh.tensor),
        (work.groups // work.num_shards, workers_per_stage * work.num_shards),
    ):
        placement = place_workers(work, count, stride)
        parts.append(
            all_reduce_traffic(
                gradients / work.num_shards,
                messages,
                placement.local,
                placement.nodes,
                trees=trees,
                num_parallel=placement.num_parallel,
            )
        )
    return Traffic(gather + scatter, parts[0].ring + parts[1].ring, parts[0].tree + parts[1].tree)


def _exchange_route(work: Work, mesh: WorkMesh, exchange: Exchange) -> Route:
    """Returns the route of an exchange inside of a group."""
    workers_per_stage = mesh.context * mesh.tensor
    count, stride = {
        "tensor": (mesh.tensor, 1),
        "context": (mesh.context, mesh.tensor),
        "pipeline": (mesh.pipeline, workers_per_stage * work.groups),
    }[exchange.dimension]
    placement = place_workers(work, count, stride)
    if exchange.kind == "pass":
        # A border that crosses nodes, if any, delays the others.
        if placement.nodes > 1:
            return Route(inter_bytes=exchange.size * placement.num_parallel, inter_hops=exchange.messages)
        return Route(intra_bytes=exchange.size, intra_hops=exchange.messages)
    # Hops are counted by message: the sizes are those of all messages together.
    once = all_gather_route(exchange.size, 1, placement.local, placement.nodes, placement.num_parallel)
    hops = all_gather_route(0.0, 1, placement.local, placement.nodes).repeat(exchange.messages)
    route = replace(once, intra_hops=hops.intra_hops, inter_hops=hops.inter_hops)
    return route.repeat(2 if exchange.kind == "sum" else 1)


def overlap_fraction(work: Work) -> float:
    """Returns the share of a worker's compute that can hide communication.

    It is the last backward under ddp, all of it if parameters are gathered too. A backward takes two forwards' time, and
    one more if activations are recomputed.
    """
    if work.strategy in ("single", "ddp") or (work.strategy == "deepspeed" and work.zero == 1):
        return (3 / 4 if work.recompute else 2 / 3) / work.micro_batches
    return 1.0


def tail_fraction(work: Work) -> float:
    """Returns the share of communication that nothing hides: the last message, and parameters gathered after an update."""
    if work.strategy == "deepspeed" and work.zero < 3:
        sent = 2.0 * (work.micro_batches if work.zero == 2 else 1)
        return (sent / work.messages + 1) / (sent + 1)
    return 1 / work.messages


def expected_maximum(workers: int) -> float:
    """Returns the expected largest of `workers` standard normal numbers."""
    return NormalDist().inv_cdf((workers - 0.375) / (workers + 0.25))


def bubble_fraction(work: Work) -> float:
    """Returns the idle time of a worker of a pipeline, as a multiple of its compute time; 0 without a mesh."""
    if work.mesh is None:
        return 0.0
    # It fills and drains through stages; most cost less than the one that sets the pace.
    return work.mesh.bubble(work.micro_batches, recompute=work.recompute) / work.mesh.imbalance


@dataclass(frozen=True)
class Table:
    """Inputs of the formulas for several works: arrays (works,) by name, and the works' groups."""

    groups: list[str]
    columns: Mapping[str, Array]

    def __getitem__(self, name: str) -> Array:
        return self.columns[name]


def build_table(works: Sequence[Work]) -> Table:
    """Computes the inputs of the formulas for each work."""
    rows = []
    for work in works:
        traffic = step_traffic(work)
        rows.append(
            {
                **{f"{way} {name}": value for way, route in vars(traffic).items() for name, value in vars(route).items()},
                "tokens": work.tokens_per_worker * work.effort * (work.mesh.imbalance if work.mesh else 1.0),
                "bubble": bubble_fraction(work),
                "micro_batches": work.micro_batches,
                "others": work.local_workers - 1,
                "slowest": expected_maximum(work.workers),
                "hideable": overlap_fraction(work),
                "tail": tail_fraction(work),
            }
        )
    columns = {name: np.array([row[name] for row in rows], dtype=float) for name in rows[0]}
    return Table([work.group for work in works], columns)


@dataclass(frozen=True)
class StepParts:
    """Seconds of a step by term; arrays, draws x works."""

    compute: Array
    waiting: Array
    """For the slowest worker."""
    exposed: Array
    """Communication that nothing hides."""
    overhead: Array
    bubble: Array
    """While a pipeline fills and drains."""

    @property
    def total(self) -> Array:
        """Seconds of a step without waiting for data, draws x works."""
        return self.compute + self.waiting + self.exposed + self.overhead + self.bubble


def evaluate_terms(works: Table, values: Mapping[str, Array]) -> StepParts:
    """Returns the seconds of each work's step by the formulas above.

    `values` holds a column (draws, 1) for each unknown of `fit.PRIORS` and for `compute` of each group.
    """
    seconds_per_token = np.concatenate([values[f"compute {group}"] for group in works.groups], axis=1)
    compute = works["tokens"] * seconds_per_token * (1 + values["crowding"] * works["others"])
    sent = _send_seconds(works, values, "gathers") + np.minimum(
        _send_seconds(works, values, "ring"), _send_seconds(works, values, "tree")
    )
    is_overlapped = values["overlap"] * works["hideable"] * compute
    in_group = _send_seconds(works, values, "blocking") + np.maximum(
        _send_seconds(works, values, "passing") - values["overlap"] * compute, 0
    )
    return StepParts(
        compute=compute,
        waiting=compute * values["slowest"] * works["slowest"],
        exposed=np.maximum(sent - is_overlapped, works["tail"] * sent) + in_group,
        bubble=compute * works["bubble"],
        overhead=works["micro_batches"] * values["micro-batch"] + values["fixed"],
    )


def _send_seconds(works: Table, values: Mapping[str, Array], route_name: str) -> Array:
    """Returns the seconds of a route's bytes, which use both kinds of link at once, and of its hops."""
    inside = works[f"{route_name} intra_bytes"] / values["intra bandwidth"]
    between = works[f"{route_name} inter_bytes"] / values["inter bandwidth"]
    hops = (
        works[f"{route_name} intra_hops"] * values["intra latency"]
        + works[f"{route_name} inter_hops"] * values["inter latency"]
    )
    return np.maximum(inside, between) + hops
