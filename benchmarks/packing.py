"""What padding costs, and windows: pairs of a completion padded, padded in bundles of like length, and packed; windows of a
language model as one text, and with attention within documents.

A forward and backward of a small decoder each, on one thread unless `--threads` says otherwise; tokens are those that are
no padding. Lengths are drawn once, log-normal, cut at the context.

    python -m benchmarks.packing                               # a minute
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.pairs import Comparison, command_line, machine, machine_line, report, take_turns
from raystride.pipelines.config import Config, ModelConfig, TrainConfig
from raystride.pipelines.data.feed.samples import bundle_examples
from raystride.pipelines.data.tasks.completion import Completion
from raystride.pipelines.data.tasks.language_model import LanguageModel
from raystride.pipelines.data.tasks.task import Inputs

SHAPE = ModelConfig(architecture="llama", layers=4, heads=4, hidden_size=256, context=512)
FACTS = {"vocabulary_size": 4096, "end_id": 0}
SAMPLES = 16
"""Pairs of a batch that is padded as drawn; others have as many tokens, padding included or not."""
BATCHES = 6
Batch = tuple[Inputs, torch.Tensor]


def draw_lengths(count: int, middle: int) -> np.ndarray:
    """Lengths of texts, from 2 to the context + 1, half of them below `middle`."""
    drawn = np.random.default_rng(0).lognormal(np.log(middle), 0.8, count)
    return np.clip(drawn.astype(np.int64), 2, SHAPE.context + 1)


def make_pairs(middle: int) -> dict[str, tuple[Completion, list[Batch]]]:
    """Batches of the same pairs: in the order drawn, padded; in bundles of like length, padded; packed."""
    draw = np.random.default_rng(1)
    rows = [draw.integers(1, 4096, length) for length in draw_lengths(BATCHES * SAMPLES, middle)]
    masks = [np.ones(len(row), bool) for row in rows]
    padded, packed = (Completion(Config(task="completion", model=SHAPE, train=each), FACTS) for each in _TRAIN)
    most = sum(map(len, rows)) // BATCHES
    bundles = bundle_examples(np.array([[len(row)] for row in rows]), most)
    chunks = [range(first, first + SAMPLES) for first in range(0, len(rows), SAMPLES)]

    def batches(task: Completion, groups: list[range] | list[np.ndarray]) -> list[Batch]:
        return [task.collate([rows[i] for i in group], [masks[i] for i in group]) for group in groups]

    alike = [bundles.members(number) for number in range(bundles.num_bundles)]
    return {
        "padded": (padded, batches(padded, chunks)),
        "padded, of like length": (padded, batches(padded, alike)),
        "packed": (packed, batches(packed, chunks)),
    }


def make_windows(middle: int) -> dict[str, tuple[LanguageModel, list[Batch]]]:
    """The same windows over documents, as one text and with attention within documents."""
    draw = np.random.default_rng(2)
    stream = np.concatenate([np.append(draw.integers(1, 4096, n - 1), 0) for n in draw_lengths(2000, middle)])
    rows = stream[: BATCHES * 4 * (SHAPE.context + 1)].reshape(BATCHES, 4, -1)
    tasks = [LanguageModel(Config(model=SHAPE, train=each), FACTS) for each in _TRAIN]
    return {
        name: (task, [task.collate(each, None) for each in rows])
        for name, task in zip(("one text", "documents"), tasks, strict=True)
    }


_TRAIN = (TrainConfig(), TrainConfig(packing="documents"))


def pass_over(task: LanguageModel, batches: list[Batch]) -> Callable[[], float]:
    """A forward and backward of every batch; tokens a second."""
    torch.manual_seed(0)
    model = task.build_model()
    tokens = sum(int((targets >= 0).sum()) for _, targets in batches)

    def run() -> float:
        began = time.perf_counter()
        for inputs, targets in batches:
            loss, _ = model(*inputs, targets)
            loss.backward()
            model.zero_grad(set_to_none=True)
        return tokens / (time.perf_counter() - began)

    run()
    return run


def main() -> None:
    """Parses the command line and prints the tables."""
    parser: argparse.ArgumentParser = command_line("packing", __doc__, rounds=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lengths", type=int, nargs="+", default=[32, 128], help="middle lengths of texts")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    found = machine(f"{given.threads} thread(s)")
    print(machine_line(found))
    comparisons = []
    for middle in given.lengths:
        for what, ways, peer in (("pairs", make_pairs(middle), "padded"), ("windows", make_windows(middle), "one text")):
            runs = {name: pass_over(task, batches) for name, (task, batches) in ways.items()}
            samples = take_turns(runs, given.rounds)
            comparisons.append(Comparison(f"tokens/s, {what} of texts of some {middle} tokens", samples, peer, form=",.0f"))
    report(given, found, comparisons)


if __name__ == "__main__":
    main()
