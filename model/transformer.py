"""A decoder-only transformer, in the flavour of GPT-2 (Radford et al., 2019), of Llama (Touvron et al., 2023) or of the
first transformer (Vaswani et al., 2017).

Shapes: ids (B, T) -> logits (B, T, V), or with targets (B, T) -> the loss sum and the number of targets that count.

    model = Decoder(config.model, vocabulary_size=4096)
    loss_sum, counted = model(ids, targets)
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from raystride.model.attention import LayerCache, Rotation
from raystride.model.block import (
    Block,
    add_positions,
    build_final_norm,
    build_positions,
    build_rotation,
    initialize_weights,
)
from raystride.model.distillation import Distillation
from raystride.model.dropout import Dropout
from raystride.model.experts import Routing
from raystride.model.linear import Linear, Products, linear
from raystride.model.loss import capped_cross_entropy
from raystride.model.shape import IGNORED, DecoderShape, flops_per_token, is_tied
from raystride.triton_kernels.linear_cross_entropy import linear_cross_entropy

Loss = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class Decoder(nn.Module):
    """Embedding, blocks, norm and a head; its weight may be the embedding's."""

    def __init__(self, shape: DecoderShape, vocabulary_size: int) -> None:
        super().__init__()
        self.shape, self.vocabulary_size = shape, vocabulary_size
        self.cross_entropy: Loss = linear_cross_entropy
        """Loss from hidden states and the head's weight; replaced if a worker holds a part of the head."""
        self.products = Products(shape.linear)
        self.embedding = nn.Embedding(vocabulary_size, shape.hidden_size)
        self.positions = build_positions(shape)
        self.dropout = Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape, self.products, layer=layer) for layer in range(shape.layers))
        self.norm = build_final_norm(shape)
        self.head = None if is_tied(shape) else Linear(shape.hidden_size, vocabulary_size, products=self.products)
        if self.head is None:
            self.products.count_layer(vocabulary_size, shape.hidden_size)
        initialize_weights(self, shape, additions=2 * shape.layers)
        self.routing = Routing(self, shape) if shape.experts else None
        """Losses and loads of its experts."""
        self.distillation: Distillation | None = None
        """The teacher whose distribution is part of the loss in training."""

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the sum of cross-entropies in nats over targets other than -100, and their number."""
        return self._with_routing(self._loss_of(ids, targets), targets)

    def _loss_of(
        self, ids: torch.Tensor, targets: torch.Tensor, documents: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.hidden(ids, documents=documents)
        if self.distillation is None or not self.training:
            return self.loss(hidden, targets)
        return self.distillation.loss((ids, documents), hidden, self._head_weight().to(hidden.dtype), targets, self._project)

    def _with_routing(
        self, result: tuple[torch.Tensor, torch.Tensor], targets: torch.Tensor, documents: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a loss that has the gradients of the experts' losses as well; see `Routing`."""
        if self.routing is None or not self.training:
            return result
        return self.routing.add_losses(result[0], targets != IGNORED, documents), result[1]

    def loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the result of `forward` from the normalised last hidden states (B, T, C)."""
        product = partial(linear, products=self.products)
        head = self._head_weight().to(hidden.dtype)  # a frozen head may be stored in fewer bits
        if self.shape.logit_softcap:
            return capped_cross_entropy(hidden, head, targets, softcap=self.shape.logit_softcap, product=product)
        return self.cross_entropy(hidden, head, targets, product=product)

    def hidden(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor | None = None,
        caches: list[LayerCache] | None = None,
        mask: torch.Tensor | None = None,
        documents: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the normalised last hidden states (B, T, C) of ids (B, T); `positions` (B or 1, T) default to 0, 1, 2, ...

        `documents` (n + 1,) are the offsets of documents in all rows, with the end: documents do not see each other, and
        each has its own positions.
        """
        if documents is not None and positions is None:
            positions = document_positions(documents, ids.numel()).view(ids.shape)
        x, rotation = self.embed(ids, positions, documents), build_rotation(ids, self.shape, positions)
        return self.norm(self.forward_blocks(x, rotation, caches, mask, documents))  # type: ignore[no-any-return]

    def embed(
        self, ids: torch.Tensor, positions: torch.Tensor | None = None, documents: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns the input (B, T, C) of the first block."""
        x = add_positions(self.embedding(ids), self.shape, self.positions, positions)
        return self.dropout(x, documents)  # type: ignore[no-any-return]

    def forward_blocks(
        self,
        x: torch.Tensor,
        rotation: Rotation | None,
        caches: list[LayerCache] | None = None,
        mask: torch.Tensor | None = None,
        documents: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs the local blocks on the stream x (B, T, C)."""
        for layer, block in enumerate(self.blocks):
            x = block(x, rotation, caches[layer] if caches else None, mask, None, documents)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps hidden states (..., C) to logits (..., V)."""
        return self._project(hidden, self._head_weight())

    def _project(self, hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        found = linear(hidden, head, products=self.products)
        bound = self.shape.logit_softcap
        return bound * torch.tanh(found / bound) if bound else found

    def _head_weight(self) -> torch.Tensor:
        return self.embedding.weight if self.head is None else self.head.weight

    def flops_per_token(self) -> float:
        """Returns the FLOPs to train on a token, for samples as long as the context."""
        return flops_per_token(self.shape, self.vocabulary_size)


class PackedDecoder(Decoder):
    """A decoder trained on packed documents: the same network with document offsets as a further input."""

    def forward(  # type: ignore[override]
        self, ids: torch.Tensor, documents: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the same as `Decoder.forward`; `documents` (n + 1,) as in `hidden`."""
        return self._with_routing(self._loss_of(ids, targets, documents), targets, documents)


def document_positions(documents: torch.Tensor, tokens: int) -> torch.Tensor:
    """Returns each token's position in its document, (tokens,) int64, from document offsets (n + 1,)."""
    starts = documents[:-1].long().repeat_interleave(documents.diff(), output_size=tokens)
    return torch.arange(tokens, device=documents.device) - starts
