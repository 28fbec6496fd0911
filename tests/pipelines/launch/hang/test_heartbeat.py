"""Heartbeats that nobody answers."""

import threading
from types import SimpleNamespace

import pytest

from raystride.pipelines.launch.hang import heartbeat
from raystride.pipelines.launch.hang.heartbeat import DriverUnreachable, Heartbeat, HeartbeatSender
from raystride.pipelines.train.worker.job import WorkerInfo
from tests.waiting import wait_until


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that advances a second per heartbeat, with a lease of three seconds."""
    made = SimpleNamespace(now=0.0)
    monkeypatch.setattr(heartbeat, "LEASE_S", 3.0)
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


def _cut_off_after(answers: list[Exception | None], clock: SimpleNamespace) -> int:
    """Returns the number of answers after which the lease expires; 0 if it does not."""
    told, ended = [], threading.Event()
    cut_off: list[int] = []

    def tell(beat: Heartbeat) -> None:
        clock.now += 1
        told.append(beat)
        if len(told) >= len(answers):
            ended.set()
        if error := answers[min(len(told), len(answers)) - 1]:
            raise error

    sender = HeartbeatSender(tell, WorkerInfo(), "node", 0.001, lambda: cut_off.append(len(told)))
    ended.wait()
    sender.end()
    return cut_off[0] if cut_off else 0


def test_a_worker_of_which_nothing_is_heard_is_cut_off(clock: SimpleNamespace) -> None:
    assert (
        _cut_off_after([None, *[DriverUnreachable("no answer")] * 9], clock) == 5
    )  # more than three seconds after the first


def test_an_error_is_said_once_and_the_worker_that_ends_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[Heartbeat] = []

    def tell(beat: Heartbeat) -> None:
        told.append(beat)
        if len(told) < 4:
            raise AttributeError("no such method")

    sender = HeartbeatSender(tell, WorkerInfo(), "node", 0.001)
    wait_until(lambda: len(told) > 4, "heartbeats after the error")
    sender.end()
    wait_until(lambda: told[-1].current_phase == heartbeat.ENDED, "the last heartbeat")
    assert [beat.number for beat in told] == list(range(1, len(told) + 1))
    assert capsys.readouterr().err == "warning: heartbeats: AttributeError: no such method; tried again\n"


def test_one_that_is_answered_now_and_then_is_not(clock: SimpleNamespace) -> None:
    """An error is an answer too: the recorder is dead, and not out of reach."""
    unanswered = [DriverUnreachable("no answer")] * 3
    assert _cut_off_after([*unanswered, None, *unanswered, RuntimeError("the recorder died"), *unanswered, None], clock) == 0
