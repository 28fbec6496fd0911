"""What train.exact promises, and what it costs.

Schedules: seeded runs that are killed (SIGKILL of one worker or of all), stopped, resumed and resized among 1 to 4 workers
must end with the parameters of one that a single worker trained in peace, and their audit must show every sample exactly
once an epoch. Cost: two workers of one thread, in which steps of a bare loop with DistributedDataParallel, of ours and of
ours exact take turns, each with one micro-batch a worker. With `--slots 8` ours and ours exact have four.

    python -m benchmarks.exactness --schedules 100             # 5 s a schedule, half a minute for the cost
    python -m benchmarks.exactness --schedules 0 --slots 8     # the cost alone
"""

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks import runs
from benchmarks.pairs import Comparison, command_line, machine, machine_line, report, take_turns
from benchmarks.peers.bare_loop import bare_steps
from benchmarks.workers import make_job, settings
from raystride.pipelines.config.schedules import learning_rate
from raystride.pipelines.train.step import train_step
from raystride.pipelines.train.worker.build import build_training
from raystride.pipelines.train.worker.job import Job, WorkerInfo

WORKERS = 2
LEFT_OUT = 10
"""First steps of each way that are not counted."""


def run_schedules(count: int, work: Path) -> dict[str, Any]:
    """Runs schedules 0, 1, 2, ... and says how many ended with the same parameters and every sample once an epoch."""
    from raystride.pipelines.train.checkpoint.audit import AuditFailed, audit
    from tests.faults.schedules import draw_schedule, exact_job, run_schedule
    from tests.tiny import write_text

    text = write_text(work, 6_000)
    calm = run_schedule(exact_job(text, work, "calm"), [], work).summary
    found: Counter[str] = Counter()
    began = time.perf_counter()
    for seed in range(count):
        schedule = draw_schedule(seed, calm["steps"])
        job = exact_job(text, work, f"run-{seed}")
        outcome = run_schedule(job, schedule, work)
        found.update(each.kind for each in schedule)
        found["resumed"] += outcome.resumed
        found["resized"] += sum(a.world != b.world for a, b in pairwise(schedule))
        found["identical"] += outcome.summary["parameters_sha256"] == calm["parameters_sha256"]
        try:
            found["every sample once"] += audit(job.folder / "checkpoints").samples == calm["samples_seen"]
        except AuditFailed as reason:
            print(f"  schedule {seed}: {reason}", flush=True)
        if (seed + 1) % 10 == 0 or seed + 1 == count:
            print(f"  {seed + 1} schedules, {found['identical']} identical, {time.perf_counter() - began:.0f} s", flush=True)
    print(
        f"{count} schedules of {calm['steps']} steps on 1 to 4 workers: {found['kill one']} kills of one worker, "
        f"{found['kill all']} of all, {found['stop']} stops, {found['resumed']} attempts that came back from a checkpoint, "
        f"{found['resized']} on another number of workers\n"
        f"identical to an undisturbed single worker: {found['identical']} of {count} (aim: all)\n"
        f"every sample exactly once an epoch, none lost or repeated: {found['every sample once']} of {count} (aim: all)"
    )
    return {"schedules": count, "steps": calm["steps"], **found}


def our_steps(job: Job, place: WorkerInfo, steps: int) -> Iterator[int]:
    """Our training without its loop, a step each time that the next one is asked for."""
    training = build_training(job, place, [], lambda: False, lambda _: None)
    for step in training.loader.steps(0, steps):
        rate = learning_rate(job.config.optimizer, step.number, steps, job.config.model.hidden_size)
        train_step(training.strategy, training.model, training.optimizer, step, training.rules, rate)
        yield step.number


def compare_cost(given: argparse.Namespace, work: Path) -> None:
    """The ways in this worker, and in the other at the same time, step by step."""
    place = WorkerInfo(rank=int(os.environ["RANK"]), world=WORKERS, local_rank=int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo")
    if place.rank:
        sys.stdout, given.json = io.StringIO(), None  # one worker reports
    count = given.rounds + LEFT_OUT
    flags = [*runs.small_setting(runs.small_text(work)), f"--train.steps={count}", f"--train.slots={given.slots}"]
    flags += [f"--train.slot_size={given.batch // given.slots}"]
    plain = make_job(settings(*flags, f"--train.micro_batch_slots={int(given.slots > WORKERS)}"), work / "runs", threads=1)
    exact = replace(plain, config=settings(*flags, "--train.exact=true"))
    found = machine(f"{WORKERS} workers, 1 thread of each")
    print(f"{machine_line(found)}\nsteps of {given.batch} samples in {given.slots} slots")
    steps = {"ours": our_steps(plain, place, count), "ours, exact": our_steps(exact, place, count)}
    if given.slots == WORKERS:
        steps = {"DDP": bare_steps(plain, place, count), **steps}
    ways = {way: partial(_rate_of_next, each) for way, each in steps.items()}
    rates = {way: values[LEFT_OUT:] for way, values in take_turns(ways, count).items()}
    report(given, found, [Comparison("steps a second", rates, next(iter(ways)), {"ours, exact": "at least 0.97"}, ".2f")])
    dist.destroy_process_group()


def _rate_of_next(steps: Iterator[int]) -> float:
    """Steps a second by the next one, which both workers begin together."""
    dist.barrier()
    began = time.perf_counter()
    next(steps)
    return 1 / (time.perf_counter() - began)


def main() -> None:
    """Parses the command line and runs what it asks for."""
    parser = command_line("exactness", __doc__, rounds=200)
    parser.add_argument("--schedules", type=int, default=100, help="random schedules (default 100, 0: none)")
    parser.add_argument("--slots", type=int, default=WORKERS, help="slots of a step, for the cost (default 2)")
    parser.add_argument("--batch", type=int, default=24, help="samples of a step, for the cost (default 24)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="exactness-") as scratch:
        if "RANK" in os.environ:
            compare_cost(given, Path(scratch))
            return
        if given.schedules:
            print(machine_line(machine("1 thread a worker")))
            outcome = run_schedules(given.schedules, Path(scratch))
    if given.rounds:
        torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}")
        environment = {"OMP_NUM_THREADS": "1"} | os.environ | runs.ENVIRONMENT
        subprocess.run([sys.executable, *torchrun, "-m", "benchmarks.exactness", *sys.argv[1:]], env=environment, check=True)
    if given.schedules and given.json:
        content = json.loads(given.json.read_text()) if given.rounds else {"machine": machine("1 thread a worker")}
        given.json.write_text(json.dumps(content | {"schedules": outcome}, indent=1) + "\n")


if __name__ == "__main__":
    main()
