"""The peers' data: a text as one number a character, windows of it as a Dataset, and the loss on its validation tail.

text = read_characters(Path("input.txt"))                 # first nine tenths to train on, the rest to validate on
loader = DataLoader(Windows(text.train), batch_size=12, shuffle=True)
validate(model, text.validation)                          # nats
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from benchmarks.peers.plain_loop import BLOCK, number_characters


class Characters(NamedTuple):
    """A text as numbers."""

    train: torch.Tensor
    validation: torch.Tensor
    vocabulary: int


def read_characters(file: Path) -> Characters:
    """A text's characters as int64, numbered in their order."""
    numbers, vocabulary = number_characters(file)
    ids = torch.from_numpy(numbers.astype(np.int64))
    cut = int(0.9 * len(ids))
    return Characters(ids[:cut], ids[cut:], vocabulary)


class Windows(Dataset[dict[str, torch.Tensor]]):
    """Windows of BLOCK characters and the characters that follow each, (T) each: all of them, or every n-th."""

    def __init__(self, ids: torch.Tensor, every: int = 1) -> None:
        self.ids, self.every = ids, every

    def __len__(self) -> int:
        return (len(self.ids) - 1 - BLOCK) // self.every + 1

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = index * self.every
        return {"ids": self.ids[start : start + BLOCK], "targets": self.ids[start + 1 : start + 1 + BLOCK]}


@torch.no_grad()
def validate(model: nn.Module, ids: torch.Tensor) -> float:
    """The mean loss in nats over consecutive windows."""
    model.eval()
    rows = (len(ids) - 1) // BLOCK
    inputs, targets = (ids[i : i + rows * BLOCK].view(rows, BLOCK) for i in (0, 1))
    total = sum(len(x) * float(model(x, y)) for x, y in zip(inputs.split(128), targets.split(128), strict=True))
    model.train()
    return total / rows
