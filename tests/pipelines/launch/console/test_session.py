"""Signals reach every training of the process, in any thread."""

import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raystride.pipelines.config import Config, DataConfig
from raystride.pipelines.launch.console import session
from raystride.pipelines.launch.console.failure import TrainingFailed
from raystride.pipelines.launch.console.screen import Screen
from raystride.pipelines.launch.console.session import SessionHooks, Watcher, stop_signals
from raystride.pipelines.observability.record.entry import new_entry
from raystride.pipelines.observability.record.journal import Journal
from raystride.pipelines.observability.record.state import TrainingState
from raystride.pipelines.observability.record.summary import RunSummary, read_summary
from raystride.pipelines.system.signals import Terminated
from raystride.pipelines.system.storage.folder import Folder
from tests.waiting import wait_until


def _end_this_process() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)  # Python runs handlers between two of its own instructions


def test_a_signal_stops_those_in_other_threads_too_and_a_second_one_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "SAME_SIGNAL_S", 0.0)
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_ignored_signal_stays_ignored(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with stop_signals(lambda: None) as heard:
            assert signal.getsignal(number) is signal.SIG_IGN
            os.kill(os.getpid(), number)
        assert heard == []
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_signals_within_a_second_are_one_request() -> None:
    asked: list[str] = []
    with stop_signals(lambda: asked.append("main")) as heard:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(os.getpid(), number)
        wait_until(lambda: asked, "the request to stop")
    assert heard == ["SIGTERM"]
    assert asked == ["main"]


def test_a_request_that_fails_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "STOP_RETRY_S", 0.001)
    asked: list[str] = []

    def request_stop() -> None:
        asked.append("main")
        if len(asked) < 3:
            raise ConnectionError("the recorder starts again")

    with stop_signals(request_stop) as heard:
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: len(asked) == 3, "the request to stop")
    assert heard == ["SIGTERM"]


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


def test_a_stop_request_is_repeated_so_that_a_recorder_that_starts_again_hears_of_it() -> None:
    class Restarting:
        """A recorder that dies after each of the first two requests and forgets them."""

        requests = 0
        stopped = threading.Event()

        def state(self) -> TrainingState:
            return {"step": 1}

        def request_stop(self) -> None:
            self.requests += 1
            if self.requests > 2:
                self.stopped.set()

    recorder: Any = Restarting()

    def train() -> RunSummary:
        recorder.stopped.wait()
        return {"status": "stopped"}

    outcome = session._train_and_watch(train, recorder, SessionHooks(Screen(), Watcher()), "training", ["SIGTERM"])
    assert outcome == {"status": "stopped"}


def test_the_driver_closes_the_record_of_a_recorder_that_died(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It died with its node; the summary and the page were never written."""
    folder = Folder(str(tmp_path / "run"))
    entry = new_entry("metrics", {"train_loss": 2.5}, 300) | {"attempt": "a1", "sender": "r", "sequence": 1}
    Journal(folder, "a1").append([entry])

    class Dead:
        def __getattr__(self, name: str) -> Any:
            raise ConnectionError("the recorder's node has crashed")

    job: Any = SimpleNamespace(folder=folder, run="run", config=Config(data=DataConfig(source="text.txt")))
    with pytest.raises(TrainingFailed):
        session._finish_session(job, Dead(), Screen(), RuntimeError("a worker died"))  # type: ignore[arg-type]
    summary = read_summary(folder)
    assert (summary["status"], summary["steps"], summary["train_loss"]) == ("failed", 300, 2.5)
    assert folder.exists("report.html")
    assert folder.exists("metrics.jsonl")
    assert "results" in capsys.readouterr().out


def test_a_recorder_that_does_not_answer_is_said_once_an_outage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(session, "POLL_S", 0.001)
    answered = threading.Event()
    outcomes = iter([False, False, True, False, False, True])

    class Failing:
        """A recorder with two outages of two polls each."""

        def state(self) -> TrainingState:
            if (outcome := next(outcomes, None)) is False:
                raise AttributeError("no such method")
            if outcome is None:
                answered.set()
            return {"step": 1}

        def request_stop(self) -> None: ...

    recorder: Any = Failing()

    def train() -> RunSummary:
        answered.wait()
        return {"status": "finished"}

    outcome = session._train_and_watch(train, recorder, SessionHooks(Screen(), Watcher()), "training", [])
    assert outcome == {"status": "finished"}
    line = "warning: the recorder does not answer, and training goes on: AttributeError: no such method\n"
    assert capsys.readouterr().err == 2 * line
