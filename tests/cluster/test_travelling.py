"""Nodes without Raystride and without a disk in common: it comes with the job, and what it makes goes to object storage."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.cluster.hosts import unable
from tests.cluster.ray_hosts import PYTHON, RayHosts
from tests.end_to_end.installed import make_site
from tests.storage import KEYS, make_bucket, uri
from tests.tiny import write_text

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(unable()), reason=f"no hosts here: {unable()}"),
]


def _without_raystride(folder: Path) -> Path:
    """A Python that has what this one has, but for Raystride."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    # A folder that is named in such a file is searched, and the files of this kind in it are not: ours is installed by one.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = folder / "bin" / "python"
    subprocess.run([str(python), "-c", "import ray, torch"], check=True)
    found = subprocess.run([str(python), "-c", "import raystride"], cwd="/", capture_output=True, check=False)
    assert b"ModuleNotFoundError" in found.stderr
    return python


@pytest.mark.weekly
def test_a_job_brings_raystride_to_nodes_that_have_its_dependencies_alone(tmp_path: Path) -> None:
    write_text(tmp_path)
    (tmp_path / "job").mkdir()
    make_site(tmp_path / "job", tmp_path)
    (tmp_path / "job" / "settings.yaml").write_text(
        "model: {layers: 1, heads: 2, hidden_size: 16, context: 16}\ntokenizer: {kind: bytes}\nscaling: {workers: 2}\n"
        "train: {steps: 10, slots: 2, slot_size: 2}\nsample: {tokens: 0}\nrecord: {mlflow: false}\n"
        f"data: {{kind: text, source: {tmp_path / 'text.txt'}, validation: tail, validation_fraction: 0.1}}\n"
    )
    cluster = RayHosts(tmp_path, 2, others=1, python=_without_raystride(tmp_path / "bare"))
    cluster.variables |= KEYS | {"AWS_EC2_METADATA_DISABLED": "true"}
    with cluster:
        user = cluster.hosts[2]
        # Not rclone's, which refuses the empty objects by which pyarrow makes folders for Ray Train.
        server = user.start(str(PYTHON), "-m", "moto.server", "-H", user.address, "-p", "9000", log=tmp_path / "moto.log")
        make_bucket(9000, server, user.address)
        place = ["--storage", uri(f"http://{user.address}:9000", "runs")]
        submit = [str(PYTHON.with_name("ray")), "job", "submit", f"--address={cluster.address}"]
        job = ["python", "-m", "raystride", "train", "--config", "settings.yaml", "--run", "brought", *place]
        code, said = cluster.run(user, *submit, "--working-dir", str(tmp_path / "job"), "--", *job)
        assert code == 0, said
        code, said = cluster.run(user, str(PYTHON), "-m", "raystride", "runs", "audit", "brought", *place)
        assert code == 0, said
        assert "in 10 steps" in said
