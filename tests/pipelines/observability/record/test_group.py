"""The record does not grow with the number of workers and nodes."""

import json
from statistics import fmean
from typing import Any

import pytest

from raystride.pipelines.observability.record.entry import Entry, WorkerTime, new_entry
from raystride.pipelines.observability.record.group import BINS_PER_LENGTH, MAX_NODES, MAX_ROWS, Aggregator


def worker_entry(rank: int, own: float, world: int = 3, node: str = "a", step: int = 10) -> Entry:
    """Returns a worker's entry about ten steps that took a second."""
    values: WorkerTime = {
        "rank": rank, "world": world, "node": node, "steps": 10, "seconds": 1.0, "own_s": own, "data_s": 0.0,
    }  # fmt: skip
    return new_entry("rank", values, step)


def test_ranks_are_compared_when_all_have_told() -> None:
    group = Aggregator()
    for rank, own in ((0, 0.5), (2, 0.9)):
        assert group.ingest(worker_entry(rank, own))
        assert not group.drain()
        assert not group.figures()
    group.ingest(worker_entry(1, 0.6, node="b"))
    compared, times = group.drain()
    assert compared["step"] == times["step"] == 10
    assert compared["values"]["slowest_rank"] == 2
    assert compared["values"]["straggler_loss_share"] == pytest.approx(0.35)
    assert compared["values"]["waiting_share"] == pytest.approx(1 / 3)
    assert times["values"] == {"ranks": [0, 1, 2], "steps": 10, "own_s": [0.5, 0.6, 0.9]}
    assert group.figures()["slowest_node"] == "a"
    group.ingest(worker_entry(0, 0.5, world=2))  # the group was started anew, smaller
    assert not group.figures()


def test_a_bin_takes_ever_more_intervals_and_none_is_lost() -> None:
    group, intervals = Aggregator(), 5 * BINS_PER_LENGTH
    for number in range(intervals):
        for rank in range(2):
            group.ingest(worker_entry(rank, 0.5, world=2, step=10 * (number + 1)))
    bins = [entry["values"] for entry in group.flush() if entry["kind"] == "ranks"]
    assert len(bins) < 3 * BINS_PER_LENGTH
    assert sum(bin_values["steps"] for bin_values in bins) == 10 * intervals
    assert sum(bin_values["own_s"][1] for bin_values in bins) == pytest.approx(0.5 * intervals)


def test_many_workers_are_rows_of_the_slowest_of_neighbours() -> None:
    group = Aggregator()
    for rank in range(200):
        group.ingest(worker_entry(rank, 0.9 if rank == 7 else 0.5, world=200))
    (times,) = [entry["values"] for entry in group.drain() if entry["kind"] == "ranks"]
    assert len(times["ranks"]) <= MAX_ROWS
    assert times["ranks"][:3] == [0, 4, 8]
    assert times["own_s"][:3] == [0.5, 0.9, 0.5]


def node_entry(node: int, values: dict[str, float], sequence: int = 1) -> Entry:
    """Returns the entry of a node's sampler."""
    made: Any = new_entry("system", {f"system/node{node}/{name}": value for name, value in values.items()}, sequence)
    return made | {"sender": f"node{node}"}


def test_readings_of_up_to_eight_nodes_are_their_own() -> None:
    group = Aggregator()
    first = [node_entry(node, {"cpu": 1.0}) for node in range(MAX_NODES)]
    assert all(map(group.ingest, first))  # until it is known that there are no more
    assert not group.ingest(node_entry(0, {"cpu": 2.0}, sequence=2))
    assert group.drain() == first
    assert not any(group.ingest(node_entry(node, {"cpu": 2.0}, sequence=2)) for node in range(1, MAX_NODES))
    assert not group.ingest(new_entry("system", {"system/cpu": 1.0, "straggler_loss_share": 0.5}))
    assert not group.flush()


def test_readings_of_a_run_that_ends_in_its_first_round_are_kept() -> None:
    group = Aggregator()
    assert group.ingest(only := node_entry(0, {"cpu": 1.0}))
    assert group.flush() == [only]


def test_readings_of_more_nodes_become_least_mean_and_most() -> None:
    """From the first round on, and once per round although a worker samples its host and its GPUs separately."""
    group, entries = Aggregator(), list[Entry]()
    for sequence in (1, 2, 3):
        for node in range(20):
            assert group.ingest(node_entry(node, {"gpu_0_power": float(node), "gpu_1_power": 100.0 + sequence}, sequence))
            assert group.ingest(node_entry(node, {"cpu": 0.5}, sequence))
            entries += group.drain()
    entries += group.flush()
    assert len(entries) == 3
    for sequence, entry in enumerate(entries, 1):
        mean = fmean([*range(20), *[100.0 + sequence] * 20])
        powers = {"system/gpu_power_least": 0.0, "system/gpu_power_mean": mean, "system/gpu_power_most": 100.0 + sequence}
        assert entry["values"] == powers | {f"system/cpu_{name}": 0.5 for name in ("least", "mean", "most")}


def test_a_group_of_another_size_is_compared_by_its_own_times() -> None:
    """Groups of three sizes, one of them twice; ranks of one name are other workers."""
    group = Aggregator()
    for number, world in enumerate((2, 3, 2, 4)):
        own = Aggregator()
        for rank in range(world):
            for one in (group, own):
                one.ingest(worker_entry(rank, 0.5 + 0.1 * (rank == number % world), world=world, step=10 * (number + 1)))
        assert group.figures() == own.figures() != {}


@pytest.mark.parametrize("cut", [0, 3, 7, 12])
def test_bins_that_were_recorded_before_a_restart_are_not_recorded_again(cut: int) -> None:
    entries = [worker_entry(rank, 0.5, world=2, step=10 * (number + 1)) for number in range(6) for rank in (0, 1)]
    before = Aggregator()
    for entry in entries[:cut]:
        before.ingest(entry)
    saved = json.loads(json.dumps(before.to_json()))
    for recorded in range(cut // 2, 7):
        after = Aggregator.from_json(saved, recorded)
        for entry in entries[cut:]:
            after.ingest(entry)
        assert [entry["step"] for entry in after.drain() if entry["kind"] == "ranks"] == [
            10 * (number + 1) for number in range(recorded, 6)
        ]
