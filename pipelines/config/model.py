"""Settings of the network."""

from dataclasses import dataclass
from os.path import exists
from typing import ClassVar, Literal

from raystride.pipelines.config.section import Section, setting
from raystride.pipelines.files import absolute
from raystride.pipelines.hub import is_hub_name

LLAMA_ONLY = (
    "window_rope_theta", "unrotated_layers", "rotary_share", "rope_factor", "out_bias", "gate", "scaled_embedding",
)  # fmt: skip
"""Settings of `flavour llama` alone."""
DECODERS_ONLY = (
    "window", "unrotated_layers", "rotary_share", "rope_factor", "out_bias", "query_scalar", "gate", "scaled_embedding",
    "logit_softcap",
)  # fmt: skip
"""Settings of decoders alone."""


@dataclass(frozen=True, kw_only=True)
class Model(Section):
    """A transformer in the flavour of GPT-2, of Llama or of its first paper, or a convolutional network."""

    name: ClassVar[str] = "model"

    flavour: Literal["gpt2", "llama", "original"] = setting("gpt2", fixed=True)
    """`gpt2`: LayerNorm, learned positions, GELU, tied embeddings. `llama`: RMSNorm, RoPE, SwiGLU, grouped heads.

    `original` (Vaswani et al., 2017): LayerNorm after each addition, sinusoidal positions, ReLU, biases, tied embeddings."""
    norm: Literal["auto", "pre", "post", "sandwich"] = setting("auto", fixed=True)
    """Where a block normalises: before its parts (`pre`), or after each addition (`post`); `auto`: as the flavour has it.

    `sandwich`: before its parts, and what each of them gives before it is added, as Gemma 2 and 3 have it."""
    layers: int = setting(4, at_least=0, fixed=True)
    """Transformer blocks; of a translator, those of its decoder. 0: a classifier whose `pooling` is `windows` needs none."""
    encoder_layers: int = setting(0, at_least=0, fixed=True)
    """Blocks of a translator's encoder; 0: as many as `layers`."""
    heads: int = setting(4, at_least=1, fixed=True)
    """Query heads of each attention."""
    kv_heads: int = setting(0, at_least=0, fixed=True)
    """Key and value heads (grouped-query attention); 0: as many as query heads."""
    width: int = setting(128, at_least=1, fixed=True)
    """Width of the residual stream."""
    feed_forward: int = setting(0, at_least=0, fixed=True)
    """Hidden width of the feed-forward; 0: 4 x width, or 8/3 x width rounded up to a multiple of 64 (llama)."""
    context: int = setting(128, at_least=1, fixed=True)
    """Tokens that a sample predicts, and the longest attention."""
    dropout: float = setting(0.0, at_least=0, below=1, fixed=True)
    """Share of activations dropped in training, in embeddings, attention and residual branches."""
    bias: bool = setting(False, fixed=True)
    """Biases in linear layers and LayerNorm; `original` always has them."""
    rope_theta: float = setting(10000.0, above=0, fixed=True)
    """Base of the rotary frequencies."""
    pooling: Literal["mean", "first", "attention", "windows"] = setting("mean", fixed=True)
    """What a classifier reads of a text: the mean over its tokens, its first token, or a mean with learned weights.

    `windows`: convolutions over neighbouring tokens, and the maximum of each channel over the text (Kim, 2014)."""
    windows: tuple[int, ...] = setting((3, 4, 5), at_least=1, fixed=True)
    """With `pooling windows`, how many tokens each of its convolutions sees at once."""
    window_channels: int = setting(100, at_least=1, fixed=True)
    """Channels of each of those convolutions."""
    channels: tuple[int, ...] = setting((16, 32, 64), at_least=1, fixed=True)
    """Channels of each convolution of a convolutional network."""
    hidden: tuple[int, ...] = setting((512, 128), at_least=1, fixed=True)
    """Widths of a convolutional network's fully connected layers, without the last, which has one number a class."""
    rope_scaling: tuple[float, float, float, float] | None = setting(None, above=0, fixed=True)
    """Slower rotary frequencies for a longer context, as Llama 3.1 and later have them.

    A factor, a low and a high factor of frequency, and the context before: [8, 1, 4, 8192], for instance."""
    head_size: int = setting(0, at_least=0, fixed=True)
    """Numbers of each head's query, key and value; 0: width / heads."""
    qkv_bias: bool = setting(False, fixed=True)
    """Biases of self-attention's queries, keys and values, whatever model.bias is, as Qwen2 has them."""
    qk_norm: bool = setting(False, fixed=True)
    """RMSNorm over each head's query and key in self-attention, before rotary positions, as Qwen3 has it."""
    softcap: float = setting(0.0, at_least=0, fixed=True, since="0.2")
    """Bound of self-attention's scores, s becomes softcap tanh(s / softcap), as Gemma 2 has it (50); 0: none."""
    norm_eps: float = setting(1e-5, above=0, fixed=True)
    """What norms add to the variance or mean square before its root."""
    gelu: Literal["exact", "tanh"] = setting("exact", fixed=True)
    """GELU by the error function, or its approximation by tanh, with which OpenAI's GPT-2 was trained."""
    tied: bool | None = setting(None, fixed=True)
    """Whether a language model's head shares the embedding's weight; None: it does, but not with `llama`."""
    window: int = setting(0, at_least=0, fixed=True, since="0.2")
    """Sliding window of self-attention: so many tokens are seen, the own among them, as Mistral has it; 0: all before."""
    window_layers: tuple[int, ...] = setting((), at_least=0, fixed=True, since="0.2")
    """Which layers have the window, counted from 0, where others see all, as in Gemma 2 and 3; none named: all have it."""
    window_rope_theta: float = setting(0.0, at_least=0, fixed=True, since="0.2")
    """Base of the rotary frequencies in layers with the window, as Gemma 3 has it (10000), where neither rope_scaling nor
    rope_factor counts; 0: they are like the others."""
    unrotated_layers: tuple[int, ...] = setting((), at_least=0, fixed=True, since="0.2")
    """Layers without rotary positions (NoPE), counted from 0, as every fourth of SmolLM 3 is."""
    rotary_share: float = setting(1.0, above=0, at_most=1, fixed=True, since="0.2")
    """Share of each head's numbers that rotary positions turn, the first ones."""
    rope_factor: float = setting(1.0, above=0, fixed=True, since="0.2")
    """Rotary positions are divided by this, for a context longer by so much, as larger models of Gemma 3 have it (8)."""
    out_bias: bool = setting(False, fixed=True, since="0.2")
    """A bias of self-attention's output; with qkv_bias, what others call `attention_bias`."""
    query_scalar: int = setting(0, at_least=0, fixed=True, since="0.2")
    """Self-attention's scores are divided by its root, as Gemma has it; 0: by that of the head's size."""
    gate: Literal["silu", "gelu"] = setting("silu", fixed=True, since="0.2")
    """What the feed-forward's gate goes through with `llama`: SiLU, or GELU's approximation by tanh, as Gemma has it."""
    scaled_embedding: bool = setting(False, fixed=True, since="0.2")
    """What is embedded is multiplied by the root of the width, as Gemma has it; `original` always does so."""
    logit_softcap: float = setting(0.0, at_least=0, fixed=True, since="0.2")
    """Bound of the logits, l becomes logit_softcap tanh(l / logit_softcap), as Gemma 2 has it (30); 0: none."""
    init_from: str | None = setting(None, fixed=True)
    """A Hugging Face model in safetensors whose weights a new run starts with: a folder, a URI, or a name on the hub,
    `org/name` or `org/name@revision`. Of the families GPT-2, Llama, Qwen 2 and 3, Mistral, SmolLM, Phi-3, Gemma 2 and 3.

    The other settings must describe that model (the error names the flags that do), and `tokenizer.file` should be the one
    beside it, or the same name."""
    kernels: Literal["auto", "triton", "torch"] = setting("auto")
    """Attention and the other hot operations: our Triton kernels, or PyTorch's own; `auto` takes Triton on GPUs.

    `triton` without a GPU needs TRITON_INTERPRET=1, which runs kernels in Triton's interpreter: for proofs, very slowly."""
    attention: Literal["triton", "library", "auto"] = setting("triton", since="0.2")
    """Whose attention computes plain calls on GPUs, causal or full: our kernel, or what PyTorch has (`library`): cuDNN,
    FlashAttention-2, and 3 or 4 where installed. `auto`: on Hopper and Blackwell, in 16 bits, whichever a short timing finds
    faster when the run begins. Windows, lengths, packed documents and dropout are our kernel's, and with train.exact all."""
    linear: Literal["auto", "torch", "onednn"] = setting("auto")
    """Matrix products on CPUs in fp32: PyTorch's own, or oneDNN's. `auto`: whichever is faster for each shape and direction,
    which the first start on a machine measures; with train.exact PyTorch's own."""

    def __post_init__(self) -> None:
        """Raises SettingError where a field is out of range, sizes do not divide, or one does not go with the flavour."""
        super().__post_init__()
        if not self.head_size and self.width % self.heads:
            raise self.error("width", f"must be a multiple of model.heads, {self.heads}, unless model.head_size is set")
        if not self.layers and self.pooling != "windows":
            raise self.error("layers", "must be at least 1, unless model.pooling is `windows`, which can do without")
        if self.pooling == "windows" and not self.windows:
            raise self.error("windows", "must name at least one size")
        if self.kv_heads and self.heads % self.kv_heads:
            raise self.error("kv_heads", f"must divide model.heads, {self.heads}")
        if self.flavour == "llama" and self.head_size % 2:
            raise self.error("head_size", "must be even, which rotary positions need")
        if self.flavour == "llama" and not self.head_size and self.width // self.heads % 2:
            raise self.error("width", "must give every head an even size, which rotary positions need")
        if self.flavour == "original" and self.width % 2:
            raise self.error("width", "must be even, as sinusoidal positions are pairs")
        if self.flavour == "llama" and self.bias:
            raise self.error("bias", "must be false with model.flavour `llama`, whose layers have none")
        if self.flavour != "gpt2" and self.gelu != "exact":
            raise self.error("gelu", f"must be `exact` with model.flavour `{self.flavour}`, which has no GELU")
        if self.flavour != "llama" and self.rope_scaling:
            raise self.error("rope_scaling", f"must be None with model.flavour `{self.flavour}`, which does not rotate")
        if self.rope_scaling and self.rope_scaling[1] >= self.rope_scaling[2]:
            raise self.error("rope_scaling", "must have a low factor, its second number, below the high one, its third")
        self._check_layers()
        if self.init_from and not (is_hub_name(self.init_from) and not exists(self.init_from)):
            # Workers have other working directories than the one in which this was typed.
            object.__setattr__(self, "init_from", absolute(self.init_from))

    def _check_layers(self) -> None:
        """Raises SettingError for what only `llama` has, for layers that are not there, and heads that cannot be turned."""
        if self.flavour != "llama":
            for name in LLAMA_ONLY:
                if getattr(self, name) != getattr(Model, name):
                    raise self.error(name, f"must be {getattr(Model, name)} with model.flavour `{self.flavour}`")
            if self.norm == "sandwich":
                raise self.error("norm", f"must be `pre` or `post` with model.flavour `{self.flavour}`")
        for name in ("window_layers", "unrotated_layers"):
            if any(layer >= self.layers for layer in getattr(self, name)):
                raise self.error(name, f"must name layers from 0 to {self.layers - 1}, of model.layers {self.layers}")
        for name in ("window_layers", "window_rope_theta"):
            if getattr(self, name) and not self.window:
                raise self.error(name, f"must be {getattr(Model, name)} without model.window")
        if self.rope_factor != 1 and self.rope_scaling:
            raise self.error("rope_factor", "must be 1 with model.rope_scaling, which says how much slower")
        if self.rotary_share < 1 and (size := int((self.head_size or self.width // self.heads) * self.rotary_share)) % 2 + (
            not size
        ):
            raise self.error("rotary_share", f"must turn an even number of a head's numbers, not {size}")
