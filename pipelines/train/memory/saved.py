"""Bytes that the operations of a transformer's block save for their backward, and the backward's extra bytes.

In bytes a token. C is the width, Q that of all queries, K that of all keys, F the feed-forward's hidden width, H the heads,
T the context; p are the bytes of a number that products read and write, s those of the residual stream.

    norm          input C s; statistics 8 (LayerNorm) or 4 (RMSNorm), and without our kernels RMSNorm's normal rows C s
    attention     input C p, q k v (Q + 2 K) p, with rotary positions also the rotated q and k (Q + K) p; output Q p and
                  4 H of sums. Dropout without our kernels takes the plain formula: three copies Q p, three matrices H T p
                  Norms of q and k: 4 a head of statistics, (Q + K) p of results without rotation, and without our
                  kernels (Q + K) p of normal rows; with the plain formula also q k v, which it would free otherwise
    padding       without our kernels a mask, T p, and the output with fully masked rows cleared, Q p; the plain formula: T
    to a memory   q a token of the target, k and v one of the memory; autocast keeps a copy of it for each block
    feed-forward  input C p; ReLU: out F p; GELU: in and out 2 F p; SwiGLU and GeGLU: gate, up and out 3 F p, without our
                  kernels the activation of gate as well
    experts       input C p and as many rows of it, gates, ups, outs and results as a token has experts; about five
                  numbers an expert of the router and its losses, six indices a chosen one
    two ways      a bidirectional window uses a mask, as padding without our kernels
    sandwich      a norm after attention and after feed-forward: input and statistics as above
    dropout       a mask of C numbers: a byte each on GPUs, p on CPUs
    tensor        norms, masks and the stream of a worker's own tokens alone; attention and feed-forward read all, and the
                  gradients of their outputs and inputs exist for all tokens, twice while they are laid out

    saved = TransformerActivations(shape, Arithmetic(), tokens=8 * 128)
    saved.block().saved_bytes                                   # bytes
"""

from dataclasses import replace

from raystride.model.shape import (
    ENCODERS,
    DecoderShape,
    attention_weights,
    block_matrix_weights,
    expert_width,
    has_biases,
    head_size,
    hidden_width,
    idle_weights,
    is_gated,
    is_rotated,
    is_sandwich_norm,
    key_width,
    query_width,
)
from raystride.pipelines.train.memory.activations import FP32, Arithmetic, BlockMemory, PartMemory

_INDEX_BYTES = 8


class TransformerActivations:
    """Bytes of the parts of a transformer for `tokens` tokens; if they are `padded`, lengths mask some of them.

    `tensor_workers`: workers that share the tokens between attention and feed-forward; the shape is one worker's.
    """

    def __init__(
        self, shape: DecoderShape, arithmetic: Arithmetic, tokens: int, *, padded: bool = False, tensor_workers: int = 1
    ) -> None:
        self.shape, self.arithmetic, self.tokens, self._tensor_workers = shape, arithmetic, tokens, tensor_workers
        own_tokens = -(-tokens // tensor_workers)
        width, p = shape.hidden_size, arithmetic.matmul
        self._queries, self._keys, self._hidden = query_width(shape) * p, key_width(shape) * p, hidden_width(shape) * p
        if shape.experts:
            self._hidden = (shape.experts_per_token + shape.shared_experts) * expert_width(shape) * p
        self._rms, self._rotated, self._gated = shape.architecture == "llama", is_rotated(shape), is_gated(shape)
        self._mask = width * arithmetic.mask if shape.dropout else 0
        self._plain = bool(shape.dropout) and not arithmetic.kernels
        self._matrix = shape.heads * shape.context * p
        mask_bytes = shape.context if self._plain else shape.context * p + self._queries
        self._hiding = mask_bytes if not arithmetic.kernels or shape.architecture == "modernbert" else 0
        """Bytes that lengths add to an attention."""
        self._padding = padded * self._hiding
        norm = width * arithmetic.stream + (4 if self._rms else 8)
        norm += width * arithmetic.stream if self._rms and not arithmetic.kernels else 0
        self._post_norm = own_tokens * (norm + width * arithmetic.stream) if is_sandwich_norm(shape) else 0
        """The norm of a part's output, and that output."""
        self._read = own_tokens * norm + tokens * width * p
        """A norm, and the input of the product after it."""
        self._masks = own_tokens * self._mask
        self.stream = own_tokens * width * arithmetic.stream
        """The residual stream, or its gradient."""
        self.gathered_stream = tokens * width * arithmetic.stream if tensor_workers > 1 else 0.0
        """All tokens of a stream that is sharded over workers."""
        self.final_norm = self._read
        """The last norm, and the input of the head."""
        self.embedding_saved = tokens * self._mask + 2 * FP32 * shape.context * head_size(shape) * self._rotated
        self.embedding_saved += tokens * norm * (shape.architecture in ENCODERS)
        """Layers before the blocks."""

    def block(self) -> BlockMemory:
        """Returns the memory of a block with one attention."""
        feed_forward = self._feed_forward_part()
        parts = self._split_by_matrices(feed_forward) if self.shape.experts else (feed_forward,)
        return self._build_block((*parts, self._attention_part()), self._matmul_outputs(), self.stream)

    def _split_by_matrices(self, experts: PartMemory) -> tuple[PartMemory, ...]:
        """Returns a part per gradient of all experts' matrices: each is there when the next one is made."""
        matrix = experts.computing_gradients
        alone = PartMemory(0.0, experts.extra, matrix, matrix)
        return alone, alone, replace(experts, num_parameters=experts.num_parameters - 2 * matrix)

    def target_block(self, source: int) -> BlockMemory:
        """Returns the memory of a block that also has an attention to a memory of `source` tokens."""
        p, width, heads = self.arithmetic.matmul, self.shape.hidden_size, self.shape.heads
        queries, memory = self.tokens * self._queries, source * 2 * self._keys
        sums = self.tokens * (3 * self._matrix + self._queries if self._plain else 4 * heads)
        copies = source * 2 * self._queries if self._plain else memory
        saved = self._read + self._masks + self.tokens * self._hiding + 2 * queries + sums + copies
        saved += source * width * p * self.arithmetic.autocasts
        extra = max(self.tokens * self._matrix if self._plain else 2 * queries + memory, 2 * self.gathered_stream)
        sizes = cross_attention_sizes(self.shape)
        cross = PartMemory(saved, extra, sum(sizes), width * query_width(self.shape))
        matmul_outputs = (
            queries + memory + self.tokens * (width * p + (self._matrix if self._plain else self._queries + 4 * heads))
        )
        # The memory's gradient is held besides the stream's until the encoder uses it.
        gradient = self.stream + source * width * self.arithmetic.stream
        return self._build_block(
            (self._feed_forward_part(), cross, self._attention_part()), self._matmul_outputs() + matmul_outputs, gradient
        )

    def _build_block(self, parts: tuple[PartMemory, ...], matmul_outputs: float, gradient: float) -> BlockMemory:
        weights = block_matrix_weights(self.shape) + idle_weights(self.shape) // max(1, self.shape.layers)
        weights += attention_weights(self.shape) if len(parts) > 2 else 0
        return BlockMemory(self.stream, self.stream + matmul_outputs, parts, gradient, weights)

    def _attention_part(self) -> PartMemory:
        shape, queries, keys = self.shape, self._queries, self._keys
        qkv = queries + 2 * keys
        rotated = (queries + keys) * self._rotated
        attending = 3 * queries + 3 * self._matrix if self._plain else qkv + rotated + 4 * shape.heads
        if shape.qk_norm:
            attending += 4 * (shape.heads + (shape.kv_heads or shape.heads)) + qkv * self._plain
            attending += (queries + keys) * ((not self._rotated and not self._plain) + (not self.arithmetic.kernels))
        saved = self._read + self._post_norm + self._masks + self.tokens * (attending + queries + self._padding)
        extra = max(self.tokens * (self._matrix if self._plain else queries + qkv), 2 * self.gathered_stream)
        return PartMemory(saved, extra, sum(attention_sizes(shape)), shape.hidden_size * query_width(shape))

    def _feed_forward_part(self) -> PartMemory:
        shape, arithmetic = self.shape, self.arithmetic
        num_copies = 2 if shape.architecture in ("gpt2", "bert") else 1
        if self._gated:
            num_copies = 3 if arithmetic.kernels else 4
        saved = self._read + self._post_norm + self._masks + self.tokens * num_copies * self._hidden
        extra = self.tokens * (2 if self._gated else 1) * self._hidden
        extra += self.tokens * shape.hidden_size * arithmetic.matmul - self._masks if shape.dropout else 0
        largest, sizes = shape.hidden_size * hidden_width(shape), feed_forward_sizes(shape)
        if shape.experts:
            rows = shape.experts_per_token * shape.hidden_size * arithmetic.matmul
            largest = shape.experts * shape.hidden_size * expert_width(shape)
            saved += self.tokens * (2 * rows + 5 * FP32 * shape.experts + 6 * _INDEX_BYTES * shape.experts_per_token)
            extra += self.tokens * rows
        return PartMemory(saved, max(extra, 2 * self.gathered_stream), sum(sizes), largest)

    def _matmul_outputs(self) -> float:
        """Returns the bytes of the outputs of products and self-attention."""
        num_bytes = 2 * self._queries + 2 * self._keys + self.shape.hidden_size * self.arithmetic.matmul
        num_bytes += (2 if self._gated else 1) * self._hidden
        if self.shape.experts:
            num_bytes += self.shape.experts_per_token * self.shape.hidden_size * self.arithmetic.matmul
        return self.tokens * (num_bytes + (self._matrix if self._plain else self._queries + 4 * self.shape.heads))


def attention_sizes(shape: DecoderShape) -> list[int]:
    """Returns the numbers of each parameter of a block's attention, with the norm before it."""
    width, bias = shape.hidden_size, has_biases(shape)
    queries, qkv = query_width(shape), query_width(shape) + 2 * key_width(shape)
    sizes = norm_sizes(shape) + [width * qkv] + [qkv] * (bias or shape.qkv_bias)
    norms = [queries, key_width(shape)] if shape.qk_norm_joint else [head_size(shape)] * 2
    sizes += norms * shape.qk_norm + _linear_sizes(shape, queries, width)
    return sizes + [width] * (shape.out_bias and not bias) + norm_sizes(shape) * is_sandwich_norm(shape)


def cross_attention_sizes(shape: DecoderShape) -> list[int]:
    """Returns the numbers of each parameter of an attention to a memory, with the norm before it."""
    width, queries, keys = shape.hidden_size, query_width(shape), key_width(shape)
    layers = (
        _linear_sizes(shape, width, queries) + _linear_sizes(shape, width, 2 * keys) + _linear_sizes(shape, queries, width)
    )
    return norm_sizes(shape) + layers


def feed_forward_sizes(shape: DecoderShape) -> list[int]:
    """Returns the numbers of each parameter of a feed-forward, with the norm before it."""
    width, hidden = shape.hidden_size, hidden_width(shape)
    if shape.experts:
        matrix = width * expert_width(shape)
        router = [shape.experts * width] + [shape.experts] * (shape.router == "sigmoid")
        stacked = [shape.experts * matrix] * 3 + [shape.shared_experts * matrix] * (3 if shape.shared_experts else 0)
        return norm_sizes(shape) + router + stacked + norm_sizes(shape) * is_sandwich_norm(shape)
    into = _linear_sizes(shape, width, hidden) * (2 if is_gated(shape) else 1)
    return norm_sizes(shape) + into + _linear_sizes(shape, hidden, width) + norm_sizes(shape) * is_sandwich_norm(shape)


def norm_sizes(shape: DecoderShape) -> list[int]:
    """Returns the numbers of each parameter of a norm."""
    return [shape.hidden_size] * (2 if has_biases(shape) else 1)


def _linear_sizes(shape: DecoderShape, inputs: int, outputs: int) -> list[int]:
    return [inputs * outputs, outputs] if has_biases(shape) else [inputs * outputs]
