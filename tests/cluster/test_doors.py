"""Every port of a cluster that trains, as somebody hears it who has no token: docs/security.md is held to it."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.doors import heard, open_doors
from tests.cluster.faults import processes
from tests.cluster.hosts import ROOT, Host, unable
from tests.cluster.ray_hosts import PYTHON, RayHosts
from tests.tiny import write_text
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(unable("ss")), reason=f"no hosts here: {unable('ss')}"),
]
FLAGS = f"""
    --model.layers 1 --model.heads 2 --model.hidden_size 16 --model.context 16 --tokenizer.kind bytes --sample.tokens 0
    --train.slots 2 --train.slot_size 2 --train.steps {10**6} --checkpoint.every 50 --validation.every 0
    --data.kind text --data.validation tail --data.validation_fraction 0.1 --record.mlflow false --scaling.workers 2
""".split()
ROW = re.compile(r"^\| (?P<owner>[^|]+?) \| (?P<where>[^|]+?) \| (?P<heard>[^|]+?) \|", re.MULTILINE)
RANGE = "40000\t40999"
"""Of ports that the system gives to who asks for any, on these hosts; of others 32768 to 60999."""
PASSWORD = "hunter2-of-the-tracking-server"


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHosts]:
    """Two nodes that train, and a host that is none, with a job whose user has given it a password."""
    folder = tmp_path_factory.mktemp("doors")
    write_text(folder)
    place = ["--storage", str(folder), "--data.source", str(folder / "text.txt"), "--run", "open"]
    environment = json.dumps({"env_vars": {"MLFLOW_TRACKING_PASSWORD": PASSWORD}})

    def own(host: Host) -> dict[str, str]:
        host.run("sh", "-c", f"echo '{RANGE}' > /proc/sys/net/ipv4/ip_local_port_range")
        return {}

    with RayHosts(folder, 2, others=1, own=own) as cluster:
        script = [str(PYTHON), str(ROOT / "ray_jobs" / "train.py"), *FLAGS, *place]
        submit = [str(PYTHON.with_name("ray")), "job", "submit", f"--address={cluster.address}", "--no-wait"]
        code, said = cluster.run(cluster.hosts[2], *submit, f"--runtime-env-json={environment}", "--", *script)
        assert code == 0, said
        _await_checkpoint(folder, 0)
        yield cluster


def _await_checkpoint(folder: Path, after: int) -> int:
    """Waits for a checkpoint that is younger than a step; its step."""

    def newest() -> int:
        found = max((int(path.name.removeprefix("step-")) for path in folder.glob("open/checkpoints/step-*")), default=0)
        return found if found > after else 0

    return wait_until(newest, f"a checkpoint after step {after}", pause_s=0.2)


def _page() -> set[tuple[str, str, str]]:
    """The rows of the page's table of ports."""
    text = (ROOT / "docs" / "security.md").read_text()
    rows = {match.groups() for match in ROW.finditer(text[text.index("## Ports") :])}
    return {row for row in rows if row[0] not in ("service", "---")}  # type: ignore[misc]


def _found(cluster: RayHosts) -> set[tuple[str, str, str]]:
    """Who listens where, and what is heard there from a machine that is no node, over all nodes."""
    found, user = set(), cluster.hosts[cluster.nodes]
    for host in cluster.hosts.all[: cluster.nodes]:
        owners = open_doors(host)
        doors = {re.sub(r"^(\*|0\.0\.0\.0|::)(?=:\d+$)", host.address, where): where for where in owners}
        for reached, said in heard(user, doors).items():
            where, port = doors[reached].rsplit(":", 1)
            if said == "closed":
                continue  # it has ended meanwhile
            place = "every interface" if where in ("*", "0.0.0.0", "::") else "the cluster's"
            known = f", {port}" if int(port) in (6379, 8265, 10001, 52365) else ""
            found.add((owners[doors[reached]], place + known, said))
    return found


@pytest.mark.weekly
def test_the_page_says_of_every_port_what_is_heard_there(training: RayHosts) -> None:
    found = _found(training)
    assert ("training worker", "the cluster's", "unauthenticated") in found  # gloo and PyTorch's store
    assert not any(said.startswith("open") for _, _, said in found), found
    assert found == _page(), "\n".join(f"| {' | '.join(row)} | |" for row in sorted(found))


@pytest.mark.weekly
def test_what_asks_nobody_has_a_port_of_the_range_and_of_no_other_interface(training: RayHosts) -> None:
    first, last = map(int, RANGE.split())
    numbers = []
    for host in training.hosts.all[:2]:
        ours = [where for where, owner in open_doors(host).items() if owner == "training worker" and "*" not in where]
        numbers.append(len(ours))
        for where in ours:
            address, _, port = where.rpartition(":")
            assert address == host.address
            assert first <= int(port) <= last
    assert sorted(numbers) == [2, 3], "gloo's two groups, and PyTorch's store beside the first worker"


@pytest.mark.weekly
def test_a_submitted_jobs_workers_do_not_have_its_login(training: RayHosts) -> None:
    """Its driver has it, by the job's `runtime_env`."""
    for host in training.hosts.all[:2]:
        workers = processes(host, "RayTrainWorker")
        assert workers
        assert not [each for each in workers if PASSWORD.encode() in Path(f"/proc/{each.pid}/environ").read_bytes()]
    (driver, *_) = processes(training.head, str(ROOT / "ray_jobs" / "train.py"))
    assert PASSWORD.encode() in Path(f"/proc/{driver.pid}/environ").read_bytes()


@pytest.mark.weekly
@pytest.mark.skipif(shutil.which("nft") is None, reason="nftables is not installed")
def test_the_pages_firewall_closes_all_of_them_and_the_training_goes_on(training: RayHosts) -> None:
    """The last of this file: it stays."""
    text = (ROOT / "docs" / "security.md").read_text()
    (rules,) = re.findall(r"```text\n(table inet raystride .*?)```", text, re.DOTALL)
    hosts = training.hosts.all[:2]
    rules = rules.replace("10.0.0.1", hosts[0].address).replace("10.0.0.2", hosts[1].address)
    # The page's default, and what has it on these hosts.
    rules = rules.replace("32768-60999", RANGE.replace("\t", "-") + ", 44217, 44227, 52365")
    (file := training.folder / "rules.nft").write_text(rules)
    user, doors = training.hosts[2], {}
    for host in hosts:
        doors |= {re.sub(r"^(\*|0\.0\.0\.0)(?=:)", host.address, where): owner for where, owner in open_doors(host).items()}
        host.run("nft", "-f", str(file))
    assert set(heard(user, doors).values()) == {"closed"}
    steps = _await_checkpoint(training.folder, 0)
    assert _await_checkpoint(training.folder, steps + 100) > steps
