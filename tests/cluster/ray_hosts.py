"""A Ray cluster on hosts of this machine, see `hosts`, with a token, by the commands of docs/cluster.md.

with RayHosts(tmp_path, 4, others=1) as cluster:          # h1 is the head, h5 has no Ray: a user's machine
    done = cluster.submit("train", "--run", "tiny", on=cluster.hosts[4])
"""

import contextlib
import json
import os
import secrets
import shlex
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from raystride.pipelines.launch.cluster.cluster import MAX_STARTS, STARTUP_TIMEOUT_TEXT
from tests.cluster.hosts import ROOT, Host, Hosts
from tests.waiting import wait_until

PORT, DASHBOARD = 6379, 8265
PYTHON = Path(sys.prefix) / "bin" / "python"


def of_page(begins: str, head: str) -> list[str]:
    """The first command of docs/cluster.md that begins so, as its users paste it, with their head's address."""
    lines = (ROOT / "docs" / "cluster.md").read_text().splitlines()
    command = next(line for line in lines if line.startswith(begins))
    return shlex.split(command.replace("HEAD", head), comments=True)


class RayHosts(contextlib.AbstractContextManager["RayHosts"]):
    """So many hosts with Ray, the first its head, and others without; `folder` is the same on all.

    A `lasting` head has its tables on its disk, and is the same cluster when it is started again. Nodes have `python`. What
    `own` gives of a host is in the environment of all that is run there; it is asked when hosts are there, and Ray is not.
    """

    def __init__(
        self,
        folder: Path,
        nodes: int,
        others: int = 0,
        bandwidth: str = "",
        cpus: int = 1,
        *,
        latency_ms: float = 0.0,
        lasting: bool = False,
        python: Path = PYTHON,
        own: Callable[[Host], dict[str, str]] = lambda host: {},
    ) -> None:
        self.folder, self.nodes, self._cpus, self._python = folder, nodes, cpus, python
        self._tables = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": "/tmp/tables"} if lasting else {}
        self.hosts = Hosts(folder, nodes + others, bandwidth, latency_ms)
        self._ask_own, self._own = own, dict[str, dict[str, str]]()
        token = folder / "token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        self.variables = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "HOME": "/tmp/home",
            "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
        }
        self._running = contextlib.ExitStack()

    @property
    def head(self) -> Host:
        """The host with the head."""
        return self.hosts[0]

    @property
    def address(self) -> str:
        """Where jobs are submitted."""
        return f"http://{self.head.address}:{DASHBOARD}"

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.hosts)
            self._own = {host.name: self._ask_own(host) for host in self.hosts.all}
            self.start(0)
            with ThreadPoolExecutor() as pool:
                list(pool.map(self.start, range(1, self.nodes)))
            self._running = stack.pop_all()
        return self

    def __exit__(self, *raised: object) -> None:
        self._running.close()

    def start(self, number: int, **variables: str) -> None:
        """Starts Ray on a host, the head's on the first, with more in its environment."""
        variables |= self._tables if number == 0 else {}
        for _ in range(MAX_STARTS):
            process = self._popen(self.hosts[number], self._start(self.hosts[number]), **variables)
            said = process.communicate(timeout=180)[0]
            if STARTUP_TIMEOUT_TEXT not in said:
                break
        assert not process.returncode, said

    def restart(self, number: int, **variables: str) -> None:
        """Stops Ray on a host and starts it again, a node of another name to the cluster; returns when all are there."""
        self.run(self.hosts[number], str(PYTHON.with_name("ray")), "stop", "--force")
        self.start(number, **variables)
        self.wait_for(self.nodes)

    def _start(self, host: Host) -> list[str]:
        begins = "ray start --head --dashboard-host" if host is self.head else "ray start --address"
        _, *command = of_page(begins, self.head.address)
        limits = [f"--num-cpus={self._cpus}", "--object-store-memory=100000000", "--disable-usage-stats"]
        return [str(self._python), "-m", "ray.scripts.scripts", *command, *limits]

    def _popen(self, host: Host, command: list[str], **variables: str) -> "subprocess.Popen[str]":
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        there = host.command(["env", "--chdir", str(ROOT), *command])  # who enters a mount namespace is at its root
        own = self._own.get(host.name, {})
        return subprocess.Popen(there, env=os.environ | self.variables | own | variables, text=True, **pipes)

    def run(self, host: Host, *command: str, limit_s: float = 300, **variables: str) -> tuple[int, str]:
        """A command of ours on a host, to its end; its exit code, and what it printed."""
        process = self._popen(host, list(command), **variables)
        said = process.communicate(timeout=limit_s)[0]
        return process.returncode, said

    def submit(self, on: Host, job: str, *arguments: str, limit_s: float = 300) -> tuple[int, str]:
        """`ray job submit` of one of our jobs from a host, to its end; Ray's exit code, and what it printed."""
        process = self.start_job(on, job, *arguments)
        said = process.communicate(timeout=limit_s)[0]
        return process.returncode, said

    def start_job(self, on: Host, job: str, *arguments: str, driver: Host | None = None) -> "subprocess.Popen[str]":
        """Submits one of our jobs from a host, and does not wait for its end; its `driver` is on the head, or there."""
        command = of_page("ray job submit --address", self.head.address)
        submit = [str(PYTHON.with_name("ray")), *command[1 : command.index("--")]]
        if driver:
            submit += ["--entrypoint-resources", json.dumps({f"node:{driver.address}": 0.001})]
        return self._popen(on, [*submit, "--", "raystride", job, *arguments])

    def drain(self, address: str, seconds: int) -> None:
        """Tells Ray what a cloud tells it: that a node will be taken away in so many seconds."""
        (node,) = (node for node in self._nodes() if node["Alive"] and node["NodeManagerAddress"] == address)
        reason = ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=test"]
        place = [f"--address={self.head.address}:{PORT}", f"--node-id={node['NodeID']}"]
        ray = str(PYTHON.with_name("ray"))
        code, said = self.run(self.head, ray, "drain-node", *place, *reason, f"--deadline-remaining-seconds={seconds}")
        assert code == 0, said

    def nodes_of_workers(self) -> set[str]:
        """Addresses of the nodes on which workers train."""
        found = self._asked(
            "from ray.util.state import list_actors",
            "alive = [each for each in list_actors() if each.state == 'ALIVE']",
            "answer = [each.node_id for each in alive if 'RayTrainWorker' in each.class_name]",
        )
        return {node["NodeManagerAddress"] for node in self._nodes() if node["NodeID"] in found}

    def _nodes(self) -> list[dict[str, Any]]:
        return self._asked("answer = ray.nodes()")

    def _asked(self, *script: str) -> Any:
        """The `answer` of some lines of Python that have joined the cluster, among what Ray says besides."""
        lines = [
            "import json, ray",
            "ray.init('auto', logging_level='ERROR')",
            *script,
            "print('answer', json.dumps(answer))",
        ]
        said = self.run(self.head, str(PYTHON), "-c", "\n".join(lines))[1]
        (answer,) = (line.removeprefix("answer ") for line in said.splitlines() if line.startswith("answer "))
        return json.loads(answer)

    def alive(self) -> int:
        """How many of the nodes Ray takes to be alive."""
        return sum(node["Alive"] for node in self._nodes())

    def wait_for(self, nodes: int) -> None:
        """Waits until so many nodes are there."""
        wait_until(lambda: self.alive() == nodes, lambda: f"{nodes} nodes in place of {self.alive()}", pause_s=0.5)
