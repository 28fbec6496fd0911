"""Questions into six classes, from scratch: accuracy on TREC's test set beside that of a convolutional network as published.

`configs/classify_trec.yaml` is trained inline, once a seed, by `ray_jobs/train.py`; `ray_jobs/evaluate.py` scores its last
checkpoint. Settings were chosen by cross-validation within the training file alone. The published figure is that of Kim's
network (2014) with random embeddings in harvardnlp/sent-conv-torch.

    python -m benchmarks.trec --train TREC.train.all --test TREC.test.all
    # mean of 3 seeds: 88.4 %, standard deviation 0.9 (published: 88.2 %)
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks import runs
from benchmarks.pairs import command_line, machine, machine_line, report
from raystride.pipelines.files import Folder

PUBLISHED = 88.2
"""Per cent."""
PRESET = "configs/classify_trec.yaml"


def score(storage: Path, train: Path, test: Path, seed: int) -> float:
    """Trains with a seed; the accuracy on the test set, in per cent."""
    flags = [f"--config={PRESET}", f"--data.source={train}", "--launch=inline", f"--seed={seed}"]
    run = runs.train(storage, *flags)["run"]
    asked = [
        "--run",
        run,
        "--storage",
        str(storage),
        "--data.test_source",
        str(test),
        "--checkpoint=last",
        "--launch=inline",
    ]
    runs.run("ray_jobs/evaluate.py", *asked)
    return 100 * float(Folder.at(str(storage / run / "evaluate" / "test")).read_json("metrics.json")["metrics"]["accuracy"])


def compare(given: argparse.Namespace, storage: Path) -> None:
    """Prints each seed's accuracy as it comes, then their mean beside the published figure."""
    found = machine()
    print(machine_line(found))
    accuracies = []
    for seed in range(given.seeds):
        started = time.perf_counter()
        accuracies.append(score(storage, given.train.resolve(), given.test.resolve(), seed))
        print(f"  seed {seed}: {accuracies[-1]:.1f} % in {time.perf_counter() - started:.0f} s, both jobs' starts included")
    mean, spread = statistics.mean(accuracies), statistics.stdev(accuracies) if given.seeds > 1 else 0.0
    print(f"mean of {given.seeds} seeds: {mean:.1f} %, standard deviation {spread:.1f} (published: {PUBLISHED} %)")
    report(given, found, [], accuracies=accuracies, mean=mean, published=PUBLISHED)


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
