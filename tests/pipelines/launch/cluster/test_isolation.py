"""A driver is isolated if its head's host is silent and so are all workers elsewhere, and in no other case."""

import contextlib
import itertools
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from raystride.pipelines.launch.cluster import isolation
from raystride.pipelines.launch.cluster.isolation import HeadLost, HeadWatch, IsolationWatcher
from raystride.pipelines.launch.hang.heartbeat import ENDED, Heartbeat
from raystride.pipelines.launch.hang.process import Process
from tests.ports import hold_port
from tests.waiting import wait_until

Address = tuple[str, int]


@pytest.fixture(scope="module")
def nobody() -> Iterator[Address]:
    """An address that does not answer: what listens there has taken as many connections as it may."""
    with socket.socket() as full, contextlib.ExitStack() as callers:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):
            caller = callers.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(full.getsockname())
        yield full.getsockname()


def _beat(rank: int, node_id: str, number: int = 1, current_phase: str = "step") -> Heartbeat:
    process = Process(rank=rank, world=2, node=node_id, node_id=node_id, pid=1, started=1)
    return Heartbeat(process=process, number=number, current_phase=current_phase, progress_mark=0.0, step_s=0.0)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks often, and loses patience soon."""
    for name, seconds in (("POLL_S", 0.01), ("ISOLATED_S", 0.3), ("CONNECT_TIMEOUT_S", 0.1)):
        monkeypatch.setattr(isolation, name, seconds)


@contextlib.contextmanager
def _watching(
    heartbeats: Callable[[], dict[int, Heartbeat]], head: Address, log: Callable[[str], None] = pytest.fail
) -> Iterator[list[str]]:
    """Yields the reasons that are told."""
    told: list[str] = []
    with IsolationWatcher(heartbeats, "here", told.append, log, head=head):
        yield told


def test_silence_of_all_others_is_isolation_told_once(nobody: Address) -> None:
    with _watching(lambda: {0: _beat(0, "here"), 1: _beat(1, "there")}, nobody) as told:
        wait_until(lambda: told, "isolation")
    assert len(told) == 1
    assert "neither the head nor any worker on another host" in told[0]


@pytest.mark.parametrize("failing", [range(1, 5), range(2, 10**9)])
def test_heartbeats_that_cannot_be_read_are_said_once_and_isolation_is_told(failing: range, nobody: Address) -> None:
    """They come again, or were read before."""
    looks = itertools.count(1)
    said: list[str] = []

    def heartbeats() -> dict[int, Heartbeat]:
        if next(looks) in failing:
            raise AttributeError("no such method")
        return {1: _beat(1, "there")}

    with _watching(heartbeats, nobody, said.append) as told:
        wait_until(lambda: told, "isolation")
    assert len(told) == 1
    assert said == ["isolation: AttributeError: no such method; tried again"]


def _looks(least: int, make: Callable[[int], dict[int, Heartbeat]], head: Address) -> list[str]:
    """Has the watch look so often, each time at what is made of the look's number; what it has told."""
    looks = 0

    def heartbeats() -> dict[int, Heartbeat]:
        nonlocal looks
        looks += 1
        return make(looks)

    with _watching(heartbeats, head) as told:
        wait_until(lambda: looks >= least or told, "looks")
    return told


def test_a_worker_elsewhere_that_is_heard_is_company_enough(nobody: Address) -> None:
    assert not _looks(12, lambda look: {0: _beat(0, "here"), 1: _beat(1, "there", number=look)}, nobody)


def test_workers_of_this_host_alone_and_those_that_have_ended_need_no_head(nobody: Address) -> None:
    assert not _looks(12, lambda look: {0: _beat(0, "here"), 1: replace(_beat(1, "there"), current_phase=ENDED)}, nobody)
    assert not _looks(12, lambda look: {}, nobody)


@pytest.mark.parametrize("listens", [True, False])
def test_a_head_whose_host_answers_may_start_again(listens: bool) -> None:
    beats = {1: _beat(1, "there")}
    if listens:
        with socket.create_server(("127.0.0.1", 0), backlog=1000) as head:
            assert not _looks(60, lambda look: beats, head.getsockname())
    else:
        with hold_port() as port:
            assert not _looks(60, lambda look: beats, ("127.0.0.1", port))


def test_a_head_that_has_ended_is_noticed_behind_refusals_in_a_row() -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = head.getsockname()
        watch = HeadWatch(address)
        for _ in range(3 * isolation.MAX_REFUSALS):
            watch._due = 0.0
            watch.check()
    with pytest.raises(HeadLost, match=f"nobody answers at 127.0.0.1:{address[1]}"):
        wait_until(watch.check, "the end of the head")
    assert watch._refusals == isolation.MAX_REFUSALS
