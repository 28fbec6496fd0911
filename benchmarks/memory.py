"""The memory that a worker is told to need beside what it is measured to hold.

For several shapes and all tasks' networks on one worker, and for every strategy, mesh, precision and way of saving
activations on one shape: a training is built as a worker builds it, makes a step, and is followed through a second one.
Parameters, gradients and the optimiser's state are the live objects' memory, each storage once; activations are the most
that all else held at a moment, the total the most of everything, on GPUs by PyTorch's allocator. Of several workers it is
the one with the largest total that counts. PyTorch itself and its libraries are not in these figures.

    python -m benchmarks.memory                               # one worker, then two and four on gloo; some minutes
    python -m benchmarks.memory --workers 1                   # one worker alone
"""

import argparse
import json
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import runs
from benchmarks.examples import prepare_examples
from benchmarks.pairs import command_line, machine, machine_line
from benchmarks.workers import make_job, read_job, settings, write_job
from raystride.pipelines.config import Config, SettingError
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.memory.estimate import MemoryEstimate, estimate
from raystride.pipelines.train.memory.storages import Storages, size_of
from raystride.pipelines.train.worker.job import Job, WorkerInfo

PARTS = ("parameters", "gradients", "optimizer", "activations", "tensors")
AIM = 0.15
"""A prediction is wrong by so much of what is measured at most."""
SHAPES = {
    "small": "--model.hidden_size=128 --model.layers=4 --model.context=64",
    "wide": "--model.hidden_size=512 --model.layers=3 --model.context=64 --train.slot_size=1",
    "long context": "--model.hidden_size=64 --model.layers=2 --model.context=512",
    "big vocabulary": "--model.hidden_size=64 --model.layers=2 --model.context=64 --tokenizer.kind=bpe",
}
FLAVOURS = {"gpt2": "", "llama, 2 kv": "--model.architecture=llama --model.kv_heads=2"}
WAYS = {
    "bf16": "--train.precision=bf16",
    "pure_bf16": "--train.precision=pure_bf16",
    "pure_bf16, rounded by chance": "--train.precision=pure_bf16 --train.stochastic_rounding=true",
    "activations selective": "--train.activation_checkpointing=selective",
    "activations full": "--train.activation_checkpointing=full",
    "two micro-batches": "--train.micro_batch_slots=2",
    "exact": "--train.exact=true",
}
TASKS = {
    "classification": "--task=classification",
    "classification, dropout 0.1": "--task=classification --model.architecture=llama --model.dropout=0.1",
    "classification, bundles": "--task=classification --train.slot_tokens=512 --model.pooling=attention",
    "translation": "--task=translation --model.architecture=original",
    "translation, dropout 0.1": "--task=translation --model.dropout=0.1 --tokenizer.shared=false",
    "translation, bundles": "--task=translation --train.slot_tokens=512 --model.encoder_layers=2",
    "preference": "--task=preference --objective.reference_free=true --model.architecture=llama",
    "preference, bundles": "--task=preference --objective.reference_free=true --train.slot_tokens=520",
    "images": "--task=images --train.slot_size=16",
    "images, wide": "--task=images --model.channels=[32,64] --model.hidden=[256] --train.activation_checkpointing=full",
}
STRATEGIES = {
    "ddp": "",
    "ddp, exact": "--train.exact=true",
    "fsdp": "--scaling.strategy=fsdp",
    "fsdp, not resharded": "--scaling.strategy=fsdp --scaling.reshard=false",
    "fsdp, pure_bf16": "--scaling.strategy=fsdp --train.precision=pure_bf16",
    "fsdp, two micro-batches": "--scaling.strategy=fsdp --train.micro_batch_slots=1",
    "fsdp, activations full": "--scaling.strategy=fsdp --train.activation_checkpointing=full",
    "deepspeed, ZeRO 1": "--scaling.strategy=deepspeed --scaling.zero=1",
    "deepspeed, ZeRO 2": "--scaling.strategy=deepspeed --scaling.zero=2",
    "deepspeed, ZeRO 3": "--scaling.strategy=deepspeed --scaling.zero=3",
}
"""For two workers."""
MESHES = {
    2: {
        "tensor": "--scaling.tensor=2",
        "tensor, exact": "--scaling.tensor=2 --train.exact=true",
        "tensor, own head": "--scaling.tensor=2 --model.tie_embeddings=false",
        "tensor, llama": "--scaling.tensor=2 --model.architecture=llama",
        "tensor, activations full": "--scaling.tensor=2 --train.activation_checkpointing=full",
        "context": "--scaling.context=2",
        "context, by heads": "--scaling.context=2 --scaling.context_exchange=heads",
        "context, by keys": "--scaling.context=2 --scaling.context_exchange=keys",
        "pipeline": "--scaling.pipeline=2",
        "pipeline, own head": "--scaling.pipeline=2 --model.tie_embeddings=false",
        "pipeline, activations full": "--scaling.pipeline=2 --train.activation_checkpointing=full",
        "pipeline, interleaved": "--scaling.pipeline=2 --scaling.schedule=interleaved --model.layers=4",
        "pipeline, there and back": "--scaling.pipeline=2 --scaling.schedule=zbv --model.layers=4",
    },
    4: {
        "tensor and ddp": "--scaling.tensor=2",
        "tensor and fsdp": "--scaling.tensor=2 --scaling.strategy=fsdp",
        "tensor by four": "--scaling.tensor=4",
        "context and fsdp": "--scaling.context=2 --scaling.strategy=fsdp",
        "context and tensor": "--scaling.context=2 --scaling.tensor=2",
        "pipeline and tensor": "--scaling.pipeline=2 --scaling.tensor=2",
        "pipeline and context": "--scaling.pipeline=2 --scaling.context=2",
        "pipeline and fsdp": "--scaling.pipeline=2 --scaling.strategy=fsdp",
        "pipeline by four": "--scaling.pipeline=4 --model.layers=4",
    },
}
"""For so many workers."""


def cases(workers: int) -> Iterator[tuple[str, list[str]]]:
    """Names and flags of all that is measured with so many workers."""
    small = SHAPES["small"].split()
    if workers > 1:
        for shape in ("small", "wide"):
            for name, flags in ((STRATEGIES if workers == 2 else {}) | MESHES[workers]).items():
                yield f"{name}, {shape}", [*SHAPES[shape].split(), f"--scaling.workers={workers}", *flags.split()]
        return
    for flavour, kind in FLAVOURS.items():
        for shape, flags in SHAPES.items():
            for dropout in (0.0, 0.1):
                yield f"{flavour}, {shape}, dropout {dropout}", [*flags.split(), *kind.split(), f"--model.dropout={dropout}"]
    for name, flags in WAYS.items():
        yield name, [*small, *flags.split()]
    for name, flags in TASKS.items():
        yield name, [*small, "--tokenizer.kind=bpe", *flags.split()]


def make_jobs(workers: int, text: Path, storage: Path, device: str) -> Iterator[tuple[str, Job]]:
    """The jobs to measure; what this version refuses is said and left out."""
    always = ["--checkpoint.every=0", "--validation.samples=12", "--train.steps=4", "--model.heads=4", "--train.slot_size=4"]
    always += ["--data.kind=text", "--data.validation=tail", "--tokenizer.kind=bytes"]
    for name, flags in cases(workers):
        try:
            config = settings(f"--data.source={text}", *always, f"--scaling.device={device}", *flags)
        except (SettingError, SystemExit) as error:
            print(f"  {name}: refused: {error}")
            continue
        yield name, replace(_job(config, storage, name), device=device)


def _job(config: Config, storage: Path, name: str) -> Job:
    """A job on a text, or on examples as long as they can be."""
    if config.task == "language_model":
        return make_job(config, storage, threads=1)
    prepared = prepare_examples(config, storage / name.replace(", ", "-"), count=128)
    folder = Folder.from_uri(str(storage / "job"))
    return Job(config=config, run="job", attempt="a1", folder=folder, prepared=prepared, device="cpu", threads=1)


def measure(job: Job, place: WorkerInfo) -> dict[str, float]:
    """Bytes that this worker holds, by part, in the second step of a job."""
    from raystride.pipelines.train.step import train_step
    from raystride.pipelines.train.worker.build import build_training

    training = build_training(job, place, [], lambda: False, lambda _: None)
    model, optimizer, strategy = training.model, training.optimizer, training.strategy
    first, second = list(training.loader.steps(0, 2))
    train_step(strategy, model, optimizer, first, training.rules, 1e-3)
    parameters, states = list(model.parameters()), []
    if partitions := getattr(strategy, "_partitions", None):
        parameters, states = _zero(partitions, parameters)
    else:
        states = [value for p in parameters for value in optimizer.state(p).values()]
    summed = strategy.local_gradients
    seen: list[torch.Tensor] = []

    def gradients_of_the_step() -> list[torch.Tensor]:
        seen[:] = summed()
        return seen

    strategy.local_gradients = gradients_of_the_step  # type: ignore[method-assign]
    with Storages(before=_gradients(strategy, parameters), ignoring=[*parameters, *states]) as alive:
        if job.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        train_step(strategy, model, optimizer, second, training.rules, 1e-3)
    gradients = _gradients(strategy, parameters) or seen
    held: dict[str, float] = {"parameters": size_of(parameters)}
    held |= {"gradients": size_of(gradients), "optimizer": size_of(states)}
    held["activations"] = alive.most(besides=gradients)
    held["tensors"] = held["parameters"] + held["optimizer"] + alive.most()
    if job.device == "cuda":
        held["tensors"] = torch.cuda.max_memory_allocated()
    return held


def _gradients(strategy: Any, parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Gradients, and the buffers in which they are summed."""
    found = [p.grad for p in parameters if p.grad is not None]
    summed = strategy._all_buckets() if hasattr(strategy, "_all_buckets") else [getattr(strategy, "_buckets", None)]
    for buckets in filter(None, summed):
        found += [*buckets.flat, *getattr(buckets, "_receive_buffers", [])]
        found += [flat for row in getattr(buckets, "_rows", []) for flat in row]
    return found


def _zero(partitions: Any, parameters: list[torch.nn.Parameter]) -> tuple[list[Any], list[torch.Tensor]]:
    """What a worker holds under ZeRO: parameters (in stage 3 its parts), and fp32 partitions with their state."""
    from raystride.pipelines.train.strategies.partitions import _flat_partitions

    flats = _flat_partitions(partitions._zero)
    held = [value for flat in flats for value in partitions._rule.state(flat).values()]
    return [getattr(p, "ds_tensor", p) for p in parameters], [*flats, *held]


def predict(job: Job, workers: int) -> MemoryEstimate:
    """What the preflight would say of a job, if it knew the prepared data."""
    from raystride.pipelines.data.prepare.manifest import Manifest

    told = estimate(job.config, Manifest.load(job.prepared).facts, workers=workers, device=job.device)
    assert told
    return told


def measure_on(workers: int, jobs: list[tuple[str, Job]], folder: Path) -> dict[str, dict[str, float] | str]:
    """Measurements of the worker that holds most by name, in fresh processes if there are several; else in this one."""
    if workers == 1:
        return {name: _measure_or_say(job, WorkerInfo()) for name, job in jobs}
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    files = [
        str(write_job(replace(job, folder=Folder.from_uri(f"{job.folder}-{number}"))))
        for number, (_, job) in enumerate(jobs)
    ]
    with ThreadPoolExecutor(workers) as pool:
        ranks = [
            pool.submit(runs.run, "-m", "benchmarks.memory", "--rank", str(rank), str(workers), port, *files)
            for rank in range(workers)
        ]
        answers = [rank.result().answer for rank in ranks]
    return {name: max((each[file] for each in answers), key=_total) for (name, _), file in zip(jobs, files, strict=True)}


def _total(held: dict[str, float] | str) -> float:
    return 0.0 if isinstance(held, str) else held["tensors"]


def _measure_or_say(job: Job, place: WorkerInfo) -> dict[str, float] | str:
    """What is measured, or why nothing is: a strategy's library may be missing."""
    try:
        return measure(job, place)
    except (ImportError, NotImplementedError) as error:
        return str(error)


def run_rank(rank: int, world: int, port: str, files: list[str]) -> None:
    """What each of several processes runs; prints its measurements as JSON."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    place = WorkerInfo(rank=rank, world=world, local_rank=rank)
    print(json.dumps({file: _measure_or_say(read_job(file), place) for file in files}))


def table(found: dict[str, tuple[MemoryEstimate, dict[str, float] | str]]) -> str:
    """Predicted and measured MiB with their ratio, a line a case and part of it."""
    lines = ["  " + " " * 38 + "".join(f"{part:>26}" for part in PARTS)]
    for name, (told, measured) in found.items():
        if isinstance(measured, str):
            lines.append(f"  {name:<38}{measured}")
            continue
        cells = []
        for part in PARTS:
            mine, real = getattr(told, part), measured[part]
            cells.append(f"{mine / 2**20:9.2f} /{real / 2**20:8.2f} {mine / real:5.2f}")
        lines.append(f"  {name:<38}" + "".join(f"{cell:>26}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    """Parses the command line and runs what it asks for."""
    if sys.argv[1:2] == ["--rank"]:
        run_rank(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:])
        return
    parser: argparse.ArgumentParser = command_line("memory", __doc__)
    parser.add_argument(
        "--workers", type=int, choices=(1, 2, 4), help="measure with so many alone (default: with 1, 2 and 4)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="what to measure on (default cpu)")
    given = parser.parse_args()
    described = machine("1 thread a worker")
    print(f"{machine_line(described)}\npredicted / measured MiB and their ratio (aim: {1 - AIM:.2f} to {1 + AIM:.2f})")
    found: dict[str, dict[str, tuple[MemoryEstimate, dict[str, float] | str]]] = {}
    with tempfile.TemporaryDirectory(prefix="memory-") as scratch:
        text = runs.small_text(Path(scratch))
        for workers in (given.workers,) if given.workers else (1, 2, 4):
            jobs = list(make_jobs(workers, text, Path(scratch) / "runs", given.device))
            measured = measure_on(workers, jobs, Path(scratch))
            found[f"{workers} worker(s)"] = each = {name: (predict(job, workers), measured[name]) for name, job in jobs}
            print(f"\n{workers} worker(s)\n{table(each)}", flush=True)
    ratios = [
        getattr(told, part) / measured[part]
        for each in found.values()
        for told, measured in each.values()
        if not isinstance(measured, str)
        for part in PARTS
    ]
    print(f"\n{len(ratios)} ratios from {min(ratios):.2f} to {max(ratios):.2f}")
    if given.json:
        given.json.write_text(json.dumps({"machine": described, "ratios": ratios}, indent=1) + "\n")


if __name__ == "__main__":
    main()
