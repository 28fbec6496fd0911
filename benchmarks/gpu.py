"""Everything that only a GPU can tell, in one call under a budget of time: is it right, how fast, how fast does a model
train.

It needs PyTorch, Triton, NumPy and PyYAML alone: no Ray, no MLflow, no pytest. Kernels are checked on the device, then each
is measured beside its peers (`benchmarks.kernels`), then models train on random text through the worker that `--launch
inline` runs; then come exactness, the other checks, compute-sanitizer, a trace and tiles (`benchmarks.gpu_rows`). Every row
is in the file as soon as it is known, and what the budget left out is named there; a second call goes on where the first
ended.

    python -m benchmarks.gpu --budget 500                      # seconds; figures go to benchmarks/results/
    python -m benchmarks.gpu --budget 500 --resume             # what is left out, into the newest file of this GPU
    python -m benchmarks.gpu --rehearse 100 --budget 500       # without a GPU: each row sleeps, a hundred times as fast
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from shutil import which
from typing import Any

from benchmarks.gpu_record import Record, Row, run_rows, watch
from benchmarks.gpu_rows import ROOT, rows, with_stand_in
from raystride.triton_kernels.dispatch import NoCompiler, NotRun

RESULTS = ROOT / "benchmarks" / "results"


def device() -> dict[str, Any]:
    """Hardware, driver, versions, commit, date."""
    import torch
    import triton

    from raystride.pipelines.observability.record.environment import describe_hardware, describe_source

    found: dict[str, Any] = {"gpu": "rehearsal"}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        gpus = describe_hardware()["gpus"]
        found = {
            "gpu": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "driver": gpus[0].get("driver") if gpus else torch.version.hip,
            "power_limit": power_limit(),
        }
    return found | {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "python": sys.version.split()[0],
        **describe_source(ROOT),
        "date": time.strftime("%Y-%m-%d"),
    }


def power_limit() -> str | None:
    """What nvidia-smi says of it; None where there is none."""
    if (program := which("nvidia-smi")) is None:
        return None
    asked = [program, "--query-gpu=power.limit", "--format=csv,noheader"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() or None


def measure(given: argparse.Namespace) -> int:
    """What the process does that measures: the rows that have no result yet. The exit code."""
    every = select_rows(given, given.output)
    if given.rehearse:
        every = [with_stand_in(row, given.rehearse, faults(given.fault)) for row in every]
    return run_rows(every, Record(given.output), given.measure)


def select_rows(given: argparse.Namespace, output: Path) -> list[Row]:
    """The rows that were asked for."""
    return [row for row in rows(output.parent, given.rounds) if fnmatch(row.name, given.only)]


def faults(given: list[str]) -> dict[str, Callable[[], Any]]:
    """What a rehearsal has go wrong, by row: it raises, loses the GPU, hangs, its process dies, no kernel would run, or none
    can be compiled."""

    def raises() -> None:
        raise RuntimeError("out of memory, as rehearsed")

    def lose_device() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered, as rehearsed")

    def fall_back() -> None:
        raise NotRun("gelu runs in PyTorch, as rehearsed")

    ways: dict[str, Callable[[], Any]] = {
        "raises": raises,
        "loses": lose_device,
        "hangs": lambda: time.sleep(3600),
        "dies": lambda: os._exit(139),
        "falls_back": fall_back,
        "no_compiler": lambda: NoCompiler.raise_for("RuntimeError: Failed to find C compiler, as rehearsed"),
    }
    return {row: ways[way] for way, _, row in (each.partition("=") for each in given)}


def place(given: argparse.Namespace, name: str) -> Path:
    """The file of figures: as given, with --resume the newest of this GPU, else a new one of today."""
    stem = "gpu-" + "-".join(name.lower().split())
    known = sorted(RESULTS.glob(f"{stem}-*.json"), key=lambda file: file.stat().st_mtime)
    if given.output:
        return Path(given.output)
    return known[-1] if given.resume and known else RESULTS / f"{stem}-{time.strftime('%Y-%m-%d')}.json"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--budget", type=float, default=500.0, help="seconds in all (default 500)")
    parser.add_argument("--resume", action="store_true", help="go on in a file that is there")
    parser.add_argument("--only", default="*", help="rows whose name matches this pattern, as 'check*' or 'lm_*'")
    parser.add_argument("--rounds", type=int, default=3, help="times that every way runs (default 3)")
    parser.add_argument("--output", type=Path, help="file of the figures; default benchmarks/results/gpu-<name>-<date>.json")
    parser.add_argument("--rehearse", type=float, metavar="SPEED", help="without a GPU: rows sleep, so many times as fast")
    parser.add_argument("--fault", action="append", default=[], help=argparse.SUPPRESS)  # of a rehearsal: hangs=ROW
    parser.add_argument("--measure", type=float, metavar="DEADLINE", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Measures what the budget has room for; 1 if a row failed, 3 if one was not run or there is no GPU."""
    given = parse(arguments)
    if given.measure:
        return measure(given)
    deadline = time.time() + given.budget / (given.rehearse or 1)
    import torch

    if not (torch.cuda.is_available() or given.rehearse):
        print("benchmarks.gpu needs a GPU, and there is none to be seen: nothing was measured", file=sys.stderr)
        return 3
    there = device()
    print(json.dumps(there), flush=True)
    record = Record(place(given, there["gpu"]))
    if record.content and not given.resume:
        record.content = {}
    record.note(device=there, planned=[row.name for row in select_rows(given, record.file)], rows=record.rows)
    again = ["--rounds", str(given.rounds), "--only", given.only, "--output", str(record.file), "--measure", str(deadline)]
    again += ["--rehearse", str(given.rehearse)] if given.rehearse else []
    again += [word for fault in given.fault for word in ("--fault", fault)]
    watch([sys.executable, "-m", "benchmarks.gpu", *again], record, deadline)
    failed = [name for name, how in record.rows.items() if "error" in how]
    not_run = [name for name, how in record.rows.items() if "not_run" in how]
    measured = len(record.rows) - len(failed) - len(not_run)
    left_out = len(record.content["left_out"])
    print(f"{measured} rows measured, {len(failed)} failed, {len(not_run)} not run, {left_out} left out")
    print(f"figures: {record.file}")
    return 1 if failed or "failed" in record.content else 3 if not_run else 0


if __name__ == "__main__":
    sys.exit(main())
