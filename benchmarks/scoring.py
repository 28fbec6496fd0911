"""Batch prediction and evaluation of a classifier beside `transformers`' pipeline, with the same exported weights.

The classifier is a small BERT with fresh weights and a tokenizer trained on source code. Each way labels 10,000 texts
of 4 to 100 words with the same batch size and threads. The pipeline takes them as they come, and sorted by length, as
its users are advised to. Ours labels a list in this process, and a file, for which it starts workers and writes
Parquet. Evaluation reads labels as well and estimates intervals by bootstrap. That the labels agree is checked.

    python -m benchmarks.scoring                               # texts a second; some five minutes on two cores
"""

import argparse
import json
import logging
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import raystride
from benchmarks.encoders import CONTEXT, SHAPE, WORDS, make_tokenizer, unlabelled
from benchmarks.pairs import Comparison, command_line, machine, machine_line, report, take_turns

LABELS = ("bug", "feature", "question", "other")


def write_texts(folder: Path, count: int) -> list[str]:
    """Writes labelled texts to `texts.jsonl`, and a few of them to train on; returns the texts."""
    draw = random.Random(0)
    words = " ".join(unlabelled(8 << 20)).split()
    rows = []
    for _ in range(count):
        first, length = draw.randrange(len(words) - 100), draw.randint(4, 100)
        rows.append({"text": " ".join(words[first : first + length]), "label": draw.choice(LABELS)})
    for name, some in (("texts", rows), ("few", rows[:256])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    return [str(row["text"]) for row in rows]


def train_classifier(folder: Path, threads: int) -> raystride.Run:
    """A run of two steps, from a BERT with fresh weights."""
    from transformers import BertConfig, BertModel

    (folder / "base").mkdir()
    make_tokenizer(unlabelled(2 << 20), folder / "base")
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=WORDS, max_position_embeddings=CONTEXT, **SHAPE)).save_pretrained(folder / "base")
    settings = {
        "task": "classification",
        "data.kind": "json",
        "model.init_from": str(folder / "base"),
        "model.context": CONTEXT,
        "data.source": str(folder / "few.jsonl"),
        "data.validation_fraction": 0.2,
        "train.steps": 2,
        "launch.mode": "inline",
        "scaling.threads": threads,
    }
    return raystride.train(settings, run="scored", storage=folder / "runs")


def open_pipeline(exported: Path, batch: int) -> Any:
    """`transformers`' text classification with the exported model."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    logging.getLogger("transformers").setLevel(logging.ERROR)
    return transformers.pipeline("text-classification", model=str(exported), device="cpu", batch_size=batch)


def time_rate(count: int, label: Callable[[], Any]) -> float:
    """Texts a second."""
    began = time.perf_counter()
    label()
    return count / (time.perf_counter() - began)


def label_file(run: raystride.Run, folder: Path, batch: int) -> None:
    """Labels the file into a new folder."""
    shutil.rmtree(folder / "labels", ignore_errors=True)
    run.predict(settings={"input": str(folder / "texts.jsonl"), "output": str(folder / "labels"), "batch": batch})


def main(given: argparse.Namespace) -> None:
    """Measures all ways, and reports."""
    torch.set_num_threads(given.threads)
    found = machine(f"{given.threads} threads")
    print(machine_line(found, ("torch", "transformers")))
    with tempfile.TemporaryDirectory(prefix="scoring-") as scratch:
        folder = Path(scratch)
        texts = write_texts(folder, given.texts)
        run = train_classifier(folder, given.threads)
        pipeline = open_pipeline(Path(run.export("hugging_face")), given.batch)
        as_written = partial(pipeline, truncation=True, max_length=CONTEXT)
        flags = {"batch": given.batch, "threads": given.threads}
        theirs = [row["label"] for row in as_written(texts[:1000])]
        ours = [row["label"] for row in run.predict(texts[:1000], flags)]
        alike = sum(one == other for one, other in zip(ours, theirs, strict=True))
        print(f"{alike} of 1,000 labels are the same; {len(texts):,} texts, batches of {given.batch}")
        by_length = sorted(texts, key=len)
        test = {"data.test_source": str(folder / "texts.jsonl"), "batch": given.batch}
        ways: dict[str, Callable[[], Any]] = {
            "transformers": lambda: as_written(texts),
            "transformers, sorted": lambda: as_written(by_length),
            "ours, a list": lambda: run.predict(texts, flags),
            "ours, a list, bf16": lambda: run.predict(texts, flags | {"precision": "bf16"}),
            "ours, a file": partial(label_file, run, folder, given.batch),
            "ours, evaluation": lambda: run.evaluate("test", test),
        }
        timed = {name: partial(time_rate, len(texts), way) for name, way in ways.items()}
        rates = take_turns(timed, given.rounds, lambda _, rate: f"{rate:,.0f} texts/s")
    compared = [Comparison("texts a second", rates, peer="transformers", aims={"ours, a list": "at least 1"}, form=",.0f")]
    report(given, found, compared, alike=alike)


if __name__ == "__main__":
    parser = command_line("scoring", __doc__, rounds=3)
    parser.add_argument("--texts", type=int, default=10_000, help="texts to label (default 10,000)")
    parser.add_argument("--batch", type=int, default=32, help="texts side by side, of all ways (default 32)")
    parser.add_argument("--threads", type=int, default=2, help="threads of a process (default 2)")
    main(parser.parse_args())
