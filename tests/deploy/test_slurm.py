"""What `raystride deploy slurm` writes, on a real Slurm of three hosts: what ends a job, and how it goes on."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from raystride.ray_jobs import deploy, train
from tests.cluster import in_the_clear
from tests.deploy.slurm import Slurm, no_slurm, until
from tests.tiny import write_text

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(bool(no_slurm()), reason=f"no Slurm here: {no_slurm()}"),
]
MUCH = 1_000_000
"""Steps that no test waits for."""
TINY: dict[str, dict[str, object]] = {
    "data": {"kind": "text", "validation": "tail", "validation_fraction": 0.1},
    "tokenizer": {"kind": "bytes"},
    "model": {"layers": 2, "heads": 2, "width": 16, "context": 16, "dropout": 0.1},
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


def _place(slurm: Slurm, tls: bool = False) -> dict[str, object]:
    """Three nodes, of which jobs take one processor each and leave the others to others."""
    activate = f"export PATH={Path(sys.executable).parent}:$PATH"
    options = {"activate": activate, "extra": ["--oversubscribe"], "time_limit": "30", "tls": tls}
    storage = str(slurm.folder / "runs")
    return {"nodes": 3, "cpus_per_node": 1, "memory_gib": 4, "storage": storage, "shared": True, "slurm": options}


def _written(slurm: Slurm, run: str, steps: int, nodes: int = 2, tls: bool = False) -> Path:
    """The folder that `raystride deploy slurm` writes for a tiny training on so many nodes, a worker each."""
    folder = slurm.folder
    text = folder / "text.txt" if (folder / "text.txt").exists() else write_text(folder)
    (folder / "place.yaml").write_text(yaml.safe_dump(_place(slurm, tls)))
    (folder / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    written = folder / f"job-{run}"
    flags = f"--nodes {nodes} --place {folder / 'place.yaml'} --output {written} --config {folder / 'tiny.yaml'} --run {run}"
    flags += f" --data.source {text} --train.steps {steps} --scaling.workers {nodes}"
    assert deploy.main(["slurm", *flags.split()]) == 0
    return written


def _log(written: Path) -> str:
    return "".join(path.read_text(errors="replace") for path in sorted(written.glob("*.log"))).replace("\r", "\n")


def _reached(written: Path) -> int:
    return max(map(int, re.findall(r"step ([\d,]+)/", _log(written).replace(",", ""))), default=0)


def _summary(slurm: Slurm, run: str) -> dict[str, object]:
    found: dict[str, object] = json.loads((slurm.folder / "runs" / run / "summary.json").read_text())
    return found


def test_a_job_saves_at_its_time_limit_and_goes_on_elsewhere_to_the_same_bits(slurm: Slurm) -> None:
    written = _written(slurm, "limited", MUCH)
    job = slurm.submit(written)
    until(lambda: _reached(written) > 0, "the first step", lambda: _log(written))
    before = slurm.field(job, "NodeList")
    slurm.ask("scontrol", "update", f"JobId={job}", "TimeLimit=4")  # of which the last three minutes are for saving
    until(lambda: slurm.field(job, "Restarts") == "1", "the second start", lambda: _log(written))
    slurm.wait(job, "PENDING")
    assert _summary(slurm, "limited")["status"] == "stopped"
    saved = int(_summary(slurm, "limited")["steps"])  # type: ignore[call-overload]
    assert f"saved at step {saved}, before the time limit; queued again" in _log(written)
    # A node is taken out of service, and the run is to end a little later.
    settings = yaml.safe_load((written / "settings.yaml").read_text())
    settings["train"]["steps"] = saved + 50
    (written / "settings.yaml").write_text(yaml.safe_dump(settings))
    with slurm.drained("h2"):
        # Slurm waits two minutes by itself: what it has revoked of the first start holds for this second.
        slurm.ask("scontrol", "update", f"JobId={job}", "StartTime=now+5", "TimeLimit=30")
        slurm.wait(job, "COMPLETED")
    assert (before, slurm.field(job, "NodeList")) == ("h[1-2]", "h[1,3]")
    # The same settings without Slurm, Ray or interruption.
    undisturbed = slurm.folder / "undisturbed.yaml"
    settings["scaling"] = {"workers": 1}
    undisturbed.write_text(yaml.safe_dump(settings))
    storage = str(slurm.folder / "alone")
    assert train.main(["--config", str(undisturbed), "--launch", "inline", "--storage", storage]) == 0
    alone = json.loads((slurm.folder / "alone" / "limited" / "summary.json").read_text())
    assert alone["parameters_sha256"] == _summary(slurm, "limited")["parameters_sha256"]


def _talks_in_the_clear(slurm: Slurm, written: Path) -> bool:
    """Whether the head of a job answers a client of HTTP/2 without TLS."""
    (found,) = re.findall(r"Ray's head is ([\d.]+):(\d+)", _log(written))
    return bool(json.loads(slurm.hosts[0].run(sys.executable, in_the_clear.__file__, *found).stdout))


@pytest.mark.weekly
def test_two_jobs_on_the_same_nodes_do_not_meet_and_a_cancelled_one_saves(slurm: Slurm) -> None:
    one, two = _written(slurm, "one", MUCH), _written(slurm, "two", MUCH, tls=True)
    jobs = [slurm.submit(written, "--nodelist=h1,h2") for written in (one, two)]
    until(lambda: min(map(_reached, (one, two))) > 0, "the first steps", lambda: _log(one) + _log(two))
    assert [_talks_in_the_clear(slurm, written) for written in (one, two)] == [True, False]
    slurm.ask("scancel", jobs[0])
    slurm.wait(jobs[0], "CANCELLED")
    until(lambda: _summary(slurm, "one")["status"] == "stopped", "the save", lambda: _log(one))
    assert int(_summary(slurm, "one")["steps"]) > 0  # type: ignore[call-overload]
    after = _reached(two)
    until(lambda: _reached(two) > after, "a step of the other job", lambda: _log(two))
    slurm.ask("scancel", "--batch", "--signal=TERM", jobs[1])
    slurm.wait(jobs[1], "FAILED")
    assert "ended by SIGTERM" in _log(two)
    for host in slurm.hosts.all:
        assert "raylet" not in host.run("ps", "-e", "-o", "comm").stdout
        assert "rs-" not in host.run("ls", "/tmp").stdout


@pytest.mark.weekly
def test_a_start_that_fails_names_node_and_cause_and_is_no_success(slurm: Slurm) -> None:
    broken, written = slurm.hosts[2], _written(slurm, "broken", 10)
    broken.run("mount", "-o", "remount,ro", "/tmp")
    try:
        job = slurm.submit(written, "--nodelist=h1,h3")
        slurm.wait(job, "FAILED")
    finally:
        broken.run("mount", "-o", "remount,rw", "/tmp")
    assert slurm.field(job, "ExitCode") == "3:0"
    assert "no Ray on h3" in _log(written)
    assert "Read-only file system" in _log(written)


@pytest.mark.weekly
def test_the_jobs_of_an_array_measure_one_sweep_between_them(slurm: Slurm) -> None:
    text = slurm.folder / "text.txt" if (slurm.folder / "text.txt").exists() else write_text(slurm.folder)
    sweep = {"space": {"train.slot_size": [2, 4]}, "warmup_steps": 2, "window_steps": 2, "windows": 2, "least_windows": 1}
    settings = TINY | {"data": TINY["data"] | {"source": str(text)}, "sweep": sweep, "scaling": {"workers": 1}}
    (slurm.folder / "sweep.yaml").write_text(yaml.safe_dump(settings))
    place = slurm.folder / "place.yaml"
    place.write_text(yaml.safe_dump(_place(slurm)))
    written = slurm.folder / "job-array"
    flags = f"--job sweep --array 2 --place {place} --output {written} --config {slurm.folder / 'sweep.yaml'} --run grid"
    assert deploy.main(["slurm", *flags.split()]) == 0
    job = slurm.submit(written)
    for element in (f"{job}_0", f"{job}_1"):
        slurm.wait(element, "COMPLETED")
    summary = json.loads((slurm.folder / "runs" / "grid" / "summary.json").read_text())
    assert summary["unfinished"] == 0
    assert len(list((slurm.folder / "runs" / "grid" / "trials").iterdir())) == 2
    assert _log(written).count("is measured; the job that measures the last") == 1
