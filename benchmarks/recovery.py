"""From a loss to the end of the first step after it, in seconds: a worker by SIGKILL, and a whole node.

Two workers of one thread train nanoGPT's small model and save every 20 steps. A worker that dies is followed by another
group of two on the same local cluster (`launch.max_restarts`). A node that dies leaves one worker on the other of two nodes,
which are processes of this machine (`scaling.min_workers`); here Ray looks after its nodes each half second, and with
`--patient` as it does by default, each 3 s and five times. A loss is when the signal was sent; a step's end is when rank 0
logged it in the journal.

    python -m benchmarks.recovery --rounds 5                   # about 4 minutes on two cores
"""

import argparse
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks import runs
from benchmarks.pairs import Spread, command_line, machine, machine_line, report, take_turns
from raystride.pipelines.observability.record import read_entries
from raystride.pipelines.system.storage.folder import Folder

Recovery = dict[str, float]
"""Seconds of each part of a recovery, in order; their sum is the whole."""
AIMS = {"a worker killed": 10, "a node lost": 25}
PARTS = {
    "noticed": "rank 0 learns that its peer is gone, or dies",
    "worker": "Ray's bookkeeping, worker processes",
    "torch": "import torch",
    "build": "model, process group, checkpoint, loader",
    "first_step": "the step itself",
}
"""What each part of a recovery holds."""
FLAGS = [
    *("--scaling.workers=2", "--scaling.threads=1", "--checkpoint.every=20"),
    *("--train.steps=1000000", "--train.log_every=1"),
]
QUICK = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 3}
STEPS = 45
"""Steps before the loss, so that the third save is some steps old."""
LIMIT_S = 180.0


class Run:
    """A run under way, by its journal."""

    def __init__(self, process: subprocess.Popen[str], folder: Folder) -> None:
        self.process, self.folder = process, folder

    def groups(self) -> list[list[dict[str, Any]]]:
        """The entries of each rank 0, in the order in which they trained."""
        found: dict[str, list[dict[str, Any]]] = {}
        for entry in read_entries(self.folder):
            if entry["sender"].startswith("rank0."):
                found.setdefault(entry["sender"], []).append(entry)
        return list(found.values())

    def wait(self, true: Callable[[list[list[dict[str, Any]]]], bool]) -> list[list[dict[str, Any]]]:
        """The groups once something is true of them. Raises runs.Failed where that does not come."""
        deadline = time.monotonic() + LIMIT_S
        while not true(groups := self.groups()):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise runs.Failed(f"it did not recover:\n{''.join(self.process.communicate())[-3000:]}")
            time.sleep(0.5)
        return groups


@contextmanager
def start_run(storage: Path, *flags: str, **environment: str) -> Iterator[Run]:
    """A run that has made its steps, and ends with the block."""
    name = f"run-{secrets.token_hex(4)}"
    process = subprocess.Popen(
        [sys.executable, "ray_jobs/train.py", *flags, *FLAGS, "--storage", str(storage), "--run", name],
        cwd=runs.ROOT,
        env=os.environ | runs.ENVIRONMENT | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        run = Run(process, Folder.from_uri(str(storage / name)))
        run.wait(lambda groups: bool(groups) and len(steps(groups[0])) >= STEPS)
        yield run
        process.terminate()  # SIGINT is ignored by what a script starts in the background
        process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()


def steps(group: Sequence[dict[str, Any]]) -> list[float]:
    """When a group's steps ended."""
    return [entry["time"] for entry in group if entry["kind"] == "metrics" and "train_loss" in entry["values"]]


def time_recovery(run: Run, lost_at: float) -> Recovery:
    """Waits for the first step of the group that follows; where the seconds since the loss went."""
    before, after, *_ = run.wait(lambda groups: len(groups) > 1 and bool(steps(groups[1])))
    values = next(entry["values"] for entry in after if "start/first_step_s" in entry.get("values", {}))
    parts = {name: float(values[f"start/{name}_s"]) for name in ("torch", "build", "first_step")}
    noticed = max(0.0, max(entry["time"] for entry in before) - lost_at)
    return {"noticed": noticed, "worker": steps(after)[0] - lost_at - noticed - sum(parts.values())} | parts


def lose_a_worker(storage: Path, flags: Sequence[str]) -> Recovery:
    """A run on a cluster of its own, one of whose workers gets a SIGKILL."""
    with start_run(storage, *flags, "--launch.max_restarts=3") as run:
        children = psutil.Process(run.process.pid).children(recursive=True)
        victim = [child for child in children if "RayTrainWorker" in " ".join(child.cmdline())][1]
        lost_at = time.time()
        victim.kill()
        return time_recovery(run, lost_at)


def lose_a_node(storage: Path, flags: Sequence[str], system: dict[str, int]) -> Recovery:
    """An elastic run on a cluster of two nodes, one of which is killed with all that runs on it."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "include_dashboard": False, "_system_config": system}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        node = cluster.add_node(num_cpus=1)
        address = (f"--launch.address={cluster.address}", "--launch.max_restarts=3", "--scaling.min_workers=1")
        # Without a word a driver sends this machine's token, where there is one, and this cluster has none.
        with start_run(storage, *flags, *address, RAY_AUTH_MODE="disabled") as run:
            lost_at = time.time()
            cluster.remove_node(node, allow_graceful=False)
            return time_recovery(run, lost_at)
    finally:
        cluster.shutdown()


def table(found: dict[str, list[Recovery]]) -> str:
    """Where the time goes: the median seconds of each part by what was lost, and the whole with its spread."""
    lines = [f"{'median seconds':<58}" + "".join(f"{way:>18}" for way in found)]
    for part, what in PARTS.items():
        cells = [statistics.median(each[part] for each in recoveries) for recoveries in found.values()]
        lines.append(f"  {part:<12}{what:<44}" + "".join(f"{cell:>18.2f}" for cell in cells))
    lines.append("\nseconds from the loss to the end of the first step after it")
    for way, recoveries in found.items():
        spread = Spread.of([sum(each.values()) for each in recoveries])
        lines.append(f"  {way:<18}{spread.text('.1f'):<22}({spread.meaning}; aim: at most {AIMS[way]})")
    return "\n".join(lines)


def compare(given: argparse.Namespace, work: Path) -> None:
    """Both losses in turns; prints how long each took to mend, and where the time went."""
    found = machine("2 workers of 1 thread")
    print(machine_line(found))
    text, storage = runs.small_text(work), work / "runs"
    flags = runs.small_setting(text)
    runs.prepare(storage, *flags)
    ways: dict[str, Callable[[], Recovery]] = {
        "a worker killed": partial(lose_a_worker, storage, flags),
        "a node lost": partial(lose_a_node, storage, flags, {} if given.patient else QUICK),
    }
    if given.only:
        ways = {way: lose for way, lose in ways.items() if way.split()[1] == given.only}
    recoveries = take_turns(ways, given.rounds, lambda _, parts: f"{sum(parts.values()):.1f} s")
    print(f"\n{table(recoveries)}")
    report(given, found, [], recoveries=recoveries, aims={f"{way}, seconds at most": AIMS[way] for way in recoveries})


def main() -> None:
    """Parses the command line and runs what it asks for."""
    parser = command_line("recovery", __doc__, rounds=5)
    parser.add_argument("--only", choices=["worker", "node"], help="lose only that")
    parser.add_argument("--patient", action="store_true", help="Ray's own health checks of nodes")
    with tempfile.TemporaryDirectory(prefix="recovery-") as scratch:
        compare(parser.parse_args(), Path(scratch))


if __name__ == "__main__":
    main()
