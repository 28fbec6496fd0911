"""Questions into six classes, from scratch: accuracy on TREC's test set beside that of a convolutional network as published.

`configs/classify_trec.yaml` is trained inline, once a seed, by `train.py`, and scored by `evaluate.py`. The
checkpoint is the one with the best accuracy on a tenth of the training file. Settings were chosen by cross-validation within
the training file alone. The peer is the network of Kim (2014) with random embeddings as harvardnlp/sent-conv-torch has it.

    python -m benchmarks.trec --train TREC.train.all --test TREC.test.all
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks import runs
from benchmarks.pairs import Comparison, command_line, machine, machine_line, report
from pipelines.files import Folder

PEER, PUBLISHED = "published", 88.2
PRESET = "configs/classify_trec.yaml"


def score(storage: Path, train: Path, test: Path, seed: int) -> float:
    """Trains with a seed; the accuracy on the test set, in per cent."""
    flags = [f"--config={PRESET}", f"--data.source={train}", "--launch=inline", f"--seed={seed}"]
    run = runs.train(storage, *flags)["run"]
    asked = ["--run", run, "--storage", str(storage), "--data.test_source", str(test), "--launch", "inline"]
    runs.run("ray_jobs/evaluate.py", *asked)
    return 100 * float(Folder.at(str(storage / run / "evaluate" / "test")).read_json("metrics.json")["metrics"]["accuracy"])


def compare(given: argparse.Namespace, storage: Path) -> None:
    """Prints each seed's accuracy as it comes, then their mean and all of them beside the peer's."""
    found = machine()
    print(machine_line(found))
    accuracies = []
    for seed in range(given.seeds):
        started = time.perf_counter()
        accuracies.append(score(storage, given.train.resolve(), given.test.resolve(), seed))
        print(f"  seed {seed}: {accuracies[-1]:.1f} % in {time.perf_counter() - started:.0f} s, both jobs' starts included")
    mean, spread = statistics.mean(accuracies), statistics.stdev(accuracies) if given.seeds > 1 else 0.0
    print(f"mean of {given.seeds} seeds: {mean:.1f} %, standard deviation {spread:.1f}")
    samples = {PEER: [PUBLISHED] * given.seeds, "ours": accuracies}
    report(given, found, [Comparison("per cent right on TREC's test set", samples, PEER, {"ours": "at least 1"})], mean=mean)


def main() -> None:
    """Parses the command line and runs what it asks for."""
    parser = command_line("trec", __doc__)
    parser.add_argument("--train", type=Path, required=True, help="TREC.train.all: a class, a blank and a question a line")
    parser.add_argument("--test", type=Path, required=True, help="TREC.test.all, likewise")
    parser.add_argument("--seeds", type=int, default=3, help="trainings (default 3)")
    with tempfile.TemporaryDirectory(prefix="trec-") as scratch:
        compare(parser.parse_args(), Path(scratch))


if __name__ == "__main__":
    main()
