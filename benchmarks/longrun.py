"""What a very long run costs whoever opens it: seconds, memory and open files of each command, in a process of its own.

The run is made by this script from a real one of a few steps: its journal becomes one of a million logged steps of 64
workers, written as the recorder writes it; its prepared data ten thousand shards; its checkpoint the newest of a thousand.

    python -m benchmarks.longrun                              # some minutes; --steps 10000 --shards 100 for a look
    # resume    24.1 s   410 MB   38 files and maps           # goes on, saves, prunes, closes the record, draws
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil

import raystride
from raystride.pipelines.data.prepare.manifest import Manifest, Shards
from raystride.pipelines.observability.phases import EXCLUSIVE_PHASES
from raystride.pipelines.observability.record.entry import Entry, WorkerTime, new_entry
from raystride.pipelines.observability.record.group import Aggregator
from raystride.pipelines.observability.record.journal import Journal
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import put_sealed, read_sealed
from raystride.pipelines.train.checkpoint.layout import checkpoint_names

ATTEMPT = "20260101-000000-aaaa"
ENTRIES_A_SEGMENT = 2_000
SETTINGS = {
    "tokenizer.kind": "bytes",
    "launch.mode": "inline",
    "record.mlflow": False,
    "model": {"layers": 1, "heads": 2, "hidden_size": 16, "context": 64},
    "train": {"slots": 2, "slot_size": 2, "log_every": 1},
    "sample.tokens": 0,
    "validation": {"every": 0, "samples": 4},
    "checkpoint": {"every": 1, "keep": 2},
}


def make_data(storage: Path, shards: int) -> None:
    """Prepares a small text, and has its shards stand for many: hard links, each in the manifest."""
    text = storage / "text.txt"
    text.write_text("Long runs have long journals, and somebody opens them. " * 2000)
    raystride.prepare(SETTINGS, {"data.source": str(text), "data.validation": "tail"}, storage=str(storage))
    (place,) = (path.parent for path in (storage / ".prepared").glob("*/manifest.json"))
    manifest = Manifest.load(Folder(str(place)))
    first, many = manifest.splits["train"][0], []
    for number in range(shards):
        name = f"train/{number:05}-copy.arrow"
        os.link(place / first.file, place / name)
        many.append(replace(first, file=name))
    replace(manifest, splits=manifest.splits | {"train": Shards.from_shards(many)}).save(Folder(str(place)))


def train(storage: Path, steps: int) -> None:
    """Starts the run, or goes on with it."""
    settings = {"data.source": str(storage / "text.txt"), "data.validation": "tail", "train.steps": steps}
    raystride.train(SETTINGS, settings, run="long", storage=str(storage))


def make_journal(folder: Folder, steps: int, workers: int) -> None:
    """Writes a journal as the recorder does, from what rank 0 logs and what the workers tell of their time."""
    journal, group, waiting, sequence = Journal(folder, ATTEMPT), Aggregator(), list[Entry](), 0
    shares = {f"phase_{part}_share": 1 / 8 for part in EXCLUSIVE_PHASES}
    for step in range(1, steps + 1):
        values = shares | {"train_loss": 2 + 1 / step, "tokens_per_second": 1e5, "step_seconds_mean": 0.1}
        made = [new_entry("metrics", values, step, 1.7e9 + step)]
        for rank in range(workers):
            times: WorkerTime = {
                "rank": rank, "world": workers, "node": f"node{rank // 8}", "steps": 1, "seconds": 0.1, "own_s": 0.09,
                "data_s": 0.0,
            }  # fmt: skip
            group.ingest(new_entry("rank", times, step))
        for entry in made + group.drain():
            sequence += 1
            entry |= {"attempt": ATTEMPT, "sender": "rank0.0", "sequence": sequence}
            waiting.append(entry)
        if len(waiting) >= ENTRIES_A_SEGMENT or step == steps:
            journal.append(waiting)
            waiting = []


def make_checkpoints(folder: Path, count: int) -> None:
    """Has the newest checkpoint's manifest stand for later ones, of which the last has its data."""
    newest = folder / "checkpoints" / checkpoint_names(os.listdir(folder / "checkpoints"))[-1]
    manifest = read_sealed(Folder(str(newest)), "MANIFEST.json")
    first, (begin, end) = manifest["step"], manifest["positions"]
    for step in range(first + 1, first + count + 1):
        later, moved = newest.with_name(f"step-{step:08}"), (end - begin) * (step - first)
        later.mkdir()
        state = manifest["state"] | {"step": step, "position": end + moved}
        told = {"step": step, "parent_step": step - 1, "positions": [begin + moved, end + moved], "state": state}
        put_sealed(Folder(str(later)), "MANIFEST.json", manifest | told)
    shutil.copytree(newest / manifest["folder"], later / manifest["folder"])


def measured(name: str, *command: str) -> None:
    """Runs a command and prints its seconds, its peak of resident memory, and the most files that it had open at once."""
    began, most_files, peak = time.perf_counter(), 0, 0
    process = psutil.Popen([sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while process.poll() is None:
        try:
            most_files = max(most_files, process.num_fds() + sum("train/" in each.path for each in process.memory_maps()))
            peak = max(peak, process.memory_info().rss)
        except psutil.Error:
            break
        time.sleep(0.05)
    output = process.communicate()[0]
    seconds = time.perf_counter() - began
    print(f"{name:<9} {seconds:6.1f} s {peak / 1e6:6.0f} MB {most_files:5} files and maps", flush=True)
    if process.returncode:
        print(output)


def main(arguments: Sequence[str] | None = None) -> None:
    """Makes the run and measures."""
    parser = argparse.ArgumentParser(description="What a very long run costs whoever opens it.")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--shards", type=int, default=10_000)
    parser.add_argument("--checkpoints", type=int, default=1_000)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as place:
        storage = Path(place)
        make_data(storage, given.shards)
        train(storage, 2)
        began = time.perf_counter()
        make_journal(Folder(str(storage / "long")), given.steps, given.workers)
        make_checkpoints(storage / "long", given.checkpoints)
        print(f"made in {time.perf_counter() - began:.0f} s, without the data", flush=True)
        here = ["--storage", place]
        steps = given.checkpoints + 4
        again = f"from pathlib import Path; from benchmarks.longrun import train; train(Path({place!r}), {steps})"
        measured("import", "-c", "import torch, raystride.pipelines.launch.train_job")
        measured("resume", "-c", again)
        measured("show", "-m", "raystride", "runs", "show", "long", *here)
        measured("audit", "-m", "raystride", "runs", "audit", "long", *here)
        measured("report", "-m", "raystride", "report", "--run", "long", *here)
        measured("prune", "-m", "raystride", "runs", "prune", "long", "--keep", "1", *here)


if __name__ == "__main__":
    main()
