"""From the start of the process to the first optimiser step, in seconds: ours beside Ray's TorchTrainer as documented; and
what each command takes, beside the imports that it cannot do without.

Two workers on a local cluster that each run starts anew, or jobs submitted to a running one; data prepared before, nanoGPT's
small model. Ours by its fast start, by the stock TorchTrainer (`--launch.fast_start false`), and inline, without Ray. Both
sides count from the moment at which the operating system started the process, of a submitted job its entry point's.

    python -m benchmarks.startup --rounds 4                    # about 12 minutes on two cores
    python -m benchmarks.startup --rounds 4 --parts joined commands
    python -m benchmarks.startup --rounds 1 --only lean        # that one beside the peer
"""

import argparse
import json
import secrets
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import runs
from benchmarks.heads import Head, head
from benchmarks.pairs import Comparison, command_line, machine, machine_line, report, take_turns

Start = dict[str, float]
"""Seconds of each part of a start, in order; their sum is the whole."""
PEER = "stock TorchTrainer"
RAY = ("--scaling.workers=2", "--scaling.threads=1")
OURS = {
    "lean": RAY,
    "not lean": (*RAY, "--launch.fast_start=false"),
    "inline": ("--launch.mode=inline",),
}
AIMS = {"lean": "at most 0.65", "inline": "at most 3.5 s"}
JOINED = {"lean": OURS["lean"], "not lean": OURS["not lean"]}
SETTINGS = "yaml, jsonargparse"
COMMANDS: dict[str, tuple[str, str]] = {
    "--help": ("sys", "under 1 s"),
    "train --help": (SETTINGS, "under 1 s"),
    "sweep --help": (SETTINGS, "under 1 s"),
    "train --train.stps 4": (SETTINGS, "under 1 s"),
    "generate --run none": (SETTINGS, "under 1 s"),
    "runs list": ("yaml, fsspec", "at most 1.5"),
    "report --run done": ("matplotlib.figure, matplotlib.backends.backend_svg", "at most 1.5"),
    "generate --run done --sample.tokens 1": (f"torch, {SETTINGS}", "at most 1.5"),
    "predict --run done --sample.tokens 1 --text a": (f"torch, {SETTINGS}", "at most 1.5"),
    "evaluate --run done --split validation": (
        f"torch, pyarrow.parquet, mlflow.store.tracking.sqlalchemy_store, {SETTINGS}",
        "at most 1.5",
    ),
}
"""By command, the modules that it cannot do without, and the aim."""
SMALL = ("--model.layers=1", "--model.hidden_size=16", "--model.heads=2", "--data.validation=tail", "--checkpoint.every=3")
"""A network and data whose computing takes no time."""
PARTS = {
    "driver": "interpreter, imports, settings",
    "cluster": "ray.init",
    "data": "preflight, finding the data",
    "worker": "trainer, worker processes",
    "torch": "import torch",
    "build": "model, process group, loader",
    "first_step": "the step itself",
}
"""What each part of a start holds."""


def start_ours(storage: Path, flags: Sequence[str]) -> Start:
    """Our run of three steps; the parts of its start."""
    start: Start = runs.train(storage, *flags)["start"]
    return start


def start_stock(*arguments: str) -> Start:
    """The peer's run of one step; the parts of its start, in which imports count to what they are followed by."""
    done = runs.run("-m", "benchmarks.peers.stock_trainer", *arguments)
    reached = done.answer
    reached.pop("process")
    return _parts(reached, done.started_at)


def _parts(reached: Mapping[str, float], before: float) -> Start:
    """The seconds between each milestone and the one before it."""
    parts = {}
    for name, time in reached.items():
        parts[name], before = time - before, time
    return parts


def joined_ours(cluster: Head, storage: Path, flags: Sequence[str]) -> Start:
    """The same of a job that is submitted to a running cluster."""
    name = f"run-{secrets.token_hex(4)}"
    cluster.submit("ray_jobs/train.py", *flags, "--storage", str(storage), "--run", name)
    return runs.start_of(storage, name)


def joined_stock(cluster: Head, *arguments: str) -> Start:
    """The peer's, submitted to the same cluster."""
    printed = cluster.submit("-m", "benchmarks.peers.stock_trainer", *arguments)
    (line,) = [line for line in printed.splitlines() if line.startswith("{")]
    reached = json.loads(line)
    return _parts(reached, reached.pop("process"))


def table(starts: Mapping[str, Sequence[Start]]) -> str:
    """Where the time goes: the median seconds of each part by way."""
    lines = [f"{'median seconds':<42}" + "".join(f"{way:>20}" for way in starts)]
    for part, what in PARTS.items():
        cells = [statistics.median(found[part] for found in each) if part in each[0] else None for each in starts.values()]
        lines.append(f"  {part:<12}{what:<28}" + "".join(f"{'-' if cell is None else f'{cell:.2f}':>20}" for cell in cells))
    return "\n".join(lines)


def compare(ways: Mapping[str, Callable[[], Start]], rounds: int, what: str) -> tuple[Comparison, dict[str, list[Start]]]:
    """All ways in turns; prints where the time goes. The whole starts beside the peer's, and their parts."""
    starts = take_turns(ways, rounds, lambda _, parts: f"{sum(parts.values()):.2f} s")
    whole = {way: [sum(parts.values()) for parts in each] for way, each in starts.items()}
    print(f"\n{what}\n{table(starts)}")
    return Comparison(f"seconds from the start of the process to the first step, {what}", whole, PEER, AIMS, ".2f"), starts


def compare_commands(rounds: int, work: Path) -> list[Comparison]:
    """Each command beside the imports that it cannot do without."""
    text, storage = work / "little.txt", work / "little"
    text.write_text(runs.small_text(work).read_text()[:40_000])
    preset = [*runs.small_setting(text), *SMALL, "--train.steps=3", "--launch=inline"]
    runs.run("-m", "raystride", "train", *preset, "--storage", str(storage), "--run", "done")
    found = []
    for command, (modules, aim) in COMMANDS.items():
        words = command.split()
        place = ["--storage", str(storage)] if words[0] in ("runs", "report", "generate", "predict", "evaluate") else []
        ways = {
            f"import {modules}": partial(runs.seconds, "-c", f"import {modules}"),
            command: partial(runs.seconds, "-m", "raystride", *words, *place),
        }
        samples = take_turns(ways, rounds)
        found.append(Comparison("seconds of a command", samples, f"import {modules}", {command: aim}, ".2f"))
        print(found[-1], flush=True)
    return found


def measure(given: argparse.Namespace, work: Path) -> None:
    """The parts that are asked for; prints the whole starts, their ratio to the peer, and where the time goes."""
    from benchmarks.peers.plain_loop import write_tokens

    found = machine("2 workers of 1 thread")
    print(machine_line(found))
    text, storage, tokens = runs.small_text(work), work / "runs", work / "tokens.bin"
    peer = (str(tokens), str(write_tokens(text, tokens)), str(work / "stock"))
    flags = [*runs.small_setting(text), "--train.steps=3", "--train.log_every=1"]
    runs.prepare(storage, *flags)
    comparisons, starts = [], {}

    def asked(ours: Mapping[str, Any]) -> dict[str, Any]:
        return {way: value for way, value in ours.items() if not given.only or way in given.only}

    if "local" in given.parts:
        ways: dict[str, Callable[[], Start]] = {PEER: partial(start_stock, *peer)}
        ways |= {way: partial(start_ours, storage, [*flags, *more]) for way, more in asked(OURS).items()}
        compared, starts["local"] = compare(ways, given.rounds, "on a cluster of its own")
        comparisons.append(compared)
    if "joined" in given.parts:
        with head(cpus=2) as cluster:
            ways = {PEER: partial(joined_stock, cluster, *peer)}
            ways |= {way: partial(joined_ours, cluster, storage, [*flags, *more]) for way, more in asked(JOINED).items()}
            compared, starts["joined"] = compare(ways, given.rounds, "submitted to a running cluster")
        comparisons.append(compared)
    if "commands" in given.parts:
        comparisons += compare_commands(given.rounds, work)
    report(given, found, comparisons, parts=starts)


def main() -> None:
    """Parses the command line and runs what it asks for."""
    parser = command_line("startup", __doc__, rounds=4)
    parser.add_argument("--only", nargs="+", choices=list(OURS), help="these of ours beside the peer; else all")
    parts = ["local", "joined", "commands"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="what is measured; else all")
    with tempfile.TemporaryDirectory(prefix="startup-") as scratch:
        measure(parser.parse_args(), Path(scratch))


if __name__ == "__main__":
    main()
