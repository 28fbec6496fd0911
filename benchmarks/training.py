"""Training steps of nanoGPT's small CPU setting: ours inline and under Ray, beside a plain one-file PyTorch loop.

Tokens a second and milliseconds a step, each way a process of its own. What is not a training step (start, validation) is
left out on both sides: the plain loop leaves out its first 20 steps, ours its first. Ours records as usual, MLflow included,
and keeps freed memory; the peer has PyTorch's and glibc's defaults. What multiplies matrices is named in each row: PyTorch's
own products as the peer has them, or those that a first start found fastest, in fp32 or in what `train.precision auto` means
here; the peer in fp32, and in bf16 by its own switch.

    python -m benchmarks.training --rounds 3 --steps 500       # about 5 minutes on two cores
    python -m benchmarks.training --source input.txt --loss    # three seeds, 2,000 steps each: loss on all validation text
"""

import argparse
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import runs
from benchmarks.pairs import command_line, machine, machine_line, report, take_turns

THREADS = 2
PEER, PEER_BF16 = "plain loop", "plain loop, bf16 by autocast"
INLINE = ["--launch", "inline", "--scaling.threads", str(THREADS)]
WAYS = {
    "inline, PyTorch's products": [*INLINE, "--train.precision", "fp32", "--model.linear", "torch"],
    "inline, fp32": [*INLINE, "--train.precision", "fp32"],
    "inline": [*INLINE, "--train.precision", "auto"],
    "Ray, workers auto": ["--train.precision", "auto"],
    "Ray, 1 worker": ["--train.precision", "auto", "--scaling.workers", "1", "--scaling.threads", str(THREADS)],
}
AIMS = {"inline, PyTorch's products": "at least 1.0", "inline": "at least 1.35 with oneDNN or bf16"}
PUBLISHED_LOSS = 1.88
"""nanoGPT's README, for its Shakespeare text: the mean of 20 random validation batches after 2,000 steps."""
SEEDS = (0, 1, 2)


def run_plain(text: Path, steps: int, *flags: str) -> dict[str, Any]:
    """The peer's figures."""
    given = (f"--text={text}", f"--steps={steps}", f"--threads={THREADS}", *flags)
    return runs.run("-m", "benchmarks.peers.plain_loop", *given).answer


def run_ours(storage: Path, flags: list[str]) -> dict[str, Any]:
    """Our figures."""
    return runs.figures(runs.train(storage, *flags))


def compare_speed(given: argparse.Namespace, text: Path, storage: Path) -> None:
    """All ways in turns; prints tokens a second and milliseconds a step."""
    found = machine(f"{THREADS} threads in all")
    print(f"{machine_line(found)}\n{given.steps} steps of 768 tokens a run, {given.rounds} rounds")
    flags = [*runs.small_setting(text), "--train.steps", str(given.steps)]
    runs.prepare(storage, *flags)
    chosen = [way for way in WAYS if way.startswith("inline") or not given.no_ray]
    peers = {PEER: partial(run_plain, text, given.steps), PEER_BF16: partial(run_plain, text, given.steps, "--bf16")}
    ways = peers | {way: partial(run_ours, storage, [*flags, *WAYS[way]]) for way in chosen}
    results = take_turns(ways, given.rounds, runs.say)
    report(given, found, runs.compare(results, PEER, AIMS))


def train_seeds(given: argparse.Namespace, text: Path, storage: Path) -> None:
    """Whole trainings, inline, of three seeds; prints the loss on the whole validation tail."""
    found = machine(f"{THREADS} threads")
    steps = given.steps or 2000
    print(f"{machine_line(found)}\n{steps} steps, inline, loss in nats on the whole validation tail")
    losses = []
    for seed in SEEDS:
        flags = [*runs.small_setting(text), "--validation.samples", "0", "--train.steps", str(steps), "--seed", str(seed)]
        summary = runs.train(storage, *flags, *WAYS["inline"])
        losses.append(summary["val_loss"])
        print(f"  seed {seed}: {losses[-1]:.4f}, {summary['tokens_per_second']:,.0f} tokens/s", flush=True)
    print(f"mean {statistics.mean(losses):.4f} (aim on nanoGPT's text: at most the published {PUBLISHED_LOSS})")
    if not given.source:
        print("the text is the standard library's, whose loss says nothing beside the published one: give --source")
    loss = {"seeds": SEEDS, "values": losses, "published": PUBLISHED_LOSS, "own_text": not given.source}
    report(given, found, [], loss=loss)


def main() -> None:
    """Parses the command line and runs what it asks for."""
    parser = command_line("training", __doc__, rounds=3)
    parser.add_argument("--steps", type=int, help="steps of a run (default 500, with --loss 2,000)")
    parser.add_argument("--source", type=Path, help="text to train on; else the standard library's source")
    parser.add_argument("--no-ray", action="store_true", help="only inline and the peer")
    parser.add_argument("--loss", action="store_true", help="train three seeds to the end and print the validation loss")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="training-") as scratch:
        work = Path(scratch)
        text = given.source.resolve() if given.source else runs.small_text(work)
        if given.loss:
            return train_seeds(given, text, work / "runs")
        given.steps = given.steps or 500
        return compare_speed(given, text, work / "runs")


if __name__ == "__main__":
    main()
