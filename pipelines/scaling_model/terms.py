"""A step's time from what is computed and sent: the formulas, with their sources.

Work of the busiest worker, seconds:

    compute   = tokens x (seconds a token) x (1 + crowding x other workers on the node)
    waiting   = compute x slowest x E(workers)
    exposed   = max(sent - overlap x what it may hide behind, tail x sent)
    sent      = bytes over the slower link + hops x latency, inside nodes and between them
    overhead  = micro-batches x (seconds a micro-batch) + seconds a step

Of a mesh (`mesh`) a worker computes a part of its group's tokens, at the pace of the costliest stage, and besides

    bubble    = compute x the schedule's share
    exposed  += what is sent inside of groups, of which what computing goes on beside is hidden as above

Neighbours along tensor are numbered next to each other, then those along context, the groups, and the pipeline, so that
nodes take apart the pipeline first and tensor last.

E(n) is the expected largest of n standard normal numbers, by Blom's approximation (1958): a group waits for its slowest.

Bytes and hops of a collective of b bytes over n workers (Thakur, Rabenseifner and Gropp, 2005; Patarasuk and Yuan, 2009): a
ring's all-gather or reduce-scatter sends (n - 1)/n b over every link of the ring in n - 1 hops, its all-reduce does both.
Over several nodes the ring passes each node once, as NCCL's do, so that a node sends as much as each of its workers does.
Double binary trees over the nodes (Sanders, Speck and Träff, 2009; in NCCL since 2.4) send 2 b in 2 log2(nodes) hops between
nodes; the faster of the two is taken.

    traffic = traffic_of(work)
    parts = seconds_of(terms_table([work, ...]), values)             # arrays, draws x works
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from raystride.pipelines.scaling_model.mesh import Exchange, WorkMesh
from raystride.pipelines.scaling_model.observation import Work

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Route:
    """Bytes and hops of a step on the links inside a node, each worker's, and between nodes, those of a whole node."""

    intra_bytes: float = 0.0
    intra_hops: float = 0.0
    inter_bytes: float = 0.0
    inter_hops: float = 0.0

    def __add__(self, other: "Route") -> "Route":
        return Route(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def times(self, count: float) -> "Route":
        """The bytes and hops of going this way so many times."""
        return Route(*(count * value for value in astuple(self)))


@dataclass(frozen=True)
class Traffic:
    """What a step sends: gathers and scatters, which go around rings, and sums, which go around rings or along trees."""

    gathers: Route = Route()
    ring: Route = Route()
    tree: Route = Route()
    blocking: Route = Route()
    """What the workers of a group send while they can do nothing else."""
    passing: Route = Route()
    """What they send while they compute something else."""


def gather(size: float, messages: int, local: int, nodes: int, abreast: int = 1) -> Route:
    """An all-gather or a reduce-scatter of `size` bytes in all, in so many messages, over `nodes` with `local` workers each.

    `abreast`: groups that do the same at once, and share a node's link.
    """
    workers = local * nodes
    sent = (workers - 1) / workers * size
    between = nodes if nodes > 1 else 0
    return Route(
        intra_bytes=sent if local > 1 else 0.0,
        intra_hops=messages * max(0, workers - 1 - between),
        inter_bytes=sent * abreast if between else 0.0,
        inter_hops=messages * min(between, workers - 1),
    )


def all_reduce(size: float, messages: int, local: int, nodes: int, *, trees: bool, abreast: int = 1) -> Traffic:
    """A sum of `size` bytes by a ring, and where `trees` are to be had, by a chain in each node and trees over the nodes."""
    ring = gather(size, messages, local, nodes, abreast).times(2)
    if not trees or nodes == 1:
        return Traffic(ring=ring, tree=ring)
    tree = Route(
        intra_bytes=2 * size if local > 1 else 0.0,
        intra_hops=2 * messages * (local - 1),
        inter_bytes=2 * size * abreast,
        inter_hops=2 * messages * math.log2(nodes),
    )
    return Traffic(ring=ring, tree=tree)


@dataclass(frozen=True)
class Placed:
    """Workers that exchange, where nodes cut them apart: on one node, how many nodes, and how many such sets a node has."""

    local: int
    nodes: int
    abreast: int


def placed(work: Work, count: int, stride: int) -> Placed:
    """Where `count` workers are, each `stride` after the one before."""
    local = min(count, max(1, work.neighbours // stride))
    return Placed(local, math.ceil(count / local), work.neighbours // local)


def traffic_of(work: Work) -> Traffic:
    """What one step of `work` sends.

    ddp sums gradients once, in the last micro-batch. fsdp gathers parameters for every forward, and with reshard for every
    backward, and scatters gradients in the last; copies then sum their shards. ZeRO by DeepSpeed sums whole buckets in
    stages 1 (last micro-batch) and 2 (every one), and gathers parameters after the update; stage 3 gathers twice and
    scatters once in every micro-batch. Of a mesh every worker holds its part of the parameters, whose gradients are summed
    over groups and context; with a pipeline, fsdp gathers once a step.
    """
    if work.mesh is not None:
        return _traffic_of_mesh(work, work.mesh)
    gradients, weights = work.parameters * work.gradient_bytes, work.parameters * work.gather_bytes
    trees, messages, local = work.backend == "nccl", work.messages, min(work.shards, work.neighbours)
    everybody = all_reduce(gradients, messages, work.neighbours, work.nodes, trees=trees)
    gathered = gather(weights, messages, local, work.shards // local)
    # Gloo scatters by summing everywhere.
    scattered = gather(gradients, messages, local, work.shards // local).times(1 if trees else 2)
    match work.strategy, work.zero:
        case "single", _:
            return Traffic()
        case "ddp", _:
            return everybody
        case "fsdp", _:
            passes = (2 if work.reshard else 1) * work.micro_batches
            return replace(_between_copies(work, gradients, trees), gathers=gathered.times(passes) + scattered)
        case _, 3:
            return Traffic(gathers=(gathered.times(2) + scattered).times(work.micro_batches))
        case _, stage:
            sums = work.micro_batches if stage == 2 else 1
            return Traffic(gathered, everybody.ring.times(sums), everybody.tree.times(sums))


def _between_copies(work: Work, gradients: float, trees: bool) -> Traffic:
    """A hybrid's copies sum their shards: groups of workers that hold the same shard, side by side on every node."""
    abreast = min(work.shards, work.neighbours)
    local = work.neighbours // abreast
    nodes = work.workers // work.shards // local
    return all_reduce(gradients / work.shards, work.messages, local, nodes, trees=trees, abreast=abreast)


def _traffic_of_mesh(work: Work, mesh: WorkMesh) -> Traffic:
    """Between groups, of what a worker holds; and inside of a group."""
    trees, messages = work.backend == "nccl", math.ceil(work.messages * mesh.held)
    gradients = work.parameters * mesh.held * work.gradient_bytes
    if work.strategy == "fsdp":
        traffic = _fsdp_of_mesh(work, mesh, gradients, trees)
    else:
        alike = placed(work, work.groups * mesh.context, mesh.tensor)
        traffic = all_reduce(gradients, messages, alike.local, alike.nodes, trees=trees, abreast=alike.abreast)
    tokens = work.slots_per_micro_batch * work.tokens_per_slot
    sent = list(mesh.exchanges(tokens=tokens, micro_batches=work.micro_batches, recompute=work.recompute))
    for each in sent:
        route = _route(work, mesh, each)
        name = "passing" if each.hidden else "blocking"
        traffic = replace(traffic, **{name: getattr(traffic, name) + route})
    return traffic


def _fsdp_of_mesh(work: Work, mesh: WorkMesh, gradients: float, trees: bool) -> Traffic:
    """Sets of groups hold a copy in shards; workers along context, and then copies, sum theirs."""
    inside, messages = mesh.context * mesh.tensor, math.ceil(work.messages / mesh.pipeline)
    weights = work.parameters * mesh.held * work.gather_bytes
    sharing = placed(work, work.shards, inside)
    passes = 1 if mesh.pipeline > 1 else (2 if work.reshard else 1) * work.micro_batches
    gathered = gather(weights, messages, sharing.local, sharing.nodes, sharing.abreast).times(passes)
    scattered = gather(gradients, messages, sharing.local, sharing.nodes, sharing.abreast).times(1 if trees else 2)
    parts = []
    for count, stride in ((mesh.context, mesh.tensor), (work.groups // work.shards, inside * work.shards)):
        at = placed(work, count, stride)
        parts.append(all_reduce(gradients / work.shards, messages, at.local, at.nodes, trees=trees, abreast=at.abreast))
    return Traffic(gathered + scattered, parts[0].ring + parts[1].ring, parts[0].tree + parts[1].tree)


def _route(work: Work, mesh: WorkMesh, exchange: Exchange) -> Route:
    """The links that an exchange inside of a group takes."""
    inside = mesh.context * mesh.tensor
    count, stride = {
        "tensor": (mesh.tensor, 1),
        "context": (mesh.context, mesh.tensor),
        "pipeline": (mesh.pipeline, inside * work.groups),
    }[exchange.along]
    at = placed(work, count, stride)
    if exchange.kind == "pass":
        # The border that crosses nodes, where one does, holds up the others.
        if at.nodes > 1:
            return Route(inter_bytes=exchange.size * at.abreast, inter_hops=exchange.messages)
        return Route(intra_bytes=exchange.size, intra_hops=exchange.messages)
    # Hops are counted by message: the sizes are those of all messages together.
    once = gather(exchange.size, 1, at.local, at.nodes, at.abreast)
    hops = gather(0.0, 1, at.local, at.nodes).times(exchange.messages)
    route = replace(once, intra_hops=hops.intra_hops, inter_hops=hops.inter_hops)
    return route.times(2 if exchange.kind == "sum" else 1)


def hideable_of(work: Work) -> float:
    """The share of a worker's compute behind which it may send: the last backward under ddp, all of it where parameters
    are gathered too. A backward takes two forwards' time, and one more where activations are computed again."""
    if work.strategy in ("single", "ddp") or (work.strategy == "deepspeed" and work.zero == 1):
        return (3 / 4 if work.recompute else 2 / 3) / work.micro_batches
    return 1.0


def tail_of(work: Work) -> float:
    """The share of what is sent that nothing can hide: the last message, and parameters gathered after an update."""
    if work.strategy == "deepspeed" and work.zero < 3:
        sent = 2.0 * (work.micro_batches if work.zero == 2 else 1)
        return (sent / work.messages + 1) / (sent + 1)
    return 1 / work.messages


def slowest_of(workers: int) -> float:
    """The expected largest of so many standard normal numbers."""
    return NormalDist().inv_cdf((workers - 0.375) / (workers + 0.25))


def bubble_of(work: Work) -> float:
    """Time in which a worker of a pipeline has nothing to do, as a multiple of what it computes; 0 without a mesh."""
    if work.mesh is None:
        return 0.0
    # It fills and drains through stages of which most cost less than the one that sets the pace.
    return work.mesh.bubble(work.micro_batches, recompute=work.recompute) / work.mesh.busiest


@dataclass(frozen=True)
class Table:
    """What the formulas need of several works: arrays (works,) by name, and the works' groups."""

    groups: list[str]
    columns: Mapping[str, Array]

    def __getitem__(self, name: str) -> Array:
        return self.columns[name]


def terms_table(works: Sequence[Work]) -> Table:
    """Computes what the formulas need of each work."""
    rows = []
    for work in works:
        sent = traffic_of(work)
        rows.append(
            {
                **{f"{way} {name}": value for way, route in vars(sent).items() for name, value in vars(route).items()},
                "tokens": work.tokens_per_worker * work.effort * (work.mesh.busiest if work.mesh else 1.0),
                "bubble": bubble_of(work),
                "micro_batches": work.micro_batches,
                "others": work.neighbours - 1,
                "slowest": slowest_of(work.workers),
                "hideable": hideable_of(work),
                "tail": tail_of(work),
            }
        )
    columns = {name: np.array([row[name] for row in rows], dtype=float) for name in rows[0]}
    return Table([work.group for work in works], columns)


@dataclass(frozen=True)
class Parts:
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


def seconds_of(works: Table, values: Mapping[str, Array]) -> Parts:
    """Seconds of each work's step by the formulas above.

    `values` holds a column (draws, 1) for each unknown of `fit.PRIORS` and for `compute` of each group.
    """
    a_token = np.concatenate([values[f"compute {group}"] for group in works.groups], axis=1)
    compute = works["tokens"] * a_token * (1 + values["crowding"] * works["others"])
    sent = _sent(works, values, "gathers") + np.minimum(_sent(works, values, "ring"), _sent(works, values, "tree"))
    hidden = values["overlap"] * works["hideable"] * compute
    inside = _sent(works, values, "blocking") + np.maximum(_sent(works, values, "passing") - values["overlap"] * compute, 0)
    return Parts(
        compute=compute,
        waiting=compute * values["slowest"] * works["slowest"],
        exposed=np.maximum(sent - hidden, works["tail"] * sent) + inside,
        bubble=compute * works["bubble"],
        overhead=works["micro_batches"] * values["micro-batch"] + values["fixed"],
    )


def _sent(works: Table, values: Mapping[str, Array], way: str) -> Array:
    """Seconds of a route's bytes, which pass both kinds of link at once, and of its hops."""
    inside = works[f"{way} intra_bytes"] / values["intra bandwidth"]
    between = works[f"{way} inter_bytes"] / values["inter bandwidth"]
    hops = works[f"{way} intra_hops"] * values["intra latency"] + works[f"{way} inter_hops"] * values["inter latency"]
    return np.maximum(inside, between) + hops
