"""Jobs that `raystride deploy slurm` writes, on a real Slurm of three hosts: how they end and how they go on."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from raystride.command import run as run_command
from raystride.jobs import train
from tests.cluster import in_the_clear
from tests.deploy.slurm import Slurm, slurm_skip_reason, wait_until
from tests.tiny import write_text

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(bool(slurm_skip_reason()), reason=f"no Slurm here: {slurm_skip_reason()}"),
]
ENDLESS_STEPS = 1_000_000
"""A number of steps that no test reaches."""
TINY: dict[str, dict[str, object]] = {
    "data": {"kind": "text", "validation": "tail", "validation_fraction": 0.1},
    "tokenizer": {"kind": "bytes"},
    "model": {"layers": 2, "heads": 2, "hidden_size": 16, "context": 16, "dropout": 0.1},
    "optimizer": {"schedule": "constant", "learning_rate": 1e-3, "warmup_steps": 2},
    "train": {"slots": 4, "slot_size": 2, "exact": True, "log_every": 5},
    "validation": {"every": 0},
    "checkpoint": {"every": 200},
    "record": {"mlflow": False},
    "sample": {"tokens": 0},
}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with Slurm(tmp_path_factory.mktemp("slurm"), nodes=3) as running:
        yield running


def _place_values(slurm: Slurm, tls: bool = False) -> dict[str, object]:
    """Returns a place of three nodes, on each of which a job takes one CPU and leaves the others free."""
    activate = f"export PATH={Path(sys.executable).parent}:$PATH"
    options = {"activate": activate, "extra": ["--oversubscribe"], "time_limit": "30", "tls": tls}
    storage = str(slurm.folder / "runs")
    return {"nodes": 3, "cpus_per_node": 1, "memory_gib": 4, "storage": storage, "shared": True, "slurm": options}


def _write_job(slurm: Slurm, run: str, steps: int, nodes: int = 2, tls: bool = False) -> Path:
    """Writes a tiny training on `nodes` nodes, one worker each, by `raystride deploy slurm`. Returns the folder."""
    folder = slurm.folder
    text = folder / "text.txt" if (folder / "text.txt").exists() else write_text(folder)
    (folder / "place.yaml").write_text(yaml.safe_dump(_place_values(slurm, tls)))
    (folder / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    written = folder / f"job-{run}"
    flags = f"--nodes {nodes} --place {folder / 'place.yaml'} --output {written} --config {folder / 'tiny.yaml'} --run {run}"
    flags += f" --data.source {text} --train.steps {steps} --scaling.workers {nodes}"
    assert run_command(["deploy", "slurm", *flags.split()]) == 0
    return written


def _read_logs(written: Path) -> str:
    return "".join(path.read_text(errors="replace") for path in sorted(written.glob("*.log"))).replace("\r", "\n")


def _last_step(written: Path) -> int:
    return max(map(int, re.findall(r"step ([\d,]+)/", _read_logs(written).replace(",", ""))), default=0)


def _load_summary(slurm: Slurm, run: str) -> dict[str, object]:
    found: dict[str, object] = json.loads((slurm.folder / "runs" / run / "summary.json").read_text())
    return found


def test_a_job_saves_at_its_time_limit_and_resumes_bitwise_on_other_nodes(slurm: Slurm) -> None:
    written = _write_job(slurm, "limited", ENDLESS_STEPS)
    job = slurm.submit(written)
    wait_until(lambda: _last_step(written) > 0, "the first step", lambda: _read_logs(written))
    before = slurm.job_field(job, "NodeList")
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=4")  # the last three minutes are for saving
    wait_until(lambda: slurm.job_field(job, "Restarts") == "1", "the second start", lambda: _read_logs(written))
    slurm.wait_for_state(job, "PENDING")
    assert _load_summary(slurm, "limited")["status"] == "stopped"
    saved = int(_load_summary(slurm, "limited")["steps"])  # type: ignore[call-overload]
    assert f"saved at step {saved}, before the time limit; queued again" in _read_logs(written)
    # A node is taken out of service, and the run is to end a little later.
    settings = yaml.safe_load((written / "settings.yaml").read_text())
    settings["train"]["steps"] = saved + 50
    (written / "settings.yaml").write_text(yaml.safe_dump(settings))
    with slurm.drain("h2"):
        # By itself Slurm waits two minutes: the credential that it revoked for the first start is that of the second, too.
        slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now+5", "TimeLimit=30")
        slurm.wait_for_state(job, "COMPLETED")
    assert (before, slurm.job_field(job, "NodeList")) == ("h[1-2]", "h[1,3]")
    # The same settings without Slurm, Ray or interruption.
    undisturbed = slurm.folder / "undisturbed.yaml"
    settings["scaling"] = {"workers": 1}
    undisturbed.write_text(yaml.safe_dump(settings))
    storage = str(slurm.folder / "alone")
    assert train.main(["--config", str(undisturbed), "--launch", "inline", "--storage", storage]) == 0
    alone = json.loads((slurm.folder / "alone" / "limited" / "summary.json").read_text())
    assert alone["parameters_sha256"] == _load_summary(slurm, "limited")["parameters_sha256"]


def _answers_without_tls(slurm: Slurm, written: Path) -> bool:
    """Returns whether the head of a job answers an HTTP/2 client without TLS."""
    (found,) = re.findall(r"Ray's head is ([\d.]+):(\d+)", _read_logs(written))
    return bool(json.loads(slurm.hosts[0].run(sys.executable, in_the_clear.__file__, *found).stdout))


@pytest.mark.weekly
def test_two_jobs_on_the_same_nodes_are_isolated_and_a_cancelled_one_saves(slurm: Slurm) -> None:
    one, two = _write_job(slurm, "one", ENDLESS_STEPS), _write_job(slurm, "two", ENDLESS_STEPS, tls=True)
    jobs = [slurm.submit(written, "--nodelist=h1,h2") for written in (one, two)]
    wait_until(lambda: min(map(_last_step, (one, two))) > 0, "the first steps", lambda: _read_logs(one) + _read_logs(two))
    assert [_answers_without_tls(slurm, written) for written in (one, two)] == [True, False]
    slurm.run("scancel", jobs[0])
    slurm.wait_for_state(jobs[0], "CANCELLED")
    wait_until(lambda: _load_summary(slurm, "one")["status"] == "stopped", "the save", lambda: _read_logs(one))
    assert int(_load_summary(slurm, "one")["steps"]) > 0  # type: ignore[call-overload]
    after = _last_step(two)
    wait_until(lambda: _last_step(two) > after, "a step of the other job", lambda: _read_logs(two))
    slurm.run("scancel", "--batch", "--signal=TERM", jobs[1])
    slurm.wait_for_state(jobs[1], "FAILED")
    assert "ended by SIGTERM" in _read_logs(two)
    for host in slurm.hosts.all:
        assert "raylet" not in host.run("ps", "-e", "-o", "comm").stdout
        assert "rs-" not in host.run("ls", "/tmp").stdout


@pytest.mark.weekly
def test_a_failed_start_names_node_and_cause_and_fails_the_job(slurm: Slurm) -> None:
    broken, written = slurm.hosts[2], _write_job(slurm, "broken", 10)
    broken.run("mount", "-o", "remount,ro", "/tmp")
    try:
        job = slurm.submit(written, "--nodelist=h1,h3")
        slurm.wait_for_state(job, "FAILED")
    finally:
        broken.run("mount", "-o", "remount,rw", "/tmp")
    assert slurm.job_field(job, "ExitCode") == "3:0"
    assert "no Ray on h3" in _read_logs(written)
    assert "Read-only file system" in _read_logs(written)


@pytest.mark.weekly
def test_the_jobs_of_an_array_share_one_sweep(slurm: Slurm) -> None:
    text = slurm.folder / "text.txt" if (slurm.folder / "text.txt").exists() else write_text(slurm.folder)
    sweep = {"space": {"train.slot_size": [2, 4]}, "warmup_steps": 2, "window_steps": 2, "windows": 2, "min_windows": 1}
    settings = TINY | {"data": TINY["data"] | {"source": str(text)}, "sweep": sweep, "scaling": {"workers": 1}}
    (slurm.folder / "sweep.yaml").write_text(yaml.safe_dump(settings))
    place = slurm.folder / "place.yaml"
    place.write_text(yaml.safe_dump(_place_values(slurm)))
    written = slurm.folder / "job-array"
    flags = f"--job sweep --array 2 --place {place} --output {written} --config {slurm.folder / 'sweep.yaml'} --run grid"
    assert run_command(["deploy", "slurm", *flags.split()]) == 0
    job = slurm.submit(written)
    for element in (f"{job}_0", f"{job}_1"):
        slurm.wait_for_state(element, "COMPLETED")
    summary = json.loads((slurm.folder / "runs" / "grid" / "summary.json").read_text())
    assert summary["unfinished"] == 0
    assert len(list((slurm.folder / "runs" / "grid" / "trials").iterdir())) == 2
    assert _read_logs(written).count("is measured; the job that measures the last") == 1
