"""Images and Compose files are valid; on a machine with podman they are built and run, and a run survives a lost node."""

import json
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from raystride.command import run as run_command
from raystride.pipelines.launch.deploy.own_ray import reserve_ports
from raystride.pipelines.launch.deploy.render import write_files
from tests.deploy.containers import Engine, find_missing, read_pip_settings
from tests.deploy.faults import find_faults
from tests.deploy.rendering import find_entry_point, render_for
from tests.ray_jobs.jobs import ROOT

BESIDES_TORCH = 1.5e9
"""Bytes that an image for CPUs may have besides PyTorch."""
SETTINGS = {
    "task": "images",
    "data": {"source": "digits", "validation_fraction": 0.2},
    "model": {"channels": [16, 32, 64], "hidden": [512, 128]},
    "train": {"steps": 60, "slots": 4, "slot_size": 256, "exact": True},
    "checkpoint": {"every": 5},
    "validation": {"every": 60},
    "run": "digits",
}
ELASTIC = {"scaling": {"workers": 2, "min_workers": 1}, "launch": {"max_restarts": 3}}
SMALL = {"nodes": 2, "cpus_per_node": 1, "memory_gib": 3, "storage": "/storage/runs", "shared": True}
"""A place with one CPU in each container, so that no container has two workers of a run."""
GPUS = {"nodes": 4, "gpus_per_node": 8, "cpus_per_node": 64, "memory_gib": 512, "storage": "/storage/runs", "shared": True}


def _mark_long(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test as long: a slow machine takes minutes for the image alone."""
    return pytest.mark.long(pytest.mark.timeout(1500)(test))


def _write_files(folder: Path, *flags: str) -> dict[str, str]:
    """Runs `raystride deploy compose`. Returns the texts of the written files by path."""
    assert run_command(["deploy", "compose", *flags, "--output", str(folder)]) == 0
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.skipif(shutil.which("hadolint", path=str(Path(sys.executable).parent)) is None, reason="no hadolint here")
def test_the_dockerfile_passes_hadolint() -> None:
    program = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([program, ROOT / "deploy" / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.skipif(
    shutil.which("docker") is None or subprocess.run(["docker", "compose", "version"], capture_output=True).returncode != 0,
    reason="no Docker Compose here",
)
def test_docker_compose_accepts_the_files(tmp_path: Path) -> None:
    write_files(render_for("compose", "this_machine", nodes=1, preset="lm_python"), tmp_path, overwrite=False)
    drive = {"NFS_SERVER": "10.0.0.5", "NFS_FOLDER": "/exports/runs"}
    command = ["docker", "compose", "--file", "compose.yaml"]
    subprocess.run([*command, "config", "--quiet"], cwd=tmp_path, check=True)
    command += ["--file", "network_drive.yaml", "config", "--quiet"]
    subprocess.run(command, cwd=tmp_path, check=True, env=os.environ | drive)


@pytest.mark.parametrize("nodes", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("gpus", [0, 2])
def test_compose_files_are_valid(tmp_path: Path, nodes: int, gpus: int) -> None:
    (tmp_path / "place.yaml").write_text(yaml.safe_dump(GPUS))
    place = ["--place", str(tmp_path / "place.yaml"), "--gpus-per-node", str(gpus)] if gpus else []
    files = _write_files(tmp_path / "out", "--config", "lm_python", "--train.slots", "8", "--nodes", str(nodes), *place)
    assert not find_faults("compose", files)
    tree = yaml.safe_load(files["compose.yaml"])
    workers = [service for name, service in tree["services"].items() if name.startswith("worker")]
    assert sum(worker.get("scale", 1) for worker in workers) == nodes
    taken = [worker["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for worker in workers if gpus]
    assert len({gpu for ids in taken for gpu in ids}) == nodes * gpus
    done = subprocess.run(
        [sys.executable, "-m", "podman_compose", "config"], cwd=tmp_path / "out", capture_output=True, text=True
    )
    assert done.returncode == 0 or "podman" in done.stderr.splitlines()[-1], done.stderr


def test_secrets_are_generated_once_into_a_private_folder(tmp_path: Path) -> None:
    _write_files(tmp_path, "--config", "lm_python")
    subprocess.run(["sh", "secrets.sh"], cwd=tmp_path, check=True)
    drawn = {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()}
    assert [len(drawn[name]) for name in ("database_password", "ray_token")] == [64, 64]
    assert len(set(drawn.values())) == 2
    assert stat.S_IMODE((tmp_path / "secrets").stat().st_mode) == 0o700
    subprocess.run(["sh", "secrets.sh"], cwd=tmp_path, check=True)
    assert {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()} == drawn


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """podman and buildah; afterwards all is removed but the images of Debian and PostgreSQL."""
    if absent := find_missing():
        pytest.skip(f"not here: {absent}; .ci/tools brings them")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "raystride-tests" / "containers"
    engine = Engine(cache)
    engine.remove_containers()
    try:
        yield engine
    finally:
        engine.remove_containers()
        assert engine.find_leftovers() == []


@pytest.fixture(scope="module")
def image(engine: Engine) -> str:
    """The image for CPUs."""
    return engine.build_raystride()


@pytest.mark.weekly
@_mark_long
def test_the_image_is_small_and_its_user_is_not_root(engine: Engine, image: str) -> None:
    def inside(script: str) -> str:
        return engine.run("podman", "run", "--rm", "--network", "none", "--entrypoint", "sh", image, "-c", script).strip()

    about = json.loads(engine.run("podman", "inspect", image))[0]
    torch = int(inside("du -sb /opt/raystride/lib/python3*/site-packages/torch | cut -f1"))
    print(f"{about['Size'] / 1e6:.0f} MB, {torch / 1e6:.0f} MB of them PyTorch")
    assert about["Size"] - torch < BESIDES_TORCH
    assert about["User"] == "10001:10001"
    assert about["Healthcheck"]["Test"] == ["CMD", "ray", "health-check"]
    assert about["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert inside("id -u; command -v gcc cc clang g++ || true; ls /checkout /wheel 2> /dev/null || true") == "10001"
    settings, _ = read_pip_settings()
    told = {line.partition(" = ")[2] for line in settings.splitlines()[1:] if line.startswith(("find", "index", "extra"))}
    words = "\n".join([*(word for value in told for word in value.split()), "BEGIN PRIVATE KEY PLACEHOLDER"])
    found = inside(
        f"find /opt/raystride /etc /home /tmp /var /root -type f -size -512k -exec grep -lF '{words}' {{}} + || true"
    )
    assert found == ""
    assert not [word for word in words.splitlines() if word in json.dumps(about)]


@pytest.mark.weekly
@_mark_long
def test_the_entry_point_of_a_rayjob_trains_in_the_image_with_the_rights_of_a_pod(
    engine: Engine, image: str, tmp_path: Path
) -> None:
    """Has a read-only root file system, as the pods do; the job starts Ray's head itself."""
    short = SETTINGS | {"train": {"steps": 2, "slots": 4, "slot_size": 64}, "scaling": {"workers": 2}}
    files = render_for("kuberay", "kubernetes", preset=short, run="digits", mlflow_uri="sqlite:////runs/mlflow.db")
    command, contents = find_entry_point(files)
    (settings,) = contents.values()
    (tmp_path / "settings.yaml").write_text(settings)
    places = {name: tmp_path / name for name in ("runs", "tmp", "home")}
    for place in places.values():
        place.mkdir()
        place.chmod(0o777)
    mounted = ["--volume", f"{tmp_path / 'settings.yaml'}:{next(iter(contents))}:ro", "--volume", f"{places['runs']}:/runs"]
    mounted += ["--volume", f"{places['tmp']}:/tmp", "--volume", f"{places['home']}:/home/raystride"]
    mounted += ["--read-only", "--shm-size", "1g", "--cap-drop", "ALL"]
    program, *words = command
    engine.run("podman", "run", "--rm", "--network", "none", *mounted, "--entrypoint", program, image, *words)
    summary = json.loads((places["runs"] / "digits" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 2)


class Cluster:
    """A cluster of containers from a rendered folder."""

    def __init__(self, engine: Engine, folder: Path, image: str, ports: Sequence[int]) -> None:
        self.engine, self.folder = engine, folder
        self.project = yaml.safe_load((folder / "compose.yaml").read_text())["name"]
        published = dict(zip(("DASHBOARD_PORT", "MLFLOW_PORT"), map(str, ports), strict=True))
        engine.variables |= {"RAYSTRIDE_IMAGE": image, "POSTGRES_IMAGE": engine.build_database(), **published}

    def run_compose(self, *words: str, limit_s: float = 300) -> str:
        return self.engine.run("podman-compose", *words, cwd=self.folder, limit_s=limit_s)

    def start_job(self, *words: str) -> subprocess.Popen[str]:
        """Starts a job. Returns its process, which ends with the job's exit code."""
        command = ["podman-compose", "--profile", "job", "run", "--rm", "job", *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        return subprocess.Popen(command, cwd=self.folder, env=self.engine.variables, text=True, **pipes)  # type: ignore[call-overload, no-any-return]

    def container_name(self, service: str) -> str:
        return f"{self.project}_{service}"

    def storage_folder(self) -> Path:
        """Returns the path on this machine of the volume with the runs."""
        volume = f"{self.project}_storage"
        return Path(self.engine.run("podman", "volume", "inspect", volume, "--format", "{{.Mountpoint}}").strip())


@pytest.fixture
def cluster(engine: Engine, image: str, tmp_path: Path) -> Iterator[Cluster]:
    """A running cluster of head, two workers, MLflow and PostgreSQL; removed afterwards, with its volumes."""
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(SETTINGS | ELASTIC))
    (tmp_path / "place.yaml").write_text(yaml.safe_dump(SMALL))
    place = ("--place", str(tmp_path / "place.yaml"))
    _write_files(tmp_path / "out", "--config", str(tmp_path / "settings.yaml"), "--nodes", "2", *place)
    subprocess.run(["sh", "secrets.sh"], cwd=tmp_path / "out", check=True)
    with reserve_ports(2, "127.0.0.1") as ports:
        cluster = Cluster(engine, tmp_path / "out", image, ports)
        try:
            cluster.run_compose("up", "--detach")
            yield cluster
        finally:
            engine.remove_containers()


def _wait_for_file(file: Path, job: subprocess.Popen[str]) -> None:
    for _ in range(1200):
        if file.exists():
            return
        assert job.poll() is None, job.communicate()[0]
        time.sleep(0.1)
    raise AssertionError(f"{file} did not come")


@pytest.mark.weekly
@_mark_long
def test_a_run_in_containers_survives_the_loss_of_one(engine: Engine, image: str, cluster: Cluster, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    alone.chmod(0o777)
    (alone / "settings.yaml").write_text(yaml.safe_dump(SETTINGS))
    flags = ["--config", "/alone/settings.yaml", "--storage", "/alone", "--launch", "inline", "--record.mlflow", "false"]
    engine.run("podman", "run", "--rm", "--network", "none", "--volume", f"{alone}:/alone", image, "train", *flags)
    undisturbed = json.loads((alone / "digits" / "summary.json").read_text())

    job = cluster.start_job("check", "--config", "settings.yaml")
    said = job.communicate(timeout=900)[0]
    assert job.returncode == 0, said

    run = cluster.storage_folder() / "runs" / "digits"
    job = cluster.start_job()
    _wait_for_file(run / "checkpoints" / "step-00000005" / "MANIFEST.json", job)
    engine.run("podman", "kill", cluster.container_name("worker_2"))
    said = job.communicate(timeout=900)[0]
    assert job.returncode == 0, said
    summary = json.loads((run / "summary.json").read_text())
    print(said)
    assert (summary["status"], summary["steps"]) == ("finished", 60)
    assert summary["parameters_sha256"] == undisturbed["parameters_sha256"]
    assert (summary["workers"], summary["resumed_from"] >= 5) == (1, True)
    _check_mlflow(cluster, summary)
    _check_no_secrets(engine, cluster)


def _check_mlflow(cluster: Cluster, summary: dict[str, object]) -> None:
    """Checks that the run's metrics are in PostgreSQL, and its artifacts on the server's volume."""
    script = (
        "import mlflow; mlflow.set_tracking_uri('http://mlflow:5000');"
        f"run = mlflow.get_run('{summary['mlflow_run_id']}');"
        "print(run.info.status, run.info.artifact_uri, sorted(run.data.metrics)[:3])"
    )
    said = cluster.engine.run("podman", "exec", cluster.container_name("head_1"), "python", "-c", script)
    assert said.startswith("FINISHED mlflow-artifacts:"), said
    asked = "SELECT count(*) FROM metrics"
    query = f"psql postgresql://mlflow:$(cat /run/secrets/database_password)@127.0.0.1/mlflow -Atc '{asked}'"
    assert int(cluster.engine.run("podman", "exec", cluster.container_name("database_1"), "sh", "-c", query)) > 0


def _check_no_secrets(engine: Engine, cluster: Cluster) -> None:
    """Checks that no secret is in podman's descriptions of the containers, in command lines, in logs or in files."""
    secrets = [path.read_text() for path in (cluster.folder / "secrets").iterdir()]
    names = engine.run("podman", "ps", "--all", "--format", "{{.Names}}").split()
    assert len(names) >= 5
    told = [engine.run("podman", "inspect", *names), *(engine.run("podman", "logs", name, check=False) for name in names)]
    told.append(subprocess.run(["ps", "-eww", "-o", "args"], capture_output=True, text=True, check=True).stdout)
    told += [path.read_text() for path in cluster.folder.iterdir() if path.is_file()]
    assert not [secret for secret in secrets for each in told if secret in each]
