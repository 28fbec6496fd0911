"""Chooses the number of workers on a machine without GPUs if the settings leave it open.

    allocation = choose_workers(job, resources, allocation, steps=1200, log=screen.log)    # Allocation(1, "cpu", threads=2)

Whether one worker with all threads or several with fewer are faster depends on the processor, the model and the batch. So a
run that is long enough for it to matter measures them (`worker.rehearsal`), and the choice is kept for the machine and in
the storage. More workers are taken only if they are faster by more than the spread of the steps, as they are not on a busy
machine. A resumed run keeps its numbers. With `train.exact` nothing is measured: one thread a worker, and one worker a core.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

from raystride.pipelines.config import Config, ScalingConfig, TrainConfig
from raystride.pipelines.launch.cluster.resources import Allocation, Resources
from raystride.pipelines.system.machine_table import machine_table
from raystride.pipelines.train.checkpoint.layout import beginning_manifest, newest_manifest
from raystride.pipelines.train.worker.job import Job
from raystride.pipelines.train.worker.rehearsal import Speed

MIN_FLOP = 2e12
"""A shorter training ends before the measurement pays off: about half a minute of two cores."""
MIN_SPEEDUP = 1.03
"""More workers must be faster than fewer by this factor."""


def choose_workers(
    job: Job, resources: Resources, allocation: Allocation, steps: int | None, log: Callable[[str], None]
) -> Allocation:
    """Returns the allocation with the fastest number of workers and threads; unchanged if the settings fix them.

    `steps` is the number of steps of the training, None if its settings do not say.
    """
    config = job.config
    if not _is_undecided(config, resources, allocation):
        return allocation
    if (previous := _previous_layout(job, resources, log)) is not None:
        return replace(allocation, workers=previous[0], threads=previous[1])
    layouts = list(worker_layouts(config.train, config.scaling, resources))
    if not layouts:  # more threads are requested than there are cores; Ray reports it
        return allocation
    prior = replace(allocation, workers=layouts[0][0], threads=layouts[0][1])
    if len(layouts) == 1 or _estimate_flop(config, allocation, steps) < MIN_FLOP:
        return prior
    speeds = _measure_speeds(job, layouts, log)
    if not speeds:
        return prior
    best = layouts[0] if layouts[0] in speeds else next(iter(speeds))
    for layout, speed in speeds.items():
        if speed.middle > MIN_SPEEDUP * speeds[best].middle and speed.low > speeds[best].high:
            best = layout
    log("; ".join(describe_layout_speed(layout, speed) for layout, speed in speeds.items()))
    return replace(allocation, workers=best[0], threads=best[1])


def _is_undecided(config: Config, resources: Resources, allocation: Allocation) -> bool:
    scaling = config.scaling
    is_fixed = scaling.workers != "auto" or scaling.min_workers or scaling.strategy != "auto" or scaling.group > 1
    return not (
        is_fixed or allocation.device != "cpu" or resources.nodes > 1 or config.launch.mode == "inline" or config.train.exact
    )


def _previous_layout(job: Job, resources: Resources, log: Callable[[str], None]) -> tuple[int, int] | None:
    """Returns the workers and threads of the run's newest checkpoint, or of the run that it repeats, if they fit here."""
    repeated = job.config.repeat if not (manifest := beginning_manifest(job.folder, job.config.train.branch_from)) else None
    if repeated:
        manifest = newest_manifest(job.folder.parent / repeated)
    workers, threads = manifest.get("world"), manifest.get("threads")
    if manifest.get("device") != "cpu" or not (isinstance(workers, int) and isinstance(threads, int)):
        return None
    if resources.num_fitting_workers(threads) >= workers:
        return workers, threads
    if repeated:
        log(f"repeat: run {repeated} had {workers} worker(s) of {threads} thread(s), for which there is no room here")
    return None


def worker_layouts(train: TrainConfig, scaling: ScalingConfig, resources: Resources) -> Iterator[tuple[int, int]]:
    """Yields numbers of workers to measure, with threads a worker: 1, 2, 4 and so on up to one worker a core."""
    cores = max(1, int(resources.cpus))
    workers = 1
    while workers <= min(cores, train.slots):
        threads = scaling.threads or cores // workers
        if resources.num_fitting_workers(threads) >= workers:
            yield workers, threads
        workers *= 2


def _estimate_flop(config: Config, allocation: Allocation, steps: int | None) -> float:
    """Estimates the FLOP of the training; 0 for networks with FLOP that do not follow from the parameters."""
    from raystride.pipelines.train.memory.activations import FP32
    from raystride.pipelines.train.memory.estimate import estimate
    from raystride.pipelines.train.memory.networks import expected_facts

    if config.task == "images" or not (
        need := estimate(config, expected_facts(config), workers=1, device=allocation.device)
    ):
        return 0.0
    tokens = config.train.slots * (config.train.slot_tokens or config.train.slot_size * config.model.context)
    return 6 * need.parameters / FP32 * tokens * (math.inf if steps is None else steps)


def _measure_speeds(job: Job, layouts: list[tuple[int, int]], log: Callable[[str], None]) -> dict[tuple[int, int], Speed]:
    """Returns the speed by layout, as this machine or the storage has it, or measured now."""
    from raystride.pipelines.train.worker.rehearsal import rehearse

    train, model = job.config.train, job.config.model
    circumstances = {
        "settings": job.config.default_run_of_0_3(""),  # rates do not change speeds
        "precision": train.precision,
        "linear": model.linear,
        "together": train.together,
        "compile": train.compile,
        "micro_batch_slots": train.micro_batch_slots,
        "activation_checkpointing": train.activation_checkpointing,
        "stochastic_rounding": train.stochastic_rounding,
        "dropout_masks": train.dropout_masks,
        "bucket_mib": job.config.scaling.bucket_mib,
        "places": layouts,
    }
    with machine_table("layouts", job.folder.parent, **circumstances) as table, suppress(OSError, TypeError, AttributeError):
        if "speeds" not in table:
            log(f"trying {len(layouts)} numbers of workers for a few steps (--scaling.workers names one)")
            table["speeds"] = [[*layout, speed] for layout, speed in rehearse(job, layouts).items()]
        return {(workers, threads): Speed(*speed) for workers, threads, speed in table["speeds"]}
    return {}


def describe_layout_speed(layout: tuple[int, int], speed: Speed) -> str:
    """Returns for instance `2 workers of 1 thread: 9,000 tokens/s`."""
    workers, threads = layout
    return f"{workers} worker{'s' * (workers > 1)} of {threads} thread{'s' * (threads > 1)}: {speed.middle:,.0f} tokens/s"
