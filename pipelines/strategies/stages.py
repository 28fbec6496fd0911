"""A stage of a decoder: neighbouring blocks, with what stands before the first and behind the last of all stages.

stage = DecoderStage(model, range(0, 6), first=True, last=False)
stage.through(x, ids)                                     # the stream behind block 5
"""

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from raystride.model.block import build_rotation
from raystride.model.transformer import Decoder
from raystride.pipelines.strategies.feeding import Fed


class StepData(Protocol):
    """What stages look up in a step; see `pipeline`."""

    def fed(self, number: int) -> Fed: ...
    def inside(self, number: int) -> AbstractContextManager[None]: ...
    def loss(self, number: int, loss_sum: torch.Tensor, counted: torch.Tensor) -> torch.Tensor: ...
    def unload(self, buffer: torch.Tensor, number: int) -> torch.Tensor: ...
    def load(self, stream: torch.Tensor) -> torch.Tensor: ...


class DecoderStage(nn.Module):
    """Neighbouring blocks of a decoder, with what stands before the first and behind the last."""

    def __init__(self, model: Decoder, blocks: range, *, first: bool, last: bool) -> None:
        super().__init__()
        self.first, self.last = first, last
        self.blocks = nn.ModuleList(model.blocks[number] for number in blocks)
        self.ends = nn.ModuleDict(_ends(model, first=first, last=last))
        # The decoder holds all that is here; as a child it would have all that is not, too.
        self._numbers, self._decoder = blocks, (model,)
        self.step: StepData | None = None
        """Where a micro-batch is looked up."""

    @property
    def decoder(self) -> Decoder:
        """The network of which this is a stage."""
        return self._decoder[0]

    def forward(self, x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        """The stream before this stage, which the first does not look at -> the stream behind it, or the last one's loss.

        Both streams are in buffers, as they travel. `number` (1,) is that of a micro-batch of the step that is under way.
        """
        step, at = self.step, int(number)
        assert step is not None
        fed = step.fed(at)
        if not self.first:
            x = step.unload(x, at)
        with step.inside(at):
            x = self.through(x, fed.ids, fed.positions, documents=fed.documents)
            result = self.decoder.loss(x, fed.targets) if self.last else None
        return step.load(x) if result is None else step.loss(at, *result)

    def through(
        self, x: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor | None = None, **beside: Any
    ) -> torch.Tensor:
        """The same of ids (B, T), beside what blocks take: caches, mask, documents."""
        model = self.decoder
        caches, mask, documents = (beside.get(name) for name in ("caches", "mask", "documents"))
        if self.first:
            x = model.embed(ids, positions, documents)
        rotation = build_rotation(ids, model.shape, positions)
        for number, block in zip(self._numbers, self.blocks, strict=True):
            x = block(x, rotation, caches[number] if caches else None, mask, None, documents)
        return model.norm(x) if self.last else x  # type: ignore[no-any-return]


def _ends(model: Decoder, *, first: bool, last: bool) -> dict[str, nn.Module]:
    """What belongs to the stages at the ends; a tied embedding belongs to both."""
    found: dict[str, nn.Module | None] = {}
    if first:
        found |= {"embedding": model.embedding, "positions": model.positions}
    if last:
        found |= {"norm": model.norm, "head": model.embedding if model.head is None else model.head}
    return {name: each for name, each in found.items() if each is not None}
