"""Private Ray nodes: errors carry Ray's own output, and the end of a node touches no other."""

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

from raystride.pipelines.launch.cluster.cluster import CannotRun
from raystride.pipelines.launch.deploy.own_ray import (
    AUTHORITY_VARIABLE,
    MARK_VARIABLE,
    RayNode,
    address_towards,
    block_stop_signals,
    kill_marked_processes,
    make_authority,
    reserve_ports,
)
from tests.cluster.in_the_clear import answers_in_the_clear

TOKEN = {"RAY_AUTH_MODE": "disabled"}


def _find_processes(ray: RayNode) -> list[psutil.Process]:
    return [each for each in psutil.process_iter() if str(ray.folder) in _read_environment(each).get(MARK_VARIABLE, "")]


def _read_environment(process: psutil.Process) -> dict[str, str]:
    try:
        return dict(process.environ())
    except psutil.Error:
        return {}


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The temporary folders that the test makes."""
    made: list[Path] = []
    make_folder = tempfile.mkdtemp

    def make_recorded_folder(*args: Any, **options: Any) -> str:
        made.append(Path(make_folder(*args, **options)))
        return str(made[-1])

    monkeypatch.setattr(tempfile, "mkdtemp", make_recorded_folder)
    return made


@pytest.mark.long
def test_a_failed_start_reports_rays_output_and_leaves_nothing(folders: list[Path]) -> None:
    with (
        pytest.raises(CannotRun, match=r"(?s)exit code 1 .*must be nonnegative") as raised,
        RayNode.start_head(address_towards("127.0.0.1"), cpus=-5, environment=TOKEN),
    ):
        pass
    assert raised.value.host == socket.gethostname() in str(raised.value)
    assert [folder.exists() for folder in folders] == [False]


def test_a_failed_certificate_is_reported_in_one_line_and_leaves_nothing(folders: list[Path]) -> None:
    too_long = TOKEN | {AUTHORITY_VARIABLE: json.dumps({"x" * 300: ""})}
    with (
        pytest.raises(CannotRun, match=r"certificate .*File name too long") as raised,
        RayNode.start_head(address_towards("127.0.0.1"), cpus=1, environment=too_long),
    ):
        pass
    assert raised.value.host == socket.gethostname() in str(raised.value)
    assert [folder.exists() for folder in folders] == [False]


@pytest.mark.weekly
@pytest.mark.long
def test_two_clusters_are_isolated_and_survive_the_signals_of_a_batch_system() -> None:
    host = address_towards("127.0.0.1")
    with RayNode.start_head(host, cpus=1, environment=TOKEN) as one:
        with RayNode.start_head(host, cpus=1, environment=TOKEN | make_authority()) as two:
            assert one.address != two.address
            ports = [int(each.address.rpartition(":")[2]) for each in (one, two)]
            assert [answers_in_the_clear(host, port) for port in ports] == [True, False], "the second has TLS"
            assert AUTHORITY_VARIABLE not in {name for each in _find_processes(two) for name in _read_environment(each)}
            for process in _find_processes(one):
                process.send_signal(signal.SIGTERM)
            # Another process, as this one may have joined the cluster that tests share.
            program = f"import ray; ray.init('{one.address}'); print(ray.cluster_resources()['CPU'])"
            joined = subprocess.run([sys.executable, "-c", program], env=os.environ | TOKEN, capture_output=True, text=True)
            assert joined.stdout.strip() == "1.0", joined.stderr
            assert one.is_alive()
            assert two.is_alive()
        assert one.is_alive()
        assert not _find_processes(two)
        assert not two.folder.exists()
    assert not _find_processes(one)


def test_signals_are_blocked_in_the_block_and_restored_afterwards() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with block_stop_signals():
        assert {signal.SIGTERM, signal.SIGUSR1} <= signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_unmarked_processes_are_not_killed(tmp_path: Path) -> None:
    kill_marked_processes(tmp_path)
    assert psutil.pid_exists(os.getpid())


def test_only_servers_that_know_a_reserved_port_can_bind_it() -> None:
    with reserve_ports(20, "127.0.0.1") as ports, socket.socket() as server, socket.socket() as other:
        assert len({*ports}) == 20
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", ports[0]))
        server.listen()
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", ports[1]))


def test_a_script_kills_only_the_processes_with_its_mark(tmp_path: Path) -> None:
    own = subprocess.Popen(["sleep", "600"], env={**os.environ, MARK_VARIABLE: str(tmp_path)})
    other = subprocess.Popen(["sleep", "600"], env={**os.environ, MARK_VARIABLE: f"{tmp_path}-other"})
    try:
        subprocess.run([sys.executable, "-m", "raystride.pipelines.launch.deploy.own_ray", str(tmp_path)], check=True)
        assert own.wait() == -signal.SIGKILL
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
    assert not tmp_path.exists()
