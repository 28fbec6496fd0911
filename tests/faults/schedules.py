"""Schedules of disturbances: a run that is killed, stopped, resumed and resized until it is through. Seeded, real processes.

Workers are forked from a server that has PyTorch loaded, so an attempt starts in a tenth of a second instead of four.

    job = exact_job(text, storage, "run")
    outcome = run_schedule(job, draw_schedule(seed=3, steps=60), storage)
    outcome.summary["parameters_sha256"] == run_schedule(exact_job(text, storage, "calm"), [], storage).summary[...]
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from raystride.pipelines.config import (
    CheckpointConfig,
    Config,
    ModelConfig,
    OptimizerConfig,
    ScalingConfig,
    TrainConfig,
    ValidationConfig,
)
from raystride.pipelines.train.worker.job import Job, WorkerInfo
from tests.fork_server import CONTEXT
from tests.processes import make_job
from tests.receipts import accept
from tests.tiny import tiny

LIMIT_S = 270.0
Kind = Literal["kill one", "kill all", "stop", "nothing"]


@dataclass(frozen=True)
class Attempt:
    """One start of the run: on how many workers, and what ends it after how many of its own steps."""

    world: int
    kind: Kind = "nothing"
    after: int = 0
    victim: int = 0
    delay_s: float = 0.0
    """Moves the blow into some part of a step."""
    scaling: ScalingConfig | None = None
    """How the model is spread over the workers; None: as the job says."""
    job: Job | None = None
    """The run with other settings, and other data; None: as it was begun."""


@dataclass(frozen=True)
class Outcome:
    """How a schedule ended."""

    summary: dict[str, Any]
    """Rank 0's, of the last attempt."""
    resumed: int
    """Attempts that began at a checkpoint."""


def draw_schedule(seed: int, steps: int, most: int = 3) -> list[Attempt]:
    """One to `most` attempts that are disturbed, each on 1 to 4 workers, and a last one that comes to its end."""
    draw = random.Random(seed)
    kinds: tuple[Kind, ...] = ("kill one", "kill all", "stop")
    attempts = []
    for _ in range(draw.randint(1, most)):
        world = draw.randint(1, 4)
        after, victim, delay = draw.randint(1, steps // 2), draw.randrange(world), draw.uniform(0, 0.02)
        attempts.append(Attempt(world, draw.choice(kinds), after, victim, delay))
    return [*attempts, Attempt(draw.randint(1, 4))]


def exact_config(text: Path, **changes: Any) -> Config:
    """Tiny settings with all that could change bits: dropout, clipping, empty slots at the end, several epochs."""
    base = tiny(
        text,
        model=ModelConfig(layers=2, heads=2, hidden_size=16, context=16, dropout=0.2),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
        train=TrainConfig(steps=0, epochs=2.3, slots=7, slot_size=2, log_every=4, exact=True, clip_norm=0.5),
        validation=ValidationConfig(every=10, samples=15),
        checkpoint=CheckpointConfig(every=4, keep=2),
    )
    return replace(base, **changes)


def exact_job(text: Path, storage: Path, run: str, **changes: Any) -> Job:
    """The job of such a configuration."""
    return make_job(exact_config(text, **changes), storage, run)


def run_schedule(job: Job, schedule: Sequence[Attempt], scratch: Path) -> Outcome:
    """Runs the attempts one after the other until one comes to its end; without any, one worker that is undisturbed."""
    resumed = 0
    for number, attempt in enumerate([*schedule, Attempt(1)]):
        now = attempt.job or job
        config = replace(now.config, scaling=attempt.scaling or now.config.scaling)
        summary = _attempt(replace(now, attempt=f"a{number}", term=number + 1, config=config), attempt, scratch)
        if summary:
            resumed += bool(summary["resumed_from"])
            if summary["complete"]:
                return Outcome(summary, resumed)
    raise AssertionError("no attempt came to its end")


def _attempt(job: Job, attempt: Attempt, scratch: Path) -> dict[str, Any] | None:
    """Rank 0's summary; None where the attempt was killed."""
    place = scratch / f"{job.run}-{job.attempt}"
    (place / "meeting").mkdir(parents=True)
    steps, stop = CONTEXT.RawValue("i", 0), CONTEXT.RawValue("i", 0)
    arguments = [(job, rank, attempt.world, steps, stop, place) for rank in range(attempt.world)]
    workers = [CONTEXT.Process(target=_worker, args=each) for each in arguments]
    for worker in workers:
        worker.start()
    if attempt.kind != "nothing":
        while steps.value < attempt.after and all(worker.is_alive() for worker in workers):
            time.sleep(0.001)
        time.sleep(attempt.delay_s)
        if attempt.kind == "stop":
            stop.value = 1
        for rank in {"kill one": [attempt.victim], "kill all": range(attempt.world)}.get(attempt.kind, ()):
            if workers[rank].is_alive():
                os.kill(workers[rank].pid or 0, signal.SIGKILL)
    for rank, worker in enumerate(workers):
        worker.join(LIMIT_S)
        assert not worker.is_alive(), f"rank {rank} of {attempt} hangs"
    failed = [path.read_text() for path in sorted(place.glob("error-*"))]
    killed = any(worker.exitcode == -signal.SIGKILL for worker in workers)
    assert killed or not failed, f"{attempt}: {failed[0][-3000:]}"
    summary = place / "summary.json"
    return dict(json.loads(summary.read_text())) if summary.exists() and not killed else None


def _worker(job: Job, rank: int, world: int, steps: Any, stop: Any, place: Path) -> None:
    """A worker process; counts its steps where the loop asks whether to stop."""
    from raystride.pipelines.train.distributed.process_group import set_rendezvous_file
    from raystride.pipelines.train.worker.run import run_worker

    set_rendezvous_file(str(place / "meeting" / "store"))

    def stopping() -> bool:
        if rank == 0:
            steps.value += 1
        return bool(stop.value)

    try:
        place_of = WorkerInfo(rank=rank, world=world, local_rank=rank)
        summary = run_worker(job, place_of, accept, stopping)
    except BaseException:
        (place / f"error-{rank}").write_text(traceback.format_exc())
        sys.exit(1)
    if rank == 0:
        (place / "summary.json").write_text(json.dumps(summary))
