"""How many workers a training takes on a machine without GPUs, where its settings leave that open.

    share = settle_workers(job, there, share, steps=1200, said=screen.line)   # Share(workers=1, device="cpu", threads=2)

One worker with all threads or several with fewer: which is faster depends on the processor, the model and the batch. So a
run that is long enough for it to matter tries them (`worker.rehearsal`) and the machine remembers. A run that goes on takes
what it had. With `train.exact` nothing is tried: one thread a worker, and a worker a core.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

from raystride.pipelines.cluster.resources import Resources, Share
from raystride.pipelines.config import Config
from raystride.pipelines.launch.resume import newest_manifest
from raystride.pipelines.machine_table import machine_table
from raystride.pipelines.worker.job import Job

WORTHWHILE_FLOP = 2e12
"""A shorter training is over before trying has paid: some half a minute of two cores."""
FASTER = 1.03
"""More workers must be this much faster than fewer."""


def settle_workers(job: Job, there: Resources, share: Share, steps: int | None, said: Callable[[str], None]) -> Share:
    """The share with the number of workers, and the threads of each, that are fastest here; as it is where that is given.

    `steps` is how many the training will make, None where its settings do not say.
    """
    config = job.config
    if not _is_open(config, there, share):
        return share
    if (before := _as_before(job, there)) is not None:
        return replace(share, workers=before[0], threads=before[1])
    places = list(places_on(config, there))
    if not places:  # more threads are asked for than there are cores, which Ray will say
        return share
    prior = replace(share, workers=places[0][0], threads=places[0][1])
    if len(places) == 1 or _flop(config, share, steps) < WORTHWHILE_FLOP:
        return prior
    found = _speeds(job, places, said)
    if not found:
        return prior
    best = places[0] if places[0] in found else next(iter(found))
    for place, speed in found.items():
        if speed > FASTER * found[best]:
            best = place
    said("; ".join(in_words(place, speed) for place, speed in found.items()))
    return replace(share, workers=best[0], threads=best[1])


def _is_open(config: Config, there: Resources, share: Share) -> bool:
    scaling = config.scaling
    given = scaling.workers != "auto" or scaling.least_workers or scaling.strategy != "auto" or scaling.group > 1
    return not (given or share.device != "cpu" or there.nodes > 1 or config.launch.mode == "inline" or config.train.exact)


def _as_before(job: Job, there: Resources) -> tuple[int, int] | None:
    """Workers and threads of the run's newest checkpoint, where they find places here."""
    manifest = newest_manifest(job.folder)
    workers, threads = manifest.get("world"), manifest.get("threads")
    if manifest.get("device") != "cpu" or not (isinstance(workers, int) and isinstance(threads, int)):
        return None
    return (workers, threads) if there.fit(threads) >= workers else None


def places_on(config: Config, there: Resources) -> Iterator[tuple[int, int]]:
    """Numbers of workers to try, each with the threads that it leaves them: 1, 2, 4 and so on up to a worker a core."""
    cores = max(1, int(there.cpus))
    workers = 1
    while workers <= min(cores, config.train.slots):
        threads = config.scaling.threads or cores // workers
        if there.fit(threads) >= workers:
            yield workers, threads
        workers *= 2


def _flop(config: Config, share: Share, steps: int | None) -> float:
    """About what the training will compute; 0 for networks whose work does not follow from their parameters."""
    from raystride.pipelines.memory.activations import FP32
    from raystride.pipelines.memory.estimate import estimate
    from raystride.pipelines.memory.networks import expected

    if config.task == "images" or not (need := estimate(config, expected(config), workers=1, device=share.device)):
        return 0.0
    tokens = config.train.slots * (config.train.slot_tokens or config.train.slot_size * config.model.context)
    return 6 * need.parameters / FP32 * tokens * (math.inf if steps is None else steps)


def _speeds(job: Job, places: list[tuple[int, int]], said: Callable[[str], None]) -> dict[tuple[int, int], float]:
    """Tokens a second by place, as this machine knows them or as they are tried now."""
    from raystride.pipelines.worker.rehearsal import rehearse

    train, model = job.config.train, job.config.model
    circumstances = {
        "settings": job.config.default_run(""),
        "precision": train.precision,
        "linear": model.linear,
        "together": train.together,
        "compile": train.compile,
        "places": places,
    }
    with machine_table("workers", **circumstances) as table, suppress(OSError, TypeError, AttributeError):
        if "speeds" not in table:
            said(f"trying {len(places)} numbers of workers for a few steps (--scaling.workers names one)")
            table["speeds"] = [[*place, speed] for place, speed in rehearse(job, places).items()]
        return {(workers, threads): speed for workers, threads, speed in table["speeds"]}
    return {}


def in_words(place: tuple[int, int], speed: float) -> str:
    """`2 workers of 1 thread: 9,000 tokens/s`."""
    workers, threads = place
    return f"{workers} worker{'s' * (workers > 1)} of {threads} thread{'s' * (threads > 1)}: {speed:,.0f} tokens/s"
