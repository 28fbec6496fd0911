"""Signals reach every training of the process, in whichever thread it is."""

import os
import signal
import threading
import time

import pytest

from raystride.pipelines.launch.session import stop_signals
from raystride.pipelines.signals import Terminated
from tests.waiting import wait_until


def _end_this_process() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)  # Python runs handlers between two of its own instructions


def test_a_signal_stops_those_in_other_threads_too_and_a_second_one_ends() -> None:
    before = signal.getsignal(signal.SIGTERM)
    asked: list[str] = []
    inside, leave, told = threading.Event(), threading.Event(), []

    def other() -> None:
        with stop_signals(lambda: asked.append("other")) as heard:
            inside.set()
            leave.wait(60)
            told.extend(heard)

    with stop_signals(lambda: asked.append("main")) as heard:
        thread = threading.Thread(target=other)
        thread.start()
        assert inside.wait(60)
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: len(asked) == 2, "the requests to stop")
        assert heard == ["SIGTERM"]
        with pytest.raises(Terminated, match="asked twice"):
            _end_this_process()
        leave.set()
        thread.join()
    assert sorted(asked) == ["main", "other"]
    assert told == ["SIGTERM"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stop_signals(lambda: None) as heard:
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            os.kill(os.getpid(), signal.SIGINT)
        assert heard == []
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_thread_by_itself_sets_no_handler() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []

    def other() -> None:
        with stop_signals(lambda: None):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [before]
