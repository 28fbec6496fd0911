"""Faults on a cluster of three hosts, one a run, drawn from all kinds: which bits came out, and how long nothing went on.

Each run is an exact, elastic training of a tiny decoder, submitted from a fourth host. Some seconds after its first
checkpoint something happens (`KINDS`); the run has to come to its end by itself, with the parameters of an undisturbed
inline run, and an audit without a lost or repeated sample. Its standstill is the longest time in which no step was made
that had not been made before.

    python -m benchmarks.soak --faults 200 --rows soak.jsonl             # as root; about two minutes a fault
    python -m benchmarks.soak --faults 200 --rows soak.jsonl --resume    # goes on after the rows that are there
"""

import json
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.pairs import Spread, command_line, machine, machine_line, report
from raystride.pipelines.observability.record import read_entries
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.checkpoint.audit import AuditFailed, audit
from tests.clock import no_clock, wrong_clock
from tests.cluster.faults import WORKER, full_disk, kill_tables, kill_worker, processes, slowed
from tests.cluster.hosts import unable
from tests.cluster.ray_hosts import PYTHON, RayHosts
from tests.tiny import write_text

STEPS = 2500
NODES = 3
FLAGS = f"""
    --model.layers 2 --model.heads 2 --model.hidden_size 16 --model.context 16 --tokenizer.kind bytes --sample.tokens 0
    --train.slots 4 --train.slot_size 2 --train.log_every 5 --train.exact true --checkpoint.every 50 --train.steps {STEPS}
    --data.kind text --data.validation tail --data.validation_fraction 0.1 --validation.every 0
    --optimizer.schedule constant --record.mlflow false
""".split()
ELASTIC = f"""
    --scaling.workers {NODES} --scaling.min_workers 1 --scaling.resize_every_s 5
    --launch.max_restarts 9 --launch.max_resubmissions 9 --launch.cluster_timeout_s 120
""".split()
SOON = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "4",
}
"""Has the head give up a host that does not answer sooner than by Ray's own settings, which takes some 30 s."""
LIMIT_S = 1800.0
"""Longest time that a run may take: on a busy machine each step takes ten times as long as on a quiet one."""
AIMS = {"worker": 10.0, "host": 25.0, "head": 40.0, "partition": 60.0}
"""Seconds of standstill on a quiet machine, at most."""


@dataclass(frozen=True)
class Row:
    """What became of one fault."""

    number: int
    kind: str
    steps_before: int
    """Steps that had been made when it happened, by the newest checkpoint."""
    ended: bool
    same_bits: bool
    audit: str
    """Empty where no sample was lost or repeated."""
    standstill_s: float
    seconds: float
    """From the fault to the end of the run."""


Fault = Callable[[RayHosts, random.Random], None]
"""Makes it happen, and repairs what does not repair itself."""


def lose_worker(cluster: RayHosts, draw: random.Random) -> None:
    """A training process gets a SIGKILL."""
    kill_worker(draw.choice([host for host in cluster.hosts.all[:NODES] if processes(host, WORKER)]))


def lose_host(cluster: RayHosts, draw: random.Random) -> None:
    """A host loses its power, and comes back after a while with nothing on its disk."""
    _end_hosts(cluster, [draw.randrange(1, NODES)], draw)


def lose_two_hosts(cluster: RayHosts, draw: random.Random) -> None:
    """All but the head at once."""
    _end_hosts(cluster, list(range(1, NODES)), draw)


def _end_hosts(cluster: RayHosts, numbers: list[int], draw: random.Random, **variables: str) -> None:
    for number in numbers:
        cluster.hosts[number].end()
    time.sleep(draw.uniform(2, 20))
    for number in numbers:
        cluster.hosts.renew(number)
        cluster.start(number, **variables)


def lose_tables(cluster: RayHosts, draw: random.Random) -> None:
    """The head's server of tables is killed, and started again."""
    kill_tables(cluster, draw.uniform(0, 15))


def lose_head(cluster: RayHosts, draw: random.Random) -> None:
    """All of Ray on the head ends, and the job's driver with it; then the head is started again."""
    cluster.run(cluster.head, str(PYTHON.with_name("ray")), "stop", "--force")
    time.sleep(draw.uniform(0, 10))
    cluster.start(0)


def part(cluster: RayHosts, draw: random.Random) -> None:
    """One host, or both but the head, cannot reach the rest for a while, nor be reached."""
    away = draw.choice([[1], [2], [1, 2]])
    cluster.hosts.part([number for number in range(NODES + 1) if number not in away], away)
    time.sleep(draw.uniform(1, 100))
    cluster.hosts.heal()


def announce(cluster: RayHosts, draw: random.Random) -> None:
    """A host is to be taken away in half a minute, and is."""
    number = draw.randrange(1, NODES)
    cluster.drain(cluster.hosts[number].address, seconds=30)
    time.sleep(30)
    _end_hosts(cluster, [number], draw)


def slow(cluster: RayHosts, draw: random.Random) -> None:
    """A host computes ten times as slowly for a while."""
    with slowed(cluster.hosts[draw.randrange(NODES)], times=10):
        time.sleep(draw.uniform(5, 40))


def fill(cluster: RayHosts, draw: random.Random) -> None:
    """A host's own disk is full for a while."""
    with full_disk(cluster.hosts[draw.randrange(NODES)]):
        time.sleep(draw.uniform(5, 30))


def shift_clock(cluster: RayHosts, draw: random.Random) -> None:
    """A host is lost, and comes back with a clock that is an hour off."""
    number = draw.randrange(1, NODES)
    clock = wrong_clock(cluster.folder, draw.choice([-3600, 3600]))
    _end_hosts(cluster, [number], draw, **clock)


def lose_driver(cluster: RayHosts, draw: random.Random) -> None:
    """The host with the job's driver loses its power, and comes back after a while."""
    _end_hosts(cluster, [DRIVER], draw)


def part_driver(cluster: RayHosts, draw: random.Random) -> None:
    """The host with the job's driver cannot reach the rest for a while, the head's tables neither."""
    cluster.hosts.part([number for number in range(NODES + 1) if number != DRIVER], [DRIVER])
    time.sleep(draw.uniform(1, 100))
    cluster.hosts.heal()


KINDS: Mapping[str, Fault] = {
    "worker": lose_worker,
    "host": lose_host,
    "two hosts": lose_two_hosts,
    "tables": lose_tables,
    "head": lose_head,
    "partition": part,
    "preemption": announce,
    "slow host": slow,
    "full disk": fill,
    "clock": shift_clock,
    "driver's host": lose_driver,
    "driver parted": part_driver,
}
DRIVER = 1
"""The host on which the driver is with the last two kinds; with the others it is on the head."""


class Soak:
    """Runs of one cluster, which is made anew where a fault has left it with fewer nodes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.storage = folder, folder / "runs"
        self.storage.mkdir()
        write_text(folder)
        self._cluster: RayHosts | None = None
        alone = [*self._flags("undisturbed"), "--launch", "inline"]
        done = subprocess.run(
            [sys.executable, "-m", "raystride", "train", *alone], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        self.bits = self._summary("undisturbed")["parameters_sha256"]

    def close(self) -> None:
        """Ends the cluster."""
        if self._cluster:
            self._cluster.__exit__(None, None, None)
            self._cluster = None

    def fault(self, number: int, kind: str) -> Row:
        """One run, and what happened to it."""
        draw, run = random.Random(number), f"fault-{number}"
        cluster = self._whole_cluster()
        driver = cluster.hosts[DRIVER] if kind.startswith("driver") else None
        job = cluster.start_job(cluster.hosts[NODES], "train", *self._flags(run), *ELASTIC, driver=driver)
        checkpoints = self.storage / run / "checkpoints"
        _wait(lambda: checkpoints.is_dir() and any(checkpoints.glob("step-*/MANIFEST.json")), "no checkpoint")
        time.sleep(draw.uniform(0, 8))
        steps, began = max(int(each.name[5:]) for each in checkpoints.glob("step-*")), time.time()
        KINDS[kind](cluster, draw)
        ended = _wait(lambda: self._summary(run).get("status") == "finished")
        summary = self._summary(run)
        lasted, audited = time.time() - began, _audit_problem(checkpoints)
        if not ended or kind == "clock":  # a host goes on with the wrong one
            self.close()
        job.kill()
        (self.folder / f"{run}.log").write_text(job.communicate()[0] or "")
        same = summary.get("parameters_sha256") == self.bits
        return Row(
            number, kind, steps, ended, same, audited, round(longest_standstill_s(self.storage / run), 1), round(lasted, 1)
        )

    def _whole_cluster(self) -> RayHosts:
        """The cluster with all of its nodes; a new one where they do not come back."""
        if self._cluster and not _wait(lambda: self._cluster.alive() == NODES, limit_s=90):  # type: ignore[union-attr]
            self.close()
        if not self._cluster:
            self._cluster = RayHosts(self.folder, NODES, others=1, lasting=True)
            self._cluster.variables |= SOON
            self._cluster.__enter__()
            self._cluster.wait_for(NODES)
        return self._cluster

    def _flags(self, run: str) -> list[str]:
        return [*FLAGS, "--storage", str(self.storage), "--data.source", str(self.folder / "text.txt"), "--run", run]

    def _summary(self, run: str) -> dict[str, Any]:
        file = self.storage / run / "summary.json"
        return dict(json.loads(file.read_text())) if file.exists() else {}


def _wait(true: Callable[[], object], otherwise: str = "", limit_s: float = LIMIT_S) -> bool:
    """Waits until something is true; whether it came to be. Raises AssertionError, where `otherwise` says of what."""
    deadline = time.monotonic() + limit_s
    while not true():
        if time.monotonic() > deadline:
            assert not otherwise, otherwise
            return False
        time.sleep(0.5)
    return True


def _audit_problem(checkpoints: Path) -> str:
    """What is wrong with the samples that a run was fed; empty where nothing is."""
    try:
        audit(Folder.from_uri(str(checkpoints)))
    except (AuditFailed, OSError, ValueError, KeyError, IndexError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def longest_standstill_s(run: Path) -> float:
    """The longest time between two steps that were made for the first time, in seconds."""
    newest, at, longest = 0, 0.0, 0.0
    for entry in sorted(read_entries(Folder.from_uri(str(run))), key=lambda each: each["time"]):
        step = entry.get("step") or 0
        if entry["kind"] == "metrics" and "train_loss" in entry["values"] and step > newest:
            longest = max(longest, entry["time"] - at) if at else 0.0
            newest, at = step, entry["time"]
    return longest


def table(rows: list[Row]) -> str:
    """A line a kind."""
    by_kind: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_kind[row.kind].append(row)
    lines = [f"{'kind':<14} faults  same bits  audit clean  standstill in s: median [range], most   aim"]
    for kind, there in by_kind.items():
        spread = Spread.of([row.standstill_s for row in there])
        same, clean = sum(row.same_bits for row in there), sum(not row.audit for row in there)
        most = max(row.standstill_s for row in there)
        aim = f"{AIMS[kind]:g}" if kind in AIMS else ""
        still = f"{spread.text('.1f')}, {most:.1f}"
        lines.append(f"{kind:<15}{len(there):<8}{same:<11}{clean:<13}{still:<41}{aim}")
    lines.append(f"{len(rows)} faults: {sum(row.same_bits for row in rows)} ended with the right bits, ")
    lines[-1] += f"{sum(not row.audit for row in rows)} with no sample lost or repeated"
    return "\n".join(lines)


@contextmanager
def open_soak(folder: str | None) -> Iterator[Soak]:
    """A soak in a folder, or in one that goes with it."""
    with tempfile.TemporaryDirectory() as scratch:
        soak = Soak(Path(folder or scratch))
        try:
            yield soak
        finally:
            soak.close()


def main() -> None:
    """Runs from a shell."""
    parser = command_line("soak", __doc__)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--rows", type=Path, default=Path("soak.jsonl"), help="a line of JSON a fault")
    parser.add_argument("--resume", action="store_true", help="go on after the rows that are there")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="where the runs are to stay")
    given = parser.parse_args()
    if problem := unable("tc") or no_clock():
        parser.error(problem)
    there = given.rows.read_text().splitlines() if given.resume and given.rows.exists() else []
    rows = [Row(**json.loads(line)) for line in there]
    if not given.resume:
        given.rows.write_text("")
    print(machine_line(found := machine()), flush=True)
    with open_soak(given.folder) as soak:
        for number in range(len(rows), given.faults):
            # A round of all kinds in an order of its own, and then the next.
            order = random.Random(given.seed + number // len(given.kinds)).sample(given.kinds, len(given.kinds))
            row = soak.fault(given.seed + number, order[number % len(order)])
            rows.append(row)
            with given.rows.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
            print(f"{number + 1}/{given.faults}  {row}", flush=True)
    print(table(rows))
    report(given, found, [], rows=[asdict(row) for row in rows])


if __name__ == "__main__":
    main()
