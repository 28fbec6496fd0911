"""What our training loop costs over a bare one: the same model, batches and update with nothing around them.

In one process, blocks of steps take turns: bare, ours without observers, ours with all of a worker's observers and a
recorder that logs to MLflow and TensorBoard. Each block is a fresh training; its first ten steps are not counted. Ratios are
of speed: 1.0 is free.
With `--workers 2` two processes of one thread share each block's batch, the bare loop by DistributedDataParallel. With
`--ray` each way has its own two processes: ours under Ray with recording on and as plain ones, the bare loop by torchrun.

    python -m benchmarks.loop --rounds 10 --steps 60           # steps a second and their ratio, 2 minutes on two cores
    python -m benchmarks.loop --workers 2                      # the same for two workers
    python -m benchmarks.loop --ray --rounds 4                 # tokens a second and their ratio, 4 minutes
    python -m benchmarks.loop --off --rounds 4                 # the same, 12 minutes
    python -m benchmarks.loop --shards-gib 10 --before ../old  # shards read for the first time, beside another checkout
"""

import argparse
import io
import itertools
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import runs
from benchmarks.pairs import Comparison, command_line, machine, machine_line, report, take_turns
from benchmarks.workers import make_job, run_workers, settings, write_job
from raystride.pipelines.data.prepare.hash_list import SUFFIX
from raystride.pipelines.data.prepare.manifest import Manifest, Shards
from raystride.pipelines.launch.inline import InlineRecorder
from raystride.pipelines.observability.observers.observer import Observer, RunFacts
from raystride.pipelines.observability.record.mlflow.log import MLFLOW_REFERENCE
from raystride.pipelines.observability.record.sender import Post, Sender
from raystride.pipelines.system.node_folder import CACHE_VARIABLE
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.worker.job import Job, WorkerInfo
from raystride.pipelines.train.worker.rehearsal import discard_entries

LOG_EVERY = 10
LEFT_OUT = 10
"""First steps of a block that are not counted."""
TEXTS = 290
"""Copies of the small text in ten shards of 32 MiB; less text has smaller ones."""
BEGIN_S = 60.0
"""How long MLflow may take to begin."""
BLOCKS = itertools.count()
PYTORCHS = ("--train.precision=fp32", "--model.linear=torch")
OFF = {
    "MLflow": ("--record.mlflow=false",),
    "monitors": ("--record.system_every_s=100000",),
    "the watch for stalls": ("--profile.stall_factor=0",),
}
"""What is not the training, and the flags that switch it off."""


class Clock(Observer):
    """Notes when each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step(self, step: int) -> None:
        self.ends.append(time.perf_counter())


def rate(ends: list[float]) -> float:
    """Steps a second after the first ones."""
    counted = ends[LEFT_OUT - 1 :]
    return (len(counted) - 1) / (counted[-1] - counted[0])


def run_bare(job: Job, place: WorkerInfo, steps: int) -> float:
    """A block of the bare loop; steps a second."""
    from benchmarks.peers.bare_loop import bare_loop

    return rate(bare_loop(job, place, steps))


def run_ours(job: Job, place: WorkerInfo, post: Post | None = None) -> float:
    """A block of our loop, without observers, or with all of a worker's, which send through `post`; steps a second."""
    from raystride.pipelines.train.worker.build import build_training
    from raystride.pipelines.train.worker.run import build_observers

    sender = Sender(post or discard_entries, f"block{next(BLOCKS)}")
    clock = Clock()
    observers: list[Observer] = [*(build_observers(job, place, sender, {}) if post else []), clock]
    training = build_training(job, place, observers, lambda: False, lambda _: None)
    facts = RunFacts(run="loop", attempt="a1", rank=place.rank, tokens_per_step=training.rules.nominal_targets)
    for observer in observers:
        observer.on_start(facts)
    training.run()
    for observer in observers:
        observer.on_end({})
    sender.close()
    return rate(clock.ends)


def recording(job: Job) -> InlineRecorder:
    """A recorder in a process of its own that logs to MLflow and TensorBoard, and that has begun to."""
    storage = Folder(job.folder.uri.rpartition("/")[0])
    settings = replace(job.config.record, mlflow=True, tensorboard=find_spec("tensorboard") is not None)
    recorder = InlineRecorder(
        run_folder=job.folder, run=job.run, attempt=job.attempt, settings=settings, storage=storage, parameters={}, tags={}
    )
    recorder.post(
        "begin", [{"sequence": 1, "kind": "metrics", "time": time.time(), "step": 0, "values": {"train_loss": 0.0}}], ""
    )
    deadline = time.monotonic() + BEGIN_S
    while not job.folder.exists(MLFLOW_REFERENCE) and time.monotonic() < deadline:
        time.sleep(0.2)
    return recorder


def compare_loops(given: argparse.Namespace, flags: list[str], storage: Path) -> None:
    """The loops in this process, and in the other workers' at the same time, block by block."""
    place = WorkerInfo(
        rank=int(os.environ.get("RANK", 0)), world=given.workers, local_rank=int(os.environ.get("LOCAL_RANK", 0))
    )
    if place.world > 1:
        dist.init_process_group("gloo")
    if place.rank:
        sys.stdout, given.json = io.StringIO(), None  # one worker reports
    threads = given.threads or max(1, torch.get_num_threads() // place.world)
    job = make_job(settings(*flags), storage, threads)
    found = machine(f"{place.world} worker(s), threads of each: {threads}")
    print(f"{machine_line(found)}\nblocks of {given.steps} steps, {LEFT_OUT} of them not counted; a log every {LOG_EVERY}")
    run_bare(job, place, given.steps)  # the first block of a process pays for allocations
    recorder = recording(job)
    ways = {
        "bare loop": partial(run_bare, job, place, given.steps),
        "ours, no observers": partial(run_ours, job, place),
        "ours, observed": partial(run_ours, job, place, recorder.post),
    }
    aims = {name: "at least 0.98" for name in ways if name != "bare loop"}
    rates = take_turns(ways, given.rounds)
    recorder.finish("finished", {})
    evidence = {name: rates[name] for name in ways if name != "bare loop"}
    compared = [
        Comparison("steps a second", rates, peer="bare loop", aims=aims, form=".2f"),
        Comparison(
            "the same, beside no observers", evidence, "ours, no observers", {"ours, observed": "at least 0.99"}, form=".2f"
        ),
    ]
    report(given, found, compared)
    if place.world > 1:
        dist.destroy_process_group()


def run_torchrun(job: Job, steps: int) -> dict[str, Any]:
    """Two ranks of the bare loop under torchrun."""
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    return runs.run(*start, "-m", "benchmarks.peers.bare_loop", str(write_job(job)), str(steps)).answer


def compare_workers(given: argparse.Namespace, flags: list[str], storage: Path) -> None:
    """Two workers of one thread each, each way in processes of its own."""
    found = machine("2 workers of 1 thread")
    job = make_job(settings(*flags), storage, threads=1)
    print(f"{machine_line(found)}\n{given.steps} steps of 768 tokens a run, a log every {LOG_EVERY}")
    two = ("--scaling.workers", "2", "--scaling.threads", "1")
    ways: dict[str, Callable[[], dict[str, float]]] = {
        "torchrun, DDP": partial(run_torchrun, job, given.steps),
        "ours, Ray": lambda: runs.figures(runs.train(storage, *flags, *two)),
        "ours, processes": lambda: runs.figures(run_workers(job, 2)),
    }
    results = take_turns(ways, given.rounds, runs.say)
    aims = {"ours, Ray": "at least 0.95"}
    report(given, found, runs.compare(results, peer="torchrun, DDP", aims=aims))


def switch_off(given: argparse.Namespace, flags: list[str], storage: Path) -> None:
    """Whole inline runs, each with something switched off; prints their speed beside that of a run with everything on."""
    threads = given.threads or torch.get_num_threads()
    found = machine(f"{threads} threads")
    print(f"{machine_line(found)}\n{given.steps} steps of 768 tokens a run, inline, PyTorch's products")
    ours = [*flags, *PYTORCHS, "--launch=inline", f"--scaling.threads={threads}"]
    runs.prepare(storage, *ours)
    every = [flag for each in OFF.values() for flag in each]
    (text,) = [flag.partition("=")[2] for flag in flags if flag.startswith("--data.source=")]
    plain = ("-m", "benchmarks.peers.plain_loop", f"--text={text}", f"--steps={given.steps}", f"--threads={threads}")

    def run(*more: str) -> dict[str, float]:
        return runs.figures(runs.train(storage, *ours, *more))

    ways = {"everything on": run} | {f"without {what}": partial(run, *off) for what, off in OFF.items()}
    ways |= {"without all of them": partial(run, *every), "plain loop": lambda: runs.run(*plain).answer}
    report(given, found, runs.compare(take_turns(ways, given.rounds, runs.say), peer="everything on", aims={}))


def compare_shards(given: argparse.Namespace, flags: list[str], storage: Path) -> None:
    """Whole inline runs on many shards: those that this node has not read before, those that it has, another checkout's."""
    threads = given.threads or torch.get_num_threads()
    found = machine(f"{threads} threads")
    ours = [*flags, "--launch=inline", "--record.mlflow=false", f"--scaling.threads={threads}"]
    folder = make_job(settings(*ours), storage, threads).prepared
    multiply_shards(folder, given.shards_gib)
    print(f"{machine_line(found)}\n{given.steps} steps of 768 tokens a run, inline, {given.shards_gib:g} GiB of shards")

    def run(root: Path, *, forget: bool) -> dict[str, float]:
        if forget:
            shutil.rmtree(f"{os.environ[CACHE_VARIABLE]}-verified", ignore_errors=True)
        before = children_cpu_s()
        summary = runs.train(storage, *ours, root=root)
        return runs.figures(summary) | {
            "first_step_s": sum(summary["start"].values()),
            "cpu_s": children_cpu_s() - before,
        }

    ways = {
        "read for the first time": partial(run, runs.ROOT, forget=True),
        "read before": partial(run, runs.ROOT, forget=False),
    }
    if given.before:
        ways = {"another checkout": partial(run, given.before, forget=False)} | ways
    results = take_turns(
        ways, given.rounds, lambda _, got: f"{runs.say(_, got)}, first step after {got['first_step_s']:.2f} s"
    )
    peer = next(iter(ways)) if given.before else "read before"
    comparisons = runs.compare(results, peer=peer, aims={"read for the first time": "at least 0.98"})
    for key, what in (("first_step_s", "seconds to the first step"), ("cpu_s", "processor seconds of a run")):
        values = {way: [got[key] for got in taken] for way, taken in results.items()}
        comparisons.append(Comparison(what, values, peer, {"read for the first time": "at most 1.02"}, ".2f"))
    report(given, found, comparisons)


def children_cpu_s() -> float:
    """Processor seconds of all ended children, which another load of the machine changes little."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def multiply_shards(folder: Folder, gib: float) -> None:
    """Copies the training's shards of a preparation, with their lists of hashes, until they have so many GiB."""
    manifest, place = Manifest.load(folder), Path(str(folder))
    known = list(manifest.splits["train"])
    shards = list(known)
    while (len(shards) // len(known)) * sum(shard.bytes for shard in known) < gib * 2**30:
        for shard in known:
            name = f"train/copy-{len(shards):05d}.arrow"
            for suffix in (".arrow", SUFFIX):
                shutil.copyfile((place / shard.file).with_suffix(suffix), (place / name).with_suffix(suffix))
            shards.append(replace(shard, file=name))
    replace(manifest, splits=manifest.splits | {"train": Shards.from_shards(shards)}).save(folder)


def main() -> None:
    """Parses the command line and runs what it asks for."""
    parser = command_line("loop", __doc__)
    parser.add_argument("--rounds", type=int, help="times that every way runs (default 10, with --ray 4)")
    parser.add_argument("--steps", type=int, help="steps of a block (default 60), with --ray of a run (default 300)")
    parser.add_argument("--threads", type=int, help="threads of a worker, without --ray; else the cores shared out")
    parser.add_argument("--workers", type=int, default=1, help="processes that share each block's batch (1 or 2)")
    parser.add_argument("--ray", action="store_true", help="two workers under Ray beside DistributedDataParallel")
    parser.add_argument("--off", action="store_true", help="whole runs, each with something switched off")
    parser.add_argument("--shards-gib", type=float, default=0.0, help="whole runs on so many GiB of shards")
    parser.add_argument("--before", type=Path, help="with --shards-gib: another checkout of the repository")
    given = parser.parse_args()
    if given.workers > 1 and "RANK" not in os.environ:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun would set it with a warning
        torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={given.workers}")
        os.execv(sys.executable, [sys.executable, *torchrun, "-m", "benchmarks.loop", *sys.argv[1:]])
    whole_runs = given.ray or given.off or given.shards_gib
    given.steps = given.steps or (300 if whole_runs else 60)
    given.rounds = given.rounds or (4 if whole_runs else 10)
    with tempfile.TemporaryDirectory(prefix="loop-") as scratch:
        storage = Path(scratch) / "runs"
        os.environ[CACHE_VARIABLE] = str(Path(scratch) / "cache")
        text = runs.small_text(Path(scratch))
        if given.shards_gib:
            text.write_text(text.read_text() * TEXTS)
        flags = runs.small_setting(text)
        flags += ["--train.steps", str(given.steps), "--train.log_every", str(LOG_EVERY)]
        measure = compare_shards if given.shards_gib else compare_workers if given.ray else compare_loops
        measure = switch_off if given.off else measure
        measure(given, flags, storage)


if __name__ == "__main__":
    main()
