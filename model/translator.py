"""Encoder-decoder transformer for translation (Vaswani et al., 2017).

Shapes: source (B, S) of which the first lengths (B,) count, target_inputs and targets (B, T) -> the loss sum and the number
of targets that count. Padding at the end of a source or target changes nothing. Decoding is in `model.beam`.

    model = Translator(config.model, source_vocabulary=8192, target_vocabulary=None)
    loss_sum, counted = model(source, lengths, target_inputs, targets)
"""

from functools import partial

import torch
from torch import nn

from raystride.model.attention import LayerCache, Rotation
from raystride.model.block import (
    Block,
    add_positions,
    build_attention,
    build_feed_forward,
    build_final_norm,
    build_norm,
    build_positions,
    build_rotation,
    initialize_weights,
)
from raystride.model.cross_attention import CrossAttention, MemoryCache
from raystride.model.dropout import Dropout
from raystride.model.linear import Products, linear
from raystride.model.shape import TranslatorShape, has_biases, is_post_norm, translator_flops_per_token
from raystride.model.transformer import Loss
from raystride.triton_kernels.linear_cross_entropy import linear_cross_entropy


class TargetBlock(nn.Module):
    """A block of the decoder: causal attention, attention to the source, feed-forward, each added to the stream."""

    def __init__(self, shape: TranslatorShape, products: Products) -> None:
        super().__init__()
        self.post = is_post_norm(shape)
        self.norm1 = build_norm(shape, narrow=not self.post)
        self.attention = build_attention(shape, products)
        self.norm2 = build_norm(shape, narrow=not self.post)
        self.cross_attention = CrossAttention(
            width=shape.hidden_size,
            heads=shape.heads,
            kv_heads=shape.kv_heads or shape.heads,
            head_size=shape.head_size,
            bias=has_biases(shape),
            dropout=shape.dropout,
            products=products,
        )
        self.norm3 = build_norm(shape, narrow=not self.post)
        self.feed_forward = build_feed_forward(shape, products)
        self.dropout1, self.dropout2, self.dropout3 = (Dropout(shape.dropout) for _ in range(3))

    def forward(
        self,
        x: torch.Tensor,
        memory: torch.Tensor,
        lengths: torch.Tensor,
        rotation: Rotation | None,
        cache: LayerCache | None,
        memory_cache: MemoryCache | None,
    ) -> torch.Tensor:
        """(R, T, C) -> (R, T, C)."""
        if self.post:
            x, _ = self.norm1.add(self.dropout1(self.attention(x, rotation, cache)), x)
            x, _ = self.norm2.add(self.dropout2(self.cross_attention(x, memory, lengths, memory_cache)), x)
            x, _ = self.norm3.add(self.dropout3(self.feed_forward(x)), x)
            return x
        y, x = self.norm2.add(self.dropout1(self.attention(self.norm1(x), rotation, cache)), x)
        y, x = self.norm3.add(self.dropout2(self.cross_attention(y, memory, lengths, memory_cache)), x)
        return x + self.dropout3(self.feed_forward(y))  # type: ignore[no-any-return]


class DecodingState:
    """Decoding state of B sentences with R rows of translations, R a multiple of B.

    It has the memory (B, S, C) and lengths (B,) of the sources, and for each decoder layer a cache of the rows (capacity
    `longest` tokens) and one of the sentences.
    """

    def __init__(self, memory: torch.Tensor, lengths: torch.Tensor, layers: int, longest: int) -> None:
        self.memory, self.lengths = memory, lengths
        self.caches = [LayerCache(longest) for _ in range(layers)]
        self.memory_caches = [MemoryCache() for _ in range(layers)]

    def select(self, rows: torch.Tensor) -> None:
        """Keeps the rows at these indices, in this order; rows of a sentence must stay adjacent, and in it."""
        for cache in self.caches:
            cache.select(rows)

    def select_sentences(self, sentences: torch.Tensor) -> None:
        """Keeps the sentences at these indices; rows are selected by `select`."""
        self.memory, self.lengths = self.memory[sentences], self.lengths[sentences]
        for cache in self.memory_caches:
            cache.select(sentences)


class Translator(nn.Module):
    """Two embeddings or a shared one, the blocks of both sides, and a head that has the target embedding's weight."""

    def __init__(
        self,
        shape: TranslatorShape,
        source_vocabulary: int,
        target_vocabulary: int | None = None,
        *,
        label_smoothing: float = 0.0,
    ) -> None:
        """Without `target_vocabulary` both languages share a vocabulary, an embedding and the head (section 3.4)."""
        super().__init__()
        self.shape, self.label_smoothing = shape, label_smoothing
        self.vocabulary_size = target_vocabulary or source_vocabulary
        self.cross_entropy: Loss = linear_cross_entropy
        """As in `Decoder`."""
        self.products = Products(shape.linear)
        self.embedding = nn.Embedding(source_vocabulary, shape.hidden_size)
        self.target_embedding = None if target_vocabulary is None else nn.Embedding(target_vocabulary, shape.hidden_size)
        self.positions, self.target_positions = build_positions(shape), build_positions(shape)
        self.dropout, self.target_dropout = Dropout(shape.dropout), Dropout(shape.dropout)
        layers = shape.encoder_layers or shape.layers
        self.encoder = nn.ModuleList(Block(shape, self.products, causal=False) for _ in range(layers))
        self.encoder_norm = build_final_norm(shape)
        self.decoder = nn.ModuleList(TargetBlock(shape, self.products) for _ in range(shape.layers))
        self.norm = build_final_norm(shape)
        self.products.count_layer(*self._output_embedding().weight.shape)
        initialize_weights(self, shape, additions=2 * layers)
        # Once more: a block of the decoder adds to its stream three times, not twice.
        initialize_weights(self.decoder, shape, additions=3 * shape.layers)

    def forward(
        self, source: torch.Tensor, lengths: torch.Tensor, target_inputs: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the sum of cross-entropies in nats over targets other than -100, and their number.

        Labels are smoothed only in training (section 5.4); in evaluation mode the loss is plain.
        """
        hidden = self._decode_hidden(target_inputs, self.encode(source, lengths), lengths)
        smoothing = self.label_smoothing if self.training else 0.0
        product = partial(linear, products=self.products)
        return self.cross_entropy(
            hidden, self._output_embedding().weight, targets, label_smoothing=smoothing, product=product
        )

    def hidden(self, source: torch.Tensor, lengths: torch.Tensor, target_inputs: torch.Tensor) -> torch.Tensor:
        """Returns the normalised last hidden states (B, T, C) of targets (B, T), given sources (B, S)."""
        return self._decode_hidden(target_inputs, self.encode(source, lengths), lengths)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps hidden states (..., C) to logits (..., V)."""
        return linear(hidden, self._output_embedding().weight, products=self.products)

    def encode(self, source: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Returns the memory (B, S, C) of sources (B, S); undefined beyond a source's length."""
        x = self.dropout(add_positions(self.embedding(source), self.shape, self.positions))
        rotation = build_rotation(source, self.shape)
        for block in self.encoder:
            x = block(x, rotation, None, None, lengths)
        return self.encoder_norm(x)  # type: ignore[no-any-return]

    def decode(self, ids: torch.Tensor, decoding: DecodingState) -> torch.Tensor:
        """Returns the logits (R, V) after one more token (R,) of every row."""
        hidden = self._decode_hidden(ids[:, None], decoding.memory, decoding.lengths, decoding)[:, 0]
        return self.logits(hidden)

    def _decode_hidden(
        self, ids: torch.Tensor, memory: torch.Tensor, lengths: torch.Tensor, decoding: DecodingState | None = None
    ) -> torch.Tensor:
        """Returns the normalised last hidden states (R, T, C) of targets (R, T) that continue the cached ones."""
        positions = None
        if decoding is not None:
            past = decoding.caches[0].length
            positions = torch.arange(past, past + ids.shape[1], device=ids.device)[None]
        x = self.target_dropout(add_positions(self._output_embedding()(ids), self.shape, self.target_positions, positions))
        rotation = build_rotation(ids, self.shape, positions)
        for layer, block in enumerate(self.decoder):
            caches = (None, None) if decoding is None else (decoding.caches[layer], decoding.memory_caches[layer])
            x = block(x, memory, lengths, rotation, *caches)
        return self.norm(x)  # type: ignore[no-any-return]

    def _output_embedding(self) -> nn.Embedding:
        return self.embedding if self.target_embedding is None else self.target_embedding

    def flops_per_token(self) -> float:
        """Returns the FLOPs to train on a target token and a source token."""
        return translator_flops_per_token(self.shape, self._output_embedding().num_embeddings)
