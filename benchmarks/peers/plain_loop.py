"""A character GPT and its training in one file of plain PyTorch, as nanoGPT does it: the peer of `benchmarks.training`.

The setting is nanoGPT's small one for CPUs (4 layers, 4 heads, 128 wide, block 64, batch 12). Shapes: ids (B, T), hidden
(B, T, C), logits (B, T, V). The last line printed is JSON: tokens a second and milliseconds a step after the first 20 steps.

    python -m benchmarks.peers.plain_loop --text input.txt --steps 500 --threads 2
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.peers.protocol import NETWORK

LAYERS, HEADS, WIDTH, BLOCK, BATCH = NETWORK
RATE, LOWEST_RATE, WARM_UP = 1e-3, 1e-4, 100
LEFT_OUT = 20
"""First steps that are not counted."""


class LayerNorm(nn.Module):
    """LayerNorm without a bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, C) -> (B, T, C)."""
        return F.layer_norm(x, self.weight.shape, self.weight, None, 1e-5)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.heads = nn.Linear(width, 3 * width, bias=False), heads
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, C) -> (B, T, C)."""
        b, t, c = x.shape
        q, k, v = (part.view(b, t, self.heads, c // self.heads).transpose(1, 2) for part in self.qkv(x).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(b, t, c)
        return self.out(y)  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and feed-forward, each on a normalised input and added to the stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = LayerNorm(width), LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, C) -> (B, T, C)."""
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Embeddings, blocks, and a head that shares the embedding's weight."""

    def __init__(
        self, vocabulary: int, layers: int = LAYERS, heads: int = HEADS, width: int = WIDTH, block: int = BLOCK
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(block, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.tokens.weight = self.head.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                adds_to_stream = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, 0.0, 0.02 / math.sqrt(2 * layers) if adds_to_stream else 0.02)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean loss in nats."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def number_characters(text: Path) -> tuple[np.ndarray, int]:
    """A text's characters as uint16, numbered in their order, and the size of the vocabulary."""
    content = text.read_text()
    characters = sorted(set(content))
    number = {character: i for i, character in enumerate(characters)}
    return np.array([number[character] for character in content], dtype=np.uint16), len(characters)


def write_tokens(text: Path, file: Path) -> int:
    """Writes the first nine tenths of a text as uint16, one a character; the size of the vocabulary."""
    ids, vocabulary = number_characters(text)
    ids[: int(0.9 * len(ids))].tofile(file)
    return vocabulary


def get_batch(tokens: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Random crops: ids and the ids that follow them, (B, T) each."""
    starts = torch.randint(len(tokens) - BLOCK, (BATCH,))
    ids = torch.stack([torch.from_numpy(tokens[i : i + BLOCK].astype(np.int64)) for i in starts])
    targets = torch.stack([torch.from_numpy(tokens[i + 1 : i + 1 + BLOCK].astype(np.int64)) for i in starts])
    return ids, targets


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW that decays matrices and no vectors."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.99), fused=True)


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine."""
    if step < WARM_UP:
        return RATE * (step + 1) / (WARM_UP + 1)
    done = (step - WARM_UP) / max(1, steps - WARM_UP)
    return LOWEST_RATE + 0.5 * (1 + math.cos(math.pi * done)) * (RATE - LOWEST_RATE)


def update(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ids: torch.Tensor,
    targets: torch.Tensor,
    rate: float,
    bf16: bool = False,
) -> torch.Tensor:
    """One optimiser step at a learning rate, gradients clipped to norm 1; the loss before it. `bf16`: by autocast."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss: torch.Tensor = model(ids, targets)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss


def train(text: Path, steps: int, bf16: bool) -> dict[str, float]:
    """Trains; tokens a second, milliseconds a step (median) and the last loss."""
    torch.manual_seed(1337)
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "train.bin"
        model = GPT(write_tokens(text, file))
        tokens = np.memmap(file, dtype=np.uint16, mode="r")
        optimizer = make_optimizer(model)
        loss, ends = 0.0, []
        for step in range(steps):
            found = update(model, optimizer, *get_batch(tokens), learning_rate(step, steps), bf16)
            if (step + 1) % 50 == 0:
                loss = found.item()
            ends.append(time.perf_counter())
    counted = np.diff(ends[LEFT_OUT - 1 :])
    return {
        "tokens_per_second": BATCH * BLOCK / float(counted.mean()),
        "step_ms": 1000 * statistics.median(counted.tolist()),
        "loss": loss,
    }


def main() -> None:
    """Trains on a text and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bf16", action="store_true", help="by autocast; else fp32")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    print(json.dumps(train(given.text, given.steps, given.bf16)))


if __name__ == "__main__":
    main()
