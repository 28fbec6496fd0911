"""Meshes of workers beside one worker: the same losses and gradients, or the layer that differs first; then their speed.

Small decoders in all flavours, with windows and with packed documents, with tied and with own heads, take 30 steps on every
mesh of 2 and 4 processes and on six of 8. Losses must agree with one worker's within 1e-5, and each parameter's gradient,
at the first step and, without ReLUs, at the last, within 1e-4 of its norm. In fp32, PyTorch's products, dropout by place.

    python -m benchmarks.mesh                                 # one case a mesh; some minutes on two cores
    python -m benchmarks.mesh --all                           # all of them; half an hour
    python -m benchmarks.mesh --mesh "tensor 2" --all         # those of one mesh
"""

import argparse
import itertools
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import runs
from benchmarks.pairs import machine, machine_line
from benchmarks.workers import make_job, read_job, settings, write_job
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.worker.job import Job, WorkerInfo

STEPS = 30
LOSS_AIM, GRADIENT_AIM = 1e-5, 1e-4
"""Relative, of a step's loss and of the norm of a parameter's gradient."""
MESHES = {
    2: ("pipeline=2", "context=2", "tensor=2"),
    4: (
        "pipeline=4",
        "pipeline=2 context=2",
        "pipeline=2 tensor=2",
        "pipeline=2 strategy=ddp",
        "pipeline=2 strategy=fsdp",
        "context=4",
        "context=2 tensor=2",
        "context=2 strategy=ddp",
        "context=2 strategy=fsdp",
        "tensor=4",
        "tensor=2 strategy=ddp",
        "tensor=2 strategy=fsdp",
    ),
    8: (
        "pipeline=2 context=2 tensor=2",
        "pipeline=2 context=2 strategy=fsdp",
        "pipeline=2 tensor=2 strategy=ddp",
        "context=2 tensor=2 strategy=fsdp shard_workers=2",
        "pipeline=4 tensor=2",
        "tensor=2 strategy=fsdp shard_workers=2",
    ),
}
"""By their workers. Shards are those of all groups where nothing else is said."""
SCHEDULES, EXCHANGES = ("1f1b", "interleaved", "zbv"), ("ring", "heads", "keys")
VARIANTS = tuple(itertools.product(("windows", "documents"), ("tied", "untied"), ("gpt2", "llama", "original")))


@dataclass(frozen=True)
class Case:
    """A network on a mesh."""

    workers: int
    mesh: str
    """Settings of the section `scaling`; empty: one worker."""
    variant: tuple[str, str, str]
    dropout: float = 0.0

    @property
    def flags(self) -> list[str]:
        """Its settings."""
        packing, tied, flavour = self.variant
        flags = [f"--scaling.{each}" for each in self.mesh.split()]
        flags += [
            f"--model.architecture={flavour}",
            f"--model.tie_embeddings={str(tied == 'tied').lower()}",
            f"--model.dropout={self.dropout}",
        ]
        if flavour == "llama":
            flags += ["--model.kv_heads=4", "--model.qk_norm=true", "--model.qkv_bias=true"]
        if flavour == "original":
            # Norms behind additions and ReLUs: at the others' rate even two data-parallel workers drift from one by 5e-3.
            flags += ["--optimizer.learning_rate=0.0003"]
        if packing == "documents":
            flags += ["--train.packing=documents"]
        return [*flags, f"--scaling.workers={self.workers}"]

    def __str__(self) -> str:
        return f"{self.mesh.replace('=', ' ') or 'one worker'}: {', '.join(self.variant)}"


def cases(everything: bool, wanted: str = "") -> Iterator[Case]:
    """The cases of each mesh: one, or each variant; schedules and exchanges take turns, so that all meet all."""
    turn = 0
    for place, (workers, mesh) in enumerate((workers, mesh) for workers, meshes in MESHES.items() for mesh in meshes):
        if wanted and wanted.replace(" ", "=") not in mesh and wanted != mesh:
            continue
        for number, variant in enumerate(VARIANTS):
            turn += 1
            if everything or number == place * 5 % len(VARIANTS):
                yield Case(workers, mesh + _rotated_mesh(mesh, turn), variant, dropout=0.1 * (turn % 4 == 0))


def _rotated_mesh(mesh: str, turn: int) -> str:
    found = ""
    if "pipeline" in mesh:
        schedule = SCHEDULES[turn % 3]
        found += f" schedule={'interleaved' if schedule == 'zbv' and 'fsdp' in mesh else schedule}"
    if "context" in mesh:
        found += f" context_exchange={EXCHANGES[turn // 3 % 3]}"
    return found


def make_case(case: Case, text: Path, storage: Path) -> Job:
    """The job of a case, and of one worker for its like."""
    always = ["--model.layers=8", "--model.heads=8", "--model.hidden_size=32", "--model.context=32", "--train.slots=8"]
    always += ["--train.slot_size=2", "--train.micro_batch_slots=1", "--train.dropout_masks=place", f"--train.steps={STEPS}"]
    always += ["--train.log_every=1", "--optimizer.learning_rate=0.003", "--optimizer.warmup_steps=2"]
    # Gradients that are nothing but rounding would be blown up to whole updates by a smaller eps, and courses drift apart.
    always += ["--optimizer.eps=0.0001"]
    always += ["--validation.every=0", "--validation.samples=8", "--checkpoint.every=0", "--sample.tokens=0"]
    always += ["--tokenizer.kind=bytes", "--data.kind=json", "--data.column=text", "--model.linear=torch"]
    return make_job(settings(f"--data.source={text}", *always, *case.flags), storage, threads=1)


@dataclass
class Course:
    """What a training measured, step by step, and its gradients by parameter at the first step and at the last."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    seconds: float = 0.0


class _Watch:
    """Keeps a training's losses."""

    def __init__(self, course: Course) -> None:
        self._course = course

    def on_log(self, step: int, measured: dict[str, float]) -> None:
        if "train_loss" in measured:
            self._course.losses.append(measured["train_loss"])

    def __getattr__(self, _: str) -> Any:
        return lambda *_: None


def follow(job: Job, place: WorkerInfo) -> Course:
    """The course of a job; all its workers call it together, with a process group if there are several."""
    from raystride.pipelines.train.strategies.parameter_layout import gather_tensors
    from raystride.pipelines.train.worker.build import build_training

    course = Course()
    training = build_training(job, place, [_Watch(course)], lambda: False, lambda _: None)  # type: ignore[list-item]
    reduce, steps = training.strategy.reduce_gradients, itertools.count(1)

    def reduced(measured: torch.Tensor) -> torch.Tensor:
        total = reduce(measured)
        if next(steps) in (1, STEPS):
            gathered = gather_tensors(training.model, lambda p: torch.zeros_like(p) if p.grad is None else p.grad)
            course.gradients.append({name: each.clone() for name, each in gathered})
        return total

    training.strategy.reduce_gradients = reduced  # type: ignore[method-assign]
    began = time.perf_counter()
    training.run()
    course.seconds = time.perf_counter() - began
    return course


@dataclass(frozen=True)
class Difference:
    """How far a course is from another, and the parameter whose gradient is farthest, or the first that is too far."""

    loss: float
    gradient: float
    where: str

    @property
    def passed(self) -> bool:
        """Whether it is within what rounding explains."""
        return self.loss <= LOSS_AIM and self.gradient <= GRADIENT_AIM


def difference(found: Course, wanted: Course, *, smooth: bool) -> Difference:
    """The greatest relative differences of two courses. Raises ValueError where they have not as many steps.

    A network that is not `smooth` has ReLUs: after some steps the last bit of an input decides here and there whether one
    passes, and with it a token's whole gradient; so its gradients are held to at the first step alone.
    """
    pairs = list(zip(found.losses, wanted.losses, strict=True))
    loss = max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)
    errors: dict[str, float] = {}
    captured = list(zip(found.gradients, wanted.gradients, strict=True))
    for ours, theirs in captured if smooth else captured[:1]:
        for name in sorted(theirs, key=_depth):
            error = float((ours[name] - theirs[name]).norm() / theirs[name].norm().clamp(min=1e-12))
            errors[name] = max(error, errors.get(name, 0.0))
    far = [name for name, error in errors.items() if not error <= GRADIENT_AIM]
    return Difference(loss, max(errors.values()), far[0] if far else max(errors, key=lambda name: errors[name]))


def _depth(name: str) -> tuple[int, int, str]:
    """Parameters in the order of the forward."""
    parts = name.split(".")
    return (
        (1, int(parts[1]), name)
        if parts[0] == "blocks"
        else (0 if "embedding" in name or "positions" in name else 2, 0, name)
    )


def write_documents(folder: Path) -> Path:
    """Documents of very different lengths."""
    source = folder / "documents.jsonl"
    words = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "so", "on", "and", "on"]
    texts = (" ".join(words[: 1 + number * 7919 % 13] * (1 + number % 3)) + f" {number * 31 % 97}" for number in range(900))
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return source


def run_all(chosen: Sequence[Case], folder: Path) -> Iterator[tuple[Case, Difference, float]]:
    """Each case beside one worker's course of the same network, as they end."""
    text = write_documents(folder)
    alone: dict[Any, Course] = {}
    for (workers, _), group in itertools.groupby(chosen, key=lambda case: (case.workers, _plain(case.mesh))):
        batch = list(group)
        for case in batch:
            like = (case.variant, case.dropout)
            if like not in alone:
                alone[like] = _run_on_workers(1, [make_case(replace(case, workers=1, mesh=""), text, folder)], folder)[0]
        for case, course in zip(
            batch, _run_on_workers(workers, [make_case(each, text, folder) for each in batch], folder), strict=True
        ):
            yield (
                case,
                difference(course, alone[case.variant, case.dropout], smooth=case.variant[2] != "original"),
                course.seconds,
            )


def _run_on_workers(workers: int, jobs: Sequence[Job], folder: Path) -> list[Course]:
    """The courses of jobs, one after another in the same processes."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    files = [
        str(write_job(replace(job, folder=Folder.from_uri(f"{folder}/job-{number}")))) for number, job in enumerate(jobs)
    ]
    answer = folder / "courses.pt"
    with ThreadPoolExecutor(workers) as pool:
        ranks = [
            pool.submit(runs.run, "-m", "benchmarks.mesh", "--rank", str(rank), str(workers), port, str(answer), *files)
            for rank in range(workers)
        ]
        for rank in ranks:
            rank.result()
    return torch.load(answer, weights_only=False)  # type: ignore[no-any-return]


def _as_rank(rank: int, world: int, port: str, answer: str, files: list[str]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.set_num_threads(1)
    courses = [follow(read_job(file), WorkerInfo(rank=rank, world=world, local_rank=rank)) for file in files]
    if rank == 0:
        torch.save(courses, answer)
    print(json.dumps({"rank": rank}))


def main(arguments: list[str]) -> int:
    """Prints a line a case, and the worst of each mesh; 1 where a case is too far from one worker."""
    if arguments[:1] == ["--rank"]:
        rank, world, port, answer, *files = arguments[1:]
        _as_rank(int(rank), int(world), port, answer, files)
        return 0
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mesh", description=__doc__.partition("\n")[0])
    parser.add_argument("--all", action="store_true", help="every variant on every mesh")
    parser.add_argument("--mesh", default="", help="the meshes with this in their name, `tensor 2` for instance")
    chosen = parser.parse_args(arguments)
    print(machine_line(machine()))
    worst: dict[str, tuple[Difference, int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for case, found, seconds in run_all(list(cases(chosen.all, chosen.mesh)), Path(folder)):
            sign = "" if found.passed else "   TOO FAR"
            print(
                f"  {case}: loss {found.loss:.1e}, gradient {found.gradient:.1e} ({found.where}), {seconds:.0f} s{sign}",
                flush=True,
            )
            key = f"{case.workers} | {_plain(case.mesh)}"
            before, count = worst.get(key, (found, 0))
            worst[key] = (
                Difference(max(before.loss, found.loss), max(before.gradient, found.gradient), found.where),
                count + 1,
            )
    print("\n| workers | mesh | cases | loss, at most | gradient, at most |\n| --- | --- | --- | --- | --- |")
    for key, (found, count) in worst.items():
        print(f"| {key} | {count} | {found.loss:.1e} | {found.gradient:.1e} |")
    return int(not all(found.passed for found, _ in worst.values()))


def _plain(mesh: str) -> str:
    return ", ".join(
        each.replace("=", " ") for each in mesh.split() if not each.startswith(("schedule", "context_exchange"))
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
