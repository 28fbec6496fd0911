"""Proves the kernels of a run on one node, in a process of its own: the caller needs no GPU context, and survives a crash.

proof = prove_on_node(config, storage, limit_s=60)        # on the node itself; returns at once if all is proved
proof.gpu, proof.open, proof.rows                         # None without a GPU; what is left to prove; the verdicts
answers = run_on_all_nodes(NodeProof(config, storage, 60), timeout_s=180)     # on a cluster
"""

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

from raystride.pipelines.config import Config
from raystride.pipelines.observability.record.environment import describe_hardware
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.precision import resolve_precision
from raystride.pipelines.train.worker.kernel_choice import read_reasons
from raystride.pipelines.train.worker.kernel_needs import list_needs
from raystride.pipelines.train.worker.kernel_proof import (
    Gpu,
    describe_gpu,
    is_slower,
    kernel_table,
    list_open,
    prove,
    triton_version,
)

START_S = 60.0
"""Seconds beyond its limit after which the process is ended: it imports PyTorch, and ends its children."""


@dataclass(frozen=True)
class ProofReport:
    """The verdicts of a node."""

    gpu: Gpu | None = None
    """None: the node has no GPU, or none that PyTorch can use."""
    rows: Mapping[str, Any] = field(default_factory=dict)
    """The table, by operation and dtype; see `kernel_proof`."""
    open: tuple[str, ...] = ()
    """What the run needs and has no verdict yet."""
    problem: str = ""
    """Why nothing more was proved, if it is known."""


def find_gpu() -> Gpu | None:
    """Returns the facts of this machine's first NVIDIA GPU without opening it; None if there is none."""
    gpus = describe_hardware()["gpus"]
    return Gpu(gpus[0]["name"], str(gpus[0].get("driver") or ""), triton_version()) if gpus else None


def _with_precision(config: Config) -> Config:
    """Returns the settings with the precision that a GPU of today resolves `auto` to."""
    if config.train.precision != "auto":
        return config
    return replace(config, train=replace(config.train, precision="fp32" if config.train.exact else "bf16"))


def predict_kernels(config: Config, storage: Folder, gpu: Gpu | None = None) -> Literal["auto", "triton", "torch"]:
    """Returns `triton` if `auto` will take all kernels that the run needs on this machine's GPU, `torch` if it will not,
    and `auto` if that is open: nothing is proved yet, or the GPUs are elsewhere. `gpu` stands for its facts."""
    if (gpu := gpu or find_gpu()) is None:
        return "auto"
    config = _with_precision(config)
    needs = list_needs(config)
    found = read_reasons(needs, gpu, storage, exact=config.train.exact)
    reasons = [found[need.key] for need in needs]
    if any(reason.startswith(("not proved", "not timed")) for reason in reasons):
        return "auto"
    return "torch" if any(reasons) else "triton"


def prove_on_node(config: Config, storage: Folder, limit_s: float, gpu: Gpu | None = None) -> ProofReport:
    """Proves what a run needs on this node's GPU, within about `limit_s` seconds; a crash is in the report. `gpu` stands for
    the GPU's facts."""
    gpu = gpu or find_gpu()
    if not (gpu or torch.version.hip):
        return ProofReport()
    if gpu:
        with kernel_table(storage, gpu) as table:
            if not list_open(list_needs(_with_precision(config)), table, exact=config.train.exact):
                return ProofReport(gpu, dict(table))
    with tempfile.TemporaryDirectory(prefix="raystride-proof-") as folder:
        file = Path(folder) / "config.pickle"
        file.write_bytes(pickle.dumps((config, storage, limit_s)))
        command = [sys.executable, "-P", "-m", "raystride.pipelines.train.worker.prover", str(file)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
        if environment.get("CUDA_VISIBLE_DEVICES") == "":  # as Ray has it for tasks that ask for no GPU
            del environment["CUDA_VISIBLE_DEVICES"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s + START_S, env=environment)
        except subprocess.TimeoutExpired:
            return ProofReport(problem=f"it was ended after {limit_s + START_S:.0f} s")
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"gpu"')]
    if done.returncode or not lines:
        return ProofReport(problem=f"its process ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    found = json.loads(lines[-1])
    gpu_found = Gpu(*found["gpu"]) if found["gpu"] else None
    return ProofReport(gpu_found, found["rows"], tuple(found["open"]), found["problem"])


@dataclass(frozen=True)
class NodeProof:
    """Function object that proves on the node of the calling process; pickled to it."""

    config: Config = field(repr=False)
    storage: Folder
    limit_s: float

    def __call__(self) -> ProofReport:
        return prove_on_node(self.config, self.storage, self.limit_s)


def proof_table(report: ProofReport) -> str:
    """Returns a table with a line an operation and dtype, and one a shape of the run."""
    rows = [("kernel", "verdict", "of the allowed error", "checks", "Triton / PyTorch", "date")]
    for key, row in sorted(report.rows.items()):
        timed = ""
        if "triton_s" in row:
            ours, theirs = (1e3 * median(row[f"{name}_s"]) for name in ("triton", "torch"))
            timed = f"{ours:.3g} / {theirs:.3g} ms{', slower' if is_slower(row) else ''}"
        problem = row["problem"][:80]
        verdict = problem if problem.startswith("not run: ") else f"WRONG: {problem}" if problem else "right"
        rows.append((key, verdict, f"{row['error']:.2f}", str(row["checks"]), timed, row["date"]))
    rows += [(key, "not run: the time was over", "", "", "", "") for key in report.open]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)


def _prove_here(file: Path) -> None:
    """Proves in this process's children; prints one line of JSON."""
    config, storage, limit_s = pickle.loads(file.read_bytes())  # written by this user into a private folder  # noqa: S301
    report: dict[str, Any] = {"gpu": None, "rows": {}, "open": [], "problem": "PyTorch cannot use the GPU that there is"}
    if torch.cuda.is_available():
        device, problems = torch.device("cuda", 0), list[str]()
        gpu, config = describe_gpu(device), replace(config, train=resolve_precision(config.train, device))
        rows = prove(config, storage, gpu, limit_s=limit_s, log=problems.append)
        report = {"gpu": list(gpu), "rows": rows, "open": list_open(list_needs(config), rows, exact=config.train.exact)}
        report["problem"] = "; ".join(problems)
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    _prove_here(Path(sys.argv[1]))
