"""A training submitted to a running Ray cluster with token authentication, stopped as a job, and submitted again; from a
checkout, and from a project of a user's own with an installed Raystride and plug-ins."""

import json
import re
import secrets
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import raystride
from benchmarks.heads import head as started_head
from raystride.pipelines.config import (
    CheckpointConfig,
    Config,
    OptimizerConfig,
    ScalingConfig,
    TrainConfig,
    ValidationConfig,
)
from raystride.pipelines.config.parse import to_yaml
from raystride.pipelines.launch.cluster.resources import usable_cores
from tests.end_to_end.installed import SETTINGS
from tests.ray_jobs.jobs import ROOT, environment, run_folder, run_well, summary
from tests.tiny import tiny, write_text
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
LIMIT_S = 240
CPUS = 4 if usable_cores() == 3 else 3
"""Of the cluster: another number than this machine has, so that one can tell them apart."""
RAY = str(Path(sys.executable).with_name("ray"))


@dataclass(frozen=True)
class Head:
    """A Ray cluster of one node, started as an operator does, with a home and a temporary folder of its own."""

    env: dict[str, str]
    gcs: str

    def ray(self, *arguments: str) -> str:
        """Output of a `ray` command that must succeed."""
        done = subprocess.run(
            [RAY, *arguments], cwd=ROOT, env=self.env, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    def submit(self, file: Path, *flags: str) -> str:
        """Submits a training; the job's name."""
        runtime = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}}
        command = [sys.executable, "ray_jobs/train.py", "--config", str(file), *flags]
        said = self.ray(
            *("job", "submit", "--no-wait", "--working-dir", ".", "--runtime-env-json", json.dumps(runtime), "--", *command)
        )
        found = re.search(r"raysubmit_\w+", said)
        assert found, said
        return found[0]

    def api(self, path: str) -> Any:
        """What the dashboard's server answers."""
        token = (Path(self.env["HOME"]) / ".ray" / "auth_token").read_text()
        url = f"{self.env['RAY_API_SERVER_ADDRESS']}{path}"
        asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(asked, timeout=LIMIT_S) as answer:
            return json.load(answer)

    def trainings(self, prefix: str) -> list[dict[str, Any]]:
        """What Ray's dashboard knows of trainings whose names begin so."""
        return [run for run in self.api("/api/train/v2/runs/v1")["train_runs"] if run["name"].startswith(prefix)]

    def info(self, job: str) -> dict[str, Any]:
        """What JobSubmissionClient.get_job_info asks for: status, message, metadata."""
        return dict(self.api(f"/api/jobs/{job}"))

    def from_laptop(self, project: Path, site: Path, *entrypoint: str, metadata: str = "{}") -> "subprocess.Popen[str]":
        """`ray job submit` from a project of a user's own, of a job that runs under an installed Raystride; it waits."""
        variables = {"RAY_JOB_STOP_WAIT_TIME_S": "60", "PYTHONPATH": str(site), "SITE": str(site), "MARKS": str(project)}
        variables["PATH"] = f"{Path(RAY).parent}:{self.env['PATH']}"
        kept = ("HOME", "PATH", "RAY_AUTH_MODE")
        address = self.env["RAY_API_SERVER_ADDRESS"]
        command = [RAY, "job", "submit", "--address", address, "--working-dir", "my_work", "--metadata-json", metadata]
        return subprocess.Popen(
            [*command, "--runtime-env-json", json.dumps({"env_vars": variables}), "--", *entrypoint],
            cwd=project,
            env={name: self.env[name] for name in kept},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def status(self, job: str) -> str:
        """`running`, `succeeded`, ..."""
        said = self.ray("job", "status", job).lower()
        found = re.findall(r"\b(pending|running|succeeded|stopped|failed)\b", said)
        assert found, said
        return str(found[-1])


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """The cluster; all of its processes, and only those, end with the tests."""
    home = tmp_path_factory.mktemp("home")
    token = home / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text(secrets.token_hex(32))
    with started_head(CPUS, environment() | {"HOME": str(home), "RAY_AUTH_MODE": "token"}) as started:
        yield Head(started.environment, started.gcs)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Two workers, with steps enough to be stopped in the middle."""
    path = tmp_path_factory.mktemp("job")
    config = tiny(
        write_text(path),
        storage=str(path / "runs"),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2, schedule="constant"),
        train=TrainConfig(steps=100_000, slots=4, slot_size=2, log_every=20),
        validation=ValidationConfig(every=0, samples=16),
        checkpoint=CheckpointConfig(every=40),
        scaling=ScalingConfig(workers=2, threads=1),
    )
    (path / "tiny.yaml").write_text(to_yaml(config))
    return config


def _wait(true: Callable[[], object], head: Head, job: str) -> None:
    wait_until(true, lambda: head.ray("job", "logs", job)[-4000:], pause_s=0.2)


def _ended(config: Config, steps: int) -> bool:
    folder = run_folder(config, "submitted")
    return folder.exists("summary.json") and folder.read_json("summary.json")["steps"] == steps


def test_a_model_of_ones_own_is_a_job_as_its_script_stands(head: Head) -> None:
    runtime = {"env_vars": {"PYTHONPATH": str(ROOT), "RAYSTRIDE_STORAGE": f"{head.env['HOME']}/own"}}
    place = ("--working-dir", str(ROOT / "examples"), "--runtime-env-json", json.dumps(runtime))
    said = head.ray("job", "submit", *place, "--", sys.executable, "digits.py")
    assert re.search(r"accuracy 0\.[89]", said), said[-3000:]
    assert "'digit'" in said
    (run,) = Path(head.env["HOME"]).glob("own/**/digits/summary.json")
    assert json.loads(run.read_text())["status"] == "finished"
    # It has trained and predicted: a second connection of the job would have Ray's page of trainings fail for everyone.
    assert [run["status"] for run in head.trainings("digits-")] == ["FINISHED"]


def test_a_stopped_job_is_saved_and_resumed_by_its_name(head: Head, config: Config) -> None:
    file = Path(config.storage).parent / "tiny.yaml"
    first = head.submit(file, "--run", "submitted")
    _wait(lambda: run_folder(config, "submitted").exists("checkpoints/step-00000080/MANIFEST.json"), head, first)
    head.ray("job", "stop", first)
    stopped = summary(config, "submitted")
    assert stopped["status"] == "stopped"
    assert 80 <= stopped["steps"] < 100_000
    assert head.status(first) in ("stopped", "succeeded")

    steps = stopped["steps"] + 40
    second = head.submit(file, "--run", "submitted", "--train.steps", str(steps))
    _wait(lambda: _ended(config, steps), head, second)
    _wait(lambda: head.status(second) == "succeeded", head, second)
    resumed = summary(config, "submitted")
    assert (resumed["status"], resumed["steps"], resumed["resumed_from"]) == ("finished", steps, stopped["steps"])
    said = head.ray("job", "logs", second)
    assert f"run submitted in {config.storage}" in said
    assert f"ray      {head.env['RAY_API_SERVER_ADDRESS']}/#/jobs/{second}" in said
    assert [(run["status"], "mlflow_uri" in str(run)) for run in head.trainings("submitted-")] == [("FINISHED", False)] * 2
    assert [line.split()[0] for line in said.rstrip().splitlines()[-3:]] == ["results", "mlflow", "next"]


@pytest.mark.weekly
def test_a_driver_joins_only_the_cluster_that_it_is_told_of(head: Head, config: Config) -> None:
    joined = run_well("check", config, "--launch.address", head.gcs, env=head.env)
    assert f"CPU: 2 asked, {CPUS} there" in joined.out
    alone = run_well("check", config, env=head.env)
    assert f"{CPUS} there" not in alone.out


PLUG_IN = """
import os
from pathlib import Path

import ray
import raystride
from my_project import extras

assert raystride.__file__.startswith(os.environ["SITE"]), raystride.__file__

@raystride.register_source("marked")
def marked(split):
    task = ray.is_initialized() and ray.get_runtime_context().get_task_id()
    (Path(os.environ["MARKS"]) / ("read-by-a-task" if task else "read-by-the-driver")).touch()
    yield from extras.tickets(split)
"""


@pytest.fixture
def work(project: Path) -> Path:
    """The user's project in a folder `my_work`, with a plug-in that is a file and says who read its source."""
    (project / "my_work").mkdir()
    for path in list(project.iterdir()):
        if path.name != "my_work":
            path.rename(project / "my_work" / path.name)
    settings = SETTINGS.replace("source: tickets,", "source: marked,").replace("record: {mlflow: false}", "")
    (project / "my_work" / "settings.yaml").write_text(f"plugins: [plug_in.py, my_project.extras]\n{settings}")
    (project / "my_work" / "plug_in.py").write_text(PLUG_IN)
    return project


def _submitted(head: Head, process: "subprocess.Popen[str]") -> str:
    """The name of the job that it has submitted."""
    before = ""
    for line in process.stdout or ():
        before += line
        if found := re.search(r"'(raysubmit_\w+)' submitted", line):
            return found[1]
    raise AssertionError(before)


@pytest.mark.parametrize(
    "word",
    [
        pytest.param(["raystride"], id="command"),
        pytest.param(["python", "-m", "raystride"], id="module", marks=pytest.mark.weekly),
    ],
)
def test_a_users_project_trains_with_its_plug_ins_and_its_page_tells_of_it(
    head: Head, site: Path, work: Path, word: list[str]
) -> None:
    flags = ["--config", "settings.yaml", "--run", "mine", "--storage", f"{work}/runs", "--scaling.workers", "2"]
    steps = ["--train.steps", "1000000", "--validation.every", "0", "--optimizer.schedule", "constant"]
    owner = json.dumps({"owner": "me", "job_name": "hers"} if len(word) == 1 else {})
    process = head.from_laptop(work, site, *word, "train", *flags, *steps, metadata=owner)
    job = _submitted(head, process)
    _wait(lambda: head.info(job)["message"].startswith("step "), head, job)
    running = head.info(job)
    assert running["status"] == "RUNNING"
    assert running["metadata"].pop("owner", "me") == "me"
    charged = running["metadata"].pop("raystride.owner", "")
    assert charged == "me" or len(word) > 1
    assert running["metadata"].pop("job_name") == ("hers" if len(word) == 1 else "mine")
    assert running["metadata"] == {
        "raystride.run": "mine",
        "raystride.storage": f"{work}/runs",
        "raystride.mlflow": f"raystride ui --storage {work}/runs",
        "raystride.version": raystride.__version__,
        "raystride.status": "running",
    }
    head.ray("job", "stop", job)
    said, _ = process.communicate(timeout=LIMIT_S)
    assert f"run mine in {work}/runs" in said
    assert f"ray      {head.env['RAY_API_SERVER_ADDRESS']}/#/jobs/{job}" in said
    assert re.search(r"^results  .*/runs/mine\nmlflow   raystride ui .*\nnext     raystride train ", said, re.MULTILINE), (
        said
    )
    assert [path.name for path in work.glob("read-by-*")] == ["read-by-a-task"]
    ended = head.info(job)
    assert ended["metadata"]["raystride.status"] == "stopped"
    assert int(ended["metadata"]["raystride.steps"]) > 0
    for name in ("environment.json", "summary.json"):
        assert json.loads((work / "runs" / "mine" / name).read_text()).get("owner", "") == charged
    lines = (work / "runs" / "mine" / "metrics.jsonl").read_text().splitlines()
    assert any("twice_the_step" in line for line in lines)


def test_other_versions_are_one_line(head: Head, site: Path, work: Path) -> None:
    other = work / "other"
    shutil.copytree(site / "raystride", other / "raystride")
    package = other / "raystride" / "locations.py"
    package.write_text(package.read_text().replace(f'"{raystride.__version__}"', '"9.8.7"'))
    train = [
        "python",
        "-m",
        "raystride",
        "train",
        "--config",
        "settings.yaml",
        "--run",
        "other",
        "--storage",
        f"{work}/runs",
    ]
    process = head.from_laptop(work, site, "env", f"PYTHONPATH={other}", f"SITE={other}", *train)
    job = _submitted(head, process)
    said, _ = process.communicate(timeout=LIMIT_S)
    (line,) = {line for line in said.splitlines() if line.startswith("error: ")}
    assert re.search(rf"this driver has raystride 9.8.7; the workers on \S+ have raystride {raystride.__version__}", line)
    assert f"the wheel of Raystride {raystride.__version__} (docs/cluster.md)" in line
    assert "Traceback" not in said
    assert head.info(job)["driver_exit_code"] == 3


JOIN = """
import sys
import ray
ray.__version__ = sys.argv[1] or ray.__version__
from raystride.command import run
sys.exit(run(["train", *sys.argv[2:]]))
"""


@pytest.mark.weekly
def test_a_driver_that_joins_is_shown_and_refused_where_ray_is_another(head: Head, config: Config) -> None:
    flags = ["--config", f"{Path(config.storage).parent}/tiny.yaml", "--train.steps", "2", "--run", "joined"]

    def join(ray: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", JOIN, ray, *flags, "--launch.address", head.gcs]
        return subprocess.run(command, cwd=ROOT, env=head.env, capture_output=True, text=True, timeout=LIMIT_S)

    refused = join("2.1.0")
    assert refused.returncode == 3, refused.stderr
    (line,) = refused.stderr.splitlines()
    assert line.startswith("error: versions differ: this driver has ray 2.1.0; the cluster has ray ")
    done = join("")
    assert done.returncode == 0, done.stderr
    (driver,) = [each for each in head.api("/api/jobs/") if each["metadata"].get("raystride.run") == "joined"]
    assert (driver["type"], driver["metadata"]["job_name"]) == ("DRIVER", "joined")
    assert driver["metadata"]["raystride.storage"] == config.storage
