"""Preparation beside its peer, `load_dataset` and `datasets.map(num_proc=2)`: the same text, the same tokenizer, two cores.

Text is copies of the standard library's source, a file a document; the tokenizer is a BPE of 4,096 trained once before.
Every run is a process of its own, timed whole: imports, ray.init or process pool, reading, tokenising, files written.

    python -m benchmarks.preparation --mb 100 --repeats 3     # seconds, MB/s and their ratio, interleaved
    python -m benchmarks.preparation --memory                 # peak memory (PSS of all processes) at 100 MB and at 1 GB
"""

import argparse
import logging
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

_CORES = 2
_SAMPLE_S = 0.5


def corpus(folder: Path, megabytes: int) -> int:
    """Fills a folder with copies of the standard library's source; bytes written."""
    from pipelines.prepare.sources import standard_library

    # load_dataset leaves out folders whose names begin with two underscores.
    files = [file for file in standard_library() if "/__" not in str(Path(file.name).parent)]
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
    from pipelines.config import Tokenizer
    from pipelines.files import Folder
    from pipelines.prepare.sources import standard_library
    from pipelines.tokenizers import train_tokenizer

    texts = (Path(file.uri).read_text(encoding="utf-8") for file in standard_library())
    train_tokenizer(Tokenizer(), texts, Folder(str(folder)), print)
    return folder / "tokenizer.json"


def run_ours(text: Path, tokenizer: Path, out: Path) -> int:
    """Prepares with Raystride; tokens."""
    import ray

    from pipelines.config import Config, Data, Tokenizer
    from pipelines.files import Folder
    from pipelines.prepare.prepare import prepare
    from pipelines.tasks.language_model import LanguageModel

    ray.init(num_cpus=_CORES, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    config = Config(data=Data(source=str(text)), tokenizer=Tokenizer(kind="file", file=str(tokenizer)))
    manifest = prepare(config, Folder(str(out)), LanguageModel(config.model)).manifest
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


def measure(name: str, text: Path, tokenizer: Path, *, memory: bool = False) -> tuple[float, int, float]:
    """One run in a process of its own: seconds, tokens, and (with `memory`) peak PSS in MiB of it and its descendants."""
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
    return seconds, int(output.split()[-1]), peak


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


def compare(megabytes: int, repeats: int, work: Path) -> None:
    """Prints seconds and MB/s of both, interleaved, and their ratio."""
    text = work / "text"
    size = corpus(text, megabytes) / 1e6
    tokenizer = trained_tokenizer(work / "tokenizer")
    seconds: dict[str, list[float]] = {name: [] for name in RUNS}
    tokens: dict[str, int] = {}
    for _ in range(repeats):
        for name in RUNS:
            took, tokens[name], _ = measure(name, text, tokenizer)
            seconds[name].append(took)
            print(f"{name:5} {took:7.1f} s {size / took:6.1f} MB/s {tokens[name]:,} tokens", flush=True)
    print(f"\n{size:.0f} MB, {repeats} runs each, {_CORES} cores: median [lowest, highest]")
    for name, times in seconds.items():
        middle = statistics.median(times)
        print(f"{name:5} {middle:7.1f} s [{min(times):.1f}, {max(times):.1f}]   {size / middle:.1f} MB/s")
    ratios = [peer / ours for ours, peer in zip(seconds["ours"], seconds["peer"], strict=True)]
    print(f"ours is {statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}] times as fast")
    if tokens["ours"] != tokens["peer"]:
        print(f"tokens differ by {abs(tokens['ours'] - tokens['peer']):,}")


def compare_memory(work: Path) -> None:
    """Prints the peak PSS of a preparation of 100 MB and of 1 GB."""
    tokenizer = trained_tokenizer(work / "tokenizer")
    peaks = []
    for megabytes in (100, 1000):
        text = work / f"text-{megabytes}"
        corpus(text, megabytes)
        seconds, _, peak = measure("ours", text, tokenizer, memory=True)
        shutil.rmtree(text)
        peaks.append(peak)
        print(f"{megabytes:5} MB of text: peak {peak:,.0f} MiB, {seconds:.1f} s", flush=True)
    print(f"ten times the text takes {peaks[1] / peaks[0]:.2f} times the memory")


def main() -> None:
    """Parses the command line and runs what it asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=100, help="megabytes of text")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory", action="store_true", help="measure memory at 100 MB and 1 GB instead of time")
    parser.add_argument("--one", nargs=4, metavar=("NAME", "TEXT", "TOKENIZER", "OUT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        name, *places = options.one
        print(RUNS[name](*map(Path, places)))
        return
    with tempfile.TemporaryDirectory(prefix="preparation-") as work:
        compare_memory(Path(work)) if options.memory else compare(options.mb, options.repeats, Path(work))


if __name__ == "__main__":
    main()
