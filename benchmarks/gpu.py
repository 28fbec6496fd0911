"""Everything that only a GPU can tell, in one call of a few minutes: is it right, how fast, and how fast does a model train.

It needs PyTorch, Triton, NumPy and PyYAML alone: no Ray, no MLflow, no pytest. First every kernel is checked on the device,
then each is measured beside its peers (`benchmarks.kernels`), then `configs/lm_124m.yaml` trains on random text for a minute
through the worker that `--launch inline` runs, with Triton kernels and without. The figures go to `benchmarks/results/`.

    python -m benchmarks.gpu                                   # all of it
    python -m benchmarks.gpu --only check                      # or: kernels, train
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

from benchmarks.kernels import figures
from raystride.pipelines.config import Config
from raystride.pipelines.config.parse import from_yaml
from raystride.pipelines.files import Folder
from raystride.pipelines.prepare.manifest import Manifest, Shard, Shards
from raystride.pipelines.record.entry import Entry
from raystride.pipelines.record.environment import describe_source
from raystride.pipelines.record.sender import Receipt
from raystride.pipelines.worker.job import Job, WorkerInfo
from raystride.pipelines.worker.worker import run_worker
from raystride.triton_kernels.device_checks import run_checks

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 50.0
"""That each of the two trainings may take."""
TOKENS = 20_000_000
"""Of the random text."""


def device() -> dict[str, Any]:
    """Hardware, driver, versions, commit, date."""
    properties = torch.cuda.get_device_properties(0)
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader"], capture_output=True, text=True
    ).stdout.strip()
    return {
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "driver_and_power_limit": driver or None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "python": sys.version.split()[0],
        **describe_source(ROOT),
        "date": time.strftime("%Y-%m-%d"),
    }


def check() -> dict[str, Any]:
    """Runs every kernel; prints what is wrong."""
    started, checks = time.perf_counter(), list(run_checks(torch.device("cuda")))
    failed = [each for each in checks if each.failed]
    for each in failed:
        print(f"  WRONG {each.name}: {each.problem or f'error {each.error:.2f}, same bits: {each.same_bits}'}", flush=True)
    print(f"{len(checks)} checks on the device, {len(failed)} failed, {time.perf_counter() - started:.0f} s", flush=True)
    return {"checks": len(checks), "failed": [asdict(each) for each in failed]}


def kernels(rounds: int) -> list[dict[str, Any]]:
    """Measures every operation beside its peers."""
    return [asdict(row) for row in figures("all", rounds)]


def train(choice: str, folder: Path) -> dict[str, Any]:
    """GPT-2 small in bf16 with these kernels: tokens a second, MFU, peak memory, loss."""
    config = from_yaml(Config, (ROOT / "configs" / "lm_124m.yaml").read_text())
    config = replace(
        config,
        model=replace(config.model, kernels=choice),
        train=replace(config.train, hours=SECONDS / 3600, log_every=5),
        validation=replace(config.validation, every=0, samples=16),
        checkpoint=replace(config.checkpoint, every=0),
        record=replace(config.record, mlflow=False),
        sample=replace(config.sample, tokens=0),
    )
    prepared = _random_text(folder, config.tokenizer.vocabulary_size)
    job = Job(
        config=config,
        run=choice,
        attempt="a1",
        folder=Folder.at(str(folder / choice)),
        prepared=prepared,
        device="cuda",
        threads=1,
    )
    summary = run_worker(job, WorkerInfo(), _acknowledge, lambda: False)
    kept = ("steps", "tokens_per_second", "mfu", "train_loss", "step_seconds_p50", "peak_memory_bytes", "data_wait_share")
    found = {key: summary.get(key) for key in (*kept, "kernels")}
    print(f"lm_124m, kernels {choice}: {json.dumps(found)}", flush=True)
    return found


def _random_text(folder: Path, words: int) -> Folder:
    """A prepared folder of ids that follow Zipf's law, as words do; the speed of a step does not depend on their order."""
    prepared = folder / "prepared"
    shards: dict[str, Shards] = {}
    for split, tokens in (("train", TOKENS), ("validation", TOKENS // 100)):
        (prepared / split).mkdir(parents=True, exist_ok=True)
        ids = (np.random.default_rng(0).zipf(1.3, tokens) % words).astype(np.uint16)
        ids.tofile(prepared / split / "00000.arrow")
        shard = Shard(file=f"{split}/00000.arrow", tokens=tokens, documents=1, bytes=ids.nbytes, sha256="", ids_offset=0)
        shards[split] = Shards.of([shard])
    place = Folder.at(str(prepared))
    Manifest(fingerprint="random", id_type="uint16", vocabulary_size=words, end_id=0, splits=shards).save(place)
    return place


def _acknowledge(sender: str, entries: list[Entry], recorder: str) -> Receipt:
    """A recorder that keeps nothing; it lets what matters be seen."""
    for entry in entries:
        if entry["kind"] in ("event", "error"):
            print(f"  {entry['values'].get('text', '')}", flush=True)
    last = entries[-1]["sequence"] if entries else 0
    return Receipt("nobody", last, last)


def main(arguments: list[str] | None = None) -> int:
    """Runs what was asked for; 1 if a kernel is wrong, 3 where there is no GPU."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", choices=["check", "kernels", "train"], help="one part")
    parser.add_argument("--rounds", type=int, default=3, help="times that every way runs (default 3)")
    parser.add_argument(
        "--output", type=Path, help="file for the figures; default benchmarks/results/gpu-<name>-<date>.json"
    )
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks.gpu needs a GPU, and there is none to be seen: nothing was measured", file=sys.stderr)
        return 3
    found: dict[str, Any] = {"device": device()}
    print(json.dumps(found["device"]))
    name = "-".join(found["device"]["gpu"].lower().split())
    output = given.output or ROOT / "benchmarks" / "results" / f"gpu-{name}-{found['device']['date']}.json"
    with tempfile.TemporaryDirectory() as folder:
        parts: dict[str, Callable[[], Any]] = {
            "check": check,
            "kernels": lambda: kernels(given.rounds),
            "train": lambda: {choice: train(choice, Path(folder)) for choice in ("torch", "triton")},
        }
        for part, run in parts.items():
            if given.only in (None, part):
                found[part] = run()
                output.parent.mkdir(parents=True, exist_ok=True)
                output.write_text(json.dumps(found, indent=1) + "\n")
    print(f"figures: {output}")
    return int(bool(found.get("check", {}).get("failed")))


if __name__ == "__main__":
    sys.exit(main())
