"""When a run grows and when it ends, with a recorder and starts that are made up; tests/faults has the real ones."""

import time
from collections.abc import Set
from dataclasses import replace
from random import Random
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystride.pipelines.launch.cluster import elastic
from raystride.pipelines.launch.cluster.elastic import (
    COMPARED_S,
    ElasticPolicy,
    GroupState,
    ResizeDecision,
    SlowNodeDetector,
    StartPlan,
    count_worker_slots,
    train_on_nodes,
)
from raystride.pipelines.launch.cluster.resources import Allocation

SHARE = Allocation(workers=4, device="cpu", threads=2, min_workers=1)
PLACES = ("one", "two")


class MadeUp:
    """A recorder whose group has `now` workers, and the starts that were made on it."""

    def __init__(self, now: int, *, stop_after: int = 99) -> None:
        self.now, self.stop_after, self.share = now, stop_after, SHARE
        self.resize, self.beats = False, 0
        self.excluded_nodes, self.drop_slower_than = frozenset[str](), 0.0
        self.starts: list[tuple[int, int]] = []
        self.told: list[str] = []
        self.warnings: list[str] = []

    def workers(self) -> int:
        return self.now

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def heartbeats(self) -> dict[int, Any]:
        """Two workers, on the nodes `one` and `two`."""
        self.beats += 1
        return {
            rank: SimpleNamespace(process=SimpleNamespace(node_id=name, node=name), own_s=self.beats * (1 + 9 * rank))
            for rank, name in enumerate(PLACES)
            if name not in self.excluded_nodes
        }

    def request_resize(self, text: str) -> None:
        self.resize = True
        self.told.append(text)

    def end_resize(self) -> bool:
        self.resize = False
        return len(self.starts) < self.stop_after

    def fit(self, start: StartPlan) -> dict[str, Any]:
        """Trains until it is asked to stop, at most half a second."""
        self.starts.append((start.max_workers, start.number))
        self.excluded_nodes = start.excluded_nodes
        if start.number:
            self.now = start.max_workers
        deadline = time.monotonic() + 0.5
        while not self.resize and time.monotonic() < deadline:
            time.sleep(0.01)
        return {"ending": "stopped" if self.resize else "done", "workers": self.now}

    def run(self) -> dict[str, Any]:
        return train_on_nodes(self.fit, self.share, self, 0.02, self.drop_slower_than)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def free(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, float]]:
    """What is free on the nodes of a cluster that is not there."""
    found: list[dict[str, float]] = []
    monkeypatch.setattr(elastic, "POLL_S", 0.01)
    monkeypatch.setattr(elastic, "list_alive_nodes", lambda: {"head"})
    monkeypatch.setattr(elastic, "refresh_node_view", lambda training, warn: None)
    monkeypatch.setattr(elastic, "cancel_lost_requests", lambda warn: None)
    monkeypatch.setattr(elastic, "draining_nodes", lambda warn: {})
    monkeypatch.setattr(elastic, "free_resources_by_node", lambda per_worker, warn, excluded_nodes: found)
    return found


def test_it_grows_by_as_many_as_find_a_place_and_never_over_the_share(free: list[dict[str, float]]) -> None:
    free += [{"CPU": 3.0}, {"CPU": 1.0}, {"GPU": 8.0}]
    run = MadeUp(now=2)
    assert run.run() == {"ending": "done", "workers": 4}
    # 2 + 1, and again 3 + 1; then the share is full.
    assert run.starts == [(4, 0), (3, 1), (4, 2)]


def test_a_users_stop_ends_it_also_while_it_grows(free: list[dict[str, float]]) -> None:
    free += [{"CPU": 8.0}]
    run = MadeUp(now=1, stop_after=1)
    assert run.run()["ending"] == "stopped"
    assert run.starts == [(4, 0)]


@pytest.mark.parametrize("now", [0, 4])
def test_no_room_is_looked_for_without_a_group_or_with_a_full_one(free: list[dict[str, float]], now: int) -> None:
    free += [{"CPU": 8.0}]
    run = MadeUp(now=now)
    assert run.run()["ending"] == "done"
    assert run.starts == [(4, 0)]


def test_a_worker_lies_on_one_node() -> None:
    assert count_worker_slots({"CPU": 2.0}, [{"CPU": 3.0}, {"CPU": 1.0}]) == 1
    assert count_worker_slots({"GPU": 1.0}, [{"CPU": 3.0, "GPU": 0.5}, {"CPU": 1.0, "GPU": 2.0}]) == 2
    assert count_worker_slots({"GPU": 1.0}, [{"CPU": 3.0}]) == 0


@pytest.mark.parametrize(("min_workers", "after"), [(0, 4), (1, 3)])
def test_it_leaves_a_node_that_is_about_to_be_taken_away_once(
    monkeypatch: pytest.MonkeyPatch, min_workers: int, after: int
) -> None:
    """And goes on with as many workers, for which it waits, or with those that have a place where it may have fewer."""
    monkeypatch.setattr(elastic, "draining_nodes", lambda warn: {"two": time.time() + 30, "elsewhere": 0.0})
    run = MadeUp(now=4)
    run.share = replace(SHARE, min_workers=min_workers)
    assert run.run() == {"ending": "done", "workers": after}
    assert run.starts == [(4, 0), (after, 1)]
    (told,) = run.told
    assert run.warnings == run.told
    assert "two in 30 s" in told or "two in 29 s" in told
    assert "elsewhere in" not in told


def test_nodes_that_go_one_after_another_are_all_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second group leaves the next one, and does not come back to the first."""
    run, asked = MadeUp(now=4), list[frozenset[str]]()

    def free_places(per_worker: object, warn: object, excluded: frozenset[str]) -> list[dict[str, float]]:
        asked.append(frozenset(excluded))
        return []

    monkeypatch.setattr(elastic, "draining_nodes", lambda warn: dict.fromkeys(PLACES[: len(run.starts)], 0.0))
    monkeypatch.setattr(elastic, "free_resources_by_node", free_places)
    assert run.run()["ending"] == "done"
    assert [number for _, number in run.starts] == [0, 1, 2]
    assert run.excluded_nodes == set(PLACES)
    assert [told.partition(": ")[2].partition(":")[0] for told in run.told] == list(PLACES)
    assert asked[-1] == set(PLACES)


@pytest.mark.parametrize("arrives", [False, True])
def test_a_request_that_fails_is_repeated_until_it_is_answered(monkeypatch: pytest.MonkeyPatch, arrives: bool) -> None:
    """The recorder starts again: the request never arrives, or its answer does not."""
    monkeypatch.setattr(elastic, "draining_nodes", lambda warn: {"two": time.time() + 30})
    run, request, failures = MadeUp(now=4), MadeUp.request_resize, iter([True, True])

    def fail_twice(self: MadeUp, text: str) -> None:
        if next(failures, False):
            self.resize |= arrives
            raise ConnectionError("the recorder is starting again")
        request(self, text)

    monkeypatch.setattr(MadeUp, "request_resize", fail_twice)
    assert run.run() == {"ending": "done", "workers": 3}
    assert [number for _, number in run.starts] == [0, 1]


def test_an_error_of_the_recorder_is_said_once_and_the_node_is_left_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "draining_nodes", lambda warn: {"two": time.time() + 30})
    run, count, failures = MadeUp(now=4), MadeUp.workers, iter([True, True, True])

    def workers(self: MadeUp) -> int:
        if next(failures, False):
            raise AttributeError("no such method")
        return count(self)

    monkeypatch.setattr(MadeUp, "workers", workers)
    assert run.run() == {"ending": "done", "workers": 3}
    assert run.warnings == ["node-watch: AttributeError: no such method; tried again", *run.told]
    assert len(run.told) == 1


def test_nobody_is_asked_to_leave_what_he_is_not_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "draining_nodes", lambda warn: {"three": 0.0})
    run = MadeUp(now=4)
    assert run.run()["ending"] == "done"
    assert run.starts == [(4, 0)]


@pytest.mark.parametrize(
    ("factor", "min_workers", "starts"),
    [(8.0, 1, [(4, 0), (3, 1)]), (12.0, 1, [(4, 0)]), (0.0, 1, [(4, 0)]), (8.0, 4, [(4, 0)])],
)
def test_it_leaves_a_node_that_holds_up_the_others_where_enough_remain(
    monkeypatch: pytest.MonkeyPatch, factor: float, min_workers: int, starts: list[tuple[int, int]]
) -> None:
    """`two` takes ten times what `one` does; one of its workers is known, so that three of the four remain."""
    monkeypatch.setattr(elastic, "COMPARED_S", 0.05)
    run = MadeUp(now=4)
    run.share, run.drop_slower_than = replace(SHARE, min_workers=min_workers), factor
    assert run.run()["ending"] == "done"
    assert run.starts == starts
    assert run.excluded_nodes == ({"two"} if len(starts) > 1 else set())
    assert all("two take 10.0 times" in told for told in run.told)


def test_nodes_that_go_are_left_with_as_many_workers_as_fit_elsewhere_within_the_bounds() -> None:
    """Two workers on `two`, which goes; by what is free elsewhere, the least and the most workers."""
    beats = {rank: SimpleNamespace(process=SimpleNamespace(node_id=name, node=name)) for rank, name in enumerate(PLACES * 2)}
    policy = ElasticPolicy(replace(SHARE, min_workers=3), drop_slower_than=0.0)
    for free, workers in ((0, 3), (1, 3), (2, 4), (9, 4)):
        state = GroupState(4, beats, {"two": 0.0}, lambda excluded, free=free: free if excluded == {"two"} else 99)  # type: ignore[misc, arg-type]
        decision = policy.leave_draining_nodes(state)
        assert decision == ResizeDecision(workers, "to be taken away: two: saving, to go on elsewhere", frozenset({"two"}))
    assert policy.leave_draining_nodes(replace(state, workers=0)) is None
    assert policy.leave_draining_nodes(replace(state, draining={"three": 0.0})) is None


def test_of_two_nodes_that_go_both_are_left_each_by_its_own_time() -> None:
    """One has two workers and half a minute, another none and is not to get one, a third one worker and ten seconds."""
    names = ("one", "two", "two", "three")
    beats = {
        rank: SimpleNamespace(process=SimpleNamespace(node_id=name, node=f"{name}'s")) for rank, name in enumerate(names)
    }
    draining = {"two": time.time() + 30.4, "idle": 0.0, "three": time.time() + 10.4}
    asked: list[frozenset[str]] = []

    def count_free_slots(excluded: Set[str]) -> int:
        asked.append(frozenset(excluded))
        return 1

    state = GroupState(4, beats, draining, count_free_slots)  # type: ignore[arg-type]
    decision = ElasticPolicy(replace(SHARE, min_workers=1), drop_slower_than=0.0).leave_draining_nodes(state)
    reason = "to be taken away: two's in 30 s, three's in 10 s: saving, to go on elsewhere"
    assert decision == ResizeDecision(2, reason, frozenset(draining))
    assert asked == [frozenset(draining)]


@given(
    st.dictionaries(st.sampled_from("abcd"), st.lists(st.floats(0.5, 50), min_size=1, max_size=3)),
    st.randoms(use_true_random=False),
)
def test_a_node_is_as_slow_as_the_slowest_of_its_workers(seconds: dict[str, list[float]], order: Random) -> None:
    workers = [(node, own) for node, times in seconds.items() for own in times]
    order.shuffle(workers)

    def beats(share: float) -> dict[int, Any]:
        there = ((SimpleNamespace(pid=1, node_id=node), own * share) for node, own in workers)
        return {rank: SimpleNamespace(process=process, own_s=own) for rank, (process, own) in enumerate(there)}

    slow = SlowNodeDetector(2.0)
    assert slow.detect(beats(0.0), 0) is None
    found = slow.detect(beats(1.0), COMPARED_S + 1)
    slowest = {node: max(times) for node, times in seconds.items()}
    ratios = {
        node: own / median(other for name, other in slowest.items() if name != node)
        for node, own in slowest.items()
        if len(slowest) > 1
    }
    if found is None:
        assert all(ratios[node] <= 2 for node in ratios if slowest[node] == max(slowest.values()))
    else:
        assert found[1] == ratios[found[0]] > 2
        assert slowest[found[0]] == max(slowest.values())


def test_own_times_are_compared_over_the_same_processes_alone() -> None:
    def beats(seconds: float, pid: int = 1) -> dict[int, Any]:
        there = (SimpleNamespace(pid=pid, node_id=name) for name in PLACES)
        return {rank: SimpleNamespace(process=each, own_s=seconds * (1 + 3 * rank)) for rank, each in enumerate(there)}

    slow = SlowNodeDetector(2.0)
    assert slow.detect(beats(1), 0) is None
    assert slow.detect(beats(2), COMPARED_S - 1) is None
    assert slow.detect(beats(3), COMPARED_S + 1) == ("two", 4.0)
    assert slow.detect(beats(1, pid=2), 3 * COMPARED_S) is None  # another group
    assert slow.detect(beats(1, pid=2), 5 * COMPARED_S) is None  # which has done nothing since
    assert slow.detect({0: beats(9)[0]}, 9 * COMPARED_S) is None
    assert slow.detect({0: beats(12)[0]}, 12 * COMPARED_S) is None  # nobody to compare with
