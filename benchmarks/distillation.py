"""Memory and time of distillation's loss beside plain PyTorch, which holds all logits of student and teacher.

Forward and backward of the loss alone, from hidden states of both models to the gradients of the student's hidden states
and head. Memory is the most that tensors hold besides those that were there before; times are medians of interleaved rounds.

    python -m benchmarks.distillation                         # 8,192 tokens, 32,000 words, width 256; some minutes on CPUs
    python -m benchmarks.distillation --tokens 2048 --words 8000 --rounds 3
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.pairs import Comparison, machine, machine_line, take_turns
from raystride.model.distillation import Distillation, freeze
from raystride.model.objectives import DIVERGENCES
from raystride.model.transformer import Decoder
from raystride.pipelines.config import ModelConfig
from raystride.pipelines.train.memory.storages import Storages

RATIO, TEMPERATURE = 0.5, 2.0
MIB = 2**20


class _Hidden(Decoder):
    """A teacher whose hidden states are given."""

    given: torch.Tensor

    def hidden(self, *_: object, **__: object) -> torch.Tensor:  # type: ignore[override]
        return self.given


def plain_loss(
    hidden: torch.Tensor, head: torch.Tensor, teacher: Decoder, targets: torch.Tensor, divergence: str
) -> torch.Tensor:
    """Returns the loss sum by `F.kl_div` and `F.cross_entropy` of all logits at once."""
    with torch.no_grad():
        log_q = (teacher.logits(teacher.hidden(targets)).flatten(0, 1) / TEMPERATURE).log_softmax(-1)
    logits = F.linear(hidden, head).flatten(0, 1)
    log_p = (logits / TEMPERATURE).log_softmax(-1)
    given, wanted = (log_p, log_q) if divergence == "forward_kl" else (log_q, log_p)
    kl = F.kl_div(given, wanted, reduction="sum", log_target=True)
    return (1 - RATIO) * F.cross_entropy(logits, targets.flatten(), reduction="sum") + RATIO * TEMPERATURE**2 * kl


def own_loss(
    hidden: torch.Tensor, head: torch.Tensor, rules: Distillation, targets: torch.Tensor, student: Decoder
) -> torch.Tensor:
    """Returns the loss sum as a training has it."""
    return rules.loss((targets, None), hidden, head, targets, student._project)[0]


def main() -> None:
    """Prints memory and time by divergence."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 8192), ("words", 32_000), ("width", 256), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.manual_seed(0)
    shape = ModelConfig(layers=1, heads=4, hidden_size=options.width, architecture="llama")
    student, teacher = Decoder(shape, options.words), _Hidden(shape, options.words)
    freeze(teacher)
    teacher.given = torch.randn(1, options.tokens, options.width)
    assert student.head is not None
    hidden, head = torch.randn(1, options.tokens, options.width, requires_grad=True), student.head.weight
    targets = torch.randint(0, options.words, (1, options.tokens))
    print(machine_line(machine()))
    for divergence in DIVERGENCES:
        rules = Distillation(teacher, divergence, RATIO, TEMPERATURE)
        ways: dict[str, Callable[[], torch.Tensor]] = {
            "plain": partial(plain_loss, hidden, head, teacher, targets, divergence),
            "ours": partial(own_loss, hidden, head, rules, targets, student),
        }
        found = {name: torch.autograd.grad(loss() / options.tokens, (hidden, head)) for name, loss in ways.items()}
        worst = max(float((one - other).abs().max()) for one, other in zip(*found.values(), strict=True))
        print(f"{divergence}: gradients of the mean differ by at most {worst:.1e}")
        memory = {name: [_peak_mib(loss, hidden, head)] for name, loss in ways.items()}
        print(Comparison(f"{divergence}, MiB", memory, peer="plain"))
        times = take_turns(
            {name: partial(_seconds, loss, hidden, head) for name, loss in ways.items()}, rounds=options.rounds
        )
        print(Comparison(f"{divergence}, seconds", times, peer="plain", form=".2f"))


def _peak_mib(loss: Callable[[], torch.Tensor], *leaves: torch.Tensor) -> float:
    with Storages(ignoring=leaves) as alive:
        torch.autograd.grad(loss(), leaves)
    return alive.most() / MIB


def _seconds(loss: Callable[[], torch.Tensor], *leaves: torch.Tensor) -> float:
    began = time.perf_counter()
    torch.autograd.grad(loss(), leaves)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
