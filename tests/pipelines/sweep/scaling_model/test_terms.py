"""The formulas against simulated collectives, and against the traffic of the strategies."""

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystride.pipelines.sweep.scaling_model import TrialError
from raystride.pipelines.sweep.scaling_model.terms import (
    Traffic,
    all_gather_route,
    all_reduce_traffic,
    expected_maximum,
    overlap_fraction,
    step_traffic,
    tail_fraction,
)
from tests.pipelines.sweep.scaling_model.synthetic import LARGE, SMALL, TRUTH, seconds, step_parts

sizes = st.integers(1, 6)


def simulate_ring(local: int, nodes: int, size: float) -> tuple[Counter[str], Counter[str]]:
    """Simulates an all-gather around a ring that passes each node once; returns the most bytes of a link and its rounds, by
    kind."""
    workers = local * nodes
    held = [{rank} for rank in range(workers)]
    carried: Counter[tuple[str, int]] = Counter()
    rounds = 0
    while any(len(chunks) < workers for chunks in held):
        sent = [(rank, (rank - rounds) % workers) for rank in range(workers)]
        for rank, chunk in sent:
            assert chunk in held[rank]
            held[(rank + 1) % workers].add(chunk)
            crosses = rank // local != (rank + 1) % workers // local
            carried["inter" if crosses else "intra", rank] += 1
        rounds += 1
    most: Counter[str] = Counter()
    for (kind, _), chunks in carried.items():
        most[kind] = max(most[kind], chunks)
    bytes_by_kind = Counter({kind: chunks * size / workers for kind, chunks in most.items()})
    return bytes_by_kind, Counter(rounds=rounds)


@given(local=sizes, nodes=sizes)
def test_all_gather_matches_a_simulated_ring(local: int, nodes: int) -> None:
    carried, counted = simulate_ring(local, nodes, size=1e6)
    route = all_gather_route(1e6, 1, local, nodes)
    assert route.intra_bytes == pytest.approx(carried["intra"])
    assert route.inter_bytes == pytest.approx(carried["inter"])
    assert route.intra_hops + route.inter_hops == counted["rounds"]


@given(local=sizes, nodes=sizes, messages=st.integers(1, 9))
def test_a_sum_is_a_scatter_and_a_gather(local: int, nodes: int, messages: int) -> None:
    assert all_reduce_traffic(1e6, messages, local, nodes, trees=False).ring == all_gather_route(
        1e6, messages, local, nodes
    ).repeat(2)


def test_trees_have_few_hops_and_rings_fewer_bytes() -> None:
    sent = all_reduce_traffic(1e6, 1, 8, 512, trees=True)
    assert sent.tree.inter_hops == 18
    assert sent.ring.inter_hops == 1024
    assert sent.ring.inter_bytes < sent.tree.inter_bytes


def test_the_faster_of_ring_and_tree_is_taken() -> None:
    work = replace(SMALL, workers=4096, slots=4096)
    far, near = TRUTH | {"inter latency": 1e-2}, TRUTH | {"inter latency": 1e-9, "intra latency": 1e-9}
    rings = replace(work, backend="gloo")
    assert seconds(work, far) < 0.1 * seconds(rings, far)
    assert seconds(work, near) == pytest.approx(seconds(rings, near), rel=0.01)


def test_fsdp_gathers_in_every_micro_batch_and_scatters_once() -> None:
    work = replace(LARGE, strategy="fsdp", workers=8, slots=24)
    one = all_gather_route(4e9, work.messages, 8, 1)
    assert step_traffic(work).gathers.intra_bytes == pytest.approx(7 * one.intra_bytes)
    assert step_traffic(replace(work, reshard=False)).gathers.intra_bytes == pytest.approx(4 * one.intra_bytes)
    assert step_traffic(replace(work, gather_bytes=2)).gathers.intra_bytes == pytest.approx(4 * one.intra_bytes)
    assert step_traffic(replace(work, backend="gloo")).gathers.intra_bytes == pytest.approx(8 * one.intra_bytes)


def test_a_hybrid_sends_only_sums_of_shards_between_nodes() -> None:
    whole = replace(LARGE, strategy="fsdp", workers=32, slots=32)
    hybrid = replace(whole, shard_workers=8)
    sent = step_traffic(hybrid)
    assert sent.gathers.inter_bytes == 0
    assert sent.ring.inter_bytes == pytest.approx(2 * 3 / 4 * 4e9)
    assert sent.ring.inter_bytes < step_traffic(whole).gathers.inter_bytes
    assert step_traffic(hybrid.scale_to(1, 1)) == Traffic()
    assert hybrid.scale_to(64, 8).shard_workers == 8


def test_zero_traffic_depends_on_the_stage() -> None:
    ddp = replace(LARGE, workers=8, slots=32)
    first, second, third = (step_traffic(replace(ddp, strategy="deepspeed", zero=stage)) for stage in (1, 2, 3))
    sum_once = step_traffic(ddp).ring
    assert first.ring == sum_once
    assert second.ring == sum_once.repeat(4)
    assert first.gathers == second.gathers == all_gather_route(4e9, LARGE.messages, 8, 1)
    assert third.ring.intra_bytes == 0
    assert third.gathers.intra_bytes == pytest.approx(12 * first.gathers.intra_bytes)


@given(st.sampled_from(["ddp", "fsdp", "deepspeed"]), st.integers(1, 3), st.integers(1, 4), st.booleans())
def test_one_worker_sends_nothing(strategy: str, zero: int, slots: int, reshard: bool) -> None:
    work = replace(LARGE, strategy=strategy, zero=zero, slots=slots, reshard=reshard)
    assert step_traffic(work) == step_traffic(replace(work, strategy="single"))
    assert seconds(work, TRUTH) == seconds(replace(work, strategy="single"), TRUTH)


@given(
    st.sampled_from(["ddp", "fsdp", "deepspeed"]),
    st.sampled_from(sorted(name for name in TRUTH if name != "overlap")),
    st.sampled_from([1, 2, 8, 64, 512]),
    st.floats(1.01, 10),
)
def test_a_worse_cluster_is_never_faster(strategy: str, name: str, workers: int, factor: float) -> None:
    work = replace(LARGE, strategy=strategy, workers=workers, slots=2 * workers)
    worse = TRUTH | {name: TRUTH[name] / factor if "bandwidth" in name else TRUTH[name] * factor}
    assert seconds(work, worse) >= seconds(work, TRUTH) or math.isclose(seconds(work, worse), seconds(work, TRUTH))


def test_something_is_always_exposed() -> None:
    """However much is hidden, the last message is not."""
    work = replace(LARGE, workers=2, slots=2)
    sent = 4e9 / TRUTH["intra bandwidth"] + 2 * work.messages * TRUTH["intra latency"]
    assert step_parts(work, TRUTH | {"overlap": 1.0}).exposed[0, 0] == pytest.approx(tail_fraction(work) * sent)


def test_the_slowest_of_many_is_slower() -> None:
    """Blom's approximation against the mean of draws."""
    assert expected_maximum(1) == 0
    assert all(few < many for few, many in pairwise(map(expected_maximum, (1, 2, 8, 64, 512, 4096))))
    drawn = np.random.default_rng(0).standard_normal((20_000, 64)).max(axis=1).mean()
    assert expected_maximum(64) == pytest.approx(drawn, rel=0.01)


def test_the_busiest_worker_counts() -> None:
    work = replace(SMALL, workers=3, workers_per_node=4, slots=8, tokens_per_slot=10, slots_per_micro_batch=2)
    assert (work.tokens_per_worker, work.micro_batches, work.nodes, work.local_workers) == (30, 2, 1, 3)
    larger = work.scale_to(8, 4)
    assert (larger.slots, larger.tokens_per_worker, larger.nodes) == (24, 30, 2)
    assert work.scale_to(1, 1).group == work.group


@pytest.mark.parametrize(
    ("change", "name", "value", "allowed"),
    [
        ({"workers": 0}, "workers", 0, "at least 1"),
        ({"workers": 12, "slots": 12}, "workers", 12, "workers_per_node, 8"),
        ({"workers": 2}, "workers", 2, "slots, 1"),
        ({"workers": 8, "slots": 8, "shard_workers": 3}, "shard_workers", 3, "workers, 8"),
    ],
)
def test_impossible_work_is_named(change: dict[str, int], name: str, value: int, allowed: str) -> None:
    with pytest.raises(TrialError, match=f"^{name} is {value}: .*{allowed}") as raised:
        replace(SMALL, **change)
    assert (raised.value.name, raised.value.value) == (name, value)


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ({}, 2 / 3),
        ({"recompute": True}, 3 / 4),
        ({"recompute": True, "slots": 6}, 1 / 8),
        ({"strategy": "deepspeed", "zero": 1}, 2 / 3),
        ({"strategy": "deepspeed", "zero": 2}, 1.0),
        ({"strategy": "fsdp", "recompute": True}, 1.0),
    ],
    ids=str,
)
def test_ddp_sends_behind_its_last_backward_and_shards_behind_all(changes: dict[str, Any], share: float) -> None:
    """A forward takes 1, its backward 2, and computing the forward once more another 1: 2 of 3, or 3 of 4."""
    assert overlap_fraction(replace(SMALL, **changes)) == pytest.approx(share)
