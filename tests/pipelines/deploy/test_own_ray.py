"""A Ray of one's own: Ray's words where it does not start, and an end that touches no other."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystride.pipelines.cluster.cluster import CannotRun
from raystride.pipelines.deploy.own_ray import MARK, OwnRay, address_towards, end_all, free_ports, signals_blocked
from raystride.pipelines.deploy.own_tls import AUTHORITY_VARIABLE, new_authority
from tests.cluster.in_the_clear import answers_in_the_clear

TOKEN = {"RAY_AUTH_MODE": "disabled"}


def _processes(ray: OwnRay) -> list[psutil.Process]:
    return [each for each in psutil.process_iter() if str(ray.folder) in _environment(each).get(MARK, "")]


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return dict(process.environ())
    except psutil.Error:
        return {}


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The temporary folders that are made during the test."""
    made: list[Path] = []
    make = tempfile.mkdtemp

    def make_and_note(*args: Any, **options: Any) -> str:
        made.append(Path(make(*args, **options)))
        return str(made[-1])

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_note)
    return made


@pytest.mark.long
def test_a_start_that_fails_says_why_in_rays_words_and_leaves_nothing(folders: list[Path]) -> None:
    with (
        pytest.raises(CannotRun, match=r"(?s)exit code 1 .*must be nonnegative") as raised,
        OwnRay.head(address_towards("127.0.0.1"), cpus=-5, environment=TOKEN),
    ):
        pass
    assert raised.value.host == socket.gethostname() in str(raised.value)
    assert [folder.exists() for folder in folders] == [False]


def test_a_certificate_that_cannot_be_written_is_told_in_one_line_and_leaves_nothing(folders: list[Path]) -> None:
    too_long = TOKEN | {AUTHORITY_VARIABLE: json.dumps({"x" * 300: ""})}
    with (
        pytest.raises(CannotRun, match=r"certificate .*File name too long") as raised,
        OwnRay.head(address_towards("127.0.0.1"), cpus=1, environment=too_long),
    ):
        pass
    assert raised.value.host == socket.gethostname() in str(raised.value)
    assert [folder.exists() for folder in folders] == [False]


@pytest.mark.weekly
@pytest.mark.long
def test_two_of_them_do_not_meet_and_survive_what_a_batch_system_sends_to_all() -> None:
    host = address_towards("127.0.0.1")
    with OwnRay.head(host, cpus=1, environment=TOKEN) as one:
        with OwnRay.head(host, cpus=1, environment=TOKEN | new_authority()) as two:
            assert one.address != two.address
            ports = [int(each.address.rpartition(":")[2]) for each in (one, two)]
            assert [answers_in_the_clear(host, port) for port in ports] == [True, False], "the second has TLS"
            assert AUTHORITY_VARIABLE not in {name for each in _processes(two) for name in _environment(each)}
            for process in _processes(one):
                process.send_signal(signal.SIGTERM)
            # Another process, as this one may have joined the cluster that tests share.
            program = f"import ray; ray.init('{one.address}'); print(ray.cluster_resources()['CPU'])"
            joined = subprocess.run([sys.executable, "-c", program], env=os.environ | TOKEN, capture_output=True, text=True)
            assert joined.stdout.strip() == "1.0", joined.stderr
            assert one.alive()
            assert two.alive()
        assert one.alive()
        assert not _processes(two)
        assert not two.folder.exists()
    assert not _processes(one)


def test_signals_are_held_back_from_what_is_started_and_not_from_this_process() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with signals_blocked():
        assert {signal.SIGTERM, signal.SIGUSR1} <= signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_nothing_is_ended_that_has_another_mark(tmp_path: Path) -> None:
    end_all(tmp_path)
    assert psutil.pid_exists(os.getpid())


@given(st.integers(1, 20))
def test_free_ports_are_different_ones(count: int) -> None:
    assert len(set(free_ports(count))) == count


def test_a_script_ends_what_carries_its_mark_and_nothing_else(tmp_path: Path) -> None:
    own = subprocess.Popen(["sleep", "600"], env={**os.environ, MARK: str(tmp_path)})
    other = subprocess.Popen(["sleep", "600"], env={**os.environ, MARK: f"{tmp_path}-other"})
    try:
        subprocess.run([sys.executable, "-m", "raystride.pipelines.deploy.own_ray", str(tmp_path)], check=True)
        assert own.wait() == -signal.SIGKILL
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
    assert not tmp_path.exists()
