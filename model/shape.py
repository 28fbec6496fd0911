"""What a network must be told of itself, and what follows from it without building one.

`raystride.pipelines.config.Model` has all of these attributes, so the model needs no import from there.

    count_parameters(Model(width=768, layers=12, heads=12), vocabulary_size=50257)
"""

from itertools import pairwise
from typing import Literal, Protocol

IGNORED = -100
"""The target that every loss leaves out; PyTorch's own default."""


class UnfitError(ValueError):
    """A setting that a network, its layout or its adapters cannot have: `setting` by its full name, and its `value`."""

    def __init__(self, message: str = "", *, setting: str = "", value: object = None) -> None:
        super().__init__(message)
        self.setting, self.value = setting, value


class DecoderShape(Protocol):
    """Sizes and choices of a decoder; `raystride.pipelines.config.Model` documents each."""

    @property
    def flavour(self) -> Literal["gpt2", "llama", "original"]: ...
    @property
    def norm(self) -> Literal["auto", "pre", "post", "sandwich"]: ...
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
    def softcap(self) -> float: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def gelu(self) -> Literal["exact", "tanh"]: ...
    @property
    def tied(self) -> bool | None: ...
    @property
    def window(self) -> int: ...
    @property
    def window_layers(self) -> tuple[int, ...]: ...
    @property
    def window_rope_theta(self) -> float: ...
    @property
    def unrotated_layers(self) -> tuple[int, ...]: ...
    @property
    def rotary_share(self) -> float: ...
    @property
    def rope_factor(self) -> float: ...
    @property
    def out_bias(self) -> bool: ...
    @property
    def query_scalar(self) -> int: ...
    @property
    def gate(self) -> Literal["silu", "gelu"]: ...
    @property
    def scaled_embedding(self) -> bool: ...
    @property
    def logit_softcap(self) -> float: ...
    @property
    def linear(self) -> str: ...


class ClassifierShape(DecoderShape, Protocol):
    """Sizes and choices of a classifier of texts: those of a decoder, and how it pools."""

    @property
    def pooling(self) -> Literal["mean", "first", "attention", "windows"]: ...
    @property
    def windows(self) -> tuple[int, ...]: ...
    @property
    def window_channels(self) -> int: ...


class TranslatorShape(DecoderShape, Protocol):
    """Sizes and choices of a translator: those of its decoder, and the encoder's layers."""

    @property
    def encoder_layers(self) -> int: ...


def hidden_width(shape: DecoderShape) -> int:
    """The feed-forward's width: as set, else 4 C, or 8/3 C rounded up to a multiple of 64 (llama)."""
    if shape.feed_forward:
        return shape.feed_forward
    return -(-8 * shape.width // (3 * 64)) * 64 if shape.flavour == "llama" else 4 * shape.width


def post_norm(shape: DecoderShape) -> bool:
    """Whether blocks normalise after each addition and not before each of their parts."""
    return shape.flavour == "original" if shape.norm == "auto" else shape.norm == "post"


def sandwich_norm(shape: DecoderShape) -> bool:
    """Whether blocks normalise before each of their parts and what each gives as well."""
    return shape.norm == "sandwich"


def window_of(shape: DecoderShape, layer: int) -> int:
    """The keys that a position of this block sees, its own among them; 0: all before it."""
    return shape.window if not shape.window_layers or layer in shape.window_layers else 0


def rotary_size(shape: DecoderShape) -> int:
    """How many numbers of a head are turned, an even number."""
    return int(head_size(shape) * shape.rotary_share)


def has_biases(shape: DecoderShape) -> bool:
    """Whether linear layers and LayerNorm have biases."""
    return shape.bias or shape.flavour == "original"


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
    return shape.flavour != "llama" if shape.tied is None else shape.tied


def count_parameters(shape: DecoderShape, vocabulary_size: int) -> int:
    """Parameters of the decoder, tied ones once, without building it."""
    embeddings = vocabulary_size * shape.width * (1 if is_tied(shape) else 2)
    return embeddings + _positions(shape) + shape.layers * _block(shape) + _final_norm(shape)


def classifier_parameters(shape: ClassifierShape, vocabulary_size: int, classes: int) -> int:
    """Parameters of the classifier, without building it."""
    pooling = shape.width if shape.pooling == "attention" else sum(window_sizes(shape))
    blocks = shape.layers * _block(shape) + _final_norm(shape)
    return vocabulary_size * shape.width + _positions(shape) + blocks + pooling + (pooled_width(shape) + 1) * classes


def pooled_width(shape: ClassifierShape) -> int:
    """Numbers that a classifier's head reads of a text."""
    return len(shape.windows) * shape.window_channels if shape.pooling == "windows" else shape.width


def window_sizes(shape: ClassifierShape) -> list[int]:
    """Numbers of each parameter of pooling by windows: weights and biases of each size."""
    if shape.pooling != "windows":
        return []
    return [each * shape.window_channels for size in shape.windows for each in (size * shape.width, 1)]


def flops_per_token(shape: DecoderShape, vocabulary_size: int, tokens: float | None = None) -> float:
    """Operations to train on a token: 6 a matrix weight, 12 L H D T for attention (Chowdhery et al., 2022, app. B).

    T is `tokens`, how long samples are; None: the context.
    """
    weights = shape.layers * matrices(shape) + vocabulary_size * shape.width
    return 6.0 * weights + 12.0 * shape.layers * query_width(shape) * (tokens or shape.context)


def classifier_flops_per_token(shape: ClassifierShape, tokens: float | None = None) -> float:
    """Operations to train on a token of a classifier, as `flops_per_token`; its head, once a text, is left out."""
    windows = sum(shape.windows) * shape.width * shape.window_channels if shape.pooling == "windows" else 0
    return flops_per_token(shape, 0, tokens) + 6.0 * windows


def attention_weights(shape: DecoderShape) -> int:
    """Weights of a block's attention: queries, keys, values, and the output."""
    return shape.width * (2 * query_width(shape) + 2 * key_width(shape))


def translator_parameters(shape: TranslatorShape, source_vocabulary: int, target_vocabulary: int | None = None) -> int:
    """Parameters of the translator, without building it; without `target_vocabulary` both languages share one."""
    words = source_vocabulary + (target_vocabulary or 0)
    blocks = (shape.encoder_layers or shape.layers) * _block(shape)
    blocks += shape.layers * (_block(shape) + _attention(shape) + _norm(shape))
    return words * shape.width + 2 * _positions(shape) + blocks + 2 * _final_norm(shape)


def translator_flops_per_token(shape: TranslatorShape, target_vocabulary: int, tokens: float | None = None) -> float:
    """Operations to train on a target token and on a source token beside it, where both sides have `tokens`."""
    encoder_layers = shape.encoder_layers or shape.layers
    weights = (encoder_layers + shape.layers) * matrices(shape) + shape.layers * attention_weights(shape)
    attentions = encoder_layers + 2 * shape.layers
    attention = 12.0 * attentions * query_width(shape) * (tokens or shape.context)
    return 6.0 * (weights + target_vocabulary * shape.width) + attention


def convnet_parameters(
    image: tuple[int, int, int], classes: int, *, channels: tuple[int, ...], hidden: tuple[int, ...]
) -> int:
    """Parameters of the convolutional network for images (channels, height, width), without building it."""
    return sum((inputs + 1) * outputs for inputs, outputs, _ in convnet_layers(image, classes, channels, hidden))


def convnet_flops(image: tuple[int, int, int], classes: int, *, channels: tuple[int, ...], hidden: tuple[int, ...]) -> float:
    """Operations to train on an image: 6 a weight and place where it is used."""
    layers = convnet_layers(image, classes, channels, hidden)
    return 6.0 * sum(inputs * outputs * places for inputs, outputs, places in layers)


def convnet_layers(
    image: tuple[int, int, int], classes: int, channels: tuple[int, ...], hidden: tuple[int, ...]
) -> list[tuple[int, int, int]]:
    """Numbers that an output is made of, outputs, and places of each layer: a convolution is a matrix at every pixel."""
    planes, height, width = image
    layers = []
    for outputs in channels:
        layers.append((9 * planes, outputs, height * width))
        planes = outputs
        if min(height, width) > 1:
            height, width = height // 2, width // 2
    widths = (planes * height * width, *hidden, classes)
    return layers + [(inputs, outputs, 1) for inputs, outputs in pairwise(widths)]


def matrices(shape: DecoderShape) -> int:
    """Weights of a block's matrices."""
    return attention_weights(shape) + (3 if shape.flavour == "llama" else 2) * shape.width * hidden_width(shape)


def _block(shape: DecoderShape) -> int:
    """Parameters of a block with one attention."""
    biases = hidden_width(shape) + shape.width if has_biases(shape) else 0
    own = query_width(shape) + 2 * key_width(shape) if shape.qkv_bias and not has_biases(shape) else 0
    own += shape.qk_norm * 2 * head_size(shape) + (shape.out_bias and not has_biases(shape)) * shape.width
    norms = (4 if sandwich_norm(shape) else 2) * _norm(shape)
    return matrices(shape) - attention_weights(shape) + biases + _attention(shape) + own + norms


def _attention(shape: DecoderShape) -> int:
    """Parameters of an attention to a memory, and of one to itself but for what Qwen adds."""
    biases = query_width(shape) + 2 * key_width(shape) + shape.width if has_biases(shape) else 0
    return attention_weights(shape) + biases


def _norm(shape: DecoderShape) -> int:
    return 2 * shape.width if has_biases(shape) else shape.width


def _final_norm(shape: DecoderShape) -> int:
    return 0 if post_norm(shape) else _norm(shape)


def _positions(shape: DecoderShape) -> int:
    """Learned positions, which only one flavour has."""
    return shape.context * shape.width if shape.flavour == "gpt2" else 0
