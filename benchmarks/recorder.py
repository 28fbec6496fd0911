"""What recording costs a training loop: the same loop of some 25 ms a step without, and with every step recorded.

Recording is as in a real run: the observers Throughput, HostMonitor and Tracker, a sender, and the recorder with journal and
SQLite MLflow; once in a process of its own as under Ray, once in the training's own process as inline. The loops alternate
in short blocks, so that what else the machine does meets all alike, and each block is compared with its neighbours.

    python -m benchmarks.recorder --rounds 20 --steps 40
    # recorder in its own process    -0.22 % (middle half of 12 pairs: -1.62 to +2.94 %)
    #     processor, ms a logged step: 0.060 in threads of the training's process, 0.875 in the recorder's

Where other programs run beside it the ratio says little, and processor time, which they hardly change, more: that of the
other threads of the training's process, and that of the recorder's own process, by logged step.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from multiprocessing import get_context
from multiprocessing.managers import BaseManager
from typing import Any

import torch

from benchmarks.pairs import Spread, command_line, machine, machine_line, report
from raystride.pipelines.config.run import RecordConfig
from raystride.pipelines.observability.observers.host_monitor import HostMonitor
from raystride.pipelines.observability.observers.observer import Observer, RunFacts
from raystride.pipelines.observability.observers.throughput import Throughput
from raystride.pipelines.observability.observers.tracker import Tracker
from raystride.pipelines.observability.record import Recorder, Sender
from raystride.pipelines.observability.record.entry import new_entry
from raystride.pipelines.system.storage.folder import Folder

Step = Callable[[], float]
WARM_UP_TIMEOUT_S = 60.0


class RecorderProcess(BaseManager):
    """Holds a recorder in a process of its own, as the actor does under Ray."""


RecorderProcess.register("Recorder", Recorder)


def small_training(threads: int) -> Step:
    """A step of a small network on the processor, 20 to 30 ms by the machine's size; returns its loss."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(512, 512), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(384, 512)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = (model(inputs) - inputs).square().mean()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def block(step: Step, observers: Sequence[Observer], first: int, steps: int) -> float:
    """Mean seconds of a step over a block in which every step is logged to the observers."""
    began = time.perf_counter()
    for number in range(first, first + steps):
        measured = {"train_loss": step(), "learning_rate": 1e-3, "gradient_norm": 1.0, "epoch": 0.5}
        for observer in observers:
            observer.on_step(number)
        for observer in observers:
            observer.on_log(number, measured)
    return (time.perf_counter() - began) / steps


def observe(recorder: Recorder, name: str) -> list[Observer]:
    """The observers of a run, started."""
    sender = Sender(recorder.receive, name)
    observers = [Throughput(), HostMonitor(sender, 5.0), Tracker(sender)]
    for observer in observers:
        observer.on_start(RunFacts(run=name, attempt="a1", tokens_per_step=512))
    return observers


def await_mlflow(folder: Folder, observers: Sequence[Observer]) -> None:
    """Until MLflow is imported and has the first entries: a one-time cost, which is measured by itself."""
    deadline = time.monotonic() + WARM_UP_TIMEOUT_S
    observers[-1].on_log(0, {"train_loss": 0.0})
    while not folder.exists("mlflow.json") or not folder.read_json("mlflow.json")["logged"]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"MLflow logged nothing within {WARM_UP_TIMEOUT_S:.0f} s")
        time.sleep(0.05)


def compare(step: Step, recorder: Recorder, folder: Folder, given: argparse.Namespace, own_process: int | None) -> Any:
    """Prints the ratio of recorded blocks to the plain ones around them, and what recording took of the processor."""
    observers, steps = observe(recorder, "benchmark"), given.steps
    block(step, observers, 1, steps)
    await_mlflow(folder, observers)
    ratios = []
    threads, process = other_threads_seconds(), process_seconds(own_process)
    before = block(step, (), 0, steps)
    for number in range(given.rounds):
        recorded = block(step, observers, (number + 1) * steps, steps)
        after = block(step, (), 0, steps)
        ratios.append(recorded / ((before + after) / 2))
        before = after
    threads, process = other_threads_seconds() - threads, process_seconds(own_process) - process
    for observer in observers:
        observer.on_end({})
    spread = Spread.of([100 * (each - 1) for each in ratios])
    title = f"recorder in {'its own' if own_process else 'the same'} process"
    print(f"{title:<30} {spread.median:+.2f} % ({spread.meaning} pairs: {spread.low:+.2f} to {spread.high:+.2f} %)")
    by_step = 1000 / (given.rounds * steps)
    print(f"    processor, ms a logged step: {threads * by_step:.3f} in threads of the training's process", end="")
    print(f", {process * by_step:.3f} in the recorder's" if own_process else "")
    used = {"threads_ms": threads * by_step, "process_ms": process * by_step}
    return {"percent": asdict(spread), "processor_by_logged_step": used}


def other_threads_seconds() -> float:
    """Processor seconds of this process outside the main thread, in which alone a step runs with one thread."""
    return time.process_time() - time.thread_time()


def process_seconds(number: int | None) -> float:
    """Processor seconds of another process; 0 for None."""
    if number is None:
        return 0.0
    import psutil

    used = psutil.Process(number).cpu_times()
    return float(used.user + used.system)


def put_cost(recorder: Recorder) -> float:
    """Microseconds that one `put` takes its caller."""
    sender = Sender(recorder.receive, "put")
    began = time.perf_counter()
    for number in range(2000):
        sender.put(new_entry("metrics", {"train_loss": 1.0}, step=number))
    return (time.perf_counter() - began) / 2000 * 1e6


def main() -> None:
    """Runs the comparison and prints it."""
    parser = command_line("recorder", __doc__, rounds=20)
    parser.add_argument("--steps", type=int, default=40, help="steps of a block (default 40)")
    parser.add_argument("--threads", type=int, default=1, help="threads of the training loop (default 1)")
    given = parser.parse_args()
    found = machine(f"{given.threads} of them training")
    print(machine_line(found, ("torch", "mlflow")))
    step = small_training(given.threads)
    print(f"a step without recording: {block(step, (), 0, 3 * given.steps) * 1000:.1f} ms")
    with tempfile.TemporaryDirectory() as scratch:
        storage = Folder(scratch)

        def arguments(name: str) -> tuple[Any, ...]:
            return storage / name, name, "a1", RecordConfig(), storage, {}, {}, None

        manager = RecorderProcess(ctx=get_context("spawn"))
        manager.start()
        number = int(manager._process.pid)  # type: ignore[attr-defined]
        apart = manager.Recorder(*arguments("apart"))  # type: ignore[attr-defined]
        costs = {"own process": compare(step, apart, storage / "apart", given, number)}
        apart.finish("finished")
        manager.shutdown()
        inline = Recorder(*arguments("inline"))
        costs["same process"] = compare(step, inline, storage / "inline", given, None)
        microseconds = put_cost(inline)
        print(f"one put takes its caller {microseconds:.1f} microseconds")
        inline.finish("finished")
    report(given, found, [], costs=costs, put_microseconds=microseconds)


if __name__ == "__main__":
    main()
