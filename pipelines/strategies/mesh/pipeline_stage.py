"""A pipeline stage of a decoder: neighbouring blocks, with the modules before the first and behind the last of all stages.

stage = DecoderStage(model, range(0, 6), first=True, last=False)
stage.forward_blocks(x, ids)                              # the stream behind block 5
"""

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from raystride.model.block import build_rotation
from raystride.model.transformer import Decoder
from raystride.pipelines.strategies.mesh.context import LocalTokens


class StepData(Protocol):
    """Lookup of a step's micro-batches by stages; see `pipeline`."""

    def local_tokens(self, number: int) -> LocalTokens: ...
    def micro_batch_context(self, number: int) -> AbstractContextManager[None]: ...
    def loss(self, number: int, loss_sum: torch.Tensor, counted: torch.Tensor) -> torch.Tensor: ...
    def unpack_stream(self, buffer: torch.Tensor, number: int) -> torch.Tensor: ...
    def pack_stream(self, stream: torch.Tensor) -> torch.Tensor: ...


class DecoderStage(nn.Module):
    """Neighbouring blocks of a decoder, with the embedding if it is the first stage and the norm and head if it is the
    last."""

    def __init__(self, model: Decoder, blocks: range, *, first: bool, last: bool) -> None:
        super().__init__()
        self.first, self.last = first, last
        self.blocks = nn.ModuleList(model.blocks[number] for number in blocks)
        self.ends = nn.ModuleDict(_end_modules(model, first=first, last=last))
        # The decoder contains these modules; as a child it would add all other modules, too.
        self._numbers, self._decoder = blocks, (model,)
        self.step: StepData | None = None
        """Lookup of the current step's micro-batches."""

    @property
    def decoder(self) -> Decoder:
        """The network of this stage."""
        return self._decoder[0]

    def forward(self, x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        """Maps the stream before this stage (unused by the first) to the stream behind it, or to the last stage's loss.

        Both streams are in buffers, as they travel. `number` (1,) is that of a micro-batch of the current step.
        """
        step, index = self.step, int(number)
        assert step is not None
        local_tokens = step.local_tokens(index)
        if not self.first:
            x = step.unpack_stream(x, index)
        with step.micro_batch_context(index):
            x = self.forward_blocks(x, local_tokens.ids, local_tokens.positions, documents=local_tokens.documents)
            result = self.decoder.loss(x, local_tokens.targets) if self.last else None
        return step.pack_stream(x) if result is None else step.loss(index, *result)

    def forward_blocks(
        self, x: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor | None = None, **block_inputs: Any
    ) -> torch.Tensor:
        """Maps streams of ids (B, T), with optional inputs of blocks: caches, mask, documents."""
        model = self.decoder
        caches, mask, documents = (block_inputs.get(name) for name in ("caches", "mask", "documents"))
        if self.first:
            x = model.embed(ids, positions, documents)
        rotation = build_rotation(ids, model.shape, positions)
        for number, block in zip(self._numbers, self.blocks, strict=True):
            x = block(x, rotation, caches[number] if caches else None, mask, None, documents)
        return model.norm(x) if self.last else x  # type: ignore[no-any-return]


def _end_modules(model: Decoder, *, first: bool, last: bool) -> dict[str, nn.Module]:
    """Returns the modules of the first and last stages; a tied embedding belongs to both."""
    modules: dict[str, nn.Module | None] = {}
    if first:
        modules |= {"embedding": model.embedding, "positions": model.positions}
    if last:
        modules |= {"norm": model.norm, "head": model.embedding if model.head is None else model.head}
    return {name: module for name, module in modules.items() if module is not None}
