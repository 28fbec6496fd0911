"""What a decoder must be told of itself, and what follows from it without building one.

`pipelines.config.Model` has all of these attributes, so the model needs no import from there.

    count_parameters(Model(width=768, layers=12, heads=12), vocabulary_size=50257)
"""

from typing import Literal, Protocol


class DecoderShape(Protocol):
    """Sizes and choices of a decoder; `pipelines.config.Model` documents each."""

    @property
    def flavour(self) -> Literal["gpt2", "llama"]: ...
    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def feed_forward(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def dropout(self) -> float: ...
    @property
    def bias(self) -> bool: ...
    @property
    def rope_theta(self) -> float: ...
    @property
    def linear(self) -> str: ...


def hidden_width(shape: DecoderShape) -> int:
    """The feed-forward's width: as set, else 4 C (gpt2) or 8/3 C rounded up to a multiple of 64 (llama)."""
    if shape.feed_forward:
        return shape.feed_forward
    return 4 * shape.width if shape.flavour == "gpt2" else -(-8 * shape.width // (3 * 64)) * 64


def count_parameters(shape: DecoderShape, vocabulary_size: int) -> int:
    """Parameters of the decoder, tied ones once, without building it."""
    width, hidden, layers = shape.width, hidden_width(shape), shape.layers
    grouped = 2 * (shape.kv_heads or shape.heads) * (width // shape.heads)
    attention = _attention_weights(shape)
    embedding = vocabulary_size * width
    if shape.flavour == "llama":
        return layers * (attention + 3 * width * hidden + 2 * width) + width + 2 * embedding
    biases = (width + grouped) + width + hidden + width + 2 * width if shape.bias else 0
    norms = 2 * width
    final = 2 * width if shape.bias else width
    return layers * (attention + 2 * width * hidden + norms + biases) + final + embedding + shape.context * width


def flops_per_token(shape: DecoderShape, vocabulary_size: int) -> float:
    """Operations to train on a token: 6 a matrix weight, 12 L C T for attention (Chowdhery et al., 2022, app. B)."""
    feed_forward = (3 if shape.flavour == "llama" else 2) * shape.width * hidden_width(shape)
    matrices = shape.layers * (_attention_weights(shape) + feed_forward) + vocabulary_size * shape.width
    return 6.0 * matrices + 12.0 * shape.layers * shape.width * shape.context


def _attention_weights(shape: DecoderShape) -> int:
    """Weights of a block's attention: queries, keys, values, and the output."""
    grouped = 2 * (shape.kv_heads or shape.heads) * (shape.width // shape.heads)
    return shape.width * (shape.width + grouped) + shape.width * shape.width
