"""One training step of ours beside one of plain PyTorch: the same network, batch and update, in one process.

Blocks of steps take turns. Forward, backward and update (clipping and AdamW, for ours also the check of the step) are timed
apart, without the data; then PyTorch's profiler counts the operations of each. Ours multiplies by PyTorch's own products in
fp32, as the plain network does, and also by what a first start of `train.precision auto` finds fastest; the plain network
also in bf16 by autocast. Freed memory is kept for all.

    python -m benchmarks.step                                  # three settings, five minutes on two cores
    python -m benchmarks.step --settings nanogpt --rounds 20
    python -m benchmarks.step --norms --settings 10m           # what norms by part cost in a step that is logged
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmarks import runs
from benchmarks.pairs import Comparison, command_line, machine, machine_line, report, take_turns
from benchmarks.peers.plain_loop import GPT, make_optimizer
from benchmarks.peers.protocol import NETWORKS
from benchmarks.workers import make_job, settings
from raystride.pipelines.data.feed.loader import Step
from raystride.pipelines.observability import phases
from raystride.pipelines.system.heap import keep_freed_memory
from raystride.pipelines.train.loop import Training
from raystride.pipelines.train.part_norms import PartNorms
from raystride.pipelines.train.step import train_step
from raystride.pipelines.train.worker.build import build_training
from raystride.pipelines.train.worker.job import WorkerInfo

PARTS = ("forward", "backward", "update")
PEER, PEER_BF16 = "plain PyTorch", "plain PyTorch, bf16 by autocast"
LEFT_OUT = 2
"""First steps of a block that are not counted."""
MIN_STEPS, BLOCK_S = 4, 2.0
"""A block ends after its steps, or after so many seconds if it has the fewest."""
RATE = 1e-4


@dataclass(frozen=True)
class Setting:
    """The shape of a network and its batch."""

    layers: int
    heads: int
    width: int
    context: int
    batch: int
    vocabulary: int
    """Size of the learned vocabulary; 0: the text's characters."""

    def flags(self, text: Path) -> list[str]:
        """The flags of a training like this on a text."""
        words = [f"--tokenizer.vocabulary_size={self.vocabulary}", "--tokenizer.kind=bpe"] if self.vocabulary else []
        return [
            *runs.small_setting(text),
            *words,
            f"--model.layers={self.layers}",
            f"--model.heads={self.heads}",
            f"--model.hidden_size={self.width}",
            f"--model.context={self.context}",
            "--train.slots=1",
            f"--train.slot_size={self.batch}",
            "--train.steps=1000000",
        ]


SETTINGS = {
    "nanogpt": Setting(*NETWORKS["small"], vocabulary=0),
    "lm_python": Setting(layers=4, heads=4, width=128, context=128, batch=16, vocabulary=2048),
    "10m": Setting(*NETWORKS["10m"], vocabulary=2048),
}
"""nanoGPT's small one for CPUs, the embedded default, and one of 10.6 M parameters."""
WAYS = {
    "ours, PyTorch's products": ("--train.precision=fp32", "--model.linear=torch"),
    "ours, fp32": ("--train.precision=fp32",),
    "ours, auto": ("--train.precision=auto",),
}
AIMS = {"ours, PyTorch's products": "at most 1 / 0.98", "ours, fp32": "at most 1", "ours, auto": "at most 1 / 1.15"}

Watch = Callable[[str], AbstractContextManager[Any]]
"""A part's name -> the context in which it runs."""
Part = dict[str, float]
"""A number of each part, and `step`, their sum."""


class Plain:
    """The plain network, its optimiser and one batch."""

    def __init__(self, setting: Setting, vocabulary: int, step: Step, bf16: bool = False) -> None:
        torch.manual_seed(0)
        self._bf16 = bf16
        self.model = GPT(vocabulary, setting.layers, setting.heads, setting.width, setting.context)
        self.optimizer = make_optimizer(self.model)
        (batch,) = step.micro_batches
        self.ids, self.targets = batch.inputs[0], batch.targets

    def step(self, watch: Watch) -> None:
        """One step."""
        with watch("forward"), torch.autocast("cpu", torch.bfloat16, enabled=self._bf16):
            loss = self.model(self.ids, self.targets)
        with watch("backward"):
            loss.backward()
        with watch("update"):
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)


class Ours:
    """A training of ours, and one batch."""

    def __init__(self, training: Training, step: Step) -> None:
        self.training, self._step = training, step

    def step(self, watch: Watch) -> None:
        """One step; the sum over workers counts as update."""
        training = self.training
        phases.set_listener(lambda name: watch("update" if name == "reduce" else name) if name in _OWN else nullcontext())
        train_step(training.strategy, training.model, training.optimizer, self._step, training.rules, RATE)
        phases.set_listener(None)


_OWN = (*PARTS, "reduce")


def time_steps(one: Plain | Ours, steps: int) -> Part:
    """The median milliseconds of each part over up to `steps` steps."""
    seconds: dict[str, list[float]] = {part: [] for part in (*PARTS, "step")}

    @contextmanager
    def watch(part: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        current[part] = current.get(part, 0.0) + time.perf_counter() - began

    block_began = time.perf_counter()
    for number in range(steps + LEFT_OUT):
        if number >= LEFT_OUT + MIN_STEPS and time.perf_counter() - block_began > BLOCK_S:
            break
        current: dict[str, float] = {}
        began = time.perf_counter()
        one.step(watch)
        current["step"] = time.perf_counter() - began
        if number >= LEFT_OUT:
            for part, taken in current.items():
                seconds[part].append(taken)
    return {part: 1000 * statistics.median(taken) for part, taken in seconds.items()}


def count_operations(one: Plain | Ours) -> Part:
    """The number of PyTorch's operations in each part of a step, those inside others included."""
    counts: Part = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def watch(part: str) -> Iterator[None]:
        with profile(activities=[ProfilerActivity.CPU]) as found:
            yield
        counts[part] += sum(event.count for event in found.key_averages() if "::" in event.key)

    one.step(watch)
    return counts | {"step": sum(counts.values())}


def build_ours(setting: Setting, text: Path, storage: Path, threads: int, flags: tuple[str, ...]) -> tuple[Training, Step]:
    """A training of ours in this process, and the batch of its first step."""
    job = make_job(settings(*setting.flags(text), *flags), storage, threads)
    training = build_training(job, WorkerInfo(), [], lambda: False, lambda _: None)
    return training, next(iter(training.loader.steps(0, 1)))


def compare(name: str, given: argparse.Namespace, text: Path, scratch: Path) -> list[Comparison]:
    """The figures of one setting."""
    setting, ways = SETTINGS[name], dict[str, Plain | Ours]()
    for way, flags in WAYS.items():
        training, step = build_ours(setting, text, scratch / way.replace(" ", "-"), given.threads, flags)
        if not ways:
            for peer, bf16 in ((PEER, False), (PEER_BF16, True)):
                ways[peer] = Plain(setting, training.model.vocabulary_size, step, bf16)  # type: ignore[arg-type]
        ways[way] = Ours(training, step)
    (plain, *others) = (_parameters(one) for one in ways.values())
    assert set(others) == {plain}, f"networks of {plain} and {others} parameters"
    print(f"\n{name}: {plain:,} parameters, {setting.batch} x {setting.context} tokens a step", flush=True)
    blocks = {way: partial(time_steps, one, given.steps) for way, one in ways.items()}
    times = take_turns(blocks, given.rounds, lambda _, found: f"{found['step']:.1f} ms a step")
    counts = {way: [count_operations(one)] for way, one in ways.items()}
    return [
        *(_comparison(f"{name}: milliseconds, {part}", times, part, ".2f") for part in ("step", *PARTS)),
        *(_comparison(f"{name}: operations, {part}", counts, part, ",.0f") for part in ("step", *PARTS)),
    ]


def compare_norms(name: str, given: argparse.Namespace, text: Path, scratch: Path) -> Comparison:
    """The processor time of an update beside one whose norms are measured and read, and beside a whole step, on one thread.

    A step that is logged, a tenth of them by default, takes the difference more.
    """
    torch.set_num_threads(1)
    training, step = build_ours(SETTINGS[name], text, scratch, 1, ("--train.precision=fp32",))
    norms, skip = PartNorms(training.model, training.optimizer), torch.zeros(())
    whole = partial(train_step, training.strategy, training.model, training.optimizer, step, training.rules, RATE)

    def measure() -> None:
        norms.begin_step()
        training.optimizer.update(RATE, skip)
        norms.take_figures(1.0, training.strategy.all_reduce_sum)

    ways = {"update": partial(training.optimizer.update, RATE, skip), "update with norms": measure, "step": whole}
    whole()  # which leaves the gradients that the updates take
    times = take_turns({way: partial(_processor_ms, run) for way, run in ways.items()}, given.rounds)
    return Comparison(f"{name}: processor milliseconds of one thread", times, "update", {}, ".1f")


def _processor_ms(run: Callable[[], object]) -> float:
    began = time.thread_time()
    run()
    return 1000 * (time.thread_time() - began)


def _parameters(one: Plain | Ours) -> int:
    model = one.model if isinstance(one, Plain) else one.training.model
    return sum(parameter.numel() for parameter in model.parameters())


def _comparison(what: str, found: Mapping[str, list[Part]], part: str, form: str) -> Comparison:
    values = {way: [each[part] for each in parts] for way, parts in found.items()}
    return Comparison(what, values, PEER, AIMS if form == ".2f" and part == "step" else {}, form)


def main() -> None:
    """Parses the command line and compares."""
    parser = command_line("step", __doc__, rounds=7)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="default: all")
    parser.add_argument("--steps", type=int, default=30, help="counted steps of a block, at most (default 30)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: the cores")
    parser.add_argument("--norms", action="store_true", help="what norms by part (train.log_norms) cost")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    keep_freed_memory()  # as workers do; the plain network in this process gains by it, too
    found = machine(f"{given.threads} threads")
    print(f"{machine_line(found)}\nblocks of {given.steps} steps, {given.rounds} rounds", flush=True)
    compared: list[Comparison] = []
    with tempfile.TemporaryDirectory(prefix="step-") as scratch:
        text = runs.small_text(Path(scratch))
        for name in given.settings:
            if given.norms:
                compared.append(compare_norms(name, given, text, Path(scratch) / name))
                continue
            compared += compare(name, given, text, Path(scratch) / name)
    report(given, found, compared)


if __name__ == "__main__":
    main()
