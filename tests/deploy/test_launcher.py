"""Ray's cluster launcher runs the files that `raystride deploy launcher` writes, on two machines reached by ssh."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from raystride.command import run as run_command
from tests.deploy.ssh import SshHosts, ssh_skip_reason
from tests.tiny import write_text

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(bool(ssh_skip_reason()), reason=f"no machines by ssh here: {ssh_skip_reason()}"),
]
TINY = {
    "data": {"kind": "text", "validation": "tail", "validation_fraction": 0.1},
    "tokenizer": {"kind": "bytes"},
    "model": {"layers": 2, "heads": 2, "hidden_size": 16, "context": 16},
    "optimizer": {"schedule": "constant", "learning_rate": 1e-3, "warmup_steps": 2},
    "train": {"steps": 20, "slots": 4, "slot_size": 2, "log_every": 5},
    "validation": {"every": 0},
    "record": {"mlflow": False},
    "sample": {"tokens": 0},
}


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[SshHosts]:
    with SshHosts(tmp_path, 2) as running:
        yield running


def _write_job(machines: SshHosts) -> Path:
    folder = machines.folder
    (folder / "runs").mkdir()
    cloud = {"provider": "local", "hosts": machines.addresses, "ssh_user": "root", "ssh_key": str(machines.key)}
    place = {"nodes": 2, "cpus_per_node": 1, "memory_gib": 4, "storage": str(folder / "runs"), "shared": True}
    (folder / "place.yaml").write_text(yaml.safe_dump({**place, "cloud": {**cloud, "python": sys.prefix}}))
    (folder / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    written = folder / "written"
    flags = f"--nodes 2 --place {folder / 'place.yaml'} --output {written} --config {folder / 'tiny.yaml'} --run tiny"
    flags += f" --data.source {write_text(folder / 'runs')} --scaling.workers 2"
    assert run_command(["deploy", "launcher", *flags.split()]) == 0
    return written


def _run_ray(machines: SshHosts, *arguments: str) -> str:
    """Runs a Ray command in the written folder, with the test's own home and temporary files. Returns its output."""
    home = machines.folder / "home"
    home.mkdir(exist_ok=True)
    environment = os.environ | {"HOME": str(home), "TMPDIR": str(machines.folder), "RAY_TMPDIR": str(machines.folder)}
    command = [f"{sys.prefix}/bin/ray", *arguments]
    folder = machines.folder / "written"
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=500)
    assert not done.returncode, f"{command}:\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.weekly
def test_two_machines_train_together_and_nothing_is_left_on_them(machines: SshHosts) -> None:
    before = {*Path("/tmp").glob("ray_ssh_*/*")}
    _write_job(machines)
    _run_ray(machines, "get-auth-token", "--generate")
    try:
        _run_ray(machines, "up", "--yes", "cluster.yaml")
        _run_ray(machines, "exec", "cluster.yaml", "bash ~/raystride-job/job.sh")
        ended = json.loads((machines.folder / "runs" / "tiny" / "summary.json").read_text())
        assert (ended["status"], ended["steps"], ended["workers"]) == ("finished", 20, 2), "each machine has one processor"
    finally:
        _run_ray(machines, "exec", "cluster.yaml", "bash ~/raystride-job/stop.sh")
        _run_ray(machines, "down", "--yes", "cluster.yaml")
        # Ray leaves a folder for each cluster's connections, beside those of other clusters.
        for left in {*Path("/tmp").glob("ray_ssh_*/*")} - before:
            shutil.rmtree(left)
    for host in machines.hosts.all:
        running = host.run("ps", "-e", "-o", "comm").stdout.split()
        assert not {"raylet", "gcs_server"} & set(running)
