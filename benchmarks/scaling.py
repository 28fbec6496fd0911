"""Two workers beside one: tokens a second of nanoGPT's small model, one thread each and twelve samples a worker.

The step of two workers is twice as large, so with free communication the ratio would be 2. It is measured for linear layers
by PyTorch's default and by oneDNN, under Ray with recording on, or as plain processes that record to nowhere.

    python -m benchmarks.scaling --rounds 3 --steps 200        # under Ray, about 5 minutes on two cores
    python -m benchmarks.scaling --processes
"""

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import runs
from benchmarks.pairs import Comparison, command_line, machine, machine_line, report, take_turns
from benchmarks.workers import make_job, run_workers, settings

AIMS = {"torch": "at least 1.65", "onednn": "at least 1.75"}
SLOT_SIZE = 12


def run_ray(storage: Path, flags: list[str], workers: int) -> dict[str, Any]:
    """Under Ray; the figures."""
    return runs.figures(runs.train(storage, *flags, f"--scaling.workers={workers}", "--scaling.threads=1"))


def run_processes(storage: Path, flags: list[str], workers: int) -> dict[str, Any]:
    """As plain processes; the figures."""
    return runs.figures(run_workers(make_job(settings(*flags), storage, threads=1), workers))


def main() -> None:
    """Parses the command line, runs one and two workers in turns, prints the ratio."""
    parser = command_line("scaling", __doc__, rounds=3)
    parser.add_argument("--steps", type=int, default=200, help="steps of a run (default 200)")
    parser.add_argument("--linear", choices=["both", *AIMS], default="both", help="what multiplies matrices")
    parser.add_argument("--processes", action="store_true", help="plain processes instead of Ray")
    given = parser.parse_args()
    found = machine("1 thread a worker")
    print(f"{machine_line(found)}\n{given.steps} steps of {SLOT_SIZE} samples of 64 tokens a worker")
    with tempfile.TemporaryDirectory(prefix="scaling-") as scratch:
        report(given, found, measure(given, Path(scratch)), launched="processes" if given.processes else "Ray")


def measure(given: argparse.Namespace, work: Path) -> list[Comparison]:
    """One comparison of tokens a second for each way of multiplying."""
    flags = [*runs.small_setting(runs.small_text(work)), f"--train.slot_size={SLOT_SIZE}", f"--train.steps={given.steps}"]
    storage = work / "runs"
    runs.prepare(storage, *flags)
    run = run_processes if given.processes else run_ray
    comparisons = []
    for linear in AIMS if given.linear == "both" else [given.linear]:
        print(f"linear layers by {linear}")
        ways = {
            f"{workers} worker{'s' * (workers > 1)}": partial(
                run, storage, [*flags, f"--model.linear={linear}", f"--train.slots={workers}"], workers
            )
            for workers in (1, 2)
        }
        results = take_turns(ways, given.rounds, runs.say)
        rates = {way: [got["tokens_per_second"] for got in values] for way, values in results.items()}
        aims = {"2 workers": AIMS[linear]}
        comparisons.append(Comparison(f"tokens a second, linear layers by {linear}", rates, "1 worker", aims, ",.0f"))
    return comparisons


if __name__ == "__main__":
    main()
