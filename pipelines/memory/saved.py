"""What the operations of a transformer's block save for their backward, and what that backward takes besides.

In bytes a token. C is the width, Q that of all queries, K that of all keys, F the feed-forward's hidden width, H the heads,
T the context; p are the bytes of a number that products read and write, s those of the residual stream.

    norm          input C s; statistics 8 (LayerNorm) or 4 (RMSNorm), and without our kernels RMSNorm's normal rows C s
    attention     input C p, q k v (Q + 2 K) p, with rotary positions the turned q and k (Q + K) p besides; output Q p and
                  4 H of sums. Dropout without our kernels takes the plain formula: three copies Q p, three matrices H T p
                  Norms of q and k: 4 a head of statistics, (Q + K) p of results where nothing turns them, and without our
                  kernels (Q + K) p of normal rows; q k v besides, where the plain formula would let them go
    padding       without our kernels a mask, T p, and the output with what sees nothing cleared, Q p; the plain formula: T
    to a memory   q a token of the target, k and v one of the memory, of which autocast keeps a copy for each block
    feed-forward  input C p; ReLU: out F p; GELU: in and out 2 F p; SwiGLU: gate, up and out 3 F p, without our kernels
                  silu(gate) as well
    sandwich      a norm behind attention and behind feed-forward: input and statistics as above; GeGLU: gelu(gate) besides
    dropout       a mask of C numbers: a byte each on GPUs, p on CPUs
    tensor        norms, masks and the stream of a worker's own tokens alone; attention and feed-forward read all, and the
                  gradient of what they give, as of what they read, is there for all tokens, twice while it is laid out

    saved = Saved(shape, Arithmetic(), tokens=8 * 128)
    saved.block().saved                                       # bytes
"""

from raystride.model.shape import (
    DecoderShape,
    attention_weights,
    has_biases,
    head_size,
    hidden_width,
    key_width,
    matrices,
    query_width,
    sandwich_norm,
)
from raystride.pipelines.memory.activations import FP32, Arithmetic, BlockMemory, PartMemory


class Saved:
    """Bytes of the parts of a transformer that is given so many tokens, of which lengths hide some if they are `padded`.

    `shared`: workers of whom each has some of the tokens between attention and feed-forward; the shape is what one has.
    """

    def __init__(
        self, shape: DecoderShape, arithmetic: Arithmetic, tokens: int, *, padded: bool = False, shared: int = 1
    ) -> None:
        self.shape, self.arithmetic, self.tokens, self._shared = shape, arithmetic, tokens, shared
        own = -(-tokens // shared)
        width, p = shape.width, arithmetic.product
        self._queries, self._keys, self._hidden = query_width(shape) * p, key_width(shape) * p, hidden_width(shape) * p
        self._llama, self._mask = shape.flavour == "llama", width * arithmetic.mask if shape.dropout else 0
        self._plain = bool(shape.dropout) and not arithmetic.kernels
        self._matrix = shape.heads * shape.context * p
        hiding = shape.context if self._plain else shape.context * p + self._queries
        self._hiding = 0 if arithmetic.kernels else hiding
        """What lengths add to an attention."""
        self._padding = padded * self._hiding
        norm = width * arithmetic.stream + (4 if self._llama else 8)
        norm += width * arithmetic.stream if self._llama and not arithmetic.kernels else 0
        self._behind = own * (norm + width * arithmetic.stream) if sandwich_norm(shape) else 0
        """The norm of what a part of the block gives, and what it gave."""
        self._read = own * norm + tokens * width * p
        """A norm, and what the product after it reads."""
        self._masks = own * self._mask
        self.stream = own * width * arithmetic.stream
        """The residual stream, or its gradient."""
        self.gathered = tokens * width * arithmetic.stream if shared > 1 else 0.0
        """All tokens of a stream of which each worker has some."""
        self.final = self._read
        """The last norm, and what the head reads."""
        self.embedded = tokens * self._mask + 2 * FP32 * shape.context * head_size(shape) * self._llama
        """What comes before the blocks."""

    def block(self) -> BlockMemory:
        """A block with one attention."""
        return self._block((self._feed_forward(), self._attention()), self._products(), self.stream)

    def target_block(self, source: int) -> BlockMemory:
        """A block with an attention to a memory of so many tokens besides."""
        p, width, heads = self.arithmetic.product, self.shape.width, self.shape.heads
        queries, memory = self.tokens * self._queries, source * 2 * self._keys
        sums = self.tokens * (3 * self._matrix + self._queries if self._plain else 4 * heads)
        copies = source * 2 * self._queries if self._plain else memory
        saved = self._read + self._masks + self.tokens * self._hiding + 2 * queries + sums + copies
        saved += source * width * p * self.arithmetic.cast
        working = max(self.tokens * self._matrix if self._plain else 2 * queries + memory, 2 * self.gathered)
        sizes = cross_sizes(self.shape)
        cross = PartMemory(saved, working, sum(sizes), width * query_width(self.shape))
        products = (
            queries + memory + self.tokens * (width * p + (self._matrix if self._plain else self._queries + 4 * heads))
        )
        # What comes back to the memory waits beside the stream's gradient until the encoder takes it.
        gradient = self.stream + source * width * self.arithmetic.stream
        return self._block((self._feed_forward(), cross, self._attention()), self._products() + products, gradient)

    def _block(self, parts: tuple[PartMemory, ...], products: float, gradient: float) -> BlockMemory:
        weights = matrices(self.shape) + (attention_weights(self.shape) if len(parts) > 2 else 0)
        return BlockMemory(self.stream, self.stream + products, parts, gradient, weights)

    def _attention(self) -> PartMemory:
        shape, queries, keys = self.shape, self._queries, self._keys
        qkv = queries + 2 * keys
        turned = (queries + keys) * self._llama
        attending = 3 * queries + 3 * self._matrix if self._plain else qkv + turned + 4 * shape.heads
        if shape.qk_norm:
            attending += 4 * (shape.heads + (shape.kv_heads or shape.heads)) + qkv * self._plain
            attending += (queries + keys) * ((not self._llama and not self._plain) + (not self.arithmetic.kernels))
        saved = self._read + self._behind + self._masks + self.tokens * (attending + queries + self._padding)
        working = max(self.tokens * (self._matrix if self._plain else queries + qkv), 2 * self.gathered)
        return PartMemory(saved, working, sum(attention_sizes(shape)), shape.width * query_width(shape))

    def _feed_forward(self) -> PartMemory:
        shape, arithmetic = self.shape, self.arithmetic
        times = (
            (3 if arithmetic.kernels and shape.gate == "silu" else 4) if self._llama else 2 if shape.flavour == "gpt2" else 1
        )
        saved = self._read + self._behind + self._masks + self.tokens * times * self._hidden
        working = self.tokens * (2 if self._llama else 1) * self._hidden
        working += self.tokens * shape.width * arithmetic.product - self._masks if shape.dropout else 0
        largest, sizes = shape.width * hidden_width(shape), feed_forward_sizes(shape)
        return PartMemory(saved, max(working, 2 * self.gathered), sum(sizes), largest)

    def _products(self) -> float:
        """What products and self-attention give."""
        given = 2 * self._queries + 2 * self._keys + self.shape.width * self.arithmetic.product
        given += (2 if self._llama else 1) * self._hidden
        return self.tokens * (given + (self._matrix if self._plain else self._queries + 4 * self.shape.heads))


def attention_sizes(shape: DecoderShape) -> list[int]:
    """Numbers of each parameter of a block's attention, with the norm before it."""
    width, bias = shape.width, has_biases(shape)
    queries, qkv = query_width(shape), query_width(shape) + 2 * key_width(shape)
    sizes = norm_sizes(shape) + [width * qkv] + [qkv] * (bias or shape.qkv_bias)
    sizes += [head_size(shape)] * (2 * shape.qk_norm) + _layer(shape, queries, width)
    return sizes + [width] * (shape.out_bias and not bias) + norm_sizes(shape) * sandwich_norm(shape)


def cross_sizes(shape: DecoderShape) -> list[int]:
    """Numbers of each parameter of an attention to a memory, with the norm before it."""
    width, queries, keys = shape.width, query_width(shape), key_width(shape)
    layers = _layer(shape, width, queries) + _layer(shape, width, 2 * keys) + _layer(shape, queries, width)
    return norm_sizes(shape) + layers


def feed_forward_sizes(shape: DecoderShape) -> list[int]:
    """Numbers of each parameter of a feed-forward, with the norm before it."""
    width, hidden = shape.width, hidden_width(shape)
    into = _layer(shape, width, hidden) * (2 if shape.flavour == "llama" else 1)
    return norm_sizes(shape) + into + _layer(shape, hidden, width) + norm_sizes(shape) * sandwich_norm(shape)


def norm_sizes(shape: DecoderShape) -> list[int]:
    """Numbers of each parameter of a norm."""
    return [shape.width] * (2 if has_biases(shape) else 1)


def _layer(shape: DecoderShape, inputs: int, outputs: int) -> list[int]:
    return [inputs * outputs, outputs] if has_biases(shape) else [inputs * outputs]
