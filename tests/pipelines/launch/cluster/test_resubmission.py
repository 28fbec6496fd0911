"""Which jobs are submitted again, and under which name; tests/cluster has real ones."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystride.pipelines.config import LaunchConfig
from raystride.pipelines.launch.cluster import resubmission
from raystride.pipelines.launch.cluster.resubmission import (
    ResubmissionActor,
    arrange_resubmission,
    is_driver_lost,
    next_job_name,
    resubmission_number,
)
from raystride.pipelines.launch.console.screen import Screen
from tests.ports import hold_port
from tests.waiting import wait_until


@given(st.text(max_size=20), st.integers(1, 20))
def test_names_tell_how_often_it_was(name: str, max_resubmissions: int) -> None:
    before = resubmission_number(name)
    names = [name]
    for _ in range(max_resubmissions):
        names.append(next_job_name(names[-1]))
    assert resubmission_number(names[-1]) == before + max_resubmissions
    assert len(set(names)) == max_resubmissions + 1


@pytest.mark.parametrize(
    ("error_type", "exit_code", "lost"),
    [
        ("JOB_SUPERVISOR_ACTOR_DIED", None, True),
        ("JOB_ENTRYPOINT_COMMAND_ERROR", -9, True),
        ("JOB_ENTRYPOINT_COMMAND_ERROR", 137, True),
        ("JOB_ENTRYPOINT_COMMAND_ERROR", 1, False),
        ("JOB_ENTRYPOINT_COMMAND_ERROR", 3, False),
        ("RUNTIME_ENV_SETUP_FAILURE", None, False),
        (None, None, False),
    ],
)
def test_a_job_that_could_say_how_it_ended_was_not_lost(error_type: str | None, exit_code: int | None, lost: bool) -> None:
    assert is_driver_lost(error_type, exit_code) is lost


class Dashboard(BaseHTTPRequestHandler):
    """Answers questions for a job with the statuses of a list, the last of them for ever."""

    statuses: ClassVar[list[int]] = []
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        """Answers as Ray's dashboard does, as far as its client needs it."""
        about = {"version": "4", "ray_version": version("ray"), "ray_commit": ""}
        self.asked.append(self.path)
        is_job = self.path.startswith("/api/jobs/")
        status = (self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]) if is_job else 200
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps({} if is_job else about).encode())

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def _poll_to_the_end(dashboard: str) -> None:
    ended = threading.Event()
    ResubmissionActor(dashboard, "raysubmit_gone", ended.set)
    wait_until(ended.is_set, "the end of the polling")


@pytest.mark.parametrize(("statuses", "looks"), [([404], 3), ([401], 3), ([404, 500, 404, 404, 503, 404], 8)])
def test_a_job_that_was_deleted_is_not_looked_at_for_ever(
    statuses: list[int], looks: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resubmission, "POLL_S", 0.0)
    monkeypatch.setattr(Dashboard, "statuses", list(statuses))
    monkeypatch.setattr(Dashboard, "asked", [])
    with ThreadingHTTPServer(("127.0.0.1", 0), Dashboard) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        _poll_to_the_end(f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    (message,) = caplog.messages
    assert message.startswith("job raysubmit_gone: ")
    assert len([path for path in Dashboard.asked if path.startswith("/api/jobs/")]) == looks


def test_a_head_that_never_answers_is_not_asked_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resubmission, "POLL_S", 0.0)
    monkeypatch.setattr(resubmission, "MAX_SILENCE_S", 0.5)
    with hold_port() as port:
        _poll_to_the_end(f"http://127.0.0.1:{port}")


def test_nobody_can_submit_a_job_again_that_was_not_submitted(capsys: pytest.CaptureFixture[str]) -> None:
    arrange_resubmission(LaunchConfig(), "http://dashboard", Screen().warn)
    assert capsys.readouterr().err == ""
    for dashboard in (None, "http://dashboard"):
        arrange_resubmission(LaunchConfig(max_resubmissions=1), dashboard, Screen().warn)
        assert "launch.max_resubmissions has no effect" in capsys.readouterr().err
