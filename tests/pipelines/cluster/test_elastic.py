"""When a run grows and when it ends, with a recorder and starts that are made up; tests/faults has the real ones."""

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from raystride.pipelines.cluster import elastic
from raystride.pipelines.cluster.elastic import places, train_on_nodes
from raystride.pipelines.cluster.resources import Share

SHARE = Share(workers=4, device="cpu", threads=2, least=1)
PLACES = ("one", "two")


class MadeUp:
    """A recorder whose group has `now` workers, and the starts that were made on it."""

    def __init__(self, now: int, *, stop_after: int = 99) -> None:
        self.now, self.stop_after, self.share = now, stop_after, SHARE
        self.resize = False
        self.starts: list[tuple[int, int]] = []
        self.told: list[str] = []

    def workers(self) -> int:
        return self.now

    def warn(self, text: str) -> None:
        raise AssertionError(text)

    def heartbeats(self) -> dict[int, Any]:
        """Two workers, on the nodes `one` and `two`."""
        return {rank: SimpleNamespace(process=SimpleNamespace(node_id=name, node=name)) for rank, name in enumerate(PLACES)}

    def request_resize(self, text: str) -> None:
        self.resize = True
        self.told.append(text)

    def end_resize(self) -> bool:
        self.resize = False
        return len(self.starts) < self.stop_after

    def fit(self, most: int, number: int) -> dict[str, Any]:
        """Trains until it is asked to stop, at most half a second."""
        self.starts.append((most, number))
        if number:
            self.now = most
        deadline = time.monotonic() + 0.5
        while not self.resize and time.monotonic() < deadline:
            time.sleep(0.01)
        return {"ending": "stopped" if self.resize else "done", "workers": self.now}

    def run(self) -> dict[str, Any]:
        return train_on_nodes(self.fit, self.share, self, 0.02)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def free(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, float]]:
    """What is free on the nodes of a cluster that is not there."""
    found: list[dict[str, float]] = []
    monkeypatch.setattr(elastic, "LOOK_S", 0.01)
    monkeypatch.setattr(elastic, "alive_nodes", lambda: {"head"})
    monkeypatch.setattr(elastic, "tell_of_nodes", lambda training, warn: None)
    monkeypatch.setattr(elastic, "leaving_nodes", lambda warn: {})
    monkeypatch.setattr(elastic, "free_by_node", lambda per_worker, warn: found)
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
    assert places({"CPU": 2.0}, [{"CPU": 3.0}, {"CPU": 1.0}]) == 1
    assert places({"GPU": 1.0}, [{"CPU": 3.0, "GPU": 0.5}, {"CPU": 1.0, "GPU": 2.0}]) == 2
    assert places({"GPU": 1.0}, [{"CPU": 3.0}]) == 0


@pytest.mark.parametrize("least", [0, 1])
def test_it_leaves_a_node_that_is_about_to_be_taken_away_once(monkeypatch: pytest.MonkeyPatch, least: int) -> None:
    """And goes on with as many workers, whether it may have fewer or not."""
    monkeypatch.setattr(elastic, "leaving_nodes", lambda warn: {"two": time.time() + 30, "elsewhere": 0.0})
    run = MadeUp(now=4)
    run.share = replace(SHARE, least=least)
    assert run.run() == {"ending": "done", "workers": 4}
    assert run.starts == [(4, 0), (4, 1)]
    (told,) = run.told
    assert "two in 30 s" in told or "two in 29 s" in told
    assert "elsewhere in" not in told


def test_nobody_is_asked_to_leave_what_he_is_not_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "leaving_nodes", lambda warn: {"three": 0.0})
    run = MadeUp(now=4)
    assert run.run()["ending"] == "done"
    assert run.starts == [(4, 0)]
