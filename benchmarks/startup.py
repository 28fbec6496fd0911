"""From the start of the process to the first optimiser step, in seconds: ours beside Ray's TorchTrainer as documented.

Two workers on a local cluster that each run starts anew, data prepared before, nanoGPT's small model. Ours with its fast
start, ours with the stock TorchTrainer (`--launch.lean false`), and inline, without Ray. Both sides count from the moment
at which the operating system started the process.

    python -m benchmarks.startup --rounds 4                    # about 5 minutes on two cores
    python -m benchmarks.startup --rounds 1 --only lean        # that one beside the peer
"""

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks import runs
from benchmarks.pairs import Comparison, command_line, machine, machine_line, report, take_turns

Start = dict[str, float]
"""Seconds of each part of a start, in order; their sum is the whole."""
PEER = "stock TorchTrainer"
RAY = ("--scaling.workers=2", "--scaling.threads=1")
OURS = {
    "lean": RAY,
    "not lean": (*RAY, "--launch.lean=false"),
    "inline": ("--launch.mode=inline",),
}
AIMS = {"lean": "at most 0.65", "inline": "at most 3.5 s"}
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


def start_stock(tokens: Path, vocabulary: int, storage: Path) -> Start:
    """The peer's run of one step; the parts of its start, in which imports count to what they are followed by."""
    done = runs.run("-m", "benchmarks.peers.stock_trainer", str(tokens), str(vocabulary), str(storage))
    reached, before = done.answer, done.started_at
    parts = {}
    for name, time in reached.items():
        parts[name], before = time - before, time
    return parts


def table(starts: Mapping[str, Sequence[Start]]) -> str:
    """Where the time goes: the median seconds of each part by way."""
    lines = [f"{'median seconds':<42}" + "".join(f"{way:>20}" for way in starts)]
    for part, what in PARTS.items():
        cells = [statistics.median(found[part] for found in each) if part in each[0] else None for each in starts.values()]
        lines.append(f"  {part:<12}{what:<28}" + "".join(f"{'-' if cell is None else f'{cell:.2f}':>20}" for cell in cells))
    return "\n".join(lines)


def compare(given: argparse.Namespace, work: Path) -> None:
    """All ways in turns; prints the whole starts, their ratio to the peer, and where the time goes."""
    from benchmarks.peers.plain_loop import write_tokens

    found = machine("2 workers of 1 thread")
    print(machine_line(found))
    text, storage, tokens = runs.small_text(work), work / "runs", work / "tokens.bin"
    vocabulary = write_tokens(text, tokens)
    flags = [*runs.small_setting(text), "--train.steps=3", "--train.log_every=1"]
    runs.prepare(storage, *flags)
    ways = {PEER: partial(start_stock, tokens, vocabulary, work / "stock")}
    for way, more in OURS.items():
        ways[way] = partial(start_ours, storage, [*flags, *more])
    if given.only:
        ways = {way: run for way, run in ways.items() if way == PEER or way in given.only}
    starts = take_turns(ways, given.rounds, lambda _, parts: f"{sum(parts.values()):.2f} s")
    whole = {way: [sum(parts.values()) for parts in each] for way, each in starts.items()}
    print(f"\n{table(starts)}")
    comparison = Comparison("seconds from the start of the process to the first step", whole, PEER, AIMS, ".2f")
    report(given, found, [comparison], parts=starts)


def main() -> None:
    """Parses the command line and runs what it asks for."""
    parser = command_line("startup", __doc__, rounds=4)
    parser.add_argument("--only", nargs="+", choices=list(OURS), help="these of ours beside the peer; else all")
    with tempfile.TemporaryDirectory(prefix="startup-") as scratch:
        compare(parser.parse_args(), Path(scratch))


if __name__ == "__main__":
    main()
