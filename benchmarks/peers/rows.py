"""The figures of one way, by row of the table: trainings started, watched and killed from outside.

figures = ROWS["start"](WAYS["lightning"], bench, Sizes())         # {"start": 4.1}; raises Failed
"""

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from benchmarks.finetuning import adapter_training
from benchmarks.peers.plain_loop import LEFT_OUT
from benchmarks.peers.processes import Memory, kill, last_words, started, wait
from benchmarks.peers.protocol import NETWORKS, Job
from benchmarks.peers.ways import Bench, Way
from benchmarks.runs import Failed

Figures = dict[str, float | str]
"""By the table's column."""
LOSS = 1.95
"""Nats to reach on the validation tail."""
MIB = 2**20
_numbers = count()


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How long trainings are."""

    steps: int = 300
    """For tokens a second."""
    large: int = 40
    """The same of the larger network."""
    finetuning: int = 6
    """The same of a pretrained model with an adapter."""
    reach: int = 2000
    """For the loss; validated eight times."""
    resume: int = 300
    """For the kill; saved three times."""
    kill: int = 150
    """Steps before the kill. Ray Train knows a checkpoint some seconds after its report, and a kill before loses it."""
    memory: int = 60
    megabytes: int = 20
    """Text that is prepared, in MB."""


@dataclass(frozen=True)
class Trained:
    """What a training said, and when it was started (seconds since 1970)."""

    events: list[dict[str, Any]]
    started_at: float

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Events of a kind."""
        return [event for event in self.events if event["event"] == kind]

    def first_step_s(self) -> float:
        """Seconds from the start of the process to the end of its first step."""
        first = self.of("step")[0]
        return float(first.get("since_start") or first["time"] - self.started_at)

    def tokens_per_second(self, network: str = "small") -> float:
        """Over all steps but the first. Raises Failed where there are too few."""
        tokens = NETWORKS[network].batch * NETWORKS[network].block
        steps = [step for step in self.of("step") if step["step"] >= LEFT_OUT]
        if len(steps) < 2:
            raise Failed(f"no rate from so few steps: it takes more than {LEFT_OUT}")
        (first, *_, last) = steps
        return float((last["step"] - first["step"]) * tokens / (last["time"] - first["time"]))

    def reached_s(self, loss: float) -> float | str:
        """Seconds from the start of the process to the first validation at a loss, or what was reached instead."""
        found = self.of("validation")
        for event in found:
            if event["loss"] <= loss:
                return float(event["time"] - self.started_at)
        return f"never: {min(event['loss'] for event in found):.2f}" if found else "never validated"

    def last_loss(self) -> float:
        """The loss at the end, on the whole validation tail."""
        return float([event["loss"] for event in self.of("validation") if "sampled" not in event][-1])

    def parameters(self) -> str | None:
        """SHA-256 of the parameters at the end."""
        return self.of("done")[-1]["parameters_sha256"]  # type: ignore[no-any-return]


def new_job(bench: Bench, **settings: Any) -> Job:
    """A job with a folder of its own."""
    folder = bench.work / "jobs" / f"run-{next(_numbers)}"
    folder.mkdir(parents=True)
    threads = 2 // settings.get("workers", 1)
    return Job(text=bench.text, progress=folder / "progress.jsonl", folder=folder, threads=threads, **settings)


@contextmanager
def running(way: Way, bench: Bench, job: Job) -> Iterator[tuple[subprocess.Popen[str], float]]:
    """A training under way, and when it was started."""
    command, log = way.training(bench, job), job.folder / "log.txt"
    started_at = time.time()
    with started(command, way.variables(job), log) as process:
        yield process, started_at


def train(way: Way, bench: Bench, job: Job) -> Trained:
    """A whole training. Raises Failed where it does not end well."""
    with running(way, bench, job) as (process, started_at):
        return finish(way, bench, job, process, started_at)


def finish(way: Way, bench: Bench, job: Job, process: subprocess.Popen[str], started_at: float) -> Trained:
    """What a training said since it was started, once it is over. Raises Failed where it does not end well."""
    log = job.folder / "log.txt"
    wait(process, lambda: process.poll() is not None, log)
    found = [event for event in way.events(bench, job) if event["time"] >= started_at]
    if process.returncode or not any(event["event"] == "done" for event in found):
        raise Failed(f"ended with {process.returncode}: {last_words(log)}")
    return Trained(found, started_at)


def start(way: Way, bench: Bench, sizes: Sizes) -> Figures:
    """Seconds from the start of the process to the end of the first step, one worker."""
    return {"start": train(way, bench, new_job(bench, steps=10)).first_step_s()}


def speed(way: Way, bench: Bench, sizes: Sizes) -> Figures:
    """Tokens a second on one worker of two threads and on two of one."""
    figures: Figures = {"speed 1": train(way, bench, new_job(bench, steps=sizes.steps)).tokens_per_second()}
    if way.only_one:
        return figures | {"speed 2": way.only_one}
    return figures | {"speed 2": train(way, bench, new_job(bench, steps=sizes.steps, workers=2)).tokens_per_second()}


def large(way: Way, bench: Bench, sizes: Sizes) -> Figures:
    """Tokens a second of ten million parameters, one worker of two threads."""
    done = train(way, bench, new_job(bench, steps=sizes.large, network="10m"))
    return {"speed 10m": done.tokens_per_second("10m")}


def finetuning(way: Way, bench: Bench, sizes: Sizes) -> Figures:
    """Tokens a second, without padding, and memory of a process that fine-tunes a real model with an adapter."""
    if not way.finetunes:
        return {"tuning": "-", "tuning memory": "-"}
    found = adapter_training(way.finetunes, bench.base(), sizes.finetuning)
    return {"tuning": found["tokens_per_s"], "tuning memory": found["peak_mib"]}


def reach(way: Way, bench: Bench, sizes: Sizes) -> Figures:
    """Seconds from the start of the process to the loss, and the loss at the end."""
    done = train(way, bench, new_job(bench, steps=sizes.reach, validate_every=sizes.reach // 8))
    return {"reach": done.reached_s(LOSS), "loss": done.last_loss()}


def resume(way: Way, bench: Bench, sizes: Sizes) -> Figures:
    """Seconds from the restart to the first step after SIGKILL, and whether the end is the same as without, one worker."""
    plan = {"steps": sizes.resume, "checkpoint_every": sizes.resume // 3}
    whole = train(way, bench, new_job(bench, **plan))
    job = new_job(bench, **plan)

    def half() -> bool:
        return any(event["event"] == "step" and event["step"] >= sizes.kill for event in way.events(bench, job))

    with running(way, bench, job) as (process, _):
        wait(process, half, job.folder / "log.txt")
        if process.poll() is None:
            kill(process)
    again = replace(job, resume=True)
    resumed = train(way, bench, again)
    if resumed.of("step")[0]["step"] <= plan["checkpoint_every"] // 2:
        return {"resume": "began anew", "bits": "-"}
    same = "same" if resumed.parameters() and resumed.parameters() == whole.parameters() else "others"
    return {"resume": resumed.first_step_s(), "bits": same}


def memory(way: Way, bench: Bench, sizes: Sizes) -> Figures:
    """The most that all processes of a training on one worker held, in MiB."""
    job = new_job(bench, steps=sizes.memory)
    with running(way, bench, job) as (process, started_at), Memory(process.pid) as held:
        finish(way, bench, job, process, started_at)
    return {"memory": held.peak / MIB}


def preparation(way: Way, bench: Bench, sizes: Sizes) -> Figures:
    """MB of text a second, of a process that is timed whole."""
    text = bench.work / f"text-{sizes.megabytes}.txt"
    if not text.exists():
        once = bench.text.read_text()
        text.write_text(once * (sizes.megabytes * 1_000_000 // len(once) + 1))
    out = bench.work / "prepared" / str(next(_numbers))
    out.mkdir(parents=True)
    command = way.preparation(bench, text, out)
    if command is None:
        return {"preparation": "-"}
    before = time.monotonic()
    with started(command, way.variables(new_job(bench)), out / "log.txt") as process:
        wait(process, lambda: process.poll() is not None, out / "log.txt")
        seconds = time.monotonic() - before
        if process.returncode:
            raise Failed(f"ended with {process.returncode}: {last_words(out / 'log.txt')}")
    shutil.rmtree(out)
    return {"preparation": text.stat().st_size / 1e6 / seconds}


def lines(way: Way, bench: Bench, sizes: Sizes) -> Figures:
    """Lines of code of one's own."""
    return {"lines": way.lines(bench)}


def prediction(way: Way, bench: Bench, sizes: Sizes) -> Figures:
    """Where batch prediction is measured."""
    return {"prediction": way.prediction}


ROWS: dict[str, Callable[[Way, Bench, Sizes], Figures]] = {
    "lines": lines,
    "start": start,
    "speed": speed,
    "large": large,
    "finetuning": finetuning,
    "reach": reach,
    "resume": resume,
    "preparation": preparation,
    "memory": memory,
    "prediction": prediction,
}
"""What `--rows` takes, in the order of the table."""
