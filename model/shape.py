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
    def rope_scaling(self) -> tuple[float, float, float, float] | None: ...
    @property
    def head_size(self) -> int: ...
    @property
    def qkv_bias(self) -> bool: ...
    @property
    def qk_norm(self) -> bool: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def gelu(self) -> Literal["exact", "tanh"]: ...
    @property
    def tied(self) -> bool | None: ...
    @property
    def linear(self) -> str: ...


def hidden_width(shape: DecoderShape) -> int:
    """The feed-forward's width: as set, else 4 C (gpt2) or 8/3 C rounded up to a multiple of 64 (llama)."""
    if shape.feed_forward:
        return shape.feed_forward
    return 4 * shape.width if shape.flavour == "gpt2" else -(-8 * shape.width // (3 * 64)) * 64


def head_size(shape: DecoderShape) -> int:
    """Numbers of a head's query, key or value: as set, else C / H."""
    return shape.head_size or shape.width // shape.heads


def query_width(shape: DecoderShape) -> int:
    """Numbers of all queries of a token, H D."""
    return shape.heads * head_size(shape)


def key_width(shape: DecoderShape) -> int:
    """Numbers of all keys of a token, G D, and of all values."""
    return (shape.kv_heads or shape.heads) * head_size(shape)


def is_tied(shape: DecoderShape) -> bool:
    """Whether the head is the embedding: as set, else as the flavour has it."""
    return shape.flavour == "gpt2" if shape.tied is None else shape.tied


def count_parameters(shape: DecoderShape, vocabulary_size: int) -> int:
    """Parameters of the decoder, tied ones once, without building it."""
    width, hidden, layers = shape.width, hidden_width(shape), shape.layers
    block = _attention_weights(shape) + 2 * width + shape.qk_norm * 2 * head_size(shape)
    if shape.bias or shape.qkv_bias:
        block += query_width(shape) + 2 * key_width(shape)
    outside = vocabulary_size * width * (1 if is_tied(shape) else 2) + width
    if shape.flavour == "llama":
        return layers * (block + 3 * width * hidden) + outside
    block += 2 * width * hidden
    if shape.bias:
        block += width + hidden + width + 2 * width
        outside += width
    return layers * block + outside + shape.context * width


def flops_per_token(shape: DecoderShape, vocabulary_size: int) -> float:
    """Operations to train on a token: 6 a matrix weight, 12 L H D T for attention (Chowdhery et al., 2022, app. B)."""
    feed_forward = (3 if shape.flavour == "llama" else 2) * shape.width * hidden_width(shape)
    matrices = shape.layers * (_attention_weights(shape) + feed_forward) + vocabulary_size * shape.width
    return 6.0 * matrices + 12.0 * shape.layers * query_width(shape) * shape.context


def _attention_weights(shape: DecoderShape) -> int:
    """Weights of a block's attention: queries, keys, values, and the output."""
    return shape.width * (2 * query_width(shape) + 2 * key_width(shape))
