"""Questions into six classes: accuracy on TREC's test set, from scratch and from an encoder, beside a published network.

`configs/classify_trec.yaml` is trained inline, once a seed, by `ray_jobs/train.py`; `ray_jobs/evaluate.py` scores its last
checkpoint. With `--encoder FOLDER` (BERT, MiniLM, ...) that model is fine-tuned as well, with the same seeds and splits.
Settings were chosen by validation within the training file alone. The published figure is that of Kim's network (2014) with
random embeddings in harvardnlp/sent-conv-torch.

    python -m benchmarks.trec --train TREC.train.all --test TREC.test.all
    # from scratch, mean of 3 seeds: 88.4 %, standard deviation 0.9
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import runs
from benchmarks.pairs import command_line, machine, machine_line, report
from raystride.pipelines.system.storage.folder import Folder

PUBLISHED = 88.2
"""Per cent."""
FROM_SCRATCH = ("--config=configs/classify_trec.yaml",)
FROM_ENCODER = (
    *("--task=classification", "--data.kind=labelled", "--data.encoding=latin-1", "--data.validation_fraction=0.05"),
    *("--optimizer.learning_rate=1e-4", "--optimizer.warmup_steps=30", "--model.dropout=0.1", "--model.context=64"),
    *("--train.steps=350", "--train.batch=32", "--train.precision=auto", "--validation.every=0", "--validation.samples=32"),
)
"""Settings of the fine-tuning, but for its folder."""


def score(flags: Sequence[str], storage: Path, train: Path, test: Path, seed: int) -> float:
    """Trains with a seed and returns the accuracy on the test set, in per cent."""
    run = runs.train(storage, *flags, f"--data.source={train}", "--launch=inline", f"--seed={seed}")["run"]
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
    return 100 * float(
        Folder.from_uri(str(storage / run / "evaluate" / "test")).read_json("metrics.json")["metrics"]["accuracy"]
    )


def compare(given: argparse.Namespace, storage: Path) -> None:
    """Prints each seed's accuracy as it comes, then the mean of each way beside the published figure."""
    found = machine()
    print(machine_line(found))
    ways = {"from scratch": FROM_SCRATCH}
    if given.encoder:
        ways[f"from {given.encoder.name}"] = (*FROM_ENCODER, f"--model.init_from={given.encoder.resolve()}")
    accuracies: dict[str, list[float]] = {name: [] for name in ways}
    for seed in range(given.seeds):
        for name, flags in ways.items():
            started = time.perf_counter()
            accuracies[name].append(score(flags, storage, given.train.resolve(), given.test.resolve(), seed))
            took = time.perf_counter() - started
            print(
                f"  {name}, seed {seed}: {accuracies[name][-1]:.1f} % in {took:.0f} s, both jobs' starts included",
                flush=True,
            )
    means = {name: statistics.mean(values) for name, values in accuracies.items()}
    for name, values in accuracies.items():
        spread = statistics.stdev(values) if given.seeds > 1 else 0.0
        print(f"{name}, mean of {given.seeds} seeds: {means[name]:.1f} %, standard deviation {spread:.1f}")
    print(f"a convolutional network as published: {PUBLISHED} %")
    report(given, found, [], accuracies=accuracies, means=means, published=PUBLISHED)


def main() -> None:
    """Parses the command line and runs what it asks for."""
    parser = command_line("trec", __doc__)
    parser.add_argument("--train", type=Path, required=True, help="TREC.train.all: a class, a blank and a question a line")
    parser.add_argument("--test", type=Path, required=True, help="TREC.test.all, likewise")
    parser.add_argument("--encoder", type=Path, help="a folder of Hugging Face's to fine-tune as well: BERT, MiniLM, ...")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each (default 3)")
    with tempfile.TemporaryDirectory(prefix="trec-") as scratch:
        compare(parser.parse_args(), Path(scratch))


if __name__ == "__main__":
    main()
