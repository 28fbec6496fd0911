"""Our runs as their user sees them: a command started in a process of its own, and the figures it leaves behind.

Times in seconds, rates in tokens a second. The text is the standard library's own source where none is given, so that every
benchmark runs anywhere.

    text = small_text(folder)                                 # 1.1 MB of ASCII, as much as nanoGPT's Shakespeare
    prepare(storage, *small_setting(text))
    train(storage, *small_setting(text), "--train.steps", "200")["tokens_per_second"]
"""

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.pairs import Comparison
from raystride.pipelines.observability.record import read_entries
from raystride.pipelines.system.storage.folder import Folder

ROOT = Path(__file__).resolve().parents[1]
TEXT_BYTES = 1_115_394
"""Size of nanoGPT's Shakespeare text."""
TIMEOUT_S = 900
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "TOKENIZERS_PARALLELISM": "false"}
"""Ours and peers alike must not wait for a network."""


class Failed(RuntimeError):
    """A measured process did not end well; the message ends with what it printed."""


@dataclass(frozen=True)
class Finished:
    """A process that ended well."""

    output: str
    """What it printed."""
    started_at: float
    """When it was started, in seconds since 1970."""

    @property
    def answer(self) -> dict[str, Any]:
        """The last line, which is JSON."""
        return dict(json.loads(self.output.strip().splitlines()[-1]))


def run(*arguments: str, ends: Collection[int] = (0,), root: Path = ROOT) -> Finished:
    """Runs this Python with arguments in the repository, or another checkout, outside any Ray cluster there may be.

    Raises Failed where it ends with another exit code than these.
    """
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | ENVIRONMENT
    if root != ROOT:
        environment["PYTHONPATH"] = str(root)
    started_at = time.time()
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode not in ends:
        raise Failed(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")
    return Finished(done.stdout, started_at)


def small_text(folder: Path) -> Path:
    """A file with as much of the standard library's source as nanoGPT's text is long, ASCII only as that is."""
    from raystride.pipelines.data.sources.source import standard_library_files

    target, text = folder / "text.txt", ""
    for file in standard_library_files():
        content = Path(file.uri).read_text(encoding="utf-8")
        text += content if content.isascii() else ""
        if len(text) >= TEXT_BYTES:
            break
    target.write_text(text[:TEXT_BYTES])
    return target


def small_setting(text: Path) -> list[str]:
    """Flags of nanoGPT's small CPU setting on a text, with nothing but training steps, which alone are compared."""
    preset = ROOT / "configs" / "lm_shakespeare_cpu.yaml"
    flags = {"data.source": text, "validation.every": 0, "validation.samples": 12, "checkpoint.every": 0, "sample.tokens": 0}
    return [f"--config={preset}", *(f"--{name}={value}" for name, value in flags.items())]


def prepare(storage: Path, *flags: str) -> None:
    """Prepares the data, so that no measured run does."""
    run("ray_jobs/prepare.py", *flags, "--launch", "inline", "--storage", str(storage))


def train(storage: Path, *flags: str, root: Path = ROOT) -> dict[str, Any]:
    """Trains a run of a new name; its summary, and in `start` the seconds of each part of the start."""
    name = f"run-{secrets.token_hex(4)}"
    run("ray_jobs/train.py", *flags, "--storage", str(storage), "--run", name, root=root)
    return dict(Folder.from_uri(str(storage / name)).read_json("summary.json")) | {"start": start_of(storage, name)}


def start_of(storage: Path, name: str) -> dict[str, float]:
    """The seconds of each part of a run's start."""
    return _start(read_entries(Folder.from_uri(str(storage / name))))


def seconds(*arguments: str) -> float:
    """How long this Python takes with arguments in the repository, which may end with a refusal. Raises Failed."""
    started = time.monotonic()
    run(*arguments, ends=(0, 2))
    return time.monotonic() - started


def figures(summary: dict[str, Any]) -> dict[str, float]:
    """Tokens a second over all steps but the first, and the median milliseconds of a step, as peers name them."""
    return {"tokens_per_second": summary["tokens_per_second"], "step_ms": 1000 * summary["step_seconds_p50"]}


def say(_: str, got: dict[str, float]) -> str:
    """One run's figures in a line."""
    return f"{got['tokens_per_second']:,.0f} tokens/s, {got['step_ms']:.1f} ms a step"


def compare(results: dict[str, list[dict[str, float]]], peer: str, aims: dict[str, str]) -> list[Comparison]:
    """Tokens a second, for which the aims are, and milliseconds a step."""

    def values(key: str) -> dict[str, list[float]]:
        return {way: [got[key] for got in found] for way, found in results.items()}

    return [
        Comparison("tokens a second", values("tokens_per_second"), peer, aims, ",.0f"),
        Comparison("milliseconds a step, each run's median", values("step_ms"), peer),
    ]


def _start(entries: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Seconds by milestone, in order, of the first measurement."""
    for entry in entries:
        values = entry.get("values") or {}
        if found := [name for name in values if name.startswith("start/")]:
            return {name.removeprefix("start/").removesuffix("_s"): float(values[name]) for name in found}
    return {}
