"""Every port of a cluster that trains, as somebody hears it who has no token: docs/security.md is held to it."""

import re
import time
from pathlib import Path

import pytest

from tests.cluster.doors import heard, open_doors
from tests.cluster.hosts import ROOT, unable
from tests.cluster.ray_hosts import RayHosts
from tests.tiny import write_text

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(unable("ss")), reason=f"no hosts here: {unable('ss')}"),
]
FLAGS = f"""
    --model.layers 1 --model.heads 2 --model.width 16 --model.context 16 --tokenizer.kind bytes --sample.tokens 0
    --train.slots 2 --train.slot_size 2 --train.steps {10**6} --checkpoint.every 50 --validation.every 0
    --data.kind text --data.validation tail --data.validation_fraction 0.1 --record.mlflow false --scaling.workers 2
""".split()
ROW = re.compile(r"^\| (?P<owner>[^|]+?) \| (?P<where>[^|]+?) \| (?P<heard>[^|]+?) \|", re.MULTILINE)
WAITS_S = 120


def _page() -> set[tuple[str, str, str]]:
    """The rows of the page's table of ports."""
    text = (ROOT / "docs" / "security.md").read_text()
    rows = {match.groups() for match in ROW.finditer(text[text.index("## Ports") :])}
    return {row for row in rows if row[0] not in ("who listens", "---")}  # type: ignore[misc]


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


def test_the_page_says_of_every_port_what_is_heard_there(tmp_path: Path) -> None:
    write_text(tmp_path)
    place = ["--storage", str(tmp_path), "--data.source", str(tmp_path / "text.txt"), "--run", "open"]
    with RayHosts(tmp_path, 2, others=1) as cluster:
        job = cluster.start_job(cluster.hosts[2], "train", *FLAGS, *place)
        deadline = time.monotonic() + WAITS_S
        while not (tmp_path / "open" / "checkpoints").is_dir():
            assert job.poll() is None, job.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.5)
        found = _found(cluster)
        job.kill()
    assert ("training worker", "the cluster's", "asks nobody") in found  # gloo and PyTorch's store
    assert not any(said.startswith("open") for _, _, said in found), found
    assert found == _page(), "\n".join(f"| {' | '.join(row)} | |" for row in sorted(found))
