"""A mixture of experts of ours beside a plain PyTorch loop over experts, and beside a dense network of its active size.

The same decoder three times: with our block, with a block that computes expert by expert on the same weights (as in
transformers' eager form), and with a feed-forward as wide as the experts that a token uses. A step is forward, backward with
the balance loss (not in the plain loop) and AdamW. Blocks of steps take turns.

    python -m benchmarks.experts                               # two settings, two minutes on two cores
    python -m benchmarks.experts --settings small --rounds 9
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.pairs import Comparison, command_line, machine, machine_line, report, take_turns
from raystride.model.experts import Experts
from raystride.model.transformer import Decoder
from raystride.pipelines.config import ModelConfig
from raystride.pipelines.system.heap import keep_freed_memory

VOCABULARY, SAMPLES, STEPS = 128, 16, 6
SMALL = ModelConfig(
    architecture="llama",
    layers=3,
    heads=4,
    hidden_size=96,
    context=128,
    experts=8,
    experts_per_token=2,
    expert_ffn_size=128,
    tie_embeddings=True,
    router_z_loss=0.001,
)
SETTINGS = {"small": SMALL, "many": replace(SMALL, hidden_size=128, experts=64, experts_per_token=4, expert_ffn_size=64)}
"""The preset `lm_experts`, and 64 experts of which a token uses 4."""
LOOP, OURS, DENSE = "a plain loop over experts", "ours", "ours, dense"


class PlainExperts(nn.Module):
    """The block's function in plain PyTorch, expert by expert."""

    def __init__(self, block: Experts) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, C) -> (B, T, C)."""
        block, tokens = self.block, x.reshape(-1, x.shape[-1])
        probabilities = F.linear(tokens, block.router.weight).softmax(-1)
        weights, chosen = probabilities.topk(block.router.num_chosen, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        y = torch.zeros_like(tokens)
        for expert in range(block.num_experts):
            token, place = (chosen == expert).nonzero(as_tuple=True)
            rows = tokens[token]
            hidden = F.silu(F.linear(rows, block.gate.weight[expert])) * F.linear(rows, block.up.weight[expert])
            y = y.index_add(0, token, F.linear(hidden, block.down.weight[expert]) * weights[token, place, None])
        return y.view(x.shape)


def build_networks(shape: ModelConfig) -> dict[str, Decoder]:
    """The three networks, by way."""
    torch.manual_seed(0)
    ours, looped = Decoder(shape, VOCABULARY), Decoder(shape, VOCABULARY)
    looped.load_state_dict(ours.state_dict())
    for block in looped.blocks:
        block.feed_forward = PlainExperts(block.feed_forward)  # type: ignore[arg-type]
    active = shape.experts_per_token * shape.expert_ffn_size
    dense = replace(shape, experts=0, expert_ffn_size=0, ffn_size=active)
    return {LOOP: looped, OURS: ours, DENSE: Decoder(dense, VOCABULARY)}


def make_step(model: Decoder) -> Callable[[], float]:
    """Returns a function that runs a step and returns its loss."""
    ids = torch.randint(0, VOCABULARY, (SAMPLES, model.shape.context), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> float:
        loss_sum, counted = model(ids, ids.roll(-1, 1))
        (loss_sum / counted).backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss_sum.detach() / counted)

    return step


def tokens_per_second(step: Callable[[], float], tokens: int) -> float:
    """The rate of a block of steps, by the median step."""
    step()
    seconds = []
    for _ in range(STEPS):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return tokens / statistics.median(seconds)


def main() -> None:
    """Parses the command line and compares."""
    parser = command_line("experts", __doc__, rounds=9)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="default: all")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: the cores")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    keep_freed_memory()
    found = machine(f"{given.threads} threads")
    print(machine_line(found), flush=True)
    compared = []
    for name in given.settings:
        networks = build_networks(SETTINGS[name])
        steps = {way: make_step(model) for way, model in networks.items()}
        first = {way: step() for way, step in steps.items()}
        assert abs(first[LOOP] - first[OURS]) < 1e-4 * first[OURS], first
        tokens = SAMPLES * SETTINGS[name].context
        blocks = {way: partial(tokens_per_second, step, tokens) for way, step in steps.items()}
        rates = take_turns(blocks, given.rounds, lambda _, rate: f"{rate:,.0f} tokens/s")
        compared.append(Comparison(f"{name}: tokens/s, fp32", rates, LOOP, form=",.0f"))
        against = {way: rates[way] for way in (DENSE, OURS)}
        compared.append(Comparison(f"{name}: tokens/s, fp32, as many active weights", against, DENSE, form=",.0f"))
    report(given, found, compared)


if __name__ == "__main__":
    main()
