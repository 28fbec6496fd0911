"""A training on this machine alone opens no port to others: neither Ray's processes nor the workers' groups do."""

import ipaddress
import os
import shutil
import signal
import time
from collections.abc import Iterator
from itertools import filterfalse
from pathlib import Path

import psutil
import pytest

from raystride.pipelines.config import CheckpointConfig, Config, LaunchConfig, ScalingConfig, TrainConfig, ValidationConfig
from tests.ray_jobs.jobs import finish_job, start_job, wait_for_checkpoint
from tests.tiny import tiny, write_text

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for Ray's own files, by whose short name its processes are known."""
    (folder := Path("/tmp") / f"rs-{os.getpid()}-{time.monotonic_ns() % 10**6}").mkdir()
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def _config(tmp_path: Path, **changes: object) -> Config:
    return tiny(
        write_text(tmp_path),
        storage=str(tmp_path / "runs"),
        train=TrainConfig(steps=1_000_000, slots=4, slot_size=2, log_every=100),
        validation=ValidationConfig(every=0, samples=1),
        checkpoint=CheckpointConfig(every=20),
        scaling=ScalingConfig(workers=2),
        launch=LaunchConfig(**changes),  # type: ignore[arg-type]
    )


def _listening(pid: int, temporary: Path) -> dict[str, set[str]]:
    """Addresses at which the processes of a job listen, by what they are: its children and whoever has its folder's name."""
    found: dict[str, set[str]] = {}
    ours = {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            if process.pid not in ours and not any(str(temporary) in word for word in words):
                continue
            name = next((part for part in KINDS if part in " ".join(words)), words[0] if words else "?")
            ports = [each for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN]
        except psutil.Error:
            continue  # it has ended
        found.setdefault(name, set()).update(f"{each.laddr.ip} {each.laddr.port}" for each in ports)
    return found


KINDS = ("gcs_server", "raylet/raylet", "DashboardAgent", "RuntimeEnvAgent", "RayTrainWorker")


def _is_loopback(port: str) -> bool:
    address = ipaddress.ip_address(port.split()[0])
    return ((isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped) or address).is_loopback


@pytest.mark.parametrize("lean", [True, pytest.param(False, marks=pytest.mark.weekly)])
def test_a_job_on_this_machine_listens_on_loopback_alone(lean: bool, tmp_path: Path, temporary: Path) -> None:
    config = _config(tmp_path, fast_start=lean)
    home = tmp_path / "home"
    home.mkdir()
    job = start_job("train", config, "--run", "closed", env={"RAY_TMPDIR": str(temporary), "HOME": str(home)})
    try:
        wait_for_checkpoint(config, "closed", 20, job)
        found = _listening(job.pid, temporary)
        token = home / ".ray" / "auth_token"
        assert token.stat().st_mode & 0o777 == 0o600
        assert token.parent.stat().st_mode & 0o777 == 0o700
        meetings = [path for path in Path("/tmp").glob("raystride-meeting-*") if path.stat().st_mode & 0o077]
        assert not meetings, "the folder in which workers meet is their user's alone"
    finally:
        job.send_signal(signal.SIGTERM)
        outcome = finish_job(job)
    assert outcome.code == 128 + signal.SIGTERM, outcome.err[-3000:]
    assert "warning" not in outcome.err
    assert all(found.get(kind) for kind in KINDS), found
    assert sum(map(len, found.values())) > 8
    assert not {name: others for name, ports in found.items() if (others := set(filterfalse(_is_loopback, ports)))}
