"""The tasks' own figures on data that every machine has: how often digits are told right, waiting for data, padding.

Digits: `configs/images_digits.yaml` with several seeds, accuracy on the held-out fifth. Waiting: the share of time that the
loop of each task's preset stood still for data. Padding: the share of tokens that are padding in translation's bundles,
and in batches of as many pairs as they come; of the embedded docstrings, and of two files of lines where they are given.

    python -m benchmarks.tasks                                # two minutes on two cores
    python -m benchmarks.tasks --source train.de.gz --target train.en.gz
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.pairs import command_line, machine, machine_line
from benchmarks.runs import ROOT, run
from raystride.pipelines.config import Config
from raystride.pipelines.config.parse import from_yaml
from raystride.pipelines.data.feed.cache import NodeCache
from raystride.pipelines.data.feed.samples import bundle_examples
from raystride.pipelines.data.feed.stream import TokenStream
from raystride.pipelines.data.prepare.manifest import Manifest
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.system.storage.folder import Folder

STEPS = {"lm_python": 60, "classify_packages": 60, "translate_reversal": 100, "images_digits": 600}
"""Presets, and for how many steps waiting is measured."""
SEEDS = 3


def train(storage: Path, preset: str, name: str, *flags: str) -> dict[str, float]:
    """Trains a preset inline; what its summary says."""
    common = ("--launch", "inline", "--record.mlflow", "false", "--storage", str(storage), "--run", name)
    run("ray_jobs/train.py", "--config", f"configs/{preset}.yaml", *common, *flags)
    return dict(json.loads((storage / name / "summary.json").read_text()))


def digits(storage: Path) -> list[float]:
    """Accuracy on the held-out fifth, of each seed."""
    found = []
    for seed in range(SEEDS):
        metrics = train(storage, "images_digits", f"digits-{seed}", "--seed", str(seed))["metrics"]
        found.append(float(metrics["val_accuracy"]))  # type: ignore[index]
        print(f"  digits, seed {seed}: {found[-1]:.2%} right", flush=True)
    return found


def waiting(storage: Path) -> dict[str, float]:
    """The share of time that each preset's loop stood still for data."""
    found = {}
    for preset, steps in STEPS.items():
        quiet = ("--train.steps", str(steps), "--validation.every", "0", "--checkpoint.every", "0", "--sample.tokens", "0")
        found[preset] = train(storage, preset, f"waiting-{preset}", *quiet)["data_wait_share"]
        print(f"  waiting for data, {preset}: {found[preset]:.2%}", flush=True)
    return found


def padding(storage: Path, preset: str, *flags: str) -> tuple[float, float]:
    """The share of tokens that is padding in the preset's bundles, and in batches of as many pairs as they come."""
    file = ROOT / "configs" / f"{preset}.yaml"
    output = run(
        "ray_jobs/prepare.py", "--config", str(file), "--launch", "inline", "--storage", str(storage), *flags
    ).output
    place = next(line.split()[1] for line in output.splitlines() if line.startswith("results"))
    folder, config = Folder(place), from_yaml(Config, file.read_text())
    manifest = Manifest.load(folder)
    stream = TokenStream(folder, manifest, "train", NodeCache(storage, 0))
    sizes = build_task(config, manifest.facts).sizes(*stream.read_heads())
    bundled = bundle_examples(sizes, config.train.slot_tokens)
    order = np.random.default_rng(0).permutation(len(sizes))
    batches = np.array_split(order, bundled.num_bundles)
    padded = sum(len(batch) * int(sizes[batch].max(0).sum()) for batch in batches)
    return bundled.padding, 1 - float(sizes.sum()) / padded


def main(given: argparse.Namespace) -> None:
    """Prints all, and writes it where `--json` says."""
    found = machine()
    print(machine_line(found))
    with tempfile.TemporaryDirectory() as place:
        storage = Path(place)
        right, waits = digits(storage), waiting(storage)
        paddings = {"docstrings": padding(storage, "translate_docstrings")}
        if given.source:
            lines = ("--data.source", given.source, "--data.target_source", given.target, "--data.validation", "hash")
            paddings["given"] = padding(storage, "translate_small", *lines)
    print(f"digits: {statistics.mean(right):.2%} right, mean of {SEEDS} seeds [{min(right):.2%}, {max(right):.2%}]")
    print(f"waiting for data: at most {max(waits.values()):.2%}")
    for name, (bundled, as_they_come) in paddings.items():
        print(f"padding, {name}: {bundled:.1%} in bundles, {as_they_come:.1%} as they come")
    if given.json:
        given.json.write_text(
            json.dumps({"machine": found, "digits": right, "waiting": waits, "padding": paddings}, indent=1) + "\n"
        )


if __name__ == "__main__":
    parser = command_line("tasks", __doc__)
    parser.add_argument("--source", help="a text file whose lines are sources")
    parser.add_argument("--target", help="the file with their targets")
    main(parser.parse_args())
