"""Preparation beside its peer, `load_dataset` and `datasets.map(num_proc=2)`: the same text, the same tokenizer, two cores.

Text is copies of the standard library's source, a file a document; the tokenizer is a BPE of 4,096 trained once before.
Every run is a process of its own, timed whole: imports, ray.init or process pool, reading, tokenising, files written.

    python -m benchmarks.preparation --mb 100 --rounds 3      # MB/s, seconds and their ratios, interleaved
    python -m benchmarks.preparation --memory                 # peak memory (PSS of all processes) at 100 MB and at 1 GB
"""

import argparse
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.pairs import Comparison, command_line, machine, machine_line, report, take_turns

_CORES = 2
_SAMPLE_S = 0.5


def corpus(folder: Path, megabytes: int) -> int:
    """Fills a folder with copies of the standard library's source; bytes written."""
    from raystride.pipelines.data.sources.source import standard_library_files

    # load_dataset leaves out folders whose names begin with two underscores.
    files = [file for file in standard_library_files() if "/__" not in str(Path(file.name).parent)]
    written, copy = 0, 0
    while written < megabytes * 1_000_000:
        for file in files:
            target = folder / str(copy) / file.name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file.uri, target)
            written += file.size
            if written >= megabytes * 1_000_000:
                break
        copy += 1
    return written


def trained_tokenizer(folder: Path) -> Path:
    """A `tokenizer.json` trained on the standard library."""
    from raystride.pipelines.config import TokenizerConfig
    from raystride.pipelines.data.sources.source import standard_library_files
    from raystride.pipelines.data.tokenizers import train_tokenizer
    from raystride.pipelines.system.storage.folder import Folder

    texts = (Path(file.uri).read_text(encoding="utf-8") for file in standard_library_files())
    train_tokenizer(TokenizerConfig(), texts, Folder(str(folder)), print)
    return folder / "tokenizer.json"


def run_ours(text: Path, tokenizer: Path, out: Path) -> int:
    """Prepares with Raystride; tokens."""
    import ray

    from raystride.pipelines.config import Config, DataConfig, TokenizerConfig
    from raystride.pipelines.data.prepare.prepare import prepare
    from raystride.pipelines.data.prepare.run_context import RunContext
    from raystride.pipelines.data.tasks.language_model import LanguageModel
    from raystride.pipelines.system.storage.folder import Folder

    ray.init(num_cpus=_CORES, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    config = Config(data=DataConfig(source=str(text)), tokenizer=TokenizerConfig(kind="file", file=str(tokenizer)))
    manifest = prepare(RunContext(config, Folder(str(out))), LanguageModel(config)).manifest
    ray.shutdown()
    return manifest.tokens("train") + manifest.tokens("validation")


def run_peer(text: Path, tokenizer: Path, out: Path) -> int:
    """The way most people do it: load_dataset, then map over two processes with the fastest call of tokenizers; tokens."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import datasets
    from tokenizers import Tokenizer

    datasets.disable_progress_bars()
    loaded = datasets.load_dataset(
        "text", data_dir=str(text), sample_by="document", split="train", cache_dir=str(out), features=None
    )
    encoder = Tokenizer.from_file(str(tokenizer))
    end = encoder.get_vocab()["<|end|>"]

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        found = encoder.encode_batch_fast(batch["text"], add_special_tokens=False)
        return {"ids": [[*encoding.ids, end] for encoding in found]}

    features = datasets.Features({"ids": datasets.List(datasets.Value("uint16"))})
    done = loaded.map(encode, batched=True, batch_size=64, num_proc=_CORES, remove_columns=["text"], features=features)
    return int(sum(len(row) for batch in done.with_format("arrow").iter(1000) for row in batch["ids"]))


RUNS: dict[str, Callable[[Path, Path, Path], int]] = {"ours": run_ours, "peer": run_peer}


class Run(NamedTuple):
    """What one run took and gave."""

    seconds: float
    tokens: int
    peak_mib: float
    """Most proportional set size of the process and its descendants; 0 where it was not measured."""


def measure(name: str, text: Path, tokenizer: Path, *, memory: bool = False) -> Run:
    """One run in a process of its own; `memory` takes readings of it, which cost time."""
    out = Path(tempfile.mkdtemp(prefix="preparation-"))
    command = [sys.executable, "-m", "benchmarks.preparation", "--one", name, str(text), str(tokenizer), str(out)]
    started, peak = time.perf_counter(), 0.0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while memory and process.poll() is None:
            peak = max(peak, _pss(process.pid))
            time.sleep(_SAMPLE_S)
        output, _ = process.communicate()
    seconds = time.perf_counter() - started
    shutil.rmtree(out)
    if process.returncode:
        raise SystemExit(f"{name} failed")
    return Run(seconds, int(output.split()[-1]), peak)


def _pss(pid: int) -> float:
    """Proportional set size, in MiB, of a process and all its descendants."""
    total = 0
    try:
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            try:
                total += process.memory_full_info().pss
            except psutil.Error:
                continue  # it has just ended
    except psutil.Error:
        return 0.0
    return total / 2**20


def compare(given: argparse.Namespace, work: Path) -> None:
    """Prints MB/s and seconds of both, interleaved, and their ratios."""
    found = machine(f"{_CORES} used")
    print(machine_line(found, ("ray", "datasets", "tokenizers", "pyarrow")))
    text = work / "text"
    size = corpus(text, given.mb) / 1e6
    tokenizer = trained_tokenizer(work / "tokenizer")
    ways = {name: partial(measure, name, text, tokenizer) for name in RUNS}
    results = take_turns(ways, given.rounds, lambda _, run: f"{run.seconds:.1f} s, {run.tokens:,} tokens")
    seconds = {name: [run.seconds for run in each] for name, each in results.items()}
    rates = {name: [size / each for each in took] for name, took in seconds.items()}
    comparisons = [
        Comparison(f"MB a second of {size:.0f} MB of text", rates, peer="peer"),
        Comparison("seconds", seconds, peer="peer"),
    ]
    report(given, found, comparisons, tokens={name: each[0].tokens for name, each in results.items()})
    ours, peer = (results[name][0].tokens for name in ("ours", "peer"))
    if ours != peer:
        print(f"tokens differ by {abs(ours - peer):,}")


def compare_memory(given: argparse.Namespace, work: Path) -> None:
    """Prints the peak PSS of a preparation of 100 MB and of 1 GB."""
    found = machine(f"{_CORES} used")
    print(machine_line(found, ("ray", "tokenizers", "pyarrow")))
    tokenizer = trained_tokenizer(work / "tokenizer")
    peaks = {}
    for megabytes in (100, 1000):
        text = work / f"text-{megabytes}"
        corpus(text, megabytes)
        run = measure("ours", text, tokenizer, memory=True)
        shutil.rmtree(text)
        peaks[megabytes] = run.peak_mib
        print(f"{megabytes:5} MB of text: peak {run.peak_mib:,.0f} MiB, {run.seconds:.1f} s", flush=True)
    print(f"ten times the text takes {peaks[1000] / peaks[100]:.2f} times the memory")
    report(given, found, [], peak_mib_by_mb=peaks)


def main() -> None:
    """Parses the command line and runs what it asks for."""
    parser = command_line("preparation", __doc__, rounds=3)
    parser.add_argument("--mb", type=int, default=100, help="megabytes of text (default 100)")
    parser.add_argument("--memory", action="store_true", help="measure memory at 100 MB and 1 GB instead of time")
    parser.add_argument("--one", nargs=4, metavar=("NAME", "TEXT", "TOKENIZER", "OUT"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        name, *places = given.one
        print(RUNS[name](*map(Path, places)))
        return
    with tempfile.TemporaryDirectory(prefix="preparation-") as work:
        (compare_memory if given.memory else compare)(given, Path(work))


if __name__ == "__main__":
    main()
