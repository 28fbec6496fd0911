"""Shape settings of a network, and sizes and FLOPs without building it.

`raystride.pipelines.config.Model` has all of these attributes, so the model needs no import from there.

    flops_per_token(ModelConfig(hidden_size=768, layers=12, heads=12), vocabulary_size=50257)
"""

from itertools import pairwise
from typing import Literal, Protocol

ENCODERS = ("bert", "modernbert")
"""Flavours of bidirectional encoders, which do not generate."""
IGNORED = -100
"""The target that every loss ignores; PyTorch's own default."""


class UnfitError(ValueError):
    """A setting that does not fit a network, its layout or its adapters: its full name `setting`, and its `value`."""

    def __init__(self, message: str = "", *, setting: str = "", value: object = None) -> None:
        super().__init__(message)
        self.setting, self.value = setting, value


class DecoderShape(Protocol):
    """Sizes and choices of a decoder; `raystride.pipelines.config.Model` documents each."""

    @property
    def architecture(self) -> Literal["gpt2", "llama", "original", "bert", "modernbert"]: ...
    @property
    def family(self) -> str: ...
    @property
    def norm(self) -> Literal["auto", "pre", "post", "sandwich"]: ...
    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def ffn_size(self) -> int: ...
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
    def tie_embeddings(self) -> bool | None: ...
    @property
    def window(self) -> int: ...
    @property
    def window_layers(self) -> tuple[int, ...]: ...
    @property
    def window_rope_theta(self) -> float: ...
    @property
    def nope_layers(self) -> tuple[int, ...]: ...
    @property
    def rotary_fraction(self) -> float: ...
    @property
    def rope_factor(self) -> float: ...
    @property
    def out_bias(self) -> bool: ...
    @property
    def query_pre_attn_scalar(self) -> int: ...
    @property
    def gate(self) -> Literal["silu", "gelu"]: ...
    @property
    def scaled_embedding(self) -> bool: ...
    @property
    def logit_softcap(self) -> float: ...
    @property
    def linear(self) -> str: ...
    @property
    def experts(self) -> int: ...
    @property
    def experts_per_token(self) -> int: ...
    @property
    def shared_experts(self) -> int: ...
    @property
    def expert_ffn_size(self) -> int: ...
    @property
    def router(self) -> Literal["softmax", "softmax_normalized", "sigmoid"]: ...
    @property
    def balance_loss(self) -> float | None: ...
    @property
    def router_z_loss(self) -> float: ...
    @property
    def router_bias_rate(self) -> float: ...
    @property
    def qk_norm_joint(self) -> bool: ...


class ClassifierShape(DecoderShape, Protocol):
    """Sizes and choices of a classifier of texts: those of a decoder, and how it pools."""

    @property
    def pooling(self) -> Literal["mean", "first", "attention", "windows"]: ...
    @property
    def windows(self) -> tuple[int, ...]: ...
    @property
    def window_channels(self) -> int: ...
    @property
    def head_dense(self) -> Literal["none", "tanh", "relu", "gelu"]: ...


class TranslatorShape(DecoderShape, Protocol):
    """Sizes and choices of a translator: those of its decoder, and the encoder's layers."""

    @property
    def encoder_layers(self) -> int: ...


def hidden_width(shape: DecoderShape) -> int:
    """Returns the feed-forward's width: as set, else 4 C, or 8/3 C rounded up to a multiple of 64 (llama)."""
    if shape.ffn_size:
        return shape.ffn_size
    return -(-8 * shape.hidden_size // (3 * 64)) * 64 if shape.architecture == "llama" else 4 * shape.hidden_size


def expert_width(shape: DecoderShape) -> int:
    """Returns the hidden width of an expert: as set, else that of the feed-forward."""
    return shape.expert_ffn_size or hidden_width(shape)


def balance_loss(shape: DecoderShape) -> float:
    """Returns the factor of the balance loss: as set, else 0.01, or 0 for a router that balances by its bias."""
    if shape.balance_loss is None:
        return 0.0 if shape.router == "sigmoid" else 0.01
    return shape.balance_loss


def is_rotated(shape: DecoderShape) -> bool:
    """Returns whether positions are rotary."""
    return shape.architecture in ("llama", "modernbert")


def is_gated(shape: DecoderShape) -> bool:
    """Returns whether the feed-forward is gated: its activation is multiplied by another projection of the input."""
    return shape.architecture in ("llama", "modernbert")


def has_learned_positions(shape: DecoderShape) -> bool:
    """Returns whether each position has a learned vector, added to the embedding."""
    return shape.architecture in ("gpt2", "bert")


def has_first_norm(shape: DecoderShape, layer: int) -> bool:
    """Returns whether a block normalises the input of its attention; ModernBERT's first block gets a normalised input."""
    return shape.architecture != "modernbert" or layer > 0


def is_post_norm(shape: DecoderShape) -> bool:
    """Returns whether blocks normalise after each addition instead of before each of their parts."""
    return shape.architecture in ("original", "bert") if shape.norm == "auto" else shape.norm == "post"


def is_sandwich_norm(shape: DecoderShape) -> bool:
    """Returns whether blocks normalise both before and after each of their parts."""
    return shape.norm == "sandwich"


def layer_window(shape: DecoderShape, layer: int) -> int:
    """Returns the number of keys that a position of this block sees, its own included; 0: all before it."""
    return shape.window if not shape.window_layers or layer in shape.window_layers else 0


def rotary_size(shape: DecoderShape) -> int:
    """Returns the number of rotated dimensions of a head, an even number."""
    return int(head_size(shape) * shape.rotary_fraction)


def has_biases(shape: DecoderShape) -> bool:
    """Returns whether linear layers and LayerNorm have biases."""
    return shape.bias or shape.architecture in ("original", "bert")


def head_size(shape: DecoderShape) -> int:
    """Returns the dimension of a head: as set, else C / H."""
    return shape.head_size or shape.hidden_size // shape.heads


def query_width(shape: DecoderShape) -> int:
    """Returns the width of all queries of a token, H D."""
    return shape.heads * head_size(shape)


def key_width(shape: DecoderShape) -> int:
    """Returns the width of all keys (or all values) of a token, G D."""
    return (shape.kv_heads or shape.heads) * head_size(shape)


def is_tied(shape: DecoderShape) -> bool:
    """Returns whether the head is the embedding: as set, else as in the flavour."""
    return shape.architecture != "llama" if shape.tie_embeddings is None else shape.tie_embeddings


def pooled_width(shape: ClassifierShape) -> int:
    """Returns the input width of a classifier's head."""
    return len(shape.windows) * shape.window_channels if shape.pooling == "windows" else shape.hidden_size


def dense_sizes(shape: ClassifierShape) -> list[int]:
    """Returns the size of each parameter between a classifier's pooling and its head."""
    if shape.head_dense == "none":
        return []
    inputs = pooled_width(shape)
    sizes = [inputs * inputs] + [inputs] * has_dense_bias(shape)
    return sizes + ([inputs] * (2 if has_biases(shape) else 1) if shape.head_dense == "gelu" else [])


def has_dense_bias(shape: ClassifierShape) -> bool:
    """Returns whether the layer between pooling and the head has a bias; ModernBERT's has none."""
    return shape.head_dense != "gelu" or has_biases(shape)


def window_sizes(shape: ClassifierShape) -> list[int]:
    """Returns the size of each parameter of pooling by windows: weights and biases of each window size."""
    if shape.pooling != "windows":
        return []
    return [factor * shape.window_channels for size in shape.windows for factor in (size * shape.hidden_size, 1)]


def flops_per_token(shape: DecoderShape, vocabulary_size: int, tokens: float | None = None) -> float:
    """Returns FLOPs to train on a token: 6 a matrix weight, 12 L H D T for attention (Chowdhery et al., 2022, app. B).

    Of experts those count that a token uses. T is `tokens`, the length of samples; None: the context.
    """
    weights = shape.layers * block_matrix_weights(shape) + vocabulary_size * shape.hidden_size
    return 6.0 * weights + 12.0 * shape.layers * query_width(shape) * (tokens or shape.context)


def classifier_flops_per_token(shape: ClassifierShape, tokens: float | None = None) -> float:
    """Returns FLOPs to train on a token of a classifier, as `flops_per_token`; its head, used once a text, is left out."""
    windows = sum(shape.windows) * shape.hidden_size * shape.window_channels if shape.pooling == "windows" else 0
    return flops_per_token(shape, 0, tokens) + 6.0 * windows


def attention_weights(shape: DecoderShape) -> int:
    """Returns the number of weights of a block's attention: queries, keys, values, and the output."""
    return shape.hidden_size * (2 * query_width(shape) + 2 * key_width(shape))


def translator_flops_per_token(shape: TranslatorShape, target_vocabulary: int, tokens: float | None = None) -> float:
    """Returns FLOPs to train on a target token and a source token, if both sides have `tokens`."""
    encoder_layers = shape.encoder_layers or shape.layers
    weights = (encoder_layers + shape.layers) * block_matrix_weights(shape) + shape.layers * attention_weights(shape)
    attentions = encoder_layers + 2 * shape.layers
    attention = 12.0 * attentions * query_width(shape) * (tokens or shape.context)
    return 6.0 * (weights + target_vocabulary * shape.hidden_size) + attention


def convnet_flops(image: tuple[int, int, int], classes: int, *, channels: tuple[int, ...], hidden: tuple[int, ...]) -> float:
    """Returns FLOPs to train on an image: 6 for each weight at each of its positions."""
    layers = convnet_layers(image, classes, channels, hidden)
    return 6.0 * sum(inputs * outputs * places for inputs, outputs, places in layers)


def convnet_layers(
    image: tuple[int, int, int], classes: int, channels: tuple[int, ...], hidden: tuple[int, ...]
) -> list[tuple[int, int, int]]:
    """Returns (inputs, outputs, positions) of each layer: a convolution is a matrix at every pixel."""
    planes, height, width = image
    layers = []
    for outputs in channels:
        layers.append((9 * planes, outputs, height * width))
        planes = outputs
        if min(height, width) > 1:
            height, width = height // 2, width // 2
    widths = (planes * height * width, *hidden, classes)
    return layers + [(inputs, outputs, 1) for inputs, outputs in pairwise(widths)]


def block_matrix_weights(shape: DecoderShape) -> int:
    """Returns the number of weights in a block's matrices that a token uses: with experts, of its own ones."""
    if shape.experts:
        return attention_weights(shape) + shape.experts * shape.hidden_size + _expert_weights(shape, shape.experts_per_token)
    return attention_weights(shape) + (3 if is_gated(shape) else 2) * shape.hidden_size * hidden_width(shape)


def _expert_weights(shape: DecoderShape, experts: int) -> int:
    """Returns the weights of so many experts of a block, and of its shared ones."""
    return 3 * (experts + shape.shared_experts) * shape.hidden_size * expert_width(shape)


def idle_weights(shape: DecoderShape) -> int:
    """Returns the weights of a decoder's experts that a token does not use; its parameters less these are active."""
    if not shape.experts:
        return 0
    return shape.layers * (_expert_weights(shape, shape.experts) - _expert_weights(shape, shape.experts_per_token))
