"""A hang is ended although the recorder could not be asked for a while, and that is said."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from raystride.pipelines.launch.hang import detector
from raystride.pipelines.launch.hang.detector import Hung
from raystride.pipelines.launch.hang.heartbeat import Heartbeat
from raystride.pipelines.launch.hang.process import Process, process_start_ticks
from raystride.pipelines.launch.hang.watch import HangWatch
from raystride.pipelines.observability.record.sender import Entry, Receipt
from raystride.pipelines.system.storage.folder import Folder
from tests.children import find_children, stop
from tests.receipts import accept


class FailingRecorder:
    """A recorder whose heartbeats cannot be read three times."""

    def __init__(self, beat: Heartbeat) -> None:
        self.beat, self.failures = beat, 3
        self.warnings: list[str] = []

    def heartbeats(self) -> dict[int, Heartbeat]:
        if self.failures:
            self.failures -= 1
            raise AttributeError("no such method")
        return {0: self.beat}

    def post(self, sender: str, entries: list[Entry], recorder: str, urgent: bool) -> Receipt:
        return accept(sender, entries, recorder)

    def warn(self, text: str) -> None:
        self.warnings.append(text)


@pytest.fixture
def stopped_tables(ray_cluster: None) -> Iterator[None]:
    """Ray's server of tables, which answers nothing for the time of a test."""
    (server,) = find_children(os.getpid(), r"^\S*gcs_server ")
    stop(server.pid)
    yield
    server.resume()


@pytest.mark.usefixtures("stopped_tables")
def test_a_hang_on_the_drivers_node_is_ended_after_an_error_of_the_recorder_though_ray_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.setattr(detector, "FIRST_STEPS_S", 0.2)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"]) as hanging:
        process = Process(
            rank=0,
            world=1,
            node="here",
            node_id=ray.get_runtime_context().get_node_id(),
            pid=hanging.pid,
            started=process_start_ticks(hanging.pid) or 0,
        )
        beat = Heartbeat(process=process, number=1, current_phase="step", progress_mark=0.0, step_s=0.0)
        recorder = FailingRecorder(beat)
        watch = HangWatch(recorder, Folder(str(tmp_path)), 0.2)
        try:
            assert hanging.wait() == -signal.SIGKILL
        finally:
            watch.end()
            hanging.kill()
    assert isinstance(watch.cause(RuntimeError("the worker died")), Hung)
    assert recorder.warnings == ["hang-watch: AttributeError: no such method; tried again"]
