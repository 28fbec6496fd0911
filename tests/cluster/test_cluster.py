"""A cluster of hosts by the commands of docs/cluster.md: looked at, trained on, stopped and gone on with.

Each host is called 127.0.1.1 by itself, as Debian has it, so whoever goes by names talks to himself.
"""

import json
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.cluster.hosts import Host, unable
from tests.cluster.ray_hosts import PYTHON, RayHosts
from tests.gated import write_plugin, write_source
from tests.tiny import write_text
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(unable()), reason=f"no hosts here: {unable()}"),
]
SHAPE = "--model.layers 2 --model.heads 2 --model.hidden_size 16 --model.context 16 --tokenizer.kind bytes --sample.tokens 0"
TRAIN = "--train.slots 4 --train.slot_size 2 --train.log_every 5 --validation.every 0 --optimizer.schedule constant"
DATA = "--data.kind text --data.validation tail --data.validation_fraction 0.1"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHosts]:
    """Four hosts with Ray, and one from which jobs are submitted."""
    folder = tmp_path_factory.mktemp("cluster")
    write_text(folder)
    (folder / "runs").mkdir()
    with RayHosts(folder, 4, others=1) as running:
        running.wait_for(4)
        yield running


def _flags(cluster: RayHosts, run: str, *more: str) -> list[str]:
    place = f"--storage {cluster.folder / 'runs'} --data.source {cluster.folder / 'text.txt'} --run {run}"
    return [*SHAPE.split(), *TRAIN.split(), *DATA.split(), *place.split(), *more]


def _summary(cluster: RayHosts, run: str) -> dict[str, object]:
    return json.loads((cluster.folder / "runs" / run / "summary.json").read_text())  # type: ignore[no-any-return]


def _user(cluster: RayHosts) -> Host:
    return cluster.hosts[4]


def test_every_host_is_looked_at(cluster: RayHosts) -> None:
    code, said = cluster.submit(_user(cluster), "check", *_flags(cluster, "looked", "--scaling.workers", "4"))
    assert code == 0, said
    rows = {line.split()[0]: line.split() for line in said.splitlines() if line.startswith(("h1 ", "h2 ", "h3 ", "h4 "))}
    assert [rows[f"h{number}"][1] for number in (1, 2, 3, 4)] == [host.address for host in cluster.hosts.all[:4]]
    assert {row[2] for row in rows.values()} == {"eth0"}
    assert all(float(row[4]) > 0 for row in rows.values())
    assert {row[5] for row in rows.values()} == {"h1", "h2", "h3", "h4"}


@pytest.mark.weekly
def test_what_one_host_lacks_is_told_by_its_name(cluster: RayHosts) -> None:
    """A file that lies on the head alone, in its own /tmp; and a host that another cannot reach."""
    cluster.head.run("cp", str(cluster.folder / "text.txt"), "/tmp/mine.txt")
    flags = [*_flags(cluster, "lacking", "--scaling.workers", "3"), "--data.source", "/tmp/mine.txt"]
    for job in ("check", "train"):
        code, said = cluster.submit(_user(cluster), job, *flags)
        assert code == 1, said  # as Ray's command says of any job that fails; the job's own is 3
        assert "entrypoint command failed with exit code 3" in said
        for number, host in enumerate(cluster.hosts.all[1:4], 2):
            assert f"h{number} ({host.address}): " in said
        assert "h1 (" not in said
        assert "/tmp/mine.txt" in said
    cluster.hosts.part([1], [2])
    try:
        code, said = cluster.submit(_user(cluster), "check", *_flags(cluster, "apart", "--scaling.workers", "3"))
    finally:
        cluster.hosts.heal()
    assert "entrypoint command failed with exit code 3" in said
    assert f"h2 ({cluster.hosts[1].address}): h3: {cluster.hosts[2].address}" in said


@pytest.mark.weekly
def test_they_train_together_although_each_is_called_loopback(cluster: RayHosts) -> None:
    exact = ["--train.exact", "true", "--train.steps", "1000", "--record.mlflow", "false"]
    code, said = cluster.submit(_user(cluster), "train", *_flags(cluster, "together", *exact, "--scaling.workers", "4"))
    assert code == 0, said
    found = _summary(cluster, "together")
    assert (found["status"], found["workers"]) == ("finished", 4)
    alone = _flags(cluster, "alone", *exact, "--launch", "inline")
    code, said = cluster.run(_user(cluster), str(PYTHON), "-m", "raystride", "train", *alone)
    assert code == 0, said
    assert found["parameters_sha256"] == _summary(cluster, "alone")["parameters_sha256"]


@pytest.mark.weekly
def test_a_job_is_stopped_and_goes_on_with_its_record_on_a_server_elsewhere(cluster: RayHosts) -> None:
    user, storage = _user(cluster), cluster.folder / "runs"
    server = user.start(
        *("env", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false", str(PYTHON)),
        *("-m", "mlflow", "server", "--host", "0.0.0.0", "--port", "5000", "--workers", "1"),
        *("--backend-store-uri", f"sqlite:///{cluster.folder}/mlflow.db", "--allowed-hosts", "*"),
        log=cluster.folder / "mlflow.log",
    )
    flags = [
        *_flags(cluster, "stopped", "--scaling.workers", "2", "--checkpoint.every", "50"),
        "--record.mlflow_uri",
        f"http://{user.address}:5000",
    ]
    try:
        saved = storage / "stopped" / "checkpoints"
        _stop_when(cluster, [*flags, "--train.steps", "100000"], "long", lambda: any(saved.glob("*")))
        before = _summary(cluster, "stopped")
        assert before["status"] == "stopped", before
        steps = int(str(before["steps"])) + 20
        code, said = cluster.submit(user, "train", *flags, "--train.steps", str(steps), "--scaling.workers", "3")
        assert code == 0, said
    finally:
        server.terminate()
        server.wait()
    summary = _summary(cluster, "stopped")
    assert (summary["steps"], summary["resumed_from"], summary["workers"]) == (steps, before["steps"], 3)
    with closing(sqlite3.connect(cluster.folder / "mlflow.db")) as database:
        rows = database.execute("SELECT run_uuid, step FROM metrics WHERE key = 'train/loss' ORDER BY step").fetchall()
    assert {run for run, _ in rows} == {summary["mlflow_run_id"]}
    told = [step for _, step in rows]
    assert len(set(told)) == len(told), "a point twice"
    assert set(told) >= set(range(5, steps + 1, 5))
    _assert_audited(cluster, "stopped")


def _assert_audited(cluster: RayHosts, run: str) -> None:
    """That no sample of a run was lost or fed twice."""
    storage = str(cluster.folder / "runs")
    code, said = cluster.run(_user(cluster), str(PYTHON), "-m", "raystride", "runs", "audit", run, "--storage", storage)
    assert code == 0, said


def _wait_for_first(kind: str, cluster: RayHosts, run: str, job: "subprocess.Popen[str]") -> None:
    """Waits until a run has anything in this folder of its own, `journal` or `checkpoints`."""
    wait_until(lambda: any((cluster.folder / "runs" / run / kind).glob("*")), f"{kind} of {run}", job, pause_s=0.2)


def _stop_when(cluster: RayHosts, flags: list[str], name: str, true: Callable[[], object]) -> None:
    """Submits a training, and ends it by `ray job stop` from the user's machine when something is true."""
    ray, address = str(PYTHON.with_name("ray")), f"--address={cluster.address}"
    script = [str(PYTHON), "ray_jobs/train.py", *flags]
    waits = {"RAY_JOB_STOP_WAIT_TIME_S": "60"}
    code, said = cluster.run(
        _user(cluster),
        *(ray, "job", "submit", address, "--submission-id", name, "--no-wait", "--working-dir", "."),
        *("--runtime-env-json", json.dumps({"env_vars": waits}), "--", *script),
    )
    assert code == 0, said
    wait_until(true, lambda: cluster.run(_user(cluster), ray, "job", "logs", address, name)[1], pause_s=0.2)
    code, said = cluster.run(_user(cluster), ray, "job", "stop", address, name)
    assert code == 0, said


@pytest.mark.weekly
def test_a_run_leaves_a_host_that_is_about_to_be_taken_away_and_loses_no_step(cluster: RayHosts) -> None:
    """By the notice that a cloud gives: workers save and go on elsewhere, to the bits of a worker that was left alone."""
    short = ["--train.exact", "true", "--train.steps", "3000", "--checkpoint.every", "100000", "--record.mlflow", "false"]
    flags = _flags(cluster, "preempted", *short, "--scaling.workers", "2")
    job = cluster.start_job(_user(cluster), "train", *flags)
    _wait_for_first("journal", cluster, "preempted", job)
    taken = wait_until(
        lambda: cluster.nodes_of_workers() - {cluster.head.address}, "a worker beside the head", job, pause_s=0.2
    ).pop()
    (leaving,) = (host for host in cluster.hosts.all if host.address == taken)
    code, said = cluster.run(leaving, str(PYTHON), "-m", "raystride", "node", "before-end", "--seconds", "120")
    assert code == 0, said  # nobody works there any more
    cluster.run(leaving, str(PYTHON.with_name("ray")), "stop", "--force")
    said = job.communicate(timeout=300)[0]
    assert job.returncode == 0, said
    assert f"to be taken away: {taken} in " in said
    found = _summary(cluster, "preempted")
    assert (found["status"], found["steps"]) == ("finished", 3000)
    assert int(str(found["resumed_from"])) > 0
    alone = _flags(cluster, "kept", *short, "--launch", "inline")
    code, said = cluster.run(_user(cluster), str(PYTHON), "-m", "raystride", "train", *alone)
    assert code == 0, said
    assert found["parameters_sha256"] == _summary(cluster, "kept")["parameters_sha256"]
    _assert_audited(cluster, "preempted")
    cluster.restart(next(number for number, host in enumerate(cluster.hosts.all) if host.address == taken))


@pytest.mark.weekly
def test_an_interface_that_hosts_do_not_share_is_named_at_once(cluster: RayHosts) -> None:
    """docker0 has an address that is reached from nowhere, and a user, or an image, has named it."""
    other = cluster.hosts[1]
    for command in ("link add docker0 type bridge", "addr add 172.17.0.1/16 dev docker0", "link set docker0 up"):
        other.run("ip", *command.split())
    cluster.restart(1, GLOO_SOCKET_IFNAME="docker0")
    flags = _flags(cluster, "docker", "--scaling.workers", "4", "--train.steps", "5", "--record.mlflow", "false")
    code, said = cluster.submit(_user(cluster), "train", *flags)
    assert code == 1, said
    assert "on h2 (docker0, 172.17.0.1)" in said
    assert "set GLOO_SOCKET_IFNAME" in said
    code, said = cluster.submit(_user(cluster), "check", *flags)
    assert "h2: 172.17.0.1" in said, said
    other.run("ip", "link", "del", "docker0")
    cluster.restart(1)


def _gated(cluster: RayHosts, run: str, *more: str) -> tuple[list[str], Path]:
    """Flags of a run whose preparation waits for a gate, and the gate."""
    source = write_source(cluster.folder / f"of-{run}")
    gate = source.with_name("gate")
    where = ["--data.source", str(source), "--data.shard_mib", "0.25", "--task", "gated", "--plugins", write_plugin(gate)]
    return _flags(cluster, run, *where, *more), gate


@pytest.mark.weekly
def test_workers_that_wait_for_data_are_stopped_and_go_on_as_more_of_them(cluster: RayHosts) -> None:
    """What is still being prepared by the processors that training leaves; another run waits for theirs meanwhile."""
    more = ["--data.start_after_mib", "0.25", "--train.slot_size", "256", "--train.steps", "80"]
    more += ["--checkpoint.every", "10", "--train.exact", "true", "--record.mlflow", "false"]
    flags, gate = _gated(cluster, "growing", *more)
    journal = cluster.folder / "runs" / "growing" / "journal"

    short = ["--train.steps", "5", "--record.mlflow", "false", "--scaling.workers", "3"]
    others: list[subprocess.Popen[str]] = []

    def both_wait() -> bool:
        if not any("training waits for its data" in file.read_text() for file in journal.glob("*")):
            return False
        others.append(cluster.start_job(_user(cluster), "train", *_flags(cluster, "second", *short)))
        assert others[0].stdout
        return any("waiting for 3 workers" in line for line in others[0].stdout)

    _stop_when(cluster, [*flags, "--scaling.workers", "2"], "growing", both_wait)
    said = others[0].communicate(timeout=300)[0]
    assert _summary(cluster, "second")["status"] == "finished", said
    before = _summary(cluster, "growing")
    assert (before["status"], before["workers"]) == ("stopped", 2), before
    gate.touch()
    code, said = cluster.submit(_user(cluster), "train", *flags, "--scaling.workers", "3")
    assert code == 0, said
    found = _summary(cluster, "growing")
    assert (found["resumed_from"], found["steps"], found["workers"]) == (before["steps"], 80, 3)
    _assert_audited(cluster, "growing")
    alone = [*flags, "--run", "grown", "--launch", "inline"]
    code, said = cluster.run(_user(cluster), str(PYTHON), "-m", "raystride", "train", *alone)
    assert code == 0, said
    assert found["parameters_sha256"] == _summary(cluster, "grown")["parameters_sha256"]


@pytest.mark.weekly
def test_a_preparation_outlives_a_host_and_makes_the_same_shards(cluster: RayHosts) -> None:
    """The last but one of this file: the host stays away."""
    flags, gate = _gated(cluster, "shards")
    job = cluster.start_job(_user(cluster), "prepare", *flags)
    parts = cluster.folder / "runs" / ".prepared"
    wait_until(
        lambda: len(list(parts.glob("*/parts/*.json"))) == 2, "two parts", job, pause_s=0.2
    )  # the other four are on the four hosts
    cluster.hosts[3].end()
    gate.touch()
    said = job.communicate(timeout=300)[0]
    assert job.returncode == 0, said
    alone = [*flags, "--storage", str(cluster.folder / "alone"), "--launch", "inline"]
    code, said = cluster.run(_user(cluster), str(PYTHON), "-m", "raystride", "prepare", *alone)
    assert code == 0, said
    (whole,) = (cluster.folder / "alone" / ".prepared").glob("*/manifest.json")
    assert (parts / whole.parent.name / "manifest.json").read_text() == whole.read_text()


def test_a_host_that_loses_its_power_costs_no_sample_and_changes_no_bit(cluster: RayHosts) -> None:
    """The last of this file: the host stays away."""
    exact = ["--train.exact", "true", "--train.steps", "1200", "--checkpoint.every", "100", "--record.mlflow", "false"]
    there = cluster.alive()  # another test may have cost a host
    elastic = ["--scaling.workers", str(there), "--scaling.min_workers", "1", "--launch.max_restarts", "3"]
    job = cluster.start_job(_user(cluster), "train", *_flags(cluster, "lost", *exact, *elastic))
    _wait_for_first("checkpoints", cluster, "lost", job)
    cluster.hosts[2].end()
    said = job.communicate(timeout=400)[0]
    assert job.returncode == 0, said
    found = _summary(cluster, "lost")
    assert (found["status"], found["steps"], found["workers"]) == ("finished", 1200, there - 1), said
    alone = _flags(cluster, "whole", *exact, "--launch", "inline")
    code, said = cluster.run(_user(cluster), str(PYTHON), "-m", "raystride", "train", *alone)
    assert code == 0, said
    assert found["parameters_sha256"] == _summary(cluster, "whole")["parameters_sha256"]
    _assert_audited(cluster, "lost")
