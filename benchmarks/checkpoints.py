"""How long a checkpoint holds up the training loop, beside a blocking `torch.save` of the same state to the same folder.

Parameters and AdamW's moments of a small model and of one of 60 M parameters are saved while steps go on. The loop stands
still for the time of the call. While ours is then written in a thread, steps take longer where all cores are the loop's; a
second figure counts that in: what the steps until the end of the writing took longer than as many calm ones. `torch.save`
leaves to the kernel what is not on the disk yet, while ours asks for it before it says that a checkpoint is there.

    python -m benchmarks.checkpoints --rounds 5               # seconds and their ratio, 2 minutes on two cores
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks.pairs import Comparison, command_line, machine, machine_line, report, take_turns
from raystride.model.transformer import Decoder
from raystride.pipelines.config import ModelConfig, OptimizerConfig
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.checkpoint.manager import Checkpoints, named_tensors
from raystride.pipelines.train.checkpoint.train_state import TrainState, Updater
from raystride.pipelines.train.optimizer import build_optimizer

MODELS = {
    "small": (ModelConfig(hidden_size=128, layers=4, heads=4, context=64), 256, 8),
    "60 M parameters": (ModelConfig(hidden_size=640, layers=10, heads=10, context=16), 16_384, 1),
}
"""Shape, vocabulary and samples of a step."""
CALM = 5
"""Steps between two saves by which a calm step is known."""
MIN_WATCHED_STEPS = 2
"""Steps that are watched after a save."""


class Loop:
    """A training that can be held up."""

    def __init__(self, shape: ModelConfig, words: int, samples: int) -> None:
        torch.manual_seed(0)
        self.model = Decoder(shape, words)
        self.optimizer: Updater = build_optimizer(OptimizerConfig(), self.model)
        self._ids = torch.randint(0, words, (samples, shape.context))
        self.steps = 0
        self.seconds()

    def seconds(self) -> float:
        """How long a step takes."""
        began = time.perf_counter()
        loss_sum, _ = self.model(self._ids, self._ids)
        (loss_sum / self._ids.numel()).backward()
        self.optimizer.update(1e-3)
        for parameter in self.model.parameters():
            parameter.grad = None
        self.steps += 1
        return time.perf_counter() - began


class Held:
    """What one save cost the loop, in seconds."""

    def __init__(self, call: float, after: float, steps: int) -> None:
        self.call, self.after, self.steps = call, after, steps

    @property
    def total(self) -> float:
        """The call, and what the steps after it took longer."""
        return max(self.call, self.call + self.after)


def hold_up(loop: Loop, save: Callable[[], None], under_way: Callable[[], bool]) -> Held:
    """Steps, saves, and steps on until nothing is under way any more."""
    calm = statistics.median(loop.seconds() for _ in range(CALM))
    began = time.perf_counter()
    save()
    call = time.perf_counter() - began
    after: list[float] = []
    while under_way() or len(after) < MIN_WATCHED_STEPS:
        after.append(loop.seconds())
    return Held(call, sum(after) - calm * len(after), len(after))


def compare(name: str, given: argparse.Namespace, folder: Path) -> list[Comparison]:
    """Both ways of saving one model, in turns."""
    folder.mkdir()
    loop = Loop(*MODELS[name])
    checkpoints = Checkpoints(Folder.from_uri(str(folder / "ours")), "a1", keep=1)
    header = {"run": "benchmark"}

    def ours() -> None:
        state = TrainState(step=loop.steps, position=loop.steps)
        checkpoints.save(loop.model, loop.optimizer, state, header, best=False)

    def theirs() -> None:
        torch.save(named_tensors(loop.model, loop.optimizer), folder / "state.pt")

    first = hold_up(loop, ours, checkpoints.is_saving)
    size = sum(tensor.nbytes for tensor in named_tensors(loop.model, loop.optimizer).values())
    print(f"\n{name}: {size / 1e6:,.1f} MB; the first save, into fresh memory, held the loop up for {first.total:.3f} s")
    ways = {
        "torch.save": partial(hold_up, loop, theirs, lambda: False),
        "ours": partial(hold_up, loop, ours, checkpoints.is_saving),
    }
    held = take_turns(
        ways, given.rounds, lambda _, got: f"call {got.call:.4f} s, {got.steps} steps after it {got.after:+.3f} s"
    )
    checkpoints.wait_for_save()
    totals = {way: [each.total for each in values] for way, values in held.items()}
    calls = {way: [each.call for each in values] for way, values in held.items()}
    return [
        Comparison(f"{name}: seconds for which the loop stands still", calls, "torch.save", {"ours": "at most 0.1"}, ".4f"),
        Comparison(f"{name}: the same, and what steps took longer while it was written", totals, "torch.save", form=".4f"),
    ]


def main() -> None:
    """Parses the command line and runs what it asks for."""
    parser = command_line("checkpoints", __doc__, rounds=5)
    parser.add_argument("--folder", type=Path, help="save below it (default: the temporary folder)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of the loop (default: all)")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    found = machine(f"{given.threads} threads")
    print(machine_line(found))
    with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=given.folder) as scratch:
        comparisons = [each for name in MODELS for each in compare(name, given, Path(scratch) / name.split()[0])]
    report(given, found, comparisons)


if __name__ == "__main__":
    main()
