"""A step's time from what is computed and sent: the formulas, with their sources.

Work of the busiest worker, seconds:

    compute   = tokens x (seconds a token) x (1 + crowding x other workers on the node)
    waiting   = compute x slowest x E(workers)
    exposed   = max(sent - overlap x what it may hide behind, tail x sent)
    sent      = bytes / bandwidth + hops x latency, on the links inside a node and on those between nodes
    overhead  = micro-batches x (seconds a micro-batch) + seconds a step

E(n) is the expected largest of n standard normal numbers, by Blom's approximation (1958): a group waits for its slowest.

Bytes and hops of a collective over n workers of b bytes (Thakur, Rabenseifner and Gropp, 2005; Patarasuk and Yuan, 2009):
a ring's all-gather or reduce-scatter sends (n - 1)/n b in n - 1 hops, its all-reduce both. A double binary tree (Sanders,
Speck and Träff, 2009; in NCCL since 2.4) sends 2 b in 2 log2(n) hops. Over several nodes a collective is taken to be done
inside the nodes and then between them, where a node's workers share its bandwidth, by the faster of ring and tree.

    traffic = traffic_of(work)
    parts = seconds_of(table([work, ...]), quantities)          # arrays, draws x works
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from pipelines.sweep.observation import Work

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Traffic:
    """What a step sends. Inside a node bytes are a worker's, between nodes those of all workers of a node."""

    intra_bytes: float = 0.0
    intra_hops: float = 0.0
    inter_bytes: float = 0.0
    """By gathers and scatters, which only go around rings."""
    inter_hops: float = 0.0
    ring_bytes: float = 0.0
    """By all-reduces between nodes, if these go around rings ..."""
    ring_hops: float = 0.0
    tree_bytes: float = 0.0
    """... and if along trees."""
    tree_hops: float = 0.0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(*(getattr(self, item.name) + getattr(other, item.name) for item in fields(self)))

    def times(self, count: float) -> "Traffic":
        """As often as that."""
        return Traffic(*(count * getattr(self, item.name) for item in fields(self)))


def gather(size: float, messages: int, local: int, nodes: int, abreast: int = 1) -> Traffic:
    """An all-gather or a reduce-scatter of `size` bytes in all, in so many messages, over `nodes` with `local` workers each.

    `abreast`: groups that do the same at once, and share a node's link.
    """
    return Traffic(
        intra_bytes=(local - 1) / local * size,
        intra_hops=messages * (local - 1),
        inter_bytes=(nodes - 1) / nodes * size * abreast,
        inter_hops=messages * (nodes - 1),
    )


def all_reduce(size: float, messages: int, local: int, nodes: int, *, trees: bool, abreast: int = 1) -> Traffic:
    """An all-reduce of `size` bytes: reduce-scatter in the nodes, all-reduce between them, all-gather in the nodes."""
    one_way = gather(size, messages, local, nodes, abreast)
    ring_bytes, ring_hops = 2 * one_way.inter_bytes, 2 * one_way.inter_hops
    by_tree = trees and nodes > 1
    return Traffic(
        intra_bytes=2 * one_way.intra_bytes,
        intra_hops=2 * one_way.intra_hops,
        ring_bytes=ring_bytes,
        ring_hops=ring_hops,
        tree_bytes=2 * size * abreast if by_tree else ring_bytes,
        tree_hops=2 * messages * math.log2(nodes) if by_tree else ring_hops,
    )


def traffic_of(work: Work) -> Traffic:
    """What one step of `work` sends.

    ddp sums gradients once, in the last micro-batch. fsdp gathers parameters for every forward, and with reshard for every
    backward, and scatters gradients in the last; copies then sum their shards. ZeRO by DeepSpeed sums whole buckets in
    stages 1 (last micro-batch) and 2 (every one), and gathers parameters after the update; stage 3 gathers twice and
    scatters once in every micro-batch.
    """
    gradients, weights = work.parameters * work.gradient_bytes, work.parameters * work.gather_bytes
    trees, messages, local = work.backend == "nccl", work.messages, min(work.shards, work.neighbours)
    everybody = all_reduce(gradients, messages, work.neighbours, work.nodes, trees=trees)
    match work.strategy, work.zero:
        case "single", _:
            return Traffic()
        case "ddp", _:
            return everybody
        case "fsdp", _:
            of_weights = gather(weights, messages, local, work.shards // local)
            passes = (2 if work.reshard else 1) * work.micro_batches
            sent = of_weights.times(passes) + gather(gradients, messages, local, work.shards // local)
            return sent + _between_copies(work, gradients, trees)
        case _, 3:
            whole = gather(weights, messages, work.neighbours, work.nodes).times(2)
            return (whole + gather(gradients, messages, work.neighbours, work.nodes)).times(work.micro_batches)
        case _, stage:
            passes = work.micro_batches if stage == 2 else 1
            return everybody.times(passes) + gather(weights, messages, work.neighbours, work.nodes)


def _between_copies(work: Work, gradients: float, trees: bool) -> Traffic:
    """A hybrid's copies sum their shards: groups of workers that hold the same shard, side by side on every node."""
    copies = work.workers // work.shards
    if copies == 1:
        return Traffic()
    abreast = min(work.shards, work.neighbours)
    local = work.neighbours // abreast
    each = gradients / work.shards
    return all_reduce(each, work.messages, local, copies // local, trees=trees, abreast=abreast)


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


@dataclass(frozen=True)
class Table:
    """Several works as columns."""

    groups: list[str]
    columns: Mapping[str, Array]

    def __getitem__(self, name: str) -> Array:
        return self.columns[name]


def table(works: Sequence[Work]) -> Table:
    """What the formulas need of each."""
    rows = [
        {
            **vars(traffic_of(work)),
            "tokens": work.tokens_per_worker,
            "micro_batches": work.micro_batches,
            "others": work.neighbours - 1,
            "slowest": slowest_of(work.workers),
            "hideable": hideable_of(work),
            "tail": tail_of(work),
        }
        for work in works
    ]
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

    @property
    def total(self) -> Array:
        """Without data."""
        return self.compute + self.waiting + self.exposed + self.overhead


def seconds_of(works: Table, values: Mapping[str, Array]) -> Parts:
    """The formulas above; `values` holds columns of draws, by the names in `quantities`."""
    a_token = np.concatenate([values[f"compute {group}"] for group in works.groups], axis=1)
    compute = works["tokens"] * a_token * (1 + values["crowding"] * works["others"])
    a_byte, a_hop = 1 / values["inter bandwidth"], values["inter latency"]
    by_ring = works["ring_bytes"] * a_byte + works["ring_hops"] * a_hop
    by_tree = works["tree_bytes"] * a_byte + works["tree_hops"] * a_hop
    inside = works["intra_bytes"] / values["intra bandwidth"] + works["intra_hops"] * values["intra latency"]
    sent = inside + works["inter_bytes"] * a_byte + works["inter_hops"] * a_hop + np.minimum(by_ring, by_tree)
    hidden = values["overlap"] * works["hideable"] * compute
    return Parts(
        compute=compute,
        waiting=compute * values["slowest"] * works["slowest"],
        exposed=np.maximum(sent - hidden, works["tail"] * sent),
        overhead=works["micro_batches"] * values["micro-batch"] + values["fixed"],
    )
