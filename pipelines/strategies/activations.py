"""What a decoder's forward and backward hold besides parameters, their gradients and the optimiser's state, at their worst.

Counted from what the operations save for their backward, in bytes a token. C is the width, Q that of all queries, K that of
all keys, F the feed-forward's hidden width, H the heads, T the context, V the vocabulary; p are the bytes of a number that
products read and write, s those of the residual stream.

    norm          input C s; statistics 8 (LayerNorm) or 4 (RMSNorm), and without our kernels RMSNorm's normal rows C s
    attention     input C p, q k v (Q + 2 K) p, with rotary positions the turned q and k (Q + K) p besides; output Q p and
                  4 H of sums. Dropout without our kernels takes the plain formula: three copies Q p, three matrices H T p
                  Norms of q and k: 4 a head of statistics, (Q + K) p of results where nothing turns them, and without our
                  kernels (Q + K) p of normal rows; q k v besides, where the plain formula would let them go
    feed-forward  input C p; ReLU: out F p; GELU: in and out 2 F p; SwiGLU: gate, up and out 3 F p, without our kernels
                  silu(gate) as well
    dropout       a mask of C numbers: a byte each on GPUs, p on CPUs

The most is held at one of these moments, which `moments` lists with the gradients that have come to be by then:

    loss          all layers, and three times the logits in fp32 (the loss's kernel instead: a chunk of them, and the
                  gradients of the hidden states and of the head, which it makes in the forward)
    block         all layers up to this one, the stream's gradient, and what its feed-forward or attention differentiates;
                  of the last two, where most activations are left, and of the first two, where most gradients are there
    embedding     its own gradient, and where the head shares its weight, the head's and their sum

With activation checkpointing a block's saved tensors exist while its backward runs, and before that only what is kept.

    held = moments(shape, vocabulary_size=4096, tokens=8 * 128, arithmetic=Arithmetic(), checkpointing="none")
    max(moment.activations for moment in held)                # bytes
"""

from dataclasses import dataclass
from typing import Literal

from model.shape import DecoderShape, has_biases, head_size, hidden_width, is_tied, key_width, post_norm, query_width

FP32 = 4
_CHUNKS, _SMALLEST_CHUNK, _ALIGNMENT = 8, 1024, 64
"""As `triton_kernels.linear_cross_entropy` has them, which cannot be imported where there is no PyTorch."""


@dataclass(frozen=True)
class Arithmetic:
    """What numbers are made of, and by what means they are computed."""

    stream: int = FP32
    """Bytes of a number of the residual stream."""
    product: int = FP32
    """Bytes of a number that products read and write."""
    kernels: bool = False
    """Our Triton kernels run."""
    mask: int = FP32
    """Bytes of a dropout mask's number."""

    @property
    def cast(self) -> bool:
        """Autocast: products work on copies of inputs and weights."""
        return self.stream != self.product


@dataclass(frozen=True)
class Moment:
    """A point of a step at which much is held."""

    activations: float
    """Bytes that are no parameter, no gradient of one and no state of the optimiser."""
    arisen: float = 0.0
    """Numbers of the gradients that this backward has made so far."""
    making: float = 0.0
    """Those of them that it is just making, which lie beside gradients that are there already."""
    place: Literal["forward", "loss", "block", "embedding"] = "loss"
    """Where: in the forward of the last block, or as above."""
    done: int = 0
    """Blocks whose backward is over."""


def half_sizes(shape: DecoderShape) -> tuple[list[int], list[int]]:
    """Numbers of each parameter of a block's attention and of its feed-forward, each with its norm before it."""
    width, hidden, bias = shape.width, hidden_width(shape), has_biases(shape)
    queries, qkv = query_width(shape), query_width(shape) + 2 * key_width(shape)

    def layer(inputs: int, outputs: int) -> list[int]:
        return [inputs * outputs, outputs] if bias else [inputs * outputs]

    norm = [width, width] if bias else [width]
    attention = norm + [width * qkv] + [qkv] * (bias or shape.qkv_bias)
    attention += [head_size(shape)] * (2 * shape.qk_norm) + layer(queries, width)
    return attention, norm + layer(width, hidden) * (2 if shape.flavour == "llama" else 1) + layer(hidden, width)


def parameter_sizes(shape: DecoderShape, vocabulary_size: int) -> list[int]:
    """Numbers of each parameter of the decoder, in its order."""
    attention, feed_forward = half_sizes(shape)
    norm = [] if post_norm(shape) else [shape.width] * (2 if has_biases(shape) else 1)
    embedding = [vocabulary_size * shape.width]
    positions = [shape.context * shape.width] if shape.flavour == "gpt2" else []
    head = [] if is_tied(shape) else embedding
    return embedding + positions + (attention + feed_forward) * shape.layers + norm + head


def moments(
    shape: DecoderShape, *, vocabulary_size: int, tokens: int, arithmetic: Arithmetic, checkpointing: str
) -> list[Moment]:
    """The moments of a micro-batch at which the most may be held."""
    saved = Saved(shape, arithmetic, tokens)
    head, last = vocabulary_size * shape.width, shape.layers - 1
    tied = is_tied(shape)
    # The gradient of a shared weight waits until the other use of it has come to its own.
    waiting, ahead = (FP32 * head, 0) if tied else (0, head)
    kept = {"none": saved.block, "selective": saved.products, "full": saved.input}[checkpointing]
    again = saved.block - kept
    # Autocast keeps its copies of weights until its block ends; computed again, only those of one block are there.
    copies = arithmetic.product * _matrices(shape) if arithmetic.cast else 0
    left: float = copies if checkpointing == "none" else copies / shape.layers
    below = saved.embedding + shape.layers * kept
    found = _loss(shape, saved, vocabulary_size, below + copies, arithmetic)
    found.append(Moment(below - kept, place="forward"))
    attention, feed_forward = map(sum, half_sizes(shape))
    down, out = shape.width * hidden_width(shape), shape.width * query_width(shape)
    for done in sorted({0, min(1, last), max(0, last - 1), last}):
        held: float = below - done * kept + again + waiting + saved.gradient
        held += left - (done * left / shape.layers if checkpointing == "none" else 0)
        arisen = ahead + done * (attention + feed_forward)
        found.append(Moment(held + saved.in_feed_forward, arisen + down, down, "block", done))
        held += saved.in_attention - saved.feed_forward
        found.append(Moment(held, arisen + feed_forward + out, out, "block", done))
    positions = shape.context * shape.width if shape.flavour == "gpt2" else 0
    everything = ahead + shape.layers * (attention + feed_forward) + head + positions
    held = saved.gradient + (2 * FP32 * head if tied else 0)
    found.append(Moment(held, everything, head, "embedding", shape.layers))
    return found


class Saved:
    """Bytes that a micro-batch's parts save for the backward, and that the backward needs for a while."""

    def __init__(self, shape: DecoderShape, arithmetic: Arithmetic, tokens: int) -> None:
        width, queries, keys, hidden = shape.width, query_width(shape), key_width(shape), hidden_width(shape)
        s, p, kernels = arithmetic.stream, arithmetic.product, arithmetic.kernels
        llama = shape.flavour == "llama"
        mask = width * arithmetic.mask if shape.dropout else 0
        matrix = shape.heads * shape.context * p
        plain = bool(shape.dropout) and not kernels
        statistics = 4 if llama else 8
        norm = width * s + statistics + (width * s if llama and not kernels else 0)
        qkv = (queries + 2 * keys) * p
        attending = 3 * queries * p + 3 * matrix if plain else qkv + (queries + keys) * p * llama + 4 * shape.heads
        if shape.qk_norm:
            attending += 4 * (shape.heads + (shape.kv_heads or shape.heads)) + qkv * plain
            attending += (queries + keys) * p * ((not llama and not plain) + (not kernels))
        saved = (3 if kernels else 4) if llama else 2 if shape.flavour == "gpt2" else 1
        inner = saved * hidden * p
        self.input = tokens * width * s
        """A block's input."""
        self.feed_forward = tokens * (norm + width * p + inner + mask)
        self.block = tokens * (norm + width * p + attending + queries * p + mask) + self.feed_forward
        outputs = qkv + (queries + width) * p + (2 if llama else 1) * hidden * p
        self.products = self.input + tokens * (outputs + (matrix if plain else queries * p + 4 * shape.heads))
        """What is kept of a block where products and attention are not computed again."""
        self.embedding = tokens * (width * arithmetic.mask if shape.dropout else 0)
        if llama:
            self.embedding += 2 * FP32 * shape.context * head_size(shape)
        self.final = tokens * (norm + width * p)
        """The last norm, and what the head reads."""
        self.gradient = tokens * width * s
        """The stream's."""
        self.in_feed_forward = tokens * ((2 if llama else 1) * hidden * p + (width * p - mask if shape.dropout else 0))
        """What a feed-forward's backward adds at most, with all of its inputs still there."""
        self.in_attention = tokens * (matrix if plain else queries * p + qkv)
        """The same of attention."""


def _loss(shape: DecoderShape, saved: Saved, vocabulary_size: int, below: float, arithmetic: Arithmetic) -> list[Moment]:
    """The loss and the head, on top of what the layers below keep."""
    width, p = shape.width, arithmetic.product
    tokens = saved.gradient // (width * arithmetic.stream)
    head = vocabulary_size * width
    tied = is_tied(shape)
    logits = tokens * vocabulary_size
    hidden = tokens * width * p
    below += saved.final
    if not arithmetic.kernels:
        made = Moment(below + p * logits + hidden + FP32 * head * tied, 0 if tied else head, 0 if tied else head)
        return [Moment(below + 3 * FP32 * logits), made]
    rows = min(tokens, max(_SMALLEST_CHUNK, -(-tokens // _CHUNKS)))
    chunk = p * rows * -(-vocabulary_size // _ALIGNMENT) * _ALIGNMENT
    several = rows < tokens
    # The hidden states are not saved, but are there until the loss is done; their gradient is.
    forward = below + hidden + chunk + head * (p + FP32 * several + p * arithmetic.cast)
    forward += tokens * width * arithmetic.stream * arithmetic.cast
    backward = below + hidden + head * (p + (p if arithmetic.cast else 0) + FP32 * tied)
    return [Moment(forward), Moment(backward, 0 if tied else head, 0 if tied else head)]


def _matrices(shape: DecoderShape) -> int:
    """Numbers of the blocks' matrices."""
    width, times = shape.width, 3 if shape.flavour == "llama" else 2
    return shape.layers * width * (2 * query_width(shape) + 2 * key_width(shape) + times * hidden_width(shape))
