"""How long a step takes on a mesh, how long workers of a pipeline wait, and how many bytes each sends, beside the formulas.

Bubble: of the time from the first forward to the last backward the share in which a worker of a pipeline computes no stage,
the mean over its workers. Bytes: what a worker hands to collectives and sends in a step, by the dimension along which;
all-gathers and reduce-scatters count the whole that they are of. The machine must have nothing else to do.

    python -m benchmarks.mesh_speed                           # two processes; three minutes on two cores
    python -m benchmarks.mesh_speed --workers 4
"""

import argparse
import itertools
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import runs
from benchmarks.mesh import write_documents
from benchmarks.mesh_traffic import bytes_exchanged, bytes_sent
from benchmarks.pairs import machine, machine_line
from benchmarks.workers import make_job, read_job, settings, write_job
from raystride.pipelines.config import Config
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.worker.job import Job, WorkerInfo
from raystride.triton_kernels.context_plan import context_plan

MESHES = {
    2: (
        "strategy=ddp",
        "tensor=2",
        "pipeline=2",
        "pipeline=2 schedule=interleaved",
        "pipeline=2 schedule=zbv",
        "context=2",
        "context=2 context_exchange=heads",
        "context=2 context_exchange=keys",
    ),
    4: ("strategy=ddp", "tensor=4", "pipeline=4", "pipeline=4 schedule=zbv", "context=4", "pipeline=2 tensor=2"),
}
SLOTS, LAYERS, WIDTH, CONTEXT, HEADS, WORDS, STEPS = 8, 8, 256, 256, 8, 257, 12
"""Of a network that is computed for some milliseconds a block; one sample a slot."""


def make(mesh: str, workers: int, text: Path, storage: Path) -> Job:
    """The job of a mesh."""
    shape = f"--model.layers={LAYERS} --model.heads={HEADS} --model.hidden_size={WIDTH} --model.context={CONTEXT}"
    steps = f"--train.slots={SLOTS} --train.slot_size=1 --train.micro_batch_slots=1 --train.steps={STEPS} --sample.tokens=0"
    rest = "--model.architecture=llama --model.tie_embeddings=false --model.linear=torch --model.dropout=0"
    quiet = "--tokenizer.kind=bytes --data.kind=json --data.column=text --validation.every=0 --checkpoint.every=0"
    flags = [*shape.split(), *steps.split(), *rest.split(), *quiet.split(), *(f"--scaling.{each}" for each in mesh.split())]
    return make_job(settings(f"--data.source={text}", f"--scaling.workers={workers}", *flags), storage, threads=1)


class Counted:
    """Counts bytes handed to torch.distributed, by the size and kind of the call, while it is entered."""

    def __init__(self, groups: dict[str, Any]) -> None:
        self.bytes: Counter[str] = Counter()
        self._groups = groups
        self._before: dict[str, Callable[..., Any]] = {}

    def _along(self, group: Any) -> str:
        return next((name for name, each in self._groups.items() if each is group), "all")

    def __enter__(self) -> "Counted":
        for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single"):
            self._before[name] = getattr(dist, name)
            setattr(dist, name, self._counting(name, self._before[name]))
        self._made = dist.P2POp.__init__
        counted, made = self, self._made

        def make(operation: dist.P2POp, op: Any, tensor: torch.Tensor, *arguments: Any, **named: Any) -> None:
            made(operation, op, tensor, *arguments, **named)
            if op is dist.isend:
                counted.bytes[counted._along(operation.group)] += tensor.numel() * tensor.element_size()

        dist.P2POp.__init__ = make  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        dist.P2POp.__init__ = self._made  # type: ignore[method-assign]
        for name, function in self._before.items():
            setattr(dist, name, function)

    def _counting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            group = named.get("group")
            # The output of a gather and the input of a scatter are the whole; of an all-to-all, the own part stays here.
            whole = arguments[1 if name in ("reduce_scatter_tensor", "all_to_all_single") else 0]
            size = whole.numel() * whole.element_size()
            if name == "all_to_all_single":
                leaving = arguments[3] if len(arguments) > 3 else [1] * dist.get_world_size(group)
                size = round(size * (1 - leaving[dist.get_rank(group)] / max(1, sum(leaving))))
            self.bytes[self._along(group)] += size
            return function(*arguments, **named)

        return call


def measure(job: Job, place: WorkerInfo) -> dict[str, Any]:
    """Seconds of a step, the share of the pipeline's in which this worker computed a stage, and bytes by dimension."""
    from raystride.pipelines.train.step import train_step
    from raystride.pipelines.train.strategies.mesh.pipeline import DecoderStage
    from raystride.pipelines.train.worker.build import build_training

    training = build_training(job, place, [], lambda: False, lambda _: None)
    strategy: Any = training.strategy
    busy = [0.0, 0.0]
    if pipeline := getattr(strategy, "_pipeline", None):
        _time_stages(pipeline, busy)
        assert all(isinstance(stage, DecoderStage) for stage in pipeline.stages.values())
    devices = getattr(strategy, "_device_mesh", None)
    groups = {name: devices.get_group(name) for name in ("tensor", "context", "pipeline")} if devices else {}
    seconds, shares, counted = [], [], Counted(groups)
    for number, step in enumerate(training.loader.steps(0, STEPS)):
        busy[:], began = [0.0, 0.0], time.perf_counter()
        if number == STEPS - 1:
            with counted:
                train_step(strategy, training.model, training.optimizer, step, training.rules, 1e-3)
            break
        train_step(strategy, training.model, training.optimizer, step, training.rules, 1e-3)
        seconds.append(time.perf_counter() - began)
        shares.append(busy[0] / (busy[1] or seconds[-1]))
    return {"seconds": statistics.median(seconds[2:]), "busy": statistics.median(shares[2:]), "bytes": dict(counted.bytes)}


def _time_stages(pipeline: Any, busy: list[float]) -> None:
    """Has what stages compute counted, and how long the pipeline runs."""
    from raystride.pipelines.train.strategies.mesh import pipeline as module

    def timed(function: Callable[..., Any], place: int) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            result = function(*arguments, **named)
            busy[place] += time.perf_counter() - began
            return result

        return run

    for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
        setattr(module._Stage, name, timed(getattr(module._Stage, name), 0))
    pipeline.run_micro_batches = timed(pipeline.run_micro_batches, 1)


def bubble(config: Config) -> float | None:
    """The share of a step that a worker of the pipeline waits, by the schedule's formula; see `scaling_model.mesh`."""
    from raystride.pipelines.sweep.scaling_model.mesh import WorkMesh

    scaling = config.scaling
    if scaling.pipeline == 1:
        return None
    mesh = WorkMesh(
        pipeline=scaling.pipeline, schedule=scaling.schedule, stages_per_worker=scaling.stages // scaling.pipeline
    )
    wait = mesh.bubble(SLOTS, recompute=False)
    return wait / (1 + wait)


def expected_bytes(config: Config) -> dict[str, float]:
    """Bytes that the worker of rank 0 sends in a step, by dimension, from the shapes alone."""
    scaling, found = config.scaling, {}
    tokens, blocks = CONTEXT // scaling.context, LAYERS / scaling.pipeline * SLOTS
    stream = 4 * tokens * WIDTH
    if scaling.tensor > 1:
        # Two gathers and two scatters a block, forward and backward; the embedding's sum, and the gather behind the split in
        # its backward; and, where the last stage is here, the gather before the head with its backward, and the loss.
        ends = 2 + (2 if scaling.pipeline == 1 else 0)
        found["tensor"] = blocks * 8 * stream + SLOTS * ends * stream
        found["tensor"] += SLOTS * bytes_exchanged(tokens) if scaling.pipeline == 1 else 0
    if scaling.context > 1:
        plan = context_plan((0, CONTEXT), scaling.context)
        shape: dict[str, Any] = {"heads": HEADS // scaling.tensor, "kv_heads": HEADS // scaling.tensor}
        shape |= {"head_size": WIDTH // HEADS, "itemsize": 4}
        each = sum(bytes_sent(plan, scaling.context_exchange, **shape, backward=backward)[0] for backward in (False, True))
        found["context"] = blocks * each
    if scaling.pipeline > 1:
        # Rank 0 has the first stage, which sends forward alone; of two stages, what the second has on either side.
        borders = {"1f1b": 1, "interleaved": 3, "zbv": 2}[scaling.schedule]
        found["pipeline"] = SLOTS * borders * stream / scaling.tensor
    return found


def run(mesh: str, workers: int, folder: Path) -> str:
    """A line of the table for one mesh."""
    job = make(mesh, workers, write_documents(folder), folder)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    file = str(write_job(replace(job, folder=Folder.from_uri(f"{folder}/job"))))
    with ThreadPoolExecutor(workers) as pool:
        ranks = [
            pool.submit(runs.run, "-m", "benchmarks.mesh_speed", "--rank", str(rank), str(workers), port, file)
            for rank in range(workers)
        ]
        answers = [rank.result().answer for rank in ranks]
    seconds = max(answer["seconds"] for answer in answers)
    told = bubble(job.config)
    waits = "" if told is None else f"{1 - statistics.mean(answer['busy'] for answer in answers):.3f} ({told:.3f})"
    parts = []
    for name, wanted in expected_bytes(job.config).items():
        counted = answers[0]["bytes"].get(name, 0)
        parts.append(f"{name} {counted / 2**20:.3f} ({counted / wanted - 1:+.1%})")
    return f"| {workers} | {mesh.replace('=', ' ')} | {1000 * seconds:.0f} | {waits} | {', '.join(parts)} |"


def main(arguments: list[str]) -> int:
    """Prints the table."""
    if arguments[:1] == ["--rank"]:
        rank, world, port, file = arguments[1:]
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        torch.set_num_threads(1)
        print(json.dumps(measure(read_job(file), WorkerInfo(rank=int(rank), world=int(world), local_rank=int(rank)))))
        return 0
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mesh_speed", description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2, choices=list(MESHES))
    workers = parser.parse_args(arguments).workers
    print(machine_line(machine()))
    print("| workers | mesh | ms a step | bubble (formula) | MiB a step of worker 0 (beside the formula) |")
    print("| --- | --- | --- | --- | --- |")
    for mesh in itertools.chain(MESHES[workers]):
        with tempfile.TemporaryDirectory() as folder:
            print(run(mesh, workers, Path(folder)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
