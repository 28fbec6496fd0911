"""Runs that are struck at any moment, again and again until a start ends: the bits of an undisturbed one, recorded once.

A chain is one run in a fresh storage, MLflow on. Each start is struck at a moment that is drawn evenly over the time of an
undisturbed run, from the start of its process to its end. Faults: SIGKILL of the whole process tree; a small file system
that fills; a disk that turns read-only; a library that fails one call in a hundred below the storage; SIGSTOP for longer
than a lease, while another driver takes over; `ray stop --force` beside it. A chain ends right if its last start ends with
the bits and figures of the undisturbed run, its audit has every sample once, `runs list` lists it once, and MLflow has it
once, with each measurement of its journal once and the curves of the undisturbed run.

    python -m benchmarks.crash --share 0.1                    # a tenth of the plan, in parts of which each has one at least
    python -m benchmarks.crash --outcomes crash.jsonl         # goes on where the last call with this file ended
    python -m benchmarks.crash --outcomes crash.jsonl --only disk/inline/kill --minutes 20
    python -m benchmarks.crash --only disk/inline/kill --chain 17       # that chain alone, once more
"""

import argparse
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any, Literal

import psutil

from benchmarks.pairs import machine, machine_line
from raystride.pipelines.system.storage.folder import Folder

Mode = Literal["inline", "ray"]
CALLS = Path(__file__).with_name("crash_calls.c")
ROOT = CALLS.parents[1]
RUN = "struck"
SAME = ("parameters_sha256", "steps", "samples_seen", "tokens_seen", "val_loss", "train_loss")
METRICS = ("train/loss", "train/gradient_norm", "train/learning_rate", "train/epoch", "train/tokens_seen", "val/loss")
"""MLflow's that are the same in each run; the others are times and bytes."""
MOST = 8
"""Blows of a chain; the next start is left alone."""
ONE_IN = 100
"""Calls of which one fails."""
SETTINGS: dict[str, dict[str, Any]] = {
    "data": {"kind": "text", "validation": "tail", "validation_fraction": 0.1},
    "tokenizer": {"kind": "bytes"},
    "model": {"layers": 2, "heads": 2, "hidden_size": 16, "context": 16, "dropout": 0.2},
    "optimizer": {"learning_rate": 0.01, "warmup_steps": 2},
    "train": {"steps": 20, "slots": 4, "slot_size": 2, "log_every": 2, "exact": True, "clip_norm": 0.5},
    "validation": {"every": 4, "samples": 15},
    "checkpoint": {"every": 4, "keep": 2},
    "sample": {"tokens": 4},
}


@dataclass(frozen=True)
class Part:
    """Chains of one kind, as the plan has them."""

    place: Literal["disk", "S3"]
    mode: Mode
    fault: Literal["kill", "full disk", "read-only", "failing calls", "lease", "ray stop"]
    blows: int
    """How many the whole plan has."""

    @property
    def name(self) -> str:
        return f"{self.place}/{self.mode}/{self.fault}"


PLAN = (
    Part("disk", "inline", "kill", 200),
    Part("disk", "ray", "kill", 100),
    Part("S3", "inline", "kill", 67),
    Part("S3", "ray", "kill", 33),
    Part("disk", "inline", "full disk", 20),
    Part("disk", "inline", "read-only", 20),
    Part("disk", "inline", "failing calls", 40),
    Part("disk", "inline", "lease", 10),
    Part("disk", "ray", "ray stop", 10),
)


@dataclass
class Outcome:
    """How a chain has ended, as a line of the file of outcomes."""

    part: str
    chain: int
    blows: int = 0
    refused: int = 0
    """Starts that the fault ended, with a message that names it."""
    problems: list[str] = field(default_factory=list)
    """What is wrong; none: it ended right."""
    moments: dict[str, int] = field(default_factory=dict)
    """How far the starts were that were struck."""
    printed: str = ""
    """What the last start printed, if something is wrong."""
    seconds: float = 0.0


class Wrong(Exception):
    """A chain that has not ended right."""


# Starts: a process with all that it started.


class Start:
    """The command `train` on the chain's run, in a process of its own, and how far it is."""

    def __init__(self, chain: "Chain", *, own_namespace: bool = False, variables: dict[str, str] | None = None) -> None:
        from tests.ray_jobs.jobs import environment, start_script

        flags = ["--config", str(chain.config), "--run", RUN, "--storage", chain.address, *chain.flags]
        self.process: Any
        if own_namespace or variables:
            isolate = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child") if own_namespace else ()
            command = [*isolate, sys.executable, str(ROOT / "ray_jobs" / "train.py"), *flags]
            self._printed_to = chain.folder / f"printed-{time.monotonic_ns()}"
            with self._printed_to.open("w") as stream:
                self.process = subprocess.Popen(command, stdout=stream, stderr=stream, env=environment() | (variables or {}))
        else:  # forked from a server that has PyTorch loaded
            self.process = start_script("train", *flags)
            self._printed_to = self.process._place

    @property
    def printed(self) -> str:
        """What it has printed so far."""
        paths = [self._printed_to / "1", self._printed_to / "2"] if self._printed_to.is_dir() else [self._printed_to]
        return "".join(path.read_text(errors="replace") for path in paths if path.exists())

    @property
    def moment(self) -> str:
        """How far it is, by what it has printed."""
        text = self.printed
        signs = {"closing screen": r"^status ", "training": "the first step|━", "start": "^starting on", "data": "^run "}
        return next((name for name, sign in signs.items() if re.search(sign, text, re.MULTILINE)), "first line")

    def ends_within(self, seconds: float) -> bool:
        """Waits for so long; whether it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, seconds))
        return self.process.poll() is not None

    def code(self) -> int:
        """Waits for its end: its exit code."""
        return int(self.process.wait())

    def stop(self) -> list[psutil.Process]:
        """Stops all its processes; returns them. None begins another one meanwhile: those that may are stopped first."""
        stopped: dict[int, psutil.Process] = {}
        while new := [each for each in self._tree() if each.pid not in stopped]:
            for each in new:
                with suppress(psutil.NoSuchProcess):
                    each.suspend()
                stopped[each.pid] = each
        return list(stopped.values())

    def kill(self) -> None:
        """Kills all its processes at once."""
        for each in self.stop():
            with suppress(psutil.NoSuchProcess):
                each.kill()
        self.process.wait()

    def _tree(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        return []


# Chains.


@dataclass
class Chain:
    """One run in a fresh storage: where it lies, and how it is started."""

    part: Part
    folder: Path
    """Of its own, for its storage, its settings and its database."""
    address: str
    config: Path
    flags: list[str]
    random: Random
    database: Path
    """MLflow's: the storage's own, or one beside it."""
    duration: float
    """Seconds of an undisturbed run of its place and mode."""
    outcome: Outcome
    last: Start | None = None

    def start(self, *, own_namespace: bool = False, variables: dict[str, str] | None = None) -> Start:
        """Starts the run, or goes on with it."""
        self.last = Start(self, own_namespace=own_namespace, variables=variables)
        return self.last

    def strikes(self, start: Start) -> bool:
        """Waits for a moment that is drawn; False if the start has ended before."""
        return not start.ends_within(self.random.uniform(0, self.duration))

    def note(self, start: Start) -> None:
        """Counts a blow, and how far the start was."""
        self.outcome.blows += 1
        moments = self.outcome.moments
        moments[start.moment] = moments.get(start.moment, 0) + 1

    def finish(self, start: Start | None = None) -> None:
        """Has a start end that nothing strikes. Raises Wrong."""
        code = (start or self.start()).code()
        if code:
            raise Wrong(f"a start that nothing struck ended with {code}")

    def refuse(self, start: Start, signs: str) -> None:
        """Judges a start that a fault may have ended: its message names what failed. Raises Wrong."""
        code = start.code()
        if code == 0:
            return
        if code not in (1, 2, 3) or "Traceback" in start.printed or not re.search(signs, start.printed):
            raise Wrong(f"a start ended with {code}, and its message does not name the fault")
        self.outcome.refused += 1


def kill(chain: Chain) -> None:
    """Kills each start until one ends."""
    for _ in range(MOST):
        start = chain.start()
        if not chain.strikes(start):
            return chain.finish(start)
        chain.note(start)
        start.kill()
    return chain.finish()


def fill(chain: Chain) -> None:
    """Fills the disk but for some bytes, and has two starts meet it."""
    ballast, start = chain.folder / "disk" / "ballast", chain.start()
    if not chain.strikes(start):
        return chain.finish(start)
    chain.note(start)
    with ballast.open("wb", buffering=0) as stream, suppress(OSError):
        while True:
            stream.write(bytes(1 << 16))
    os.truncate(ballast, max(0, ballast.stat().st_size - chain.random.randrange(200_000)))
    full = "No space left on device|free space|disk is full"
    chain.refuse(start, full)
    chain.refuse(chain.start(), full)
    ballast.unlink()
    return chain.finish()


def turn_read_only(chain: Chain) -> None:
    """Has the disk turn read-only, as soon as no file is open for writing, and a further start meet it."""
    disk, start = chain.folder / "disk", chain.start()
    if not chain.strikes(start):
        return chain.finish(start)
    remount = ["mount", "-o", "remount,ro", str(disk)]
    while subprocess.run(remount, capture_output=True).returncode:
        if start.process.poll() is not None:
            return chain.finish(start)
    chain.note(start)
    read_only = "Read-only file system|read-only|readonly"
    chain.refuse(start, read_only)
    chain.refuse(chain.start(), read_only)
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    return chain.finish()


def fail_calls(chain: Chain) -> None:
    """Has two starts with the library, and one without."""
    library = chain.folder / "calls.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, CALLS, "-ldl"], check=True)
    variables = {"LD_PRELOAD": str(library), "CRASH_BELOW": chain.address, "CRASH_ONE_IN": str(ONE_IN)}
    errors = "Input/output error|No space left on device|Interrupted system call|disk I/O error|free space|unreadable"
    for _ in range(2):
        start = chain.start(variables=variables | {"CRASH_SEED": str(chain.random.randrange(2**32))})
        chain.outcome.blows += 1
        chain.refuse(start, errors)
    chain.finish()


def outlast_lease(chain: Chain) -> None:
    """Stops a driver with all its processes, has another machine's take over and end, and lets the first one go on."""
    start = chain.start(own_namespace=True)
    if not chain.strikes(start):
        return chain.finish(start)
    chain.note(start)
    stopped = start.stop()
    chain.finish(chain.start(own_namespace=True))
    for each in reversed(stopped):
        with suppress(psutil.NoSuchProcess):
            each.resume()
    chain.outcome.refused += start.code() != 0
    return None


def stop_ray(chain: Chain) -> None:
    """Has `ray stop --force` end Ray's processes, in a namespace that has no others."""
    start = chain.start(own_namespace=True)
    if not chain.strikes(start):
        return chain.finish(start)
    chain.note(start)
    with suppress(psutil.NoSuchProcess, IndexError):
        inside = psutil.Process(start.process.pid).children()[0].pid
        stop = [str(Path(sys.executable).parent / "ray"), "stop", "--force"]
        subprocess.run(["nsenter", f"--target={inside}", "--pid", "--mount", *stop], capture_output=True)
    chain.refuse(start, "Ray|ray|worker")
    return chain.finish(chain.start(own_namespace=True))


BLOWS = {
    "kill": kill,
    "full disk": fill,
    "read-only": turn_read_only,
    "failing calls": fail_calls,
    "lease": outlast_lease,
    "ray stop": stop_ray,
}


# What is compared.


@dataclass(frozen=True)
class Result:
    """What a run has left that must be the same as undisturbed."""

    summary: dict[str, Any]
    points: set[tuple[str, int, float]]
    """MLflow's: name, step, value."""
    status: str
    """MLflow's."""


def read_result(chain: Chain) -> Result:
    """Reads what the run has left. Raises Wrong for what is wrong by itself."""
    from raystride.pipelines.train.checkpoint.audit import AuditFailed, audit
    from tests.ray_jobs.jobs import finish_job, start_script

    run = Folder.from_uri(chain.address) / RUN
    summary = {key: run.read_json("summary.json")[key] for key in SAME}
    try:
        audited = audit(run / "checkpoints").samples
    except AuditFailed as failure:
        raise Wrong(f"the audit says: {failure}") from failure
    if audited != summary["samples_seen"]:
        raise Wrong(f"the audit finds {audited} samples")
    listed = finish_job(start_script("runs", "list", "--storage", chain.address)).out.splitlines()
    if [line.split()[:2] for line in listed[1:]] != [[RUN, "finished"]]:
        raise Wrong("`runs list` has not the run once, as finished:\n" + "\n".join(listed))
    points, status = read_mlflow(chain.database)
    recorded = Counter(recorded_points(run))
    if (found := Counter(points)) != recorded:
        lacks, has = list((recorded - found).items()), list((found - recorded).items())
        raise Wrong(f"MLflow lacks {len(lacks)} points of the journal {lacks[:3]}, and has {len(has)} more {has[:3]}")
    return Result(summary, {(name, step, value) for name, step, _, value in points}, status)


Point = tuple[str, int, int, float]
"""Name, step, milliseconds since 1970, value."""


def read_mlflow(path: Path) -> tuple[list[Point], str]:
    """Returns the points of the figures that are the same in each run, and the run's status. Raises Wrong."""
    with closing(sqlite3.connect(path)) as database:
        try:
            query = "select run_uuid, status from runs where name = ? and lifecycle_stage = 'active'"
            found = database.execute(query, (RUN,)).fetchall()
        except sqlite3.OperationalError as error:
            raise Wrong(f"MLflow's database: {error}") from error
        if len(found) != 1:
            raise Wrong(f"MLflow has the run {len(found)} times")
        marks = ", ".join("?" * len(METRICS))
        query = f"select key, step, timestamp, value from metrics where run_uuid = ? and key in ({marks})"
        return database.execute(query, (found[0][0], *METRICS)).fetchall(), found[0][1]


def recorded_points(run: Folder) -> Iterator[Point]:
    """Yields what MLflow must have by the journal. A step that was done again after a kill was measured twice."""
    from raystride.pipelines.observability.record import read_entries
    from raystride.pipelines.observability.record.mlflow.names import metric_name, section_name

    for entry in read_entries(run):
        if entry["kind"] == "metrics":
            for key, value in entry["values"].items():
                if (name := metric_name(section_name(key))) in METRICS:
                    yield name, int(entry["step"] or 0), round(float(entry["time"]) * 1000), float(value)


def compare(found: Result, expected: Result) -> list[str]:
    """Returns what is not the same."""
    problems = [
        f"{key}: {found.summary[key]} in place of {expected.summary[key]}"
        for key in SAME
        if found.summary[key] != expected.summary[key]
    ]
    if others := found.points - expected.points:
        problems.append(f"MLflow has other points: {sorted(others)[:6]}")
    if lost := expected.points - found.points:
        problems.append(f"the record lacks points of steps {sorted({step for _, step, _ in lost})}")
    if found.status != expected.status:
        problems.append(f"MLflow: {found.status}")
    return problems


class Bench:
    """Undisturbed runs, and chains."""

    def __init__(self, work: Path, seed: int) -> None:
        from tests.tiny import write_text

        self.work, self.seed = work, seed
        self._settings = SETTINGS | {"data": {**SETTINGS["data"], "source": str(write_text(work, 6_000))}}
        self._durations: dict[tuple[str, Mode], float] = {}
        self._expected: Result | None = None
        self._stack = ExitStack()

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @cached_property
    def _endpoint(self) -> str:
        from tests.storage import server

        return self._stack.enter_context(server())

    def run(self, part: Part, number: int) -> Outcome:
        """Runs a chain to its end."""
        outcome, began = Outcome(part.name, number), time.monotonic()
        if (part.place, part.mode) not in self._durations:
            self._measure(part)
        with self._chain(part, outcome) as chain:
            try:
                BLOWS[part.fault](chain)
                assert self._expected
                outcome.problems = compare(self._read(chain), self._expected)
            except Wrong as reason:
                outcome.problems = [str(reason)]
            if outcome.problems and chain.last:
                outcome.printed = chain.last.printed[-4000:]
        outcome.seconds = round(time.monotonic() - began, 1)
        if not outcome.blows:  # the machine is faster than when it was measured
            self._durations[part.place, part.mode] = min(self._durations[part.place, part.mode], outcome.seconds)
        return outcome

    def _read(self, chain: Chain) -> Result:
        """What the run has left; if MLflow was away while it ended, after the replay that its last lines advise."""
        from tests.ray_jobs.jobs import finish_job, start_script

        if chain.last and "runs replay" in chain.last.printed:
            finish_job(start_script("runs", "replay", RUN, "--storage", chain.address))
        return read_result(chain)

    def _measure(self, part: Part) -> None:
        """Has an undisturbed run end, whose time is that of its place and mode."""
        calm = Part(part.place, part.mode, "kill", 0)
        with self._chain(calm, Outcome(calm.name, -1)) as chain:
            began = time.monotonic()
            start = chain.start()
            if code := start.code():
                raise RuntimeError(f"an undisturbed run ended with {code}: {start.printed[-2000:]}")
            self._durations[part.place, part.mode] = time.monotonic() - began
            found = read_result(chain)
            if self._expected and (problems := compare(found, self._expected)):
                raise RuntimeError(f"undisturbed runs differ: {problems}")
            self._expected = found

    @contextmanager
    def _chain(self, part: Part, outcome: Outcome) -> Iterator[Chain]:
        from tests.storage import uri

        folder = Path(tempfile.mkdtemp(prefix="chain-", dir=self.work))
        disk = folder / "disk"
        disk.mkdir()
        if mounted := part.fault in ("full disk", "read-only"):
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", disk], check=True)
        address = uri(self._endpoint, f"{folder.name}/runs") if part.place == "S3" else str(disk / "runs")
        config = folder / "settings.yaml"
        config.write_text(json.dumps(self._settings))
        flags = ["--launch.mode", part.mode, "--scaling.workers", "2" if part.mode == "ray" else "1"]
        database = disk / "runs" / "mlflow.db"
        if part.place == "S3" or part.fault == "read-only":  # MLflow has its file open for writing
            database = folder / "mlflow.db"
            flags += ["--record.mlflow_uri", f"sqlite:///{database}"]
        random = Random(f"{self.seed} {part.name} {outcome.chain}")
        duration = self._durations.get((part.place, part.mode), 0.0)
        chain = Chain(part, folder, address, config, flags, random, database, duration, outcome)
        try:
            yield chain
        finally:
            if chain.last and chain.last.process.poll() is None:
                chain.last.kill()
            if mounted:
                subprocess.run(["umount", "--lazy", disk], check=True)
            shutil.rmtree(folder, ignore_errors=True)


def no_way(part: Part) -> str:
    """Why a part cannot be tried here; empty where it can."""
    if part.fault == "failing calls" and not shutil.which("cc"):
        return "no C compiler"
    if part.place == "S3" and not find_spec("moto"):
        return "no moto, which is the server"
    needs = {"full disk": ["mount"], "read-only": ["mount"], "lease": ["pid"], "ray stop": ["pid"]}.get(part.fault, [])
    if needs:
        command = ["unshare", "--mount", *(["--pid", "--fork", "--mount-proc"] if "pid" in needs else [])]
        command += ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tempfile.gettempdir()]
        tried = subprocess.run(command, capture_output=True, text=True)
        return tried.stderr.strip() if tried.returncode else ""
    return ""


def table(outcomes: Iterable[Outcome]) -> str:
    """Returns the outcomes by part, as Markdown."""
    counts: dict[str, Counter[str]] = {part.name: Counter() for part in PLAN}
    moments: Counter[str] = Counter()
    for outcome in outcomes:
        ended = "wrong" if outcome.problems else "right"
        counts[outcome.part].update({"chains": 1, "blows": outcome.blows, "refused": outcome.refused, ended: 1})
        moments.update(outcome.moments)
    heads = ("place", "mode", "fault", "chains", "blows", "starts refused by name", "ended right", "wrong")
    lines = ["| " + " | ".join(heads) + " |", "| --- | --- | --- |" + " ---: |" * 5]
    for name, found in counts.items():
        if found:
            columns = [str(found[key]) for key in ("chains", "blows", "refused", "right", "wrong")]
            lines.append("| " + " | ".join([*name.split("/"), *columns]) + " |")
    lines.append("\nStruck, by what had been printed: " + ", ".join(f"{name} {count}" for name, count in moments.items()))
    return "\n".join(lines)


def read_outcomes(path: Path | None) -> list[Outcome]:
    """Returns the outcomes of earlier calls."""
    lines = path.read_text().splitlines() if path and path.exists() else []
    return [Outcome(**json.loads(line)) for line in lines]


def work_off(bench: Bench, given: argparse.Namespace, outcomes: list[Outcome]) -> None:
    """Runs the chains that are missing, in turns over the parts, until the plan or the time is at its end."""
    deadline = time.monotonic() + 60 * given.minutes
    parts = [part for part in PLAN if re.search(given.only, part.name)]
    for part in [*parts]:
        if problem := no_way(part):
            print(f"not tried here: {part.name}: {problem}", flush=True)
            parts.remove(part)
    while parts and time.monotonic() < deadline:
        for part in [*parts]:
            done = [outcome for outcome in outcomes if outcome.part == part.name]
            if given.chain is None and sum(max(1, each.blows) for each in done) >= max(1, given.share * part.blows):
                parts.remove(part)
                continue
            outcome = bench.run(part, len(done) if given.chain is None else given.chain)
            outcomes.append(outcome)
            if given.outcomes:
                with given.outcomes.open("a") as stream:
                    stream.write(json.dumps(asdict(outcome)) + "\n")
            ended = "wrong" if outcome.problems else "right"
            print(f"{part.name} {outcome.chain}: {outcome.blows} blows, {outcome.seconds:.0f} s, {ended}", flush=True)
            if given.chain is not None:
                parts.remove(part)


def main() -> int:
    """Runs chains, prints the table and what is wrong; returns 1 if something is."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.crash", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--outcomes", type=Path, help="file of a line for each chain that has ended, which is not run again")
    parser.add_argument("--share", type=float, default=1.0, help="how much of the plan (default 1: 500 blows)")
    parser.add_argument("--only", default="", help="a regular expression of the parts to take")
    parser.add_argument("--chain", type=int, help="this chain of each part alone, whether it has ended or not")
    parser.add_argument("--minutes", type=float, default=170.0, help="no chain begins after so many (default 170)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    outcomes = read_outcomes(given.outcomes)
    with tempfile.TemporaryDirectory(prefix="crash-") as name, Bench(Path(name), given.seed) as bench:
        work_off(bench, given, outcomes)
    wrong = [outcome for outcome in outcomes if outcome.problems]
    print(f"{machine_line(machine('1 thread a worker'))}\n{table(outcomes)}")
    for each in wrong:
        again = f"python -m benchmarks.crash --seed {given.seed} --only '{each.part}' --chain {each.chain}"
        print(f"\n{again}\n  " + "\n  ".join([*each.problems, *each.printed.splitlines()]))
    return bool(wrong)


if __name__ == "__main__":
    os.environ |= {"RAYSTRIDE_LINEAR": "torch", "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    sys.exit(main())
